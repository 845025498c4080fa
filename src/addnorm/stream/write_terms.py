"""The term that a sublayer adds to the stream: an operand of a sum, and the factors by which it is multiplied."""

from __future__ import annotations

import math
from dataclasses import dataclass

from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.find.paths import Path
from addnorm.stream.find.sublayers import Sublayer
from addnorm.stream.layout.dimensions import find_axis


@dataclass
class WriteTerm:
    """Operand of a residual add, with the numbers and tensors by which it is multiplied until it is added to the stream.

    Attributes:
        value: the operand, of the innermost sum: a in `x + g * (a + b)`.
        factor: the product of the numbers.
        scales: the tensors.
        obstacle: why the product of these is not the term that is added; usually empty.
        is_overwritten: whether the operand is overwritten in place before the last tensor is computed.
    """

    value: Value
    factor: float
    scales: list[Value]
    obstacle: str = ""
    is_overwritten: bool = False

    @property
    def last(self) -> int:
        """Largest operator index among the operand and its scales: when the term can be computed."""
        return max(value.index for value in (self.value, *self.scales))


def find_write_term(sublayer: Sublayer) -> WriteTerm:
    """Return the term that a sublayer adds: the operand of the innermost sum that contains it, and its factors."""
    path: Path = sublayer.write_path
    terms = path.terms
    scales = [term.scale for term in terms if term.scale is not None]
    write = WriteTerm(terms[-1].value, math.prod(term.factor for term in terms), scales)
    inner = terms[-1].op
    later = [factor for factor in path.factors if inner is not None and factor.op.index > inner.index]
    for factor in later:  # of sums: x + g * (a + b)
        if factor.kind == "guard":
            write.obstacle = "a sum of several writes is masked or clamped before it is added"
        elif factor.value is not None:
            scales.append(factor.value)
        else:
            write.factor *= factor.number
    views = [op for op in path.ops if "view" in op.traits and inner is not None and op.index > inner.index]
    if any(_is_moved(scale, write.value, views) for scale in scales):
        write.obstacle = "a sum of several writes is multiplied in another layout than that of the writes"
    write.is_overwritten = is_overwritten(write.value, write.last)
    return write


def _is_moved(scale: Value, write: Value, views: list[Op]) -> bool:
    """Return whether views between a write and its factor `scale` prevent its application to the write itself.

    The factor can be applied if there are no views, if it is one number, or if it is a vector over the features and the views
    keep the last dimension.
    """
    if not views or math.prod(scale.shape) == 1:
        return False
    is_vector = scale.shape[-1:] == write.shape[-1:] and math.prod(scale.shape) == scale.shape[-1]
    return not is_vector or any(
        find_axis(op.outputs[0], op.inputs[0], len(op.outputs[0].shape) - 1) != len(op.inputs[0].shape) - 1
        for op in views
    )


def is_overwritten(state: Value, last: int) -> bool:
    """Return whether an operator with index up to `last` overwrites the value in place, also through a view.

    Example: x in `x *= alpha; x += f(y)`.
    """
    todo, seen = [state], {state}
    while todo:
        value = todo.pop()
        for op in value.users:
            if op.index > last or not op.outputs:
                continue
            schema = getattr(op.func, "_schema", None)
            if schema is not None and schema.is_mutable and op.args and op.args[0] is value:
                return True
            if "view" in op.traits and op.outputs[0] not in seen:
                seen.add(op.outputs[0])
                todo.append(op.outputs[0])
    return False
