"""Observers: functions that get the outputs of selected operators in later forwards, and editors that change their arguments.

An operator of an inspected run is identified by its address: the module's path, the number of the call, the operator's name, and
its number among the operators of that name in the call. A different branch elsewhere (another expert, a cast that autocast
caches) does not change the address. Only operators of the model's own forward are observed; the recomputation of a checkpoint in
the backward is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from addnorm._util.torch_internals import has_dispatch_mode, hook_this_thread
from addnorm.stream.dataflow import fused_ops, registered_ops
from addnorm.stream.dataflow.frames import Frames, WithoutFastPath, exclusive, force_eager
from addnorm.stream.dataflow.graph import Address, Frame, Op, Value
from addnorm.stream.dataflow.memory import disable_modes
from addnorm.stream.dataflow.operators import FAMILY, operator_name
from addnorm.stream.dataflow.state import share_context
from addnorm.stream.dataflow.wrappers import (
    InnerOperatorMode,
    computes_shapes,
    find_fsdp_modules,
    has_wrappers,
    runs_in_fsdp,
)
from addnorm.stream.dataflow.writes import find_written, list_outputs

Observer = Callable[[Tensor], None]  # called with the output of an operator right after the operator ran


class Editor(Protocol):
    """Object that changes an operator's arguments or its output, and the gradients of its autograd node."""

    def __call__(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with which the operator runs."""

    def change_output(self, func: Any, out: Any) -> Any:
        """Return what the operator returns instead of `out`."""

    def on_output(self, out: Tensor) -> None:
        """Receive the output after torch has set its autograd node."""


class ObserverMode(InnerOperatorMode):
    """Dispatch mode in which an observed forward runs.

    Args:
        frames: the calls of the model's modules.
        observers: by the address of an operator, the observers of each of its outputs.
        editors: by the address of an operator, its editor.

    Attributes:
        completed: whether the forward returned.
        deferred: functions to call before the next operator, when torch has set the autograd node of the last output. A function
            that returns True is called again before the operator after that. `outer` then has the wrappers among the arguments
            of the next operator.
        finished: whether the deferred functions are called for the last time.
    """

    def __init__(
        self,
        frames: Frames,
        observers: Mapping[Address, Mapping[int | str, list[Observer]]],
        editors: Mapping[Address, Editor] | None = None,
    ) -> None:
        super().__init__()
        self.frames = frames
        self._has_fsdp = bool(find_fsdp_modules(frames.model))
        self.observers = observers
        self.editors = editors or {}
        self.completed = False
        self.finished = False
        self.deferred: list[Callable[[], object]] = []
        self._visited: dict[Address, Frame] = {}  # the call in which each operator ran

    def is_uncertain(self, op: Op) -> bool:
        """Return whether `op` did not run in this forward, or may be mistaken for another operator of the same module call.

        A mistake is possible if the call ran more or fewer operators of this name than in the captured run.
        """
        frame = self._visited.get(op.address)
        name = op.address[2]
        return frame is None or frame.ran.get(name) != op.frame.ran.get(name)

    def run_deferred(self) -> None:
        """Call the functions that wait for the next operator. Those that return True wait on."""
        deferred, self.deferred = self.deferred, []
        self.deferred = [function for function in deferred if function() is True] + self.deferred
        self.outer.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and call its observers and its editor."""
        kwargs = kwargs or {}
        frame = self.frames.current
        if frame is None or self.frames.is_paused:
            return func(*args, **kwargs)
        if self.deferred and not self.depth:  # operators inside an operator on wrappers have no autograd nodes
            if types:
                self.note_wrappers((args, kwargs))
            self.run_deferred()
        if types and has_wrappers(types):
            out = self.run_wrapped(func, types, args, kwargs)
            if not self.deferred:
                self.outer.clear()
            return out
        if (self.depth and computes_shapes((args, kwargs))) or (self._has_fsdp and runs_in_fsdp()):
            return func(*args, **kwargs)
        name = operator_name(func)
        address = (frame.path, frame.call, FAMILY if name.startswith(FAMILY) else name, frame.count(name))
        editor = self.editors.get(address)
        if editor is not None:
            with disable_modes():  # outer modes see only the operators of the model
                args, kwargs = editor(func, args, kwargs)
        if editor is not None or address in self.observers:
            self._visited[address] = frame
        if address not in self.observers:
            return self._run(func, args, kwargs, editor)
        copies: dict[int, Tensor] = {}
        has_steps = fused_ops.is_fused(name, args) or (
            registered_ops.find_equation(name) is not None and any(isinstance(k, str) for k in self.observers[address])
        )
        if func._schema.is_mutable and has_steps:
            with disable_modes():
                copies = {id(t): t.detach().clone() for t in find_written(func, args, kwargs)}
        out = self._run(func, args, kwargs, editor)
        parts = _name_outputs(func, args, kwargs, out, copies if has_steps else None)
        if name.startswith("c10d::"):  # the caller waits for its end before the next operator
            self.deferred.append(partial(self._call_observers, address, parts))
        else:
            self._call_observers(address, parts)
        return out

    def _call_observers(self, address: Address, parts: Mapping[int | str, Tensor]) -> None:
        with disable_modes():
            for part, observers in self.observers[address].items():
                if part in parts:
                    for observer in observers:
                        observer(parts[part])

    def _run(self, func: Any, args: Any, kwargs: Any, editor: Editor | None) -> Any:
        out = func(*args, **kwargs)
        if editor is not None:
            with disable_modes():
                out = editor.change_output(func, out)
            first = next((t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()), None)
            if first is not None:
                self.deferred.append(lambda: editor.on_output(self.outer.get(id(first), first)))
        return out


def _name_outputs(
    func: Any, args: Any, kwargs: Any, out: Any, copies: dict[int, Tensor] | None
) -> Mapping[int | str, Tensor]:  # fmt: skip
    """Return the outputs of an operator by index, and those of its steps by name unless `copies` is None.

    `copies` has the contents before the call of what the operator wrote.
    """
    returned = list_outputs(func, out, find_written(func, args, kwargs))
    steps: list[fused_ops.Step] = []
    if copies is not None:
        name, contents = operator_name(func), copies

        def get_old(tensor: Tensor) -> Tensor:
            return contents.get(id(tensor), tensor)

        with disable_modes():
            if fused_ops.is_fused(name, args):
                steps = fused_ops.decompose_fused(name, func, args, kwargs, returned, get_old)
            else:
                steps = registered_ops.expand(func, args, kwargs, returned, get_old, proven=False).steps
    return {**{part: t for step in steps for part, t in step.outputs}, **dict(enumerate(returned))}


# Longer than 60 lines, since the hooks share the state of one forward.
@contextmanager
def observe_forwards(
    model: nn.Module,
    begin: Callable[[Frames, tuple[Any, ...], dict[str, Any]], ObserverMode | None],
    end: Callable[[ObserverMode], None] = lambda mode: None,
) -> Iterator[Frames]:
    """Run the model's forwards in observer modes while the block runs. Compiled models run eagerly.

    Args:
        model: the model.
        begin: called before each forward with the frames and the arguments; returns the mode, or None to skip this forward.
        end: called with the mode after the forward.
    """
    inner = getattr(model, "_orig_mod", model)
    frames = Frames(inner)
    running: list[ExitStack | None] = []
    modes: list[ObserverMode] = []
    callers: list[FrameType] = []  # the Python frame in which the forward runs

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is not inner:  # a copy of the model that was made in the block has the hooks too
            return
        if running and not _is_running(callers[-1]):
            abandon()
        if running or exclusive.frames is not None:  # the model calls itself, or is inspected
            running.append(None)
            return
        stack = ExitStack()
        running.append(stack)
        callers.append(sys._getframe(1))
        stack.callback(callers.clear)
        frames.paths = {id(m): path for path, m in inner.named_modules()}  # modules may have been replaced
        with disable_modes():
            mode = begin(frames, args, kwargs)
        if mode is not None:
            modes.append(mode)
            frames.start()
            stack.callback(_finish, frames, mode, end)
            stack.enter_context(WithoutFastPath())
            stack.enter_context(hook_this_thread(frames.enter, frames.leave))
            stack.enter_context(mode)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack = running.pop() if running and module is inner else None
        if stack is not None:
            if output is not None and modes:
                modes[-1].completed = True
            modes.clear()
            stack.close()

    def abandon() -> None:
        """Clean up after a forward that KeyboardInterrupt ended, for which torch calls no hook."""
        stacks = [stack for stack in running if stack is not None]
        running.clear()
        modes.clear()
        for stack in stacks:
            stack.close()

    with ExitStack() as outer:
        outer.enter_context(force_eager())
        outer.callback(abandon)
        for handle in (
            inner.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),  # before FSDP gathers parameters
            inner.register_forward_hook(leave, always_call=True, prepend=True),
        ):
            outer.callback(handle.remove)
        yield frames


def _is_running(frame: FrameType) -> bool:
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
    """Context that is like an observed forward: in `context`, under a dispatch mode and with a module hook, both without effect.

    It can be entered again, for each backward through the checkpoint.
    """

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._context, self._stack = context, ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(lambda module, args: None).remove)
            stack.enter_context(self._context)
            stack.enter_context(_Unchanged())  # type: ignore[no-untyped-call]  # torch does not type it
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


class _Unchanged(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _finish(frames: Frames, mode: ObserverMode, end: Callable[[ObserverMode], None]) -> None:
    mode.finished = True
    mode.run_deferred()
    frames.current = None
    with disable_modes():
        end(mode)


def group_observers(observers: Iterable[tuple[Value, Observer]]) -> dict[Address, dict[int | str, list[Observer]]]:
    """Group observers by the address of the operator that they observe, and by the part of its outputs."""
    groups: dict[Address, dict[int | str, list[Observer]]] = {}
    for value, observer in observers:
        if value.op is not None:
            groups.setdefault(value.op.address, {}).setdefault(value.part, []).append(observer)
    return groups
