"""Statistics of tensors: few passes, float32 or wider arithmetic, no tensor kept.

Per-token statistics reduce over the features of one token. Means are over the tokens that the mask selects (`TokenMask`).
Each function yields the statistics of one role that `STATISTICS` in schema.py declares.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from addnorm.stream.dataflow.memory import is_in_memory
from addnorm.stream.dataflow.wrappers import gather, is_sharded, is_wrapper, local_part

__all__ = [
    "Masks", "TokenMask", "TokenNorms", "check_mask_streams", "features_last", "norm_statistics", "parameter_norm",
    "state_statistics", "token_norms", "upcast", "vector_norm", "write_statistics",
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
        if mask is None or isinstance(mask, Tensor):
            return cls(mask)
        argument = kwargs.get(mask)
        if not isinstance(argument, Tensor):
            raise ValueError(
                f"tokens is {mask!r}, expected the name of a keyword argument of the model that is a tensor; it was called "
                f"with {', '.join(kwargs) or 'none'}."
            )
        return cls(argument)

    def flatten(self, t: Tensor) -> Tensor | None:
        """Return the mask as `(n,)` in the layout of a tensor `(*, d)`; None if all tokens count."""
        if self.mask is None:
            return None
        mask, shape = self.mask, t.shape[:-1]
        if self.is_transposed(t):
            mask = mask.T
        if mask.numel() != shape.numel():
            raise ValueError(
                f"tokens has shape {tuple(self.mask.shape)}, expected {tuple(shape)}: true where a token of the stream "
                f"{tuple(t.shape)} counts."
            )
        return mask.reshape(-1).to(device=t.device, dtype=torch.bool)

    def is_transposed(self, t: Tensor) -> bool:
        """Return whether a tensor has the layout (tokens, batch, d) according to the mask."""
        mask, shape = self.mask, t.shape[:-1]
        return mask is not None and mask.dim() == 2 and mask.shape != shape and mask.T.shape == shape

    def fits(self, count: int) -> bool:
        """Return whether the mask has an element for each of so many tokens; a mask of None fits any number."""
        return self.mask is None or self.mask.numel() == count


def features_last(t: Tensor, width: int, axis: int = -1) -> Tensor:
    """Return a stream as `(*, d)`: its dimension of size `width` moved to the end.

    Args:
        t: the stream.
        width: number of features.
        axis: dimension of the features, counted from the end; preferred where it has the size.
    """
    if -t.dim() <= axis < -1 and t.shape[axis] == width:
        return t.movedim(axis, -1)
    if t.shape[-1:] != (width,) and width in t.shape:
        t = t.movedim(t.shape.index(width), -1)
    return t


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


def token_norms(t: Tensor, tokens: TokenMask) -> TokenNorms:
    """Return the norms of the tokens of `(*, d)`."""
    mask = tokens.flatten(t)
    flat = upcast(t).reshape(-1, t.shape[-1])
    norms = torch.linalg.vector_norm(flat, dim=-1)
    if mask is None:
        largest = torch.linalg.vector_norm(flat, math.inf) if flat.numel() else flat.new_zeros(())
    else:
        norms = norms[mask]
        largest = flat[mask].abs().max() if norms.numel() else flat.new_zeros(())
    return TokenNorms(norms.square(), t.shape[-1], float(largest))


def write_statistics(
    x: Tensor, write: Tensor, x_norms: TokenNorms, write_norms: TokenNorms, tokens: TokenMask
) -> Values:
    """Yield ratio, cosine, unchanged: the write compared with the stream it is added to."""
    mask = tokens.flatten(x)
    x_flat, write_flat = (t.reshape(-1, t.shape[-1]) for t in (x, write))
    dots = (upcast(x_flat) * upcast(write_flat)).sum(-1)
    unchanged = ((x_flat + write_flat).to(x.dtype) == x_flat).float().mean(-1)
    if mask is not None:
        dots, unchanged = dots[mask], unchanged[mask]
    x_norm, write_norm = x_norms.squares.sqrt(), write_norms.squares.sqrt()
    yield "ratio", float((write_norm / x_norm).mean())
    yield "cosine", float((dots / (x_norm * write_norm).clamp_min(torch.finfo(dots.dtype).tiny)).mean())
    yield "unchanged", float(unchanged.mean())


def state_statistics(t: Tensor, norms: TokenNorms, tokens: TokenMask) -> Values:
    """Yield similarity, massive, top: statistics of the stream after a sublayer."""
    yield "similarity", _similarity(t, norms, tokens)
    yield from _massive_activations(t, norms, tokens)


def _similarity(t: Tensor, norms: TokenNorms, tokens: TokenMask) -> float:
    """Return the mean cosine between two tokens of a sequence; NaN where no sequence has two tokens.

    The first of three or more dimensions is the batch, unless the mask shows otherwise.
    """
    if tokens.is_transposed(t):
        t = t.transpose(0, 1)
    mask = tokens.flatten(t)
    flat = upcast(t).reshape(-1, t.shape[-1])
    lengths = torch.linalg.vector_norm(flat, dim=-1) if mask is not None else norms.squares.sqrt()
    sequences = t.shape[0] if t.dim() > 2 else 1
    if t.dim() == 2 and tokens.mask is not None and tokens.mask.dim() == 2:
        sequences = tokens.mask.shape[0]
    if not flat.numel():
        return math.nan
    weights = 1.0 / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
    if mask is not None:
        weights = torch.where(mask, weights, 0.0)
    weights = torch.where(lengths > 0, weights, 0.0).reshape(sequences, 1, -1)
    counts = (weights > 0).sum(-1).reshape(-1).to(flat.dtype)
    total = torch.bmm(weights, flat.reshape(sequences, -1, t.shape[-1])).square().sum((1, 2))
    several = counts > 1
    pairs = (counts * (counts - 1))[several]
    return float(((total - counts)[several] / pairs).mean())


def _massive_activations(t: Tensor, norms: TokenNorms, tokens: TokenMask) -> Values:
    """Yield massive, top, relative to the median of a sample of evenly spaced elements."""
    mask = tokens.flatten(t)
    if mask is not None:
        t = t.reshape(-1, t.shape[-1])[mask]
    flat = t.reshape(-1)
    step = max(1, flat.numel() // MEDIAN_SAMPLE) | 1  # odd: an even step would select the same features of each token
    median = float(upcast(flat[::step]).abs().median()) if flat.numel() else math.nan
    bound = max(MASSIVE, TIMES_MEDIAN * median)
    yield "massive", float((t.abs() > bound).sum()) if norms.largest > bound else 0.0
    yield "top", norms.largest / median if median else math.inf if norms.largest else math.nan


def norm_statistics(rstd: Tensor, tokens: TokenMask) -> Values:
    """Yield rstd, rstd_min, rstd_max from the reciprocal denominators of a norm; nothing if no token counts."""
    t = rstd.detach().float()
    mask = tokens.flatten(t) if tokens.fits(t.numel()) else None
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
