"""Statistics of one forward of a model with several streams, from a run of its own that was captured before.

The coefficients are other ones in each forward, so the matrices are measured anew. Gradients are observed in the forward itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from addnorm.stream.dataflow.frames import Frames
from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.dataflow.observers import Observer, ObserverMode, group_observers
from addnorm.stream.dataflow.wrappers import inner_tensors
from addnorm.stream.find.norm import Norm
from addnorm.stream.program.maps import to_streams
from addnorm.stream.program.statistics import measure_matrices, measure_shares, split_sums
from addnorm.stream.record.gradients import GradientHooks
from addnorm.stream.record.probes import Leaves, find_observable
from addnorm.stream.record.program_probes import (
    NAME,
    ProgramProbe,
    ProgramProbes,
    ProgramState,
    StateGradients,
    measure_norms,
)
from addnorm.stream.record.program_sample import ProgramSample
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.statistics import state_statistics
from addnorm.stream.tokens import MaskError, OmittedError, TokenMask, Tokens

OTHER_TOKENS = "the sublayer has other tokens than the streams"


class ProgramForward:
    """The statistics of one forward, and the observers of its gradients.

    Args:
        recording: receives the numbers.
        step: the step of the forward.
        probes: the sites, and the captured run, whose tensors are released.
        tokens: mask of the tokens that count.
        leaves: the inputs and parameters.
        gradients: hooks on the states; None without gradients.
        frames: the calls of the model's modules.

    Attributes:
        mode: the dispatch mode in which the forward runs.
        samples: a sample of the tokens.
        without_graph: 0: a state without a gradient has none in the run either.
    """

    without_graph = 0

    def __init__(
        self, recording: Recording, step: int, probes: ProgramProbes, tokens: TokenMask, leaves: Leaves,
        gradients: GradientHooks | None, frames: Frames,
    ) -> None:  # fmt: skip
        self.recording, self.step, self.probes, self.tokens = recording, step, probes, tokens
        self.leaves, self.program = leaves, probes.program
        self._mask_error = ""
        self.samples: dict[str, ProgramSample] = {}
        with torch.no_grad():
            try:
                self._measure()
                _, mask = probes.arrange(0, tokens)
                self.samples[NAME] = ProgramSample(self.program, mask)
            except MaskError as error:
                self._mask_error = str(error)
        observers = [] if gradients is None or not torch.is_grad_enabled() else [*self._list_observers(gradients)]
        probes.flow.release_tensors()
        found = [(find_observable(value), observer) for value, observer in observers]
        self._ops: dict[Any, Op] = {value.op.address: value.op for value, _ in found if value.op is not None}
        self.mode = ObserverMode(frames, group_observers(pair for pair in found if pair[0].op is not None))
        for value, observer in found:
            if value.op is None and (leaf := leaves.read(value)) is not None:
                observer(inner_tensors(leaf)[0])

    def list_missed(self) -> list[Any]:
        """Return the addresses of the observed operators that did not run, or not as in the captured run."""
        return [address for address, op in self._ops.items() if self.mode.is_uncertain(op)]

    def check_masks(self) -> None:
        """Check that the mask fits the streams."""
        if self._mask_error:
            raise ValueError(self._mask_error)

    def _put(self, sites: Iterable[int], role: str, values: Iterable[tuple[str, float]]) -> None:
        numbers = [*values]
        for site in sites:
            for name, value in numbers:
                self.recording.add(self.step, site, role, name, value)

    def _join(self, values: Sequence[Value]) -> Tensor:
        carrier = self.program.carrier
        return torch.cat([to_streams(carrier, value, dtype=value.tensor.dtype) for value in values], 1)

    def _measure(self) -> None:
        """Measure the states, the sublayers and the norms of the captured run."""
        probes, program = self.probes, self.program
        entering = {probe.k: [probe.index] for probe in probes.sites}
        for k, state in enumerate(program.spine.states):
            streams = self._join(state)
            layout, mask = probes.arrange(k, self.tokens)
            values = [*measure_norms(streams if mask is None else streams[mask])]
            self._put(entering.get(k, []), "in", values)
            if probes.leaving[k]:
                whole = Tokens(streams.reshape(*layout.shape[:-1], -1), mask, layout)
                self._put(probes.leaving[k], "out", [*values, *state_statistics(whole)])
        for probe in probes.sites:
            self._measure_site(probe)
        if program.final_norm is not None:
            self._put_norms([len(probes.recorded) - 1], "norm_final", len(program.sites), [program.final_norm])

    def _measure_site(self, probe: ProgramProbe) -> None:
        site, places, k = probe.site, [probe.index], probe.k
        for role, values in {"read": [part.target for part in site.reads], "raw": [site.write.value]}.items():
            if len(values) == 1:
                with self._omitting(f"{role} at {site.id}"):
                    self._put(places, role, [*measure_norms(self._count(self._join(values), k))][:3])
        norms = {"norm_in": [site.norm_in], "norm_branch": [site.norm_branch], "norm_out": site.norms_out}
        for role, of_role in norms.items():
            self._put_norms(places, role, k, [norm for norm in of_role if norm is not None])
        self._put(places, "matrices", measure_matrices(site, self.probes.arrange(k, self.tokens)[1]).items())
        with self._omitting(f"write at {site.id}"):
            if (sums := split_sums(self.program, site)) is None:
                raise OmittedError(OTHER_TOKENS)
            total, write = (self._count(part, k + 1) for part in sums)
            self._put(places, "write", [*[*measure_norms(write)][:3], *_compare(total, write)])

    def _put_norms(self, sites: Sequence[int], role: str, k: int, norms: Iterable[Norm]) -> None:
        """Record the rstd of the norms of one role, which read what is beside state k."""
        found = dict.fromkeys(norms)
        with self._omitting(f"{role} at {self.probes.recorded[sites[0]].id}"):
            rstds = [1.0 / norm.denominator(to_streams(self.program.carrier, norm.x)) for norm in found]
            rstd = torch.cat([self._count(rstd, k).flatten() for rstd in rstds]) if rstds else torch.empty(0)
            if rstd.numel():
                values = {"rstd": rstd.mean(), "rstd_min": rstd.min(), "rstd_max": rstd.max()}
                self._put(sites, role, [(name, float(value)) for name, value in values.items()])

    def _count(self, streams: Tensor, k: int) -> Tensor:
        """Return the tokens that count of streams `(tokens, n, d)` whose tokens are those of state k."""
        _, mask = self.probes.arrange(k, self.tokens)
        if mask is None or len(streams) == 1 < len(mask):
            return streams
        if len(streams) != len(mask):
            raise OmittedError(OTHER_TOKENS)
        return streams[mask]

    @contextmanager
    def _omitting(self, what: str) -> Iterator[None]:
        """Note what is left out, and why, if the block raises an `OmittedError`."""
        try:
            yield
        except MaskError:
            raise
        except OmittedError as error:
            self.recording.metadata.setdefault("omitted", {}).setdefault(what, str(error))

    def _list_observers(self, hooks: GradientHooks) -> Iterator[tuple[Value, Observer]]:
        """Yield the values of the states, each with an observer that registers a hook on its gradient."""
        before: set[Value] = set()
        for k, (state, leaving) in enumerate(zip(self.program.spine.states, self.probes.leaving, strict=True)):
            if leaving:
                try:
                    _, mask = self.probes.arrange(k, self.tokens)
                except MaskError:
                    return
                new = [value for value in state if value not in before]
                gradients = StateGradients(self.program.carrier, state, new, mask)
                for value in new:
                    yield value, partial(self._on_state, hooks, ProgramState(value, leaving, gradients))
            before.update(state)

    def _on_state(self, hooks: GradientHooks, state: ProgramState, tensor: Tensor) -> None:
        self.mode.deferred.append(partial(self._add_state, hooks, state, tensor))

    def _add_state(self, hooks: GradientHooks, state: ProgramState, tensor: Tensor) -> None:
        outer = self.mode.outer.get(id(tensor), tensor)
        if outer.requires_grad:
            state.gradients.expected.add(state.value)
            hooks.add_state(state, outer, self.step, self.tokens)


def _compare(total: Tensor, write: Tensor) -> Iterator[tuple[str, float]]:
    """Yield ratio, cosine and share of B W `(tokens, n, d)`: compared with A X, and as a part of the sum."""
    before, tiny = total - write, torch.finfo(total.dtype).tiny
    size, written = (torch.linalg.vector_norm(part, dim=(1, 2)) for part in (before, write))
    yield "ratio", float((written / size).mean())
    yield "cosine", float(((before * write).sum((1, 2)) / (size * written).clamp_min(tiny)).mean())
    yield "share", float(measure_shares(total, write, (1, 2)).mean())
    for k, share in enumerate(measure_shares(total, write, -1).mean(0).tolist()):
        yield f"share_{k}", share
