"""Which value each tensor holds, told through every write in place, and a memory that is as it was when all is over.

A write makes a new value of the tensor that was written; the other tensors of that memory get theirs when they are used next.
What values had before is kept, by one copy of the memory for each write. Two tensors have the same numbers if they are the same
bytes; a write changes another tensor only if their bytes meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from addnorm.stream.dataflow.graph import Value

__all__ = ["Memory", "Region", "without_modes"]


@contextmanager
def without_modes() -> Iterator[None]:
    """What runs inside is seen by no mode."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield


class Region(NamedTuple):
    """The bytes of a tensor in its memory: where they begin and end, and in which steps (number, bytes) they lie."""

    start: int
    end: int
    steps: tuple[tuple[int, int], ...]  # the longest first; adjacent ones are one

    @classmethod
    def of(cls, tensor: Tensor) -> Region:
        """That of a strided tensor."""
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

    def apart(self, other: Region) -> bool:
        """Whether they surely have no byte in common: halves of the features have none."""
        if self.end <= other.start or other.end <= self.start:
            return True
        if [s for _, s in self.steps] != [s for _, s in other.steps]:
            return False
        mine, theirs, above, found = self.start, other.start, 0, False
        for (n, s), (m, _) in zip(self.steps, other.steps, strict=True):
            (i, mine), (j, theirs) = divmod(mine, s), divmod(theirs, s)
            if above and max(i + n, j + m) * s > above:  # it goes on in the next row
                return False
            found |= i + n <= j or j + m <= i
            above = s
        return found


Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


class _Write(NamedTuple):
    number: int
    region: Region
    value: Value
    layout: Layout


class Memory:
    """The values of tensors.

    Args:
        leaf: makes the value of a tensor that no operator has made.
        later: makes the value of a tensor whose memory was written since: `later(name, tensor, inputs, op, *layout)`, the layout
            (strides of the input, shape and strides of the tensor) where it is the same bytes in another order.
        contents: whether what is written over is kept, and put back in the end; tensors without numbers have nothing to keep.
    """

    def __init__(self, leaf: Callable[[Tensor], Value], later: Callable[..., Value], contents: bool = True) -> None:
        self._leaf = leaf
        self._later = later
        self._contents = contents
        self._values: dict[int, Value] = {}  # by the id of the tensor
        self._at: dict[int, int] = {}  # and how many writes to its memory it knows
        self._alive: list[Tensor] = []  # every tensor met, so that no id is used twice
        self._live: dict[int, list[tuple[Value, Tensor]]] = {}  # values that are in memory still, by storage
        self._writes: dict[int, list[_Write]] = {}
        self._given: set[int] = set()  # storages that were there before
        self._before: dict[int, tuple[Any, Any]] = {}  # those that were written, with a copy

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._values

    def value(self, tensor: Tensor) -> Value:
        """What it holds now."""
        value = self._values.get(id(tensor))
        if value is None:
            value = self._alias(tensor) or self._leaf(tensor)
        writes = self._writes.get(_storage(tensor)) if self._writes else None
        if not writes or self._at[id(tensor)] == writes[-1].number:
            return value
        return self._caught_up(tensor, value, writes)

    def bind(self, tensor: Tensor, value: Value) -> None:
        """Notes what an operator returned, or what was there before."""
        key = _storage(tensor)
        if id(tensor) not in self._values:
            self._alive.append(tensor)
        if value.op is None and key not in self._live and key not in self._writes:
            self._given.add(key)
        self._values[id(tensor)] = value
        writes = self._writes.get(key)
        self._at[id(tensor)] = writes[-1].number if writes else 0
        self._live.setdefault(key, []).append((value, tensor))

    def save(self, tensor: Tensor) -> None:
        """Copies what is about to be written, once for all values that are there."""
        if self._contents:
            self._keep(_storage(tensor))

    def _keep(self, key: int) -> None:
        live = self._live.pop(key, [])
        with without_modes(), torch.no_grad():
            copy = None
            for value, here in live:
                if value.tensor is not here:
                    continue
                if not _strided(here):
                    value.tensor = here.detach().clone()
                    continue
                copy = here.untyped_storage().clone() if copy is None else copy
                value.tensor = _on(copy, here)
                if key in self._given and key not in self._before:
                    self._before[key] = here.untyped_storage(), copy

    def wrote(self, tensor: Tensor) -> None:
        """The value that the tensor is bound to was written to its memory."""
        key = _storage(tensor)
        writes = self._writes.setdefault(key, [])
        number = writes[-1].number + 1 if writes else 1
        with without_modes():
            region, layout = (Region.of(tensor), _layout(tensor)) if _strided(tensor) else (Region(0, 0, ()), ((), ()))
        writes.append(_Write(number, region, self._values[id(tensor)], layout))
        self._at[id(tensor)] = number

    def restore(self) -> None:
        """What was there before is as it was."""
        for key in self._before:
            self._keep(key)  # what the model wrote there last
        with without_modes(), torch.no_grad():
            for storage, copy in self._before.values():
                if storage.nbytes() != copy.nbytes():
                    storage.resize_(copy.nbytes())
                storage.copy_(copy)

    def _caught_up(self, tensor: Tensor, value: Value, writes: list[_Write]) -> Value:
        """The value of a tensor whose memory was written by others."""
        at = self._at[id(tensor)]
        self._at[id(tensor)] = writes[-1].number
        with without_modes():
            region = Region.of(tensor)
        since: list[_Write] = []
        for write in reversed(writes):
            if write.number <= at:
                break
            if write.region == region:
                since.append(write)
                break
            if not write.region.apart(region):
                since.append(write)
        if not since:
            return value
        whole = since[-1].region == region
        inputs = [write.value for write in reversed(since)]
        last = since[0].value.op
        assert last is not None
        if whole and len(inputs) == 1:
            new = self._same(tensor, inputs[0], since[0].layout)
        else:
            new = self._later("write_into", tensor, inputs if whole else [value, *inputs], last)
        self.bind(tensor, new)
        return new

    def _same(self, tensor: Tensor, value: Value, layout: Layout) -> Value:
        """The value of a tensor that is the same bytes; in another order of dimensions, say."""
        assert value.op is not None
        shape, stride = layout
        new = tuple(tensor.shape), tensor.stride()
        rearranged = shape != new[0] or stride != new[1]
        return self._later("alias", tensor, [value], value.op, *((stride, *new) if rearranged else ()))

    def _alias(self, tensor: Tensor) -> Value | None:
        """The value of a tensor never seen that is the same bytes as one that was: one that went through numpy."""
        key = _storage(tensor)
        for value, other in reversed(self._live.get(key, [])):
            if (
                value.op is not None
                and other.dtype == tensor.dtype
                and _storage(other) == key
                and _same_bytes(other, tensor)
            ):
                new = self._same(tensor, value, _layout(other))
                self.bind(tensor, new)
                return new
        return None


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    with without_modes():
        return _strided(one) and _strided(other) and Region.of(one) == Region.of(other)


def _strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg())


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride()


def _storage(tensor: Tensor) -> int:
    """A number for its memory: where it is, so that what went through numpy is known again."""
    if tensor.layout != torch.strided:
        return -id(tensor)
    with without_modes():
        storage = tensor.untyped_storage()
        key: int = (0 if isinstance(tensor, FakeTensor) else storage.data_ptr()) or storage._cdata
        return key


def _on(storage: Any, like: Tensor) -> Tensor:
    """A tensor as another is, in that memory."""
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(
        storage, like.storage_offset(), like.shape, like.stride()
    )
