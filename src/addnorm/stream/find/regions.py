"""Regions of a captured run: which operators serve the sublayers only, and which lead to the model's output."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.find.operators import is_mixing

__all__ = ["Regions"]


@dataclass(frozen=True)
class Regions:
    """The operators of sublayers, those of the streams, and the values that the model returns."""

    inner: Set[Op]  # in sublayers
    path: Set[Op]  # on the streams
    results: Set[Value]

    def is_read_only(self, values: Sequence[Value]) -> bool:
        """Return whether values are used in sublayers only."""
        todo, seen = [*values], set[Op]()
        while todo:
            value = todo.pop()
            if value in self.results:
                return False
            for user in value.users:
                if user in self.path:
                    return False
                if user not in seen and user not in self.inner:
                    seen.add(user)
                    todo += user.outputs
        return True

    def is_used(self, value: Value) -> bool:
        """Return whether what the model returns depends on a value; True if it returns no tensor that is known."""
        todo, seen = [value], {value}
        while todo and self.results:
            value = todo.pop()
            if value in self.results:
                return True
            new = {out for user in value.users for out in user.outputs} - seen
            seen |= new
            todo += new
        return not self.results

    def is_returned(self, value: Value) -> bool:
        """Return whether the model returns a value, some of its tokens or their mean, without a head that mixes features."""
        todo, seen = [value], {value}
        while todo:
            value = todo.pop()
            if value in self.results:
                return True
            for user in value.users:
                new = {out for out in user.outputs if not is_mixing(user) and user not in self.inner} - seen
                seen |= new
                todo += new
        return False
