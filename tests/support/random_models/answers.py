"""Answers that the grammar writes while it builds a model: streams, sites, norms, the wiring or why it has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from addnorm import Row
from support.random_models.norms import SpelledNorm

__all__ = ["Answer", "NormAnswer", "RandomModel", "SiteAnswer", "StreamAnswer", "Trace", "TracedSite"]


@dataclass(frozen=True)
class NormAnswer:
    """One norm: the path of its module, its kind and its eps, None for a norm of a formula of its own."""

    path: str
    kind: str
    eps: float | None
    outside: bool = False

    @classmethod
    def of(cls, norm: SpelledNorm | None, path: str) -> NormAnswer | None:
        """Return the answer of a norm of the grammar."""
        return None if norm is None else cls(path, norm.spelling.kind, norm.eps, norm.spelling.outside)


@dataclass(frozen=True)
class SiteAnswer:
    """One site.

    Args:
        path: path of the sublayer's module.
        kind: kind of the sublayer.
        row: its row; None if no row expresses it.
        norm_in, norm_branch, norm_out: its norms.
        role: "branch", "skip" or "injection".
        parallel: number of sublayers of the same add.
        has_bias: a learned bias is added to the stream too; it may be a site that is an injection.
    """

    path: str
    kind: str
    row: Row | None
    norm_in: NormAnswer | None = None
    norm_branch: NormAnswer | None = None
    norm_out: NormAnswer | None = None
    role: str = "branch"
    parallel: int = 1
    has_bias: bool = False


@dataclass(frozen=True)
class StreamAnswer:
    """One stream.

    Args:
        sites: the sites in order of depth.
        wiring: name of the wiring, or None with `reason`. Any wiring of `addnorm.wirings` with the same rows is right too.
        reason: why the stream has no wiring.
        embedding_norm, final_norm: the norms at both ends.
        has_free_end: a norm of a part of x_L (one token, a mean) follows, which may count as the final norm or not.
        num_layers: number of layers where the model's modules show it.
        per_layer: sublayers of one layer.
        width: number of features.
    """

    sites: tuple[SiteAnswer, ...]
    wiring: str | None
    reason: str = ""
    embedding_norm: NormAnswer | None = None
    final_norm: NormAnswer | None = None
    has_free_end: bool = False
    num_layers: int = 0
    per_layer: int = 1
    width: int = 0


@dataclass(frozen=True)
class Answer:
    """Streams of a model.

    Args:
        streams: the streams in the order in which they begin; empty if no row describes the model.
        constructs: constructs of the model, keys of `CONSTRUCTS`.
        reason: why the streams of the model cannot be described by rows; empty if they can.
        limit: why `inspect` may refuse a model that rows describe; the docs do not list its construct as supported.
        has_adds: whether outputs of sublayers are added to states; a reason that denies it is false.
        words: where there is a reason: the wirings of `streams` may be named if a note or a remark has one of these words.
    """

    streams: tuple[StreamAnswer, ...]
    constructs: frozenset[str]
    reason: str = ""
    words: tuple[str, ...] = ()
    has_adds: bool = True
    limit: str = ""


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

    def describe(self) -> str:
        """Return the constructs in one line."""
        return f"seed {self.seed}: {', '.join(sorted(self.answer.constructs))}"
