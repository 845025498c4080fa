"""Data flow of a run: values, the operators that computed them, and the calls of modules in which the operators ran."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any, NoReturn, SupportsIndex, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from addnorm.stream.dataflow.operators import FAMILY, bind_arguments, find_traits

CONSTANT, PARAMETER, DATA, NOISE = 0, 1, 2, 4  # bits: what a value depends on
UNCOUNTED = -1  # ordinal of an operator that cannot be found in another run
EDIT = "edit"  # name of the operator that changes a write inside `ablate`
# A module's path, the index of the call, an operator's name, its index among the operators of this name in the call.
Address = tuple[str, int, str, int]


def _refuse_copy(part: Value | Op, protocol: SupportsIndex) -> NoReturn:
    """Raise TypeError for `copy.deepcopy` and `pickle`, which would recurse through the whole captured run."""
    raise TypeError(
        "a result of addnorm that holds the run of a model cannot be copied or pickled: keep its to_dict() or its tensors."
    )


@dataclass(eq=False, slots=True, repr=False)
class Frame:
    """One call of a module.

    Attributes:
        path: path of the module.
        call: index of the call among the calls of the module, from 0.
        parent: the call in which this call was made; None for the call of the model.
        calls: paths of the modules that this call called, in this order.
        ran: for each operator of a name that ran in this call, the length of `calls` at that time.
    """

    path: str
    call: int
    parent: Frame | None
    calls: list[str] = field(default_factory=list)
    ran: dict[str, list[int]] = field(default_factory=dict)

    def count(self, name: str) -> int:
        """Count an operator, and return its index among the operators of this name in this call, from 0."""
        name = FAMILY if name.startswith(FAMILY) else name
        places = self.ran.setdefault(name, [])
        places.append(len(self.calls))
        return len(places) - 1

    def is_like(self, other: Frame, name: str, index: int) -> bool:
        """Return whether the operator of this name and index may be the same in both calls.

        It is not if the calls ran more or fewer operators of this name, or if each called a module before the operator (after the
        one of this name before it) that the other did not, as where a forward skips another layer.
        """
        places, others = self.ran.get(name, []), other.ran.get(name, [])
        if len(places) != len(others):
            return False
        first, second = (
            {*frame.calls[ends[index - 1] if index else 0 : ends[index]]}
            for frame, ends in ((self, places), (other, others))
        )
        return first <= second or second <= first

    def chain(self) -> Iterator[Frame]:
        """Yield this call, the call in which it was made, and so on up to the call of the model."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    def __repr__(self) -> str:
        return f"<call {self.call} of {self.path or 'the model'}>"


@dataclass(eq=False, slots=True, repr=False)
class Value:
    """Tensor at one moment of the run.

    Attributes:
        op: operator that computed the value; None for inputs, parameters and other tensors that existed before the run.
        part: index or name of the value among the operator's outputs; for an input, its index among the inputs of the model.
        tensor: the contents.
        kind: what the value depends on, as bits PARAMETER, DATA and NOISE; CONSTANT if it depends on none of these.
        index: index of the operator; -1 for values from before the run.
        name: name of the parameter or buffer; empty for other values.
        users: the operators that read the value, each once.
        norm: the `Norm` whose output the value is, set by `find_norms`; None for other values.
        shape: the shape, which remains when the tensor is released.
    """

    op: Op | None
    part: int | str
    tensor: Tensor
    kind: int
    index: int
    name: str = ""
    users: list[Op] = field(default_factory=list)
    norm: Any = None
    shape: tuple[int, ...] = field(init=False)

    __reduce_ex__ = _refuse_copy

    def __post_init__(self) -> None:
        self.shape = tuple(self.tensor.shape)

    @property
    def exact(self) -> Tensor:
        """The contents in float64, for arithmetic with negligible round-off."""
        return self.tensor.detach().double()

    @property
    def has_data(self) -> bool:
        """Whether the value depends on the inputs of the model."""
        return bool(self.kind & DATA)

    @property
    def is_learned(self) -> bool:
        """Whether the value depends on parameters, but not on the inputs of the model."""
        return self.kind & (PARAMETER | DATA) == PARAMETER

    @property
    def is_fixed(self) -> bool:
        """Whether the value depends neither on the inputs of the model nor on random numbers."""
        return not self.kind & (DATA | NOISE)

    @property
    def inputs(self) -> list[Value]:
        """The inputs of the operator; empty for values from before the run."""
        return self.op.inputs if self.op is not None else []

    @property
    def traits(self) -> frozenset[str]:
        """The traits of the operator; empty for values from before the run."""
        return self.op.traits if self.op is not None else frozenset()

    def __repr__(self) -> str:
        return f"<{self.op.name if self.op else self.name or 'input'} {self.index} {self.shape}>"


@dataclass(eq=False, slots=True, repr=False)
class Op:
    """Operator of the run.

    Attributes:
        index: index of the operator in the run.
        name: name of the operator, as `operator_name` returns it.
        func: the function that ran.
        args, kwargs: the arguments, with `Value`s in place of tensors.
        inputs: the values on which the outputs depend.
        frame: the module call in which the operator ran.
        ordinal: index among the operators of this name in the call.
        line: file and line of the model's source that ran the operator, as in "model.py:12".
        origin: if this operator is a step of a fused operator, the name of the fused operator; otherwise `name`.
        outputs: the values that the operator computed.
        norms: the norms of which the operator is a step, in the order in which they end; set by `find_norms`.
        traits: what the operator does, as words of the table in operators.py.
        whole: if this operator is a step of a fused operator, the fused operator, which is not in the flow; otherwise None.
        note: why the equation registered for this operator is not used; empty if it is used, or none is registered.
    """

    index: int
    name: str
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    inputs: list[Value]
    frame: Frame
    ordinal: int
    line: str = ""
    origin: str = ""
    outputs: list[Value] = field(default_factory=list)
    norms: tuple[Any, ...] = ()
    traits: frozenset[str] = field(init=False)
    whole: Op | None = None
    note: str = ""

    __reduce_ex__ = _refuse_copy

    def __post_init__(self) -> None:
        self.origin = self.origin or self.name
        self.traits = find_traits(self.name)
        if "scatter" in self.traits and self.get("accumulate", False):
            self.traits -= {"join"}

    @property
    def address(self) -> Address:
        """The address that identifies the operator in another run."""
        return self.frame.path, self.frame.call, FAMILY if self.origin.startswith(FAMILY) else self.origin, self.ordinal

    @property
    def out(self) -> Value:
        """The first output."""
        return self.outputs[0]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the argument that the operator's schema calls `name`, or the schema's default, or else `default`."""
        return bind_arguments(self.func, self.args, self.kwargs).get(name, default)

    def __repr__(self) -> str:
        return f"<{self.index} {self.name} in {self.frame.path or 'the model'}>"


@dataclass(eq=False)
class Flow:
    """Captured run.

    Attributes:
        ops: the operators, in the order in which they ran.
        leaves: the tensors from before the run.
        result: what the model returned, with values in place of tensors.
        redraw: function that captures the run once more, with other random numbers; None if it cannot be repeated.
    """

    ops: list[Op] = field(default_factory=list)
    leaves: list[Value] = field(default_factory=list)
    result: Any = None
    redraw: Callable[[], Flow] | None = None

    def list_results(self) -> set[Value]:
        """Return the values that the model returns."""
        return {value for value in pytree.tree_leaves(self.result) if isinstance(value, Value)}

    def name_results(self) -> dict[str, Value]:
        """Return the values that the model returns by their places: "hidden_states[2]", or "output" if there is one value.

        If a class in the output is registered with pytree without names of its parts, all values get numbers as places.
        """
        try:
            places = [(pytree.keystr(path), value) for path, value in pytree.tree_flatten_with_path(self.result)[0]]
        except ValueError:
            places = [(f"[{i}]", value) for i, value in enumerate(pytree.tree_leaves(self.result))]
        return {_name_place(place): value for place, value in places if isinstance(value, Value)}

    def release_tensors(self) -> None:
        """Release the tensors that the run computed; shapes and dependencies remain."""
        for op in self.ops:
            for value in op.outputs:
                value.tensor = value.tensor.new_empty(0)


def _name_place(key: str) -> str:
    """Return the place of a value in the model's output, from a key of pytree such as "['hidden_states'][2]"."""
    named = re.fullmatch(r"(?:\['(\w+)'\]|\.(\w+))(.*)", key)
    return (named[1] or named[2]) + named[3] if named else f"output{key}"


T = TypeVar("T")


def walk(starts: Iterable[T], follow: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield the items in `starts` and all items to which `follow` leads, each once, depth first."""
    todo, seen = [*starts], set[T]()
    while todo:
        item = todo.pop()
        if item not in seen:
            seen.add(item)
            yield item
            todo += follow(item)


def find_ops_between(x: Value, y: Value, without: Set[Op] = frozenset()) -> list[Op]:
    """Return the operators on the paths from x to y that avoid the operators in `without`, in the order in which they ran."""

    def follow(value: Value) -> list[Value]:
        return value.inputs if value is not x and value.index > x.index and value.op not in without else []

    back = {value.op for value in walk([y], follow) if value.op is not None and follow(value)}
    reached, ops = {x}, []
    for op in sorted(back, key=lambda op: op.index):
        if not reached.isdisjoint(op.inputs):
            reached.update(op.outputs)
            ops.append(op)
    return ops
