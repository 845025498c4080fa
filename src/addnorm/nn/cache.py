"""What incremental decoding keeps of the tokens it has seen: keys and values, for every attention of a stack."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["KeyValueCache"]

TOKENS = 3  # the dimension of tokens in (2, batch, heads, tokens, d_model / heads): keys and values, side by side


@dataclass
class _Kept:
    """Keys and values of one attention: the first `length` tokens of `pairs`; behind them is room for more."""

    pairs: Tensor
    length: int


class KeyValueCache:
    r"""The keys and values that a decoder has computed, so that each further call computes only those of its new tokens.

    One cache serves a whole stack, for one sequence of calls; each attention finds its own. Self-attention adds its new tokens.
    Cross-attention computes those of the memory once, and again only if it is given another tensor as memory (the same one with
    other numbers in it goes unnoticed).

    Without gradients new tokens are written into memory that is there, which doubles when it is full; with gradients they
    are concatenated, so that the gradient reaches all that was kept. With a cache, masks have an entry for every key, those of
    earlier calls included.

    Args:
        capacity: the tokens for which there is room at first.

    Example:
        >>> decoder = addnorm.nn.Decoder(2, 16, 4, cross_attention=False).eval()
        >>> x, cache = torch.randn(1, 5, 16), addnorm.nn.KeyValueCache()
        >>> steps = [decoder(token, cache=cache) for token in x.split(1, dim=1)]
        >>> torch.testing.assert_close(torch.cat(steps, dim=1), decoder(x))
        >>> cache.length
        5
    """

    def __init__(self, capacity: int = 64) -> None:
        self.capacity = capacity
        self._tokens: dict[nn.Module, _Kept] = {}
        self._memories: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """The tokens seen."""
        length = 0
        for kept in self._tokens.values():  # a plain loop: compiled graphs do not break at it
            length = max(length, kept.length)
        return length

    def seen(self, attention: nn.Module) -> int:
        """The tokens that this attention has seen."""
        kept = self._tokens.get(attention)
        return 0 if kept is None else kept.length

    def extend(self, attention: nn.Module, pairs: Tensor) -> Tensor:
        """Adds the keys and values of new tokens, `(2, batch, heads, tokens, d_model / heads)`, and returns those of all."""
        kept = self._tokens.get(attention)
        if kept is None or kept.length == 0:
            kept = _Kept(pairs.narrow(TOKENS, 0, 0), 0)
        elif kept.pairs.shape[1] != pairs.shape[1]:
            raise ValueError(
                f"x has a batch of {pairs.shape[1]}, expected {kept.pairs.shape[1]}, that of the cache: cache.reorder(index) "
                "selects, repeats and drops samples of it, cache.clear() empties it."
            )
        past, length = kept.length, kept.length + pairs.shape[TOKENS]
        old = kept.pairs.narrow(TOKENS, 0, past)
        if torch.is_grad_enabled():
            everything = torch.cat([old, pairs], TOKENS) if past else pairs
            self._tokens[attention] = _Kept(everything, length)
            return everything
        room = kept.pairs
        if past == 0 or length > room.shape[TOKENS] or (room.is_inference() and not torch.is_inference_mode_enabled()):
            shape = list(pairs.shape)
            shape[TOKENS] = max(self.capacity, length, 2 * past)
            room = pairs.new_empty(shape)
            room.narrow(TOKENS, 0, past).copy_(old)
        room.narrow(TOKENS, past, length - past).copy_(pairs)
        self._tokens[attention] = _Kept(room, length)
        return room.narrow(TOKENS, 0, length)

    def recall(self, attention: nn.Module, memory: Tensor | None, wants_grad: bool = False) -> Tensor | None:
        """The keys and values of the memory, if this attention has computed them; memory None: of whatever it was.

        None where a gradient is wanted that what is kept does not carry, and there is a memory to compute it from.
        """
        kept = self._memories.get(attention)
        if kept is None or (memory is not None and not _same(memory, kept[0])):
            return None
        pairs = kept[1]
        records = torch.is_grad_enabled()
        if memory is not None and records and (pairs.is_inference() or (wants_grad and not pairs.requires_grad)):
            return None
        return pairs

    def remember(self, attention: nn.Module, memory: Tensor, pairs: Tensor) -> None:
        """Keeps the keys and values of the memory, `(batch, keys, 2, heads, d_model / heads)`."""
        self._memories[attention] = memory, pairs

    def reorder(self, index: Tensor) -> None:
        """Sample i becomes what sample index[i] was, in all that is kept: for beam search, after each choice of beams.

        The number of samples may change: `torch.arange(batch).repeat_interleave(beams)` gives each sample its beams. What is kept
        of the memory follows, so that the next call may be given the same memory as before, or None.

        Args:
            index: int64, `(new batch,)`.
        """
        for attention, kept in self._tokens.items():
            self._tokens[attention] = _Kept(kept.pairs.index_select(1, index), kept.length)
        for attention, (source, pairs) in self._memories.items():
            self._memories[attention] = source, pairs.index_select(0, index)

    def state(self) -> tuple[dict[nn.Module, _Kept], dict[nn.Module, tuple[Tensor, Tensor]]]:
        """What is kept now, for `restore`."""
        return dict(self._tokens), dict(self._memories)

    def restore(self, state: tuple[dict[nn.Module, _Kept], dict[nn.Module, tuple[Tensor, Tensor]]]) -> None:
        """Goes back to what `state` gave: after a call that failed."""
        self._tokens, self._memories = dict(state[0]), dict(state[1])

    def __deepcopy__(self, memo: dict[int, object]) -> KeyValueCache:
        """A cache of its own for the same attentions: a second draft, another beam."""
        other = KeyValueCache(self.capacity)
        for attention, kept in self._tokens.items():
            other._tokens[attention] = _Kept(kept.pairs.clone(), kept.length)
        for attention, (memory, pairs) in self._memories.items():
            other._memories[attention] = memory, pairs.clone()
        return other

    def truncate(self, length: int) -> None:
        """Forgets the tokens after the first `length`: a draft that was rejected. Of length 0 it is `clear`."""
        if length == 0:
            self.clear()
        for attention, kept in self._tokens.items():
            if kept.length > length:
                # What a graph may hold is not written again.
                pairs = kept.pairs.narrow(TOKENS, 0, length) if kept.pairs.requires_grad else kept.pairs
                self._tokens[attention] = _Kept(pairs, length)

    def clear(self) -> None:
        """Forgets everything."""
        self._tokens.clear()
        self._memories.clear()

    def __repr__(self) -> str:
        return f"KeyValueCache(length={self.length})"


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same elements of the same memory; that of `b` is kept, so nobody else can have got it since."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())
