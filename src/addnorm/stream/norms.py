"""The norms in a data flow: torch's, this library's, and those written out by hand, in any order of casts.

    (x - mean) / sqrt(var + eps) * weight + bias      layer       x / sqrt(mean(x^2) + eps) * weight      rms
    x / max(|x|, eps) * weight                        scale

By hand means: a division by a root (or a product with `rsqrt`) of a mean over the last dimension. Whatever the operators are
called, the formula that was found is computed in float64 and compared with what the model computed: `Norm.error`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from addnorm.stream.graph import DATA, NOISE, PARAMETER, Flow, Op, Value
from addnorm.stream.ops import PRODUCTS, axis_of, factor_of, number_of, terms_of, up

__all__ = ["Norm", "find_norms"]

Kind = Literal["layer", "rms", "scale"]
LOOSE = 64  # roundings of the model's dtype that a norm may be off its formula: cast orders differ


@dataclass(eq=False)
class Norm:
    """A norm as it was computed: y = Norm(x)."""

    kind: Kind
    eps: float | None
    x: Value
    y: Value
    weight: Value | None = None
    bias: Value | None = None
    weight_offset: float = 0.0
    unbiased: bool = False  # divided by d - 1, as Tensor.std does
    eps_outside: bool = False  # added to the root
    length: bool = False  # of an rms: by the length of x, eps its lower bound
    ops: set[Op] = field(default_factory=set)
    error: float = 0.0

    @property
    def path(self) -> str:
        """The module that computed it."""
        assert self.y.op is not None
        return self.y.op.frame.path

    @property
    def whole(self) -> bool:
        """Whether it is of all features, not of parts of them as of the heads of attention."""
        return axis_of(self.x, up(self.x), len(self.x.shape) - 1) is not None

    def denominator(self, x: Tensor) -> Tensor:
        """What the (centred) features are divided by, `(*, 1)`, in the dtype of x."""
        d = x.shape[-1]
        if self.kind == "scale" or self.length:
            size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            size = size.clamp_min(self.eps) if self.eps else size
            return size / d**0.5 if self.length else size
        if self.kind == "layer":
            var = x.var(-1, correction=int(self.unbiased), keepdim=True)
        else:
            var = x.square().sum(-1, keepdim=True) / (d - self.unbiased)
        eps = self.eps or 0.0
        return var.sqrt() + eps if self.eps_outside else (var + eps).sqrt()

    def gain(self, dtype: torch.dtype) -> Tensor | float:
        """What the normalized features are multiplied by."""
        return 1.0 if self.weight is None else self.weight.tensor.detach().to(dtype) + self.weight_offset

    def linear(self, x: Tensor, denominator: Tensor) -> Tensor:
        """The norm without its bias and with its denominator given: linear in x."""
        if self.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        return x / denominator * self.gain(x.dtype)

    def shift(self, dtype: torch.dtype) -> Tensor | float:
        """The bias."""
        return 0.0 if self.bias is None else self.bias.tensor.detach().to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """The formula, in the dtype of x."""
        return self.linear(x, self.denominator(x)) + self.shift(x.dtype)

    def to_dict(self) -> dict[str, Any]:
        """What is known of it."""
        found: dict[str, Any] = {"kind": self.kind, "eps": self.eps, "path": self.path, "weight": self.weight is not None,
                                 "bias": self.bias is not None}  # fmt: skip
        for name in ("unbiased", "eps_outside"):
            if getattr(self, name):
                found[name] = True
        return found


def find_norms(flow: Flow) -> list[Norm]:
    """The norms over the last dimension; those of whole tokens are also set as `norm` of the value that they returned."""
    found: list[Norm] = []
    for op in flow.ops:
        make = FUSED.get(op.name)
        norm = make(op) if make else _by_hand(op)
        if norm is None or norm.y.norm is not None or norm.x.tensor.is_complex():
            continue
        if not make:
            _affine(norm)
        norm.error = _error(norm)
        if norm.error <= 1.0:
            norm.y.norm = norm if norm.whole else None
            found.append(norm)
    return found


def _error(norm: Norm) -> float:
    """How far the formula is from what was computed, as a share of what rounding may do."""
    with torch.no_grad():
        x, y = norm.x.tensor.detach().double(), norm.y.tensor.detach().double()
        if not x.numel():
            return 0.0
        formula = norm(x).reshape(y.shape)
        coarsest = max((v.tensor.dtype for v in (norm.x, norm.y)), key=lambda dtype: torch.finfo(dtype).eps)
        size = (y.square().mean().sqrt() + norm_scale(norm)).clamp_min(1e-30)
        off = (formula - y).square().mean().sqrt() / size
        return float(off / (LOOSE * torch.finfo(coarsest).eps)) if torch.isfinite(y).all() else 0.0


def norm_scale(norm: Norm) -> Tensor:
    """The size of what cancels where a row is nearly constant: nothing there is exact to its dtype."""
    x = norm.x.tensor.detach().double()
    if norm.kind != "layer":
        return x.new_zeros(())
    return (x.mean(-1, keepdim=True).abs() / norm.denominator(x)).square().mean().sqrt()


def _layer(op: Op) -> Norm | None:
    x, shape, weight, bias, eps = _filled(op, ("input", "normalized_shape", "weight", "bias", "eps"), eps=1e-5)
    return Norm("layer", float(eps), x, op.outputs[0], weight, bias, ops={op}) if len(shape) == 1 else None


def _rms(op: Op) -> Norm | None:
    x, shape, weight, eps = _filled(op, ("input", "normalized_shape", "weight", "eps"))
    eps = torch.finfo(x.tensor.dtype).eps if eps is None else eps
    return Norm("rms", float(eps), x, op.outputs[0], weight, ops={op}) if len(shape) == 1 else None


def _ours(op: Op) -> Norm:
    tensors = [a for a in op.args if isinstance(a, Value)]
    kind, eps, offset, has_weight, has_bias = op.args[len(tensors) :]
    gains = iter(tensors[1:])
    weight = next(gains) if has_weight else None
    bias = next(gains) if has_bias else None
    eps = torch.finfo(tensors[0].tensor.dtype).eps if eps is None else eps
    return Norm(kind, eps, tensors[0], op.outputs[0], weight, bias, offset, ops={op})


FUSED: dict[str, Callable[[Op], Norm | None]] = {
    "native_layer_norm": _layer, "layer_norm": _layer, "rms_norm": _rms, "_fused_rms_norm": _rms, "addnorm::norm": _ours,
}  # fmt: skip


def _filled(op: Op, names: tuple[str, ...], **defaults: Any) -> list[Any]:
    given = {**dict.fromkeys(names), **defaults, **dict(zip(names, op.args, strict=False)), **op.kwargs}
    return [given[name] for name in names]


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


def _by_hand(op: Op) -> Norm | None:
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
    elif op.name == "std" and _last(op):
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


def _affine(norm: Norm) -> None:
    """Follows what was computed by hand through the casts, the weight and the bias that the same call applied to it."""
    y = norm.y
    assert y.op is not None
    frame = y.op.frame
    while True:
        users = {user for user in y.users if user.frame is frame}
        if len(users) != 1 or len({*y.users}) != 1:
            break
        op = users.pop()
        if op.name in ("_to_copy", "clone", "contiguous", "detach"):
            y = op.outputs[0]
        elif norm.kind == "scale" and _root_of_width(op, y):
            norm.kind, norm.length, y = "rms", True, op.outputs[0]
        elif op.name == "addcmul" and norm.weight is None and norm.bias is None and (gains := _gains(op, y)) is not None:
            (norm.weight, norm.bias), y = gains, op.outputs[0]
        elif norm.weight is None and norm.bias is None and (weight := _parameter(op, y, "mul")) is not None:
            norm.weight, y = weight, op.outputs[0]
        elif norm.bias is None and (bias := _parameter(op, y, "add")) is not None:
            norm.bias, y = bias, op.outputs[0]
        else:
            break
        norm.ops.add(op)
    norm.y = y


def _root_of_width(op: Op, y: Value) -> bool:
    """Whether an operator multiplies a unit vector by sqrt(d), so that its mean square is one."""
    passed = factor_of(op)
    return passed is not None and passed[0] is y and abs(passed[1].number / y.shape[-1] ** 0.5 - 1) < 1e-6


def _gains(op: Op, y: Value) -> tuple[Value, Value] | None:
    """Weight and bias of bias + y * weight in one operator."""
    bias, one, two = op.args[:3]
    weight = two if one is y else one
    small = all(isinstance(v, Value) and v.tensor.numel() == y.shape[-1] and not v.kind & (DATA | NOISE) for v in (bias, weight))
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
