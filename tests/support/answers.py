"""Expected answers: what `inspect` should say of a model.

An `Answer` has the model's residual streams, or says why no rows describe it. Streams have their sublayers with rows and norms, and
their wiring. A fact that is `ANY` is not compared. Random models write their answers while they are built; those of the
transformer families and of the zoo were read in the models' code, and name the kinds of the sublayers by letters: `stream("pre_ln", "afaf")`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from addnorm import Row

ANY = ...
KINDS = {"a": "attention", "c": "cross-attention", "f": "feed-forward", "o": "other", "?": ANY}
IN, HALF = Row(norm_in=True), Row(norm_in=True, b=0.5)
CONFORMER_ROWS = HALF, IN, IN, Row(norm_in=True, norm_out=True, b=0.5)


@dataclass(frozen=True)
class Norm:
    """One norm: the path of its module, its kind, its eps (None for a norm of another formula), and whether eps is outside the root."""

    path: str = ""
    kind: str = ANY
    eps: float | None = ANY
    outside: bool = False


@dataclass(frozen=True)
class Site:
    """One sublayer.

    Args:
        path: path of its module; "" for the model itself.
        kind: its kind.
        row: its row; None if no row expresses it.
        norm_in, norm_branch, norm_out: its norms.
        parallel: number of sublayers of the same add.
        has_bias: a learned bias is added to the stream too; it may be a site that is an injection.
    """

    path: str
    kind: str
    row: Row | None
    norm_in: Norm | None = None
    norm_branch: Norm | None = None
    norm_out: Norm | None = None
    parallel: int = 1
    has_bias: bool = False


@dataclass(frozen=True)
class Stream:
    """One residual stream.

    Args:
        sites: the sublayers in order of depth.
        wiring: name of its wiring, or several where the code admits more than one, joined by "|" ("none" for no name); None, with
            `reason`, if it has none. If the rows and `num_layers` are known, any wiring with the same rows is right too.
        reason: why the stream has no wiring.
        embedding_norm, final_norm: the norms at both ends; None for no norm.
        norm: kind of all norms, or several joined by "|"; None for a stream without norms.
        eps: eps of all norms.
        options: options of the wiring.
        shared: number of different layers if one layer is used more than once, otherwise 0.
        num_layers: number of layers where the model's modules show it.
        per_layer: sublayers of one layer.
        width: number of features.
        is_whole: only biases are added beside the sites. Answers that were read in the code count injections as sites.
        remark: properties of the model's code.
    """

    sites: tuple[Site, ...]
    wiring: str | None
    reason: str = ""
    embedding_norm: Norm | None = None
    final_norm: Norm | None = None
    norm: str | None = ANY
    eps: float = ANY
    options: Mapping[str, Any] = field(default_factory=dict)
    shared: int = ANY
    num_layers: int = 0
    per_layer: int = 1
    width: int = ANY
    is_whole: bool = True
    remark: str = ""

    @property
    def names(self):
        """The names of wirings that are right."""
        return {None if name == "none" else name for name in (self.wiring or "none").split("|")}


@dataclass(frozen=True)
class Answer:
    """Streams of a model.

    Args:
        streams: the streams in the order in which they begin; empty if no rows describe the model.
        reason: why rows do not describe the model; empty if they do. Then no wiring may be named.
        also: second streams that the code admits as well.
        words: where there is a reason: the wirings of `streams` may be named if a note or a remark has one of these words.
        has_adds: whether outputs of sublayers are added to states; a reason that denies it is false.
        constructs: constructs of a random model, keys of `CONSTRUCTS`.
        limit: why `inspect` may refuse a model that rows describe; the docs do not list its construct as supported.
    """

    streams: tuple[Stream, ...]
    reason: str = ""
    also: tuple[Stream, ...] = ()
    words: tuple[str, ...] = ()
    has_adds: bool = True
    constructs: frozenset[str] = frozenset()
    limit: str = ""


def stream(
    wiring,
    letters="afaf",
    norm="layer",
    final_norm=True,
    embedding_norm=False,
    rows=(),
    **facts,
):
    """Return the answer of a stream that was read in a model's code, with the kinds of its sublayers as letters of `KINDS`.

    Args:
        wiring, norm, facts: see `Stream`.
        letters: kinds of the sublayers in the order of depth; "?" where the code admits several.
        final_norm, embedding_norm: whether there is a norm; None where only a pooled or selected part is normalized.
        rows: rows of the sublayers, repeated to their number, or some rows by the number of the sublayer; the others are open.
    """
    by_number = rows if isinstance(rows, Mapping) else {k: rows[k % len(rows)] for k in range(len(letters)) if rows}
    sites = tuple(
        Site("", KINDS[letter], by_number.get(k, ANY), ANY, ANY, ANY, parallel=ANY) for k, letter in enumerate(letters)
    )
    ends = {True: Norm(outside=ANY), False: None, None: ANY}
    return Stream(
        sites, wiring, norm=norm, embedding_norm=ends[embedding_norm], final_norm=ends[final_norm], is_whole=False, **facts
    )  # fmt: skip
