"""The data flow of one run of a model: every operator that ran, on which values, inside which module.

    flow = Capture(model).run(args, kwargs)
    flow.ops        each `Op` with its inputs, outputs and the module call it ran in

A `Value` is a tensor at a moment: an operator that writes in place makes a new value of the same memory, and what the memory
held before is kept. Captured is below autograd and autocast, where every model of whatever class consists of the same few
operators. While it is captured the model runs eagerly, and torch's closed fast path of TransformerEncoder is off. What was there
before (parameters, buffers, what the model was called with, random states) is left as it was: state.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from addnorm.stream.dataflow import fused_ops
from addnorm.stream.dataflow.frames import Frames, alone, eagerly
from addnorm.stream.dataflow.graph import CONSTANT, DATA, FAMILY, NOISE, PARAMETER, Address, Flow, Frame, Op, Value
from addnorm.stream.dataflow.memory import Memory, without_modes
from addnorm.stream.dataflow.state import as_it_was, copied, tensors_in

__all__ = [
    "CONSTANT", "DATA", "FAMILY", "NOISE", "PARAMETER", "Address", "Capture", "Flow", "Frame", "Frames", "Op", "Value", "eagerly",
    "name_of", "without_modes", "written_by",
]  # fmt: skip

# What these return depends on no value of their tensors: the shape and the dtype alone are asked for.
SHAPE_ONLY = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty", "new_zeros",
    "new_ones", "new_full", "new_empty_strided", "zero", "bernoulli_", "uniform", "normal_", "exponential", "set", "sym_size",
    "random",
}  # fmt: skip
RANDOM = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "uniform",
    "normal", "normal_", "exponential", "multinomial", "native_dropout", "random",
}  # fmt: skip
BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index"}
REPLACES = {"copy", "fill"}  # in place: the old contents are gone


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


class Capture(TorchDispatchMode):
    """Captures the data flow of one run of a model: `Capture(model).run(args, kwargs)`.

    Args:
        model: whose modules' calls are told apart.
        contents: False where tensors have shapes and no numbers, as on the meta device.
    """

    def __init__(self, model: nn.Module, contents: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.flow = Flow()
        self.frames = Frames(model)
        self._memory = Memory(self.leaf, self._later, contents)
        self._named = {id(p): name for name, p in model.named_parameters()}
        self._named |= {id(b): name for name, b in model.named_buffers()}
        self._parameters = {id(p) for p in model.parameters()}
        self._generators: dict[torch.Generator, Tensor] = {}  # those of the model's own, and their states

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
        """Captures the model called with these."""
        model = self.frames.model
        args, kwargs = pytree.tree_map(copied, (tuple(args), kwargs))
        for k, given in enumerate(pytree.tree_leaves((args, kwargs))):
            for tensor in tensors_in(given):
                if tensor not in self._memory:
                    self.leaf(tensor, DATA, k if tensor is given else -1)
        self.frames.start()
        with as_it_was(model), eagerly():
            others, alone.frames = alone.frames, self.frames
            try:
                with self.frames.watching(), self:
                    result = model(*args, **kwargs)
            finally:
                alone.frames = others
                self.flow.result = None
                self._memory.restore()
                for generator, state in self._generators.items():
                    generator.set_state(state)
        self.flow.result = pytree.tree_map_only(Tensor, self._memory.value, result)
        return self.flow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operator runs."""
        kwargs = kwargs or {}
        frame = self.frames.current
        if frame is None or self.frames.paused:
            return func(*args, **kwargs)
        name = name_of(func)
        given, shape = pytree.tree_flatten((args, kwargs))
        values = [self._memory.value(x) if isinstance(x, Tensor) else x for x in given]
        values_args, values_kwargs = pytree.tree_unflatten(values, shape)
        for x in given:
            if isinstance(x, torch.Generator):
                self._generators.setdefault(x, x.get_state())
        written = written_by(func, args, kwargs)
        for tensor in (*written, *_statistics(name, args)):
            self._memory.save(tensor)
        out = func(*args, **kwargs)
        op = Op(
            len(self.flow.ops), name, func, values_args, values_kwargs, _dependencies(name, func, values_args, values_kwargs),
            frame, frame.count(name),
        )  # fmt: skip
        returned = written or [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        if fused_ops.known(name, args):
            self._lower(op, args, kwargs, returned)
        else:
            self._add(op, list(enumerate(returned)), NOISE if name in RANDOM else CONSTANT)
        for tensor in written:
            if tensor in self._memory:
                self._memory.wrote(tensor)
        return out

    def _add(self, op: Op, outputs: Sequence[tuple[int | str, Tensor]], kind: int, bind: bool = True) -> None:
        """Notes an operator and what it returned."""
        for value in op.inputs:
            kind |= value.kind
            value.users.append(op)
        self.flow.ops.append(op)
        for part, tensor in outputs:
            value = Value(op, part, tensor, kind, op.index)
            op.outputs.append(value)
            if bind:
                self._memory.bind(tensor, value)

    def _lower(self, op: Op, args: Any, kwargs: Any, returned: list[Tensor]) -> None:
        """One of this library's operators, as the plain ones that it stands for."""
        value = self._memory.value
        for step in fused_ops.lower(op.name, op.func, args, kwargs, returned, lambda t: value(t).tensor):
            inputs = [value(t) for t in step.inputs]
            new = Op(
                len(self.flow.ops), step.name, step.func, (*inputs, *step.numbers), {}, inputs, op.frame, op.ordinal
            )
            new.origin = op.name
            self._add(new, [(step.part, step.output)], NOISE if step.name == "noise" else CONSTANT)

    def value(self, tensor: Tensor) -> Value:
        """What a tensor holds now."""
        return self._memory.value(tensor)

    def leaf(self, tensor: Tensor, kind: int | None = None, part: int = -1) -> Value:
        """What was there before."""
        if kind is None:
            kind = PARAMETER if id(tensor) in self._parameters else CONSTANT
        value = Value(None, part, tensor, kind, -1, self._named.get(id(tensor), ""))
        self.flow.leaves.append(value)
        self._memory.bind(tensor, value)
        return value

    def _later(self, name: str, tensor: Tensor, inputs: list[Value], writer: Op, *layout: Any) -> Value:
        """What a tensor holds after others wrote to its memory."""
        op = Op(len(self.flow.ops), name, writer.func, (*inputs, *layout), {}, inputs, writer.frame, writer.ordinal)
        op.origin = writer.origin
        self._add(op, [("memory", tensor)], CONSTANT, bind=False)
        return op.outputs[0]


def _statistics(name: str, args: Any) -> list[Tensor]:
    """The running mean and variance of a batch norm, which it writes though its schema does not say so."""
    return [x for x in args[3:5] if isinstance(x, Tensor)] if name in BATCH_NORMS else []


def _dependencies(name: str, func: Any, args: Any, kwargs: Any) -> list[Value]:
    """The values on which the result of an operator depends."""
    if name in SHAPE_ONLY:
        return []
    outs = {argument.name for argument in func._schema.arguments if argument.is_out}
    found = pytree.tree_leaves((args, {key: value for key, value in kwargs.items() if key not in outs}))
    inputs = [x for x in found if isinstance(x, Value)]
    return (
        inputs[1:] if name in REPLACES and args and isinstance(args[0], Value) and func._schema.is_mutable else inputs
    )


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
