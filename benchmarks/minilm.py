"""MiniLM, a real model of six post-LN layers with trained weights: its input texts and its training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pydoc_data.topics import topics
from typing import Any

import torch
from harness import Case
from torch import Tensor, nn

from addnorm.stream.models.load import LoadedModel, load

MODEL = "minilm"
TEXT = "pydoc_data.topics"


def passages(case: Case) -> list[str]:
    """Return passages of Python's own documentation, each long enough to fill its tokens."""
    words = " ".join(topics.values()).split()
    length = 2 * case.tokens
    return [" ".join(words[k * length : (k + 1) * length]) for k in range(case.batch)]


def load_model(case: Case, dtype: str | None = None) -> LoadedModel:
    """Return the model in evaluation mode, with a batch of text that fills the tokens of a case."""
    loaded = load(MODEL, texts=passages(case), tokens=case.tokens, dtype=dtype)
    shape = tuple(loaded.kwargs["input_ids"].shape)
    if shape != (case.batch, case.tokens):
        raise ValueError(f"the text gave {shape}, expected {(case.batch, case.tokens)}: use longer passages.")
    return loaded


def training_step(model: nn.Module, kwargs: Mapping[str, Any]) -> Callable[[], Tensor]:
    """Return a training step without optimizer: a forward, and the backward of a fixed random probe's loss into `.grad`."""
    like = next(model.parameters())
    probe = torch.randn(like.shape[-1], generator=torch.Generator().manual_seed(0)).to(like.dtype)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = (model(**kwargs).last_hidden_state @ probe).square().mean()
        loss.backward()
        return loss

    return step
