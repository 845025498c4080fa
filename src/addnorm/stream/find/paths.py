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
from addnorm.stream.dataflow.graph import DATA, NOISE, UNCOUNTED, Op, Value


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
        numbers = [factor.number for factor in self.factors if factor.kind == "constant"]
        return math.prod([*numbers, *(term.factor for term in self.terms)])

    @property
    def scales(self) -> list[Value]:
        """The learned factors."""
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
        product = None if value.op is None or value.norm is not None else match_factor(value.op)
        if product is None:
            return
        value, factor = product
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
    for first, second in pair_terms(op) if op.name in ("add", "addcmul", "sub") else ():
        if first.factor == 1.0 and first.scale is None and (found := _match_difference(op, first, second)) is not None:
            return found
    if op.name == "addcmul" and len(tensors) == 3:  # x + w (y - x) with a gate w that is computed from the data
        for factor in tensors[1:]:
            difference = strip_views(factor).op
            moving = _find_minuend(difference, tensors[0])
            if difference is not None and moving is not None:
                return Interpolation(tensors[0], moving, None, (difference,))
    return None


def _find_minuend(difference: Op | None, x: Value) -> Value | None:
    """Return y if the operator computes y - x for this x; None otherwise."""
    for y, minus in pair_terms(difference):
        if (y.factor, minus.factor) == (1.0, -1.0) and strip_views(minus.value) is strip_views(x):
            return y.value
    return None


def _match_difference(op: Op, first: Term, second: Term) -> Interpolation | None:
    """Match x + w (y - x), where w is any product of numbers and tensors."""
    for difference, factors, ops in _trace_products(second):
        y = _find_minuend(difference, first.value)
        if y is None or y.shape != first.value.shape:
            continue
        number = math.prod(factor.number for factor in factors)
        scales = [factor.value for factor in factors if factor.value is not None]
        is_known = all(factor.kind in ("constant", "learned") for factor in factors) and len(scales) < 2
        weight = scales[0] if scales else None
        built = _build_terms(op, difference, first.value, y, number, weight) if is_known else None
        return Interpolation(first.value, y, built, (difference, *ops))
    return None


def _trace_products(term: Term) -> Iterator[tuple[Op, list[Factor], list[Op]]]:
    """Walk back from `term` through products.

    Yield each operator reached, with the factors and the multiplying operators between it and `term`.
    """
    assert term.op is not None
    scale = [] if term.scale is None else [Factor("learned", 1.0, term.scale, term.op)]
    scale += [] if term.factor == 1.0 else [Factor("constant", term.factor, None, term.op)]
    todo: list[tuple[Value, list[Factor], list[Op]]] = [(term.value, scale, [])]
    while todo:
        value, factors, ops = todo.pop()
        op = strip_views(value).op
        if op is None or len(ops) > 4:
            continue
        yield op, factors, ops
        product = match_factor(op)
        if product is not None:
            todo.append((product[0], [*factors, product[1]], [*ops, op]))
        elif op.name == "mul" and len(op.inputs) == 2:
            for x, gate in (op.inputs, op.inputs[::-1]):
                todo.append((x, [*factors, Factor("gate", 1.0, gate, op)], [*ops, op]))


def _build_terms(op: Op, of_y: Op, x: Value, y: Value, number: float, weight: Value | None) -> tuple[Term, Term] | None:
    """Return the terms (1 - w) x and w y, where w is number * weight; `of_y` is the operator that reads y."""
    if weight is not None and weight.kind & (DATA | NOISE):
        return None
    with torch.no_grad():
        keep: Value | float = 1.0 - number
        if weight is not None:
            keep = Value(None, -1, 1.0 - number * weight.tensor.detach(), weight.kind, -1, weight.name)
        out = x.tensor.detach() * (keep.tensor if isinstance(keep, Value) else keep)
    inputs = [x, keep] if isinstance(keep, Value) else [x]
    product = Op(op.index, "mul", torch.mul, (x, keep), {}, inputs, op.frame, UNCOUNTED)
    product.outputs.append(Value(product, 0, out, x.kind, op.index))
    return Term(product.outputs[0], op), Term(y, of_y, number, weight)
