"""Which of `addnorm.wirings` the rows of a stream are: compared row by row, norms and constants, never by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from addnorm import wirings
from addnorm.wirings.equation import number
from addnorm.wirings.spec import Factor, Learned, Row, Wiring

__all__ = ["Seen", "named"]

CLOSE = 1e-5  # relative: constants pass through the model's dtype


class Seen(NamedTuple):
    """A sublayer as it was found: its place, its row, and which sublayers its add has besides."""

    layer: int
    row: Row
    kind: str
    role: str
    together: int  # sublayers of the same add
    norms_in: frozenset[int]  # the norms with which they read, by identity
    learned: tuple[str, ...] = ()  # names of the parameters that scale what it adds
    odd: bool = False  # the row does not say all
    back: int = 0  # of a skip: over how many sublayers it leads
    normed: bool = False  # other norms inside: of batches, of groups, of what the sublayer computed


def named(
    seen: Sequence[Seen], final_norm: bool, embedding_norm: bool, other_layers: int | None
) -> tuple[Wiring | None, list[str]]:
    """The wiring of these rows, and remarks on what differs from it."""
    bottom_to_top = _bottom_to_top(seen)
    if bottom_to_top:
        return wirings.b2t(), ["with a norm of the embedding"] * embedding_norm
    usual = [s for s in seen if s.role == "branch"]
    if any(s.odd for s in usual):
        return None, []
    if any(s.role == "injection" and s.row.a != 1.0 for s in seen):
        return None, ["between sublayers the stream is multiplied by a factor, and something is added"]
    odd = [s for s in usual if s.kind == "other"]
    if odd and len(odd) < len(usual):  # a positional convolution, say
        usual = [s for s in usual if s.kind != "other"] if not _same_rows(usual) else usual
    best: tuple[int, Wiring, list[str]] | None = None
    for wiring in _candidates(usual, other_layers):
        remarks = _remarks(wiring, usual, final_norm, embedding_norm)
        if remarks is not None and (best is None or len(remarks) < best[0]):
            best = len(remarks), wiring, remarks
    if best is not None and not any(_normed(s.row) for s in usual) and any(s.normed for s in usual):
        return None, ["the norms are inside of the sublayers, or are norms of batches or groups"]
    if best is None:
        return None, _near_miss(usual, other_layers)
    return best[1], [*best[2], *_also(best[1], usual[-1].layer + 1), *_exceptions(seen, usual)]


def _exceptions(seen: Sequence[Seen], usual: Sequence[Seen]) -> list[str]:
    """The sublayers that were left out when the wiring was told."""
    found: dict[tuple[str, Row], list[str]] = {}
    for s in seen:
        if s not in usual and s.role == "branch":
            found.setdefault((s.kind, s.row), []).append(str(s.layer + 1))
    return [
        f"{kind} in layer{'s' * (len(layers) > 1)} {', '.join(layers)} has a row of its own: {row}"
        for (kind, row), layers in found.items()
    ]


def _also(wiring: Wiring, num_layers: int) -> list[str]:
    """By which other rule the same constant could have come."""
    k = dict(wiring.options).get("multiplier")
    rules = (("depth_mup", num_layers**-0.5), ("completep", 1 / num_layers))
    found = [name for name, value in rules if k is not None and num_layers > 1 and _close(value, k)]
    return [f"with {num_layers} layers the constant is also that of {name}(k=1)" for name in found]


def _bottom_to_top(seen: Sequence[Seen]) -> bool:
    """Whether every layer is post-LN whose input is added once more before its last norm."""
    layers: dict[int, list[Seen]] = {}
    for s in seen:
        layers.setdefault(s.layer, []).append(s)
    for parts in layers.values():
        own = [s for s in parts if s.role == "branch"]
        skips = [s for s in parts if s.role == "skip"]
        plain = all(_alike(replace(s.row, norm_out=False), Row()) for s in own)
        ends = parts[-1].row.norm_out and all(s.row.norm_out for s in own[:-1])
        if len(skips) != 1 or not plain or not ends or skips[0].back != len(own):
            return False
    return bool(layers)


def _same_rows(seen: Sequence[Seen]) -> bool:
    return len({(s.row.norm_in, s.row.norm_branch, s.row.norm_out) for s in seen}) == 1


def _candidates(seen: Sequence[Seen], other_layers: int | None) -> Iterator[Wiring]:
    """The wirings that could be it, with the options that the rows show."""
    if not seen:
        return
    if all(s.together > 1 for s in seen):
        yield wirings.parallel(1 if all(len(s.norms_in) < 2 for s in seen) else 2)
        return
    if any(s.together > 1 for s in seen):
        return
    b = seen[-1].row.b
    yield from (wirings.post_ln(), wirings.pre_ln(), wirings.sandwich(), wirings.peri_ln(), wirings.reordered())
    yield from (wirings.no_norm(), wirings.layernorm_scaling(), wirings.admin())
    yield from (wirings.no_residual(), wirings.no_residual(norm=False))
    yield wirings.deepnorm()
    if other_layers is not None:
        yield from (wirings.deepnorm("encoder", other_layers), wirings.deepnorm("decoder", other_layers))
    if isinstance(b, Learned):
        by_layer: dict[int, set[tuple[str, ...]]] = {}
        for s in seen:
            by_layer.setdefault(s.layer, set()).add(s.learned)
        shared = len(seen) > len(by_layer) and all(len(names) == 1 for names in by_layer.values())
        start = _untrained(seen)
        yield wirings.rezero() if shared else wirings.skipinit(start or 0.0)
        yield wirings.layer_scale(start)
    elif b != 1.0:
        num_layers = seen[-1].layer + 1
        of_depth = [(wirings.depth_mup, b * num_layers**0.5), (wirings.completep, b * num_layers)]
        for make, k in of_depth:  # 0.98995 in two layers was written as 1.4/sqrt(L)
            if num_layers > 1 and len(f"{k:.12g}") + 3 < len(f"{b:.12g}"):
                yield make(float(f"{k:.12g}"))
        yield wirings.residual_multiplier(b)
    post = [s.layer for s in seen if s.row.norm_out]
    if post and len(post) < len(seen):
        yield wirings.mix_ln(max(post) + 1)


def _untrained(seen: Sequence[Seen]) -> float | None:
    """The value of all learned factors, if they are the same everywhere, and so as they started."""
    values = {f"{s.row.b.init:.6g}" for s in seen if isinstance(s.row.b, Learned)}
    return float(values.pop()) or None if len(values) == 1 and len(seen) > 1 else None


def _remarks(wiring: Wiring, seen: Sequence[Seen], final_norm: bool, embedding_norm: bool) -> list[str] | None:
    """What differs from a wiring beside the rows; None where a row differs."""
    num_layers = seen[-1].layer + 1
    per_layer, remarks = max(Counter(s.layer for s in seen).values()), []
    at = -1
    place = 0
    for k, s in enumerate(seen):
        place = 0 if s.layer != at else place + 1
        at = s.layer
        expected = wiring.row(s.layer, place, num_layers, per_layer)
        if wiring.flow == "parallel":
            expected = Row(norm_in=True)
        if not _alike(expected, s.row):
            if (
                k == len(seen) - 1
                and embedding_norm
                and not final_norm
                and _alike(expected, replace(s.row, norm_out=True))
            ):
                remarks.append("without the norm of the last sublayer")
                continue
            if (
                k == 0
                and embedding_norm
                and _alike(expected, Row(norm_in=True, a=s.row.a, b=s.row.b))
                and not _normed(s.row)
            ):
                remarks.append("the first sublayer reads the embedding norm's result, without a norm of its own")
                continue
            return None
    if final_norm and not wiring.ends_in_norm(num_layers):
        remarks.append("with a final norm, which this wiring has not")
    if not final_norm and wiring.ends_in_norm(num_layers):
        remarks.append("without the final norm that this wiring has")
    if embedding_norm != wiring.embedding_norm:
        remarks.append("with a norm of the embedding" if embedding_norm else "without the norm of the embedding")
    return remarks


def _normed(row: Row) -> bool:
    return row.norm_in or row.norm_branch or row.norm_out


def _alike(expected: Row, row: Row) -> bool:
    norms = all(getattr(expected, name) == getattr(row, name) for name in ("norm_in", "norm_branch", "norm_out"))
    return norms and all(_close(getattr(expected, name), getattr(row, name)) for name in ("a", "b", "c"))


def _close(expected: Factor, found: Factor) -> bool:
    if isinstance(expected, Learned) or isinstance(found, Learned):
        return (
            isinstance(expected, Learned) and isinstance(found, Learned) and expected.per_feature == found.per_feature
        )
    return abs(expected - found) <= CLOSE * max(abs(expected), abs(found))


def _near_miss(seen: Sequence[Seen], other_layers: int | None) -> list[str]:
    """What the rows would be with the factors of stream and branch exchanged: DeepNorm's alpha on the wrong term."""
    factors = {s.row.b for s in seen}
    if len(factors) != 1 or not all(isinstance(s.row.b, float) and s.row.a == 1.0 and s.row.norm_out for s in seen):
        return []
    b: Any = factors.pop()
    if b == 1.0:
        return []
    swapped = [
        s._replace(row=Row(norm_in=s.row.norm_in, norm_branch=s.row.norm_branch, norm_out=True, a=b)) for s in seen
    ]
    wiring = next(
        (w for w in _candidates(swapped, other_layers) if _remarks(w, swapped, False, False) is not None), None
    )
    name = f"{wiring.name}'s" if wiring else "post-LN with a"
    k = number(b)
    return [f"{name} factor {k} stands on the branch, x' = N(x + {k} f(x)); it belongs on the stream, N({k} x + f(x))"]


PRE = re.compile(r"pre[-_ ]?(ln|norm|layer[-_ ]?norm)", re.I)
POST = re.compile(r"post[-_ ]?(ln|norm|layer[-_ ]?norm)", re.I)


def says_otherwise(text: str, wiring: Wiring) -> str | None:
    """What a class calls itself, where its rows are the opposite."""
    pattern, other = (
        (PRE, POST) if wiring.name == "post_ln" else (POST, PRE) if wiring.name == "pre_ln" else (None, None)
    )
    if pattern is None or other is None:
        return None
    found = pattern.search(text)
    return found[0] if found and not other.search(text) else None
