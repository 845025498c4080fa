"""Memory that tensors share, determined from the addresses of their elements.

The answers are exact for any strides: interleaved columns of one buffer share nothing, although their address ranges overlap.
Contiguous tensors are compared by their ranges, others by their contiguous pieces (rows of a slice, elements of a transposed
tensor), sorted by address.
"""

from __future__ import annotations

import torch
from torch import Tensor

from addnorm._util.torch_internals import FakeTensor


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether element i of `a` and element i of `b` have the same address, for all i."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.element_size() == b.element_size()
        and (a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous()))
    )


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether any element of `b` lies in the memory of `a`; the elements of `a` must not overlap each other."""
    if a.device != b.device or not (_has_addresses(a) and _has_addresses(b)):
        return False
    (a_begin, a_end), (b_begin, b_end) = _range(a), _range(b)
    if a_end <= b_begin or b_end <= a_begin:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    (a_starts, a_bytes), (b_starts, b_bytes) = _pieces(a), _pieces(b)
    a_starts = a_starts.sort().values
    # The last piece of a that begins before a piece of b ends: check whether they overlap.
    before = torch.searchsorted(a_starts, b_starts + b_bytes) - 1
    return bool((a_starts[before.clamp(min=0)] + a_bytes > b_starts)[before >= 0].any())


def overlaps_itself(t: Tensor) -> bool:
    """Return whether two elements of `t` share memory, as in an expanded tensor."""
    if not _has_addresses(t) or t.is_contiguous():
        return False
    starts, size = _pieces(t)
    return bool((starts.sort().values.diff() < size).any())


def _has_addresses(t: Tensor) -> bool:
    """Return whether each element has an address, given by strides: false for nested, sparse, meta and fake tensors."""
    return not t.is_nested and t.layout == torch.strided and t.device.type != "meta" and not isinstance(t, FakeTensor)


def _range(t: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and of the byte after the last; they are equal for an empty tensor."""
    begin = t.data_ptr()
    if t.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return begin, begin + (last + 1) * t.element_size()


def _pieces(t: Tensor) -> tuple[Tensor, int]:
    """Return the addresses at which the contiguous pieces of `t` begin, and the bytes of each piece."""
    size = t.element_size()
    dims = [(count, stride * size) for count, stride in zip(t.shape, t.stride(), strict=True) if count != 1]
    while dims and dims[-1][1] == size:
        size *= dims.pop()[0]
    starts = torch.tensor([t.data_ptr()], device="cpu")  # also if another device is the default
    for count, stride in dims:
        starts = (starts[:, None] + stride * torch.arange(count, device="cpu")).flatten()
    return starts, size
