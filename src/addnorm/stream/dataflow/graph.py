"""Data flow of a run: values, the operators that computed them, and the calls of modules in which the operators ran."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

from torch import Tensor

__all__ = ["CONSTANT", "DATA", "FAMILY", "NOISE", "PARAMETER", "UNCOUNTED", "Address", "Flow", "Frame", "Op", "Value"]

CONSTANT, PARAMETER, DATA, NOISE = 0, 1, 2, 4  # bits: what a value depends on
# This library's operators share one name: in place, with out= and with a backward, different operators run.
FAMILY = "addnorm::"
UNCOUNTED = -1  # ordinal of an operator that cannot be found in another run
# A module's path, the number of the call, an operator's name, its number among the operators of that name in the call.
Address = tuple[str, int, str, int]


class Frame:
    """One call of a module."""

    __slots__ = ("call", "parent", "path", "ran")

    def __init__(self, path: str, call: int, parent: Frame | None) -> None:
        self.path = path
        self.call = call
        self.parent = parent
        self.ran: dict[str, int] = {}  # number of operators of each name

    def count(self, name: str) -> int:
        """Count an operator and return its number among those of its name in this call, from 0."""
        name = FAMILY if name.startswith(FAMILY) else name
        number = self.ran.get(name, 0)
        self.ran[name] = number + 1
        return number

    def chain(self) -> Iterator[Frame]:
        """Return the call, its caller, and so on."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    def __repr__(self) -> str:
        return f"<call {self.call} of {self.path or 'the model'}>"


class Value:
    """Tensor at one moment of the run.

    Attributes:
        op: operator that computed it; None for inputs, parameters and other tensors that existed before the run.
        part: which output of the operator it is; for an input, its number among the inputs of the model.
        tensor: its contents.
        shape: its shape, which remains when the tensor is released.
        kind: bits of CONSTANT, PARAMETER, DATA, NOISE: what it depends on.
        index: number of its operator; -1 for values from before the run.
        name: name of a parameter or buffer.
        users: the operators that read it.
        norm: the `Norm` that computed it, after `find_norms`.
    """

    __slots__ = ("index", "kind", "name", "norm", "op", "part", "shape", "tensor", "users")

    def __init__(self, op: Op | None, part: int | str, tensor: Tensor, kind: int, index: int, name: str = "") -> None:
        self.op = op
        self.part = part
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self.kind = kind
        self.index = index
        self.name = name
        self.users: list[Op] = []
        self.norm: Any = None

    def __repr__(self) -> str:
        return f"<{self.op.name if self.op else self.name or 'input'} {self.index} {self.shape}>"


class Op:
    """Operator of the run. `args` and `kwargs` have `Value`s in place of tensors.

    Attributes:
        origin: name of the operator that ran; of a fused operator, this one is a step.
        ordinal: number among the operators of that name in the call.
        norms: the norms of which it is a step, after `find_norms`.
        line: file and line of the model's source that ran it: "model.py:12".
    """

    __slots__ = (
        "args", "frame", "func", "index", "inputs", "kwargs", "line", "name", "norms", "ordinal", "origin", "outputs",
    )  # fmt: skip

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
        line: str = "",
    ) -> None:
        self.index = index
        self.name = name
        self.origin = name
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        self.frame = frame
        self.ordinal = ordinal
        self.outputs: list[Value] = []
        self.norms: tuple[Any, ...] = ()
        self.line = line

    @property
    def address(self) -> Address:
        """The address that identifies the operator in another run."""
        return self.frame.path, self.frame.call, FAMILY if self.origin.startswith(FAMILY) else self.origin, self.ordinal

    def __repr__(self) -> str:
        return f"<{self.index} {self.name} in {self.frame.path or 'the model'}>"


class Flow:
    """Captured run: operators, leaves (tensors from before the run), and the result with values in place of tensors.

    Attributes:
        redraw: function that captures the run once more, with other random numbers; None if it cannot be repeated.
    """

    redraw: Callable[[], Flow] | None = None

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.leaves: list[Value] = []
        self.result: Any = None

    def release_tensors(self, keep: Container[Value] = ()) -> None:
        """Release the tensors that the run computed, except those in `keep`; shapes and dependencies remain."""
        for op in self.ops:
            for value in op.outputs:
                if value not in keep:
                    value.tensor = value.tensor.new_empty(0)
