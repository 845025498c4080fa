"""Launching a kernel: on the tensors' device, and the second time without what Triton finds out anew at every call.

Triton looks at every argument before each launch to see whether it has compiled for its like, which takes several times as long
as to launch. What decides that here are the dtypes, the constants, which pointers are aligned to 16 bytes (all but those to a
single number, see `arguments.py`) and which strides there are: one lookup by these finds the compiled kernel. Arithmetic in
float64, whose numbers are constants, goes Triton's own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

ALIGNED = 16  # bytes of an address, and elements of a stride, that Triton tells its compiler of
# AMD's compiler looks at more of an argument than that.
_CUDA = torch.version.hip is None
_compiled: dict[tuple[Any, ...], Any] = {}
_current_device = torch._C._cuda_getDevice if hasattr(torch._C, "_cuda_getDevice") else None


def aligned(t: Tensor) -> bool:
    """Whether a tensor begins where fresh memory would, for the compiler."""
    return t.data_ptr() % ALIGNED == 0


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor | None],
    numbers: tuple[Any, ...],
    strides: tuple[int | None, ...],
    counts: tuple[int, ...],
    constants: tuple[Any, ...],
    warps: int,
) -> None:
    """Launches `kernel(*tensors, *numbers, *strides, *counts, *constants)`.

    Args:
        kernel: a `triton.jit` function.
        grid: how many programs along each axis.
        tensors: what the kernel has pointers to, None for what is not there; the first that is there says the device.
        numbers: floats, None for what is not there; `tl.constexpr` in float64, which no argument of Triton's is.
        strides: of rows, None where it is their length; multiples of ALIGNED.
        counts: integers that nothing is compiled for.
        constants: what the kernel is compiled for.
        warps: of a program.
    """
    unaligned, device = 0, -1
    dtypes: list[torch.dtype | None] = []
    for t in tensors:
        if t is None:
            dtypes.append(None)
        else:
            dtypes.append(t.dtype)
            unaligned = unaligned * 2 + (t.data_ptr() % ALIGNED != 0)
            device = t.get_device()
    if _current_device is not None and device >= 0 and device != _current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, tensors, numbers, strides, counts, constants, warps)
        return
    arguments = (*tensors, *numbers, *strides, *counts, *constants)
    key = None
    if _CUDA:
        widths = tuple([None if s is None else s < 2**31 for s in strides])  # passed in 32 bits, or in 64
        key = (id(kernel), device, constants, tuple(dtypes), unaligned, tuple([n.__class__ for n in numbers]), widths)
        compiled = _compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments)
            return
    # Without fused multiply-adds: the compiler would choose them anew for every combination of options, and with them the bits.
    compiled = kernel[grid](*arguments, num_warps=warps, enable_fp_fusion=False)
    # Interpreted there is nothing compiled; and one that has numbers for constants is compiled for these alone.
    if key is not None and compiled is not None and not any(isinstance(n, tl.constexpr) for n in numbers):
        _compiled[key] = compiled
