"""Observers, which get the outputs of selected operators in later forwards, and editors, which change these operators.

An operator of an inspected run is identified by its address: the module's path, the number of the call, the operator's name, and
its number among the operators of that name in the call. The address stays the same if the forward takes another branch elsewhere
(another expert, a cast that autocast caches). Only operators of the model's own forward are observed; the recomputation of a
checkpoint in the backward is not.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import checkpoint
from torch.utils._python_dispatch import BaseTorchDispatchMode, _get_current_dispatch_mode_stack

from addnorm._util.torch_internals import has_dispatch_mode, hook_this_thread
from addnorm.stream.dataflow import fused_ops, registered_ops
from addnorm.stream.dataflow.arithmetic import list_views
from addnorm.stream.dataflow.frames import Frames, WithoutFastPath, exclusive, force_eager
from addnorm.stream.dataflow.graph import UNCOUNTED, Address, Frame, Op, Value
from addnorm.stream.dataflow.memory import disable_modes
from addnorm.stream.dataflow.operators import FAMILY, find_first, find_written, list_outputs, operator_name
from addnorm.stream.dataflow.state import share_context
from addnorm.stream.dataflow.wrappers import (
    InnerOperatorMode,
    computes_shapes,
    find_fsdp_modules,
    has_wrappers,
    runs_in_fsdp,
)

COLLECTIVE, WAIT = "_c10d_functional::", "_c10d_functional::wait_tensor"
Observer = Callable[[Tensor], None]  # called with the output of an operator right after the operator ran


class Editor:
    """Base class of editors, which change an operator's arguments or output, and the gradients of its autograd node."""

    op: Op

    def __call__(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with which the operator runs."""
        return args, kwargs

    def change_output(self, out: Tensor) -> None:
        """Change the operator's first output in place."""

    def on_output(self, out: Tensor) -> None:
        """Receive the output after torch has set its autograd node."""


class ObserverMode(InnerOperatorMode):
    """Dispatch mode in which an observed forward runs.

    Nested `observe_forwards` blocks share the mode of a forward. Observers of any block thus get outputs after all editors.

    Args:
        frames: the calls of the model's modules.
        caller: the Python frame in which the forward runs.

    Attributes:
        observers: by the address of an operator, the observers of each of its outputs.
        editors: by the address of an operator, its editors.
        completed: whether the forward returned.
        deferred: functions to call before the next operator, when torch has set the autograd node of the last output. A function
            that returns True is called again before the operator after that. `outer` then has the wrappers among the arguments
            of the next operator.
        finished: whether the deferred functions are called for the last time.
    """

    def __init__(self, frames: Frames, caller: FrameType) -> None:
        super().__init__()
        self.frames = frames
        self.caller: FrameType | None = caller
        self._has_fsdp = bool(find_fsdp_modules(frames.model))
        self.observers: dict[Address, dict[int | str, list[Observer]]] = defaultdict(lambda: defaultdict(list))
        self.editors: dict[Address, list[Editor]] = defaultdict(list)
        self.completed = False
        self.finished = False
        self.deferred: list[Callable[[], object]] = []
        self._visited: dict[Address, Frame] = {}  # the call in which each operator ran

    def is_uncertain(self, op: Op) -> bool:
        """Return whether `op` did not run in this forward, or may be mistaken for another operator of the same module call."""
        frame = self._visited.get(op.address)
        return frame is None or not frame.is_like(op.frame, *op.address[2:])

    def run_deferred(self) -> None:
        """Call the functions in `deferred`, and keep those that return True, which are called again."""
        deferred, self.deferred = self.deferred, []
        self.deferred = [function for function in deferred if function() is True] + self.deferred
        self.outer.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and call its observers and its editors."""
        kwargs = kwargs or {}
        frame = self.frames.current
        if frame is None or self.frames.is_paused:
            return func(*args, **kwargs)
        if self.deferred and not self.depth:  # operators inside an operator on wrappers have no autograd nodes
            if types:
                self.note_wrappers((args, kwargs))
            self.run_deferred()
        if types and has_wrappers(types):
            out = self.run_wrapped(func, args, kwargs)
            if not self.deferred:
                self.outer.clear()
            return out
        if (self.depth and computes_shapes((args, kwargs))) or (self._has_fsdp and runs_in_fsdp()):
            return func(*args, **kwargs)
        name = operator_name(func)
        address = (frame.path, frame.call, FAMILY if name.startswith(FAMILY) else name, frame.count(name))
        editors, observers = self.editors.get(address, ()), self.observers.get(address, {})
        if not editors and not observers:
            return func(*args, **kwargs)
        with disable_modes():  # outer modes see only the operators of the model
            for editor in editors:
                args, kwargs = editor(func, args, kwargs)
        self._visited[address] = frame
        has_steps = fused_ops.is_fused(name, args) or (
            registered_ops.find_equation(name) is not None and any(isinstance(k, str) for k in observers)
        )
        with disable_modes():
            written = find_written(func, args, kwargs) if has_steps else []
            copies = {id(t): t.detach().clone() for t in written}
        out = func(*args, **kwargs)
        result = args[0] if name == WAIT else out  # the same memory; the wrapper has the argument

        def finish() -> None:
            first = find_first(result)
            changed = [] if first is None else [(editor, first) for editor in editors]
            with disable_modes():
                for editor, tensor in changed:
                    editor.change_output(tensor)
                parts = _name_outputs(func, args, kwargs, result, copies if has_steps else None) if observers else {}
                for part, own in observers.items():
                    for observer in own if part in parts else ():
                        observer(parts[part])
            self.deferred += [partial(self._edit_gradient, *pair) for pair in changed]

        if name.startswith("c10d::"):  # the caller waits for the collective before the next operator
            self.deferred.append(finish)
        else:
            finish()
        return out

    def _edit_gradient(self, editor: Editor, out: Tensor) -> None:
        editor.on_output(self.outer.get(id(out), out))


def _name_outputs(
    func: Any, args: Any, kwargs: Any, out: Any, copies: dict[int, Tensor] | None
) -> Mapping[int | str, Tensor]:  # fmt: skip
    """Return the outputs of an operator by index, and those of its steps by name unless `copies` is None.

    `copies` has the contents before the call of the tensors that the operator wrote, by the ids of the tensors.
    """
    returned = list_outputs(func, out, find_written(func, args, kwargs))
    steps: list[fused_ops.Step] = []
    if copies is not None:
        name, contents = operator_name(func), copies

        def get_old(tensor: Tensor) -> Tensor:
            return contents.get(id(tensor), tensor)

        if fused_ops.is_fused(name, args):
            steps = fused_ops.decompose_fused(name, func, args, kwargs, returned, get_old)
        else:
            steps = registered_ops.expand(func, args, kwargs, returned, get_old, proven=False).steps
    return {**{part: t for step in steps for part, t in step.outputs}, **dict(enumerate(returned))}


class _Calls(threading.local):
    """The calls of one model in this thread.

    Attributes:
        running: for each running call, the stack of contexts of its observation, and its mode; None for a call that is not
            observed.
        caller: the Python frame in which the first of these calls runs.
    """

    def __init__(self) -> None:
        self.running: list[tuple[ExitStack, ObserverMode] | None] = []
        self.caller: FrameType | None = None


# Longer than 60 lines, since the hooks share the state of one forward.
@contextmanager
def observe_forwards(
    model: nn.Module,
    begin: Callable[[ObserverMode, tuple[Any, ...], dict[str, Any]], bool],
    end: Callable[[ObserverMode], None] = lambda mode: None,
) -> Iterator[None]:
    """Run the model's forwards in observer modes while the block runs. Compiled models run eagerly.

    Args:
        model: the model.
        begin: called before each forward with its mode, to add observers and editors, and with the arguments; returns whether
            the forward is observed.
        end: called with the mode after an observed forward.
    """
    inner = getattr(model, "_orig_mod", model)
    calls = _Calls()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is not inner:  # a copy of the model that was made in the block has the hooks too
            return
        if calls.running and not _is_running(calls.caller):
            abandon()
        calls.running.append(None)
        if len(calls.running) > 1 or exclusive.frames is not None:  # the model calls itself, or is inspected
            return
        calls.caller = caller = sys._getframe(1)
        stack_modes = _get_current_dispatch_mode_stack()
        modes = [mode for mode in stack_modes if isinstance(mode, ObserverMode) and mode.caller is caller]
        mode = modes[0] if modes else ObserverMode(Frames(inner), caller)  # another block may have made it
        with disable_modes():
            is_observed = begin(mode, args, kwargs)
        if not is_observed:
            return
        stack = ExitStack()
        calls.running[0] = stack, mode
        stack.callback(_finish, mode, end)
        if not modes:
            mode.frames.start()
            stack.enter_context(WithoutFastPath())
            stack.enter_context(hook_this_thread(mode.frames.enter, mode.frames.leave))
            stack.enter_context(mode)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if module is inner and calls.running:
            close(calls.running.pop(), output is not None)

    def abandon() -> None:
        """Clean up after a forward that KeyboardInterrupt ended, for which torch calls no hook."""
        while calls.running:
            close(calls.running.pop(), False)

    def close(call: tuple[ExitStack, ObserverMode] | None, is_complete: bool) -> None:
        calls.caller = calls.caller if calls.running else None
        if call is not None:
            stack, mode = call
            mode.completed |= is_complete
            stack.close()

    with ExitStack() as outer:
        outer.enter_context(force_eager())
        outer.callback(abandon)
        for handle in (
            inner.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),  # before FSDP gathers parameters
            inner.register_forward_hook(leave, always_call=True, prepend=True),
        ):
            outer.callback(handle.remove)
        yield


def _is_running(frame: FrameType | None) -> bool:
    """Return whether a Python frame is on the stack."""
    current: FrameType | None = sys._getframe(1)
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


@contextmanager
def _replace_checkpoints(apply: Callable[..., Any], generator: Callable[..., Any]) -> Iterator[None]:
    """Replace the functions that run torch's reentrant and non-reentrant checkpoints while the block runs."""
    before = checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator

    def replace(function: Any, generator: Any) -> None:
        checkpoint.CheckpointFunction = function  # type: ignore[misc] # for as long as the block runs
        checkpoint._checkpoint_without_reentrant_generator = generator

    replace(SimpleNamespace(apply=apply), generator)
    try:
        yield
    finally:
        replace(*before)


@share_context
@contextmanager
def use_nonreentrant_checkpoints() -> Iterator[None]:
    """Run reentrant checkpoints as non-reentrant ones while the block runs; the gradients are the same.

    The forward of a reentrant checkpoint has no autograd graph on which gradients could be observed. If no input of a checkpoint
    requires a gradient, the checkpoint stays reentrant, so that its parameters get no gradients, as without this block.

    The recomputation of an observed forward runs under a mode and with hooks too. Otherwise this library's stacks would save
    other tensors than in the forward.
    """
    real, generator = checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if any(isinstance(t, Tensor) and t.requires_grad for t in args):
            return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
        return real.apply(function, preserve, *args)

    def with_mode(
        function: Any, preserve: bool = True, context: Any = checkpoint.noop_context_fn, *args: Any, **kwargs: Any
    ) -> Any:
        def contexts() -> tuple[Any, Any]:
            forward, again = context()
            return forward, _AsObserved(again) if has_dispatch_mode() else again

        is_debug = len(args) > 1 and args[1]  # torch accepts no context then
        return generator(function, preserve, context if is_debug else contexts, *args, **kwargs)

    with _replace_checkpoints(apply, with_mode):
        yield


@share_context
@contextmanager
def disable_checkpoints() -> Iterator[None]:
    """Disable checkpoints while the block runs: editors would not change the recomputation in the backward."""

    def plain(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    with _replace_checkpoints(lambda function, preserve, *args: function(*args), plain):
        yield


class _AsObserved(AbstractContextManager[None]):
    """Context `context` with a dispatch mode and a module hook, both without effect, as around an observed forward.

    It can be entered again, for each backward through the checkpoint.
    """

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._context, self._stack = context, ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(lambda module, args: None).remove)
            stack.enter_context(self._context)
            stack.enter_context(BaseTorchDispatchMode())
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


def _finish(mode: ObserverMode, end: Callable[[ObserverMode], None]) -> None:
    mode.finished = True
    mode.run_deferred()
    mode.frames.current = mode.caller = None
    with disable_modes():
        end(mode)


def find_observable(value: Value) -> Value:
    """Return the value whose operator can be observed in place of `value`, often `value` itself.

    For a cast by FSDP, return its input; for the output of a collective, return the output of the wait for it.
    """
    while value.op is not None and value.op.ordinal == UNCOUNTED and value.op.inputs:
        value = value.op.inputs[0]
    if value.op is not None and value.op.name.startswith(COLLECTIVE) and value.op.name != WAIT:
        waits = (op.out for view in list_views(value) for op in view.users if op.name == WAIT)
        value = next(waits, value)
    return value
