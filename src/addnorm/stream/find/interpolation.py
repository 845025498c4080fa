"""Interpolations (1 - w) x + w y, in the spellings lerp(x, y, w) and x + w (y - x)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from addnorm.stream.dataflow.graph import DATA, NOISE, UNCOUNTED, Op, Value
from addnorm.stream.find.operators import Factor, Term, get_number, is_scale, match_factor, match_terms, strip_views

__all__ = ["Interpolation", "match_interpolation"]


class Interpolation(NamedTuple):
    """An operator that interpolates between x and y.

    Attributes:
        x, y: the two values.
        terms: (1 - w) x and w y; None if w is computed from the data.
        ops: the difference y - x and the operators that multiply it.
    """

    x: Value
    y: Value
    terms: tuple[Term, ...] | None
    ops: tuple[Op, ...]


def match_interpolation(op: Op) -> Interpolation | None:
    """Match an operator that returns (1 - w) x + w y for a tensor w, or by the difference of y and x."""
    if op.name == "lerp":
        return _match_lerp(op)
    terms = match_terms(op) if op.name in ("add", "addcmul", "sub") else None
    for first, second in (terms, terms[::-1]) if terms is not None and len(terms) == 2 else ():
        if first.factor == 1.0 and first.scale is None and (found := _match_difference(op, first, second)) is not None:
            return found
    return _match_gated_addcmul(op)


def _match_lerp(op: Op) -> Interpolation | None:
    if len(op.args) < 3 or not all(isinstance(a, Value) for a in op.args[:3]) or get_number(op.args[2]) is not None:
        return None
    x, y, w = op.args[:3]
    return Interpolation(x, y, _build_terms(op, op, x, y, 1.0, w) if is_scale(w, x) else None, ())


def _match_difference(op: Op, first: Term, second: Term) -> Interpolation | None:
    """Match x + w (y - x), where w is any product of numbers and tensors."""
    x = strip_views(first.value)
    for difference, factors, ops in _trace_products(second):
        terms = match_terms(difference)
        if terms is None or {terms[0].factor, terms[1].factor} != {1.0, -1.0}:
            continue
        y, minus = terms if terms[1].factor == -1.0 else terms[::-1]
        if strip_views(minus.value) is not x or y.value.shape != first.value.shape:
            continue
        number, scales = 1.0, []
        for factor in factors:
            number *= factor.number
            scales += [factor.value] if factor.value is not None else []
        is_known = all(factor.kind in ("constant", "learned") for factor in factors) and len(scales) < 2
        weight = scales[0] if scales else None
        built = _build_terms(op, difference, first.value, y.value, number, weight) if is_known else None
        return Interpolation(first.value, y.value, built, (difference, *ops))
    return None


def _trace_products(term: Term) -> Iterator[tuple[Op, list[Factor], list[Op]]]:
    """Yield the operators of which a term is a multiple, with the factors and their operators."""
    todo: list[tuple[Value, list[Factor], list[Op]]] = [(term.value, [], [])]
    assert term.op is not None
    scale = [] if term.scale is None else [Factor("learned", 1.0, term.scale, term.op)]
    scale += [] if term.factor == 1.0 else [Factor("constant", term.factor, None, term.op)]
    while todo:
        value, factors, ops = todo.pop()
        op = strip_views(value).op
        if op is None or len(ops) > 4:
            continue
        yield op, [*scale, *factors], ops
        product = match_factor(op)
        if product is not None:
            todo.append((product[0], [*factors, product[1]], [*ops, op]))
        elif op.name == "mul" and len(op.inputs) == 2:  # a gate
            for at in (0, 1):
                gate = Factor("gate", 1.0, op.inputs[1 - at], op)
                todo.append((op.inputs[at], [*factors, gate], [*ops, op]))


def _match_gated_addcmul(op: Op) -> Interpolation | None:
    """Match addcmul(x, y - x, w) with a gate w that is computed from the data."""
    if op.name != "addcmul" or not all(isinstance(a, Value) for a in op.args[:3]):
        return None
    x = strip_views(op.args[0])
    for factor in op.args[1:3]:
        difference = strip_views(factor).op
        terms = match_terms(difference) if difference is not None else None
        if terms is not None and any(t.factor == -1.0 and strip_views(t.value) is x for t in terms):
            assert difference is not None
            y = next(t.value for t in terms if t.factor != -1.0 or strip_views(t.value) is not x)
            return Interpolation(op.args[0], y, None, (difference,))
    return None


def _build_terms(op: Op, of_y: Op, x: Value, y: Value, number: float, weight: Value | None) -> tuple[Term, ...] | None:
    """Return the terms (1 - w) x and w y; `of_y` is the operator that reads y."""
    if weight is not None and weight.kind & (DATA | NOISE):
        return None
    with torch.no_grad():
        if weight is None:
            multiplied: tuple[Value | float, ...] = (x, 1.0 - number)
            out = x.tensor.detach() * (1.0 - number)
        else:
            keep = Value(None, -1, 1.0 - number * weight.tensor.detach(), weight.kind, -1, weight.name)
            multiplied = (x, keep)
            out = x.tensor.detach() * keep.tensor
    inputs = [a for a in multiplied if isinstance(a, Value)]
    product = Op(op.index, "mul", torch.mul, multiplied, {}, inputs, op.frame, UNCOUNTED)
    product.outputs.append(Value(product, 0, out, x.kind, op.index))
    return Term(product.outputs[0], op=op), Term(y, number, weight, of_y)
