"""Parts of a captured run as functions: y = f(x, gains), found by dominance and computed again in float64 with other inputs.

The data are the inputs of the model. A value x *dominates* y if every path from the data to y passes through x. The operators
between them are then a function of x and of values that do not depend on the data. To find out whether such a function is a norm,
it is computed on test inputs. Its spelling in operators does not matter then, and no coincidence in the run's values counts as a
proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from addnorm._util.torch_internals import FakeTensor, unset_fake_temporarily
from addnorm.stream.dataflow.arithmetic import get_number, is_move
from addnorm.stream.dataflow.graph import NOISE, PARAMETER, Op, Value, find_ops_between
from addnorm.stream.dataflow.replay import run_op

MAX_OPS = 48  # operators of one function; the longest norm of the tests has 12
MAX_SPAN = 1000  # operators that run from the first to the last of one function, those of other functions included


class Dominators:
    """The nearest dominator of each value. Call `add` with every operator of a run, in order.

    Attributes:
        nearest: the nearest dominator of each value that has one.
    """

    def __init__(self) -> None:
        self.nearest: dict[Value, Value] = {}
        self._depth: dict[Value, int] = {}

    def add(self, op: Op) -> Value | None:
        """Add an operator and return the nearest dominator of its outputs; None if the outputs are no function of one value."""
        sources = self._list_sources(op)
        if not sources or is_barrier(op):
            return None
        common: Value | None = sources[0]
        for source in sources[1:]:
            common = None if common is None else self._join(common, source)
        if common is not None:
            for out in op.outputs:
                self.nearest[out] = common
                self._depth[out] = self._depth.get(common, 0) + 1
        return common

    def _list_sources(self, op: Op) -> list[Value]:
        """Return the inputs that depend on the data.

        If no input does, as in a norm of learned tokens, return the inputs that are larger than one vector of features, or are
        computed from such inputs; if there are none, return the inputs with several numbers.
        """
        if dependent := [value for value in op.inputs if not value.is_fixed]:
            return dependent
        values = [value for value in op.inputs if value.tensor.numel() > 1]
        known = [value for value in values if value in self._depth or value.tensor.numel() > value.shape[-1]]
        for value in known or values:
            self._depth.setdefault(value, 0)
        return known or values

    def _join(self, first: Value, second: Value) -> Value | None:
        """Return the nearest value that is or dominates both `first` and `second`; None if there is none."""
        while first is not second:
            deeper = self._depth.get(first, 0) >= self._depth.get(second, 0)
            step = self.nearest.get(first if deeper else second)
            if step is None:
                return None
            first, second = (step, second) if deeper else (first, step)
        return first


def is_barrier(op: Op) -> bool:
    """Return whether `op` is never part of a `Function`: random numbers, a product with a learned matrix, an unknown operator."""
    is_write = op.name == "write_into" or any(v.part == "memory" for v in op.outputs)
    if is_write or op.traits & {"opaque", "attention"}:
        return True
    if any(out.kind & NOISE for out in op.outputs) and not all(v.kind & NOISE for v in op.inputs if v.has_data):
        return True
    return "mixing" in op.traits and any(v.is_learned for v in op.inputs)


def is_pointwise(op: Op) -> bool:
    """Return whether every element of an operator's output depends on one element of each input."""
    return torch.Tag.pointwise in getattr(op.func, "tags", ())


@dataclass(eq=False)
class Function:
    """Operators from x to y, in the order in which they ran. y depends on the data through x only."""

    x: Value
    y: Value
    ops: list[Op]

    @staticmethod
    def between(x: Value, y: Value) -> Function | None:
        """Return the function from dominator x to y; None if the function has more than `MAX_OPS` operators."""
        ops = find_ops_between(x, y) if y.index - x.index <= MAX_SPAN else []
        return Function(x, y, ops) if 0 < len(ops) <= MAX_OPS else None

    @property
    def combines_features(self) -> bool:
        """Return whether an output element depends on several elements of x."""
        return any(not is_pointwise(op) and not is_move(op) for op in self.ops)

    @cached_property
    def others(self) -> list[Value]:
        """The values besides x from which y is computed. They do not depend on the data."""
        inner = {self.x, *(out for op in self.ops for out in op.outputs)}
        return [*dict.fromkeys(v for op in self.ops for v in op.inputs if v not in inner)]

    def list_gains(self) -> list[Value]:
        """Return the values in `others` that may be a weight or a bias: vectors over the features, and single learned numbers."""
        d = self.x.shape[-1]
        return [
            v for v in self.others
            if v.tensor.is_floating_point()
            and ((v.tensor.numel() == d and v.shape[-1:] == (d,)) or (v.tensor.numel() == 1 and v.kind & PARAMETER))
        ]  # fmt: skip

    def list_numbers(self) -> list[float]:
        """Return the constants among the arguments of the operators."""
        leaves = pytree.tree_leaves([(op.args, op.kwargs) for op in self.ops])
        return [number for leaf in leaves if (number := get_number(leaf)) is not None]

    def key(self) -> Hashable:
        """Return a key that is equal for functions with the same operators, sizes and constants."""
        gains = {v: k for k, v in enumerate(self.list_gains())}
        numbers: dict[Value, Any] = {self.x: ("x", self.x.shape)}
        for value in self.others:
            is_gain = value in gains
            numbers[value] = ("gain", gains[value], value.shape) if is_gain else get_number(value) or id(value)
        parts: list[Any] = []
        for op in self.ops:
            for out in op.outputs:
                numbers.setdefault(out, len(numbers))
            arguments = pytree.tree_map_only(Value, lambda v: numbers.get(v, "overwritten"), (op.args, op.kwargs))
            parts.append((op.name, str(op.func), repr(arguments)))
        return (*parts, repr(numbers[self.y]))

    def freeze(self, gains: Mapping[Value, Tensor]) -> Callable[[Tensor], Tensor]:
        """Return the function of x alone, in float64 on the CPU, for any number of tokens: `(n, d)` -> `(n, d)`.

        Its other inputs are fixed: to the tensors in `gains`, or to copies of their values. The function must treat all tokens
        alike. It raises any exception if an operator cannot be computed again.
        """
        others = {v: gains[v] if v in gains else _copy(v) for v in self.others}
        size = math.prod(self.x.shape[:-1])

        def compute(rows: Tensor) -> Tensor:
            padded = torch.cat([rows, rows.new_ones(-len(rows) % size, rows.shape[-1])])
            parts = []
            with unset_fake_temporarily(), torch.no_grad():
                for part in padded.split(size):
                    values = {**others, self.x: part.reshape(self.x.shape)}
                    for op in self.ops:
                        values.update(zip(op.outputs, run_op(op, values), strict=False))
                    parts.append(values[self.y].reshape(size, -1))
            return torch.cat(parts)[: len(rows)]

        return compute


def _copy(value: Value) -> Tensor:
    """Return a copy of a value that does not depend on the data, in float64 if its dtype is floating-point."""
    tensor = value.tensor
    if isinstance(tensor, FakeTensor):
        number = get_number(value)
        if number is None:
            raise NotImplementedError  # the graph has no numbers
        return torch.full(value.shape, number, dtype=torch.float64)
    is_wide = tensor.is_floating_point()
    return tensor.detach().to("cpu", torch.float64 if is_wide else tensor.dtype, copy=True)
