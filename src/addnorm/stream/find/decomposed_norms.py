"""Norms written by hand: a division by a root of a mean over the last dimension, or a product with its inverse.

Matched from the division up to x, through whatever casts, views, constants and orders stand between; then down through the
casts, the weight and the bias that follow in the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from addnorm.stream.dataflow.graph import DATA, NOISE, PARAMETER, Op, Value
from addnorm.stream.find.norm import Kind, Norm
from addnorm.stream.find.ops import PRODUCTS, factor_of, number_of, terms_of, up

__all__ = ["affine", "match"]

CASTS = {"_to_copy", "clone", "contiguous", "detach"}


@dataclass
class _Root:
    """The root of a mean of squares, matched from below: of which x, with which eps."""

    x: Value
    centred: bool
    eps: float = 0.0
    clamp: bool = False
    outside: bool = False
    unbiased: bool = False
    length: bool = False  # a sum of squares, not a mean
    factor: float = 1.0
    ops: set[Op] = field(default_factory=set)


def match(op: Op) -> Norm | None:
    """A product with an inverse root, or a division by a root."""
    if op.name not in ("mul", "div") or len(op.args) < 2:
        return None
    for above, below in ((0, 1), (1, 0)) if op.name == "mul" else ((0, 1),):
        numerator, factor = op.args[above], op.args[below]
        if not (isinstance(numerator, Value) and isinstance(factor, Value)):
            continue
        if factor.shape[-1:] != (1,) and not _expanded(factor):
            continue
        root = _inverse(factor) if op.name == "mul" else _root(factor)
        if root is None or root.x.shape[-1:] != numerator.shape[-1:]:
            continue
        for weight, inside in ((None, numerator), _weighed(numerator)):
            norm = _of_root(op, root, numerator, weight, inside)
            if norm is not None:
                return norm
    return None


def _of_root(op: Op, root: _Root, numerator: Value, weight: Value | None, inside: Value) -> Norm | None:
    """The norm whose root was found, if the numerator is its x."""
    x, centred, inner = _centred(inside)
    if up(x) is not up(root.x) or x.tensor.numel() != root.x.tensor.numel():
        return None
    if centred != root.centred or (root.length and centred):
        return None
    kind: Kind = "layer" if centred else "rms"
    if root.length and abs(root.factor * root.x.shape[-1] ** 0.5 - 1) > 1e-6:  # |x| is no root of a mean
        kind = "scale"
    if (kind == "scale" or not root.length) and root.factor != 1.0:
        return None
    made = {numerator.op, up(numerator).op} if weight is not None else set()
    return Norm(
        kind, root.eps, _uncast(root.x), op.outputs[0], weight, unbiased=root.unbiased, eps_outside=root.outside,
        ops={op} | root.ops | inner | {o for o in made if o is not None},
    )  # fmt: skip


def _uncast(value: Value) -> Value:
    """The value before casts and views that leave the last dimension as it is: what the model calls x."""
    while value.op is not None and up(value) is not value:
        before = value.op.inputs[0]
        if before.shape[-1:] != value.shape[-1:] or before.tensor.numel() != value.tensor.numel():
            break
        value = before
    return value


def _weighed(value: Value) -> tuple[Value | None, Value]:
    """The weight by which a numerator was multiplied before the division."""
    inner = up(value)
    if inner.op is not None and inner.op.name == "mul" and inner.shape == value.shape:
        for side in inner.op.args[:2]:
            if isinstance(side, Value) and side.shape == inner.shape:
                weight = _parameter(inner.op, side, "mul")
                if weight is not None and weight.kind & PARAMETER:
                    return weight, side
    return None, value


def _expanded(value: Value) -> bool:
    source = up(value)
    return source.shape[-1:] == (1,)


def _inverse(value: Value, depth: int = 0) -> _Root | None:
    """rsqrt(t), t ** -0.5, 1 / root."""
    value = up(value)
    op = value.op
    if op is None or depth > 4:
        return None
    found: _Root | None = None
    if op.name == "rsqrt" or (op.name == "pow" and number_of(op.args[1]) == -0.5):
        found = _mean_of_squares(op.args[0])
    elif op.name == "reciprocal":
        found = _root(op.args[0])
    elif op.name == "div" and number_of(op.args[0]) == 1.0 and isinstance(op.args[1], Value):
        found = _root(op.args[1])
    elif op.name == "pow" and number_of(op.args[1]) == -1.0:
        found = _root(op.args[0])
    elif (passed := factor_of(op)) is not None and passed[1].kind == "constant":
        found = _inverse(passed[0], depth + 1)
        if found is not None:
            found.factor /= passed[1].number
    return _with(found, op)


def _root(value: Value) -> _Root | None:
    """sqrt(t), std, |x|, each with eps added or as a lower bound."""
    value = up(value)
    op = value.op
    if op is None:
        return None
    found: _Root | None = None
    if op.name == "sqrt" or (op.name == "pow" and number_of(op.args[1]) == 0.5):
        found = _mean_of_squares(op.args[0])
    elif op.name in ("std", "std_mean") and value.part == 0 and _last(op):
        found = _Root(op.args[0], True, unbiased=_correction(op) == 1)
    elif op.name in ("linalg_vector_norm", "norm") and _last(op) and number_of(op.args[1]) in (2.0, None):
        found = _Root(op.args[0], False, length=True)
    elif op.name == "add" and (eps := number_of(op.args[1])) is not None:
        found = _root(op.args[0])
        if found is not None:
            found.outside, found.eps = True, found.eps + eps
    elif op.name in ("clamp_min", "clamp", "maximum"):
        bound = number_of(op.kwargs.get("min", op.args[1] if len(op.args) > 1 else None))
        found = _root(op.args[0]) if bound is not None else None
        if found is not None:
            if not found.length:
                return None
            found.eps, found.clamp = bound or 0.0, True
    elif (passed := factor_of(op)) is not None and passed[1].kind == "constant":
        found = _root(passed[0])
        if found is not None:
            found.factor *= passed[1].number
    return _with(found, op)


def _mean_of_squares(value: Value, depth: int = 0) -> _Root | None:
    """mean((x - mean)^2) + eps, var(x) + eps, mean(x^2) + eps, sum(x^2) / d + eps, mean(x^2) - mean(x)^2 + eps."""
    value = up(value)
    op = value.op
    if op is None or depth > 6:
        return None
    found: _Root | None = None
    if op.name in ("mean", "sum") and _last(op):
        squared = _square(op.args[0])
        if squared is not None:
            x, centred, inner = _centred(squared[0])
            found = _Root(x, centred, ops={squared[1], *inner})
            found.length = op.name == "sum"
    elif op.name in ("var", "var_mean") and value.part == 0 and _last(op):
        found = _Root(op.args[0], True, unbiased=_correction(op) == 1)
    elif op.name in PRODUCTS and len(op.inputs) == 2 and up(op.inputs[0]) is up(op.inputs[1]):  # x . x
        x = up(op.inputs[0])
        found = _Root(x, False, length=True) if value.tensor.numel() * x.shape[-1] == x.tensor.numel() else None
    elif op.name == "square" or (op.name == "pow" and number_of(op.args[1]) == 2.0):
        found = _root(op.args[0])
    elif op.name == "clamp_min":
        found = _mean_of_squares(op.args[0], depth + 1)
    elif op.name in ("add", "sub") and len(op.args) > 1:
        eps = number_of(op.args[1])
        if eps is not None and op.name == "add":
            found = _mean_of_squares(op.args[0], depth + 1)
            if found is not None and not found.outside:
                found.eps += eps
        else:
            found = _difference(op, depth)
    elif (passed := factor_of(op)) is not None and passed[1].kind == "constant":
        found = _mean_of_squares(passed[0], depth + 1)
        if found is not None:
            d = found.x.shape[-1]
            if found.length and abs(passed[1].number * d - 1) < 1e-6:
                found.length = False
            elif abs(passed[1].number * (d - 1) - 1) < 1e-6 and found.length:
                found.length, found.unbiased = False, True
            else:
                return None
    return _with(found, op)


def _difference(op: Op, depth: int) -> _Root | None:
    """mean(x^2) - mean(x)^2."""
    terms = terms_of(op)
    if terms is None or terms[1].factor != -1.0:
        return None
    found = _mean_of_squares(terms[0].value, depth + 1)
    squared = _square(terms[1].value)
    if found is None or found.centred or squared is None:
        return None
    mean = up(squared[0])
    if mean.op is None or mean.op.name != "mean" or up(mean.op.args[0]) is not up(found.x):
        return None
    found.centred = True
    found.ops |= {squared[1], mean.op}
    return found


def _square(value: Value) -> tuple[Value, Op] | None:
    """The x of x^2."""
    value = up(value)
    op = value.op
    if op is None:
        return None
    if op.name == "square" or (op.name == "pow" and isinstance(op.args[0], Value) and number_of(op.args[1]) == 2.0):
        return op.args[0], op
    if op.name == "mul" and all(isinstance(a, Value) for a in op.args[:2]) and up(op.args[0]) is up(op.args[1]):
        return op.args[0], op
    return None


def _centred(value: Value) -> tuple[Value, bool, set[Op]]:
    """The x of x - mean(x), or what came."""
    inner = up(value)
    terms = terms_of(inner.op) if inner.op is not None else None
    if inner.op is not None and terms is not None and terms[1].factor == -1.0:
        mean = up(terms[1].value)
        over = factor_of(mean.op) if mean.op is not None and mean.op.name in ("mul", "div") else None
        if mean.op is not None and over is not None and abs(over[1].number * inner.shape[-1] - 1) < 1e-6:
            total = up(over[0]).op  # a sum, over d
            if total is not None and total.name == "sum" and _last(total) and up(total.args[0]) is up(terms[0].value):
                return terms[0].value, True, {inner.op, mean.op, total}
        is_mean = mean.op is not None and (
            (mean.op.name == "mean" and mean.part == 0) or (mean.op.name in ("var_mean", "std_mean") and mean.part == 1)
        )
        if is_mean and mean.op is not None and _last(mean.op) and up(mean.op.args[0]) is up(terms[0].value):
            return terms[0].value, True, {inner.op, mean.op}
    return value, False, set()


def _last(op: Op) -> bool:
    """Whether an operator reduces the last dimension alone."""
    if not isinstance(op.args[0], Value):
        return False
    at = 2 if op.name in ("linalg_vector_norm", "norm") else 1
    dims = op.kwargs.get("dim", op.args[at] if len(op.args) > at else None)
    rank = len(op.args[0].shape)
    dims = [dims] if isinstance(dims, int) else dims
    return isinstance(dims, list | tuple) and [d % rank for d in dims if isinstance(d, int)] == [rank - 1]


def _correction(op: Op) -> float:
    if "correction" in op.kwargs:
        found = op.kwargs["correction"]
        return 1.0 if found is None else float(found)
    unbiased = op.args[2] if len(op.args) > 2 else op.kwargs.get("unbiased", True)
    return float(bool(unbiased))


def _with(found: _Root | None, op: Op) -> _Root | None:
    if found is not None:
        found.ops.add(op)
    return found


def affine(norm: Norm) -> None:
    """Follows what was computed by hand through the casts to the weight and the bias that the same call applied to it."""
    y = norm.y
    assert y.op is not None
    frame = y.op.frame
    casts: list[Op] = []
    while len({*y.users}) == 1 and y.users[0].frame is frame and y.users[0].outputs:
        op = y.users[0]
        y = op.outputs[0]
        if op.name in CASTS:  # the norm's own if a weight or a bias follows
            casts.append(op)
        elif _gained(norm, op, casts):
            norm.ops |= {op, *casts}
            norm.y, casts = y, []
        else:
            return


def _gained(norm: Norm, op: Op, casts: Sequence[Op]) -> bool:
    """Whether an operator applies a weight, a bias, both, or sqrt(d) to y; the norm takes them."""
    y = casts[-1].outputs[0] if casts else norm.y
    if norm.kind == "scale" and _root_of_width(op, y):
        norm.kind, norm.length = "rms", True
    elif norm.bias is not None:
        return False
    elif op.name == "addcmul" and norm.weight is None and (gains := _gains(op, y)) is not None:
        norm.weight, norm.bias = gains
    elif norm.weight is None and (weight := _parameter(op, y, "mul")) is not None:
        norm.weight = weight
    elif (bias := _parameter(op, y, "add")) is not None:
        norm.bias = bias
    else:
        return False
    return True


def _root_of_width(op: Op, y: Value) -> bool:
    """Whether an operator multiplies a unit vector by sqrt(d), so that its mean square is one."""
    passed = factor_of(op)
    return passed is not None and passed[0] is y and abs(passed[1].number / y.shape[-1] ** 0.5 - 1) < 1e-6


def _gains(op: Op, y: Value) -> tuple[Value, Value] | None:
    """Weight and bias of bias + y * weight in one operator."""
    bias, one, two = op.args[:3]
    weight = two if one is y else one
    small = all(
        isinstance(v, Value) and v.tensor.numel() == y.shape[-1] and not v.kind & (DATA | NOISE) for v in (bias, weight)
    )
    return (weight, bias) if small and op.kwargs.get("value", 1) == 1 else None


def _parameter(op: Op, y: Value, name: str) -> Value | None:
    """The parameter by which an operator scales or shifts y."""
    if op.name != name or len(op.args) < 2 or not all(isinstance(a, Value) for a in op.args[:2]):
        return None
    if op.kwargs.get("alpha", 1) != 1:
        return None
    other: Value = op.args[1] if op.args[0] is y else op.args[0]
    small = other.tensor.numel() in (1, y.shape[-1]) and other.shape[-1:] in ((), (1,), y.shape[-1:])
    return other if small and not other.kind & (DATA | NOISE) and op.outputs[0].shape == y.shape else None
