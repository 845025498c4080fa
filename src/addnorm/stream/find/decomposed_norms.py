"""Norms in primitive operators: a division by a root over the last dimension, or a product with its inverse.

`match_norm` matches upward from the division to x, through casts, views and constants in any order. `match_affine` matches
downward: the casts, the weight and the bias that follow in the same call.

To add a spelling, extend the function that matches its part: the inverse root, the root, the mean of squares, the square, or
x - mean(x). `find_norms` compares every match with the formula in float64, and rejects a wrong match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from addnorm.stream.dataflow.graph import DATA, NOISE, PARAMETER, Op, Value
from addnorm.stream.find.norm import Kind, Norm
from addnorm.stream.find.operators import PRODUCTS, get_number, match_factor, match_terms, strip_views

__all__ = ["match_affine", "match_norm"]

CASTS = {"_to_copy", "clone", "contiguous", "detach"}
# Views that keep the order of the elements.
IN_ORDER = CASTS | {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "view_as", "squeeze", "unsqueeze", "alias", "to",
    "lift_fresh", "copy", "add",
}  # fmt: skip
MAX_DEPTH = 6  # constants and eps that one root may have
CLOSE = 1e-6  # relative: constants such as 1 / d pass through float32


@dataclass
class _Root:
    """Root of the mean (or the sum) of the squares of x or of x - mean(x)."""

    x: Value
    is_centred: bool
    eps: float = 0.0
    eps_outside: bool = False  # eps is added to the root
    unbiased: bool = False
    is_sum: bool = False  # over the sum of the squares, not their mean
    factor: float = 1.0
    ops: set[Op] = field(default_factory=set)


def match_norm(op: Op) -> Norm | None:
    """Match a product with an inverse root, or a division by a root."""
    if op.name not in ("mul", "div") or len(op.args) < 2:
        return None
    for above, below in ((0, 1), (1, 0)) if op.name == "mul" else ((0, 1),):
        numerator, divisor = op.args[above], op.args[below]
        if not (isinstance(numerator, Value) and isinstance(divisor, Value)):
            continue
        if divisor.shape[-1:] != (1,) and strip_views(divisor).shape[-1:] != (1,):
            continue
        root = _match_inverse_root(divisor) if op.name == "mul" else _match_root(divisor)
        if root is None or root.x.shape[-1:] != numerator.shape[-1:]:
            continue
        for weight, inner in ((None, numerator), _match_early_weight(numerator)):
            norm = _match_numerator(op, root, numerator, weight, inner)
            if norm is not None:
                return norm
    return None


def _match_numerator(op: Op, root: _Root, numerator: Value, weight: Value | None, inner: Value) -> Norm | None:
    """Return the norm if the numerator, without its weight, is the x of the root."""
    x, is_centred, ops = _match_centred(inner)
    if strip_views(x) is not strip_views(root.x) or x.tensor.numel() != root.x.tensor.numel():
        return None
    if is_centred != root.is_centred or (root.is_sum and is_centred):
        return None
    kind: Kind = "layer" if is_centred else "rms"
    if root.is_sum and not _is_close(root.factor, root.x.shape[-1] ** -0.5):  # |x| instead of |x| / sqrt(d)
        kind = "scale"
    if (kind == "scale" or not root.is_sum) and root.factor != 1.0:
        return None
    weighting = {numerator.op, strip_views(numerator).op} if weight is not None else set()
    return Norm(
        kind, root.eps, _strip_casts(root.x), op.outputs[0], weight, unbiased=root.unbiased, eps_outside=root.eps_outside,
        ops={op} | root.ops | ops | {weight_op for weight_op in weighting if weight_op is not None},
    )  # fmt: skip


def _strip_casts(value: Value) -> Value:
    """Return the value before casts and views that keep the last dimension and the order of the tokens: the model's x."""
    while value.op is not None and strip_views(value) is not value:
        before = value.op.inputs[0]
        if value.op.name not in IN_ORDER or (value.op.name == "alias" and len(value.op.args) > 1):
            break
        if before.shape[-1:] != value.shape[-1:] or before.tensor.numel() != value.tensor.numel():
            break
        value = before
    return value


def _match_early_weight(value: Value) -> tuple[Value | None, Value]:
    """Return the weight that multiplies a numerator before the division, or None, and the numerator without it."""
    inner = strip_views(value)
    if inner.op is not None and inner.op.name == "mul" and inner.shape == value.shape:
        for side in inner.op.args[:2]:
            if isinstance(side, Value) and side.shape == inner.shape:
                weight = _match_parameter(inner.op, side, "mul")
                if weight is not None and weight.kind & PARAMETER:
                    return weight, side
    return None, value


def _match_inverse_root(value: Value, depth: int = 0) -> _Root | None:
    """Match rsqrt(t), t ** -0.5, 1 / root, each times a constant."""
    value = strip_views(value)
    op = value.op
    if op is None or depth > MAX_DEPTH:
        return None
    root: _Root | None = None
    if op.name == "rsqrt" or _is_power(op, -0.5):
        root = _match_mean_square(op.args[0])
    elif op.name == "reciprocal" or _is_power(op, -1.0):
        root = _match_root(op.args[0])
    elif op.name == "div" and get_number(op.args[0]) == 1.0 and isinstance(op.args[1], Value):
        root = _match_root(op.args[1])
    elif (constant := _match_constant(op)) is not None:
        root = _match_inverse_root(constant[0], depth + 1)
        if root is not None:
            root.factor /= constant[1]
    return _add_op(root, op)


def _match_root(value: Value) -> _Root | None:
    """Match sqrt(t), std, |x|, each with eps added or as the lower bound, and times a constant."""
    value = strip_views(value)
    op = value.op
    if op is None:
        return None
    root: _Root | None = None
    if op.name == "sqrt" or _is_power(op, 0.5):
        root = _match_mean_square(op.args[0])
    elif op.name in ("std", "std_mean") and value.part == 0 and _reduces_last(op):
        root = _Root(op.args[0], True, unbiased=_get_correction(op) == 1)
    elif op.name in ("linalg_vector_norm", "norm") and _reduces_last(op) and get_number(op.args[1]) in (2.0, None):
        root = _Root(op.args[0], False, is_sum=True)
    elif op.name == "add" and (eps := get_number(op.args[1])) is not None:
        root = _match_root(op.args[0])
        if root is not None:
            root.eps_outside, root.eps = True, root.eps + eps
    elif op.name in ("clamp_min", "clamp", "maximum"):
        bound = get_number(op.kwargs.get("min", op.args[1] if len(op.args) > 1 else None))
        root = _match_root(op.args[0]) if bound is not None else None
        if root is not None:
            if not root.is_sum:
                return None
            root.eps = bound or 0.0
    elif (constant := _match_constant(op)) is not None:
        root = _match_root(constant[0])
        if root is not None:
            root.factor *= constant[1]
    return _add_op(root, op)


def _match_mean_square(value: Value, depth: int = 0) -> _Root | None:
    """Match the argument of the root.

    mean((x - mean)^2) + eps, var(x) + eps, mean(x^2) + eps, sum(x^2) / d + eps, mean(x^2) - mean(x)^2 + eps
    """
    value = strip_views(value)
    op = value.op
    if op is None or depth > MAX_DEPTH:
        return None
    root: _Root | None = None
    if op.name in ("mean", "sum") and _reduces_last(op):
        square = _match_square(op.args[0])
        if square is not None:
            x, is_centred, ops = _match_centred(square[0])
            root = _Root(x, is_centred, is_sum=op.name == "sum", ops={square[1], *ops})
    elif op.name in ("var", "var_mean") and value.part == 0 and _reduces_last(op):
        root = _Root(op.args[0], True, unbiased=_get_correction(op) == 1)
    elif (
        op.name in PRODUCTS and len(op.inputs) == 2 and strip_views(op.inputs[0]) is strip_views(op.inputs[1])
    ):  # x . x
        x = strip_views(op.inputs[0])
        root = _Root(x, False, is_sum=True) if value.tensor.numel() * x.shape[-1] == x.tensor.numel() else None
    elif op.name == "square" or _is_power(op, 2.0):
        root = _match_root(op.args[0])
    elif op.name == "clamp_min":
        root = _match_mean_square(op.args[0], depth + 1)
    elif op.name in ("add", "sub") and len(op.args) > 1:
        eps = get_number(op.args[1])
        if eps is not None and op.name == "add":
            root = _match_mean_square(op.args[0], depth + 1)
            if root is not None and not root.eps_outside:
                root.eps += eps
        else:
            root = _match_difference(op, depth)
    elif (constant := _match_constant(op)) is not None:
        root = _match_mean_square(constant[0], depth + 1)
        if root is not None:
            d = root.x.shape[-1]
            if not root.is_sum:
                return None
            if _is_close(constant[1], 1 / d):
                root.is_sum = False
            elif d > 1 and _is_close(constant[1], 1 / (d - 1)):
                root.is_sum, root.unbiased = False, True
            else:
                return None
    return _add_op(root, op)


def _match_difference(op: Op, depth: int) -> _Root | None:
    """Match mean(x^2) - mean(x)^2."""
    terms = match_terms(op)
    if terms is None or terms[1].factor != -1.0:
        return None
    root = _match_mean_square(terms[0].value, depth + 1)
    square = _match_square(terms[1].value)
    if root is None or root.is_centred or square is None:
        return None
    mean = strip_views(square[0])
    if mean.op is None or mean.op.name != "mean" or strip_views(mean.op.args[0]) is not strip_views(root.x):
        return None
    root.is_centred = True
    root.ops |= {square[1], mean.op}
    return root


def _match_square(value: Value) -> tuple[Value, Op] | None:
    """Match x^2 and return x and the operator."""
    op = strip_views(value).op
    if op is None:
        return None
    if op.name == "square" or (isinstance(op.args[0], Value) and _is_power(op, 2.0)):
        return op.args[0], op
    if op.name == "mul" and all(isinstance(a, Value) for a in op.args[:2]):
        return (op.args[0], op) if strip_views(op.args[0]) is strip_views(op.args[1]) else None
    return None


def _match_centred(value: Value) -> tuple[Value, bool, set[Op]]:
    """Match x - mean(x) and return x, True and the operators; other values are returned with False."""
    op = strip_views(value).op
    terms = match_terms(op) if op is not None else None
    if op is None or terms is None or terms[1].factor != -1.0:
        return value, False, set()
    x = strip_views(terms[0].value)
    mean = strip_views(terms[1].value)
    if mean.op is None:
        return value, False, set()
    over = match_factor(mean.op) if mean.op.name in ("mul", "div") else None
    if over is not None and _is_close(over[1].number, 1 / op.outputs[0].shape[-1]):  # sum(x) / d
        total = strip_views(over[0]).op
        if total is not None and total.name == "sum" and _reduces_last(total) and strip_views(total.args[0]) is x:
            return terms[0].value, True, {op, mean.op, total}
    part = {"mean": 0, "var_mean": 1, "std_mean": 1}.get(mean.op.name)
    if part is not None and mean.part == part and _reduces_last(mean.op) and strip_views(mean.op.args[0]) is x:
        return terms[0].value, True, {op, mean.op}
    return value, False, set()


def _match_constant(op: Op) -> tuple[Value, float] | None:
    """Match a product with a constant and return the other factor and the constant."""
    product = match_factor(op)
    return (product[0], product[1].number) if product is not None and product[1].kind == "constant" else None


def _is_power(op: Op, exponent: float) -> bool:
    return op.name == "pow" and get_number(op.args[1]) == exponent


def _is_close(number: float, expected: float) -> bool:
    return abs(number / expected - 1) < CLOSE


def _reduces_last(op: Op) -> bool:
    """Return whether an operator reduces only the last dimension."""
    if not isinstance(op.args[0], Value):
        return False
    at = 2 if op.name in ("linalg_vector_norm", "norm") else 1
    dims = op.kwargs.get("dim", op.args[at] if len(op.args) > at else None)
    rank = len(op.args[0].shape)
    dims = [dims] if isinstance(dims, int) else dims
    return isinstance(dims, list | tuple) and [d % rank for d in dims if isinstance(d, int)] == [rank - 1]


def _get_correction(op: Op) -> float:
    if "correction" in op.kwargs:
        correction = op.kwargs["correction"]
        return 1.0 if correction is None else float(correction)
    unbiased = op.args[2] if len(op.args) > 2 else op.kwargs.get("unbiased", True)
    return float(bool(unbiased))


def _add_op(root: _Root | None, op: Op) -> _Root | None:
    if root is not None:
        root.ops.add(op)
    return root


def match_affine(norm: Norm, vectors_only: bool = False) -> None:
    """Extend a matched norm by the casts, the weight and the bias that the same call applies to its output.

    Args:
        norm: the norm, which is changed.
        vectors_only: the norm is an operator of torch without a weight. Vectors over the features are its gains, also in the call
            that contains the norm's module; a single number may be a factor of a sublayer.
    """
    y = norm.y
    assert y.op is not None
    frame = y.op.frame
    frames = (frame, frame.parent) if vectors_only else (frame,)
    casts: list[Op] = []
    while len({*y.users}) == 1 and y.users[0].frame in frames and y.users[0].outputs:
        op = y.users[0]
        y = op.outputs[0]
        if op.frame is not frame and _is_scale_of_write(op):
            return
        if op.name in CASTS:  # the norm's own if a weight or a bias follows
            casts.append(op)
        elif _match_gain(norm, op, casts) and not (vectors_only and _has_single_gain(norm)):
            norm.ops |= {op, *casts}
            norm.y, casts = y, []
        else:
            return


def _is_scale_of_write(op: Op) -> bool:
    """Return whether a product outside of the norm's module is only added, in the same call: x + gamma * N(f(x))."""
    users = {*op.outputs[0].users}
    return op.name == "mul" and len(users) == 1 and all(add.name == "add" and add.frame is op.frame for add in users)


def _has_single_gain(norm: Norm) -> bool:
    """Remove gains of one element from a norm of several features, and return whether there were any."""
    gains = [gain for gain in (norm.weight, norm.bias) if gain is not None]
    if norm.x.shape[-1] == 1 or all(gain.tensor.numel() > 1 for gain in gains):
        return False
    norm.weight = norm.weight if norm.weight is not None and norm.weight.tensor.numel() > 1 else None
    norm.bias = norm.bias if norm.bias is not None and norm.bias.tensor.numel() > 1 else None
    return True


def _match_gain(norm: Norm, op: Op, casts: Sequence[Op]) -> bool:
    """Match a weight, a bias, both, or sqrt(d), set it in the norm, and return whether there was one."""
    y = casts[-1].outputs[0] if casts else norm.y
    if norm.kind == "scale" and _is_root_of_width(op, y):
        norm.kind, norm.uses_length = "rms", True
    elif norm.bias is not None:
        return False
    elif op.name == "addcmul" and norm.weight is None and (gains := _match_addcmul(op, y)) is not None:
        norm.weight, norm.bias = gains
    elif norm.weight is None and (weight := _match_parameter(op, y, "mul")) is not None:
        norm.weight = weight
    elif (bias := _match_parameter(op, y, "add")) is not None:
        norm.bias = bias
    else:
        return False
    return True


def _is_root_of_width(op: Op, y: Value) -> bool:
    """Return whether an operator multiplies a unit vector by sqrt(d), so that its mean square is one."""
    product = match_factor(op)
    return product is not None and product[0] is y and _is_close(product[1].number, y.shape[-1] ** 0.5)


def _match_addcmul(op: Op, y: Value) -> tuple[Value, Value] | None:
    """Match bias + y * weight in one operator and return the weight and the bias."""
    bias, first, second = op.args[:3]
    weight = second if first is y else first
    are_parameters = all(
        isinstance(v, Value) and v.tensor.numel() == y.shape[-1] and not v.kind & (DATA | NOISE) for v in (bias, weight)
    )
    return (weight, bias) if are_parameters and op.kwargs.get("value", 1) == 1 else None


def _match_parameter(op: Op, y: Value, name: str) -> Value | None:
    """Return the parameter by which an operator scales ("mul") or shifts ("add") y."""
    if op.name != name or len(op.args) < 2 or not all(isinstance(a, Value) for a in op.args[:2]):
        return None
    if op.kwargs.get("alpha", 1) != 1:
        return None
    other: Value = op.args[1] if op.args[0] is y else op.args[0]
    is_vector = other.tensor.numel() in (1, y.shape[-1]) and other.shape[-1:] in ((), (1,), y.shape[-1:])
    return other if is_vector and not other.kind & (DATA | NOISE) and op.outputs[0].shape == y.shape else None
