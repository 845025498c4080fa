"""Stacks that benchmarks compare: the sublayers of one in a plain PyTorch loop, and the call that is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from addnorm import ResidualStack

JOBS = {"inference": "inference", "training": "forward + backward"}


class Plain(nn.Module):
    """The very sublayers of a stack in the loop that most people write, with torch's own norms over the same parameters."""

    def __init__(self, stack: ResidualStack) -> None:
        super().__init__()
        connections: Any = stack.connections
        self.sublayers = nn.ModuleList(one.sublayer for one in connections)
        self.pre = stack.wiring.name == "pre_ln"
        self.norms = nn.ModuleList(torch_norm(one.norm_in if self.pre else one.norm_out) for one in connections)
        self.final = torch_norm(stack.norm_final) if self.pre else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after all sublayers."""
        if self.pre:
            for sublayer, norm in zip(self.sublayers, self.norms, strict=True):
                x = x + sublayer(norm(x))
        else:
            for sublayer, norm in zip(self.sublayers, self.norms, strict=True):
                x = norm(x + sublayer(x))
        y: Tensor = self.final(x)
        return y


def torch_norm(norm: Any) -> nn.LayerNorm:
    """Return torch's LayerNorm with the parameters of addnorm's."""
    made = nn.LayerNorm(norm.normalized_shape, norm.eps)
    made.weight, made.bias = norm.weight, norm.bias
    return made


def call_of(module: nn.Module, job: str, x: Tensor, dy: Tensor) -> Callable[[], Any]:
    """Return the function that is timed: the output, or the gradients of input and parameters."""
    if job == "inference":

        def infer() -> Any:
            with torch.no_grad():
                return module(x)

        return infer
    wanted = [x, *module.parameters()]
    return lambda: torch.autograd.grad(module(x), wanted, dy)
