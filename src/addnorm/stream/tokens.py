"""Tokens of a stream: masks that select them, tensors arranged with the features last, and their statistics."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from addnorm.stream.layout.token_layout import TokenLayout

Mask = Tensor | str
Masks = Mask | Mapping[str, Mask] | None
Statistics = Iterable[tuple[str, float]]  # values of statistics, each with its name
MEDIAN_SAMPLE = 16_384  # number of elements from which the median is computed
MASSIVE, TIMES_MEDIAN = 100.0, 1000.0  # Sun et al. 2024, "Massive Activations in Large Language Models"


def read_masks(masks: Masks, streams: Collection[str], kwargs: dict[str, Any]) -> dict[str, TokenMask]:
    """Return the mask of each stream from the `tokens` argument of `record` and the model's keyword arguments."""
    by_stream = masks if isinstance(masks, Mapping) else dict.fromkeys(streams, masks)
    for name in by_stream:
        if name not in streams:
            raise ValueError(f"tokens has the stream {name!r}, expected some of {', '.join(map(repr, streams))}.")
    return {name: TokenMask(_find_mask(by_stream.get(name), kwargs)) for name in streams}


def _find_mask(mask: Mask | None, kwargs: dict[str, Any]) -> Tensor | None:
    """Return a mask as a tensor, or None without a mask; `mask` may be the name of a keyword argument of the model."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor | str):
        raise TypeError(
            f"tokens is {type(mask).__name__}, expected a tensor (batch, tokens), the name of a keyword argument of the "
            "model, or a dict of these by stream."
        )
    argument = mask if isinstance(mask, Tensor) else kwargs.get(mask)
    if not isinstance(argument, Tensor):
        raise ValueError(
            f"tokens is {mask!r}, expected the name of a keyword argument of the model that is a tensor; it was called "
            f"with {', '.join(kwargs) or 'none'}."
        )
    if argument.is_floating_point() and not bool(((argument == 0) | (argument == 1)).all()):
        raise ValueError(
            "tokens has values other than 0 and 1, expected true where a token counts: a mask that attention adds to its "
            "scores is 0 there, so pass tokens=(mask == 0)."
        )
    return argument


@dataclass
class TokenMask:
    """Mask that selects the tokens to measure: those where `mask` is true, or all tokens if it is None."""

    mask: Tensor | None = None

    def orient(self, layout: TokenLayout, shape: Sequence[int]) -> TokenLayout:
        """Correct a guessed batch dimension: exchange sequences and tokens if the mask's shape fits only then.

        Args:
            layout: the layout of a tensor.
            shape: the sizes of its dimensions other than the features.
        """
        if self.mask is None or layout.proven or self.mask.dim() != 2:
            return layout
        sizes = layout.measure(shape)
        shape = tuple(self.mask.shape)
        return layout.exchange() if sizes is not None and shape != sizes and shape == sizes[::-1] else layout

    def flatten(self, layout: TokenLayout | None, shape: Sequence[int], device: torch.device) -> Tensor | None:
        """Return the mask as `(n,)`, in the order of the tokens of a tensor; None if there is no mask.

        Args:
            layout: the layout of the tensor, or None if it is not known.
            shape: the sizes of its dimensions other than the features.
            device: the tensor's device.

        Raises:
            MaskError: the mask is one of other tokens, or it is not known which tokens it selects.
        """
        if self.mask is None:
            return None
        sizes = None if layout is None else layout.measure(shape)
        if layout is None or sizes is None:
            raise MaskError("the order of the tokens is not known, so the mask cannot be applied")
        mask = self.mask
        if mask.dim() == 2 and mask.shape != sizes and mask.T.shape == sizes:
            mask = mask.T
        numbers = layout.sort_tokens(torch.arange(math.prod(shape)).reshape(*shape, 1))
        assert numbers is not None
        order = numbers[..., 0]
        fitting = {_drop_ones(fit) for fit in (sizes, order.shape, (math.prod(sizes),))}
        is_grid = mask.dim() > 2 and mask.shape[0] == sizes[0] and mask.numel() == math.prod(sizes)
        if _drop_ones(mask.shape) not in fitting and not (is_grid and len(order.shape) == 2):  # of an image, in rows
            raise MaskError(
                f"tokens has shape {tuple(self.mask.shape)}, expected {sizes}: true where a token of a sequence counts."
            )
        flat = torch.empty(math.prod(shape), dtype=torch.bool)
        flat[order.reshape(-1)] = mask.reshape(-1).to(device="cpu", dtype=torch.bool)
        return flat.to(device)


def _drop_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


class OmittedError(Exception):
    """Reason why a statistic cannot be computed; it is left out."""


class MaskError(OmittedError):
    """Reason why a mask does not fit a tensor."""


def upcast(t: Tensor) -> Tensor:
    """Return the tensor in the dtype of the arithmetic: float32 or float64."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


@dataclass
class Tokens:
    """Tensor of a stream, arranged for statistics.

    Attributes:
        t: the tensor as `(*, d)`.
        mask: mask that selects some of its tokens, `(n,)`; None for all.
        layout: its layout.
        streams: the number of streams that are side by side in the features, if each of them is measured too; otherwise 0.
    """

    t: Tensor
    mask: Tensor | None
    layout: TokenLayout
    streams: int = 0

    @property
    def flat(self) -> Tensor:
        """The tensor as `(n, d)`."""
        return self.t.reshape(-1, self.t.shape[-1])

    @property
    def counted(self) -> Tensor:
        """The tokens that the mask selects (all tokens without a mask), as `(n, d)`."""
        return self.flat if self.mask is None else self.flat[self.mask]

    def sort(self) -> Tokens | None:
        """Return the tokens sequence by sequence, in the stream's order; None if the order is not known."""
        rows, mask = self.layout.sort_tokens(self.t), self.mask
        if rows is None:
            return None
        if mask is not None:
            ordered = self.layout.sort_tokens(mask.reshape(*self.t.shape[:-1], 1))
            assert ordered is not None
            mask = ordered.reshape(-1)
        return Tokens(rows, mask, self.layout)

    @cached_property
    def lengths(self) -> Tensor:
        """The L2 norm of each token that the mask selects, `(n,)`."""
        lengths: Tensor = torch.linalg.vector_norm(upcast(self.counted), dim=-1)
        return lengths

    @cached_property
    def statistics(self) -> dict[str, float]:
        """The statistics l2, rms, max, and those of stream k as l2_k, rms_k, max_k."""
        t, lengths = upcast(self.counted), self.lengths
        found = {
            "l2": float(lengths.mean()),
            "rms": float(torch.linalg.vector_norm(lengths) / t.numel() ** 0.5),
            "max": float(torch.linalg.vector_norm(t, math.inf)) if t.numel() else 0.0,
        }
        for k, part in enumerate(self.t.chunk(self.streams, -1) if self.streams else ()):
            of_stream = Tokens(part, self.mask, self.layout).statistics
            found |= {f"{name}_{k}": value for name, value in of_stream.items()}
        return found

    @classmethod
    def arrange(cls, t: Tensor, layout: TokenLayout | None, tokens: TokenMask) -> Tokens:
        """Return a tensor of the model arranged for statistics.

        Raises:
            OmittedError: it is not known which dimensions are the features, or the mask does not fit.
        """
        if layout is None or not layout.fits(t):
            raise OmittedError("its features are not in dimensions that follow from those of the stream")
        moved = layout.move_features_last(t)
        layout = tokens.orient(layout, moved.shape[:-1])
        return cls(moved, tokens.flatten(layout, moved.shape[:-1], t.device), layout)

    def align(self, write: Tokens) -> tuple[Tokens, Tokens]:
        """Return the stream and a write with their tokens in the same order.

        Raises:
            OmittedError: they have different tokens, or the order of the tokens is not known.
        """
        own, others = self.layout.dims, write.layout.dims
        padded = ((),) * (len(own) - len(others)) + others
        if len(padded) == len(own) and all(not dim or dim == same for dim, same in zip(padded, own, strict=True)):
            if write.t.shape == self.t.shape:
                return self, write
            try:
                return self, Tokens(write.t.expand(self.t.shape), self.mask, self.layout)  # it may be broadcast
            except RuntimeError:
                raise OmittedError("the write has other tokens than the stream") from None
        first, second = self.sort(), write.sort()
        if first is None or second is None:
            raise OmittedError("the tokens of the write and of the stream cannot be brought into one order")
        if first.flat.shape != second.flat.shape:
            raise OmittedError("the write has other tokens than the stream")
        return first, second


# Statistics of tokens, for a recording: few passes, float32 or wider arithmetic. Means are over the selected tokens.


def write_statistics(x: Tokens, write: Tokens) -> Statistics:
    """Yield "ratio" and "cosine" of the write and the stream it is added to, whose tokens must be in the same order."""
    dots = (upcast(x.counted) * upcast(write.counted)).sum(-1)
    yield "ratio", float((write.lengths / x.lengths).mean())
    yield "cosine", float((dots / (x.lengths * write.lengths).clamp_min(torch.finfo(dots.dtype).tiny)).mean())


def unchanged_share(x: Tokens, write: Tokens) -> float:
    """Return the share of the stream's elements that adding the write does not change."""
    before, added = x.counted, write.counted
    return float(((before + added).to(before.dtype) == before).float().mean(-1).mean())


def state_statistics(tokens: Tokens) -> Statistics:
    """Yield "similarity" (if it is known), "massive" and "top" of the stream after a sublayer.

    "massive" is the number of elements above max(100, 1000 × median |x|), "top" the largest |x| / median |x|. The median is that
    of a sample.
    """
    similarity = _similarity(tokens)
    if similarity is not None:
        yield "similarity", similarity
    t = tokens.t if tokens.mask is None else tokens.counted
    flat = t.reshape(-1)
    step = max(1, flat.numel() // MEDIAN_SAMPLE) | 1  # odd: an even step would select the same features of each token
    sample = upcast(flat[::step]).abs()
    # torch's median of an even number of elements is the lower one of the two in the middle.
    median = float(sample.median() / 2 - (-sample).median() / 2) if flat.numel() else math.nan
    largest = tokens.statistics["max"]
    bound = max(MASSIVE, TIMES_MEDIAN * median)
    # Half precision would round the bound.
    yield "massive", float((upcast(t).abs() > bound).sum()) if largest > bound else 0.0
    yield "top", largest / median if median else math.inf if largest else math.nan


def _similarity(tokens: Tokens) -> float | None:
    """Return the mean cosine between two tokens of a sequence; NaN where no sequence has two tokens.

    None if it is not known which tokens are those of one sequence.
    """
    t, rows = tokens.t, tokens.sort()
    sizes = tokens.layout.measure(t.shape[:-1])
    if sizes is None or rows is None:
        return None
    if not t.numel():
        return math.nan
    sequences = upcast(rows.t).reshape(*sizes, t.shape[-1])
    lengths = torch.linalg.vector_norm(sequences, dim=-1)
    counted = lengths != 0  # a token of zeros has no direction; NaN counts
    if rows.mask is not None:
        counted &= rows.mask.reshape(sizes)
        sequences = sequences.masked_fill(~counted[..., None], 0.0)  # it may be NaN, as attention that sees no token
    weights = torch.where(counted, 1.0 / lengths, 0.0)
    counts = counted.sum(-1).to(sequences.dtype)
    total = torch.bmm(weights[:, None], sequences).square().sum((1, 2))
    several = counts > 1
    pairs = (counts * (counts - 1))[several]
    return float(((total - counts)[several] / pairs).mean())


def rstd_statistics(rstd: Tensor) -> Statistics:
    """Yield rstd, rstd_min, rstd_max from the reciprocal denominators of a norm, `(n,)`; nothing if there are none."""
    if rstd.numel():
        yield "rstd", float(rstd.mean())
        yield "rstd_min", float(rstd.min())
        yield "rstd_max", float(rstd.max())
