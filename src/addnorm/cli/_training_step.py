"""One training step without labels: a probe loss, its forward and backward. Used by `record`, `inspect --report` and `demo`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from addnorm.cli._model import token_mask
from addnorm.stream.models.hf import ModelLoadError
from addnorm.stream.models.load import LoadedModel, input_error
from addnorm.stream.outputs import find_logits, find_loss


class NoGradientsError(ModelLoadError):
    """Model whose output depends on no parameter."""


class ProbeLoss:
    """Loss without labels: the mean over the tokens of <v, y>, with `v` drawn for each position from N(0, 1/d).

    The mean square of a LayerNorm's output is a constant, and its gradient is round-off. The probe has a gradient in every
    direction. If the model's output has a loss, that loss is used instead.

    Attributes:
        seed: seed of v.
        sentence: description of the loss, for readers.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.sentence = (
            f"The mean over the tokens of ⟨v, y⟩, which needs no labels: y is the model's output, v is drawn for each position "
            f"from N(0, 1/d), seed {seed}."
        )

    def __call__(self, output: Any, mask: Tensor | None) -> Tensor:
        """Return the loss of a model's output; the mask is true for tokens that are not padding."""
        own = find_loss(output)
        if own is not None:
            self.sentence = "The model's own."
            return own
        y = find_logits(output)
        generator = torch.Generator().manual_seed(self.seed)
        v = torch.randn(y.shape[1:], generator=generator).div(y.shape[-1] ** 0.5).to(y.device)
        products = (y.to(torch.promote_types(y.dtype, torch.float32)) * v).sum(-1)
        return products[mask].mean() if mask is not None and mask.shape == products.shape else products.mean()


def run_step(loaded: LoadedModel, kwargs: dict[str, Any], loss: ProbeLoss | None) -> None:
    """Run the model forward and, with a loss, backward. The gradients are cleared afterwards.

    Raises:
        NoGradientsError: the output depends on no parameter.
        ModelLoadError: the model raised an error for its inputs.
    """
    try:
        if loss is None:
            with torch.no_grad():
                loaded.model(*loaded.args, **kwargs)
            return
        value = loss(loaded.model(*loaded.args, **kwargs), token_mask(kwargs))
        if not value.requires_grad:
            raise NoGradientsError(
                f"MODEL {loaded.name!r} has no gradients, its output depends on no parameter: use --no-grads."
            )
        value.backward()
    except ModelLoadError:
        raise
    except Exception as error:  # whatever the model raises
        raise input_error(error, dataclasses.replace(loaded, kwargs=kwargs)) from error
    loaded.model.zero_grad()
