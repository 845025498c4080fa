"""Memory map and balance of a recorded step of a model with several streams, computed from a sample of its tokens.

The matrices, the denominators of norms, the states and the writes of the sampled tokens are kept. With these frozen, the
components of a state follow from those of the state before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from addnorm.stream.dataflow.arithmetic import is_view, match_factor
from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.find.norm import Norm, centre
from addnorm.stream.program.maps import Map, measure_map, shrink, to_streams
from addnorm.stream.program.result import Program
from addnorm.stream.record.sample import choose_tokens, weigh_sources
from addnorm.stream.record.schema import Balance, MemoryMap
from addnorm.stream.shares import BIASES, Components
from addnorm.stream.tokens import OmittedError


class _FrozenNorm:
    """A norm with the weights and denominators of the run, for some of its tokens.

    Args:
        norm: the norm.
        x: its input, `(tokens, n, d)`.
    """

    def __init__(self, norm: Norm, x: Tensor) -> None:
        self.is_centred, self.denominator = norm.is_centred, norm.denominator(x)
        gain, shift = norm.gain(torch.float64), norm.shift(torch.float64)
        self.gain, self.shift = (
            t.reshape(-1, x.shape[-1]).clone() if isinstance(t, Tensor) and t.numel() > 1 else t for t in (gain, shift)
        )

    def apply(self, parts: Components) -> Components:
        """Return the norm's output from the components of its input; its bias is a source."""
        normed = {name: centre(part, self.is_centred) / self.denominator * self.gain for name, part in parts.items()}
        return _add_bias(normed, self.shift)


def _add_bias(parts: Components, bias: Tensor | float | None) -> Components:
    """Return the components with a bias as one more source, unless it is zero."""
    if not isinstance(bias, Tensor) or not bool(bias.any()):
        return parts
    whole = bias + torch.zeros_like(next(iter(parts.values())))  # of the shape of the other components
    return {**parts, BIASES: parts[BIASES] + whole if BIASES in parts else whole}


def _multiply(matrix: Tensor, streams: Tensor) -> Tensor:
    """Return a matrix `(tokens, n_out, n_in, d)` times streams `(tokens, n_in, d)`."""
    return (matrix * streams.unsqueeze(1)).sum(2)


class _Column(NamedTuple):
    source: int  # place of the value in the state; the write comes after these
    matrix: Tensor
    norm: _FrozenNorm | None
    inner: Tensor | None  # what the norm reads of the source


class _Sum(NamedTuple):
    """The equation of one value of a state, for some of the tokens."""

    columns: list[_Column]
    bias: Tensor | None
    norm: _FrozenNorm | None
    factor: Tensor | float

    def apply(self, sources: Sequence[Components]) -> Components:
        """Return the components of the value from those of the values of the state before it, and of the write."""
        total: Components = {}
        for place, matrix, norm, inner in self.columns:
            operands = sources[place]
            if norm is not None and inner is not None:
                operands = norm.apply({name: _multiply(inner, part) for name, part in operands.items()})
            for name, operand in operands.items():
                part = _multiply(matrix, operand)
                total[name] = total[name] + part if name in total else part
        total = _add_bias(total, self.bias)
        if self.norm is not None:
            total = self.norm.apply(total)
        return {name: part * self.factor for name, part in total.items()}


class ProgramSample:
    """Sample of the tokens of a program: its states and writes, and its equations with frozen norms.

    Args:
        program: the program, with the values of its run.
        mask: which tokens count; None for all.
    """

    def __init__(self, program: Program, mask: Tensor | None) -> None:
        self._carrier, self._sites = program.carrier, [site.id for site in program.sites]
        self._tolerance = program.tolerance
        self._reason = ""
        self._counted = 0
        first = to_streams(program.carrier, program.spine.states[0][0])
        entries = sum(
            column.matrix[0].numel() for site in program.sites for part in site.sums for column in part.columns
        )
        size = 8 * (program.width * (sum(program.sizes) + len(program.sites)) + entries)
        self._rows, self._counted = choose_tokens(first, mask, size)
        self._states: list[list[Tensor]] = []
        self._writes: list[Tensor] = []
        self._sums: list[list[_Sum]] = []
        try:
            if not self._counted:
                raise OmittedError("no token counts")
            self._states = [[self._take(value, len(first)) for value in state] for state in program.spine.states]
            for site in program.sites:
                self._writes.append(self._take(site.write.value, len(first)))
                sources = [*site.state, site.write.value]
                self._sums.append([self._freeze(part, sources, len(first)) for part in site.sums])
        except OmittedError as error:
            self._reason = str(error)

    def _take(self, value: Value, tokens: int) -> Tensor:
        """Return the sampled tokens of a carried value, `(tokens, n, d)` in float64."""
        streams = to_streams(self._carrier, value)
        if len(streams) not in (1, tokens):
            raise OmittedError("tokens join or leave the streams on the way")
        return streams if len(streams) == 1 else streams[self._rows]

    def _freeze(self, part: Map, sources: Sequence[Value], tokens: int) -> _Sum:
        if part.reason:
            raise OmittedError(part.reason)
        columns: list[_Column] = []
        for column in part.columns:
            norm, inner = self._freeze_norm(column.norm, tokens), None
            if column.norm is not None:  # it may read a multiple of the source
                inner = self._take_matrix(measure_map(self._carrier, column.norm.x, [column.source]).columns[0].matrix)
            place = sources.index(column.source)
            columns.append(_Column(place, self._take_matrix(column.matrix), norm, inner))
        bias = None if part.bias is None else part.bias if len(part.bias) == 1 else part.bias[self._rows]
        return _Sum(
            columns, bias, self._freeze_norm(part.norm, tokens), _multiply_factors(part.after, part.target.shape[-1])
        )

    def _take_matrix(self, matrix: Tensor) -> Tensor:
        matrix = shrink(matrix)
        return matrix if len(matrix) == 1 else matrix[self._rows]

    def _freeze_norm(self, norm: Norm | None, tokens: int) -> _FrozenNorm | None:
        return None if norm is None else _FrozenNorm(norm, self._take(norm.x, tokens))

    def compute(self) -> tuple[MemoryMap | None, Balance]:
        """Return the memory map and the balance; without a map, the balance has the reason."""
        try:
            if self._reason:
                raise OmittedError(self._reason)
            return weigh_sources([self._iter_depths()], self._sites, self._tolerance, self._counted)
        except OmittedError as error:
            return None, Balance(reason=str(error))

    def _iter_depths(self) -> Iterator[tuple[Components, Tensor]]:
        """Yield the components of each state, and the state, both `(tokens, n d)`."""
        tokens = len(self._rows)
        values: list[Components] = [{"x_0": part} for part in self._states[0]]
        yield _join_components(values, tokens), _flatten(self._states[0], tokens)
        steps = zip(self._sites, self._writes, self._sums, self._states[1:], strict=True)
        for name, write, sums, state in steps:
            sources = [*values, {name: write}]
            values = [equation.apply(sources) for equation in sums]
            yield _join_components(values, tokens), _flatten(state, tokens)


def _flatten(state: Sequence[Tensor], tokens: int) -> Tensor:
    """Return the values of a state, `(tokens, n, d)` each, side by side."""
    return torch.cat([part.expand(tokens, -1, -1) for part in state], 1).flatten(1)


def _join_components(values: Sequence[Components], tokens: int) -> Components:
    """Return the components of a state from those of its values."""
    zeros = [next(iter(parts.values())).new_zeros(1, *next(iter(parts.values())).shape[1:]) for parts in values]
    names = dict.fromkeys(name for parts in values for name in parts)
    return {
        name: _flatten([parts.get(name, zero) for parts, zero in zip(values, zeros, strict=True)], tokens)
        for name in names
    }


def _multiply_factors(ops: Iterable[Op], width: int) -> Tensor | float:
    """Return the product of the factors in some operators, a number or one for each feature.

    Raises:
        OmittedError: a factor is another one for each token.
    """
    product: Tensor | float = 1.0
    for op in ops:
        if not is_view(op):
            matched = match_factor(op)
            assert matched is not None  # as the program's maps have found
            factor = matched[1]
            if factor.kind not in ("constant", "learned"):
                raise OmittedError("a norm's output is multiplied by another factor for each token")
            value = None if factor.value is None else factor.value.tensor.detach().double()
            if value is not None and value.numel() not in (1, width):
                raise OmittedError("a norm's output is multiplied by another factor for each token")
            product = product * (factor.number if value is None else value.reshape(-1))
    return product
