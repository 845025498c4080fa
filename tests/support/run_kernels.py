"""Program that checks a table of calls with the kernels of one instruction set: the operation, n streams, or reads by attention.

python tests/support/run_kernels.py operation|streams|reads [cover]

Each call is compared with float64, and repeated on tensors that end, or begin, at a protected page: with the same bits, in all ways
to call. AddressSanitizer detects every ordinary load and store outside a tensor, but not the masked ones of AVX2 and AVX-512, which
a compiler does not instrument. Here the processor detects them, and the process dies. With `cover` every value of an axis of the
table occurs in some call. It prints the name of the backend that computed, then one line for every error; the last line of stderr
names the call that crashed. The word `beyond` instead of a table makes such an access, as proof of the protection.
"""

import ctypes
import itertools
import math
import mmap
import sys
import traceback
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import addnorm
from addnorm.ops import attend, cpu
from addnorm.ops.streams.kinds import GATE_KINDS
from support import accuracy, stream_calls
from support.cases import BASIC, DTYPES, OPTIONS, Call, bf16, cotangents, f16, f32, f64, leaves, make
from support.inplace_calls import in_place, into, nan
from support.oracle import UNIT
from support.stream_calls import MODES, StreamCall, make_call, make_cotangents, run

PAGE, NONE = mmap.PAGESIZE, 0
libc = ctypes.CDLL(None, use_errno=True)

# Below a vector, a vector, one more, blocks with and without a tail; chunks with and without a tail; rows that begin within a
# counter of the dropout mask.
NORMS = ("LayerNorm", "RMSNorm")
WIDTHS = (1, 3, 16, 64, 127, 200, 4099)
FLOAT = ("float32", "float64")
# Products of variants, dtypes and shapes, and the step at which a cover takes their rows: each value occurs, since the step has
# no common factor with the numbers of values of the axes after the first.
PRODUCTS = (
    (BASIC, DTYPES, ((70, 41), (1, 19)), 3),
    (NORMS, DTYPES, [(5, d) for d in WIDTHS], 3),
    (NORMS, FLOAT[:1], [(9, d) for d in range(1, 70)], 2),
    (NORMS, ("float16", "float64", "bfloat16"), ((300, 129),), 2),
    (OPTIONS, DTYPES, ((3, 3, 37),), 7),
    ([f"everything, {name}" for name in NORMS], FLOAT, [(7, d) for d in range(1, 70)], 4),
    ([f"everything, {name}" for name in NORMS], DTYPES, ((100, 67),), 1),
)
# Below a vector, one more, a part of a chunk of sixteen streams and four of them, a last chunk of one feature.
STREAM_WIDTHS = (1, 7, 33, 257, 1025)
STREAMS = range(1, 18)  # the kernels have up to 16
# Blocks and groups with every rest; from sixteen tokens on the projection is packed, from 33 on there are several parts.
ROWS = ((1,), (3,), (2, 9), (37,), (130,))
STREAM_DTYPES = (
    {"dtype": f32},
    {"dtype": bf16},
    {"dtype": f16},
    {"dtype": bf16, "streams_dtype": f32, "out_dtype": f16},
    {"dtype": f32, "streams_dtype": bf16, "out_dtype": bf16},
    {"dtype": f16, "out_dtype": f64},
)
# Sources, and queries, of reads by attention: below and beyond the lanes of a softmax.
READS = ((1, 1), (2, 3), (5, 1), (17, 2), (33, 1))
READ_DTYPES = ((f32,), (bf16,), (f16,), (f32, bf16, f16))


@dataclass(frozen=True)
class ReadCall:
    """A call of `attend_sources`: the query, the weight if there is one, and the sources, by name."""

    tensors: dict[str, Tensor]
    normed_values: bool
    leaves = StreamCall.leaves

    def __call__(self, tensors=None, compute=attend.AttendFunction.apply):
        """Return the reads by name, of `tensors` if they are given."""
        rows = dict(self.tensors if tensors is None else tensors)
        query = rows.pop("query")
        outputs = compute(query, rows.pop("weight", None), 1e-3, self.normed_values, *rows.values())
        return {f"read {r}": outputs[r] for r in range(len(query))}

    def assert_accurate(self):
        """Check reads and gradients: twice the error of torch's operators in float32, and some roundings (another order).

        A gradient is a sum whose terms cancel, since the gradients of the scores of a read add up to 0: it has as many roundings
        of the call's largest gradient, and those of a random walk over its terms, one for each source, and token if it is shared.
        """
        cotangents = make_cotangents(self)
        ours, theirs, exact = (
            run(call, self.leaves(dtype), cotangents)
            for call, dtype in (
                (self, None),
                (partial(self, compute=attend.reads_of), None),
                (partial(self, compute=attend.reads_of), f64),
            )
        )
        sizes = tree_map(stream_calls.worst, exact)
        largest = max(size for name, size in sizes.items() if name.startswith("d"))
        num_sources = sum(name.startswith("source") for name in self.tensors)
        num_tokens = self.tensors["source 0"].shape[:-1].numel()
        for name, value in ours.items():
            assert value.dtype == theirs[name].dtype, name
            size = largest if name.startswith("d") else sizes[name]
            roundings = 16 + math.isqrt(num_sources * (num_tokens if name in ("dquery", "dweight") else 1))
            bound = 2 * stream_calls.worst(theirs[name], exact[name])
            bound += roundings * UNIT[f32] * size + UNIT[value.dtype] * sizes[name]
            error = stream_calls.worst(value, exact[name])
            assert error <= bound, f"{name}: error {error:.3g}, bound {bound:.3g}"


def list_calls(cover):
    """Return the calls of the operation as arguments of `make`."""
    return [case for *axes, step in PRODUCTS for case in [*itertools.product(*axes)][:: step if cover else 1]]


def list_streams(cover):
    """Return the calls of n streams as arguments of `build_streams`."""
    if not cover:
        cases = itertools.product(STREAMS, STREAM_WIDTHS[:4], GATE_KINDS, MODES)
        return [(n, d, ROWS[(i + n) % 5], kind, mode, i) for i, (n, d, kind, mode) in enumerate(cases)]
    cases = []
    for i, (n, kind) in [*enumerate(itertools.product(STREAMS, GATE_KINDS))][::2]:
        d, rows = STREAM_WIDTHS[(i + n) % 5], ROWS[(i // 2) % 5]
        if rows == (130,) or n > 8:
            d = min(d, 257 if n < 9 else 65)
        cases.append((n, d, rows, kind, MODES[(i + i // 5) % 6], i))
    return cases


def build_streams(n, d, rows, kind, mode, index):
    """Return a call of the table."""
    torch.manual_seed(index)
    options = STREAM_DTYPES[(index + index // 7) % 6]
    # The LayerNorm of a few features may be that of a constant: its gradient is all cancellation.
    d = max(d, 33) if kind == "hyper" else d
    # The norm of one stream hardly depends on c: again cancellation. That of one feature u is its sign, with the slope
    # eps / (u^2 + eps)^1.5 up to 316 where the streams cancel, which multiplies the roundings of u.
    norm = ("layer", "rms", "none")[index % 3] if n > 1 and d > 1 else "none"
    return replace(make_call(n, d, rows, kind, mode=mode, norm=norm, **options), iterations=3)


def list_reads(cover):
    """Return the calls of `attend_sources` as arguments of `build_reads`; in a cover every two values of two axes meet."""
    cases = itertools.product((3, *STREAM_WIDTHS[1:]), READS, READ_DTYPES, ROWS, (False, True), (False, True))
    return [(d, *sizes, *others) for d, sizes, *others in [*cases][:: 23 if cover else 1]]


def build_reads(d, n, reads, dtypes, rows, has_weight, normed_values):
    """Return a call of the table; the sources' sizes differ."""
    torch.manual_seed(d * n)
    tensors = {"query": 2 * torch.randn(reads, d) / d**0.5} | ({"weight": torch.randn(d)} if has_weight else {})
    own = {f"source {j}": torch.randn(*rows, d).mul(0.5 + j / 4).to(dtypes[j % len(dtypes)]) for j in range(n)}
    return ReadCall(tensors | own, normed_values)


def guard(t, end):
    """Return a copy of t that ends at the end of its page, or begins at the start; a protected page lies beyond."""
    size = t.numel() * t.element_size()
    if size == 0:
        return t.clone()
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        if libc.mprotect(ctypes.c_void_p(first + page * PAGE), PAGE, NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = (pages + 1) * PAGE - size if end else PAGE
    copy = torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=offset).view(t.shape)
    return copy.copy_(t.detach())


def use(call, grad_outputs, place):
    """Yield the results of a call by name, and again in other ways to call; `place` allocates all tensors."""
    tensors = tree_map(lambda t: place(t).requires_grad_(), call.tensors)
    results = run(call, tensors, tree_map(place, grad_outputs))
    yield from results.items()
    if not isinstance(call, Call):
        return
    with torch.no_grad():
        yield from call(tensors).items()
        names = [name for name in ("y", "z") if name in results]
        out = tuple(place(nan(results[name])) for name in names)
        into(replace(call, tensors=tensors), out if len(out) > 1 else out[0])
        yield from zip(names, out, strict=True)
        if call.norm != "none":
            yield "y", call.y_alone(tensors)
        if call.residual_dtype == tensors["residual"].dtype and call.out_dtype == tensors["branch"].dtype:
            tensors = tree_map(place, tensors)
            yield from in_place(call.without_dtypes(), tensors).items()


def find_errors(call, has_bits):
    """Return one line for each error: first in the results, then in their bits elsewhere in memory."""
    grad_outputs = cotangents(call()) if isinstance(call, Call) else make_cotangents(call)
    expected = run(call, leaves(call), grad_outputs)
    lines = []
    try:
        if isinstance(call, Call):
            accuracy.assert_accurate(call, {name.removeprefix("d"): t for name, t in expected.items()}, grad_outputs)
        elif isinstance(call, StreamCall):
            stream_calls.assert_accurate(call)
        else:
            call.assert_accurate()
        places = {"": Tensor.clone, " at the end": partial(guard, end=True), " at the begin": partial(guard, end=False)}
        for where, place in places.items() if has_bits else ():
            results = use(call, grad_outputs, place)
            lines += [f"other bits of {name}{where}" for name, t in results if not t.equal(expected[name])]
    except Exception:
        lines.append(traceback.format_exc(limit=-1))
    return lines


TABLES = {
    "operation": (list_calls, make),
    "streams": (list_streams, build_streams),
    "reads": (list_reads, build_reads),
}


def main(table, *words):
    """Check the calls of a table; return 1 if one is wrong."""
    if table == "beyond":
        ctypes.string_at(guard(torch.ones(3), end=True).data_ptr() + 12, 1)
    print(addnorm.backends()[1].detail, flush=True)
    cover, failed = words == ("cover",), 0
    list_cases, build = TABLES[table]
    cases = list_cases(cover)
    for case in cases:
        print(*case, file=sys.stderr, flush=True)
        # The reference has torch's operators, whose bits may depend on the alignment. The kernels have up to 16 streams.
        lines = find_errors(build(*case), has_bits=cpu.ISA is not None and (table != "streams" or case[0] <= 16))
        if lines:
            print(*case, *lines, sep=", ")
            failed += 1
    print(f"{len(cases)} calls, {failed} wrong")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
