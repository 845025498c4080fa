"""Statistics of one forward of a model with several streams, and the sample of its tokens, from a run captured before.

The coefficients are other ones in each forward, so the matrices are measured anew. Gradients are observed in the forward itself,
and so are the streams where the equations of the captured run do not close.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from addnorm.stream.dataflow.arithmetic import Factor
from addnorm.stream.dataflow.graph import Value
from addnorm.stream.dataflow.observers import Observer
from addnorm.stream.dataflow.wrappers import has_flat_parameters
from addnorm.stream.find.norm import Norm
from addnorm.stream.program.maps import Map, join_streams, measure_map, shrink, to_streams
from addnorm.stream.program.result import NAME, Program
from addnorm.stream.program.statistics import measure_matrices, split_sums
from addnorm.stream.record.forward import Forward
from addnorm.stream.record.gradients import GradientHooks, StateGradients
from addnorm.stream.record.program_probes import OTHER_TOKENS, ProgramProbe, ProgramProbes, list_norms
from addnorm.stream.record.sample import Column, Equation, FrozenNorm, Sample
from addnorm.stream.record.statistics import rstd_statistics, write_statistics
from addnorm.stream.shares import source_shares
from addnorm.stream.tokens import OmittedError, Tokens


class ProgramForward(Forward):
    """Statistics of one forward of a model with a residual program. The tensors of its captured run are released."""

    probes: ProgramProbes

    def __init__(self, *args: Any) -> None:
        self._values: dict[Value, Tensor] = {}  # of the states
        self._states: list[Tensor] = []  # the same, or the wrappers of them
        super().__init__(*args)

    def list_observers(self) -> Iterator[tuple[Value, Observer]]:
        """Measure the captured run, and yield the values of the states, each with an observer of its gradient."""
        probes = self.probes
        probes.tokens = self.tokens[NAME]
        if probes.is_released:
            self.samples[NAME] = Sample((), 0.0)
            self.samples[NAME].refuse("the equations do not close in the last step")
        with torch.no_grad(), self.omitting("", NAME):
            if not probes.is_released:
                self._measure()
                self.samples[NAME] = ProgramSample(probes.program, probes.find_mask(0))
        coefficients: list[Value] = []
        hooks = self.gradients
        if hooks is not None:
            with self.omitting("gradients with frozen coefficients"):
                if has_flat_parameters(self.leaves.model):  # torch ends the process in a backward within a backward
                    raise OmittedError("FullyShardedDataParallel allows no second backward: shard it with fully_shard")
                coefficients = probes.find_coefficients()
        self._is_measured = not probes.is_released
        probes.release_tensors()
        before: set[Value] = set()
        for k, (state, leaving) in enumerate(zip(probes.program.spine.states, probes.leaving, strict=True)):
            new = [value not in before for value in state for _ in range(probes.program.carrier.order(value)[2])]
            gradients = StateGradients(state, leaving, partial(self._arrange_gradients, k), new)
            gradients.frozen = replace(gradients, role="grad_frozen") if coefficients else None
            for value in state:
                if value not in before and leaving and not self.mask_errors:
                    yield value, partial(self.add_gradient, gradients, value)
                if value not in before and (coefficients or not self._is_measured):
                    yield value, partial(self._on_value, value)
            before.update(state)
        if hooks is not None and coefficients:
            yield from ((value, partial(self.defer, hooks.add_coefficient)) for value in coefficients)
            yield probes.program.spine.end, partial(self.defer, partial(self._hook_end, hooks))

    def release(self) -> None:
        """Release the tensors that wait for a later observer."""
        self._values.clear()
        self._states.clear()

    def _on_value(self, value: Value, tensor: Tensor) -> None:
        """Keep a value of a state. Measure the states that are complete with it, if those of the captured run were not."""
        self._values[value] = tensor
        self.defer(self._states.append, tensor)
        for k, state in enumerate(self.probes.program.spine.states):
            if self._is_measured or value not in state or not self._values.keys() >= {*state}:
                continue
            with torch.no_grad(), self.omitting(f"the streams at depth {k}", NAME):
                if any(self._values[other].shape != other.shape for other in state):
                    raise OmittedError(OTHER_TOKENS)
                self._measure_state(k, [self._values[other].detach() for other in state])

    def _hook_end(self, gradients: GradientHooks, end: Tensor) -> None:
        gradients.add_end(end, [state for state in self._states if state is not end], self.step)

    def _arrange_gradients(self, k: int, grads: Sequence[Tensor]) -> Tokens:
        program = self.probes.program
        return self.probes.arrange(join_streams(program.carrier, program.spine.states[k], grads), k, by_stream=True)

    def _join(self, values: Sequence[Value], k: int) -> Tensor:
        """Return the streams of values, `(tokens, n, d)`, in the order of tokens of state `k`."""
        program, tensors = self.probes.program, [value.tensor.detach() for value in values]
        return join_streams(program.carrier, values, tensors, program.spine.states[k])

    def _measure(self) -> None:
        """Measure the states, the sublayers and the norms of the captured run."""
        probes, program = self.probes, self.probes.program
        for k, state in enumerate(program.spine.states):
            self._measure_state(k, [value.tensor.detach() for value in state])
        for probe in probes.sites:
            self._measure_site(probe)
        if program.final_norm is not None:
            self._put_norms(len(probes.recorded) - 1, "norm_final", len(program.sites), [program.final_norm])

    def _measure_state(self, k: int, tensors: Sequence[Tensor]) -> None:
        entering = [probe.index for probe in self.probes.sites if probe.k == k]
        streams = join_streams(self.probes.program.carrier, self.probes.program.spine.states[k], tensors)
        self.put_state(entering, self.probes.leaving[k], self.probes.arrange(streams, k, by_stream=True))

    def _measure_site(self, probe: ProgramProbe) -> None:
        site, index, k = probe.site, probe.index, probe.k
        for role, values in {"read": [part.target for part in site.reads], "raw": [site.write.raw]}.items():
            if len(values) == 1:
                with self.omitting(f"{role} at {site.id}"):
                    self.put([index], role, self.probes.arrange(self._join(values, k), k).statistics.items())
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
        """Record the rstd of a sublayer's norms of one role. Their inputs have the tokens of state `k`."""
        with self.omitting(f"{role} at {self.probes.recorded[index].id}"):
            program = self.probes.program
            state = program.spine.states[k]
            rstds = [1.0 / norm.denominator(to_streams(program.carrier, norm.x, like=state)) for norm in norms]
            if rstds:
                rstd = torch.cat([self.probes.arrange(rstd, k).counted.flatten() for rstd in rstds])
                self.put([index], role, rstd_statistics(rstd))


class ProgramSample(Sample):
    """Sample of the tokens of a program: its states and writes, and its equations with frozen norms.

    Args:
        program: the program, with the values of its run.
        mask: which tokens count; None for all.
    """

    def __init__(self, program: Program, mask: Tensor | None) -> None:
        super().__init__((site.id for site in program.sites), program.tolerance)
        self._carrier = program.carrier
        first = to_streams(program.carrier, program.spine.states[0][0])
        entries = sum(
            column.matrix[0].numel() for site in program.sites for part in site.sums for column in part.columns
        )
        size = 8 * (program.width * (sum(program.sizes) + len(program.sites)) + entries)
        self._rows, self._tokens = self.choose(first, mask, size), len(first)
        try:
            self.states = [[*map(self._take, state)] for state in program.spine.states]
            for site in program.sites:
                self.writes.append([(site.id, self._take(site.write.value))])
                self.equations.append([self._freeze(part, [*site.state, site.write.value]) for part in site.sums])
        except OmittedError as error:
            self.refuse(str(error))

    def _take(self, value: Value) -> Tensor:
        """Return the sampled tokens of a carried value, `(tokens, n, d)` in float64."""
        return self._choose_rows(to_streams(self._carrier, value))

    def _choose_rows(self, t: Tensor) -> Tensor:
        if len(t) not in (1, self._tokens):
            raise OmittedError("tokens join or leave the streams on the way")
        return t if len(t) == 1 else t[self._rows]

    def _freeze(self, part: Map, sources: Sequence[Value]) -> Equation:
        columns: list[Column] = []
        for column in part.columns:
            norm, inner = None, None
            if column.norm is not None:  # it may read a multiple of the source
                norm = self._freeze_norm(column.norm)
                of_norm = measure_map(self._carrier, column.norm.x, [column.source])
                inner = self._choose_rows(shrink(of_norm.columns[0].matrix))
            matrix = self._choose_rows(shrink(column.matrix))
            columns.append(Column(sources.index(column.source), matrix, norm, inner))
        bias = None if part.bias is None else self._choose_rows(part.bias)
        norms = [] if part.norm is None else [self._freeze_norm(part.norm)]
        return Equation(columns, bias, [*norms, _multiply_factors(part.factors, part.target.shape[-1])])

    def _freeze_norm(self, norm: Norm) -> FrozenNorm:
        gains = (norm.weight, norm.bias)  # an optimizer may change them before the map is computed
        weight, bias = (gain and replace(gain, tensor=gain.tensor.detach().clone()) for gain in gains)
        bias = bias if bias is not None and bool(bias.tensor.any()) else None  # zeros are no source
        return FrozenNorm(replace(norm, weight=weight, bias=bias), norm.denominator(self._take(norm.x)))


def _multiply_factors(factors: Iterable[Factor], width: int) -> Tensor | float:
    """Return the product of some factors, a number or one for each feature.

    Raises:
        OmittedError: a factor is another one for each token.
    """
    product: Tensor | float = 1.0
    for factor in factors:
        value = None if factor.value is None else factor.value.exact
        if factor.kind not in ("constant", "learned") or (value is not None and value.numel() not in (1, width)):
            raise OmittedError("a norm's output is multiplied by another factor for each token")
        product = product * (factor.number if value is None else value.reshape(-1))
    return product
