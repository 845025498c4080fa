"""Calls whose tensors end, or begin, at a page that may not be touched: what tests/test_guarded.py runs for each instruction set.

AddressSanitizer sees every ordinary load and store, but not the masked ones of AVX2 and AVX-512, which a compiler does not
instrument. Here it is the processor that sees them: the process dies at the first one outside a tensor.
"""

import ctypes
import mmap
import sys

import torch
from torch import Tensor

import addnorm
from cases import BASIC, DTYPES, FUNCTIONS, OPTIONS, Call, cotangents, leaves, make

PAGE, NONE = mmap.PAGESIZE, 0
libc = ctypes.CDLL(None, use_errno=True)

# Below a vector of any width, one, one more; the unrolled block with every tail; a row at a time, two, and one left.
TABLE = [
    *((variant, dtypes, (3, d)) for variant in ("LayerNorm", "RMSNorm") for dtypes in DTYPES for d in
      (1, 3, 4, 5, 8, 9, 15, 16, 17, 33, 63, 65, 127, 4099)),
    *((variant, dtypes, (1, 19)) for variant in BASIC for dtypes in DTYPES),
    *((variant, dtypes, (5, 19)) for variant in OPTIONS for dtypes in ("float32", "bfloat16", "float16", "float64")),
]  # fmt: skip


def guarded(t: Tensor, end: bool) -> Tensor:
    """A copy of t whose last byte is the last of its page, or whose first is the first; beyond it lies a forbidden page."""
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


def results(call: Call, tensors: dict[str, Tensor], given: dict[str, Tensor]) -> list[Tensor]:
    outputs = call(tensors)
    torch.autograd.backward([outputs[name] for name in given], list(given.values()))
    found = [*outputs.values(), *(t.grad for t in tensors.values())]
    with torch.no_grad():
        found += call(tensors).values()
        if call.norm != "none":
            found.append(call.y_alone(tensors))
    return found


def in_place(call: Call, tensors: dict[str, Tensor]) -> list[Tensor]:
    """What the in-place form leaves in the memory of residual and branch, where there is such a form."""
    function = getattr(addnorm, f"{FUNCTIONS[call.norm].__name__}_", None)
    fits = call.stream_dtype == tensors["residual"].dtype and call.out_dtype == tensors["branch"].dtype
    if function is None or not fits:
        return []
    eps = {} if call.norm == "none" else {"eps": call.eps}
    tensors = {name: t.detach() for name, t in tensors.items()}
    function(**tensors, **eps, **{n: v for n, v in call.options.items() if n not in ("stream_dtype", "out_dtype")})
    return [tensors["residual"], tensors["branch"]]


def main() -> int:
    print(addnorm.backends()[1].detail, flush=True)
    if sys.argv[1:] == ["beyond"]:  # the proof that a page is guarded
        ctypes.string_at(guarded(torch.ones(3), end=True).data_ptr() + 12, 1)
    for variant, dtypes, shape in TABLE:
        call = make(variant, dtypes, shape)
        given = cotangents(call())
        want = results(call, leaves(call), given)
        want_in_place = in_place(call, {name: t.clone() for name, t in call.tensors.items()})
        for end in (True, False):
            print(f"{variant}, {dtypes}, {shape}, {'end' if end else 'begin'}", file=sys.stderr, flush=True)
            tensors = {name: guarded(t, end).requires_grad_() for name, t in call.tensors.items()}
            got = results(call, tensors, {name: guarded(t, end) for name, t in given.items()})
            got_in_place = in_place(call, {name: guarded(t, end) for name, t in call.tensors.items()})
            pairs = zip(got + got_in_place, want + want_in_place, strict=True)
            if not all(torch.equal(a, b) for a, b in pairs):
                print(f"{variant}, {dtypes}, {shape}: other bits")
                return 1
    print(f"{len(TABLE)} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
