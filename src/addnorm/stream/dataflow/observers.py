"""A run that is watched: at chosen operators of chosen module calls something is told what went in and came out.

What an inspection found is found again by its address: the module's path, which call of it, the operator, and which of those
that this call ran itself. So another branch taken elsewhere (a different expert, a cast that autocast remembers) does not
matter. Only inside the model's own forward is anything watched; the recomputation of a checkpoint in the backward is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from addnorm.stream.dataflow import fused_ops
from addnorm.stream.dataflow.capture import name_of, written_by
from addnorm.stream.dataflow.frames import Frames, alone, eagerly
from addnorm.stream.dataflow.graph import FAMILY, Address, Frame, Op, Value
from addnorm.stream.dataflow.memory import without_modes
from addnorm.stream.dataflow.threads import shared

__all__ = ["Edit", "Tap", "Watch", "checkpoints_with_graph", "gather", "watched", "without_checkpoints"]


class Tap(Protocol):
    """What is told of results: called with the tensor as it was made."""

    def __call__(self, tensor: Tensor) -> None:
        """Told of a result."""


class Edit(Protocol):
    """Changes an operator's arguments, and what its node of the graph hands back."""

    def __call__(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with which the operator runs."""

    def made(self, out: Tensor) -> None:
        """Told of a result once its node is set."""


class Watch(TorchDispatchMode):
    """The mode in which a watched forward runs.

    Args:
        frames: of the model.
        taps: for each operator's address what is told of which result.
        edits: for each operator's address what changes it.
    """

    def __init__(
        self,
        frames: Frames,
        taps: Mapping[Address, Mapping[int | str, list[Tap]]],
        edits: Mapping[Address, Edit] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.frames = frames
        self.taps = taps
        self.edits = edits or {}
        self.hit: set[Address] = set()
        self.calls: dict[tuple[str, int], Frame] = {}  # the calls in which they were
        self.completed = False  # the forward came to its end
        self.waiting: list[Callable[[], None]] = []  # what needs the autograd node that torch sets after an operator
        self.before: Callable[[Any, list[Tensor]], None] | None = None  # told which tensors an operator will overwrite

    def otherwise(self, op: Op) -> bool:
        """Whether an operator was not met, or its call ran more or fewer of its name, so that what was met may be another."""
        path, call, name, _ = op.address
        frame = self.calls.get((path, call))
        return op.address not in self.hit or frame is None or frame.ran.get(name) != op.frame.ran.get(name)

    def settle(self) -> None:
        """Does what was waiting for the last operator to be through."""
        waiting, self.waiting = self.waiting, []
        for step in waiting:
            step()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operator runs."""
        kwargs = kwargs or {}
        frame = self.frames.current
        if frame is None or self.frames.paused:
            return func(*args, **kwargs)
        if self.waiting:
            self.settle()
        name = name_of(func)
        address = (frame.path, frame.call, FAMILY if name.startswith(FAMILY) else name, frame.count(name))
        mutable = func._schema.is_mutable
        edit = self.edits.get(address)
        if edit is not None:
            with without_modes():  # whoever watches around this sees the operators of the model alone
                args, kwargs = edit(func, args, kwargs)
        if mutable and self.before is not None:
            self.before(func, written_by(func, args, kwargs))
        if edit is not None or address in self.taps:
            self.hit.add(address)
            self.calls[frame.path, frame.call] = frame
        if address not in self.taps:
            return self._run(func, args, kwargs, edit)
        copies: dict[int, Tensor] = {}
        if mutable and fused_ops.known(name, args):
            with without_modes():
                copies = {id(t): t.detach().clone() for t in written_by(func, args, kwargs)}
        out = self._run(func, args, kwargs, edit)
        parts = _parts(func, args, kwargs, out, copies)
        with without_modes():
            for part, tells in self.taps[address].items():
                if part in parts:
                    for tell in tells:
                        tell(parts[part])
        return out

    def _run(self, func: Any, args: Any, kwargs: Any, edit: Edit | None) -> Any:
        out = func(*args, **kwargs)
        if edit is not None:
            made = next((t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()), None)
            if made is not None:
                self.waiting.append(lambda: edit.made(made))
        return out


def _parts(func: Any, args: Any, kwargs: Any, out: Any, copies: dict[int, Tensor]) -> Mapping[int | str, Tensor]:
    """The results of an operator by what they are called; of a fused one those of its steps."""
    written = written_by(func, args, kwargs)
    returned = written or [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
    name = name_of(func)
    if fused_ops.known(name, args):
        with without_modes():
            steps = fused_ops.lower(name, func, args, kwargs, returned, lambda t: copies.get(id(t), t))
        return {step.part: step.output for step in steps}
    return dict(enumerate(returned))


@contextmanager
def watched(
    model: nn.Module,
    begin: Callable[[Frames, tuple[Any, ...], dict[str, Any]], Watch | None],
    end: Callable[[Watch], None] = lambda watch: None,
) -> Iterator[Frames]:
    """While the block runs, each forward of the model is one that `begin` gave a `Watch` for; `end` is told when it is over.

    The model runs eagerly meanwhile, also where it is compiled.
    """
    inner = getattr(model, "_orig_mod", model)
    frames = Frames(inner)
    running: list[ExitStack | None] = []
    watches: list[Watch] = []
    callers: list[FrameType] = []  # Python's frame in which the forward runs

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if running and not _runs(callers[-1]):
            abandon()
        if running or alone.frames is not None:  # the model calls itself, or is being inspected
            running.append(None)
            return
        stack = ExitStack()
        running.append(stack)
        callers.append(sys._getframe(1))
        stack.callback(callers.clear)
        frames.paths = {id(m): path for path, m in inner.named_modules()}  # a module may have been replaced
        with without_modes():
            watch = begin(frames, args, kwargs)
        if watch is not None:
            watches.append(watch)
            frames.start()
            stack.callback(_over, frames, watch, end)
            stack.enter_context(frames.watching())
            stack.enter_context(watch)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack = running.pop() if running else None
        if stack is not None:
            if output is not None and watches:
                watches[-1].completed = True
            watches.clear()
            stack.close()

    def abandon() -> None:
        """torch calls no hook for a forward that KeyboardInterrupt has ended."""
        stacks = [stack for stack in running if stack is not None]
        running.clear()
        watches.clear()
        for stack in stacks:
            stack.close()

    with ExitStack() as outer:
        outer.enter_context(eagerly())
        outer.callback(abandon)
        for handle in (
            inner.register_forward_pre_hook(enter, with_kwargs=True),
            inner.register_forward_hook(leave, always_call=True, prepend=True),
        ):
            outer.callback(handle.remove)
        yield frames


def _runs(frame: FrameType) -> bool:
    """Whether a frame is one of those that are running now."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None


@shared
@contextmanager
def checkpoints_with_graph() -> Iterator[None]:
    """Reentrant checkpoints run as the other kind, whose forward has a graph; the gradients are the same.

    A reentrant one runs its forward without, so that there is nothing at which a gradient could be heard. One of whose inputs
    none requires a gradient stays what it is: it gives its parameters none, and shall give none.
    """
    real = checkpoint.CheckpointFunction

    class WithGraph:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            if any(isinstance(t, Tensor) and t.requires_grad for t in args):
                return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
            return real.apply(function, preserve, *args)

    checkpoint.CheckpointFunction = WithGraph  # type: ignore[misc, assignment] # for as long as the block runs
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = real  # type: ignore[misc]  # as it was


@shared
@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Checkpoints keep what they would compute again: nothing watches the backward, where what was edited would differ."""
    real, graph = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return function(*args)

    def plain(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    checkpoint.CheckpointFunction = Plain  # type: ignore[misc, assignment] # for as long as the block runs
    checkpoint._checkpoint_without_reentrant_generator = plain
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = graph  # type: ignore[misc]  # as it was
        checkpoint._checkpoint_without_reentrant_generator = real


def _over(frames: Frames, watch: Watch, end: Callable[[Watch], None]) -> None:
    watch.settle()
    frames.current = None
    with without_modes():
        end(watch)


def gather(taps: Iterable[tuple[Value, Tap]]) -> dict[Address, dict[int | str, list[Tap]]]:
    """Taps by the address of their operator."""
    found: dict[Address, dict[int | str, list[Tap]]] = {}
    for value, tap in taps:
        if value.op is not None:
            found.setdefault(value.op.address, {}).setdefault(value.part, []).append(tap)
    return found
