"""The meaning of torch's operators for a stream: views, factors and sums.

Names are those of `operator_name`: aten's, without the underscore of in-place operators. An operator in none of these tables
computes a new value.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from addnorm.stream.dataflow.graph import DATA, FAMILY, NOISE, PARAMETER, Op, Value

__all__ = [
    "ATTENTION", "CHANNELS_FIRST", "LOCAL_MIXING", "MIXING", "NORMALIZING", "PRODUCTS", "SAME_SHAPE", "SOFTMAX", "TRANSPARENT",
    "Factor", "Term", "get_noise_mean", "get_number",
    "is_ancestor", "is_mixing", "is_opaque", "is_scale", "match_factor", "match_terms", "strip_views",
    "trace_constants",
]  # fmt: skip

# The output has the numbers of the input in another shape, memory or dtype.
TRANSPARENT = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "contiguous", "clone", "_to_copy", "alias",
    "detach", "squeeze", "unsqueeze", "expand", "lift_fresh", "copy", "flatten", "unflatten", "swapaxes", "movedim", "to",
    "_conj", "view_as", "expand_as", "numpy_T", "_c10d_functional::wait_tensor",
}  # fmt: skip
# The output has the numbers of the input unless they are not finite, too large, or of a padded token: passages.py.
GUARDS = {
    "clamp", "clamp_min", "clamp_max", "nan_to_num", "where", "masked_fill", "hardtanh", "minimum", "maximum", "fmin", "fmax",
    "threshold",
}  # fmt: skip

# Operators that combine elements of different tokens or features. A sublayer has one; elementwise functions have none.
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
# Operators that combine neighbouring tokens without attention.
LOCAL_MIXING = {
    "convolution", "_convolution", "mkldnn_convolution", "conv_depthwise3d", "_fft_r2c", "_fft_c2c", "_fft_c2r", "cumsum",
    "cumprod", "logcumsumexp", "avg_pool1d", "avg_pool2d", "mkldnn_rnn_layer", "lstm", "gru",
    "write_into",  # tokens that are computed one after the other
}  # fmt: skip
COMPARISONS, UNIFORM = {"lt", "le", "gt", "ge"}, {"rand", "rand_like", "uniform"}
# Operators whose first input has the features in dimension 1.
CHANNELS_FIRST = {
    "convolution", "_convolution", "mkldnn_convolution", "native_batch_norm", "_native_batch_norm_legit", "native_group_norm",
    "_native_batch_norm_legit_no_training", "batch_norm", "group_norm", "cudnn_batch_norm", "instance_norm", "conv_depthwise3d",
    "_batch_norm_with_update", "batch_norm_with_update", "_batch_norm_no_update", "miopen_batch_norm",
}  # fmt: skip
# Norms and their parts. Where they belong to no `Norm`, they do not normalize over the features of a token.
NORMALIZING = {name for name in CHANNELS_FIRST if "norm" in name} | {
    "native_layer_norm", "_fused_rms_norm", "rms_norm", "rsqrt", "sqrt", "norm", "linalg_vector_norm", "var", "var_mean", "std",
    "std_mean",
}  # fmt: skip


class Factor(NamedTuple):
    """Factor of a value."""

    kind: str  # "constant", "learned", "noise" (dropout), "mask" (by token), "guard"
    number: float  # the constant
    value: Value | None  # the tensor
    op: Op


class Term(NamedTuple):
    """Operand of an add: factor * scale * value, where `scale` is a tensor that multiplies in the same operator."""

    value: Value
    factor: float = 1.0
    scale: Value | None = None
    op: Op | None = None  # the add


def get_number(x: Any) -> float | None:
    """Return a Python number or the number in a constant of one element; None for other arguments."""
    if isinstance(x, bool):
        return None
    if isinstance(x, Value) and x.kind == 0 and x.tensor.numel() == 1 and not x.tensor.is_complex():
        x = x.tensor if not isinstance(x.tensor, FakeTensor) else x.tensor.constant
        x = None if x is None else x.item()
    if not isinstance(x, int | float):
        return None
    short = float(f"{x:.7g}")  # 1e-6 after it was stored in float32
    return short if _round_to_float32(short) == x else float(x)


def get_fill(x: Any) -> float | None:
    """Return a Python number or the number that all elements of a constant have; None for other arguments."""
    if not isinstance(x, Value) or x.kind or isinstance(x.tensor, FakeTensor) or not x.tensor.numel():
        return get_number(x)
    first = x.tensor.flatten()[0]
    return get_number(first.item()) if bool((x.tensor == first).all()) else None


def _round_to_float32(x: float) -> float:
    try:
        rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return x
    return rounded


def strip_views(value: Value) -> Value:
    """Return the value of which another is a view, a copy or a cast."""
    while value.op is not None and value.op.inputs and (value.op.name in TRANSPARENT or _adds_zero(value.op)):
        value = value.op.inputs[0]
    return value


def _adds_zero(op: Op) -> bool:
    """Return whether an operator computes x + 0, as the first step of Python's sum does."""
    return op.name == "add" and len(op.inputs) == 1 and len(op.args) > 1 and get_number(op.args[1]) == 0.0


def is_opaque(op: Op) -> bool:
    """Return whether an operator belongs to another library, so that its computation is unknown."""
    return "::" in op.name and not op.name.startswith(FAMILY)


def is_mixing(op: Op) -> bool:
    """Return whether an operator combines elements of different tokens or features."""
    return op.name in MIXING or op.name in ATTENTION or is_opaque(op)


def match_terms(op: Op) -> tuple[Term, ...] | None:
    """Return the operands of an add of two tensors; None for other operators."""
    terms = _match_operands(op)
    return None if terms is None else tuple(term._replace(op=op) for term in terms)


def _match_operands(op: Op) -> tuple[Term, ...] | None:
    args = op.args
    tensors = [a for a in args if isinstance(a, Value)]
    if op.name in ("add", "sub", "rsub") and len(tensors) == 2:
        alpha = get_number(op.kwargs.get("alpha", args[2] if len(args) > 2 else 1))
        if alpha is None:
            return None
        sign = alpha if op.name == "add" else -alpha
        if op.name == "rsub":
            return Term(args[1]), Term(args[0], sign)
        return Term(args[0]), Term(args[1], sign)
    if op.name == "addcmul" and len(tensors) == 3:
        value = get_number(op.kwargs.get("value", 1))
        product = _match_scale(args[1], args[2], args[0])
        return None if value is None or product is None else (Term(args[0]), Term(product[0], value, product[1]))
    if (
        op.name in ("sum", "mean")
        and isinstance(args[0], Value)
        and args[0].op is not None
        and args[0].op.name == "stack"
    ):
        stacked, dims = args[0].op.args, args[1] if len(args) > 1 else None
        at = args[0].op.kwargs.get("dim", stacked[1] if len(stacked) > 1 else 0)
        factor = 1.0 if op.name == "sum" else 0.5
        is_pair = dims == [at] and len(stacked[0]) == 2
        return (Term(stacked[0][0], factor), Term(stacked[0][1], factor)) if is_pair else None
    if op.name == "lerp" and len(tensors) >= 2:
        weight = get_number(args[2])
        return None if weight is None else (Term(args[0], 1.0 - weight), Term(args[1], weight))
    return None


def match_factor(op: Op) -> tuple[Value, Factor] | None:
    """Return the input that an operator multiplies and its factor; None for other operators."""
    args = op.args
    if op.name == "neg":
        return args[0], Factor("constant", -1.0, None, op)
    if op.name in ("mul", "div") and len(args) >= 2 and not op.kwargs.get("rounding_mode"):
        for at, other in ((0, 1), (1, 0)) if op.name == "mul" else ((0, 1),):
            if not isinstance(args[at], Value):
                continue
            number = get_number(args[other])
            if number is not None and args[at].shape == op.outputs[0].shape:
                if op.name == "div":
                    number = 1.0 / number if number else math.inf
                return (args[at], Factor("constant", number, None, op)) if math.isfinite(number) else None
        if op.name == "mul" and isinstance(args[0], Value) and isinstance(args[1], Value):
            product = _match_scale(args[0], args[1], op.outputs[0])
            if product is not None:
                return product[0], Factor(_classify_scale(product[1]), 1.0, product[1], op)
    if op.name == "native_dropout":
        return args[0], Factor("noise", 1.0, None, op)
    if op.name in GUARDS:
        tensors = [v for v in op.inputs if v.kind and v.shape == op.outputs[0].shape and v.tensor.is_floating_point()]
        if len(tensors) == 1:
            return tensors[0], Factor("guard", 1.0, None, op)
    return _match_multiple(op)


def _match_multiple(op: Op) -> tuple[Value, Factor] | None:
    """Match a sum of constant multiples of one value: x + 0.1 x is 1.1 x."""
    terms = match_terms(op)
    if terms is None or any(term.scale is not None or term.value.shape != op.outputs[0].shape for term in terms):
        return None
    first, second = (dict(trace_constants(term.value, term.factor)) for term in terms)
    x = next((value for value in first if value in second), None)
    number = 0.0 if x is None else first[x] + second[x]
    return None if x is None or number == 0.0 else (x, Factor("constant", number, None, op))


def trace_constants(value: Value, number: float) -> Iterator[tuple[Value, float]]:
    """Yield the values of which a value is a constant multiple, the nearest first, each with the factor."""
    while True:
        yield value, number
        op = value.op
        product = match_factor(op) if op is not None and value.norm is None else None
        if op is not None and op.name in SAME_SHAPE and op.inputs and op.inputs[0].shape == value.shape:
            value = op.inputs[0]
        elif product is not None and product[1].kind == "constant":
            value, number = product[0], number * product[1].number
        else:
            return


def _match_scale(first: Value, second: Value, like: Value) -> tuple[Value, Value] | None:
    """Return a product's value and its scale (a number, a vector over the features, noise, or a token mask), or None."""
    for value, scale in ((first, second), (second, first)):
        if value.shape == like.shape and is_scale(scale, value):
            return value, scale
    return None


def is_scale(scale: Value, value: Value) -> bool:
    """Return whether a factor is a number, a vector over the features, noise, or a mask of tokens."""
    if scale.kind & NOISE and not scale.kind & DATA:
        return True
    if not value.shape or not torch.is_floating_point(value.tensor):
        return False
    if scale.kind & DATA:  # a token mask depends on the inputs only; a gate depends on parameters too
        return not scale.kind & PARAMETER and (scale.shape[-1:] in ((), (1,)) or _is_shared_by_channels(scale, value))
    if not scale.kind and scale.shape[-1:] == (1,):  # a constant for each token
        return True
    if sum(n > 1 for n in scale.shape) == 1 < len(value.shape) and scale.shape[-1:] == (
        1,
    ):  # of channels that come first
        return bool(scale.kind & PARAMETER) and len(scale.shape) <= len(value.shape)
    return scale.tensor.numel() in (1, value.shape[-1]) and scale.shape[-1:] in ((), (1,), value.shape[-1:])


def _is_shared_by_channels(scale: Value, value: Value) -> bool:
    """Return whether a factor is one for all of dimension 1, the channels of `(B, d, T)`; diagnostics.py checks that they are."""
    shape, of_value = scale.shape, value.shape
    return len(shape) == len(of_value) > 2 and shape[1] == 1 < of_value[1]


def _classify_scale(scale: Value) -> str:
    if scale.kind & NOISE:
        return "noise"
    is_constant_mask = not scale.kind and scale.tensor.numel() > 1 and scale.shape[-1:] == (1,)
    return "mask" if scale.kind & DATA or is_constant_mask else "learned"


def is_ancestor(value: Value, later: Value, without: Set[Op] = frozenset()) -> bool:
    """Return whether `later` depends on `value` through other operators than those in `without`."""
    target, seen, todo = strip_views(value), set(), [later]
    while todo:
        v = todo.pop()
        if v is value or v is target:
            return True
        if v.op is None or v.index < target.index or v.op in seen or v.op in without:
            continue
        seen.add(v.op)
        todo.extend(v.op.inputs)
    return False


def get_noise_mean(noise: Value) -> float | None:
    """Return the mean of a random factor: 1 for dropout, the keep probability for an unscaled mask; None if not known."""
    value, number = noise, 1.0
    for _ in range(8):
        value = strip_views(value)
        op = value.op
        if op is None:
            return None
        if op.name in ("noise", "native_dropout"):
            return number
        if op.name in ("bernoulli", "bernoulli_"):
            given = op.args[1] if len(op.args) > 1 else op.kwargs.get("p")
            if given is None:  # in place 0.5, the default, is not passed; out of place the input has the probabilities
                given = 0.5 if op.name == "bernoulli_" else op.args[0]
            p = get_fill(given)
            return None if p is None else number * p
        if op.name == "floor" and strip_views(op.args[0]).op is not None:
            added = strip_views(op.args[0]).op
            p = get_fill(added.args[1]) if added is not None and added.name == "add" else None
            p = get_fill(added.args[0]) if p is None and added is not None and added.name == "add" else p
            return None if p is None else number * p
        if op.name in COMPARISONS and len(op.args) == 2:  # uniform numbers, compared with a probability
            drawn, p = strip_views(op.args[0]) if isinstance(op.args[0], Value) else None, get_fill(op.args[1])
            uniform = drawn is not None and drawn.op is not None and drawn.op.name in UNIFORM
            return number * (p if op.name in ("lt", "le") else 1.0 - p) if uniform and p is not None else None
        passed = match_factor(op)
        if passed is None or passed[1].kind != "constant":
            return None
        value, number = passed[0], number * passed[1].number
    return None


SAME_SHAPE = {
    "_to_copy", "clone", "detach", "alias", "contiguous", "lift_fresh", "copy", "to", "_conj", "_c10d_functional::wait_tensor",
}  # fmt: skip
