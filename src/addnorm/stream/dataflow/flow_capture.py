"""Capture of the data flow of one run of a model: every operator, its values, and the module call in which it ran.

    flow = FlowCapture(model).run(args, kwargs)
    flow.ops        each `Op` with its inputs, outputs and module call

A `Value` is a tensor at one moment: an operator that writes in place makes a new value of the same memory, and a copy keeps the
old contents. Operators are captured below autograd and autocast, where models of all classes consist of the same few operators.
The model runs eagerly, and without torch's fast path of TransformerEncoder. What the run changes in the model and in its
arguments is restored (snapshot.py).

Wrappers (DTensor, quantized weights) are captured as their inner tensors. Parameters that FSDP gathers are leaves, and the
operators that gather them are not captured. Memory that is freed during the run cannot be read later: small parameters are copied
when they are used, the others become NaN. Small inputs and parameters are copied after the run, since the caller may change them;
large ones are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from addnorm._util.torch_internals import hook_this_thread
from addnorm.stream.dataflow import fused_ops, registered_ops
from addnorm.stream.dataflow.frames import Frames, WithoutFastPath, exclusive, find_line, force_eager
from addnorm.stream.dataflow.graph import CONSTANT, DATA, EDIT, NOISE, PARAMETER, UNCOUNTED, Flow, Op, Value
from addnorm.stream.dataflow.memory import Memory, disable_modes, is_in_memory
from addnorm.stream.dataflow.observers import Editor
from addnorm.stream.dataflow.operators import (
    find_first,
    find_traits,
    find_written,
    list_outputs,
    operator_name,
    running_statistics,
)
from addnorm.stream.dataflow.snapshot import preserve_state
from addnorm.stream.dataflow.state import find_tensors
from addnorm.stream.dataflow.wrappers import (
    InnerOperatorMode,
    computes_shapes,
    find_fsdp_modules,
    find_tensors_of,
    has_wrappers,
    inner_tensors,
    is_wrapper,
    runs_in_fsdp,
)

SMALL = 1 << 16  # largest number of elements of a parameter that is copied when it is used
OTHER_SEED = 0x5EED  # seed of a second run


class FlowCapture(InnerOperatorMode):
    """Dispatch mode that captures the data flow of one run of a model: `FlowCapture(model).run(args, kwargs)`.

    Args:
        model: the model.
        contents: whether tensors have contents; False on the meta device.
        editors: editors that change outputs of operators in this run as they do in later forwards.

    Attributes:
        flow: the data flow.
        frames: the calls of the model's modules.
        value: function that returns the current `Value` of a tensor.
    """

    def __init__(self, model: nn.Module, contents: bool = True, editors: Sequence[Editor] = ()) -> None:
        super().__init__()
        self.flow = Flow()
        self.frames = Frames(model)
        self._memory = Memory(self.add_leaf, self._add_write, contents)
        self.value = self._memory.value
        self._contents = contents
        self._editors = editors
        self._edits: list[Callable[[], None]] = []  # changes to make before the next operator, after a collective
        named = [*model.named_parameters(), *model.named_buffers()]
        self._named = {id(t): name for name, tensor in named for t in (tensor, *inner_tensors(tensor))}
        self._parameters = {id(t) for p in model.parameters() for t in (p, *inner_tensors(p))}
        self._has_fsdp = bool(find_fsdp_modules(model))
        self._modules = dict(model.named_modules()) if self._has_fsdp else {}
        self._attributes = {id(t) for m in self._modules.values() for t in vars(m).values() if isinstance(t, Tensor)}
        self._small: dict[Value, Tensor] = {}  # copies of parameters
        self._generators: dict[torch.Generator, Tensor] = {}  # generators of the model, with their states

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
        """Call the model and return the captured data flow."""
        model = self.frames.model
        self.flow.redraw = cache(partial(self._run_again, args, kwargs, torch.is_grad_enabled()))
        for k, argument in enumerate(pytree.tree_leaves((args, kwargs))):
            for whole in find_tensors(argument):
                for tensor in inner_tensors(whole):
                    if tensor not in self._memory:
                        self.add_leaf(tensor, DATA, k if whole is argument else -1)
        self.frames.start()
        with preserve_state(model, (args, kwargs)), force_eager():
            others, exclusive.frames = exclusive.frames, self.frames
            try:
                with WithoutFastPath(), hook_this_thread(self.frames.enter, self.frames.leave), self:
                    result = model(*args, **kwargs)
            finally:
                exclusive.frames = others
                self.flow.result = None
                for generator, state in self._generators.items():
                    generator.set_state(state)
                self._memory.copy_written()
                self._memory.copy_leaves(self.flow.leaves)
        self.flow.result = pytree.tree_map_only(Tensor, self._result_value, result)
        self._replace_freed()
        return self.flow

    def _run_again(self, args: Sequence[Any], kwargs: dict[str, Any], has_grad: bool) -> Flow:
        """Call the model once more, with other random numbers, and return the data flow of this call.

        The random numbers are equal to those of the first call only if the model seeds their generator itself.
        """
        model = self.frames.model
        with preserve_state(model), torch.set_grad_enabled(has_grad):
            try:
                for generator in self._generators:
                    generator.manual_seed(OTHER_SEED)
                torch.manual_seed(OTHER_SEED)
                return FlowCapture(model, self._contents, self._editors).run(args, kwargs)
            finally:
                for generator, state in self._generators.items():
                    generator.set_state(state)

    def _result_value(self, tensor: Tensor) -> Value | None:
        inner = inner_tensors(tensor)
        return self.value(inner[0]) if inner else None

    def _replace_freed(self) -> None:
        """Replace tensors whose memory was freed during the run: small parameters by their copies, others by NaN."""
        for value in (*self.flow.leaves, *(out for op in self.flow.ops for out in op.outputs)):
            if self._contents and not is_in_memory(value.tensor, value.shape):
                with disable_modes(), torch.no_grad():
                    t = value.tensor
                    fill = float("nan") if t.is_floating_point() or t.is_complex() else 0
                    unknown = torch.full((), fill, dtype=t.dtype, device=t.device).expand(value.shape)
                    value.tensor = self._small.get(value, unknown)
        self._small.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and add it to the flow."""
        kwargs = kwargs or {}
        frame = self.frames.current
        if frame is None or self.frames.is_paused:
            return func(*args, **kwargs)
        while self._edits:
            self._edits.pop(0)()
        if types and has_wrappers(types):
            return self._run_wrapped(func, args, kwargs)
        if self.depth and computes_shapes((args, kwargs)):
            return func(*args, **kwargs)
        name = operator_name(func)
        if name == "prim::device":  # of a fake tensor: it reads no contents
            return func(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        in_fsdp = self._has_fsdp and runs_in_fsdp()
        known = (self.value(x) for x in leaves if isinstance(x, Tensor) and x in self._memory)
        if in_fsdp and not any(value.has_data for value in known):
            return func(*args, **kwargs)
        values = [self.value(x) if isinstance(x, Tensor) else x for x in leaves]
        values_args, values_kwargs = pytree.tree_unflatten(values, structure)
        for x in leaves:
            if isinstance(x, torch.Generator):
                self._generators.setdefault(x, x.get_state())
        written = find_written(func, args, kwargs)
        for tensor in (*written, *running_statistics(func, args)):
            self._memory.save(tensor)
        for value in values:
            if isinstance(value, Value) and value.is_fixed and value not in self._small:
                self._copy_small(value)
        out = func(*args, **kwargs)
        inputs = _find_dependencies(name, func, values_args, values_kwargs)
        if in_fsdp and name in ("view", "alias", "detach") and inputs[0].shape == tuple(out.shape):
            self._memory.bind(out, inputs[0])
            return out
        ordinal = UNCOUNTED if in_fsdp else frame.count(name)
        op = Op(len(self.flow.ops), name, func, values_args, values_kwargs, inputs, frame, ordinal, find_line())
        outputs = list_outputs(func, out, written)
        if self._contents and any(is_wrapper(x) for x in pytree.tree_leaves(out)):
            outputs = [t for t in outputs if t not in self._memory]  # a wrapper of its input is no new value
        if fused_ops.is_fused(name, args):
            self._add_steps(op, fused_ops.decompose_fused(name, func, args, kwargs, outputs, self._get_old))
        elif not self._add_registered(op, args, kwargs, outputs):
            self._add(op, list(enumerate(outputs)), NOISE if "random" in op.traits else CONSTANT)
        for tensor in written:
            if tensor in self._memory:
                self._memory.record_write(tensor)
        for editor in self._editors:
            if editor.op.address == op.address and (first := find_first(out)) is not None:
                self._edits.append(partial(self._add_edit, editor, op, first))
        return out

    def _run_wrapped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on wrappers, and add the operators on their inner tensors to the flow."""
        before = len(self.flow.ops)
        out = self.run_wrapped(func, args, kwargs)
        self.outer.clear()
        frame = self.frames.current
        new = [t for t in find_tensors_of(out) if t not in self._memory]
        if out is NotImplemented or len(self.flow.ops) > before or not new or frame is None:
            return out
        # The wrapper's class hides its operators.
        inputs = [self.value(t) for t in find_tensors_of((args, kwargs))]
        op = Op(
            before, f"hidden::{operator_name(func)}", func, tuple(inputs), {}, inputs, frame, UNCOUNTED, find_line()
        )
        self._add(op, [*enumerate(new)], CONSTANT)
        return out

    def _copy_small(self, value: Value) -> None:
        """Copy a small parameter, since FSDP may free its memory before the captured value is read."""
        tensor = value.tensor
        is_small = self._contents and tensor.numel() <= SMALL and tensor.is_floating_point()
        if is_small and is_in_memory(tensor, value.shape):
            with disable_modes(), torch.no_grad():
                self._small[value] = tensor.detach().clone()

    def _add(self, op: Op, outputs: Sequence[tuple[int | str, Tensor]], kind: int, bind: bool = True) -> None:
        """Add an operator and its outputs to the flow."""
        for value in dict.fromkeys(op.inputs):
            kind |= value.kind
            value.users.append(op)
        self.flow.ops.append(op)
        for part, tensor in outputs:
            value = Value(op, part, tensor, kind, op.index)
            op.outputs.append(value)
            if bind:
                self._memory.bind(tensor, value)

    def _add_steps(self, op: Op, steps: Sequence[fused_ops.Step]) -> None:
        """Add the primitive operators of a fused operator to the flow."""
        for step in steps:
            args, kwargs = pytree.tree_map_only(Tensor, self.value, (step.args, dict(step.kwargs)))
            inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Value)]
            index = len(self.flow.ops)
            new = Op(index, step.name, step.func, args, kwargs, inputs, op.frame, op.ordinal, op.line, op.name)
            new.whole = op
            self._add(new, step.outputs, NOISE if step.name == "noise" or "random" in new.traits else CONSTANT)

    def _add_registered(self, op: Op, args: Any, kwargs: Any, outputs: list[Tensor]) -> bool:
        """Add the steps of a registered operator of another library to the flow. Return False if its equation is not proven."""
        if not self._contents or registered_ops.find_equation(op.name) is None:
            return False
        with disable_modes():
            found = registered_ops.expand(op.func, args, kwargs, outputs, self._get_old)
        if found.error:
            op.note = found.error
            return False
        self._add_steps(op, found.steps)
        for k, tensor in found.results.items():
            value = self.value(tensor)
            value.tensor = outputs[k]
            self._memory.bind(outputs[k], value)
        op.index = len(self.flow.ops)
        if others := [(k, tensor) for k, tensor in enumerate(outputs) if k not in found.results]:
            self._add(op, others, CONSTANT)
        return True

    def _add_edit(self, editor: Editor, op: Op, out: Tensor) -> None:
        """Change an output of an operator, and add the change to the flow."""
        before = self.value(out)
        self._memory.save(out)
        with disable_modes():
            editor.change_output(out)
        index, change = len(self.flow.ops), editor.change_output
        self._add(Op(index, EDIT, change, (before,), {}, [before], op.frame, UNCOUNTED, op.line), [(0, out)], CONSTANT)
        self._memory.record_write(out)

    def _get_old(self, tensor: Tensor) -> Tensor:
        """Return the contents of a tensor before the operator that has just run."""
        return self.value(tensor).tensor

    def add_leaf(self, tensor: Tensor, kind: int | None = None, part: int = -1) -> Value:
        """Add a tensor that existed before the run to the flow, and return its `Value`."""
        name = self._named.get(id(tensor), "")
        if kind is None:
            kind = PARAMETER if id(tensor) in self._parameters else CONSTANT
            if self._has_fsdp and not name:
                name = self._find_gathered(tensor)
                kind = PARAMETER if name else kind
        value = Value(None, part, tensor, kind, -1, name)
        self.flow.leaves.append(value)
        self._memory.bind(tensor, value)
        return value

    def _find_gathered(self, tensor: Tensor) -> str:
        """Return the name of a parameter that FSDP has gathered for this call; an empty string for other tensors."""
        for frame in self.frames.current.chain() if self.frames.current is not None else ():
            module = self._modules.get(frame.path)
            own = {} if module is None else {**module._parameters, **vars(module)}
            for name, other in own.items():
                if isinstance(other, Tensor) and id(other) not in self._attributes and _has_inner(other, tensor):
                    return f"{frame.path}.{name}".removeprefix(".")
        named = self.frames.model.named_parameters(remove_duplicate=False)
        return next((name for name, p in named if _has_inner(p, tensor)), "")

    def _add_write(self, name: str, tensor: Tensor, inputs: list[Value], writer: Op, *layout: Any) -> Value:
        """Add and return the new value of a tensor whose memory operator `writer` wrote through another tensor."""
        index, arguments, frame = len(self.flow.ops), (*inputs, *layout), writer.frame
        op = Op(index, name, writer.func, arguments, {}, inputs, frame, writer.ordinal, writer.line, writer.origin)
        self._add(op, [("memory", tensor)], CONSTANT, bind=False)
        return op.out


def _has_inner(wrapper: Tensor, tensor: Tensor) -> bool:
    return any(inner is tensor for inner in inner_tensors(wrapper))


def _find_dependencies(name: str, func: Any, args: Any, kwargs: Any) -> list[Value]:
    """Return the values on which the output of an operator depends."""
    if "shapes" in find_traits(name):
        return []
    outs = {argument.name for argument in func._schema.arguments if argument.is_out}
    leaves = pytree.tree_leaves((args, {key: value for key, value in kwargs.items() if key not in outs}))
    inputs = [x for x in leaves if isinstance(x, Value)]
    replaces = "overwrites" in find_traits(name) and args and isinstance(args[0], Value) and func._schema.is_mutable
    return inputs[1:] if replaces else inputs
