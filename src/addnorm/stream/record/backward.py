"""The gradients of the sublayers' parameters, told apart by the step to whose backward they belong."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.stream.record import statistics
from addnorm.stream.record.plan import Plan
from addnorm.stream.record.recording import Recording

__all__ = ["Backward"]


class Backward:
    """Listens to parameters. Which step's backward runs is told by the stream, whose gradients come first.

    Args:
        recording: takes the numbers.
        accumulated: what counts is the gradient that a parameter has after the backward, not that of the backward alone.
    """

    def __init__(self, recording: Recording, accumulated: bool) -> None:
        self.recording = recording
        self.accumulated = accumulated
        self.step: int | None = None
        self._hooks: dict[tuple[int, str], tuple[nn.Parameter, Any]] = {}
        self._squares: tuple[int, dict[int, dict[str, float]]] = (-1, {})  # of a step, of each site

    def listen(self, plan: Plan, named: Mapping[str, nn.Parameter]) -> None:
        """To the parameters that there are now."""
        for site in plan.sites:
            for name in site.parameters:
                parameter = named.get(name)
                known, handle = self._hooks.get((site.index, name), (None, None))
                if parameter is None or parameter is known or not parameter.requires_grad:
                    continue
                if handle is not None:  # of its name there is another one now
                    handle.remove()
                hear = partial(self._hear, site.index, name)
                if self.accumulated:
                    handle = parameter.register_post_accumulate_grad_hook(lambda p, hear=hear: hear(p.grad))
                else:
                    handle = parameter.register_hook(hear)
                self._hooks[site.index, name] = parameter, handle

    def reached(self, step: int) -> None:
        """The backward has come to a state of that step; where it is of several, the last one counts."""
        if self.step is None:
            torch.autograd.Variable._execution_engine.queue_callback(self.over)
        self.step = step if self.step is None else max(step, self.step)

    def over(self) -> None:
        """No backward of a recorded step runs."""
        self.step = None

    def close(self) -> None:
        """Takes the hooks away."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def _hear(self, site: int, name: str, grad: Tensor | None) -> None:
        if grad is None or self.step is None:  # the backward of a forward that is not recorded
            return
        if self._squares[0] != self.step:
            self._squares = self.step, {}
        with torch.no_grad():
            squares = self._squares[1].setdefault(site, {})
            squares[name] = float(torch.linalg.vector_norm(statistics.wide(grad)).square())
            self.recording.add(self.step, site, "params", "grad_l2", sum(squares.values()) ** 0.5)
