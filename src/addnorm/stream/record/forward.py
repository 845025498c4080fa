"""Statistics of one forward, computed by observers while the model's operators run.

Tensors are kept only as long as a comparison needs them: a state until the last write to it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from addnorm.stream.dataflow.frames import Frames
from addnorm.stream.dataflow.graph import Value
from addnorm.stream.dataflow.observers import Observer, ObserverMode, group_observers
from addnorm.stream.dataflow.wrappers import inner_tensors, is_wrapper
from addnorm.stream.edits import edit_write
from addnorm.stream.layout.token_layout import TokenLayout
from addnorm.stream.record import statistics
from addnorm.stream.record.gradients import GradientHooks
from addnorm.stream.record.probes import Leaves, NormProbe, Probes, SiteProbe, StateProbe, find_observable
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.sample import TokenSample
from addnorm.stream.tokens import MaskError, OmittedError, TokenMask, TokenNorms, Tokens, upcast


class Forward:
    """Observers of one forward, and what they keep until it ends.

    Args:
        recording: receives the numbers.
        step: the step of the forward.
        probes: the values to measure.
        tokens: mask of the tokens that count, for each stream.
        leaves: the inputs and parameters.
        gradients: hooks on the states; None without gradients.
        frames: the calls of the model's modules.

    Attributes:
        mode: the dispatch mode in which the forward runs.
        samples: for each stream a sample of its tokens.
        without_graph: number of states that have no gradient although gradients are recorded.
    """

    def __init__(
        self, recording: Recording, step: int, probes: Probes, tokens: Mapping[str, TokenMask], leaves: Leaves,
        gradients: GradientHooks | None, frames: Frames,
    ) -> None:  # fmt: skip
        self.recording, self.step, self.probes, self.tokens = recording, step, probes, tokens
        self.leaves, self.gradients, self.without_graph = leaves, gradients, 0
        self._has_graph = torch.is_grad_enabled()
        self._has_wrappers = any(map(is_wrapper, leaves.model.parameters()))
        self._mask_errors: dict[str, MaskError] = {}  # by stream
        self._masked: set[str] = set()  # streams whose mask fits some state
        self._pending: dict[int, Tokens] = {}  # states, by their ids, until the last write to each is compared with it
        self._norms: dict[Value, TokenNorms] = {}
        self._operands: dict[Value, Tensor] = {}  # writes and their scales, until all of them are computed
        self._needed: dict[int, list[Value]] = {}  # by site: the write and its scales that are observed
        self.samples = {
            name: TokenSample(leaves.model, stream, tokens[name]) for name, stream in probes.streams.items()
        }
        observers = [(find_observable(value), observer) for value, observer in self._list_observers()]
        self._ops = {value.op.address: value.op for value, _ in observers if value.op is not None}
        self.mode = ObserverMode(frames, group_observers(pair for pair in observers if pair[0].op is not None))
        for value, observer in observers:
            if value.op is None and (leaf := leaves.read(value)) is not None:
                self.mode.note_wrappers(leaf)
                observer(inner_tensors(leaf)[0])

    def list_missed(self) -> list[Any]:
        """Return the addresses of the observed operators that did not run, or not as in the inspected forward."""
        return [address for address, op in self._ops.items() if self.mode.is_uncertain(op)]

    def check_masks(self) -> None:
        """Check that the mask of each stream fits some state of it."""
        wrong = [error for name, error in self._mask_errors.items() if name not in self._masked]
        if wrong:
            raise ValueError(str(wrong[0]))

    def _list_observers(self) -> Iterator[tuple[Value, Observer]]:
        for state in self.probes.states:
            yield state.value, partial(self._on_state, state)
        for site in self.probes.sites:
            for role, (value, _) in site.values.items():
                yield value, partial(self._on_branch, role, site)
            uses = [(scale, use) for scale in site.write.scales if (use := self.leaves.find_use(scale)) is not None]
            self._needed[site.index] = [*site.write.operands, *(scale for scale, _ in uses)]
            yield from ((value, partial(self._on_operand, site, value)) for value in {*site.write.operands})
            yield from ((use, partial(self._on_used_scale, site, scale)) for scale, use in uses)
        for norm in self.probes.norms:
            if norm.rstd is None:
                yield norm.norm.x, partial(self._on_norm_input, norm)
            else:
                yield norm.rstd, partial(self._on_rstd, norm)
        for sample in self.samples.values():
            yield from sample.list_observers(self.leaves)

    # Observers: the model's operators call them with their outputs.

    def _put(self, sites: Iterable[int], role: str, values: Sequence[tuple[str, float]]) -> None:
        for site in sites:
            for name, value in values:
                self.recording.add(self.step, site, role, name, value)

    def _on_state(self, state: StateProbe, tensor: Tensor) -> None:
        sites = state.leaving or state.entering
        name = self.recording.sites[sites[0]].id if sites else ""
        if self.gradients and state.leaving and state.is_partial:
            self._omit(
                f"gradient at {name}",
                "the stream begins with views of a value that has other uses, whose gradients are not those of the stream",
            )
        elif self.gradients and state.leaving and self._has_graph:
            self.mode.deferred.append(partial(self._add_state, self.gradients, state, tensor))
        with torch.no_grad():
            if state.is_overwritten:
                tensor = tensor.detach().clone()
            arranged = self._arrange(state.stream, tensor, state.layout, f"the stream at {name}")
            if arranged is None:
                return
            self._norms[state.value] = arranged.norms
            if state.entering:
                self._pending[id(state)] = arranged
            values = [*arranged.norms.statistics()]
            self._put(state.entering, "in", values)
            if state.leaving:
                values += statistics.state_statistics(arranged)
                if not any(statistic == "similarity" for statistic, _ in values):
                    self._omit(f"similarity at {name}", "the dimension of the tokens is not known")
                self._put(state.leaving, "out", values)

    def _arrange(
        self, stream: str, tensor: Tensor, layout: TokenLayout | None, what: str, known: TokenNorms | None = None
    ) -> Tokens | None:
        """Return a tensor arranged for statistics; None if that is not possible, for which the reason is recorded."""
        try:
            arranged = Tokens.arrange(tensor.detach(), layout, self.tokens[stream], known)
        except OmittedError as error:
            if isinstance(error, MaskError):
                self._mask_errors.setdefault(stream, error)
            self._omit(what, str(error))
            return None
        self._masked.add(stream)
        return arranged

    def _omit(self, what: str, reason: str) -> None:
        """Record in the metadata what is left out and why."""
        self.recording.metadata.setdefault("omitted", {}).setdefault(what, reason)

    def _add_state(self, gradients: GradientHooks, state: StateProbe, tensor: Tensor) -> bool:
        """Register a gradient hook on a state.

        Return True, to be called again, if the state's wrapper (such as a DTensor) is not known yet.
        """
        outer = self.mode.outer.get(id(tensor), tensor)  # a tensor in a wrapper has no gradient, the wrapper has one
        if outer is tensor and self._has_wrappers and not tensor.requires_grad and not self.mode.finished:
            return True
        self.without_graph += not gradients.add_state(state, outer, self.step, self.tokens[state.stream])
        return False

    def _on_branch(self, role: str, site: SiteProbe, tensor: Tensor) -> None:
        value, layout = site.values[role]
        with torch.no_grad():
            if value not in self._norms:  # the sublayer's input may be the stream itself
                arranged = self._arrange(site.state.stream, tensor, layout, f"{role} at {site.id}")
                if arranged is None:
                    return
                self._norms[value] = arranged.norms
            self._put([site.index], role, [*self._norms[value].statistics()])

    def _on_used_scale(self, site: SiteProbe, scale: Value, tensor: Tensor) -> None:
        """Keep a scale, a parameter that FSDP frees after its use."""
        current = self.leaves.read_used(scale)
        self._on_operand(site, scale, (scale.tensor if current is None else current).detach().clone())

    def _on_operand(self, site: SiteProbe, value: Value, tensor: Tensor) -> None:
        """Record a write once it and all of its scales are computed, in any order."""
        is_copied = site.write.is_overwritten and value is site.write.value
        self._operands[value] = tensor.detach().clone() if is_copied else tensor
        if not all(operand in self._operands for operand in self._needed[site.index]):
            return
        done = {*self._needed.pop(site.index)}
        with torch.no_grad():
            self._on_write(site, self._operands[site.write.value].detach())
        for operand in done.difference(*self._needed.values()):
            del self._operands[operand]

    def _on_write(self, site: SiteProbe, operand: Tensor) -> None:
        term, stream, what = site.write, site.state.stream, f"write at {site.id}"
        edited = write = edit_write(self.leaves.model, site.sublayer, operand)
        if term.factor != 1.0:
            write = write * term.factor
        for scale in term.scales:
            current = self._operands.get(scale, self.leaves.read(scale) if scale.op is None else None)
            write = write * inner_tensors(scale.tensor if current is None else current)[0].detach()
        known = self._norms.get(site.values["raw"][0]) if site.writes_raw and edited is operand else None
        if term.obstacle:
            self._omit(what, term.obstacle)
        elif (arranged := self._arrange(stream, write, site.write_layout, what, known)) is not None:
            self._put([site.index], "write", [*arranged.norms.statistics()])
            self._compare(site, arranged)
        if self._needed.keys().isdisjoint(site.state.entering):
            self._pending.pop(id(site.state), None)

    def _compare(self, site: SiteProbe, write: Tokens) -> None:
        """Record the write compared with the stream it is added to."""
        try:
            if (x := self._pending.get(id(site.state))) is None:
                raise OmittedError("the write is computed before the state to which it is added")
            values = [*statistics.write_statistics(*x.align(write))]
        except OmittedError as error:
            self._omit(f"ratio, cosine and unchanged of the write at {site.id}", str(error))
        else:
            self._put([site.index], "write", values)

    def _on_norm_input(self, norm: NormProbe, tensor: Tensor) -> None:
        with torch.no_grad():
            self._on_rstd(norm, 1.0 / norm.norm.denominator(upcast(tensor.detach())))

    def _on_rstd(self, norm: NormProbe, rstd: Tensor) -> None:
        with torch.no_grad():
            try:
                values = [*statistics.norm_statistics(rstd, norm.layout, self.tokens[norm.stream])]
            except OmittedError as error:
                self._omit(f"{norm.role} at {self.recording.sites[norm.site].id}", str(error))
            else:
                self._put([norm.site], norm.role, values)
