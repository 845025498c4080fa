"""What torch's operators mean to a stream: which only pass it on, which scale it, which add to it.

Names are those of `flow.name_of`: aten's, without the underscore of in-place. An operator that is in no table computes
something, and what follows it is new.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Set
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from addnorm.stream.dataflow.graph import DATA, FAMILY, NOISE, PARAMETER, Op, Value

__all__ = [
    "ATTENTION", "CHANNELS", "LOCAL", "MIXING", "NORMALIZING", "PRODUCTS", "SOFTMAX", "TRANSPARENT", "Factor", "Term", "axis_of",
    "expectation", "factor_of", "mixing", "number_of", "opaque", "reaches", "terms_of", "up",
]  # fmt: skip

# The same numbers in another shape, memory or dtype.
TRANSPARENT = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "contiguous", "clone", "_to_copy", "alias",
    "detach", "squeeze", "unsqueeze", "expand", "lift_fresh", "copy", "flatten", "unflatten", "swapaxes", "movedim", "to",
    "_conj", "view_as", "expand_as", "numpy_T",
}  # fmt: skip
# The same numbers unless they are not finite, too large, or of a padded token; the closure tells if it mattered.
GUARDS = {"clamp", "clamp_min", "clamp_max", "nan_to_num", "where", "masked_fill"}

# Operators in which elements of different tokens or features meet, by which a sublayer is told from a few elementwise operators.
MIXING = {
    "mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "einsum", "dot", "mv", "_grouped_mm", "_scaled_mm", "_int_mm",
    "convolution", "_convolution", "mkldnn_convolution", "conv_depthwise3d", "_fft_r2c", "_fft_c2c", "_fft_c2r", "cumsum",
    "embedding", "avg_pool2d", "roll", "mkldnn_linear", "tensordot", "addbmm", "bilinear", "_trilinear", "cdist", "logcumsumexp",
    "cumprod", "flip", "gather", "index_select", "avg_pool1d", "mkldnn_rnn_layer", "lstm", "gru",
}  # fmt: skip
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward",
    "flex_attention", "_native_multi_head_attention",
}  # fmt: skip
SOFTMAX = {"_softmax", "softmax", "_safe_softmax", "_log_softmax"}
PRODUCTS = {"bmm", "baddbmm", "matmul", "einsum", "mm", "addbmm"}
# In which neighbouring tokens meet, without attention.
LOCAL = {
    "convolution", "_convolution", "mkldnn_convolution", "conv_depthwise3d", "_fft_r2c", "_fft_c2c", "_fft_c2r", "cumsum",
    "cumprod", "logcumsumexp", "avg_pool1d", "avg_pool2d", "mkldnn_rnn_layer", "lstm", "gru",
    "write_into",  # tokens computed one after the other
}  # fmt: skip
COMPARED, UNIFORM = {"lt", "le", "gt", "ge"}, {"rand", "rand_like", "uniform"}
# Whose first input has its features in the second place.
CHANNELS = {
    "convolution", "_convolution", "mkldnn_convolution", "native_batch_norm", "_native_batch_norm_legit", "native_group_norm",
    "_native_batch_norm_legit_no_training", "batch_norm", "group_norm", "cudnn_batch_norm", "instance_norm", "conv_depthwise3d",
    "_batch_norm_with_update", "batch_norm_with_update", "_batch_norm_no_update", "miopen_batch_norm",
}  # fmt: skip
# Norms, and what they are made of by hand: where they are no `Norm` they are norms of something else than tokens.
NORMALIZING = {name for name in CHANNELS if "norm" in name} | {
    "native_layer_norm", "_fused_rms_norm", "rms_norm", "rsqrt", "sqrt", "norm", "linalg_vector_norm", "var", "var_mean", "std",
    "std_mean",
}  # fmt: skip


class Factor(NamedTuple):
    """What a value is multiplied by on its way."""

    kind: str  # "constant", "learned", "noise" (dropout), "mask" (by token), "guard"
    number: float  # of a constant
    value: Value | None  # of a tensor
    op: Op


class Term(NamedTuple):
    """One operand of an add: `factor` times `value`, where `scale` is a tensor that multiplies it in the same operator."""

    value: Value
    factor: float = 1.0
    scale: Value | None = None
    op: Op | None = None  # the add


def number_of(x: Any) -> float | None:
    """A Python number, or that of a 0-d constant."""
    if isinstance(x, bool):
        return None
    if isinstance(x, Value) and x.kind == 0 and x.tensor.numel() == 1 and not x.tensor.is_complex():
        x = x.tensor if not isinstance(x.tensor, FakeTensor) else x.tensor.constant
        x = None if x is None else x.item()
    if not isinstance(x, int | float):
        return None
    short = float(f"{x:.7g}")  # 1e-6 as float32 has it
    return short if _float32(short) == x else float(x)


def _float32(x: float) -> float:
    try:
        rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return x
    return rounded


def up(value: Value) -> Value:
    """The value of which this is another view, copy or dtype."""
    while value.op is not None and value.op.inputs and (value.op.name in TRANSPARENT or _adds_nothing(value.op)):
        value = value.op.inputs[0]
    return value


def _adds_nothing(op: Op) -> bool:
    """x + 0, with which Python's sum begins."""
    return op.name == "add" and len(op.inputs) == 1 and len(op.args) > 1 and number_of(op.args[1]) == 0.0


def opaque(op: Op) -> bool:
    """Whether an operator is of another library: what it computes is not known."""
    return "::" in op.name and not op.name.startswith(FAMILY)


def mixing(op: Op) -> bool:
    """Whether elements of different tokens or features meet in it."""
    return op.name in MIXING or op.name in ATTENTION or opaque(op)


def axis_of(value: Value, source: Value, axis: int) -> int | None:
    """Which axis of the source is that axis of a view of it; None where it is part of one, or several."""
    while value is not source:
        op = value.op
        if op is None or not op.inputs or up(value) is value:
            return None
        shape, rank = op.inputs[0].shape, len(value.shape)
        if op.name in ("transpose", "swapaxes", "t", "numpy_T"):
            first, second = (d % rank for d in (op.args[1:3] if len(op.args) > 2 else (0, 1)))
            axis = {first: second, second: first}.get(axis, axis)
        elif op.name == "permute":
            axis = op.args[1][axis] % rank
        elif op.name == "alias" and len(op.args) > 1:  # the same bytes with dimensions in another order
            stride, _, strides = op.args[1:]
            axis = stride.index(strides[axis]) if strides[axis] in stride else -1
        elif op.name == "expand":
            axis -= rank - len(shape)
        elif shape != value.shape:
            size, after = value.shape[axis], math.prod(value.shape[axis + 1 :])
            same = [k for k, n in enumerate(shape) if n == size and math.prod(shape[k + 1 :]) == after]
            if not same:
                return None
            axis = same[0]
        value = op.inputs[0]
    return axis if axis >= 0 else None


def terms_of(op: Op) -> tuple[Term, ...] | None:
    """The operands of an add of two tensors; None for any other operator."""
    found = _terms(op)
    return None if found is None else tuple(term._replace(op=op) for term in found)


def _terms(op: Op) -> tuple[Term, ...] | None:
    args = op.args
    tensors = [a for a in args if isinstance(a, Value)]
    if op.name in ("add", "sub", "rsub") and len(tensors) == 2:
        alpha = number_of(op.kwargs.get("alpha", args[2] if len(args) > 2 else 1))
        if alpha is None:
            return None
        sign = alpha if op.name == "add" else -alpha
        if op.name == "rsub":
            return Term(args[1]), Term(args[0], sign)
        return Term(args[0]), Term(args[1], sign)
    if op.name == "addcmul" and len(tensors) == 3:
        value = number_of(op.kwargs.get("value", 1))
        found = _scaled(args[1], args[2], args[0])
        return None if value is None or found is None else (Term(args[0]), Term(found[0], value, found[1]))
    if op.name == "sum" and isinstance(args[0], Value) and args[0].op is not None and args[0].op.name == "stack":
        stacked, dims = args[0].op.args, args[1] if len(args) > 1 else None
        at = args[0].op.kwargs.get("dim", stacked[1] if len(stacked) > 1 else 0)
        return (Term(stacked[0][0]), Term(stacked[0][1])) if dims == [at] and len(stacked[0]) == 2 else None
    if op.name == "lerp" and len(tensors) >= 2:
        weight = number_of(args[2])
        return None if weight is None else (Term(args[0], 1.0 - weight), Term(args[1], weight))
    return None


def factor_of(op: Op) -> tuple[Value, Factor] | None:
    """What an operator that multiplies passes on, and by what it multiplies; None for any other operator."""
    args = op.args
    if op.name == "neg":
        return args[0], Factor("constant", -1.0, None, op)
    if op.name in ("mul", "div") and len(args) >= 2 and not op.kwargs.get("rounding_mode"):
        for at, other in ((0, 1), (1, 0)) if op.name == "mul" else ((0, 1),):
            if not isinstance(args[at], Value):
                continue
            number = number_of(args[other])
            if number is not None and args[at].shape == op.outputs[0].shape:
                if op.name == "div":
                    number = 1.0 / number if number else math.inf
                return (args[at], Factor("constant", number, None, op)) if math.isfinite(number) else None
        if op.name == "mul" and isinstance(args[0], Value) and isinstance(args[1], Value):
            found = _scaled(args[0], args[1], op.outputs[0])
            if found is not None:
                return found[0], Factor(_kind(found[1], found[0]), 1.0, found[1], op)
    if op.name == "native_dropout":
        return args[0], Factor("noise", 1.0, None, op)
    if op.name in GUARDS:
        tensors = [v for v in op.inputs if v.shape == op.outputs[0].shape and v.tensor.is_floating_point()]
        if len(tensors) == 1:
            return tensors[0], Factor("guard", 1.0, None, op)
    return None


def _scaled(one: Value, other: Value, like: Value) -> tuple[Value, Value] | None:
    """Which of two factors is passed on, and which scales it: a number, a vector over the features, noise, or a token mask."""
    for value, scale in ((one, other), (other, one)):
        if value.shape == like.shape and _scales(scale, value):
            return value, scale
    return None


def _scales(scale: Value, value: Value) -> bool:
    if scale.kind & NOISE and not scale.kind & DATA:
        return True
    if not value.shape or not torch.is_floating_point(value.tensor):
        return False
    if (
        scale.kind & DATA
    ):  # a token mask comes from the inputs alone; a gate, which parameters computed, is the sublayer's
        return not scale.kind & PARAMETER and scale.shape[-1:] in ((), (1,))
    if not scale.kind and scale.shape[-1:] == (1,):  # a constant for each token
        return True
    return scale.tensor.numel() in (1, value.shape[-1]) and scale.shape[-1:] in ((), (1,), value.shape[-1:])


def _kind(scale: Value, value: Value) -> str:
    if scale.kind & NOISE:
        return "noise"
    return (
        "mask"
        if scale.kind & DATA or (not scale.kind and scale.tensor.numel() > 1 and scale.shape[-1:] == (1,))
        else "learned"
    )


def reaches(value: Value, later: Value, without: Set[Op] = frozenset()) -> bool:
    """Whether `later` depends on `value`, by ways that lead not through some operators; looked for backwards, as far as that."""
    target, seen, todo = up(value), set(), [later]
    while todo:
        v = todo.pop()
        if v is value or v is target:
            return True
        if v.op is None or v.index < target.index or v.op in seen or v.op in without:
            continue
        seen.add(v.op)
        todo.extend(v.op.inputs)
    return False


def expectation(noise: Value) -> float | None:
    """The mean of a random factor: 1 for dropout, the probability to keep for a mask that is not divided by it."""
    value, number = noise, 1.0
    for _ in range(8):
        value = up(value)
        op = value.op
        if op is None:
            return None
        if op.name in ("noise", "native_dropout"):
            return number
        if op.name in ("bernoulli", "bernoulli_"):
            p = number_of(op.args[1]) if len(op.args) > 1 else number_of(op.kwargs.get("p"))
            return None if p is None else number * p
        if op.name == "floor" and up(op.args[0]).op is not None:
            added = up(op.args[0]).op
            p = number_of(added.args[1]) if added is not None and added.name == "add" else None
            p = number_of(added.args[0]) if p is None and added is not None and added.name == "add" else p
            return None if p is None else number * p
        if op.name in COMPARED and len(op.args) == 2:  # uniform numbers, compared with a probability
            drawn, p = up(op.args[0]) if isinstance(op.args[0], Value) else None, number_of(op.args[1])
            uniform = drawn is not None and drawn.op is not None and drawn.op.name in UNIFORM
            return number * (p if op.name in ("lt", "le") else 1.0 - p) if uniform and p is not None else None
        passed = factor_of(op)
        if passed is None or passed[1].kind != "constant":
            return None
        value, number = passed[0], number * passed[1].number
    return None
