"""Statistics of one forward of a model with several streams, from a run of its own that was captured before.

The coefficients are other ones in each forward, so the matrices are measured anew. Gradients are observed in the forward itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from addnorm.stream.dataflow.graph import Value
from addnorm.stream.dataflow.observers import Observer
from addnorm.stream.find.norm import Norm
from addnorm.stream.program.maps import join_streams, to_streams
from addnorm.stream.program.statistics import measure_matrices, split_sums
from addnorm.stream.record.forward import Forward
from addnorm.stream.record.gradients import StateGradients
from addnorm.stream.record.program_probes import NAME, OTHER_TOKENS, ProgramProbe, ProgramProbes, list_norms
from addnorm.stream.record.program_sample import ProgramSample
from addnorm.stream.record.statistics import rstd_statistics, write_statistics
from addnorm.stream.shares import source_shares
from addnorm.stream.tokens import MaskError, OmittedError, Tokens


class ProgramForward(Forward):
    """Statistics of one forward of a model with a residual program. The tensors of its captured run are released."""

    probes: ProgramProbes

    def list_observers(self) -> Iterator[tuple[Value, Observer]]:
        """Measure the captured run, and yield the values of the states, each with an observer of its gradient."""
        probes = self.probes
        probes.tokens = self.tokens[NAME]
        with torch.no_grad():
            try:
                self._measure()
                self.samples[NAME] = ProgramSample(probes.program, probes.find_mask(0))
            except MaskError as error:
                self.mask_errors[NAME] = error
        probes.flow.release_tensors()
        before: set[Value] = set()
        for k, (state, leaving) in enumerate(zip(probes.program.spine.states, probes.leaving, strict=True)):
            new = [value not in before for value in state for _ in range(probes.program.carrier.order(value)[2])]
            gradients = StateGradients(state, leaving, partial(self._arrange_gradients, k), new)
            for value in state if leaving and not self.mask_errors else ():
                if value not in before:
                    yield value, partial(self.add_gradient, gradients, value)
            before.update(state)

    def _arrange_gradients(self, k: int, grads: Sequence[Tensor]) -> Tokens:
        program = self.probes.program
        return self.probes.arrange(join_streams(program.carrier, program.spine.states[k], grads), k, by_stream=True)

    def _join(self, values: Sequence[Value]) -> Tensor:
        return join_streams(self.probes.program.carrier, values, [value.tensor.detach() for value in values])

    def _measure(self) -> None:
        """Measure the states, the sublayers and the norms of the captured run."""
        probes, program = self.probes, self.probes.program
        entering = {probe.k: [probe.index] for probe in probes.sites}
        for k, state in enumerate(program.spine.states):
            arranged = probes.arrange(self._join(state), k, by_stream=True)
            self.put_state(entering.get(k, []), probes.leaving[k], arranged)
        for probe in probes.sites:
            self._measure_site(probe)
        if program.final_norm is not None:
            self._put_norms(len(probes.recorded) - 1, "norm_final", len(program.sites), [program.final_norm])

    def _measure_site(self, probe: ProgramProbe) -> None:
        site, index, k = probe.site, probe.index, probe.k
        for role, values in {"read": [part.target for part in site.reads], "raw": [site.write.value]}.items():
            if len(values) == 1:
                with self.omitting(f"{role} at {site.id}"):
                    self.put([index], role, self.probes.arrange(self._join(values), k).statistics.items())
        for role, norms in list_norms(site).items():
            self._put_norms(index, role, k, norms)
        self.put([index], "matrices", measure_matrices(site, self.probes.find_mask(k)).items())
        with self.omitting(f"write at {site.id}"):
            if (sums := split_sums(self.probes.program, site)) is None:
                raise OmittedError(OTHER_TOKENS)
            total, write = (self.probes.arrange(part, k + 1) for part in sums)
            before = replace(total, t=total.t - write.t)
            shares = self._measure_shares(total.counted, write.counted)
            self.put([index], "write", [*write.statistics.items(), *write_statistics(before, write), *shares])

    def _measure_shares(self, total: Tensor, write: Tensor) -> Iterator[tuple[str, float]]:
        """Yield the share of B W in the sum of all streams, and in that of each: both `(tokens, n d)`."""
        of_each = zip(*(part.split(self.probes.program.width, -1) for part in (total, write)), strict=True)
        for k, (whole, part) in enumerate([(total, write), *of_each], -1):
            name = "share" if k < 0 else f"share_{k}"
            yield name, float(source_shares({name: part}, whole)[name].mean())

    def _put_norms(self, index: int, role: str, k: int, norms: Iterable[Norm]) -> None:
        """Record the rstd of the norms of one role, which read what is beside state k."""
        with self.omitting(f"{role} at {self.probes.recorded[index].id}"):
            carrier = self.probes.program.carrier
            rstds = [1.0 / norm.denominator(to_streams(carrier, norm.x)) for norm in norms]
            if rstds:
                rstd = torch.cat([self.probes.arrange(rstd, k).counted.flatten() for rstd in rstds])
                self.put([index], role, rstd_statistics(rstd))
