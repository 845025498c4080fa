"""Program that calls the operation on tensors that end, or begin, at a protected page.

tests/functional/test_guarded.py runs it for each instruction set; `full` chooses the whole table. AddressSanitizer detects every ordinary load and store, but
not the masked ones of AVX2 and AVX-512, which a compiler does not instrument. Here the processor detects them: the process dies
at the first access outside a tensor.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import addnorm
from support.cases import BASIC, DTYPES, FUNCTIONS, OPTIONS, Call, cotangents, leaves, make

FLOATS = ("float32", "bfloat16", "float16", "float64")
PAGE, NONE = mmap.PAGESIZE, 0
IN_PLACE = {"layer": addnorm.add_layer_norm_, "rms": addnorm.add_rms_norm_, "none": addnorm.add_residual_}
libc = ctypes.CDLL(None, use_errno=True)

# Widths below a vector, one vector, one more; the unrolled block with every tail; one row at a time, and pairs with a rest.
WIDTHS = (1, 3, 4, 5, 8, 9, 15, 16, 17, 33, 63, 65, 127, 4099)
FULL = [
    *((variant, dtypes, (3, d)) for variant in ("LayerNorm", "RMSNorm") for dtypes in DTYPES for d in WIDTHS),
    *((variant, dtypes, (1, 19)) for variant in BASIC for dtypes in DTYPES),
    *((variant, dtypes, (5, 19)) for variant in OPTIONS for dtypes in FLOATS),
]  # fmt: skip
# Each width in each dtype with one norm, each other variant in two dtypes in turn.
COVER = [
    *((("LayerNorm", "RMSNorm")[(i + j) % 2], dtypes, (3, d)) for i, dtypes in enumerate(DTYPES) for j, d in enumerate(WIDTHS)),
    *((variant, dtypes, (1, 19)) for i, variant in enumerate(BASIC) for dtypes in [*DTYPES][i % 5 :: 5]),
    *((variant, dtypes, (5, 19)) for i, variant in enumerate(OPTIONS) for dtypes in FLOATS[i % 2 :: 2]),
]  # fmt: skip


def guarded(t: Tensor, end: bool) -> Tensor:
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


def results(call: Call, tensors: dict[str, Tensor], grad_outputs: dict[str, Tensor]) -> list[Tensor]:
    outputs = call(tensors)
    torch.autograd.backward([outputs[name] for name in grad_outputs], list(grad_outputs.values()))
    tensors_out = [*outputs.values(), *(t.grad for t in tensors.values())]
    with torch.no_grad():
        tensors_out += call(tensors).values()
        if call.norm != "none":
            tensors_out.append(call.y_alone(tensors))
    return tensors_out


def in_given_memory(call: Call, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the buffers of the in-place form and of `out` after the calls; `place` allocates them."""
    tensors, eps = call.tensors, {} if call.norm == "none" else {"eps": call.eps}
    written = [place(t) for t in call().values()]
    out = written[0] if call.norm == "none" else tuple(written)
    both = {} if call.norm == "none" else {"return_residual": True}
    FUNCTIONS[call.norm](**tensors, **eps, **both, **call.options, out=out)
    if call.residual_dtype == tensors["residual"].dtype and call.out_dtype == tensors["branch"].dtype:
        tensors = {name: place(t) for name, t in tensors.items()}
        options = {name: value for name, value in call.options.items() if name not in ("residual_dtype", "out_dtype")}
        IN_PLACE[call.norm](**tensors, **eps, **options)
        written += [tensors["residual"], tensors["branch"]]
    return written


def main() -> int:
    print(addnorm.backends()[1].detail, flush=True)
    if sys.argv[1:] == ["beyond"]:  # an access that must crash, as proof of the protection
        ctypes.string_at(guarded(torch.ones(3), end=True).data_ptr() + 12, 1)
    table = FULL if sys.argv[1:] == ["full"] else COVER
    for variant, dtypes, shape in table:
        call = make(variant, dtypes, shape)
        grad_outputs = cotangents(call())
        expected = results(call, leaves(call), grad_outputs)
        expected += in_given_memory(call, Tensor.clone)
        for end in (True, False):
            print(f"{variant}, {dtypes}, {shape}, {'end' if end else 'begin'}", file=sys.stderr, flush=True)
            tensors = {name: guarded(t, end).requires_grad_() for name, t in call.tensors.items()}
            actual = results(call, tensors, {name: guarded(t, end) for name, t in grad_outputs.items()})
            actual += in_given_memory(call, partial(guarded, end=end))
            if not all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)):
                print(f"{variant}, {dtypes}, {shape}: other bits")
                return 1
    print(f"{len(table)} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
