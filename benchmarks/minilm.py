"""MiniLM, a real model of six post-LN layers with trained weights: its input texts and its training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.bench.case import Case
from addnorm.stream.models.load import LoadedModel, load

MODEL = "minilm"
TEXT = "pydoc_data.topics"


def load_model(case: Case, dtype: str | None = None) -> LoadedModel:
    """Return the model in evaluation mode, with passages of Python's own documentation that fill the tokens of a case."""
    words = " ".join(topics.values()).split()
    length = 2 * case.tokens
    passages = [" ".join(words[k * length : (k + 1) * length]) for k in range(case.batch)]
    loaded = load(MODEL, texts=passages, tokens=case.tokens, dtype=dtype)
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
