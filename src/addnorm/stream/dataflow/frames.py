"""Which call of which module is running, told by hooks on all modules; and runs in which every operator runs by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from addnorm.stream.dataflow.graph import Frame
from addnorm.stream.dataflow.threads import shared

__all__ = ["Frames", "alone", "eagerly"]


class Alone(threading.local):
    """While some frames capture a run, it is no run for all the others; what other threads run is none of theirs."""

    frames: Frames | None = None


alone = Alone()


class Frames:
    """Which call of which module is running, told by hooks on all modules."""

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
        return alone.frames is not None and alone.frames is not self

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


@shared
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
