"""Statistics of one forward, computed by observers while the model's operators run.

Tensors are kept only as long as a comparison needs them: a state until the last write to it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from addnorm.stream.dataflow.graph import Value
from addnorm.stream.dataflow.observers import ObserverMode, find_observable
from addnorm.stream.dataflow.wrappers import inner_tensors, is_wrapper
from addnorm.stream.edits import edit_write
from addnorm.stream.layout.token_layout import TokenLayout
from addnorm.stream.record.gradients import GradientHooks, StateGradients
from addnorm.stream.record.probes import Leaves, Observed, StateProbe, StreamProbes, ValueProbe, WriteProbe
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.sample import UNSAMPLED, TokenSample
from addnorm.stream.tokens import (
    MaskError,
    OmittedError,
    Statistics,
    TokenMask,
    Tokens,
    rstd_statistics,
    state_statistics,
    unchanged_share,
    upcast,
    write_statistics,
)


@dataclass(eq=False)
class Forward:
    """Statistics of one forward, and the observers that compute them. Subclasses list the observers.

    Args:
        recording: receives the numbers.
        step: the step of the forward.
        probes: the values to measure.
        tokens: for each stream the mask that selects the tokens to measure.
        leaves: the inputs and parameters.
        gradients: hooks on the states; None without gradients.
        mode: the dispatch mode in which the forward runs.

    Attributes:
        ops: the observed operators, by their addresses.
        samples: for each stream a sample of its tokens.
        without_graph: number of states that have no gradient although gradients are recorded.
    """

    recording: Recording
    step: int
    probes: Any
    tokens: Mapping[str, TokenMask]
    leaves: Leaves
    gradients: GradientHooks | None
    mode: ObserverMode
    samples: dict[str, Any] = field(default_factory=dict)
    without_graph: int = 0
    _mask_errors: dict[str, MaskError] = field(default_factory=dict)  # by stream
    _masked: set[str] = field(default_factory=set)  # streams whose mask fits some state

    def __post_init__(self) -> None:
        self._has_graph = torch.is_grad_enabled()
        self._has_wrappers = any(map(is_wrapper, self.leaves.model.parameters()))
        observers = [(find_observable(value), observer) for value, observer in self.list_observers()]
        self.ops = {value.op.address: value.op for value, _ in observers if value.op is not None}
        for value, observer in observers:
            if value.op is not None:
                self.mode.observers[value.op.address][value.part].append(observer)
            elif (leaf := self.leaves.read(value)) is not None:
                self.mode.note_wrappers(leaf)
                observer(inner_tensors(leaf)[0])

    def list_observers(self) -> Observed:
        """Yield the values to observe, each with its observer."""
        raise NotImplementedError

    def list_missed(self) -> list[Any]:
        """Return the addresses of the observed operators that did not run, or not as in the inspected forward."""
        return [address for address, op in self.ops.items() if self.mode.is_uncertain(op)]

    def release(self) -> None:
        """Release the tensors that wait for a later observer: hooks on their graph refer to this forward, a cycle."""
        raise NotImplementedError

    def check_masks(self) -> None:
        """Check that the mask of each stream fits some state of it."""
        wrong = [error for name, error in self._mask_errors.items() if name not in self._masked]
        if wrong:
            raise ValueError(str(wrong[0]))

    def put(self, sites: Iterable[int], role: str, values: Statistics) -> None:
        """Record the statistics of a role at some sites."""
        numbers = [*values]
        for site in sites:
            for name, value in numbers:
                self.recording.add(self.step, site, role, name, value)

    def put_state(self, entering: Iterable[int], leaving: Sequence[int], state: Tokens) -> None:
        """Record the statistics of a state at the sites whose input it is, and at those whose output it is."""
        values = [*state.statistics.items()]
        self.put(entering, "in", values)
        if leaving:
            values += state_statistics(state)
            if not any(name == "similarity" for name, _ in values):
                where = self.recording.sites[leaving[0]].id
                self.omit(f"similarity at {where}", "the dimension of the tokens is not known")
            self.put(leaving, "out", values)

    def omit(self, what: str, reason: str) -> None:
        """Record in the metadata what is left out and why."""
        self.recording.metadata.setdefault("omitted", {}).setdefault(what, reason)

    @contextmanager
    def omitting(self, what: str, stream: str = "", is_sampled: bool = False) -> Iterator[None]:
        """Record what is left out, and why, if the block raises an `OmittedError`.

        Args:
            what: the name of what is left out; nothing is recorded if it is empty.
            stream: name of the stream whose mask may not fit.
            is_sampled: whether the sample of that stream needs the values of the block.
        """
        try:
            yield
        except OmittedError as error:
            if isinstance(error, MaskError) and stream:
                self._mask_errors.setdefault(stream, error)
            if is_sampled:
                self.samples[stream].refuse(f"{UNSAMPLED}: {error}")
            if what:
                self.omit(what, str(error))

    def add_gradient(self, state: StateGradients, value: Value, tensor: Tensor) -> None:
        """Register a hook on the gradient of a value of a state, as soon as torch has set its autograd node."""
        gradients = self.gradients
        if gradients is None or not self._has_graph:
            return

        def hook(outer: Tensor) -> None:
            self.without_graph += not gradients.add_state(state, value, outer, self.step)

        self.defer(hook, tensor)

    def defer(self, function: Callable[[Tensor], None], tensor: Tensor) -> None:
        """Call a function with an output of an operator, or its wrapper, as soon as torch has set its autograd node."""

        def call() -> bool:
            # A tensor in a wrapper has no gradient, the wrapper has one.
            outer = self.mode.outer.get(id(tensor), tensor)
            if outer is tensor and self._has_wrappers and not tensor.requires_grad and not self.mode.finished:
                return True  # the wrapper, such as a DTensor, is not known yet
            function(outer)
            return False

        self.mode.deferred.append(call)


@dataclass(eq=False)
class StreamForward(Forward):
    """Statistics of one forward of a model whose streams are chains of adds, computed while the model's operators run."""

    probes: StreamProbes
    # States, by their ids, until the last write to each is compared with it.
    _pending: dict[int, Tokens] = field(default_factory=dict)
    # The tensors of a write and of its scales; None until they are computed.
    _operands: dict[WriteProbe, dict[Value, Any]] = field(default_factory=dict)
    _last: tuple[object, Tokens] | None = None  # the key of the last tensor that was arranged, and its tokens

    def list_observers(self) -> Observed:
        """Yield the values to observe, each with its observer."""
        for name, stream in self.probes.streams.items():
            self.samples[name] = TokenSample(stream)
            yield from self.samples[name].list_observers(self.leaves)
        for state in self.probes.states:
            yield state.value, partial(self._on_state, state)
        yield from ((probe.value, partial(self._on_value, probe)) for probe in self.probes.values)
        for write in self.probes.writes:
            if write.probe is not None or not self.samples[write.state.stream].reason:
                self._operands[write] = operands = dict.fromkeys([write.term.value, *write.term.scales])
                operand, *scales = operands
                yield operand, partial(self._on_operand, write, operand)
                for scale in scales:
                    yield from self.leaves.observe(scale, partial(self._on_operand, write, scale))

    def release(self) -> None:
        """Release the tensors that wait for a later observer."""
        self._pending.clear()
        self._operands.clear()
        self._last = None

    # Observers: the model's operators call them with their outputs.

    def _on_state(self, state: StateProbe, tensor: Tensor) -> None:
        sites = state.leaving or state.entering
        name = self.recording.sites[sites[0]].id if sites else ""
        if self.gradients and state.leaving and state.is_partial:
            self.omit(
                f"gradient at {name}",
                "the stream begins with views of a value that has other uses, whose gradients are not those of the stream",
            )
        elif state.leaving:

            def arrange(grads: Sequence[Tensor]) -> Tokens:
                return Tokens.arrange(grads[0], state.layout, self.tokens[state.stream])

            self.add_gradient(StateGradients([state.value], state.leaving, arrange), state.value, tensor)
        with torch.no_grad(), self.omitting(f"the stream at {name}", state.stream, is_sampled=True):
            if state.is_overwritten:
                tensor = tensor.detach().clone()
            arranged = self._arrange(state.stream, state.value, tensor, state.layout)
            self.samples[state.stream].keep(state.value, arranged)
            if state.entering:
                self._pending[id(state)] = arranged
            self.put_state(state.entering, state.leaving, arranged)

    def _arrange(self, stream: str, key: object, tensor: Tensor, layout: TokenLayout | None) -> Tokens:
        """Return a value's tensor with its tokens arranged for statistics.

        The last result is cached by stream and `key`: the observers of a value are called one after the other, so a value with
        several roles is arranged and measured once.
        """
        if self._last is None or self._last[0] != (stream, key):
            self._last = (stream, key), Tokens.arrange(tensor.detach(), layout, self.tokens[stream])
            self._masked.add(stream)
        return self._last[1]

    def _on_value(self, probe: ValueProbe, tensor: Tensor) -> None:
        stream, layout, norm = probe.stream, probe.layout, probe.norm
        what = f"{probe.role} at {self.recording.sites[probe.site].id}"
        with torch.no_grad(), self.omitting(what, stream if norm is None else ""):
            if norm is None:
                found: Statistics = self._arrange(stream, probe.value, tensor, layout).statistics.items()
            else:
                rstd = 1.0 / norm.denominator(upcast(tensor.detach()))
                shape, tokens = rstd.shape[:-1], self.tokens[stream]
                mask = tokens.flatten(layout and tokens.orient(layout, shape), shape, rstd.device)
                rstd = rstd.reshape(-1)
                found = rstd_statistics(rstd if mask is None else rstd[mask])
            self.put([probe.site], probe.role, found)

    def _on_operand(self, write: WriteProbe, value: Value, tensor: Tensor) -> None:
        """Keep the tensor of a write or of one of its scales. Record the write as soon as all of these are computed."""
        is_copied = write.term.is_overwritten and value is write.term.value
        operands = self._operands[write]
        operands[value] = tensor.detach().clone() if is_copied else tensor
        if any(operand is None for operand in operands.values()):
            return
        del self._operands[write]
        what = "" if write.probe is None else f"write at {write.probe.site.id}"
        with torch.no_grad(), self.omitting(what, write.state.stream, is_sampled=True):
            self._on_write(write, operands)
        if all(other.state is not write.state for other in self._operands):
            self._pending.pop(id(write.state), None)

    def _on_write(self, write: WriteProbe, operands: Mapping[Value, Tensor]) -> None:
        term, stream, probe = write.term, write.state.stream, write.probe
        if term.obstacle:
            raise OmittedError(term.obstacle)
        operand = operands[term.value]
        added = edit_write(self.leaves.model, write.sublayer, operand)
        if term.factor != 1.0:
            added = added * term.factor
        for scale in term.scales:
            added = added * inner_tensors(operands[scale])[0].detach()
        arranged = self._arrange(stream, term.value if added is operand else write, added, write.layout)
        self.samples[stream].keep(write.sublayer, arranged)
        if probe is None:
            return
        self.put([probe.index], "write", arranged.statistics.items())
        with self.omitting(f"ratio, cosine and unchanged of the write at {probe.site.id}"):
            if (x := self._pending.get(id(write.state))) is None:
                raise OmittedError("the write is computed before the state to which it is added")
            pair = x.align(arranged)
            self.put([probe.index], "write", write_statistics(*pair))
            self.put([probe.index], "write", [("unchanged", unchanged_share(*pair))])
