"""Calls of a model's modules, tracked by hooks on all modules; and eager execution of compiled models."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode

from addnorm._util.torch_internals import TORCH_FOLDER
from addnorm.stream.dataflow.graph import Frame
from addnorm.stream.dataflow.state import share_context

LAYERS = str(Path(nn.__file__).parent / "modules" / "transformer.py")  # torch's own layers with adds
STREAM = f"{Path(__file__).parent.parent}{os.sep}"


def find_line() -> str:
    """Return the file and the line of the innermost caller outside of torch and of the stream tools: "model.py:12".

    torch's own transformer layers, which contain residual adds, count as callers too.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name == LAYERS or not name.startswith((TORCH_FOLDER, STREAM, "<frozen")):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return ""


class _Exclusive(threading.local):
    """Thread-local holder of the tracker whose run is being captured. All other trackers are paused meanwhile."""

    frames: Frames | None = None


exclusive = _Exclusive()


class Frames:
    """Tracker of the module call that is running.

    Attributes:
        model: the model.
        paths: path of each module by its id.
        current: the running call; None outside of a run.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.current: Frame | None = None
        self._calls = Counter[str]()
        self._stack: list[Frame] = []

    def start(self) -> None:
        """Make the call of the model the current one."""
        self._calls[""] = 1
        self.current = Frame("", 0, None)

    @property
    def is_paused(self) -> bool:
        """Whether another tracker captures the current run."""
        return exclusive.frames is not None and exclusive.frames is not self

    def enter(self, module: nn.Module) -> None:
        """Track the start of a call."""
        path, current = self.paths.get(id(module)), self.current
        if path is None or current is None or self.is_paused:
            return
        if path or self._stack:  # the model itself has its frame already
            self.current = Frame(path, self._calls[path], current)
            self._calls[path] += 1
            current.calls.append(path)
        self._stack.append(current)

    def leave(self, module: nn.Module) -> None:
        """Track the end of a call that returned or raised."""
        if self._stack and not self.is_paused and id(module) in self.paths:
            self.current = self._stack.pop()


class WithoutFastPath(BaseTorchFunctionMode):
    """Context in which torch's encoder layers run operator by operator in this thread, as under any function mode.

    `torch.backends.mha.set_fastpath_enabled` would change what other threads compute.
    """


@share_context
@contextmanager
def force_eager() -> Iterator[None]:
    """Run compiled functions eagerly while the block runs, also those of other threads: torch has one setting for all."""
    with torch.compiler.set_stance("force_eager"):
        yield
