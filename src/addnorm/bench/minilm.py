"""MiniLM, a real model of six post-LN layers with trained weights: on what text it is called, and its training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pydoc_data.topics import topics
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from addnorm.stream.models.load import LoadedModel, load

__all__ = ["MODEL", "TEXT", "loaded", "passages", "step"]

MODEL = "minilm"
TEXT = "pydoc_data.topics"


class Batch(Protocol):
    """A cell of a matrix."""

    @property
    def batch(self) -> int:
        """How many passages."""

    @property
    def tokens(self) -> int:
        """Of each."""


def passages(cell: Batch) -> list[str]:
    """Of Python's own documentation, each long enough to fill its tokens."""
    words = " ".join(topics.values()).split()
    length = 2 * cell.tokens
    return [" ".join(words[k * length : (k + 1) * length]) for k in range(cell.batch)]


def loaded(cell: Batch, dtype: str | None = None) -> LoadedModel:
    """The model in evaluation mode, and a batch of text that fills the tokens of a cell."""
    found = load(MODEL, texts=passages(cell), tokens=cell.tokens, dtype=dtype)
    shape = tuple(found.kwargs["input_ids"].shape)
    if shape != (cell.batch, cell.tokens):
        raise ValueError(f"the text gave {shape}, expected {(cell.batch, cell.tokens)}: longer passages.")
    return found


def step(model: nn.Module, kwargs: Mapping[str, Any]) -> Callable[[], Tensor]:
    """A training step without the optimizer: a forward, and the backward of a fixed random probe's loss into `.grad`."""
    like = next(model.parameters())
    probe = torch.randn(like.shape[-1], generator=torch.Generator().manual_seed(0)).to(like.dtype)

    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = (model(**kwargs).last_hidden_state @ probe).square().mean()
        loss.backward()
        return loss

    return run
