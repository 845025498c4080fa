"""Name of a stream's wiring, found by a comparison of its rows (norms and factors) with those in `addnorm.wirings`.

The names of modules are not used.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from addnorm import wirings
from addnorm._util.numbers import format_number
from addnorm.stream.dataflow.arithmetic import get_number
from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.dataflow.replay import recompute, relative_error
from addnorm.stream.find.chain import Chain
from addnorm.stream.find.sublayers import Sublayer
from addnorm.wirings.factors import FACTORS
from addnorm.wirings.spec import Factor, Learned, Row, Wiring

EMBEDDING = "with a norm of the embedding"  # remark that is left out where the norm itself is named
WITHOUT_FINAL_NORM = "without the final norm of this wiring"
WITHOUT_LAST_NORM = "without the norm of the last sublayer"
SCALED_SKIP = "between sublayers the stream is multiplied by a factor, and an earlier state is added"
SKIPS = "every layer adds an earlier state once more"
SKIP = "an earlier state is added once more, which this wiring does not do"
SWAPPED = (
    "the factor {0} is {1}'s at this depth, but on the branch, x' = N(x + {0} f(x)): "
    "{1} has it on the stream, N({0} x + f(x))"
)
USUAL = (
    "post_ln", "pre_ln", "sandwich", "peri_ln", "reordered", "no_norm", "layernorm_scaling", "admin", "no_residual", "deepnorm",
    "depth_scaled",
)  # fmt: skip  # wirings that are tried with their default options
# A sublayer normalizes its input if SCALE times this input changes its output by a relative error less than SAME.
SCALE, SAME = 1.5, 1e-2
TOLERANCE = 1e-5  # relative: constants pass through the model's dtype


class SublayerSummary(NamedTuple):
    """Properties of a sublayer that decide the name of the wiring."""

    layer: int
    row: Row
    kind: str
    role: str
    num_parallel: int  # sublayers of the same add
    norms_in: frozenset[Any]  # the norms through which the sublayers of the add read
    scale_names: tuple[str, ...] = ()  # parameters that scale the write
    has_reasons: bool = False  # whether a part of the sublayer is not understood
    skip_length: int = 0  # number of sublayers that a skip spans
    has_inner_norm: bool = False  # norms besides those of the row: over batches, groups, or inside the sublayer


def summarize_sublayer(chain: Chain, sublayer: Sublayer, layer: int, row: Row, has_reasons: bool) -> SublayerSummary:
    """Collect the properties of a sublayer that decide the name of the wiring."""
    parts = chain.sublayers[sublayer.place]
    return SublayerSummary(
        layer, row, sublayer.kind, sublayer.role, sum(part.role == "branch" for part in parts),
        frozenset(norm for part in parts for norm in part.reads.norms),
        find_scale_names(sublayer), has_reasons,
        _count_skipped(chain, sublayer), _has_inner_norm(sublayer) or (not any(_norms(row)) and _ignores_scale(sublayer)),
    )  # fmt: skip


def find_scale_names(sublayer: Sublayer) -> tuple[str, ...]:
    """Return the names of the learned parameters that scale the write of a sublayer."""
    return tuple(_find_first_input(value).name for value in sublayer.write_path.scales)


def _find_first_input(value: Value) -> Value:
    while value.inputs:
        value = value.inputs[0]
    return value


def _has_inner_norm(sublayer: Sublayer) -> bool:
    """Return whether a sublayer has norms besides those of its row."""
    norms = [norm for norm in (*sublayer.reads.norms, sublayer.norm) if norm is not None]
    known = {op for norm in norms for op in norm.ops}
    others = [op for op in sublayer.ops if op not in known]
    return any("normalizing" in op.traits or op.norms or _takes_root(op) for op in others)


def _ignores_scale(sublayer: Sublayer) -> bool:
    """Return whether a sublayer has the same output for a multiple of its input, as if it normalized the input."""
    read, once = sublayer.add.read, sublayer.raw.tensor.detach()
    try:
        other = recompute(sublayer.raw, {read: SCALE * read.tensor.detach()})
    except Exception:  # of any kind: an operator cannot be computed again
        return False
    return bool(once.any()) and relative_error(other.detach(), once) < SAME


def _takes_root(op: Op) -> bool:
    """Return whether an operator is a power with a fractional exponent, as in a local response norm."""
    number = get_number(op.args[1]) if op.name == "pow" else None
    return number is not None and number % 1 != 0


def _count_skipped(chain: Chain, sublayer: Sublayer) -> int:
    """Count the branches that a skip spans, from the earlier state that it adds to this add; 0 if `sublayer` is no skip."""
    if sublayer.role == "skip":
        for k in range(sublayer.place, -1, -1):
            if chain.adds[k].x is sublayer.raw:
                passed = chain.sublayers[k : sublayer.place + 1]
                return sum(part.role == "branch" for parts in passed for part in parts)
    return 0


def identify_wiring(
    sublayers: Sequence[SublayerSummary], final_norm: bool, embedding_norm: bool, other_layers: int | None
) -> tuple[Wiring | None, list[str]]:
    """Return the wiring whose rows the sublayers have, or None, and remarks on differences from this wiring.

    Args:
        sublayers: the sublayers in the order of depth.
        final_norm: whether a norm follows the last sublayer.
        embedding_norm: whether a norm precedes the first sublayer.
        other_layers: number of layers of the other stream of an encoder-decoder model, on which DeepNorm depends.
    """
    if _is_bottom_to_top(sublayers):
        return wirings.b2t(), [EMBEDDING] * embedding_norm
    usual = [s for s in sublayers if s.role == "branch"]
    if any(s.has_reasons for s in sublayers):
        return None, []
    if any(s.role == "injection" and s.row.a != 1.0 for s in sublayers):
        return None, ["between sublayers the stream is multiplied by a factor, and something is added"]
    others = [s for s in usual if s.kind == "other"]
    is_before = usual[: len(others)] == others  # a positional convolution, for example
    if is_before and len(others) < len(usual) and len({_norms(s.row) for s in usual}) > 1:
        usual = [s for s in usual if s.kind != "other"]
    best: tuple[Wiring, list[str]] | None = None
    for wiring in _list_candidates(usual, other_layers):
        remarks = _compare_wiring(wiring, usual, final_norm, embedding_norm)
        if remarks is not None and (best is None or len(remarks) < len(best[1])):
            best = wiring, remarks
    if best is None:
        return None, _find_swapped_factors(usual, other_layers)
    if not any(any(_norms(s.row)) for s in usual) and any(s.has_inner_norm for s in usual):
        return None, ["the norms are inside the sublayers, or normalize over batches or groups"]
    wiring, remarks = best
    skips = [s for s in sublayers if s.role == "skip"]
    if len(skips) > usual[-1].layer:
        return None, [SKIPS]
    if skips:
        remarks = [*remarks, SCALED_SKIP if any(s.row.a != 1.0 for s in skips) else SKIP]
    return wiring, [
        *remarks, *_list_other_rules(wiring, usual[-1].layer + 1), *_describe_exceptions(sublayers, usual)
    ]  # fmt: skip


def _describe_exceptions(sublayers: Sequence[SublayerSummary], usual: Sequence[SublayerSummary]) -> list[str]:
    """Return a sentence, with the layers, for each kind and row of the branches that are not in `usual`.

    The wiring was compared only with the branches in `usual`.
    """
    exceptions: dict[tuple[str, Row], list[str]] = {}
    for s in sublayers:
        if s not in usual and s.role == "branch":
            exceptions.setdefault((s.kind, s.row), []).append(str(s.layer + 1))
    return [
        f"{kind} in layer{'s' * (len({*layers}) > 1)} {', '.join(dict.fromkeys(layers))} has a row of its own: {row}"
        for (kind, row), layers in exceptions.items()
    ]


def _list_other_rules(wiring: Wiring, num_layers: int) -> list[str]:
    """Return remarks that name other wirings whose constant is the same for this number of layers."""
    k = dict(wiring.options).get("multiplier")
    rules = (("depth_mup", num_layers**-0.5), ("completep", 1 / num_layers))
    names = [name for name, value in rules if k is not None and num_layers > 1 and factors_match(value, k)]
    return [f"with {num_layers} layers the constant is also that of {name}(k=1)" for name in names]


def _is_bottom_to_top(sublayers: Sequence[SublayerSummary]) -> bool:
    """Return whether every layer is post-LN and adds its input once more before its last norm (B2T)."""
    for _, group in groupby(sublayers, key=lambda s: s.layer):
        of_layer = [*group]
        own = [s for s in of_layer if s.role == "branch"]
        skips = [s for s in of_layer if s.role == "skip"]
        is_plain = all(rows_match(replace(s.row, norm_out=False), Row()) for s in of_layer)
        has_norms = of_layer[-1].row.norm_out and all(s.row.norm_out for s in own[:-1])
        if len(skips) != 1 or not is_plain or not has_norms or skips[0].skip_length != len(own):
            return False
    return bool(sublayers)


def _list_candidates(sublayers: Sequence[SublayerSummary], other_layers: int | None) -> Iterator[Wiring]:
    """Yield the wirings that the sublayers may have, with options that are taken from their rows."""
    if not sublayers:
        return
    if all(s.num_parallel > 1 for s in sublayers):
        yield wirings.parallel(1 if all(len(s.norms_in) < 2 for s in sublayers) else 2)
        return
    if any(s.num_parallel > 1 for s in sublayers):
        return
    b = sublayers[-1].row.b
    yield from map(wirings.get, USUAL)
    yield wirings.no_residual(norm=False)
    if len(sublayers) > 2:  # its first sublayer is pre-LN's, its second has no factor
        yield wirings.keel()
    if other_layers is not None:
        yield from (wirings.deepnorm("encoder", other_layers), wirings.deepnorm("decoder", other_layers))
    if isinstance(b, Learned):
        by_layer: dict[int, set[tuple[str, ...]]] = {}
        for s in sublayers:
            by_layer.setdefault(s.layer, set()).add(s.scale_names)
        is_shared = len(sublayers) > len(by_layer) and all(len(names) == 1 for names in by_layer.values())
        start = _find_initial_scale(sublayers)
        yield wirings.rezero() if is_shared else wirings.skipinit(start or 0.0)
        yield wirings.layer_scale(start)
    elif b != 1.0:
        num_layers = sublayers[-1].layer + 1
        of_depth = [(wirings.depth_mup, b * num_layers**0.5), (wirings.completep, b * num_layers)]
        for make, k in of_depth:  # with two layers 0.98995 is written as 1.4/sqrt(L)
            if num_layers > 1 and len(f"{k:.12g}") + 3 < len(f"{b:.12g}"):
                yield make(float(f"{k:.12g}"))
        yield wirings.residual_multiplier(b)
    post = [s.layer for s in sublayers if s.row.norm_out]
    if post and len(post) < len(sublayers):
        yield wirings.mix_ln(max(post) + 1)


def _find_initial_scale(sublayers: Sequence[SublayerSummary]) -> float | None:
    """Return the mean that all learned factors b have; None for a single sublayer, different means, or a mean of 0."""
    values = {f"{s.row.b.init:.6g}" for s in sublayers if isinstance(s.row.b, Learned)}
    return float(values.pop()) or None if len(values) == 1 and len(sublayers) > 1 else None


def _compare_wiring(
    wiring: Wiring, sublayers: Sequence[SublayerSummary], final_norm: bool, embedding_norm: bool
) -> list[str] | None:
    """Return remarks on norms at either end that differ from `wiring`; None if rows differ in another way."""
    num_layers = sublayers[-1].layer + 1
    per_layer = max(Counter(s.layer for s in sublayers).values())
    remarks: list[str] = []
    places = Counter[int]()
    for k, s in enumerate(sublayers):
        expected = wiring.row(s.layer, places[s.layer], num_layers, per_layer)
        places[s.layer] += 1
        if rows_match(expected, s.row):
            continue
        first_row = Row(norm_in=True, a=s.row.a, b=s.row.b)
        is_last = k == len(sublayers) - 1 and embedding_norm and not final_norm
        if is_last and rows_match(expected, replace(s.row, norm_out=True)):
            remarks.append(WITHOUT_LAST_NORM)
        elif k == 0 and embedding_norm and rows_match(expected, first_row) and not any(_norms(s.row)):
            remarks.append("the first sublayer reads the embedding norm's output, without a norm of its own")
        else:
            return None
    if final_norm and not wiring.ends_in_norm(num_layers):
        remarks.append("with a final norm, which this wiring does not have")
    if not final_norm and wiring.ends_in_norm(num_layers):
        remarks.append(WITHOUT_FINAL_NORM)
    if embedding_norm != wiring.embedding_norm:
        remarks.append(EMBEDDING if embedding_norm else "without the norm of the embedding")
    return remarks


def _norms(row: Row) -> tuple[bool, bool, bool]:
    # A row of the catalog may share the norm of another one; in a run, each parallel sublayer has the norm that it reads.
    return bool(row.norm_in or row.shares), row.norm_branch, row.norm_out


def rows_match(expected: Row, row: Row) -> bool:
    """Return whether a row has the norms and factors of the expected one."""
    factors = ((getattr(expected, name), getattr(row, name)) for name in FACTORS)
    return _norms(expected) == _norms(row) and all(factors_match(*pair) for pair in factors)


def factors_match(expected: Factor, factor: Factor) -> bool:
    """Return whether two numbers are equal up to round-off, or both are learned factors with the same `per_feature`."""
    if isinstance(expected, Learned) and isinstance(factor, Learned):
        return expected.per_feature == factor.per_feature
    if isinstance(expected, Learned) or isinstance(factor, Learned):
        return False
    return abs(expected - factor) <= TOLERANCE * max(abs(expected), abs(factor))


def _find_swapped_factors(sublayers: Sequence[SublayerSummary], other_layers: int | None) -> list[str]:
    """Return a remark if a wiring's factor of the stream, such as DeepNorm's alpha, is on the branch instead; otherwise []."""
    factors = {s.row.b for s in sublayers}
    if len(factors) != 1 or not all(
        isinstance(s.row.b, float) and s.row.a == 1.0 and s.row.norm_out for s in sublayers
    ):
        return []
    b: Any = factors.pop()
    if b == 1.0:
        return []
    swapped = [s._replace(row=replace(s.row, norm_out=True, a=b, b=1.0, c=1.0)) for s in sublayers]
    for wiring in _list_candidates(swapped, other_layers):
        if _compare_wiring(wiring, swapped, False, False) is not None:
            return [SWAPPED.format(format_number(b, trim=True), wiring.name)]
    return []


PRE = re.compile(r"pre[-_ ]?(ln|norm|layer[-_ ]?norm)", re.I)
POST = re.compile(r"post[-_ ]?(ln|norm|layer[-_ ]?norm)", re.I)


def find_contradiction(text: str, wiring: Wiring) -> str | None:
    """Return the words in `text` that claim pre-LN where `wiring` is post-LN, or the reverse; None if there are none."""
    patterns = {"post_ln": (PRE, POST), "pre_ln": (POST, PRE)}
    if wiring.name not in patterns:
        return None
    wrong, right = patterns[wiring.name]
    match = wrong.search(text)
    return match[0] if match and not right.search(text) else None
