"""A data flow as data: values, the operators that made them, and the calls of modules in which those ran."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

from torch import Tensor

__all__ = ["CONSTANT", "DATA", "FAMILY", "NOISE", "PARAMETER", "Address", "Flow", "Frame", "Op", "Value"]

CONSTANT, PARAMETER, DATA, NOISE = 0, 1, 2, 4  # what a value depends on; the bits add up
FAMILY = "addnorm::"  # this library's operators count as one: there are forms with a backward, and into given memory
Address = tuple[
    str, int, str, int
]  # a module's path, which call of it, an operator, which of those that the call ran itself


class Frame:
    """One call of a module."""

    __slots__ = ("call", "parent", "path", "ran")

    def __init__(self, path: str, call: int, parent: Frame | None) -> None:
        self.path = path
        self.call = call
        self.parent = parent
        self.ran: dict[str, int] = {}  # how many of each operator

    def count(self, name: str) -> int:
        """Which of its kind an operator is, as they are counted from 0 in this call."""
        name = FAMILY if name.startswith(FAMILY) else name
        number = self.ran.get(name, 0)
        self.ran[name] = number + 1
        return number

    def chain(self) -> Iterator[Frame]:
        """The call, that from which it was made, and so on."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    def __repr__(self) -> str:
        return f"<call {self.call} of {self.path or 'the model'}>"


class Value:
    """A tensor at a moment."""

    __slots__ = ("index", "kind", "name", "norm", "op", "part", "shape", "tensor", "users")

    def __init__(self, op: Op | None, part: int | str, tensor: Tensor, kind: int, index: int, name: str = "") -> None:
        self.op = op
        self.part = part  # of the outputs of its operator; of an input its number among those of the model
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self.kind = kind
        self.index = index  # of its operator; -1 for what was there before
        self.name = name  # of a parameter or buffer
        self.users: list[Op] = []
        self.norm: Any = None  # the Norm that made it, once norms are found

    def __repr__(self) -> str:
        return f"<{self.op.name if self.op else self.name or 'input'} {self.index} {self.shape}>"


class Op:
    """An operator as it ran: `args` and `kwargs` have values where it was given tensors."""

    __slots__ = ("args", "frame", "func", "index", "inputs", "kwargs", "name", "norms", "ordinal", "origin", "outputs")

    def __init__(
        self,
        index: int,
        name: str,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        inputs: list[Value],
        frame: Frame,
        ordinal: int,
    ) -> None:
        self.index = index
        self.name = name
        self.origin = name  # of the operator that ran, of which this may be a step
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        self.frame = frame
        self.ordinal = ordinal
        self.outputs: list[Value] = []
        self.norms: tuple[Any, ...] = ()  # of which it is a step, once norms are found

    @property
    def address(self) -> Address:
        """Where it is found again in another run."""
        return self.frame.path, self.frame.call, FAMILY if self.origin.startswith(FAMILY) else self.origin, self.ordinal

    def __repr__(self) -> str:
        return f"<{self.index} {self.name} in {self.frame.path or 'the model'}>"


class Flow:
    """What was captured."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.leaves: list[Value] = []
        self.result: Any = None  # of the model, values in place of tensors

    def forget(self, keep: Container[Value] = ()) -> None:
        """Lets the tensors go that the run has made; shapes and what depends on what remain."""
        for op in self.ops:
            for value in op.outputs:
                if value not in keep:
                    value.tensor = value.tensor.new_empty(0)
