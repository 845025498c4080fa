"""Paths from a value to an operand of an add, through views, factors, partial sums and interpolations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from addnorm.stream.dataflow.arithmetic import (
    Factor,
    Term,
    get_number,
    is_scale,
    match_factor,
    pair_terms,
    strip_views,
)  # fmt: skip
from addnorm.stream.dataflow.graph import UNCOUNTED, Op, Value


@dataclass
class Path:
    """Path from a value to a term of an add: its operators, the last one first, and the factors among them.

    Attributes:
        source: the value at which the path begins.
        terms: the term of the add, and the terms of partial sums on the path.
        ops: the operators, the last one first.
        factors: the factors by which these operators multiply.
    """

    source: Value
    terms: list[Term]
    ops: list[Op] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)

    @property
    def number(self) -> float:
        """The product of the constant factors."""
        return math.prod([*(factor.number for factor in self.factors), *(term.factor for term in self.terms)])

    @property
    def scales(self) -> list[Value]:
        """The tensors of the learned factors."""
        scales = [factor.value for factor in self.factors if factor.kind == "learned"]
        return [scale for scale in (*scales, *(term.scale for term in self.terms)) if scale is not None]


def trace_multiples(term: Term) -> Iterator[Path]:
    """Yield the paths to operand `term` from the values of which the operand is a multiple, the nearest value first."""
    value = term.value
    ops: list[Op] = []
    factors: list[Factor] = []
    while True:
        while value.op is not None and strip_views(value) is not value:
            ops.append(value.op)
            value = value.op.inputs[0]
        yield Path(value, [term], [*ops], [*factors])
        factor = match_factor(value.op) if value.norm is None else None
        if factor is None:
            return
        value = factor.x
        ops.append(factor.op)
        factors.append(factor)


def trace_origin(term: Term) -> Path:
    """Return the path to operand `term` from the earliest value of which the operand is a multiple."""
    return [*trace_multiples(term)][-1]


def join_paths(first: Path, then: Path) -> Path:
    """Join path `first`, which leads to a partial sum, and path `then`, which leads from this sum to an operand."""
    return Path(first.source, [*then.terms, *first.terms], [*then.ops, *first.ops], [*then.factors, *first.factors])


def sum_paths(op: Op, first: Path, second: Path) -> Path | None:
    """Return one path for `op`, a sum of constant multiples of one value (x + 2 x is 3 x); None for other factors or views."""
    number, views = 0.0, []
    for path in (first, second):
        if path.scales or any(factor.kind != "constant" for factor in path.factors):
            return None
        number += path.number
        views.append([step for step in path.ops if "copy" not in step.traits and not match_factor(step)])
    is_sum = number != 0.0 and views[0] == views[1]
    return Path(first.source, [Term(first.terms[0].value, op, number)], views[0]) if is_sum else None


# Interpolations.


class Interpolation(NamedTuple):
    """An operator that returns (1 - w) x + w y, as lerp(x, y, w) or as x + w (y - x).

    Attributes:
        x, y: the two values.
        terms: (1 - w) x and w y; None if w is computed from the data.
        ops: the operators that compute the difference y - x and multiply the difference.
    """

    x: Value
    y: Value
    terms: tuple[Term, Term] | None
    ops: tuple[Op, ...]


def match_interpolation(op: Op) -> Interpolation | None:
    """Match an operator that returns (1 - w) x + w y: lerp with a tensor w, or x + w (y - x)."""
    tensors = [a for a in op.args[:3] if isinstance(a, Value)]
    if op.name == "lerp":
        if len(tensors) < 3 or get_number(tensors[2]) is not None:
            return None
        x, y, w = tensors
        return Interpolation(x, y, _build_terms(op, op, x, y, 1.0, w) if is_scale(w, x) else None, ())
    pairs = pair_terms(op) if op.name in ("add", "addcmul", "sub") else []
    if op.name == "addcmul" and not pairs and len(tensors) == 3:  # with a gate that is computed from the data
        pairs = [(Term(tensors[0]), Term(factor, op, scale=op.out)) for factor in tensors[1:]]
    return next(filter(None, (_match_difference(op, *pair) for pair in pairs)), None)


def _find_minuend(difference: Op | None, x: Value) -> Value | None:
    """Return y if the operator computes y - x for this x; None otherwise."""
    for y, minus in pair_terms(difference):
        if (y.factor, minus.factor) == (1.0, -1.0) and strip_views(minus.value) is strip_views(x):
            return y.value
    return None


def _match_difference(op: Op, first: Term, second: Term) -> Interpolation | None:
    """Match x + w (y - x), where w is any product of numbers and tensors."""
    x, is_plain = first.value, first.factor == 1.0 and first.scale is None
    for difference, number, weights, ops in _trace_products(second) if is_plain else ():
        y = _find_minuend(difference, x)
        if y is not None and y.shape == x.shape:
            built = _build_terms(op, difference, x, y, number, *weights) if len(weights) < 2 else None
            return Interpolation(x, y, built, (difference, *ops))
    return None


def _trace_products(term: Term) -> Iterator[tuple[Op, float, list[Value], list[Op]]]:
    """Yield each operator whose output, up to factors, is the value of `term`.

    Each operator comes with the number and the tensors that multiply its output, and with the operators that multiply. In the
    list of tensors, a gate is replaced by its product, which depends on the data too.
    """
    todo = [(term.value, term.factor, [] if term.scale is None else [term.scale], list[Op]())]
    while todo:
        value, number, weights, ops = todo.pop()
        op = strip_views(value).op
        if op is None or len(ops) > 4:
            continue
        yield op, number, weights, ops
        factor = match_factor(op)
        if factor is not None:
            weight = factor.value if factor.kind == "learned" else None
            own_weights = [] if factor.kind == "constant" else [weight or value]
            todo.append((factor.x, number * factor.number, [*weights, *own_weights], [*ops, op]))
        elif op.name == "mul" and len(op.inputs) == 2:
            todo += [(x, number, [*weights, value], [*ops, op]) for x in op.inputs]


def _build_terms(
    op: Op, of_y: Op, x: Value, y: Value, number: float, weight: Value | None = None
) -> tuple[Term, Term] | None:
    """Return the terms (1 - w) x and w y, where w = number * weight; None if w depends on the data. `of_y` reads y."""
    if weight is not None and not weight.is_fixed:
        return None
    with torch.no_grad():
        keep: Value | float = 1.0 - number
        if weight is not None:
            keep = Value(None, -1, 1.0 - number * weight.tensor.detach(), weight.kind, -1, weight.name)
        out = x.tensor.detach() * (keep.tensor if isinstance(keep, Value) else keep)
    inputs = [x, keep] if isinstance(keep, Value) else [x]
    product = Op(op.index, "mul", torch.mul, (x, keep), {}, inputs, op.frame, UNCOUNTED)
    product.outputs.append(Value(product, 0, out, x.kind, op.index))
    return Term(product.out, op), Term(y, of_y, number, weight)
