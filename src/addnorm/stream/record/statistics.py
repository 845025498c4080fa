"""Statistics of tensors: few passes, float32 or wider arithmetic, no tensor kept.

Per-token statistics reduce over the features of one token. Means are over the tokens that the mask selects (`TokenMask`).
Each function yields the statistics of one role that `STATISTICS` in schema.py declares.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from addnorm.stream.dataflow.memory import is_in_memory
from addnorm.stream.dataflow.wrappers import gather, is_sharded, is_wrapper, local_part
from addnorm.stream.layout.token_layout import TokenLayout

__all__ = [
    "MaskError", "Masks", "OmittedError", "TokenMask", "TokenNorms", "Tokens", "align", "check_mask_streams",
    "norm_statistics", "parameter_norm", "state_statistics", "token_norms", "upcast", "vector_norm", "write_statistics",
]  # fmt: skip

MEDIAN_SAMPLE = 16_384  # number of elements from which the median is computed
MASSIVE, TIMES_MEDIAN = 100.0, 1000.0  # Sun et al. 2024, "Massive Activations in Large Language Models"

Mask = Tensor | str
Masks = Mask | Mapping[str, Mask] | None
Values = Iterator[tuple[str, float]]  # names and values of statistics


def check_mask_streams(masks: Masks, streams: Collection[str]) -> None:
    """Check that every stream for which there is a mask exists."""
    for name in masks if isinstance(masks, Mapping) else ():
        if name not in streams:
            raise ValueError(f"tokens has the stream {name!r}, expected some of {', '.join(map(repr, streams))}.")


@dataclass
class TokenMask:
    """Mask of the tokens that count: those where `mask` is true, or all tokens for None."""

    mask: Tensor | None = None

    @classmethod
    def from_argument(cls, tokens: Masks, stream: str, kwargs: dict[str, Any]) -> TokenMask:
        """Return the mask of one stream from the `tokens` argument of `record` and the model's keyword arguments."""
        mask = tokens.get(stream) if isinstance(tokens, Mapping) else tokens
        if mask is None:
            return cls()
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
        return cls(argument)

    def orient(self, layout: TokenLayout, shape: Sequence[int]) -> TokenLayout:
        """Return a layout, with sequences and tokens exchanged where only the mask shows which is which.

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
        """Return the mask as `(n,)`, in the order of the tokens of a tensor; None if all tokens count.

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
        order = layout.sort_tokens(torch.arange(math.prod(shape)).reshape(tuple(shape)), has_features=False)
        assert order is not None
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


@dataclass
class Tokens:
    """Tensor of a stream, arranged for statistics.

    Attributes:
        t: the tensor as `(*, d)`.
        mask: which of its tokens count, `(n,)`; None for all.
        layout: its layout.
    """

    t: Tensor
    mask: Tensor | None
    layout: TokenLayout

    @property
    def flat(self) -> Tensor:
        """The tensor as `(n, d)`."""
        return self.t.reshape(-1, self.t.shape[-1])

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


@dataclass
class TokenNorms:
    """Quantities of a tensor from which several statistics follow: the squared L2 norm of each token, `(n,)`."""

    squares: Tensor
    width: int
    largest: float

    def statistics(self) -> Values:
        """Yield l2, rms, max."""
        yield "l2", float(self.squares.sqrt().mean())
        yield "rms", float((self.squares.mean() / self.width).sqrt())
        yield "max", self.largest


def upcast(t: Tensor) -> Tensor:
    """Return the tensor in the dtype of the arithmetic: float32 or float64."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def token_norms(tokens: Tokens) -> TokenNorms:
    """Return the norms of the tokens of a tensor."""
    mask, t = tokens.mask, tokens.t
    flat = upcast(t).reshape(-1, t.shape[-1])
    norms = torch.linalg.vector_norm(flat, dim=-1)
    if mask is None:
        largest = torch.linalg.vector_norm(flat, math.inf) if flat.numel() else flat.new_zeros(())
    else:
        norms = norms[mask]
        largest = flat[mask].abs().max() if norms.numel() else flat.new_zeros(())
    return TokenNorms(norms.square(), t.shape[-1], float(largest))


def write_statistics(x: Tokens, write: Tokens, x_norms: TokenNorms, write_norms: TokenNorms) -> Values:
    """Yield ratio, cosine, unchanged: the write compared with the stream it is added to, token by token in the same order."""
    x_flat, write_flat, mask = x.flat, write.flat, x.mask
    dots = (upcast(x_flat) * upcast(write_flat)).sum(-1)
    unchanged = ((x_flat + write_flat).to(x_flat.dtype) == x_flat).float().mean(-1)
    if mask is not None:
        dots, unchanged = dots[mask], unchanged[mask]
    x_norm, write_norm = x_norms.squares.sqrt(), write_norms.squares.sqrt()
    yield "ratio", float((write_norm / x_norm).mean())
    yield "cosine", float((dots / (x_norm * write_norm).clamp_min(torch.finfo(dots.dtype).tiny)).mean())
    yield "unchanged", float(unchanged.mean())


def align(x: Tokens, write: Tokens) -> tuple[Tokens, Tokens]:
    """Return the stream and a write with their tokens in the same order.

    Raises:
        OmittedError: they have different tokens, or the order of the tokens is not known.
    """
    own, others = x.layout.dims, write.layout.dims
    padded = ((),) * (len(own) - len(others)) + others
    if len(padded) == len(own) and all(not dim or dim == same for dim, same in zip(padded, own, strict=True)):
        if write.t.shape == x.t.shape:
            return x, write
        try:
            return x, Tokens(write.t.expand(x.t.shape), x.mask, x.layout)  # it may be broadcast
        except RuntimeError:
            raise OmittedError("the write has other tokens than the stream") from None
    pair = []
    for tokens in (x, write):
        t, mask = tokens.layout.sort_tokens(tokens.t), tokens.mask
        if t is None:
            raise OmittedError("the tokens of the write and of the stream cannot be brought into one order")
        if mask is not None:
            ordered = tokens.layout.sort_tokens(mask.reshape(tokens.t.shape[:-1]), has_features=False)
            mask = None if ordered is None else ordered.reshape(-1)
        pair.append(Tokens(t.reshape(-1, t.shape[-1]), mask, tokens.layout))
    if pair[0].t.shape != pair[1].t.shape:
        raise OmittedError("the write has other tokens than the stream")
    return pair[0], pair[1]


def state_statistics(tokens: Tokens, norms: TokenNorms) -> Values:
    """Yield similarity, massive, top: statistics of the stream after a sublayer."""
    similarity = _similarity(tokens)
    if similarity is not None:
        yield "similarity", similarity
    yield from _massive_activations(tokens, norms)


def _similarity(tokens: Tokens) -> float | None:
    """Return the mean cosine between two tokens of a sequence; NaN where no sequence has two tokens.

    None if it is not known which tokens are those of one sequence.
    """
    t, layout = tokens.t, tokens.layout
    sizes, rows = layout.measure(t.shape[:-1]), layout.sort_tokens(t)
    if sizes is None or rows is None:
        return None
    if not t.numel():
        return math.nan
    sequences = upcast(rows).reshape(*sizes, t.shape[-1])
    lengths = torch.linalg.vector_norm(sequences, dim=-1)
    counted = lengths != 0  # a token of zeros has no direction; NaN counts
    if tokens.mask is not None:
        mask = layout.sort_tokens(tokens.mask.reshape(t.shape[:-1]), has_features=False)
        assert mask is not None
        counted &= mask.reshape(sizes)
        sequences = sequences.masked_fill(~counted[..., None], 0.0)  # it may be NaN, as attention that sees no token
    weights = torch.where(counted, 1.0 / lengths, 0.0)
    counts = counted.sum(-1).to(sequences.dtype)
    total = torch.bmm(weights[:, None], sequences).square().sum((1, 2))
    several = counts > 1
    pairs = (counts * (counts - 1))[several]
    return float(((total - counts)[several] / pairs).mean())


def _massive_activations(tokens: Tokens, norms: TokenNorms) -> Values:
    """Yield massive, top, relative to the median of a sample of evenly spaced elements."""
    t = tokens.t if tokens.mask is None else tokens.flat[tokens.mask]
    flat = t.reshape(-1)
    step = max(1, flat.numel() // MEDIAN_SAMPLE) | 1  # odd: an even step would select the same features of each token
    sample = upcast(flat[::step]).abs()
    # torch's median of an even number of elements is the lower one of the two in the middle.
    median = float(sample.median() / 2 - (-sample).median() / 2) if flat.numel() else math.nan
    bound = max(MASSIVE, TIMES_MEDIAN * median)
    # Half precision would round the bound.
    yield "massive", float((upcast(t).abs() > bound).sum()) if norms.largest > bound else 0.0
    yield "top", norms.largest / median if median else math.inf if norms.largest else math.nan


def norm_statistics(rstd: Tensor, layout: TokenLayout | None, tokens: TokenMask) -> Values:
    """Yield rstd, rstd_min, rstd_max from the reciprocal denominators of a norm, `(*, 1)`; nothing if no token counts.

    Raises:
        OmittedError: the mask does not fit.
    """
    t = upcast(rstd.detach())
    shape = t.shape[:-1]
    mask = tokens.flatten(layout and tokens.orient(layout, shape), shape, t.device)
    t = t.reshape(-1) if mask is None else t.reshape(-1)[mask]
    if t.numel():
        yield "rstd", float(t.mean())
        yield "rstd_min", float(t.min())
        yield "rstd_max", float(t.max())


def parameter_norm(parameters: Iterable[Tensor], gathered: bool = False) -> float | None:
    """Return the L2 norm of all elements of some parameters; None if there are none.

    Args:
        parameters: the parameters.
        gathered: of sharded ones the whole, not the part of this process.
    """
    norms = [vector_norm(parameter, gathered) for parameter in parameters]
    return float(torch.stack(norms).square().sum().sqrt()) if norms else None


def vector_norm(t: Tensor, gathered: bool = False) -> Tensor:
    """Return the L2 norm of all elements, 0-d; NaN for a tensor without readable memory."""
    if is_sharded(t):
        t = gather(torch.linalg.vector_norm(upcast(t))) if gathered else local_part(t)
    elif not is_in_memory(t, tuple(t.shape)):
        return torch.tensor(math.nan)
    elif is_wrapper(t):
        try:
            t = t.dequantize()
        except Exception:  # a wrapper may refuse an operator with any error
            return torch.tensor(math.nan)
    norm: Tensor = torch.linalg.vector_norm(upcast(t))
    return norm
