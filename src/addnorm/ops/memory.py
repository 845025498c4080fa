"""Who shares memory with whom, judged by the addresses of the elements.

Exact for any strides: interleaved columns of one buffer share nothing though their ranges of addresses cross. Contiguous tensors
are compared by their ranges; for others the bytes are marked, which costs a pass over them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def same(a: Tensor, b: Tensor) -> bool:
    """Whether element i of one lies exactly where element i of the other does."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.element_size() == b.element_size()
        and (a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous()))
    )


def shared(a: Tensor, b: Tensor) -> bool:
    """Whether any element of `b` lies in the memory of `a`, whose own elements do not overlap."""
    if a.device != b.device or a.device.type == "meta":
        return False
    (a_begin, a_end), (b_begin, b_end) = _range(a), _range(b)
    if a_end <= b_begin or b_end <= a_begin:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    begin = min(a_begin, b_begin)
    marks = torch.zeros(max(a_end, b_end) - begin, dtype=torch.bool)
    _bytes(marks, a, begin).fill_(True)
    return bool(_bytes(marks, b, begin).any())


def folds(t: Tensor) -> bool:
    """Whether two elements of `t` share memory, as those of an expanded tensor do."""
    if t.is_contiguous() or t.device.type == "meta":
        return False
    if any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True)):
        return True
    begin, end = _range(t)
    marks = torch.zeros(end - begin, dtype=torch.bool)
    _bytes(marks, t, begin).fill_(True)
    return int(marks.sum()) < t.nbytes


def _range(t: Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the one after the last; the same one twice where there is no element."""
    begin = t.data_ptr()
    if t.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return begin, begin + (last + 1) * t.element_size()


def _bytes(marks: Tensor, t: Tensor, begin: int) -> Tensor:
    """The bytes of `t` among `marks`, which begin at an address."""
    size = t.element_size()
    return marks.as_strided((*t.shape, size), (*(stride * size for stride in t.stride()), 1), t.data_ptr() - begin)
