"""The toy transformer of the theory, through `ResidualStack`, and what is measured on it: seconds, not hours.

It is the model of Xiong et al. 2020 (arXiv 2002.04745), section 3: attention whose queries and keys are zero, so that every
token reads the mean over tokens, times W_v; a feed-forward block relu(x W_1) W_2 as wide as the stream; norms without weights;
all weights N(0, 1/d) and x_0 ~ N(0, 1); a head, and the mean cross-entropy of random targets. All is drawn from a seed.
Which tokens are averaged is a choice (`Mixing`): all of them, those up to one's own place, or one's own alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from addnorm.nn import ResidualStack, SublayerConnection, Wiring

__all__ = ["Mixing", "Passed", "Toy", "UniformAttention", "geometric_mean", "likeness", "r_squared", "slope", "streams"]

Wired = Wiring | str
Mixing = Literal["mean", "causal", "none"]


def _mean_so_far(x: Tensor) -> Tensor:
    """Of each token and those before it."""
    return x.cumsum(-2) / torch.arange(1, x.shape[-2] + 1, device=x.device, dtype=x.dtype).unsqueeze(-1)


# What every token reads, where queries and keys are zero: softmax(0) under no mask, a causal one, that of the diagonal.
_MIXED: dict[Mixing, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(-2, keepdim=True),
    "causal": _mean_so_far,
    "none": lambda x: x,
}


class UniformAttention(nn.Module):
    """Attention with zero queries and keys: the mean over the tokens that the mask leaves, times W_v.

    Args:
        d_model: the width.
        mixing: "mean" of all tokens, "causal": of those up to one's own, "none": of one's own alone.
    """

    def __init__(self, d_model: int, mixing: Mixing = "mean") -> None:
        super().__init__()
        if mixing not in get_args(Mixing):
            raise ValueError(f"mixing is {mixing!r}, expected one of {', '.join(get_args(Mixing))}.")
        self.mixing: Mixing = mixing
        self.value = nn.Linear(d_model, d_model, bias=False)

    def weight_roles(self) -> list[tuple[str, Tensor]]:
        """For init rules that depend on the role."""
        return [("value", self.value.weight)]

    def forward(self, x: Tensor) -> Tensor:
        """`(*, n, d_model)` to the same shape; by "mean" every token gets the same."""
        mixed: Tensor = self.value(_MIXED[self.mixing](x))
        return mixed.expand(x.shape)


class Toy(nn.Module):
    """The toy transformer with its data, all drawn from `seed`.

    Args:
        num_layers: each an attention and a feed-forward block.
        wiring: of the stack.
        seed: of the data and of the weights.
        init: weights by the wiring's own rule, instead of N(0, 1/d).
        sequences: of `tokens` tokens each.
        tokens: in a sequence.
        judged: how many tokens the loss is the mean of; None: all. The paper's bounds are for each token's own loss: in a mean
            the gradients of different tokens cancel, and the less so the more alike the tokens are, which is another story.
        d_model: the width, and the number of classes.
        mixing: which tokens the attention averages; the same weights and data are drawn for each.

    Attributes:
        stack: the `ResidualStack`.
        x: `(sequences, tokens, d_model)`.
    """

    def __init__(
        self, num_layers: int, wiring: Wired, seed: int, *,
        init: bool = False, sequences: int = 1, tokens: int = 32, d_model: int = 64, judged: int | None = None,
        mixing: Mixing = "mean",
    ) -> None:  # fmt: skip
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.x = torch.randn(sequences, tokens, d_model)
            self.targets = torch.randint(d_model, (sequences * tokens,))[:judged]
            sublayers: list[nn.Module] = []
            for _ in range(num_layers):
                up, down = nn.Linear(d_model, d_model, bias=False), nn.Linear(d_model, d_model, bias=False)
                sublayers += [UniformAttention(d_model, mixing), nn.Sequential(up, nn.ReLU(), down)]
            self.stack = ResidualStack(sublayers, d_model, wiring, elementwise_affine=False)
            self.head = nn.Linear(d_model, d_model, bias=False)
            for parameter in self.parameters():
                if parameter.dim() == 2:  # a learned factor keeps its own start
                    nn.init.normal_(parameter, std=d_model**-0.5)
            if init:
                self.stack.wiring.init_(self.stack, self.x)

    def loss(self, y: Tensor) -> Tensor:
        """The mean cross-entropy of what the stack returned."""
        return F.cross_entropy(self.head(y).flatten(0, -2)[: len(self.targets)], self.targets)

    def forward(self) -> Tensor:
        """The loss, by the fused stack."""
        return self.loss(self.stack(self.x))

    def mix(self, mixing: Mixing) -> Toy:
        """The attention averages other tokens from now on."""
        for module in self.modules():
            if isinstance(module, UniformAttention):
                module.mixing = mixing
        return self

    def feed_forward_gradients(self) -> list[float]:
        """The norm of the gradient of W_2, layer by layer."""
        blocks: list[Any] = [layer[-1].sublayer for layer in self.stack.layers()]
        last = [block[-1].weight for block in blocks]
        return [float(gradient.norm()) for gradient in torch.autograd.grad(self(), last)]

    def passed(self, *, residual_alone: bool = False) -> Passed:
        """The stream and its gradient at every sublayer, under this model's loss."""
        return passed(self.stack, self.x, self.loss, residual_alone=residual_alone)


class Passed(NamedTuple):
    """The stream before the first sublayer and after each, and the gradient of the loss at these places."""

    streams: list[Tensor]
    gradients: list[Tensor]

    def variances(self) -> list[float]:
        """E|x|^2 / d of the stream."""
        return [float(x.double().square().mean()) for x in self.streams]

    def gradient_ratio(self) -> float:
        """The gradient's norm at x_0 over that at x_L."""
        return float(self.gradients[0].double().norm() / self.gradients[-1].double().norm())

    def memory(self) -> float:
        """The mean cosine of a token's x_L and its x_0."""
        return float(F.cosine_similarity(self.streams[0], self.streams[-1], dim=-1).mean())


def streams(stack: ResidualStack, x: Tensor) -> list[Tensor]:
    """x_0 and the stream after each sublayer, one connection at a time: for wirings that are rows."""
    connections: Iterable[SublayerConnection] = stack.connections  # type: ignore[assignment]  # a ModuleList of them
    found = [x if stack.norm_embedding is None else stack.norm_embedding(x)]
    for connection in connections:
        found.append(connection(found[-1]))
    return found


def passed(
    stack: ResidualStack, x: Tensor, loss: Callable[[Tensor], Tensor], *, residual_alone: bool = False
) -> Passed:
    """The stream and the gradient of a loss of the stack's output, at every sublayer.

    `residual_alone`: no gradient goes through the sublayers: what arrives came along the residual,
    through the norms that stand on it.
    """
    modules: list[Any] = [connection.sublayer for connection in stack.connections] if residual_alone else []
    hooks = [module.register_forward_hook(lambda module, args, output: output.detach()) for module in modules]
    try:
        found = streams(stack, x.detach().requires_grad_())
    finally:
        for hook in hooks:
            hook.remove()
    y = found[-1] if stack.norm_final is None else stack.norm_final(found[-1])
    gradients = torch.autograd.grad(loss(y), found)
    return Passed([one.detach() for one in found], list(gradients))


def likeness(x: Tensor) -> float:
    """The mean cosine of two different tokens of a sequence `(*, n, d_model)`: 1 if all are alike."""
    n = x.shape[-2]
    unit = x / x.norm(dim=-1, keepdim=True)
    return float(((unit.sum(-2).square().sum(-1) - n) / (n * (n - 1))).mean())


def geometric_mean(values: Iterable[float]) -> float:
    """exp of the mean of the logarithms; 0 if one is 0."""
    found = list(values)
    return 0.0 if 0.0 in found else math.exp(statistics.fmean(math.log(value) for value in found))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of ln y over ln x: the exponent of a power law."""
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def r_squared(x: Sequence[float], y: Sequence[float]) -> float:
    """How much of y's variance a straight line over x explains."""
    return statistics.correlation(x, y) ** 2
