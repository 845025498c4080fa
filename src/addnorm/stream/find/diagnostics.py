"""Why there is no stream, or why an add is in none: what carries something on and is no residual add."""

from __future__ import annotations

import math
from collections.abc import Sequence

from addnorm.stream.dataflow.graph import DATA, PARAMETER, Flow, Op, Value
from addnorm.stream.find.adds import Add
from addnorm.stream.find.chain import Found
from addnorm.stream.find.inspection import Unknown
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.ops import PRODUCTS, reaches, terms_of, up

__all__ = ["left_over", "no_stream"]

OUTSIDE = "an add x + f(x) stands alone: no other add continues its sum, and no norm of tokens belongs to it"
NONE = "no residual add was found: no operator adds to a value something that a sublayer computed from it"
GATED = "x' = g * x + ..., where the gate g is computed from the data: no row says this (a highway, a recurrent cell)"
MIXED = "x' = A x + ..., where a matrix mixes what is carried on: no row says this (hyper-connections)"
SEVERAL = "a sum of three or more values at once, of which some are computed from others: no row says this"


def left_over(flow: Flow, norms: Sequence[Norm], adds: Sequence[Add], found: Sequence[Found] = ()) -> list[Unknown]:
    """What carries something on and is in no stream: adds that stand alone, and sums that are no residual adds."""
    known = _inside(flow, found) | {op for norm in norms for op in norm.ops}
    reasons: dict[str, list[Op]] = {}
    for add in adds:
        if add.op not in known:
            reasons.setdefault(OUTSIDE, []).append(add.op)
    for op in flow.ops:
        reason = None if op in known else _carries(op)
        if reason is not None:
            reasons.setdefault(reason, []).append(op)
    more = {reason: f"; there are {len(ops)}" if len(ops) > 1 else "" for reason, ops in reasons.items()}
    return [Unknown(ops[0].frame.path, reason + more[reason]) for reason, ops in reasons.items()]


def _inside(flow: Flow, found: Sequence[Found]) -> set[Op]:
    """The operators of streams, of their sublayers, and of what is made from values in the midst of a sublayer: a state, say."""
    parts = [(one.adds[k], branch) for one in found for k, branch in one.sublayers()]
    inside = {op for add, branch in parts for op in (add.op, *branch.ops, *branch.path.ops)}
    ends = (
        {branch.raw for _, branch in parts}
        | {branch.path.source for _, branch in parts}
        | {add.out for add, _ in parts}
    )
    midst = {out for _, branch in parts for op in branch.ops for out in op.outputs} - {up(end) for end in ends} - ends
    for op in flow.ops:
        if op not in inside and any(value in midst for value in op.inputs):
            inside.add(op)
            midst.update(op.outputs)
    return inside


def no_stream(flow: Flow, norms: Sequence[Norm], adds: Sequence[Add]) -> list[Unknown]:
    """Why there is no stream at all."""
    nothing = [Unknown("", f"{NONE} ({len(flow.ops)} operators ran, {len(norms)} norms among them)")]
    return left_over(flow, norms, adds) or nothing


def _carries(op: Op) -> str | None:
    """What else than a residual add a sum is."""
    if op.name == "sum" and op.inputs and op.inputs[0].op is not None and op.inputs[0].op.name == "stack":
        parts = op.inputs[0].op.inputs
        return SEVERAL if len(parts) > 2 and any(reaches(parts[0], part) for part in parts[1:]) else None
    terms = terms_of(op)
    for p, q in (terms, terms[::-1]) if terms is not None else ():
        made = up(p.value).op
        if made is None or len(made.inputs) < 2:
            continue
        for x, by in (made.inputs[:2], made.inputs[1::-1]):
            if math.prod(x.shape) != math.prod(op.outputs[0].shape) or not reaches(x, q.value):
                continue
            if made.name == "mul" and _activation(by):
                return GATED
            if made.name in PRODUCTS:
                return MIXED
    return None


def _activation(value: Value) -> bool:
    return value.kind & (PARAMETER | DATA) == PARAMETER | DATA
