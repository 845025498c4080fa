"""Roles and statistics of a recording as data, the names that select them, and the types of its sites, rows and balances.

Files, selections and docs read `STATISTICS`. The table, the plots, the report and the explorer choose some of its entries.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

MemoryMap = tuple[list[str], list[list[float]]]  # the sources, and for each depth their shares

ENDS = {"start": "x_0", "final": "final norm"}  # the kinds of the sites that are no sublayers, and how they are shown


@dataclass(frozen=True)
class RecordedSite:
    """Sublayer of a stream, or an end of the stream: x_0 or the final norm.

    Args:
        id: unique name: the module's path, "encoder.layer.3.attention", with "#2" for its second use; "x_0" or "final" at the
            ends.
        path: the module's path.
        kind: "attention", "cross-attention", "feed-forward", "other", "start" or "final".
        layer: index of the layer from 0; None at the ends.
        stream: name of the stream: "stream", "encoder", "decoder".
        equation: the residual equation, "x' = N(x + f(x))".
    """

    id: str
    path: str
    kind: str
    layer: int | None
    stream: str = "stream"
    equation: str = ""


class Measurement(NamedTuple):
    """Row of the tidy table: one number."""

    step: int
    site: str
    layer: int | None
    role: str
    statistic: str
    value: float


@dataclass(frozen=True)
class Balance:
    """Balance sheet of one stream at the last recorded step: how much each source contributes to the final stream's norm.

    Formula: |x| = sum over sources of <c_s, x> / |x|, since x = sum of c_s. x is the stream after the last sublayer, c_s the
    component of source s in it, propagated through every norm on its way. Both sides are means over the same tokens.

    Args:
        sources: "x_0", the ids of the sublayers, and "norm biases" where norms on the stream have biases.
        amounts: for each source, the mean over the tokens of <c_s, x> / |x|. A component opposite to the stream is negative.
        stream_norm: mean over the same tokens of |x|, the recorded stream after the last sublayer, before a final norm.
        tokens: number of tokens.
        closure: the largest relative error over all depths of the components' sum against the recorded stream.
        reason: why the components do not add up to the stream, in which case there are no amounts; empty otherwise.
        total_tokens: number of tokens that the mask selects. It is larger than `tokens` if these are evenly spaced ones of them,
            because all would take more than 64 MiB; 0 in older files.

    An amount divided by `stream_norm` is not the source's share, which is the mean over the tokens of <c_s, x> / |x|^2. The last
    row of the memory map has the shares.

    Example:
        >>> from addnorm.stream.record.schema import Balance
        >>> sheet = Balance(("x_0", "0.attn", "0.mlp"), (1.0, 2.5, -0.5), stream_norm=3.0, tokens=8, closure=1e-7)
        >>> sheet.error, dict(zip(sheet.sources, sheet.amounts))["0.attn"]
        (0.0, 2.5)
    """

    sources: tuple[str, ...] = ()
    amounts: tuple[float, ...] = ()
    stream_norm: float = math.nan
    tokens: int = 0
    closure: float = math.nan
    reason: str = ""
    total_tokens: int = 0

    @property
    def error(self) -> float:
        """Relative error |stream_norm - sum of the amounts| / stream_norm; NaN where there are no amounts."""
        finite = all(map(math.isfinite, self.amounts))
        difference = abs(self.stream_norm - math.fsum(self.amounts)) if finite else math.nan
        return difference / self.stream_norm if self.stream_norm else difference


ROLES = {
    "in": "the stream x that enters the sublayer",
    "read": "the sublayer's input, r",
    "raw": "the sublayer's output, f(r)",
    "write": "the term that is added to the stream, w: the output after norm, factor and dropout",
    "out": "the stream x' after the sublayer",
    "norm_in": "the norm of the sublayer's input",
    "norm_branch": "the norm of the sublayer's output",
    "norm_out": "the norm of the stream after the add",
    "norm_final": "the norm after the last sublayer",
    "grad": "the gradient of the loss at the stream after the sublayer, g = ∂loss/∂x'",
    "grad_frozen": "the same with the computed A, B and C of several streams as constants, ĝ: without what passes through their "
    "computation; recorded where some are computed",
    "params": "the parameters θ of the sublayer",
    "matrices": "the matrices C, A and B of a sublayer of several streams, as they are in this step",
}


class Statistic(NamedTuple):
    """Statistic of a role (a tensor or norm at a sublayer, see `ROLES`): recorded, or the reciprocal of a recorded one."""

    role: str
    name: str
    meaning: str
    formula: str
    reciprocal_of: str = ""  # for a derived statistic: the recorded statistic


_SYMBOLS = {"in": "x", "read": "r", "raw": "f(r)", "write": "w", "out": "x'", "grad": "g", "grad_frozen": "ĝ"}
_NORMS = ("norm_in", "norm_branch", "norm_out", "norm_final")
_RSTD = "1 / √(variance + eps)"

# In the order of tables. tokens.py computes those of tensors.
STATISTICS = (
    *(
        Statistic(role, name, meaning, formula.format(symbol))
        for role, symbol in _SYMBOLS.items()
        for name, meaning, formula in (
            ("l2", "L2 norm of a token, mean over the tokens", "mean_t ‖{}_t‖"),
            ("rms", "root mean square of all elements", "√mean({}²)"),
            ("max", "largest magnitude", "max |{}|"),
        )
    ),
    Statistic("write", "ratio", "L2 norm of the write relative to that of the stream it is added to, mean over the tokens",
              "mean_t ‖w_t‖ / ‖x_t‖"),
    Statistic("write", "cosine", "cosine between the write and the stream, mean over the tokens", "mean_t cos(w_t, x_t)"),
    Statistic("write", "unchanged", "share of the stream's elements that adding the write does not change",
              "mean(round(x + w) = x)"),
    Statistic("write", "share", "share of the write in the sum of several streams, mean over the tokens",
              "mean_t ⟨w_t, s_t⟩ / ‖s_t‖²"),
    Statistic("out", "similarity", "cosine between two tokens of a sequence, mean over the pairs", "mean_{s≠t} cos(x'_s, x'_t)"),
    Statistic("out", "massive", "number of massive activations", "#{|x'| > 100 and |x'| > 1000 median|x'|}"),
    Statistic("out", "top", "largest magnitude relative to the median magnitude", "max |x'| / median |x'|"),
    *(
        Statistic(role, f"{name}{suffix}", f"{meaning}, {reduction} the tokens", formula, reciprocal_of)
        for role in _NORMS
        for name, meaning, formula, parts in (
            ("rstd", "the norm's factor for a token", _RSTD,
             (("", "mean over", ""), ("_min", "minimum over", ""), ("_max", "maximum over", ""))),
            ("sigma", "the norm's denominator", "1 / rstd",
             (("", "harmonic mean over", "rstd"), ("_min", "minimum over", "rstd_max"), ("_max", "maximum over", "rstd_min"))),
        )
        for suffix, reduction, reciprocal_of in parts
    ),
    Statistic("params", "grad_l2", "L2 norm of the gradient of the sublayer's parameters", "√Σ (∂loss/∂θ)²"),
    Statistic("params", "l2", "L2 norm of the sublayer's parameters", "√Σ θ²"),
    Statistic("matrices", "forward", "largest deviation of a row sum of A from 1: of what a stream receives",
              "max |Σ_j a_ij - 1|"),
    Statistic("matrices", "backward", "the same of a column sum: of what a stream passes on, and its gradient receives",
              "max |Σ_i a_ij - 1|"),
    Statistic("matrices", "concentration", "from 1/n, where C reads all streams alike, to 1, where it reads one",
              "mean_t Σ_j (|c_j| / Σ|c|)²"),
    Statistic("matrices", "spread_C", "standard deviation over the tokens of an entry of C, mean over the entries",
              "mean_j sd_t(c_j)"),
    Statistic("matrices", "spread_B", "the same of B", "mean_i sd_t(b_i)"),
)  # fmt: skip
# Statistics of several streams together that are recorded for each of them too: "rms_0" is that of the first stream.
BY_STREAM = {*((role, name) for role in ("in", "out", "grad", "grad_frozen") for name in ("l2", "rms", "max")),
             ("write", "share")}  # fmt: skip

_BY_NAME = {(statistic.role, statistic.name): statistic for statistic in STATISTICS}
_PLACES = {key: place for place, key in enumerate(_BY_NAME)}


def find_statistic(role: str, name: str) -> Statistic | None:
    """Return a statistic by its name, or that of one stream: "rms_0", of the first of several; None if there is none.

    Example:
        >>> from addnorm.stream.record.schema import find_statistic
        >>> find_statistic("out", "rms_2").meaning
        'root mean square of all elements, of stream 2 counted from 0'
    """
    base, number = _split_number(role, name)
    entry = _BY_NAME.get((role, base))
    if entry is None or number < 0:
        return entry
    return entry._replace(name=name, meaning=f"{entry.meaning}, of stream {number} counted from 0")


def order_statistic(role: str, name: str) -> tuple[int, int]:
    """Return the key that sorts statistics as `STATISTICS`, those of single streams after that of all."""
    base, number = _split_number(role, name)
    return _PLACES[role, base], number


def _split_number(role: str, name: str) -> tuple[str, int]:
    """Return the name of a statistic without the number of a stream, and this number; -1 if the name has none."""
    base, _, number = name.rpartition("_")
    of_one = (role, base) in BY_STREAM and number.isascii() and number.isdigit()
    return (base, int(number)) if of_one else (name, -1)


class HookName(NamedTuple):
    """Selection that a TransformerLens hook name stands for: the first of `roles` that a site has.

    Only sites of `kind` are selected; None selects sites of every kind.
    """

    roles: tuple[str, ...]
    kind: str | None = None


HOOK_NAMES = {
    "resid_pre": HookName(("in",), "attention"),  # the stream that enters a layer
    "attn_out": HookName(("write",), "attention"),
    "resid_mid": HookName(("out",), "attention"),  # the stream between attention and feed-forward
    "mlp_out": HookName(("write",), "feed-forward"),
    "resid_post": HookName(("out",), "feed-forward"),  # the stream that leaves a layer
    "scale": HookName(("norm_in", "norm_out", "norm_branch", "norm_final")),  # a norm's denominator, sigma
}
STATISTIC_SYNONYMS = {"scale": "sigma"}


class Selection(NamedTuple):
    """Recorded series that a name such as "3_attn_out" and a statistic select."""

    roles: tuple[str, ...]
    statistic: str  # the recorded one
    kind: str | None = None
    layer: int | None = None
    reciprocal: bool = False

    def matches(self, site: RecordedSite) -> bool:
        """Return whether the selection includes a site, by its kind and layer."""
        return self.kind in (None, site.kind) and self.layer in (None, site.layer)

    def convert(self, recorded: float) -> float:
        """Return the value of the requested statistic from the recorded one."""
        return recorded if not self.reciprocal else 1.0 / recorded if recorded else math.inf


def resolve_name(name: str, statistic: str) -> Selection:
    """Return the selection of a name and a statistic.

    Args:
        name: a role, or a name of TransformerLens; "3_attn_out" selects layer 3 only.
        statistic: a statistic of the role.

    Raises:
        ValueError: there is no such name or statistic.

    Example:
        >>> from addnorm.stream.record.schema import resolve_name
        >>> resolve_name("3_attn_out", "rms")
        Selection(roles=('write',), statistic='rms', kind='attention', layer=3, reciprocal=False)
        >>> resolve_name("attnout", "rms")
        Traceback (most recent call last):
        ...
        ValueError: name is 'attnout', expected 'attn_out'.
    """
    label = re.fullmatch(r"(\d+)_(.+)", str(name))
    layer, base = (int(label[1]), label[2]) if label else (None, name)
    hook = HookName((base,)) if base in ROLES else HOOK_NAMES.get(base)
    if hook is None:
        raise ValueError(f"name is {name!r}, expected {suggest(base, [*ROLES, *HOOK_NAMES])}.")
    entry = find_statistic(hook.roles[0], STATISTIC_SYNONYMS.get(statistic, statistic))
    if entry is None:
        names = [known.name for known in STATISTICS if known.role == hook.roles[0]]
        raise ValueError(f"{base} has no statistic {statistic!r}, expected {suggest(statistic, names)}.")
    return Selection(hook.roles, entry.reciprocal_of or entry.name, hook.kind, layer, bool(entry.reciprocal_of))


def suggest(value: object, names: Iterable[str]) -> str:
    """Return the name that is close to a wrong value, or the list of names, for an error message.

    Example:
        >>> from addnorm.stream.record.schema import suggest
        >>> suggest("decode", ["encoder", "decoder"]), suggest("x", ["encoder", "decoder"])
        ("'decoder'", 'one of encoder, decoder')
    """
    names = [*names]
    close = difflib.get_close_matches(str(value).lower(), names, 1)
    listed = [*names[:12], f"... ({len(names)} in all)"] if len(names) > 14 else names
    return repr(close[0]) if close else f"one of {', '.join(listed)}" if names else "none: there is nothing yet"
