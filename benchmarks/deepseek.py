"""Boundaries of several streams in transformers' models, and addnorm's coefficients made of theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm.nn.connection import FIRST
from addnorm.wirings.coefficients import ManifoldConnection

N = 4


def coefficients_of(source: Any, d: int) -> ManifoldConnection:
    """Return addnorm's form of transformers' hyper-connection, with its parameters."""
    coefficients = ManifoldConnection(
        d, N, 1, FIRST, iterations=source.hc_sinkhorn_iters, eps=source.hc_eps, norm_eps=source.input_norm.eps
    )
    coefficients.load_transformers(source)
    return coefficients


def check_difference(found: Tensor, expected: Tensor, most: float) -> float:
    """Return the relative distance of both results.

    Raises:
        ValueError: it is larger than `most`.
    """
    exact = expected.double()
    difference = float((found.double() - exact).norm() / exact.norm())
    if not difference <= most:
        raise ValueError(
            f"the results differ by {difference:.2g} from those of transformers, expected at most {most:g}."
        )
    return difference


def draw_parameters(source: torch.nn.Module) -> None:
    """Draw the parameters of a hyper-connection, in float32."""
    for parameter in source.parameters():
        parameter.data = torch.randn_like(parameter, dtype=torch.float32) * (0.02 if parameter.dim() > 1 else 0.5)
