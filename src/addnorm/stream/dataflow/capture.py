"""Capture of the data flow of one run of a model: every operator, its values, and the module call in which it ran.

    flow = Capture(model).run(args, kwargs)
    flow.ops        each `Op` with its inputs, outputs and module call

A `Value` is a tensor at one moment: an operator that writes in place makes a new value of the same memory, and a copy keeps the
old contents. Operators are captured below autograd and autocast, where models of all classes consist of the same few operators.
The model runs eagerly, and without torch's fast path of TransformerEncoder. Parameters, buffers, arguments and random states are
restored after the run (state.py).
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
from addnorm.stream.dataflow.frames import Frames, exclusive, force_eager
from addnorm.stream.dataflow.graph import CONSTANT, DATA, NOISE, PARAMETER, Flow, Op, Value
from addnorm.stream.dataflow.memory import Memory
from addnorm.stream.dataflow.state import copy_argument, find_tensors, preserve_state

__all__ = ["Capture", "find_written", "operator_name"]

# Operators whose output depends on the shape and dtype of their inputs, not on their contents.
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
REPLACES = {"copy", "fill"}  # in place, independent of the old contents


@cache
def operator_name(func: Any) -> str:
    """Return an operator's name: for torch's own without the namespace and the underscore of in-place operators.

    `bernoulli_` and `normal_` keep the underscore: out-of-place they read probabilities and means from a tensor, in place they
    do not.
    """
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten":
        return f"{namespace}::{name}"
    bare: str = name if name.startswith("_") and not name.endswith("_") else name.rstrip("_")
    return f"{bare}_" if name in ("bernoulli_", "normal_") else bare


class Capture(TorchDispatchMode):
    """Dispatch mode that captures the data flow of one run of a model: `Capture(model).run(args, kwargs)`.

    Args:
        model: the model.
        contents: False if tensors have no contents, as on the meta device.
    """

    def __init__(self, model: nn.Module, contents: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.flow = Flow()
        self.frames = Frames(model)
        self._memory = Memory(self.add_leaf, self._add_write, contents)
        self._named = {id(p): name for name, p in model.named_parameters()}
        self._named |= {id(b): name for name, b in model.named_buffers()}
        self._parameters = {id(p) for p in model.parameters()}
        self._generators: dict[torch.Generator, Tensor] = {}  # generators of the model, with their states

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
        """Call the model and return the captured data flow."""
        model = self.frames.model
        args, kwargs = pytree.tree_map(copy_argument, (tuple(args), kwargs))
        for k, argument in enumerate(pytree.tree_leaves((args, kwargs))):
            for tensor in find_tensors(argument):
                if tensor not in self._memory:
                    self.add_leaf(tensor, DATA, k if tensor is argument else -1)
        self.frames.start()
        with preserve_state(model), force_eager():
            others, exclusive.frames = exclusive.frames, self.frames
            try:
                with self.frames.install_hooks(), self:
                    result = model(*args, **kwargs)
            finally:
                exclusive.frames = others
                self.flow.result = None
                self._memory.restore()
                for generator, state in self._generators.items():
                    generator.set_state(state)
        self.flow.result = pytree.tree_map_only(Tensor, self._memory.value, result)
        return self.flow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and add it to the flow."""
        kwargs = kwargs or {}
        frame = self.frames.current
        if frame is None or self.frames.is_paused:
            return func(*args, **kwargs)
        name = operator_name(func)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        values = [self._memory.value(x) if isinstance(x, Tensor) else x for x in leaves]
        values_args, values_kwargs = pytree.tree_unflatten(values, structure)
        for x in leaves:
            if isinstance(x, torch.Generator):
                self._generators.setdefault(x, x.get_state())
        written = find_written(func, args, kwargs)
        for tensor in (*written, *_running_statistics(name, args)):
            self._memory.save(tensor)
        out = func(*args, **kwargs)
        inputs = _find_dependencies(name, func, values_args, values_kwargs)
        op = Op(len(self.flow.ops), name, func, values_args, values_kwargs, inputs, frame, frame.count(name))
        outputs = written or [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        if fused_ops.is_fused(name, args):
            self._add_fused(op, args, kwargs, outputs)
        else:
            self._add(op, list(enumerate(outputs)), NOISE if name in RANDOM else CONSTANT)
        for tensor in written:
            if tensor in self._memory:
                self._memory.record_write(tensor)
        return out

    def _add(self, op: Op, outputs: Sequence[tuple[int | str, Tensor]], kind: int, bind: bool = True) -> None:
        """Add an operator and its outputs to the flow."""
        for value in op.inputs:
            kind |= value.kind
            value.users.append(op)
        self.flow.ops.append(op)
        for part, tensor in outputs:
            value = Value(op, part, tensor, kind, op.index)
            op.outputs.append(value)
            if bind:
                self._memory.bind(tensor, value)

    def _add_fused(self, op: Op, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        """Add the primitive operators of a fused operator to the flow."""
        value = self._memory.value
        for step in fused_ops.decompose_fused(op.name, op.func, args, kwargs, outputs, lambda t: value(t).tensor):
            inputs = [value(t) for t in step.inputs]
            new = Op(
                len(self.flow.ops), step.name, step.func, (*inputs, *step.numbers), {}, inputs, op.frame, op.ordinal
            )
            new.origin = op.name
            self._add(new, [(step.part, step.output)], NOISE if step.name == "noise" else CONSTANT)

    def value(self, tensor: Tensor) -> Value:
        """Return the value that a tensor has now."""
        return self._memory.value(tensor)

    def add_leaf(self, tensor: Tensor, kind: int | None = None, part: int = -1) -> Value:
        """Add a tensor that existed before the run to the flow."""
        if kind is None:
            kind = PARAMETER if id(tensor) in self._parameters else CONSTANT
        value = Value(None, part, tensor, kind, -1, self._named.get(id(tensor), ""))
        self.flow.leaves.append(value)
        self._memory.bind(tensor, value)
        return value

    def _add_write(self, name: str, tensor: Tensor, inputs: list[Value], writer: Op, *layout: Any) -> Value:
        """Add the value of a tensor after writes to its memory through other tensors."""
        op = Op(len(self.flow.ops), name, writer.func, (*inputs, *layout), {}, inputs, writer.frame, writer.ordinal)
        op.origin = writer.origin
        self._add(op, [("memory", tensor)], CONSTANT, bind=False)
        return op.outputs[0]


def _running_statistics(name: str, args: Any) -> list[Tensor]:
    """Return the running mean and variance, which a batch norm writes although its schema does not declare it."""
    return [x for x in args[3:5] if isinstance(x, Tensor)] if name in BATCH_NORMS else []


def _find_dependencies(name: str, func: Any, args: Any, kwargs: Any) -> list[Value]:
    """Return the values on which the output of an operator depends."""
    if name in SHAPE_ONLY:
        return []
    outs = {argument.name for argument in func._schema.arguments if argument.is_out}
    leaves = pytree.tree_leaves((args, {key: value for key, value in kwargs.items() if key not in outs}))
    inputs = [x for x in leaves if isinstance(x, Value)]
    replaces = name in REPLACES and args and isinstance(args[0], Value) and func._schema.is_mutable
    return inputs[1:] if replaces else inputs


def find_written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operator writes in place."""
    if not func._schema.is_mutable:
        return []
    written = []
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[k] if k < len(args) else kwargs.get(argument.name)
            written += [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    return written
