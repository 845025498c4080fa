"""Toy transformer of the theory: the model for which papers prove what wirings do before training.

It is the model of Xiong et al. 2020 (arXiv 2002.04745), section 3: attention with zero queries and keys, so that every token
reads the mean over tokens, times W_v; a feed-forward sublayer relu(x W_1) W_2 as wide as the stream; norms without weights; all
weights N(0, 1/d) and x_0 ~ N(0, 1); a head, and the mean cross-entropy of random targets. Everything is drawn from one seed.
`ToyModel.separate_tokens` makes attention read each token alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from addnorm.nn import ResidualStack, Wiring


class UniformAttention(nn.Module):
    """Attention with zero queries and keys: the mean over the tokens, times W_v. With `is_mixing` False each token alone.

    Args:
        d_model: width of the stream.
    """

    is_mixing = True

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.value = nn.Linear(d_model, d_model, bias=False)

    def weight_roles(self) -> list[tuple[str, Tensor]]:
        """Return the weights with their roles, for init rules that depend on the role."""
        return [("value", self.value.weight)]

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention output, `(*, n, d_model)`."""
        mixed: Tensor = self.value(x.mean(-2, keepdim=True) if self.is_mixing else x)
        return mixed.expand(x.shape)


class ToyModel(nn.Module):
    """Toy transformer with its data, all drawn from `seed`.

    Args:
        num_layers: number of layers, each an attention and a feed-forward sublayer.
        wiring: the wiring of the stack, or its name.
        seed: seed of the data and the weights.
        init: use the wiring's own rule for the weights instead of N(0, 1/d).
        sequences: number of sequences.
        tokens: length of a sequence.
        loss_tokens: number of tokens that the loss is the mean of; None is all. The paper's bounds are for the loss of one
            token: in a mean the gradients of different tokens cancel, the less so the more similar the tokens are.
        d_model: width of the stream, and number of classes.

    Attributes:
        stack: the `ResidualStack`.
        x: the input, `(sequences, tokens, d_model)`.
    """

    def __init__(
        self, num_layers: int, wiring: Wiring | str, seed: int, *,
        init: bool = False, sequences: int = 1, tokens: int = 32, d_model: int = 64, loss_tokens: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.x = torch.randn(sequences, tokens, d_model)
            self.targets = torch.randint(d_model, (sequences * tokens,))[:loss_tokens]
            sublayers: list[nn.Module] = []
            for _ in range(num_layers):
                up, down = nn.Linear(d_model, d_model, bias=False), nn.Linear(d_model, d_model, bias=False)
                sublayers += [UniformAttention(d_model), nn.Sequential(up, nn.ReLU(), down)]
            self.stack = ResidualStack(sublayers, d_model, wiring, elementwise_affine=False)
            self.head = nn.Linear(d_model, d_model, bias=False)
            for module in self.modules():
                if isinstance(module, nn.Linear):  # learned factors and coefficients keep their initial values
                    nn.init.normal_(module.weight, std=d_model**-0.5)
            if init:
                self.stack.wiring.init_(self.stack, self.x)

    def loss(self, y: Tensor) -> Tensor:
        """Return the mean cross-entropy of the stack's output `y`."""
        return F.cross_entropy(self.head(y).flatten(0, -2)[: len(self.targets)], self.targets)

    def forward(self) -> Tensor:
        """Return the loss, computed by the fused stack."""
        return self.loss(self.stack(self.x))

    def separate_tokens(self) -> None:
        """Let attention read each token alone, so that the tokens are separate examples."""
        for module in self.modules():
            if isinstance(module, UniformAttention):
                module.is_mixing = False

    def feed_forward_gradients(self) -> list[float]:
        """Return the norm of the gradient of W_2 for each layer."""
        layers: list[Any] = [*self.stack.layers]
        weights = [layer.connections[-1].sublayer[-1].weight for layer in layers]
        return [float(gradient.norm()) for gradient in torch.autograd.grad(self(), weights)]

    def measure_stream(self, *, residual_alone: bool = False) -> StreamMeasurement:
        """Return the stream and its gradient at every sublayer, under this model's loss."""
        return measure_stream(self.stack, self.x, self.loss, residual_alone=residual_alone)


class StreamMeasurement(NamedTuple):
    """Measurements of one forward and backward of a stack with one stream.

    Attributes:
        streams: the stream before the first sublayer and after each sublayer.
        gradients: the loss's gradient at these places.
        writes: the tensor that each sublayer added to the stream.
        weight_gradients: for each sublayer the gradients of its parameters, if they were requested.
    """

    streams: list[Tensor]
    gradients: list[Tensor]
    writes: list[Tensor]
    weight_gradients: list[list[Tensor]]

    def variances(self) -> list[float]:
        """Return E|x|^2 / d of the stream at each place."""
        return [float(x.double().square().mean()) for x in self.streams]

    def gradient_ratio(self) -> float:
        """Return the gradient's norm at x_0 divided by that at x_L."""
        return float(self.gradients[0].double().norm() / self.gradients[-1].double().norm())

    def input_similarity(self) -> float:
        """Return the mean cosine of a token's x_L and its x_0."""
        return float(F.cosine_similarity(self.streams[0], self.streams[-1], dim=-1).mean())


def stream_states(stack: ResidualStack, x: Tensor) -> list[Tensor]:
    """Return x_0 and the stream after each sublayer of a stack of `Row`s, by a separate call of each connection."""
    states = [x if stack.norm_embedding is None else stack.norm_embedding(x)]
    for connection in stack.connections:
        states.append(connection(states[-1]))
    return states


def measure_stream(
    stack: ResidualStack,
    x: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    residual_alone: bool = False,
    weights: bool = False,
) -> StreamMeasurement:
    """Return the stream, the writes and the gradient of a loss at every sublayer.

    Args:
        stack: the stack. Its wiring has only `Row`s.
        x: the input, `(*, d_model)`.
        loss: the loss of the stack's output.
        residual_alone: detach the sublayers' outputs, so that the gradient flows only along the residual and its norms.
        weights: also return the gradients of the sublayers' parameters.
    """
    connections: list[Any] = list(stack.connections)
    branches: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        branches.append(output.detach())
        return branches[-1] if residual_alone else output

    hooks = [connection.sublayer.register_forward_hook(keep) for connection in connections]
    try:
        states = stream_states(stack, x.detach().requires_grad_())
    finally:
        for hook in hooks:
            hook.remove()
    y = states[-1] if stack.norm_final is None else stack.norm_final(states[-1])
    parameters = [[*connection.parameters()] if weights else [] for connection in connections]
    gradients = iter(torch.autograd.grad(loss(y), [*states, *(weight for group in parameters for weight in group)]))
    at_states, at_weights = (
        [next(gradients) for _ in states],
        [[next(gradients) for _ in group] for group in parameters],
    )
    with torch.no_grad():
        writes = [_write(connection, branch) for connection, branch in zip(connections, branches, strict=True)]
    return StreamMeasurement([state.detach() for state in states], at_states, writes, at_weights)


def _write(connection: Any, branch: Tensor) -> Tensor:
    """Return the write of a sublayer, b * N_branch(branch)."""
    norm = connection.norm_branch
    write: Tensor = connection.b * (branch if norm is None else norm(branch))
    return write


def token_similarities(x: Tensor) -> Tensor:
    """Return the mean cosine of two different tokens, `(*)`, for each sequence `(*, n, d_model)`: 1 if all are equal."""
    n = x.shape[-2]
    unit: Tensor = x / x.norm(dim=-1, keepdim=True)
    return (unit.sum(-2).square().sum(-1) - n) / (n * (n - 1))


def token_similarity(x: Tensor) -> float:
    """Return the mean of `token_similarities` over the sequences."""
    return float(token_similarities(x).mean())


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean, or 0 if a value is 0."""
    numbers = list(values)
    return 0.0 if 0.0 in numbers else math.exp(statistics.fmean(math.log(value) for value in numbers))


def log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of ln y over ln x, the exponent of a power law."""
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def r_squared(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the share of y's variance that a straight line over x explains."""
    return statistics.correlation(x, y) ** 2
