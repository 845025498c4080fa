"""Which runs make a comparison: the illustration that is the default, and the protocol that is honest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from addnorm.lab.run import Run
from addnorm.nn import Wiring
from addnorm.nn.norm import NormKind

__all__ = ["FULL", "ILLUSTRATION", "Protocol"]


@dataclass(frozen=True)
class Protocol:
    """What each wiring is trained with: every combination of these.

    Args:
        num_layers: the depths.
        rates: the learning rates, of which each wiring is judged at its best.
        warm_ups: the steps of warm-up.
        seeds: of weights and batches.
        steps, d_model, nhead, tokens, batch, norm, every: as in `Run`.
    """

    num_layers: tuple[int, ...] = (12,)
    rates: tuple[float, ...] = (1e-3,)
    warm_ups: tuple[int, ...] = (0, 100)
    seeds: tuple[int, ...] = (0,)
    steps: int = 200
    d_model: int = 64
    nhead: int = 4
    tokens: int = 64
    batch: int = 16
    norm: NormKind = "layer"
    every: int = 20

    def __post_init__(self) -> None:
        for name in ("num_layers", "rates", "warm_ups", "seeds"):
            found = getattr(self, name)
            if isinstance(found, int | float):
                found = (found,)
            if not tuple(found):
                raise ValueError(f"{name} is empty, expected at least one number.")
            object.__setattr__(self, name, tuple(dict.fromkeys(found)))

    def runs(self, compared: Sequence[Wiring]) -> list[Run]:
        """Seed by seed, so that a comparison that was ended early has whole seeds."""
        same: dict[str, Any] = {
            name: getattr(self, name) for name in ("steps", "d_model", "nhead", "tokens", "batch", "norm", "every")
        }
        return [
            Run(wiring, num_layers=n, lr=lr, warm_up=warm_up, seed=seed, **same)
            for seed, n, lr, warm_up, wiring in itertools.product(
                self.seeds, self.num_layers, self.rates, self.warm_ups, compared
            )
        ]

    @property
    def illustrates(self) -> bool:
        """Whether it is too little to judge by: one seed, or one learning rate."""
        return len(self.seeds) < 3 or len(self.rates) < 2

    def settings(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            field.name: [*value] if isinstance(value := getattr(self, field.name), tuple) else value
            for field in fields(self)
        }


ILLUSTRATION = Protocol()
FULL = Protocol(num_layers=(6, 12, 24), rates=(3e-4, 1e-3, 3e-3, 1e-2), warm_ups=(0, 100), seeds=(0, 1, 2), steps=500)
