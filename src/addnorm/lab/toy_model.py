"""Toy transformer of the theory: the model for which papers prove what wirings do before training.

It is the model of Xiong et al. 2020 (arXiv 2002.04745), section 3: attention with zero queries and keys, so that every token
reads the mean over tokens, times W_v; a feed-forward sublayer relu(x W_1) W_2 as wide as the stream; norms without weights; all
weights N(0, 1/d) and x_0 ~ N(0, 1); a head, and the mean cross-entropy of random targets. Everything is drawn from one seed.
With sequences of one token, attention reads each token alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from addnorm.lab.streams import StreamsRecorder
from addnorm.nn import ResidualStack, Wiring


class UniformAttention(nn.Module):
    """Attention with zero queries and keys: the mean over the tokens, times W_v.

    Args:
        d_model: width of the stream.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.value = nn.Linear(d_model, d_model, bias=False)

    def weight_roles(self) -> list[tuple[str, Tensor]]:
        """Return the weights with their roles, for init rules that depend on the role."""
        return [("value", self.value.weight)]

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention output, `(*, n, d_model)`."""
        mixed: Tensor = self.value(x.mean(-2, keepdim=True))
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
        loss_tokens: number of tokens over which the loss is averaged; None means all. The paper's bounds are for the loss of one
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

    def record(self) -> StreamsRecorder:
        """Record the stack's states and their gradients under this model's loss. Weights and `x` get gradients too."""
        self.zero_grad()
        self.x = self.x.detach().requires_grad_()
        with StreamsRecorder(self.stack) as recorder:
            self().backward()
        return recorder


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean, or 0 if a value is 0."""
    numbers = list(values)
    return 0.0 if 0.0 in numbers else math.exp(statistics.fmean(math.log(value) for value in numbers))
