"""The current `Value` of each tensor, through all in-place writes.

A write makes a new value of the written tensor. Other tensors of the same memory get new values when they are used next. One
copy of the memory for each write keeps the old contents. Tensors of the same bytes have the same contents; a write changes
another tensor only if their bytes overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from addnorm._util.torch_internals import FakeTensor
from addnorm.stream.dataflow.graph import DATA, Value


def disable_modes() -> AbstractContextManager[Any]:
    """Return a context in which no dispatch mode is active."""
    if torch._C._len_torch_dispatch_stack() or torch._ops._len_torch_dispatch_stack_pre_dispatch():
        return torch.utils._python_dispatch._disable_current_modes()
    return nullcontext()


class Region(NamedTuple):
    """Bytes of a storage that a tensor occupies: from `start` to `end`, in `steps` of (count, stride in bytes)."""

    start: int
    end: int
    steps: tuple[tuple[int, int], ...]  # the longest first, adjacent ones merged

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Region:
        """Return the region of a strided tensor."""
        item = tensor.element_size()
        dims = [(int(n), int(s) * item) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1 and s]
        steps: list[tuple[int, int]] = []
        for n, s in [*sorted(dims, key=lambda step: -step[1]), (item, 1)]:
            if steps and steps[-1][1] == n * s:
                steps[-1] = steps[-1][0] * n, s
            else:
                steps.append((n, s))
        start = int(tensor.storage_offset()) * item
        end = start + sum((n - 1) * s for n, s in steps) + 1 if tensor.numel() else start
        return cls(start, end, tuple(steps))

    def is_disjoint(self, other: Region) -> bool:
        """Return True if the regions share no byte, such as halves of the features; False if they may share one."""
        if self.end <= other.start or other.end <= self.start:
            return True
        if [s for _, s in self.steps] != [s for _, s in other.steps]:
            return False
        mine, theirs, above, disjoint = self.start, other.start, 0, False
        for (n, s), (m, _) in zip(self.steps, other.steps, strict=True):
            (i, mine), (j, theirs) = divmod(mine, s), divmod(theirs, s)
            if above and max(i + n, j + m) * s > above:  # the region continues in the next longer step
                return False
            disjoint |= i + n <= j or j + m <= i
            above = s
        return disjoint


ORDINARY = (Tensor, nn.Parameter)

# Largest memory, in bytes, of a parameter and of an input that is copied after the run.
MAX_PARAMETER_BYTES, MAX_INPUT_BYTES = 1 << 18, 1 << 26

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


class _Write(NamedTuple):
    region: Region
    value: Value
    layout: Layout


class _Bound(NamedTuple):
    tensor: Tensor  # kept alive, so that no id is used twice
    value: Value
    version: int  # number of writes to the tensor's memory that the value includes


class Memory:
    """Current value of every tensor, through all in-place writes.

    Args:
        add_leaf: returns the value of a tensor that no operator has computed.
        add_write: returns the value of a tensor whose memory has been written: `add_write(name, tensor, inputs, op, *layout)`.
            If the tensor has the bytes of the input in another order, `layout` is (strides of the input, shape and strides of the
            tensor). After a write to some bytes of the tensor, `layout` has one item: for each input and the tensor, its
            (first byte, (shape, strides)) in the memory.
        contents: whether to keep copies of contents that are overwritten.
    """

    def __init__(self, add_leaf: Callable[[Tensor], Value], add_write: Callable[..., Value], contents: bool) -> None:
        self._add_leaf = add_leaf
        self._add_write = add_write
        self._contents = contents
        self._bound: dict[int, _Bound] = {}  # by the id of the tensor
        self._live: dict[int, list[tuple[Value, Tensor]]] = {}  # by storage: values whose contents are still in memory
        self._writes: dict[int, list[_Write]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._bound

    def value(self, tensor: Tensor) -> Value:
        """Return the current `Value` of a tensor."""
        if tensor not in self and (isinstance(tensor, nn.Parameter) or not self._bind_alias(tensor)):
            self._add_leaf(tensor)
        _, value, version = self._bound[id(tensor)]
        writes = self._writes.get(storage_key(tensor), []) if self._writes else []
        return self._apply_writes(tensor, value, writes, version) if version < len(writes) else value

    def bind(self, tensor: Tensor, value: Value) -> None:
        """Set the value of a tensor that an operator returned or that existed before the run."""
        key = storage_key(tensor)
        self._bound[id(tensor)] = _Bound(tensor, value, len(self._writes.get(key, ())))
        self._live.setdefault(key, []).append((value, tensor))

    def save(self, tensor: Tensor) -> None:
        """Copy the memory of a tensor before a write. All values in this memory share the copy."""
        if self._contents:
            self._save_storage(storage_key(tensor))

    def _save_storage(self, key: int) -> None:
        live = self._live.pop(key, [])
        with disable_modes(), torch.no_grad():
            copy = None
            for value, tensor in live:
                if value.tensor is not tensor or not is_in_memory(tensor, value.shape):
                    continue
                if not is_strided(tensor):
                    value.tensor = tensor.detach().clone()
                    continue
                copy = tensor.untyped_storage().clone() if copy is None else copy
                value.tensor = _view_storage(copy, tensor)

    def record_write(self, tensor: Tensor) -> None:
        """Record a write to the memory of a tensor, after `bind` has set its new value."""
        writes = self._writes.setdefault(storage_key(tensor), [])
        with disable_modes():
            region, layout = (
                (Region.from_tensor(tensor), _get_layout(tensor))
                if is_strided(tensor)
                else (Region(0, 0, ()), ((), ()))
            )
        bound = self._bound[id(tensor)]
        writes.append(_Write(region, bound.value, layout))
        self._bound[id(tensor)] = bound._replace(version=len(writes))

    def copy_written(self) -> None:
        """Copy the values whose memory was written, since this memory is restored after the run."""
        for key in self._writes if self._contents else ():
            self._save_storage(key)

    def copy_leaves(self, leaves: Iterable[Value]) -> None:
        """Copy inputs and parameters of small memory, which the caller may change after the run."""
        for value in leaves if self._contents else ():
            tensor, most = value.tensor, MAX_INPUT_BYTES if value.kind == DATA else MAX_PARAMETER_BYTES
            if is_strided(tensor) and tensor.untyped_storage().nbytes() <= most:
                self._save_storage(storage_key(tensor))

    def _apply_writes(self, tensor: Tensor, value: Value, writes: list[_Write], version: int) -> Value:
        """Return the new value of a tensor after the writes to its memory that follow the first `version` writes."""
        self._bound[id(tensor)] = _Bound(tensor, value, len(writes))
        with disable_modes():
            region = Region.from_tensor(tensor)
        since: list[_Write] = []
        for write in reversed(writes[version:]):
            if write.region == region:
                since.append(write)
                break
            if not write.region.is_disjoint(region):
                since.append(write)
        if not since:
            return value
        own = _Write(region, value, _get_layout(tensor))
        parts = [*([] if since[-1].region == region else [own]), *reversed(since)]
        last = parts[-1].value.op
        assert last is not None
        if len(parts) == 1:
            new = self._add_alias(tensor, parts[0].value, parts[0].layout)
        else:
            places = tuple((part.region.start, part.layout) for part in (*parts, own))
            new = self._add_write("write_into", tensor, [part.value for part in parts], last, places)
        self.bind(tensor, new)
        return new

    def _add_alias(self, tensor: Tensor, value: Value, layout: Layout) -> Value:
        """Return a new value for a tensor that has the same bytes as another value, perhaps with permuted dimensions."""
        assert value.op is not None
        shape, stride = layout
        new = tuple(tensor.shape), tensor.stride()
        rearranged = shape != new[0] or stride != new[1]
        return self._add_write("alias", tensor, [value], value.op, *((stride, *new) if rearranged else ()))

    def _bind_alias(self, tensor: Tensor) -> bool:
        """Bind a new tensor to a value with the same bytes, as after a detour through numpy. Return whether it was bound."""
        key = storage_key(tensor)
        for value, other in reversed(self._live.get(key, [])):
            if (
                value.op is not None
                and other.dtype == tensor.dtype
                and storage_key(other) == key
                and _have_same_bytes(other, tensor)
            ):
                self.bind(tensor, self._add_alias(tensor, value, _get_layout(other)))
                return True
        return False


def _have_same_bytes(first: Tensor, second: Tensor) -> bool:
    with disable_modes():
        return is_strided(first) and is_strided(second) and Region.from_tensor(first) == Region.from_tensor(second)


def is_in_memory(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has this shape and its memory has not been freed, as FSDP frees gathered parameters."""
    if tensor.layout != torch.strided or tensor.is_nested or not _has_memory(tensor):
        return True
    if tuple(tensor.shape) != shape:
        return False
    end = int(tensor.storage_offset()) + sum((n - 1) * s for n, s in zip(shape, tensor.stride(), strict=True)) + 1
    return not tensor.numel() or bool(tensor.untyped_storage().nbytes() >= end * tensor.element_size())


def is_strided(tensor: Tensor) -> bool:
    """Return whether a tensor is strided, and its elements are stored as they are: not conjugated or negated lazily."""
    return tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg()) and _has_memory(tensor)


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the memory and the layout of a tensor; an empty tuple if the tensor is not strided."""
    if not is_strided(tensor):
        return ()
    return tensor.untyped_storage()._cdata, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def is_leaf(tensor: Tensor) -> bool:
    """Return whether a tensor is a leaf of autograd; False where torch raises, as for views whose memory was written."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has memory: False for a wrapper that hides its inner tensors."""
    if type(tensor) in ORDINARY or isinstance(tensor, FakeTensor):
        return True
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def _get_layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride()


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's memory: the address, which stays the same if the tensor passes through numpy."""
    if tensor.layout != torch.strided or not _has_memory(tensor):
        return -id(tensor)
    with (
        nullcontext() if type(tensor) in ORDINARY else disable_modes()
    ):  # no mode sees the storage of an ordinary tensor
        storage = tensor.untyped_storage()
        key: int = (0 if isinstance(tensor, FakeTensor) else storage.data_ptr()) or storage._cdata
        return key


def _view_storage(storage: Any, like: Tensor) -> Tensor:
    """Return a view of a storage with the layout of another tensor."""
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(
        storage, like.storage_offset(), like.shape, like.stride()
    )
