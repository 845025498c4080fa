"""Scales of the two terms of an add, one for each feature: coefficients of one stream, from parameters alone."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from addnorm._util.arguments import check_float, check_not_negative
from addnorm.wirings.coefficients.base import CoefficientModule, Coefficients, Notation
from addnorm.wirings.factors import Place


class GatedMix(CoefficientModule):
    """Both terms scaled so that their squares sum to 1: b = σ(g / t), a = sqrt(max(1 - b^2, ε)).

    Args:
        temperature: t.
        eps: ε.
        std: standard deviation of g at first.

    Source: transformers' Muse Spark.
    """

    computes = ("mix", "inject")
    stacked = False
    counterparts: ClassVar = {
        "temperature": "temperature",
        "eps": "eps",
        "gate": "gate",
    }  # of a `MuseSparkResidualGate`

    @classmethod
    def notate(cls, **options: Any) -> Notation:
        """Return the letters and formulas of the coefficients, with the values of the temperature and of ε."""
        formulas = (f"b = σ(g/{options.get('temperature', 0.3):g})", f"a = √max(1 - b², {options.get('eps', 1e-3):g})")
        start = f"g is drawn with standard deviation {options.get('std', 0.02):g}, so that b is nearly 0.5 and a nearly 0.866."
        return Notation(mix="a", formulas=formulas, learned="g", start=start)

    def __init__(
        self, d_model: int, n: int, reads: int, place: Place, *, temperature: float = 0.3, eps: float = 1e-3,
        std: float = 0.02, **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__(d_model, n, reads, place)
        if check_not_negative("temperature", temperature) == 0.0:
            raise ValueError("temperature is 0, expected a positive number: the gate is divided by it.")
        self.temperature, self.eps, self.std = (
            temperature,
            check_not_negative("eps", eps),
            check_not_negative("std", std),
        )
        self.gate = self.parameter(d_model, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the gate g from a normal distribution."""
        nn.init.normal_(self.gate, std=self.std)

    def compute(self, streams: tuple[Tensor, ...]) -> Coefficients:
        """Return A and B, `(d_model,)` each."""
        logit = self.gate / self.temperature
        b = torch.sigmoid(logit)
        a = torch.sqrt(torch.clamp(torch.sigmoid(-logit) * (1.0 + b), min=self.eps))  # 1 - b^2 without cancellation
        return Coefficients(mix=((a,),), inject=(b,))


class ResidualScaling(CoefficientModule):
    """A scale and a bias of each term: x' = (x + v) ⊙ a + (f + w) ⊙ b, at first a = b = 1 and v = w = 0.

    Source: transformers' Zaya.
    """

    computes = ("mix", "inject", "bias")
    stacked = False
    counterparts: ClassVar = {  # of a `ZayaResidualScaling`
        "residual_scale": "residual_scale", "residual_bias": "residual_bias", "branch_scale": "hidden_states_scale",
        "branch_bias": "hidden_states_bias",
    }  # fmt: skip
    starts: ClassVar = {"residual_scale": 1.0, "residual_bias": 0.0, "branch_scale": 1.0, "branch_bias": 0.0}
    residual_scale: nn.Parameter
    residual_bias: nn.Parameter
    branch_scale: nn.Parameter
    branch_bias: nn.Parameter
    notation = Notation(
        mix="a", terms={"mix": "a ⊙ ({x} + v)", "inject": "b ⊙ ({x} + w)"},
        boxes={"mix": ("+v", "⊙a"), "inject": ("+w", "⊙b")}, learned="a, b, v, w",
        start="a and b start at 1, v and w at 0.",
    )  # fmt: skip

    def __init__(self, d_model: int, n: int, reads: int, place: Place, **factory: Any) -> None:
        super().__init__(d_model, n, reads, place)
        for name in self.starts:
            self.register_parameter(name, self.parameter(d_model, **factory))
        self.reset_parameters()

    def compute(self, streams: tuple[Tensor, ...]) -> Coefficients:
        """Return A, B and the bias, `(d_model,)` each."""
        a, b = self.residual_scale, self.branch_scale
        return Coefficients(mix=((a,),), inject=(b,), bias=(a * self.residual_bias + b * self.branch_bias,))


class Interpolation(CoefficientModule):
    """A step from the stream towards the write: x' = x + α ⊙ (f - x), a = 1 - |α|, b = |α|.

    The stored parameter is α times 1/sqrt(d_model) / `init`, so that the learning rate of the weights fits it too.

    Args:
        init: α at first.

    Source: Loshchilov et al. 2024 (nGPT), arXiv 2410.01131.
    """

    computes = ("mix", "inject")
    stacked = False

    @classmethod
    def notate(cls, **options: Any) -> Notation:
        """Return the letters and formulas of the coefficients, with the initial value of α."""
        start = f"α starts at {options.get('init', 0.05):g}."
        return Notation(mix="(1 - α)", inject="α", boxes={"mix": ("⊙(1-α)",)}, learned="α", start=start)

    def __init__(self, d_model: int, n: int, reads: int, place: Place, *, init: float = 0.05, **factory: Any) -> None:
        super().__init__(d_model, n, reads, place)
        self.init = check_float("init", init)
        self.alpha = self.parameter(d_model, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set α to `init`."""
        nn.init.constant_(self.alpha, self.d_model**-0.5)

    def compute(self, streams: tuple[Tensor, ...]) -> Coefficients:
        """Return A and B, `(d_model,)` each."""
        alpha = (self.alpha * (self.init * self.d_model**0.5)).abs()
        return Coefficients(mix=((1.0 - alpha,),), inject=(alpha,))
