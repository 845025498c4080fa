"""Hooks that record gradients: of the loss at the states of the stream, and of the sublayers' parameters.

The gradients of the stream arrive before those of the parameters, and show to which step a backward belongs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from addnorm._util.torch_internals import current_node
from addnorm.stream.dataflow.graph import PARAMETER, Value
from addnorm.stream.dataflow.memory import is_in_memory
from addnorm.stream.dataflow.wrappers import gather, inner_tensors, is_sharded, is_wrapper, local_part
from addnorm.stream.record.probes import SiteProbe
from addnorm.stream.record.recording import Recording
from addnorm.stream.tokens import OmittedError, Statistics, Tokens, upcast

Key = tuple[int, str]  # a site, and the name of a parameter


@dataclass(eq=False)
class StateGradients:
    """The gradients of the values of one state in one forward, which arrive one by one.

    Attributes:
        values: the values of the state.
        leaving: the sites whose output the state is.
        arrange: function that returns the gradients of all values arranged for statistics.
        new: for each stream, whether it is in no earlier state. If it is in one, its gradient includes that of uses before this
            state, and is not recorded here.
        expected: the new values that have a gradient.
        role: the role of the gradients in the recording.
        frozen: the gradients at the same state with frozen coefficients, if they are recorded too.
    """

    values: Sequence[Value]
    leaving: Sequence[int]
    arrange: Callable[[Sequence[Tensor]], Tokens]
    new: Sequence[bool] = (True,)
    expected: set[Value] = field(default_factory=set)
    role: str = "grad"
    frozen: StateGradients | None = None
    _received: dict[Value, Tensor] = field(default_factory=dict, init=False)

    def add(self, value: Value, grad: Tensor) -> Statistics:
        """Add the gradient of a value. With the last expected one, yield the statistics of the state's gradient."""
        self._received[value] = grad
        if self._received.keys() >= self.expected:
            yield from self.finish()

    def finish(self) -> Statistics:
        """Yield the statistics of the gradient of each new stream, and of all streams together if all are new.

        The gradient of a value that has not arrived is zero: the loss does not depend on this value.
        """
        received, self._received = self._received, {}
        if not received:  # its statistics were omitted when the last gradient arrived
            return
        zero = next(iter(received.values())).new_zeros(())
        grads = [received.get(value, zero.expand(value.shape)) for value in self.values]
        for name, number in self.arrange(grads).statistics.items():
            k = name.partition("_")[2]
            if self.new[int(k)] if k else all(self.new):
                yield name, number


class GradientHooks:
    """Hooks on tensors and parameters that add gradient statistics to a recording.

    Args:
        recording: receives the numbers.
        accumulated: record the gradient that a parameter has after the backward, not that of the backward alone.
        gathered: measure whole gradients of sharded parameters, not the part of this process.

    Gradients with frozen coefficients are those of a second backward, in which computed coefficients pass no gradient on. It
    starts from the gradient of the last read as soon as this arrives, before torch frees the graph below.

    A sharded parameter takes no part in the backward: FSDP reduces the gradients of gathered parameters, and sets `.grad`. This
    gradient is read when the backward has ended.
    """

    def __init__(self, recording: Recording, accumulated: bool, gathered: bool) -> None:
        self.recording, self.accumulated, self.gathered = recording, accumulated, gathered
        self.step: int | None = None  # of the running backward
        self._is_frozen = False  # whether it is the second one, with frozen coefficients
        self._leaves: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()  # with the handles of their hooks
        self._parameters: dict[Key, tuple[nn.Parameter, Any]] = {}  # likewise
        self._sharded: dict[Key, nn.Parameter] = {}
        self._waiting: dict[
            StateGradients, int
        ] = {}  # states with a gradient for some of their values, with their steps
        self._before: dict[Key, tuple[Tensor, int, Tensor | None]] = {}  # sharded gradients before the backward
        self._squares: dict[int, dict[str, float]] = {}  # squared gradient norms by site and parameter
        self._squares_step: int | None = None  # the step of `_squares`

    def add_parameters(self, sites: Iterable[SiteProbe], named: Mapping[str, nn.Parameter], has_fsdp: bool) -> None:
        """Register hooks on the parameters that the model has now."""
        self._sharded.clear()
        for key in ((site.index, name) for site in sites for name in site.parameters):
            parameter = named.get(key[1])
            hooked, handle = self._parameters.get(key, (None, None))
            if parameter is None or parameter is hooked or not parameter.requires_grad:
                continue
            if has_fsdp or is_sharded(parameter):
                self._sharded[key] = parameter
                continue
            if handle is not None:  # another parameter of the same name has replaced it
                handle.remove()
            hook = partial(self._on_parameter, key)
            if self.accumulated:
                handle = parameter.register_post_accumulate_grad_hook(lambda p, hook=hook: hook(p.grad))
            else:
                handle = parameter.register_hook(hook)
            self._parameters[key] = parameter, handle

    def add_state(self, state: StateGradients, value: Value, tensor: Tensor, step: int) -> bool:
        """Register a hook that records the gradient of a value of a state; return False if it should have one and has none."""
        if not tensor.requires_grad:
            return value.op is None or not value.kind & PARAMETER
        state.expected.add(value)
        placements = getattr(tensor, "placements", None) if is_sharded(tensor) else None

        def record(grad: Tensor) -> None:
            own = state.frozen if self._is_frozen else state
            if own is not None:
                self._enter(step)
                self._waiting[own] = step
                self._record_state(own, step, own.add(value, local_part(grad, placements)))

        handle = tensor.register_hook(record)
        if tensor.is_leaf:  # it may be an input of the next forward too
            if tensor in self._leaves:
                self._leaves[tensor].remove()
            self._leaves[tensor] = handle
        return True

    def add_coefficient(self, tensor: Tensor) -> None:
        """Register a hook that passes no gradient on from a coefficient while coefficients are frozen."""
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: torch.zeros_like(grad) if self._is_frozen else None)

    def add_end(self, tensor: Tensor, states: Sequence[Tensor], step: int) -> None:
        """Register a hook on the last read that runs the backward with frozen coefficients, to values of earlier states."""
        states = [state for state in states if state.requires_grad]
        # The tensor itself would be a part of its own graph, which Python could not free.
        end, output = ref(tensor), tensor.output_nr

        def run_frozen(grad: Tensor) -> None:
            if self._is_frozen:
                return
            self._enter(step)
            edge = torch.autograd.graph.GradientEdge(current_node(), output)
            kept = [(t, t.grad) for t in (end(), *states) if t is not None and t.retains_grad]
            self._is_frozen = True
            try:
                torch.autograd.grad([edge], states, [grad], retain_graph=True, allow_unused=True)
            finally:
                self._is_frozen = False
                for t, before in kept:  # the second backward is none of the model's
                    t.grad = before

        if tensor.requires_grad and states:
            tensor.register_hook(run_frozen)

    def end_backward(self) -> None:
        """Mark that no backward of a recorded step runs."""
        self.step = None
        self._before.clear()
        self._waiting.clear()

    def close(self) -> None:
        """Remove all hooks."""
        for handle in (*self._leaves.values(), *(handle for _, handle in self._parameters.values())):
            handle.remove()
        self._parameters.clear()
        self._sharded.clear()

    def _enter(self, step: int) -> None:
        if self.step is None:
            for key, parameter in self._sharded.items():  # note the gradients before the backward
                if parameter.grad is not None:
                    inner = inner_tensors(parameter.grad)[0]
                    copy = None if self.accumulated else parameter.grad.detach().clone()
                    self._before[key] = inner, inner._version, copy
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(partial(queue, self._finish_backward))  # after the callbacks of FSDP, which set gradients
        # A backward of several steps is that of the last.
        self.step = step if self.step is None else max(step, self.step)

    def _record_state(self, state: StateGradients, step: int, statistics: Statistics) -> None:
        with torch.no_grad(), suppress(OmittedError):  # as for the state itself, where the reason is recorded
            for name, number in [*statistics]:
                self._waiting.pop(state, None)
                for site in state.leaving:
                    self.recording.add(step, site, state.role, name, number)

    def _on_parameter(self, key: Key, grad: Tensor | None) -> None:
        if grad is None or self.step is None:  # the backward of a forward that is not recorded
            return
        if self._squares_step != self.step:
            self._squares_step, self._squares = self.step, {}
        site, name = key
        with torch.no_grad():
            squares = self._squares.setdefault(site, {})
            squares[name] = float(vector_norm(grad, self.gathered)) ** 2
            self.recording.add(self.step, site, "params", "grad_l2", sum(squares.values()) ** 0.5)

    def _finish_backward(self) -> None:
        """Record the gradients of states with values on which the loss does not depend, and those of sharded parameters."""
        for state, step in [*self._waiting.items()]:
            self._record_state(state, step, state.finish())
        for key, parameter in self._sharded.items():
            if (grad := parameter.grad) is None:
                continue
            inner, version, copy = self._before.get(key, (None, 0, None))
            now = inner_tensors(grad)[0]
            if now is not inner or now._version != version:
                grad = grad.detach() if copy is None or copy.shape != grad.shape else grad.detach() - copy
                self._on_parameter(key, grad)
        self.end_backward()


def parameter_norm(parameters: Iterable[Tensor], gathered: bool) -> float | None:
    """Return the L2 norm of all elements of some parameters; None if there are none.

    Args:
        parameters: the parameters.
        gathered: measure sharded parameters as a whole, not the part of this process.
    """
    norms = [vector_norm(parameter, gathered) for parameter in parameters]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else None


def vector_norm(t: Tensor, gathered: bool) -> Tensor:
    """Return the L2 norm of all elements as a 0-d tensor; NaN for a tensor without readable memory."""
    if is_sharded(t):
        t = gather(torch.linalg.vector_norm(upcast(t))) if gathered else local_part(t)
    elif not is_in_memory(t, tuple(t.shape)):
        return torch.tensor(math.nan)
    elif is_wrapper(t):
        try:
            t = t.dequantize()
        except Exception:  # a wrapper may refuse an operator with any error
            return torch.tensor(math.nan)
    norm: Tensor = torch.linalg.vector_norm(upcast(t))
    return norm
