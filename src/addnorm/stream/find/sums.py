"""Sums that are no residual add, and why: gates, matrices on the stream, means that are subtracted, batch norms after the add."""

from __future__ import annotations

import math
from collections.abc import Set

from addnorm.stream.dataflow.graph import DATA, PARAMETER, Op, Value
from addnorm.stream.find.interpolation import match_interpolation
from addnorm.stream.find.operators import (
    CHANNELS_FIRST,
    NORMALIZING,
    PRODUCTS,
    is_ancestor,
    is_mixing,
    match_terms,
    strip_views,
)  # fmt: skip
from addnorm.stream.find.token_mixing import LINEAR
from addnorm.stream.find.views import find_axis

__all__ = ["explain_sum", "is_batch_normed", "is_centring"]

LONE_ADD = "a single add x + f(x): no other add continues its sum, and no norm over the features belongs to it"
BATCH_NORM = "x' = BatchNorm(x + f(x)): the sum is normalized over other tokens too, which no row expresses"
GATED = "x' = g * x + ... with a gate g computed from the data, which no row expresses (a highway network, a recurrent cell)"
SHORTCUT = "x' = W x + ...: the stream is multiplied by a matrix over its last dimension, which no row expresses"
MIXED = "x' = A x + ... with a matrix A over another dimension than the last: it mixes states or tokens, which no row expresses"
MULTIPLIED = "x' = A x + ... with a matrix A that mixes features, states or tokens, which no row expresses"
SEVERAL = "a sum of three or more values, some of which are computed from others, which no row expresses"
CENTRED = (
    "a mean is subtracted from the stream: a norm that is written out over another dimension than the last, or centred tokens; "
    "neither is in a row"
)
STATISTICS = {"sum", "mean", "norm", "linalg_vector_norm", "var", "var_mean", "std", "std_mean", "amax", "amin"}


def explain_sum(op: Op) -> str | None:
    """Explain why a sum that continues a value is not a residual add; None for other operators."""
    if op.name in ("sum", "mean") and op.inputs and op.inputs[0].op is not None and op.inputs[0].op.name == "stack":
        parts = op.inputs[0].op.inputs
        return SEVERAL if len(parts) > 2 and any(is_ancestor(parts[0], part) for part in parts[1:]) else None
    interpolation = match_interpolation(op)
    if interpolation is not None and interpolation.terms is None:
        x, y = interpolation.x, interpolation.y
        return GATED if is_ancestor(x, y) or is_ancestor(y, x) else None
    terms = match_terms(op)
    for p, q in (terms, terms[::-1]) if terms is not None else ():
        product = strip_views(p.value).op
        if product is None or len(product.inputs) < 2:
            continue
        for x, factor in (product.inputs[:2], product.inputs[1::-1]):
            if math.prod(x.shape) != math.prod(op.outputs[0].shape) or not is_ancestor(x, q.value):
                continue
            if product.name == "mul" and _is_activation(factor):
                return GATED
            if product.name in PRODUCTS:
                return _describe_product(product, x, p.value)
    return None


def _describe_product(op: Op, x: Value, operand: Value) -> str:
    """Say over which dimension a product with x sums; `operand` is a view of its output, where that dimension is a new one."""
    if op.name not in LINEAR:
        return MULTIPLIED
    out, base = op.outputs[0], strip_views(x)
    back = 1 if op.args[LINEAR[op.name][0]] is x else 2
    if (axis := find_axis(operand, out, len(operand.shape) - 1)) is not None:
        return SHORTCUT if axis == len(out.shape) - back else MIXED
    if (axis := find_axis(x, base, len(x.shape) - back)) is not None:
        return SHORTCUT if axis == len(base.shape) - 1 else MIXED
    return MULTIPLIED


def is_batch_normed(op: Op) -> bool:
    """Return whether a sum, or a view of it, is normalized over the batch, or over other dimensions than the features."""
    todo = [*op.outputs]
    for value in todo:
        for user in value.users:
            if user.name in NORMALIZING & CHANNELS_FIRST:
                return True
            todo += [out for out in user.outputs if strip_views(out) is not out]
    return False


def is_statistic(value: Value, results: Set[Value]) -> bool:
    """Return whether functions of a value are used only after they are reduced over its features, as in mean((x - b)^2).

    `results` has the values that the model returns.
    """
    todo, seen, is_reduced = [value], {value}, False
    while todo:
        value = todo.pop()
        if value in results:
            return False
        for user in value.users:
            if user.norms or is_mixing(user):
                return False
            if user.name in STATISTICS and _lacks_features(user.outputs[0], value):
                is_reduced = True
                continue
            new = {*user.outputs} - seen
            seen |= new
            todo += new
    return is_reduced


def _lacks_features(out: Value, value: Value) -> bool:
    """Return whether a reduction of a value is one over its features, alone or with others; False if sizes do not show it."""
    *rest, width = value.shape
    return math.prod(out.shape) == 1 or out.shape == (*rest, 1) or (out.shape == (*rest,) and width not in rest)


def is_centring(op: Op) -> bool:
    """Return whether an operator computes x - mean(x)."""
    terms = match_terms(op)
    if terms is None or len(terms) != 2 or terms[1].factor != -1.0:
        return False
    mean = strip_views(terms[1].value).op
    return mean is not None and mean.name in ("mean", "var_mean", "std_mean") and mean.inputs[0] is terms[0].value


def _is_activation(value: Value) -> bool:
    return value.kind & (PARAMETER | DATA) == PARAMETER | DATA
