"""Statistics of one forward, computed by observers while the model's operators run.

Tensors are kept only as long as a comparison needs them: a state until the last write to it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.stream.dataflow.graph import Value
from addnorm.stream.dataflow.memory import is_in_memory
from addnorm.stream.dataflow.observers import Observer, ObserverMode
from addnorm.stream.dataflow.wrappers import find_fsdp_modules, find_parameter, inner_tensors, is_wrapper
from addnorm.stream.edits import edit_write
from addnorm.stream.layout.token_layout import TokenLayout
from addnorm.stream.record import statistics
from addnorm.stream.record.gradients import GradientHooks
from addnorm.stream.record.plan import NormProbe, Plan, SiteProbe, StateProbe, find_use
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.sample import TokenSample
from addnorm.stream.record.statistics import MaskError, OmittedError, TokenMask, TokenNorms, Tokens

__all__ = ["ForwardStatistics"]

GATHER_NEEDS = (
    "expected False for FullyShardedDataParallel: shard the model with fully_shard to measure whole parameters"
)


@dataclass
class _PendingState:
    """State of the stream that is kept until the last write to it has been compared with it."""

    x: Tokens
    norms: TokenNorms
    writes: int


class ForwardStatistics:
    """Observers of one forward, and what they keep until it ends.

    Args:
        model: the model.
        recording: receives the numbers.
        grads: also record gradients.
        accumulated: record the gradients that parameters have after a backward, not those of the backward alone.
        gather: measure sharded parameters as a whole.
    """

    def __init__(self, model: nn.Module, recording: Recording, grads: bool, accumulated: bool, gather: bool) -> None:
        self.model, self.recording, self.grads = model, recording, grads
        self.step = 0
        self._plan: Plan | None = None
        self._key: Any = None
        self._tokens: dict[str, TokenMask] = {}  # by stream
        self._leaves: Sequence[Any] = ()  # the model's arguments in this forward
        self._named: dict[str, nn.Parameter] = {}
        self._samples: dict[str, TokenSample] = {}
        self._needed: dict[int, list[Value]] = {}  # by site: the write and its scales that are observed
        self._gather = gather
        fsdp = find_fsdp_modules(model)
        self._has_fsdp = bool(fsdp)
        self._has_wrappers = any(map(is_wrapper, model.parameters()))
        if gather and not all(hasattr(module, "reshard") for module in fsdp):
            raise ValueError(f"gather is True, {GATHER_NEEDS}.")
        self._gradients = GradientHooks(recording, accumulated, gather)
        self._start_forward()

    def _start_forward(self) -> None:
        self._masked: set[str] = set()  # streams whose mask fits some state
        self._mask_errors: dict[str, MaskError] = {}  # by stream
        self._pending: dict[int, _PendingState] = {}  # by the index of the state
        self._norms: dict[Value, TokenNorms] = {}
        self._operands: dict[Value, Tensor] = {}  # writes and their scales, until all of them are computed
        self._gradients.without_graph = []

    def _list_observers(self, plan: Plan, mode: ObserverMode) -> Iterator[tuple[Value, Observer]]:
        for state in plan.states:
            yield state.value, partial(self._on_state, mode, state)
        for site in plan.sites:
            if site.read is not None:
                yield site.read, partial(self._on_branch, "read", site)
            yield site.raw, partial(self._on_branch, "raw", site)
            live = [scale for scale in site.write.scales if self._has_fsdp and scale.op is None]
            uses = [(scale, use) for scale in live if (use := find_use(scale)) is not None]
            operands = self._needed[site.index] = [*site.write.operands, *(scale for scale, _ in uses)]
            if len(operands) > 1:
                yield from ((value, partial(self._on_operand, site, value)) for value in {*site.write.operands})
                yield from ((use, partial(self._on_live_scale, site, scale)) for scale, use in uses)
            else:
                yield site.write.value, partial(self._on_write, site)
        for norm in plan.norms:
            if norm.rstd is None:
                yield norm.norm.x, partial(self._on_norm_input, norm)
            else:
                yield norm.rstd, partial(self._on_rstd, norm)
        for sample in self._samples.values():
            yield from sample.list_observers()

    def _leaf(self, value: Value) -> Tensor | None:
        """Return the tensor of a value that no operator computes: an input or a parameter."""
        if isinstance(value.part, int) and 0 <= value.part < len(self._leaves):
            leaf = self._leaves[value.part]
            return leaf if isinstance(leaf, Tensor) else None
        leaf = self._named.get(value.name) if value.name else None
        return leaf if leaf is not None and is_in_memory(leaf, tuple(leaf.shape)) else None

    # Observers: the model's operators call them with their outputs.

    def _put(self, site: int, role: str, values: Iterable[tuple[str, float]]) -> None:
        for name, value in values:
            self.recording.add(self.step, site, role, name, value)

    def _on_state(self, mode: ObserverMode, state: StateProbe, tensor: Tensor) -> None:
        tokens = self._tokens[state.stream]
        if self.grads and state.leaving and state.is_partial:
            self._omit(
                f"gradient at {self._name_state(state)}",
                "the stream begins with views of a value that has other uses, whose gradients are not those of the stream",
            )
        elif self.grads and state.leaving and self._key[-1]:  # grad mode was on as the forward began
            mode.deferred.append(partial(self._add_state, mode, state, tensor, self.step, tokens))
        with torch.no_grad():
            if state.is_overwritten:
                tensor = tensor.detach().clone()
            arranged = self._arrange(state.stream, tensor, state.layout, f"the stream at {self._name_state(state)}")
            if arranged is None:
                return
            norms = self._norms[state.value] = statistics.token_norms(arranged)
            if state.writes:
                self._pending[state.index] = _PendingState(arranged, norms, state.writes)
            values = [*norms.statistics()]
            for site in state.entering:
                self._put(site, "in", values)
            if state.leaving:
                more = [*statistics.state_statistics(arranged, norms)]
                if not any(name == "similarity" for name, _ in more):
                    self._omit(f"similarity at {self._name_state(state)}", "the dimension of the tokens is not known")
                for site in state.leaving:
                    self._put(site, "out", [*values, *more])

    def _name_state(self, state: StateProbe) -> str:
        return self.recording.sites[(state.leaving or state.entering)[0]].id if state.leaving or state.entering else ""

    def _arrange(self, stream: str, tensor: Tensor, layout: TokenLayout | None, what: str) -> Tokens | None:
        """Return a tensor arranged for statistics; None if that is not possible, for which the reason is recorded."""
        try:
            arranged = Tokens.arrange(tensor.detach(), layout, self._tokens[stream])
        except OmittedError as error:
            if isinstance(error, MaskError):
                self._mask_errors.setdefault(stream, error)
            self._omit(what, str(error))
            return None
        self._masked.add(stream)
        return arranged

    def _omit(self, what: str, reason: str) -> None:
        """Note in the metadata what is left out and why."""
        omitted = self.recording.metadata.setdefault("omitted", {})
        omitted.setdefault(what, reason)

    def _add_state(self, mode: ObserverMode, state: StateProbe, tensor: Tensor, step: int, tokens: TokenMask) -> bool:
        """Register the hook for a state's gradient; True if that must wait for the wrapper of the state."""
        outer = mode.outer.get(id(tensor), tensor)  # a tensor in a wrapper has no gradient, the wrapper has one
        if outer is tensor and self._has_wrappers and not tensor.requires_grad and not mode.finished:
            return True
        self._gradients.add_state(state, outer, step, tokens)
        return False

    def _on_branch(self, role: str, site: SiteProbe, tensor: Tensor) -> None:
        with torch.no_grad():
            assert self._plan is not None
            state = self._plan.states[site.state]
            value = site.raw if role == "raw" else site.read
            assert value is not None
            if value not in self._norms:  # the sublayer's input may be the stream itself
                what = f"{role} at {self.recording.sites[site.index].id}"
                arranged = self._arrange(state.stream, tensor, site.layouts[role], what)
                if arranged is None:
                    return
                self._norms[value] = statistics.token_norms(arranged)
            self._put(site.index, role, self._norms[value].statistics())

    def _on_operand(self, site: SiteProbe, value: Value, tensor: Tensor) -> None:
        """Record a write once it and all of its scales are computed, in any order."""
        is_copied = site.write.is_overwritten and value is site.write.value
        self._operands[value] = tensor.detach().clone() if is_copied else tensor
        if not all(operand in self._operands for operand in self._needed[site.index]):
            return
        self._on_write(site, self._operands[site.write.value])
        done = {*self._needed.pop(site.index)}
        for operand in done.difference(*self._needed.values()):
            del self._operands[operand]

    def _on_live_scale(self, site: SiteProbe, scale: Value, tensor: Tensor) -> None:
        """Record a write once its scale, a parameter that FSDP frees after its use, is gathered."""
        current = self._read_live(scale)
        self._on_operand(site, scale, (scale.tensor if current is None else current).detach().clone())

    def _read_live(self, value: Value) -> Tensor | None:
        """Return a parameter as the running module uses it."""
        return find_parameter(self.model, value.name) if value.name else None

    def _on_write(self, site: SiteProbe, tensor: Tensor) -> None:
        assert self._plan is not None
        state, probe = self._plan.states[site.state], site.write
        with torch.no_grad():
            write = edit_write(self.model, site.sublayer, operand := tensor.detach())
            writes_raw = site.writes_raw and write is operand
            if probe.factor != 1.0:
                write = write * probe.factor
            for scale in probe.scales:
                current = self._operands.get(scale, self._leaf(scale) if scale.op is None else None)
                write = write * inner_tensors(scale.tensor if current is None else current)[0].detach()
            name = self.recording.sites[site.index].id
            if probe.obstacle:
                arranged = None
                self._omit(f"write at {name}", probe.obstacle)
            else:
                arranged = self._arrange(state.stream, write, site.layouts["write"], f"write at {name}")
            pending = self._pending.get(site.state)
            if arranged is not None:
                known = self._norms.get(site.raw) if writes_raw else None
                norms = known or statistics.token_norms(arranged)
                self._put(site.index, "write", norms.statistics())
                if pending is not None:
                    self._compare(site, pending, arranged, norms, name)
                else:
                    what = f"ratio, cosine and unchanged of the write at {name}"
                    self._omit(what, "the write is computed before the state to which it is added")
            if pending is not None:
                pending.writes -= 1
                if not pending.writes:
                    del self._pending[site.state]

    def _compare(self, site: SiteProbe, pending: _PendingState, write: Tokens, norms: TokenNorms, name: str) -> None:
        """Record the write compared with the stream it is added to."""
        what = f"ratio, cosine and unchanged of the write at {name}"
        try:
            x, aligned = statistics.align(pending.x, write)
        except OmittedError as error:
            self._omit(what, str(error))
            return
        x_norms = pending.norms if x is pending.x else statistics.token_norms(x)
        write_norms = norms if aligned is write else statistics.token_norms(aligned)
        self._put(site.index, "write", statistics.write_statistics(x, aligned, x_norms, write_norms))

    def _on_norm_input(self, norm: NormProbe, tensor: Tensor) -> None:
        with torch.no_grad():
            self._on_rstd(norm, 1.0 / norm.norm.denominator(statistics.upcast(tensor.detach())))

    def _on_rstd(self, norm: NormProbe, rstd: Tensor) -> None:
        with torch.no_grad():
            try:
                values = [*statistics.norm_statistics(rstd, norm.layout, self._tokens[norm.stream])]
            except OmittedError as error:
                self._omit(f"{norm.role} at {self.recording.sites[norm.site].id}", str(error))
                return
            self._put(norm.site, norm.role, values)

    def _record_parameters(self, plan: Plan) -> None:
        for site in plan.sites:
            parameters = [self._named[name].detach() for name in site.parameters if name in self._named]
            if (norm := statistics.parameter_norm(parameters, self._gather)) is not None:
                self._put(site.index, "params", [("l2", norm)])
