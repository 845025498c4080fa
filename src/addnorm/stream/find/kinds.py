"""What a sublayer computes, told by its operators: attention, cross-attention, a feed-forward, or something else.

attention          a softmax weighs values; they, too, come from the stream
cross-attention    they come from elsewhere
feed-forward       products with parameters, and no neighbours meet: no convolution over tokens, no recurrence
"""

from __future__ import annotations

from collections.abc import Sequence

from addnorm.stream.dataflow.graph import DATA, PARAMETER, Op, Value
from addnorm.stream.find.ops import ATTENTION, LOCAL, MIXING, PRODUCTS, SOFTMAX, factor_of, opaque, reaches, up

__all__ = ["kind_of"]


def kind_of(x: Value, ops: Sequence[Op]) -> str:
    """What a sublayer computes, by its operators."""
    attends = [op for op in ops if op.name in ATTENTION]
    if not attends:
        attends = [op for op in ops if op.name in PRODUCTS and _weighs(op)]
    if attends:
        read = [reaches(x, op.args[at]) for op in attends for at in (1, 2) if _given(op, at) and op.name in ATTENTION]
        read += [reaches(x, _values_of(op)) for op in attends if op.name not in ATTENTION]
        return "attention" if any(read) else "cross-attention"
    products = [
        op for op in ops if op.name in PRODUCTS and all(_activation(v) for v in op.inputs) and not _with_itself(op)
    ]
    if products and any(
        op.name in SOFTMAX for op in ops
    ):  # a softmax in windows, say, whose way to the product is long
        return "attention" if all(reaches(x, v) for op in products for v in op.inputs) else "cross-attention"
    local = any(op.name in LOCAL and not _counts(op) and _wide(op) for op in ops)
    if products and not local:
        return "attention"
    if not local and any(op.name in MIXING or (opaque(op) and "linear" in op.name) for op in ops):
        return "feed-forward"
    return "other"


def _with_itself(op: Op) -> bool:
    """Whether a product is one of a value with itself: a length."""
    return len({up(value) for value in op.inputs}) == 1


def _given(op: Op, at: int) -> bool:
    return len(op.args) > at and isinstance(op.args[at], Value)


def _activation(value: Value) -> bool:
    return value.kind & (PARAMETER | DATA) == PARAMETER | DATA


def _weighs(op: Op) -> bool:
    """Whether one factor of a product is a softmax."""
    return any(_from_softmax(value) for value in op.inputs)


def _from_softmax(value: Value) -> bool:
    for _ in range(8):
        value = up(value)
        if value.op is None:
            return False
        if value.op.name in SOFTMAX:
            return True
        passed = factor_of(value.op)
        if passed is None and value.op.name not in ("slice", "narrow", "split", "nan_to_num"):
            return False
        value = passed[0] if passed is not None else value.op.inputs[0]
    return False


def _values_of(op: Op) -> Value:
    """The factor of a product with a softmax that is not the softmax."""
    return next((value for value in op.inputs if not _from_softmax(value)), op.inputs[-1])


def _counts(op: Op) -> bool:
    """Whether an operator works on whole numbers: where to send tokens, say."""
    tensor = op.outputs[0].tensor
    return not (tensor.is_floating_point() or tensor.is_complex())


def _wide(op: Op) -> bool:
    """Whether an operator mixes neighbours: a convolution with a kernel of one does not."""
    if "convolution" not in op.name:
        return True
    kernel = op.inputs[1].shape[2:] if len(op.inputs) > 1 else ()
    return any(size > 1 for size in kernel)
