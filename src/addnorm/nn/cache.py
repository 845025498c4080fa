"""The key-value cache of incremental decoding, for every attention of a stack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from addnorm._util.arguments import check_int

TOKENS = 3  # the dimension of tokens in (2, batch, heads, tokens, head_dim): stacked keys and values


@dataclass
class _Entry:
    """Keys and values of one attention: the first `length` tokens of `pairs`, which may have room for more."""

    pairs: Tensor
    length: int


class _Memory(NamedTuple):
    """Keys and values of the memory in one attention: sample i of `pairs` is sample order[i] of `source`, i if it is None."""

    source: Tensor
    pairs: Tensor
    order: Tensor | None = None


class KeyValueCache:
    r"""Keys and values of a decoder's earlier tokens, so that a call computes keys and values of its new tokens only.

    One cache serves a whole stack for one sequence of calls; each attention has its own entry. Self-attention appends its new
    tokens. Cross-attention computes keys and values of the memory once, and again only for another memory tensor (changing the
    same tensor in place has no effect).

    Without gradients, new tokens are written into preallocated memory, which doubles when it is full. With gradients, they are
    concatenated, so that the gradient reaches all earlier tokens. With a cache, masks have an entry for every key, also those of
    earlier calls.

    Args:
        capacity: the number of tokens to allocate at first.

    Example:
        >>> decoder = addnorm.nn.Decoder(2, 16, 4, cross_attention=False).eval()
        >>> x, cache = torch.randn(1, 5, 16), addnorm.nn.KeyValueCache()
        >>> steps = [decoder(token, cache=cache) for token in x.split(1, dim=1)]
        >>> torch.testing.assert_close(torch.cat(steps, dim=1), decoder(x))
        >>> cache.length
        5
    """

    def __init__(self, capacity: int = 64) -> None:
        check_int("capacity", capacity, 0)
        self.capacity = capacity
        self._tokens: dict[nn.Module, _Entry] = {}
        self._memories: dict[nn.Module, _Memory] = {}

    @property
    def length(self) -> int:
        """The number of cached tokens."""
        length = 0
        for entry in self._tokens.values():  # a plain loop: compiled graphs do not break at it
            length = max(length, entry.length)
        return length

    def length_of(self, attention: nn.Module) -> int:
        """Return the number of tokens that are cached for an attention."""
        entry = self._tokens.get(attention)
        return 0 if entry is None else entry.length

    def extend(self, attention: nn.Module, pairs: Tensor) -> Tensor:
        """Append keys and values of new tokens, `(2, batch, heads, tokens, head_dim)`, and return the pairs of all tokens."""
        entry = self._tokens.get(attention)
        if entry is None or entry.length == 0:
            entry = _Entry(pairs.narrow(TOKENS, 0, 0), 0)
        elif entry.pairs.shape[1] != pairs.shape[1]:
            raise ValueError(
                f"x has a batch of {pairs.shape[1]}, expected {entry.pairs.shape[1]}, that of the cache: cache.reorder(index) "
                "selects, repeats and drops samples of it, cache.clear() empties it."
            )
        past, length = entry.length, entry.length + pairs.shape[TOKENS]
        old = entry.pairs.narrow(TOKENS, 0, past)
        if torch.is_grad_enabled():
            joined = torch.cat([old, pairs], TOKENS) if past else pairs
            self._tokens[attention] = _Entry(joined, length)
            return joined
        buffer = entry.pairs
        if (
            past == 0
            or length > buffer.shape[TOKENS]
            or (buffer.is_inference() and not torch.is_inference_mode_enabled())
        ):
            shape = list(pairs.shape)
            shape[TOKENS] = max(self.capacity, length, 2 * past)
            buffer = pairs.new_empty(shape)
            buffer.narrow(TOKENS, 0, past).copy_(old)
        buffer.narrow(TOKENS, past, length - past).copy_(pairs)
        self._tokens[attention] = _Entry(buffer, length)
        return buffer.narrow(TOKENS, 0, length)

    def recall(self, attention: nn.Module, memory: Tensor | None, needs_grad: bool = False) -> Tensor | None:
        """Return the keys and values of `memory` that are cached for an attention, or None. `memory` None means the last memory.

        The result is also None if `needs_grad` and the cached tensors have no gradient, so that they are computed again.
        """
        entry = self._memories.get(attention)
        if entry is None or (memory is not None and not _is_same(memory, entry.source)):
            return None
        pairs = entry.pairs
        grad_enabled = torch.is_grad_enabled()
        if memory is not None and grad_enabled and (pairs.is_inference() or (needs_grad and not pairs.requires_grad)):
            return None
        return pairs

    def reorder_pairs(self, attention: nn.Module, memory: Tensor, pairs: Tensor) -> Tensor:
        """Return keys and values of the memory in the order of `reorder`, if the entry of the attention is of this memory."""
        order = self._order_of(attention, memory)
        return pairs if order is None else pairs.index_select(0, order.clone())  # `order` may be an inference tensor

    def remember(self, attention: nn.Module, memory: Tensor, pairs: Tensor) -> None:
        """Store keys and values of the memory, `(batch, keys, 2, heads, head_dim)`, in the order of `reorder_pairs`."""
        self._memories[attention] = _Memory(memory, pairs, self._order_of(attention, memory))

    def _order_of(self, attention: nn.Module, memory: Tensor) -> Tensor | None:
        entry = self._memories.get(attention)
        return entry.order if entry is not None and _is_same(memory, entry.source) else None

    def reorder(self, index: Tensor) -> None:
        """Replace sample i by sample index[i] in all entries, as beam search needs after each choice of beams.

        The number of samples may change: `torch.arange(batch).repeat_interleave(beams)` gives each sample its beams. Entries of
        the memory are reordered too, so that the next call may pass the same memory as before, or None.

        Args:
            index: int64, `(new batch,)`.
        """
        for attention, entry in self._tokens.items():
            self._tokens[attention] = _Entry(entry.pairs.index_select(1, index), entry.length)
        for attention, (source, pairs, order) in self._memories.items():
            joined = index if order is None else order.index_select(0, index)
            self._memories[attention] = _Memory(source, pairs.index_select(0, index), joined)

    def state(self) -> tuple[dict[nn.Module, _Entry], dict[nn.Module, _Memory]]:
        """Return the current entries, for `restore`."""
        return dict(self._tokens), dict(self._memories)

    def restore(self, state: tuple[dict[nn.Module, _Entry], dict[nn.Module, _Memory]]) -> None:
        """Restore the entries that `state` returned, after a call that failed."""
        self._tokens, self._memories = dict(state[0]), dict(state[1])

    def __deepcopy__(self, memo: dict[int, object]) -> KeyValueCache:
        """Return an independent cache for the same attentions, as for a second draft or another beam."""
        other = KeyValueCache(self.capacity)
        for attention, entry in self._tokens.items():
            other._tokens[attention] = _Entry(entry.pairs.clone(), entry.length)
        for attention, memory in self._memories.items():
            other._memories[attention] = memory._replace(pairs=memory.pairs.clone())
        return other

    def truncate(self, length: int) -> None:
        """Drop the tokens after the first `length`, such as a rejected draft. Length 0 means `clear`."""
        check_int("length", length, 0)
        if length == 0:
            self.clear()
        for attention, entry in self._tokens.items():
            if entry.length > length:
                # A narrowed view has no room for more tokens, so `extend` does not write to memory that an autograd graph holds.
                pairs = entry.pairs.narrow(TOKENS, 0, length) if entry.pairs.requires_grad else entry.pairs
                self._tokens[attention] = _Entry(pairs, length)

    def clear(self) -> None:
        """Drop all entries."""
        self._tokens.clear()
        self._memories.clear()

    def __repr__(self) -> str:
        return f"KeyValueCache(length={self.length})"


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same memory, shape and strides.

    The cache keeps `b` alive, so no new tensor can get the memory of `b`.
    """
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())
