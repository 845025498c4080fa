"""Paths from a value to an operand of an add: through views and factors, and through partial sums."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.find.operators import SAME_SHAPE, Factor, Term, match_factor, strip_views

__all__ = ["Path", "find_ops_between", "join_paths", "sum_paths", "trace_multiples", "trace_origin"]


@dataclass
class Path:
    """Path from a value to a term of an add: its operators, the last one first, and the factors among them."""

    source: Value
    term: Term
    ops: list[Op] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)
    sums: list[Term] = field(default_factory=list)  # terms of partial sums on the path

    @property
    def terms(self) -> list[Term]:
        """The term of the add and those of the partial sums."""
        return [self.term, *self.sums]


def trace_multiples(term: Term) -> Iterator[Path]:
    """Return the values of which an operand is a multiple, the nearest first, each with its path to the operand."""
    value = term.value
    ops: list[Op] = []
    factors: list[Factor] = []
    while True:
        while strip_views(value) is not value:
            assert value.op is not None
            ops.append(value.op)
            value = value.op.inputs[0]
        yield Path(value, term, [*ops], [*factors])
        product = None if value.op is None or value.norm is not None else match_factor(value.op)
        if product is None:
            return
        assert value.op is not None
        ops.append(value.op)
        value, factor = product
        factors.append(factor)


def trace_origin(term: Term) -> Path:
    """Return the longest path of `trace_multiples`."""
    return [*trace_multiples(term)][-1]


def join_paths(first: Path, then: Path) -> Path:
    """Return the path that leads to a partial sum, and from there to the operand."""
    return Path(
        first.source, then.term, [*then.ops, *first.ops], [*then.factors, *first.factors],
        [*then.sums, first.term, *first.sums],
    )  # fmt: skip


def sum_paths(op: Op, first: Path, second: Path) -> Path | None:
    """Return the path of a sum of constant multiples of one value; None if their views or other factors differ."""
    number, views = 0.0, []
    for path in (first, second):
        if any(factor.kind != "constant" for factor in path.factors) or any(term.scale for term in path.terms):
            return None
        number += math.prod([*(factor.number for factor in path.factors), *(term.factor for term in path.terms)])
        views.append([step for step in path.ops if step.name not in SAME_SHAPE and not match_factor(step)])
    is_sum = number != 0.0 and views[0] == views[1]
    return Path(first.source, Term(first.term.value, number, None, op), views[0]) if is_sum else None


def find_ops_between(x: Value, raw: Value, without: Set[Op] = frozenset()) -> list[Op]:
    """Return the operators through which raw depends on x, except through those in `without`, in the order in which they ran."""
    back: set[Op] = set()
    todo = [raw]
    while todo:
        value = todo.pop()
        if value is x or value.op is None or value.index <= x.index or value.op in back or value.op in without:
            continue
        back.add(value.op)
        todo.extend(value.op.inputs)
    reached, ops = {x}, []
    for op in sorted(back, key=lambda op: op.index):
        if any(value in reached for value in op.inputs):
            reached.update(op.outputs)
            ops.append(op)
    return ops
