"""Sample of the tokens of a model with several streams, with its matrices and the denominators of its norms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from addnorm.stream.dataflow.arithmetic import Factor
from addnorm.stream.dataflow.graph import Value
from addnorm.stream.find.norm import Norm
from addnorm.stream.program.maps import Map, measure_map, shrink, to_streams
from addnorm.stream.program.result import Program
from addnorm.stream.record.sample import Column, Equation, FrozenNorm, Sample
from addnorm.stream.tokens import OmittedError


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
        value = None if factor.value is None else factor.value.tensor.detach().double()
        if factor.kind not in ("constant", "learned") or (value is not None and value.numel() not in (1, width)):
            raise OmittedError("a norm's output is multiplied by another factor for each token")
        product = product * (factor.number if value is None else value.reshape(-1))
    return product
