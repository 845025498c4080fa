"""Reasons why a sublayer, a stream or a model is not understood: what no `Row` expresses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from addnorm._util.numbers import format_count
from addnorm.stream.dataflow.arithmetic import (
    Factor,
    has_numbers,
    is_ancestor,
    is_move,
    list_carried,
    match_factor,
    strip_moves,
    strip_norm,
    strip_views,
)
from addnorm.stream.dataflow.graph import Flow, Op, Value, walk
from addnorm.stream.find.adds import PARTIAL, Add, has_mixing_branch
from addnorm.stream.find.functions import is_barrier
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.passages import MOVED, PlacedChain, keeps_features
from addnorm.stream.find.sublayers import Sublayer, has_zero_factor
from addnorm.stream.find.unexplained import STRUCTURAL, SUM, Unexplained, is_computed_from, list_carried_values
from addnorm.stream.find.unknown import Unknown

NO_ADD = "no residual add was found: no operator adds to a value the output of a sublayer that reads the value"
OPEN = "no residual add is understood; what {} computes of a value and of what was computed from it may be one"
UNSEEN = "no residual add is understood; by the operators that were seen, the output depends on no input"
ZERO_FACTOR = "what the sublayer reads or returns is multiplied by 0"
CONSTANTS = "a factor is a vector of constants, which no parameter has and no row expresses"
TWICE = "the branch itself contains x + ...: the stream is added twice"
SECOND = "the sublayer adds to a second stream and reads that one: two streams in turn, as in reversible layers"
BESIDE = "x' = N(x) + f(x): the sublayer reads the stream before the norm of the residual"
BOTH = "the sublayer reads the stream both with and without a norm"
SCALED = "the stream is multiplied by a factor after its norm, which no row expresses"
BY_TOKEN = "a learned factor has a value for each token, not for each feature"
SCALED_TOKENS = "the stream is multiplied by a number for each token, which no row expresses"
BY_FEATURE = "a factor from the model's inputs has a value for each feature, not for each token"
HIDDEN_IN = "a norm reads the stream after other steps than the row's: a factor, a mask, a sum, another norm"
HIDDEN_OUT = "the output is normalized, and multiplied by a gate or moved before it is added, which no row expresses"
OTHER_AXIS = "a norm normalizes another dimension of the stream than the features, which its products combine"
NEGATED = "the stream changes its sign, x' = -x + ..., which no wiring does"
SEVERAL_KINDS = "the sublayer reads the stream through norms of different kinds, and a row has one norm"
STALE = "what is added was computed from an earlier state of the stream, not from the one to which it is added"
IN_A_ROW = "the sublayer reads the output of another one, and both are added at once: neither one after the other nor in parallel"
SHIFTED = "the residual passes an operator that may move tokens or features, but not what the sublayer reads"
PROJECTED = "the output is multiplied by a norm of the stream, or added to one, which no row expresses"

PARALLEL = "the state of another stream is added, which was computed from this one before: branches that run beside it"


def report_unexplained(found: Sequence[Unexplained]) -> list[Unknown]:
    """Return one `Unknown` for each reason among the unexplained operators."""
    reasons: dict[str, list[Op]] = {}
    explained = {op.frame.path for op, reason, _ in found if reason in STRUCTURAL}
    for op, reason, _ in found:
        if reason != SUM or op.frame.path not in explained:
            reasons.setdefault(reason, []).append(op)
    return [
        Unknown(ops[0].frame.path, f"{reason}; there are {len(ops)}" if len(ops) > 1 else reason, format_source(ops[0]))
        for reason, ops in reasons.items()
    ]


def format_source(op: Op) -> str:
    """Return the name of an operator and the line of the model's source that ran the operator: "add, model.py:12"."""
    return f"{op.name}, {op.line}" if op.line else op.name


def explain_no_stream(flow: Flow, norms: Sequence[Norm], found: Sequence[Unexplained]) -> list[Unknown]:
    """Return the reasons why no stream was found in a model."""
    seen = f"{format_count(len(flow.ops), 'operator')} ran, {format_count(len(norms), 'norm')} among them"
    hidden = "" if norms else "; operators of other threads and of TorchScript are not seen"
    reason = NO_ADD if any(value.has_data for value in flow.list_results()) else UNSEEN
    found = found or [Unexplained(op, OPEN.format(op.name), frozenset()) for op in flow.ops if _may_add(op)]
    return report_unexplained(found) or [Unknown("", f"{reason} ({seen}{hidden})")]


def _may_add(op: Op) -> bool:
    """Return whether `op` may be a residual add of unknown form: it combines a value with one computed from it.

    Moves, norms, and products of the two values are excluded.
    """
    if is_move(op) or op.norms or op.name in ("mul", "div") or not any(map(has_numbers, op.outputs)):
        return False
    is_product = op.traits & {"pair", "attention", "recurrent"}
    for values in [[value] for value in op.inputs] if is_product else [op.inputs]:
        parts = [v for v in walk(values, list_carried) if v.op is None or not is_move(v.op)]
        if any(is_computed_from(q, {*walk([p], _list_held)}) for p, q in itertools.permutations(parts, 2)):
            return True
    return False


def _list_held(value: Value) -> list[Value]:
    """Return the inputs that may be terms of `value`; [] for products of activations or with learned matrices."""
    op = value.op
    if op is None or is_barrier(op):
        return []
    inputs = [v for v in op.inputs if v.has_data]
    is_product = op.name in ("mul", "div") or "mixing" in op.traits
    return [] if is_product and len(inputs) > 1 else inputs


def list_reasons(chain: PlacedChain, sublayer: Sublayer) -> dict[str, Op]:
    """Return the reasons why a sublayer is not understood, each with the operator that causes it, or else the add."""
    k, add, reads = sublayer.place, sublayer.add, sublayer.reads
    inner = [other for other in add.inner_adds if has_mixing_branch(other)]
    is_last = k + 1 == len(chain.adds)
    num_norms = 0 if is_last else len(chain.norms_out[k])
    late = [] if is_last else chain.adds[k + 1].late_factors
    factors = [*add.residual_path.factors, *sublayer.write_path.factors, *reads.factors, *chain.sum_factors(k)]
    others = [*factors, *add.early_factors, *add.late_factors, *chain.list_factors_after(k)]
    of_passage = chain.passages[k].reasons
    is_branch = sublayer.role == "branch"
    is_other_state = _is_other_state(sublayer)
    has_other_axis = not all(map(chain.layout.normalizes_features, (*reads.norms, *chain.norms_out[k])))
    is_moved = MOVED in of_passage or not all(keeps_features(chain, add.read, norm.x) for norm in reads.norms)
    is_shifted = add.is_cut and math.prod(strip_moves(add.x).shape) == math.prod(add.x.shape)
    reasons = {
        TWICE: _adds_twice(sublayer, inner),
        SECOND: not is_other_state and _reads_other_stream(chain, sublayer, inner),
        PARALLEL: is_other_state and any(is_ancestor(a.x, sublayer.raw) for a in chain.adds[: k + 1]),
        **dict.fromkeys(add.reasons, True),
        PARTIAL: (add.is_cut and not is_shifted) or PARTIAL in add.reasons,
        SHIFTED: is_shifted,
        **dict.fromkeys(of_passage, True),
        OTHER_AXIS: has_other_axis,
        MOVED: is_moved and not has_other_axis,
        BESIDE: (add.branch_input is not None and not add.is_cut)
        or (is_branch and _reads_before_norm(chain, sublayer)),
        NEGATED: add.residual_path.number < 0,
        HIDDEN_IN: sublayer.ops and _has_hidden_norm_in(sublayer),
        HIDDEN_OUT: sublayer.ops and _has_hidden_norm_out(sublayer),
        SEVERAL_KINDS: len({norm.kind for norm in reads.norms}) > 1 and not reads.direct,
        STALE: sublayer.role == "injection" and _reads_earlier_state(chain, sublayer),
        IN_A_ROW: is_branch and _reads_other_branch(chain, sublayer),
        PROJECTED: len(reads.norms) > 1 and _carries_norm(sublayer),
        BY_FEATURE: any(_is_by_feature(chain, sublayer, factor) for factor in others),
        BY_TOKEN: any(_is_by_token(chain, factor) for factor in factors),
        SCALED_TOKENS: any(map(scales_tokens, (*add.residual_path.factors, *chain.list_factors_after(k), *late))),
        CONSTANTS: any(map(_is_constant_vector, factors)),
        BOTH: reads.norms and reads.direct,
        SCALED: num_norms and any(factor.kind in ("constant", "learned") for factor in late),
        f"{num_norms} norms follow the add, one after the other": num_norms > 1,
        ZERO_FACTOR: has_zero_factor(sublayer),
    }
    return {reason: of_passage.get(reason) or add.op for reason, applies in reasons.items() if applies}


def _is_by_token(chain: PlacedChain, factor: Factor) -> bool:
    """Return whether a learned factor varies along another dimension than the features."""
    if factor.kind != "learned" or factor.value is None or factor.value.tensor.numel() == 1:
        return False
    axis, width = chain.layout.axis, chain.layout.width
    shape, scale = factor.op.out.shape, factor.value.shape
    varying = next(k - len(scale) for k, n in enumerate(scale) if n > 1)
    is_ambiguous = shape.count(width) > 1 and len(shape) == len(chain.adds[0].out.shape)
    return scale[varying] != width or (is_ambiguous and varying not in (axis, -1))


def _is_by_feature(chain: PlacedChain, sublayer: Sublayer, factor: Factor) -> bool:
    """Return whether a factor from the model's inputs may vary along the features."""
    if factor.kind != "mask" or factor.value is None or factor.value.tensor.numel() == 1:
        return False
    out, mask = factor.op.out, factor.value.shape
    features = chain.layout.find_features(sublayer, out)
    shape = (*(1,) * (len(out.shape) - len(mask)), *mask)
    return shape[-1] != 1 if features is None else any(shape[d] != 1 for d in features)


def scales_tokens(factor: Factor) -> bool:
    """Return whether a factor has a number for each token that is neither 0 nor 1."""
    mask = factor.value.tensor if factor.kind == "mask" and factor.value is not None else None
    return mask is not None and not bool(((mask == 0) | (mask == 1)).all())


def _is_constant_vector(factor: Factor) -> bool:
    """Return whether a factor is a vector of constants, not a parameter or a buffer."""
    value = factor.value if factor.kind == "learned" else None
    return value is not None and not value.kind and value.tensor.numel() > 1


def _reads_earlier_state(chain: PlacedChain, sublayer: Sublayer) -> bool:
    """Return whether an injection is computed from the sum of an earlier add, not only from x_0."""
    adds = chain.adds[: sublayer.place]
    return any(is_ancestor(add.out, sublayer.raw, without=sublayer.add.other_ops) for add in adds)


def _reads_before_norm(chain: PlacedChain, sublayer: Sublayer) -> bool:
    """Return whether a sublayer reads the sum of the previous add also without the norm of this sum."""
    k = sublayer.place
    norms = chain.norms_out[k - 1] if k else []
    passed = {norm.y.op for norm in norms if norm.y.op is not None} | sublayer.add.other_ops
    return bool(norms) and is_ancestor(chain.adds[k - 1].out, sublayer.raw, passed)


def _reads_other_branch(chain: PlacedChain, sublayer: Sublayer) -> bool:
    """Return whether a sublayer reads the output of another sublayer of the same add."""
    others = [other for other in chain.sublayers[sublayer.place] if other is not sublayer and other.role == "branch"]
    return any(is_ancestor(other.raw, sublayer.raw) for other in others)


def _carries_norm(sublayer: Sublayer) -> bool:
    """Return whether the output is N(x) times or plus another value, where N is a norm through which the sublayer reads."""
    return any(
        value.norm in sublayer.reads.norms for value in list_carried_values(sublayer.raw) if value.norm is not None
    )


def _adds_twice(sublayer: Sublayer, inner: Sequence[Add]) -> bool:
    """Return whether the write is, up to norms and factors, a sum of x and another term."""
    sums, x = {other.out: other for other in inner}, sublayer.add.x
    value = strip_views(sublayer.write_path.source)
    while value is not x:
        product = match_factor(value.op)
        if value in sums:
            value = sums[value].x
        elif value.norm is not None:
            value = value.norm.x
        elif product is not None:
            value = product.x
        else:
            return False
        value = strip_views(value) if value is not x else value
    return True


def _reads_other_stream(chain: PlacedChain, sublayer: Sublayer, inner: Sequence[Add]) -> bool:
    """Return whether the sublayer depends on its stream only through adds to another stream."""
    add = sublayer.add
    apart = [other for other in inner if not is_ancestor(add.read, other.x)]
    others = {other.op for other in apart if other.previous is not None or is_ancestor(chain.adds[0].x, other.x)}
    others |= add.other_ops
    return bool(others) and not is_ancestor(add.read, sublayer.raw, without=others)


def _is_other_state(sublayer: Sublayer) -> bool:
    """Return whether the output of the sublayer is a state of another stream, or the norm of such a state."""
    raw = strip_views(sublayer.raw)
    return any(source.op in sublayer.add.other_ops for source in (raw, strip_norm(raw)))


def _has_hidden_norm_in(sublayer: Sublayer) -> bool:
    """Return whether a norm inside the sublayer reads the stream after steps that are not in the `Row`: factors, sums, a norm."""
    read = sublayer.add.read
    carried = {read}
    for op in sublayer.ops:
        if op.norms:
            if any(norm.x in carried and norm not in sublayer.reads.norms for norm in op.norms):
                return True
            if op.norms[0].y in op.outputs and op.norms[0] in sublayer.reads.norms:
                carried.add(op.norms[0].y)
        elif _passes(op, carried, read):
            carried.update(op.outputs)
    return False


def _passes(op: Op, carried: set[Value], read: Value) -> bool:
    """Return whether `op` moves or scales a value in `carried`, or adds a value to it that is not computed from `read`."""
    parts = [v for v in op.inputs if v in carried]
    if not parts or "mixing" in op.traits:
        return False
    if is_move(op):
        return op.out.shape[-1:] == parts[0].shape[-1:]
    is_known = not op.traits.isdisjoint(("affine", "guard"))
    same = is_known and op.out.shape == parts[0].shape
    return same and not any(is_ancestor(read, v) for v in op.inputs if v not in carried)


def _has_hidden_norm_out(sublayer: Sublayer) -> bool:
    """Return whether the output is a norm that is multiplied by a gate, or moved, before it is added."""
    others = {sublayer.norm, *sublayer.reads.norms}

    def follow(value: Value) -> list[Value]:
        op = value.op
        if op is None or value is sublayer.add.read or value.norm is not None:
            return []
        return list_carried(value) or [v for v in op.inputs if op.name == "mul" and v.shape == value.shape]

    normed = [v for v in walk([sublayer.raw], follow) if v.norm is not None and v is not sublayer.add.read]
    return any(v.norm not in others and v is not sublayer.raw for v in normed)
