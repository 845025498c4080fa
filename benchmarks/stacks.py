"""The sublayers of a stack in a plain PyTorch loop, which benchmarks compare with it."""

from __future__ import annotations

from typing import Any

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
