"""The numbers that are recorded of a tensor: a few passes over it, in float32 at least, and nothing kept.

Per token means over the features of one token; what is a mean is over the tokens that count (`Tokens`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Size", "Tokens", "massive", "pair", "rows", "similarity", "size"]

SAMPLE = 16_384  # elements of which the median is taken
MASSIVE, TIMES_MEDIAN = 100.0, 1000.0  # Sun et al. 2024, "Massive Activations in Large Language Models"

Number = tuple[str, float]


@dataclass
class Tokens:
    """Which tokens count: all, or those where `mask` is true."""

    mask: Tensor | None = None

    def of(self, t: Tensor) -> Tensor | None:
        """The mask in the layout of a tensor `(*, d)`, `(n,)`; None where all count."""
        if self.mask is None:
            return None
        mask, lead = self.mask, t.shape[:-1]
        if self.turned(t):
            mask = mask.T
        if mask.numel() != lead.numel():
            raise ValueError(
                f"tokens has shape {tuple(self.mask.shape)}, expected {tuple(lead)}: true where a token of the stream "
                f"{tuple(t.shape)} counts."
            )
        return mask.reshape(-1).to(device=t.device, dtype=torch.bool)

    def turned(self, t: Tensor) -> bool:
        """Whether a tensor is (tokens, batch, d), as far as the mask tells."""
        mask, lead = self.mask, t.shape[:-1]
        return mask is not None and mask.dim() == 2 and mask.shape != lead and mask.T.shape == lead


def rows(t: Tensor, width: int, axis: int = -1) -> Tensor:
    """A stream as `(*, d)`, whichever dimension has the features: `axis` where there is one as wide, counted from the end."""
    if -t.dim() <= axis < -1 and t.shape[axis] == width:
        return t.movedim(axis, -1)
    if t.shape[-1:] != (width,) and width in t.shape:
        t = t.movedim(t.shape.index(width), -1)
    return t


@dataclass
class Size:
    """Of a tensor, what the other statistics are made from: the square of each token's length, `(n,)`."""

    squares: Tensor
    width: int
    largest: float

    def numbers(self) -> Iterator[Number]:
        """l2, rms, max."""
        yield "l2", float(self.squares.sqrt().mean())
        yield "rms", float((self.squares.mean() / self.width).sqrt())
        yield "max", self.largest


def wide(t: Tensor) -> Tensor:
    """In the dtype of the arithmetic."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def size(t: Tensor, tokens: Tokens) -> Size:
    """The lengths of the tokens of `(*, d)`."""
    mask = tokens.of(t)
    flat = wide(t).reshape(-1, t.shape[-1])
    lengths = torch.linalg.vector_norm(flat, dim=-1)
    if mask is None:
        largest = torch.linalg.vector_norm(flat, float("inf")) if flat.numel() else flat.new_zeros(())
    else:
        lengths = lengths[mask]
        largest = flat[mask].abs().max() if lengths.numel() else flat.new_zeros(())
    return Size(lengths.square(), t.shape[-1], float(largest))


def pair(x: Tensor, write: Tensor, of_x: Size, of_write: Size, tokens: Tokens) -> Iterator[Number]:
    """ratio, cosine, unchanged: of what is added to what the stream was."""
    mask = tokens.of(x)
    one, two = (t.reshape(-1, t.shape[-1]) for t in (x, write))
    dots = (wide(one) * wide(two)).sum(-1)
    same = ((one + two).to(x.dtype) == one).float().mean(-1)
    if mask is not None:
        dots, same = dots[mask], same[mask]
    x_length, write_length = of_x.squares.sqrt(), of_write.squares.sqrt()
    yield "ratio", float((write_length / x_length).mean())
    yield "cosine", float((dots / (x_length * write_length).clamp_min(torch.finfo(dots.dtype).tiny)).mean())
    yield "unchanged", float(same.mean())


def similarity(t: Tensor, of_t: Size, tokens: Tokens) -> float:
    """The mean cosine of two tokens of a sequence, over the sequences: NaN where none has two.

    The first dimension of three or more is taken for the batch, unless the mask tells otherwise.
    """
    if tokens.turned(t):
        t = t.transpose(0, 1)
    mask = tokens.of(t)
    flat = wide(t).reshape(-1, t.shape[-1])
    lengths = torch.linalg.vector_norm(flat, dim=-1) if mask is not None else of_t.squares.sqrt()
    sequences = t.shape[0] if t.dim() > 2 else 1
    if t.dim() == 2 and tokens.mask is not None and tokens.mask.dim() == 2:
        sequences = tokens.mask.shape[0]
    if not flat.numel():
        return float("nan")
    weights = 1.0 / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
    if mask is not None:
        weights = torch.where(mask, weights, 0.0)
    weights = torch.where(lengths > 0, weights, 0.0).reshape(sequences, 1, -1)
    counts = (weights > 0).sum(-1).reshape(-1).to(flat.dtype)
    total = torch.bmm(weights, flat.reshape(sequences, -1, t.shape[-1])).square().sum((1, 2))
    some = counts > 1
    pairs = (counts * (counts - 1))[some]
    return float(((total - counts)[some] / pairs).mean())


def massive(t: Tensor, of_t: Size, tokens: Tokens) -> Iterator[Number]:
    """massive, top: by the median of at most 16,384 elements, evenly spread."""
    mask = tokens.of(t)
    if mask is not None:
        t = t.reshape(-1, t.shape[-1])[mask]
    flat = t.reshape(-1)
    step = max(1, flat.numel() // SAMPLE) | 1  # odd, so that it does not meet the same features in each token
    median = float(wide(flat[::step]).abs().median()) if flat.numel() else float("nan")
    bound = max(MASSIVE, TIMES_MEDIAN * median)
    yield "massive", float((t.abs() > bound).sum()) if of_t.largest > bound else 0.0
    yield "top", of_t.largest / median if median else float("inf") if of_t.largest else float("nan")
