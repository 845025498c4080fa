"""A random model, and the values of its stream by hand."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from support.answers import Answer


@dataclass
class TracedSite:
    """Values of one site by hand, canonical (B, T, D) in float64."""

    x: Tensor  # the stream before the add
    read: Tensor
    raw: Tensor
    write: Tensor
    out: Tensor  # the stream after the add and its norm


@dataclass
class Trace:
    """Values of one stream by hand."""

    start: Tensor
    sites: list[TracedSite]
    end: Tensor  # the model's output
    components: list[Tensor] = field(default_factory=list)  # of x_0, of each write, of the biases of norms


@dataclass
class RandomModel:
    """Model of the grammar with its inputs and its answer.

    Args:
        seed: the seed.
        model: the model.
        inputs: its arguments.
        answer: the answer.
        trace: function that computes the values by hand, from a copy of the model in float64 and inputs; its argument `without`
            is the number of a site whose write is left out. None where rows do not describe the model.
    """

    seed: int
    model: nn.Module
    inputs: tuple[Tensor, ...]
    answer: Answer
    trace: Callable[..., Trace] | None = None

    def describe(self):
        """Return the constructs in one line."""
        return f"seed {self.seed}: {', '.join(sorted(self.answer.constructs))}"
