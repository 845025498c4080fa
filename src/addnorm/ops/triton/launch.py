"""Kernel launches on the tensors' device, with a fast path for kernels that are already compiled.

Triton examines every argument before each launch to find the compiled kernel, which takes several times as long as the launch.
Here one lookup finds it, by dtypes, constants, the pointers that are aligned to 16 bytes (all but those to a single number, see
`arguments.py`) and the strides that are not None. float64 arithmetic, whose numbers are constants, uses Triton's own launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

ALIGNED = 16  # Triton's compiler distinguishes addresses (in bytes) and strides (in elements) that are multiples of it
# AMD's compiler distinguishes more properties of an argument.
_CUDA = torch.version.hip is None
_compiled: dict[tuple[Any, ...], Any] = {}
_current_device = torch._C._cuda_getDevice if hasattr(torch._C, "_cuda_getDevice") else None


def aligned(t: Tensor) -> bool:
    """Return whether a tensor's address has the alignment of new memory, which lets the compiler load wide vectors."""
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
    """Launch `kernel(*tensors, *numbers, *strides, *counts, *constants)`.

    Args:
        kernel: a `triton.jit` function.
        grid: number of programs along each axis.
        tensors: tensors or None; all are on the device of the last one.
        numbers: floats or None; `tl.constexpr` for float64, since a kernel's float arguments are float32.
        strides: strides of rows, None where equal to the row length; multiples of ALIGNED.
        counts: integers for which the kernel is not specialized.
        constants: compile-time constants.
        warps: warps per program.
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
    # Without fused multiply-adds: the compiler would choose different ones for every combination of options, and so other bits.
    compiled = kernel[grid](*arguments, num_warps=warps, enable_fp_fusion=False)
    # The interpreter compiles nothing; a kernel with numbers as constants is valid only for these numbers.
    if key is not None and compiled is not None and not any(isinstance(n, tl.constexpr) for n in numbers):
        _compiled[key] = compiled
