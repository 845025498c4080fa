"""Kit for random models that are no plain chain: their modules, their answers, and a module that runs a function."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from support.random_models.answers import Answer, NormAnswer, RandomModel, SiteAnswer, StreamAnswer
from support.random_models.chains import draw_sizes
from support.random_models.layouts import Layout, Sizes, make_layout
from support.random_models.norms import SpelledNorm, draw_norm
from support.random_models.rows import Plan
from support.random_models.steps import Step, StepParts, draw_add
from support.random_models.sublayers import Attention, Sublayer, draw_sublayer

__all__ = ["POST", "PRE", "CrossAttention", "Graph", "Kit", "flatten"]

PRE, POST = Plan(norm_in=True), Plan(norm_out=True)


class Graph(nn.Module):
    """Model that runs a function of itself and its inputs."""

    def __init__(self, run: Callable[..., Any], **modules: nn.Module | nn.Parameter | None) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


class CrossAttention(Attention):
    """Attention to a memory."""

    kind = "cross-attention"

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        return self.core(x, memory)

    def by_hand(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        return self.core(x, memory)


class Kit:
    """Random parts of one model with the same norms and sizes.

    Args:
        rng: the random numbers.
        seed: the seed.
        name: the construct.
        layout: layout of the stream.
    """

    def __init__(self, rng: random.Random, seed: int, name: str, layout: str = "batch") -> None:
        self.rng, self.seed, self.name = rng, seed, name
        self.sizes: Sizes = draw_sizes(rng)
        self.layout: Layout = make_layout(layout, self.sizes)  # type: ignore[arg-type]
        self.spelling, self.eps = draw_norm(rng, is_plain=True)
        self.num_layers = rng.choice((2, 2, 3))
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def d(self) -> int:
        return self.sizes.features

    def norm(self, width: int = 0) -> SpelledNorm:
        """Return a norm of the stream."""
        return SpelledNorm(self.spelling, self.layout, width or self.d, self.eps)

    def sublayer(self, letter: str) -> Sublayer:
        """Return a sublayer whose kind does not depend on the number of tokens: "a", "c" (cross-attention), "f" or "o"."""
        if letter == "c":
            return CrossAttention(self.layout)
        return draw_sublayer(self.rng, letter, is_plain=True)(self.layout)

    def step(self, letter: str, plan: Plan = PRE, is_plain: bool = True) -> Step:
        """Return a step."""
        norms = [self.norm() if has else None for has in (plan.norm_in, plan.norm_branch, plan.norm_out)]
        add = draw_add(self.rng, plan, self.layout, is_plain)
        return Step(plan, StepParts(self.sublayer(letter), *norms), self.layout, add)

    def layers(
        self, letters: str = "af", plan: Plan = PRE, is_plain: bool = True, num_layers: int = 0
    ) -> nn.ModuleList:
        """Return layers of steps."""
        return nn.ModuleList(
            nn.ModuleList(self.step(letter, plan, is_plain) for letter in letters)
            for _ in range(num_layers or self.num_layers)
        )

    def noise(self, *shape: int) -> Tensor:
        """Return random numbers."""
        return torch.randn(shape, generator=self.generator)

    def input(self, tokens: int = 0) -> Tensor:
        """Return a stream (B, T, D)."""
        return self.noise(self.sizes.batch, tokens or self.sizes.tokens, self.d)

    def linear(self) -> nn.Linear:
        return nn.Linear(self.d, self.d)

    # --- answers ---------------------------------------------------------------------------------------------------------

    def sites(self, layers: nn.ModuleList, path: str = "layers", **changes: object) -> list[SiteAnswer]:
        """Return the answers of the steps of layers."""
        return [
            replace(step.answer(f"{path}.{n}.{k}"), **changes)  # type: ignore[arg-type]
            for n, layer in enumerate(layers) for k, step in enumerate(layer)
        ]  # fmt: skip

    def stream(
        self, sites: Sequence[SiteAnswer], wiring: str | None, reason: str = "", final: SpelledNorm | None = None,
        path: str = "last", **facts: Any,
    ) -> StreamAnswer:  # fmt: skip
        """Return the answer of a stream."""
        per_layer = facts.pop("per_layer", 2)
        return StreamAnswer(
            tuple(sites), wiring, reason, final_norm=NormAnswer.of(final, path), num_layers=-(-len(sites) // per_layer),
            per_layer=per_layer, width=facts.pop("width", self.d), **facts,
        )  # fmt: skip

    def build(
        self, model: nn.Module, inputs: Sequence[Tensor], *streams: StreamAnswer, reason: str = "", words: Sequence[str] = (),
        trace: Callable[..., Any] | None = None, limit: str = "",
    ) -> RandomModel:  # fmt: skip
        """Return the model with its answer."""
        answer = Answer(streams, frozenset({self.name}), reason, tuple(words), limit=limit)
        return RandomModel(self.seed, model, tuple(inputs), answer, trace)


def flatten(layers: nn.ModuleList) -> list[Step]:
    """Return the steps of all layers."""
    return [step for layer in layers for step in layer]
