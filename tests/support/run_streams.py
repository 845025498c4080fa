"""Program that checks a table of calls of `add_norm_streams`, as run_table.py and run_guarded.py do for the operation.

python tests/support/run_streams.py [cover]

Each call is compared with float64, and repeated on tensors that end, or begin, at a protected page, with the same bits. With
`cover` each width, number of streams, kind and mode occurs in some call. It prints the name of the backend that computed, then
one line for every error; the last line of stderr names the call that crashed.
"""

import itertools
import sys
import traceback
from dataclasses import replace

import torch

import addnorm
from addnorm.ops.streams.kinds import KINDS
from support.run_guarded import guarded
from support.stream_calls import StreamCall, assert_accurate, make_call, make_cotangents

f32, bf16, f16, f64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
MODES = ("write", "shared", "given", "features", "identity", "read")
# Below a vector, one more, a part of a chunk of sixteen streams and four of them, a last chunk of one feature.
WIDTHS = (1, 7, 33, 257, 1025)
STREAMS = range(1, 18)  # the kernels have up to 16
# Blocks and groups with every rest; from sixteen tokens on the projection is packed, from 33 on there are several parts.
ROWS = ((1,), (3,), (2, 9), (37,), (130,))
NORMS = ("layer", "rms", "none")
DTYPES = (
    {"dtype": f32},
    {"dtype": bf16},
    {"dtype": f16},
    {"dtype": bf16, "streams_dtype": f32, "out_dtype": f16},
    {"dtype": f32, "streams_dtype": bf16, "out_dtype": bf16},
    {"dtype": f16, "out_dtype": f64},
)


def make_table(cover: bool) -> list[tuple]:
    """Return the calls as arguments of `make_call`."""
    if cover:
        pairs = [*enumerate((n, kind) for n in STREAMS for kind in KINDS)][::2]
        chosen = [
            (n, WIDTHS[(i + n) % 5], ROWS[(i // 2) % 5], kind, MODES[(i + i // 5) % 6], i) for i, (n, kind) in pairs
        ]
        return [
            (n, min(d, 257 if n < 9 else 65), *rest) if rest[0] == (130,) or n > 8 else (n, d, *rest)
            for n, d, *rest in chosen
        ]
    cases = itertools.product(STREAMS, WIDTHS[:4], KINDS, MODES)
    return [(n, d, ROWS[(i + n) % 5], kind, mode, i) for i, (n, d, kind, mode) in enumerate(cases)]


def build(n: int, d: int, rows: tuple[int, ...], kind: str, mode: str, index: int) -> StreamCall:
    """Return a call of the table."""
    torch.manual_seed(index)
    options = DTYPES[(index + index // 7) % 6]
    # The LayerNorm of a few features may be that of a constant: its gradient is all cancellation.
    d = max(d, 33) if kind == "hyper" else d
    # The norm of one stream hardly depends on c: again cancellation. That of one feature u is its sign, with the slope
    # eps / (u^2 + eps)^1.5 up to 316 where the streams cancel, which multiplies the roundings of u.
    norm = NORMS[index % 3] if n > 1 and d > 1 else "none"
    return replace(make_call(n, d, rows, kind, mode=mode, norm=norm, **options), iterations=3)


def find_difference(call: StreamCall) -> list[str]:
    """Return the names of the results that have other bits beside a protected page."""
    cotangents = make_cotangents(call)
    expected, wrong = compute(call, call.tensors, cotangents), []
    for end in (True, False):
        tensors = {name: guarded(t, end) for name, t in call.tensors.items()}
        actual = compute(call, tensors, {name: guarded(t, end) for name, t in cotangents.items()})
        wrong += [name for name, t in actual.items() if not t.equal(expected[name])]
    return wrong


def compute(call: StreamCall, tensors: dict, cotangents: dict) -> dict:
    """Return outputs and gradients by name."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    outputs = call(leaves)
    used = [name for name in cotangents if outputs[name].requires_grad]
    torch.autograd.backward([outputs[name] for name in used], [cotangents[name] for name in used])
    return {**outputs, **{f"d{name}": t.grad for name, t in leaves.items() if t.grad is not None}}


def main() -> int:
    print(addnorm.backends()[1].detail, flush=True)
    table, failed = make_table(sys.argv[1:] == ["cover"]), 0
    for case in table:
        print(*case, file=sys.stderr, flush=True)
        call = build(*case)
        try:
            assert_accurate(call)
            # The reference has torch's matrix product, whose bits depend on the alignment.
            lines = find_difference(call) if case[0] <= 16 else []
        except Exception:
            lines = [traceback.format_exc(limit=-1)]
        if lines:
            print(*case, *lines, sep=", ")
            failed += 1
    print(f"{len(table)} calls, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
