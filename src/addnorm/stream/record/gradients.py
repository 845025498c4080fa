"""Hooks that record gradients: of the loss at the states of the stream, and of the sublayers' parameters.

The gradients of the stream arrive before those of the parameters, and show to which step a backward belongs.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from addnorm.stream.dataflow.graph import PARAMETER
from addnorm.stream.record.measurements import Measurements
from addnorm.stream.record.plan import Plan, StateProbe
from addnorm.stream.record.statistics import TokenMask, features_last, token_norms, upcast

__all__ = ["GradientHooks"]


class GradientHooks:
    """Hooks on tensors and parameters that add gradient statistics to a recording.

    Args:
        recording: receives the numbers.
        accumulated: record the gradient that a parameter has after the backward, not that of the backward alone.
    """

    def __init__(self, recording: Measurements, accumulated: bool) -> None:
        self.recording = recording
        self.accumulated = accumulated
        self.step: int | None = None  # of the running backward
        self.without_graph: list[StateProbe] = []  # states of this forward that have no gradient
        self._leaves: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()
        self._parameters: dict[tuple[int, str], tuple[nn.Parameter, Any]] = {}
        self._squares: tuple[int, dict[int, dict[str, float]]] = (
            -1,
            {},
        )  # a step, and its values by site and parameter

    def add_parameters(self, plan: Plan, named: Mapping[str, nn.Parameter]) -> None:
        """Register hooks on the parameters that the model has now."""
        for site in plan.sites:
            for name in site.parameters:
                parameter = named.get(name)
                hooked, handle = self._parameters.get((site.index, name), (None, None))
                if parameter is None or parameter is hooked or not parameter.requires_grad:
                    continue
                if handle is not None:  # another parameter of the same name has replaced it
                    handle.remove()
                hook = partial(self._on_parameter, site.index, name)
                if self.accumulated:
                    handle = parameter.register_post_accumulate_grad_hook(lambda p, hook=hook: hook(p.grad))
                else:
                    handle = parameter.register_hook(hook)
                self._parameters[site.index, name] = parameter, handle

    def add_state(self, state: StateProbe, tensor: Tensor, step: int, tokens: TokenMask) -> None:
        """Register a hook on a state of the stream, which records its gradient as that of a step."""
        if tensor.requires_grad:
            handle = tensor.register_hook(partial(self._on_state, state, step, tokens))
            if tensor.is_leaf:  # it may be an input of the next forward too
                if tensor in self._leaves:
                    self._leaves[tensor].remove()
                self._leaves[tensor] = handle
        elif state.value.op is not None and state.value.kind & PARAMETER:
            self.without_graph.append(state)

    def end_backward(self) -> None:
        """Mark that no backward of a recorded step runs."""
        self.step = None

    def close(self) -> None:
        """Remove all hooks."""
        for handle in (*self._leaves.values(), *(handle for _, handle in self._parameters.values())):
            handle.remove()
        self._parameters.clear()

    def _on_state(self, state: StateProbe, step: int, tokens: TokenMask, grad: Tensor) -> None:
        if self.step is None:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        self.step = (
            step if self.step is None else max(step, self.step)
        )  # a backward of several steps is that of the last
        with torch.no_grad():
            norms = token_norms(features_last(grad, state.width, state.axis), tokens)
            for site in state.leaving:
                for name, value in norms.statistics():
                    self.recording.add(step, site, "grad", name, value)

    def _on_parameter(self, site: int, name: str, grad: Tensor | None) -> None:
        if grad is None or self.step is None:  # the backward of a forward that is not recorded
            return
        if self._squares[0] != self.step:
            self._squares = self.step, {}
        with torch.no_grad():
            squares = self._squares[1].setdefault(site, {})
            squares[name] = float(torch.linalg.vector_norm(upcast(grad)).square())
            self.recording.add(self.step, site, "params", "grad_l2", sum(squares.values()) ** 0.5)
