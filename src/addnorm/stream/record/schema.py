"""What a recording tells of a sublayer: roles and their statistics, as data, and the names by which they are asked for.

Everything that prints, explains or looks up a statistic reads `STATISTICS`; nothing else lists them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ALIASES", "ROLES", "STATISTICS", "Alias", "Entry", "RecordedSite", "Selection", "Statistic", "select"]


@dataclass(frozen=True)
class RecordedSite:
    """A sublayer of a stream, or one of its ends: where it begins, the final norm.

    Args:
        id: unique: the module's path, "encoder.layer.3.attention", with "#2" for its second use; "x_0" or "final" at the ends.
        path: the module's path.
        kind: "attention", "cross-attention", "feed-forward", "other", "start" or "final".
        layer: counted from 0; None at the ends.
        stream: the name of its stream: "stream", "encoder", "decoder".
        equation: "x' = N(x + f(x))".
    """

    id: str
    path: str
    kind: str
    layer: int | None
    stream: str = "stream"
    equation: str = ""


class Entry(NamedTuple):
    """A row of the tidy table."""

    step: int
    site: str
    layer: int | None
    role: str
    statistic: str
    value: float


ROLES = {
    "in": "the stream x that enters the sublayer",
    "read": "what the sublayer reads, r",
    "raw": "what the sublayer returns, f(r)",
    "write": "what is added to the stream, w: after norm, factor and dropout",
    "out": "the stream x' after the sublayer",
    "norm_in": "the norm of what the sublayer reads",
    "norm_branch": "the norm of what the sublayer returns",
    "norm_out": "the norm of the stream after the add",
    "norm_final": "the norm after the last sublayer",
    "grad": "the gradient of the loss at the stream after the sublayer, g = ∂loss/∂x'",
    "params": "the parameters θ of the sublayer",
}


class Statistic(NamedTuple):
    """A number that is recorded of a role, or follows from one that is."""

    role: str
    name: str
    meaning: str
    formula: str
    derived_from: str = ""  # the recorded statistic whose reciprocal it is


_SYMBOLS = {"in": "x", "read": "r", "raw": "f(r)", "write": "w", "out": "x'", "grad": "g"}
_NORMS = ("norm_in", "norm_branch", "norm_out", "norm_final")
_RSTD = "1 / √(variance + eps)"

STATISTICS = (
    *(
        Statistic(role, name, meaning, formula.format(symbol))
        for role, symbol in _SYMBOLS.items()
        for name, meaning, formula in (
            ("l2", "length of a token, mean over the tokens", "mean_t ‖{}_t‖"),
            ("rms", "root mean square of all elements", "√mean({}²)"),
            ("max", "largest magnitude", "max |{}|"),
        )
    ),
    Statistic("write", "ratio", "length of the write over that of the stream it is added to, mean over the tokens",
              "mean_t ‖w_t‖ / ‖x_t‖"),
    Statistic("write", "cosine", "whether the write points along the stream, mean over the tokens", "mean_t cos(w_t, x_t)"),
    Statistic("write", "unchanged", "share of the stream's elements that adding the write leaves as they are",
              "mean(round(x + w) = x)"),
    Statistic("out", "similarity", "how alike the tokens are: mean cosine of two of them", "mean_{s≠t} cos(x'_s, x'_t)"),
    Statistic("out", "massive", "massive activations: how many", "#{|x'| > 100 and |x'| > 1000 median|x'|}"),
    Statistic("out", "top", "the largest magnitude, in medians", "max |x'| / median |x'|"),
    *(
        Statistic(role, f"{name}{end}", f"{meaning}, {which} the tokens", formula, derived_from)
        for role in _NORMS
        for name, meaning, formula, parts in (
            ("rstd", "what the norm multiplies a token by", _RSTD,
             (("", "mean over", ""), ("_min", "least of", ""), ("_max", "most of", ""))),
            ("sigma", "the norm's denominator", "1 / rstd",
             (("", "harmonic mean over", "rstd"), ("_min", "least of", "rstd_max"), ("_max", "most of", "rstd_min"))),
        )
        for end, which, derived_from in parts
    ),
    Statistic("params", "grad_l2", "length of the gradient of the sublayer's parameters", "√Σ (∂loss/∂θ)²"),
    Statistic("params", "l2", "length of the sublayer's parameters", "√Σ θ²"),
)  # fmt: skip
"""Every statistic, in the order in which tables have them."""

BY_NAME = {(statistic.role, statistic.name): statistic for statistic in STATISTICS}
ORDER = {key: place for place, key in enumerate(BY_NAME)}


class Alias(NamedTuple):
    """Another name: of the first of these roles that a site has, at sites of a kind."""

    roles: tuple[str, ...]
    kind: str | None
    meaning: str


# TransformerLens' names.
ALIASES = {
    "resid_pre": Alias(("in",), "attention", "the stream that enters a layer"),
    "attn_out": Alias(("write",), "attention", "what attention adds to the stream"),
    "resid_mid": Alias(("out",), "attention", "the stream between attention and feed-forward"),
    "mlp_out": Alias(("write",), "feed-forward", "what the feed-forward sublayer adds to the stream"),
    "resid_post": Alias(("out",), "feed-forward", "the stream that leaves a layer"),
    "scale": Alias(("norm_in", "norm_out", "norm_branch", "norm_final"), None, "a norm's denominator, sigma"),
}
STATISTIC_ALIASES = {"scale": "sigma"}


class Selection(NamedTuple):
    """What a name and a statistic mean."""

    roles: tuple[str, ...]
    statistic: str  # as it is recorded
    kind: str | None = None
    layer: int | None = None
    reciprocal: bool = False

    def takes(self, kind: str, layer: int | None) -> bool:
        """Whether a site of that kind and layer is meant."""
        return self.kind in (None, kind) and self.layer in (None, layer)

    def value(self, recorded: float) -> float:
        """The value asked for, from what was recorded."""
        return recorded if not self.reciprocal else 1.0 / recorded if recorded else float("inf")


def select(name: str, statistic: str) -> Selection:
    """What a name and a statistic mean: a role or one of TransformerLens' names, "3_attn_out" that of layer 3 alone.

    Example:
        >>> from addnorm.stream.record.schema import select
        >>> select("3_attn_out", "rms")
        Selection(roles=('write',), statistic='rms', kind='attention', layer=3, reciprocal=False)
        >>> select("attnout", "rms")
        Traceback (most recent call last):
        ...
        ValueError: name is 'attnout', expected 'attn_out'.
    """
    label = re.fullmatch(r"(\d+)_(.+)", str(name))
    layer, known = (int(label[1]), label[2]) if label else (None, name)
    alias = Alias((known,), None, "") if known in ROLES else ALIASES.get(known)
    if alias is None:
        raise ValueError(f"name is {name!r}, expected {expected(known, [*ROLES, *ALIASES])}.")
    recorded = STATISTIC_ALIASES.get(statistic, statistic)
    found = BY_NAME.get((alias.roles[0], recorded))
    if found is None:
        names = [one.name for one in STATISTICS if one.role == alias.roles[0]]
        raise ValueError(f"{known} has no statistic {statistic!r}, expected {expected(statistic, names)}.")
    return Selection(alias.roles, found.derived_from or found.name, alias.kind, layer, bool(found.derived_from))


def expected(given: object, names: Iterable[str], show: Callable[[str], str] = repr) -> str:
    """What to write instead of what was given: the name that is close to it, or all there are."""
    names = [*names]
    close = difflib.get_close_matches(str(given).lower(), names, 1)
    listed = [*names[:12], f"... ({len(names)} in all)"] if len(names) > 14 else names
    return show(close[0]) if close else f"one of {', '.join(listed)}" if names else "none: there is nothing yet"
