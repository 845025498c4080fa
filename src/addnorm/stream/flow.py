"""The data flow of one run of a model: every operator that ran, on which values, inside which module.

    with Capture(model) as flow:
        model(x)
    flow.ops        each `Op` with its inputs, outputs and the module call it ran in

A `Value` is a tensor at a moment: an operator that writes in place makes a new value of the same memory, and what the memory
held before is kept. Captured is below autograd and autocast, where every model of whatever class consists of the same few
operators. While it is captured the model runs eagerly, and torch's closed fast path of TransformerEncoder is off. The
model's own memory (parameters, buffers, what it was called with) is left as it was, and so is the random state.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from addnorm.stream import fused

__all__ = [
    "CONSTANT", "DATA", "NOISE", "PARAMETER", "Address", "Capture", "Flow", "Frame", "Frames", "Op", "Value", "eagerly", "name_of",
    "without_modes", "written_by",
]

CONSTANT, PARAMETER, DATA, NOISE = 0, 1, 2, 4  # what a value depends on; the bits add up

# What these return depends on no value of their tensors: the shape and the dtype alone are asked for.
SHAPE_ONLY = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty", "new_zeros",
    "new_ones", "new_full", "new_empty_strided", "fill", "zero", "bernoulli_", "uniform", "normal_", "exponential", "set",
    "sym_size", "random",
}  # fmt: skip
RANDOM = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "uniform",
    "normal", "normal_", "exponential", "multinomial", "native_dropout", "random",
}  # fmt: skip
Address = tuple[str, int, str, int]  # a module's path, which call of it, an operator, which of those that the call ran itself


FAMILY = "addnorm::"  # this library's operators count as one: there are forms with a backward, and into given memory


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

    __slots__ = ("args", "frame", "func", "index", "inputs", "kwargs", "name", "ordinal", "origin", "outputs")

    def __init__(
        self, index: int, name: str, func: Callable[..., Any], args: Any, kwargs: Any, inputs: list[Value], frame: Frame, ordinal: int
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


@cache
def name_of(func: Any) -> str:
    """The operator's name, without its namespace for torch's own, and without the underscore of in-place.

    `bernoulli_` and `normal_` keep it: as functions they take probabilities and means from a tensor, in place they do not.
    """
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten":
        return f"{namespace}::{name}"
    bare: str = name if name.startswith("_") and not name.endswith("_") else name.rstrip("_")
    return f"{bare}_" if name in ("bernoulli_", "normal_") else bare


class Frames:
    """Which call of which module is running, told by hooks on all modules."""

    alone: Frames | None = None  # while these frames capture a run, it is no run for all the others

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.calls: dict[str, int] = {}
        self.current: Frame | None = None
        self._stack: list[Frame] = []

    def start(self) -> Frame:
        """Begins a run."""
        self.calls.clear()
        self._stack.clear()
        self.calls[""] = 1
        self.current = Frame("", 0, None)
        return self.current

    @property
    def paused(self) -> bool:
        """Whether what runs now is not theirs."""
        return Frames.alone is not None and Frames.alone is not self

    def enter(self, module: nn.Module, args: Any = None) -> None:
        """A module is called."""
        if self.paused:
            return
        path = self.paths.get(id(module))
        if path is None or (path == "" and not self._stack):  # the model itself has its frame already
            if path == "" and self.current is not None:
                self._stack.append(self.current)
            return
        call = self.calls.get(path, 0)
        self.calls[path] = call + 1
        if self.current is not None:
            self._stack.append(self.current)
            self.current = Frame(path, call, self.current)

    def leave(self, module: nn.Module, args: Any = None, output: Any = None) -> None:
        """It has returned, or raised."""
        if self._stack and not self.paused and id(module) in self.paths:
            self.current = self._stack.pop()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The hooks, for as long as the block runs."""
        handles = [
            register_module_forward_pre_hook(self.enter),
            register_module_forward_hook(self.leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def eagerly() -> Iterator[None]:
    """Every operator runs by itself: no compiled graph, no closed fast path."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with torch.compiler.set_stance("force_eager"):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


class Capture(TorchDispatchMode):
    """Captures the data flow of what runs inside it: `with Capture(model) as capture: model(x)`, then `capture.flow`."""

    def __init__(self, model: nn.Module, keep: bool = True) -> None:
        super().__init__()
        self.flow = Flow()
        self.frames = Frames(model)
        self._values: dict[int, Value] = {}  # by the id of the tensor
        self._alive: list[Any] = []  # every tensor met, so that no id is used twice
        self._memory: dict[int, list[Tensor]] = {}  # the tensors of a storage
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # what was there before and was overwritten, with a copy
        self._named = {id(p): name for name, p in model.named_parameters()}
        self._named |= {id(b): name for name, b in model.named_buffers()}
        self._parameters = {id(p) for p in model.parameters()}
        self._exit = ExitStack()

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
        """Captures the model called with these."""
        model = self.frames.model
        for k, tensor in enumerate(pytree.tree_leaves((args, kwargs))):
            if isinstance(tensor, Tensor) and id(tensor) not in self._values:
                self._leaf(tensor, DATA, k)
        frame = self.frames.start()
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        with torch.random.fork_rng([*devices]), eagerly():
            others, Frames.alone = Frames.alone, self.frames
            try:
                with self.frames.watching(), self:
                    result = model(*args, **kwargs)
            finally:
                Frames.alone = others
                self._restore()
        del frame
        self.flow.result = pytree.tree_map_only(Tensor, self._value, result)
        return self.flow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operator runs."""
        kwargs = kwargs or {}
        frame = self.frames.current
        if frame is None or self.frames.paused:
            return func(*args, **kwargs)
        name = name_of(func)
        given, shape = pytree.tree_flatten((args, kwargs))
        values = [self._value(x) if isinstance(x, Tensor) else x for x in given]
        values_args, values_kwargs = pytree.tree_unflatten(values, shape)
        written = written_by(func, args, kwargs)
        for tensor in written:
            self._save(tensor)
        out = func(*args, **kwargs)
        inputs = [x for x in values if isinstance(x, Value)]
        op = Op(len(self.flow.ops), name, func, values_args, values_kwargs, self._dependencies(name, func, values_args, inputs), frame, frame.count(name))
        self.flow.ops.append(op)
        returned = written or [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        if fused.known(name, args):
            self._lower(op, args, kwargs, returned, written)
            return out
        kind = 0
        for value in op.inputs:
            kind |= value.kind
            value.users.append(op)
        kind |= NOISE if name in RANDOM else 0
        for part, tensor in enumerate(returned):
            value = Value(op, part, tensor, kind, op.index)
            op.outputs.append(value)
            self._bind(tensor, value)
        for tensor in written:
            self._overwritten(op, tensor)
        return out

    def _dependencies(self, name: str, func: Any, args: Any, inputs: list[Value]) -> list[Value]:
        if name in SHAPE_ONLY:
            return []
        if name == "copy":  # the old contents are gone
            return [v for v in inputs[1:]] if isinstance(args[0], Value) else inputs
        return inputs

    def _lower(self, op: Op, args: Any, kwargs: Any, returned: list[Tensor], written: list[Tensor]) -> None:
        """One of this library's operators, as the plain ones that it stands for."""
        self.flow.ops.pop()
        for step in fused.lower(op.name, op.func, args, kwargs, returned, lambda t: self._value(t).tensor):
            inputs = [self._value(t) for t in step.inputs]
            new = Op(len(self.flow.ops), step.name, step.func, (*inputs, *step.numbers), {}, inputs, op.frame, op.ordinal)
            new.origin = op.name
            kind = 0
            for value in inputs:
                kind |= value.kind
                value.users.append(new)
            value = Value(new, step.part, step.output, kind | (NOISE if step.name == "noise" else 0), new.index)
            new.outputs.append(value)
            self.flow.ops.append(new)
            self._bind(step.output, value)
        for tensor in written:
            if id(tensor) in self._values:  # y or z may be an empty stand-in
                self._overwritten(op, tensor)

    def _value(self, tensor: Tensor) -> Value:
        value = self._values.get(id(tensor))
        if value is None:
            kind = PARAMETER if id(tensor) in self._parameters else CONSTANT
            value = self._leaf(tensor, kind)
        return value

    def _leaf(self, tensor: Tensor, kind: int, part: int = -1) -> Value:
        value = Value(None, part, tensor, kind, -1, self._named.get(id(tensor), ""))
        self.flow.leaves.append(value)
        self._bind(tensor, value)
        return value

    def _bind(self, tensor: Tensor, value: Value) -> None:
        if id(tensor) not in self._values:
            self._alive.append(tensor)
            with without_modes():
                self._memory.setdefault(_storage(tensor), []).append(tensor)
        self._values[id(tensor)] = value

    def _save(self, tensor: Tensor) -> None:
        """Copies of the values whose memory is about to be written."""
        with without_modes(), torch.no_grad():
            for other in self._memory.get(_storage(tensor), [tensor]):
                value = self._values.get(id(other))
                if value is None or value.tensor is not other:
                    continue
                copy = other.detach().clone()
                if value.op is None and id(other) not in self._before:
                    self._before[id(other)] = (other, copy)
                value.tensor = copy

    def _overwritten(self, op: Op, tensor: Tensor) -> None:
        """The other tensors of the written memory have new values too."""
        new = self._values[id(tensor)]
        for other in self._memory[_storage(tensor)]:
            if other is tensor or id(other) not in self._values:
                continue
            old = self._values[id(other)]
            whole = other.numel() == tensor.numel()
            inputs = [new] if whole else [old, new]
            name = "alias" if whole else "write_into"
            step = Op(len(self.flow.ops), name, op.func, tuple(inputs), {}, inputs, op.frame, op.ordinal)
            step.origin = op.name
            value = Value(step, "memory", other, new.kind | (0 if whole else old.kind), step.index)
            for source in inputs:
                source.users.append(step)
            step.outputs.append(value)
            self.flow.ops.append(step)
            self._values[id(other)] = value

    def _restore(self) -> None:
        """What was there before is as it was."""
        with torch.no_grad():
            for tensor, copy in self._before.values():
                tensor.copy_(copy)


@contextmanager
def without_modes() -> Iterator[None]:
    with torch.utils._python_dispatch._disable_current_modes():
        yield


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes in place."""
    if not func._schema.is_mutable:
        return []
    found = []
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[k] if k < len(args) else kwargs.get(argument.name)
            found += [t for t in pytree.tree_leaves(given) if isinstance(t, Tensor)]
    return found
