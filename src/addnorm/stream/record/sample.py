"""Memory map and balance sheet of a recorded step, computed from a sample of its tokens.

The tokens of every state and every write are kept for one step: all that count, or evenly spaced ones where all would take more
than `BYTES`. With norms frozen, the components of a state follow from those of the state before it: `Equation`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from addnorm._util.numbers import format_number
from addnorm.stream.dataflow.graph import Value
from addnorm.stream.dataflow.observers import Observer
from addnorm.stream.dataflow.replay import relative_error
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.sites import Stream
from addnorm.stream.find.sublayers import Sublayer
from addnorm.stream.record.probes import Leaves
from addnorm.stream.record.schema import Balance, MemoryMap
from addnorm.stream.shares import (
    BIASES,
    Components,
    find_paths,
    find_step_obstacle,
    find_tolerance,
    propagate_through,
    source_shares,
    sum_components,
)
from addnorm.stream.tokens import OmittedError, Tokens

BYTES = 64 * 2**20  # that the sample of one stream takes
UNSAMPLED = "a state or write of the stream cannot be sampled"
TOKENS = 64  # in any sample, and at once in the arithmetic


class FrozenNorm(NamedTuple):
    """A norm, with its weights as of the forward.

    Attributes:
        norm: the norm.
        denominator: its denominators, `(tokens, n, 1)`; None for those of the sum of the components.
    """

    norm: Norm
    denominator: Tensor | None = None

    def apply(self, parts: Components, rows: slice) -> Components:
        """Return the norm's output from the components of its input."""
        own = self.denominator
        return propagate_through(self.norm, parts, None if own is None else _select(own, rows))


class Column(NamedTuple):
    """One operand of an equation: a matrix `(tokens, n_out, n_in, d)` times a value, or the norm of `inner` times it."""

    source: int  # place among the values of the state, and the writes after them
    matrix: Tensor
    norm: FrozenNorm | None = None
    inner: Tensor | None = None

    def apply(self, parts: Components, rows: slice) -> Components:
        """Return the components of the operand."""
        if self.norm is not None and self.inner is not None:
            parts = self.norm.apply(_multiply(self.inner, parts, rows), rows)
        return _multiply(self.matrix, parts, rows)


class Equation(NamedTuple):
    """The equation of one value of a state, for the sampled tokens: a sum, and the norms and factors after it."""

    columns: Sequence[Column]
    bias: Tensor | None
    after: Sequence[FrozenNorm | Tensor | float]

    def apply(self, sources: Sequence[Components], rows: slice) -> Components:
        """Return the components of the value from those of the values of the state before it, and of the writes."""
        total: Components = {}
        for column in self.columns:
            for name, part in column.apply(sources[column.source], rows).items():
                total[name] = total[name] + part if name in total else part
        if self.bias is not None:
            bias = _select(self.bias, rows).expand_as(next(iter(total.values())))
            total[BIASES] = total.get(BIASES, 0.0) + bias
        for step in self.after:
            if isinstance(step, FrozenNorm):
                total = step.apply(total, rows)
            else:
                total = {name: part * step for name, part in total.items()}
        return total


def _select(t: Tensor, rows: slice) -> Tensor:
    """Return some of the tokens in float64, or the one row that is the same for all."""
    return (t if len(t) == 1 else t[rows]).double()


def _multiply(matrix: Tensor, parts: Components, rows: slice) -> Components:
    own = _select(matrix, rows)
    return {name: (own * part.unsqueeze(1)).sum(2) for name, part in parts.items()}


class Sample:
    """Sample of the tokens of one stream in one step.

    Args:
        names: the ids of the sublayers.
        tolerance: the largest relative error of the components' sum.

    Attributes:
        states: the sampled tokens of the values of each state, `(tokens, n, d)`, or one that is the same for all.
        writes: for each state but the first the writes since the state before it, with the names of their sublayers.
        equations: for each state but the first the equations of its values.
        counted: number of tokens from which the sample was taken.
        reason: why there is no memory map; empty if there is one.
    """

    def __init__(self, names: Iterable[str], tolerance: float) -> None:
        self.names, self.tolerance = [*names], tolerance
        self.states: list[list[Tensor]] = []
        self.writes: list[list[tuple[str, Tensor]]] = []
        self.equations: list[list[Equation]] = []
        self.counted = 0
        self.reason = ""

    def choose(self, rows: Tensor, mask: Tensor | None, size: int) -> Tensor:
        """Return the indices of the tokens to sample, evenly spaced among those that count.

        Args:
            rows: the tokens, in dimension 0.
            mask: which of them count; None for all.
            size: bytes that the sample takes for one token.
        """
        among = torch.arange(len(rows), device=rows.device) if mask is None else mask.nonzero().reshape(-1)
        self.counted, most = among.numel(), max(TOKENS, BYTES // size)
        if not self.counted:
            self.refuse("no token counts")
        if self.counted > most:
            among = among[torch.arange(most, device=among.device) * self.counted // most]
        return among

    def refuse(self, reason: str) -> None:
        """Note why there is no memory map, unless a reason is noted already."""
        self.reason = self.reason or reason

    def compute(self) -> tuple[MemoryMap | None, Balance]:
        """Return the memory map and the balance; without a map, the balance has the reason."""
        try:
            with torch.no_grad():
                return self._weigh()
        except OmittedError as error:
            return None, Balance(reason=str(error))

    def _weigh(self) -> tuple[MemoryMap, Balance]:
        """Return the memory map and the balance.

        Raises:
            OmittedError: there are none, or the components do not add up to a state.
        """
        if self.reason:
            raise OmittedError(self.reason)
        shares: list[dict[str, float]] = [{} for _ in self.states]  # sums over the tokens, by depth
        amounts: dict[str, float] = {}
        length = closure = 0.0
        tokens = max(map(len, self.states[0]))
        for begin in range(0, tokens, TOKENS):
            parts: Components = {}
            state = torch.empty(0)
            for k, (parts, state) in enumerate(self._iter_depths(slice(begin, min(begin + TOKENS, tokens)))):
                total = sum_components(parts)
                closure = max(closure, error := relative_error(state, total))
                if not error <= self.tolerance:
                    raise OmittedError(
                        f"at depth {k} the components add up to the stream with a relative error of {format_number(error, 2)}, "
                        f"tolerance {format_number(self.tolerance, 1)}"
                    )
                _add_to(shares[k], source_shares(parts, total))
            norms = torch.linalg.vector_norm(state, dim=-1)
            direction = state / norms.clamp_min(torch.finfo(norms.dtype).tiny)[:, None]
            _add_to(amounts, {name: (part * direction).sum(-1) for name, part in parts.items()})
            length += float(norms.sum())
        sources = [*dict.fromkeys(("x_0", *self.names, *amounts))]  # those of `Decomposition`, in their order
        means = tuple(amounts[source] / tokens for source in sources)
        balance = Balance(tuple(sources), means, length / tokens, tokens, closure, total_tokens=self.counted)
        return (sources, [[depth.get(source, 0.0) / tokens for source in sources] for depth in shares]), balance

    def _iter_depths(self, rows: slice) -> Iterator[tuple[Components, Tensor]]:
        """Yield the components of each state for some of the tokens, and the state, both `(tokens, n d)`."""

        def read(t: Tensor) -> Tensor:
            return _select(t, rows).expand(rows.stop - rows.start, -1, -1)

        values: list[Components] = [{"x_0": read(part)} for part in self.states[0]]
        yield _join(values), torch.cat([*map(read, self.states[0])], 1).flatten(1)
        for writes, equations, state in zip(self.writes, self.equations, self.states[1:], strict=True):
            sources = [*values, *({name: read(write)} for name, write in writes)]
            values = [equation.apply(sources, rows) for equation in equations]
            yield _join(values), torch.cat([*map(read, state)], 1).flatten(1)


def _join(values: Sequence[Components]) -> Components:
    """Return the components of a state, `(tokens, n d)`, from those of its values, `(tokens, n, d)`."""
    zeros = [torch.zeros_like(next(iter(parts.values()))) for parts in values]
    names = dict.fromkeys(name for parts in values for name in parts)
    pairs = [*zip(values, zeros, strict=True)]
    return {name: torch.cat([parts.get(name, zero) for parts, zero in pairs], 1).flatten(1) for name in names}


def _add_to(sums: dict[str, float], values: Mapping[str, Tensor]) -> None:
    """Add the sums of tensors to numbers of the same names."""
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + float(value.sum())


class TokenSample(Sample):
    """Sample of the tokens of a stream that is a chain of adds, whose states and writes are given to `keep`.

    Args:
        stream: the inspected stream.
    """

    def __init__(self, stream: Stream) -> None:
        self.chain, self.width = stream.chain, stream.width
        self._states = [*map(stream.layout.find_entry, range(len(self.chain.adds))), self.chain.states()[-1]]
        self._sublayers = [sublayer for of_add in self.chain.sublayers for sublayer in of_add]
        self._kept: dict[Value | Sublayer, Tensor] = {}  # tokens of states and writes, or one that is the same for all
        self._gains: dict[Value, Tensor] = {}  # weights and biases of norms, as of the forward
        self._chosen: Tensor | None = None  # indices of the sampled tokens
        self._count = 0  # of a state's tokens
        self._names = {id(site.sublayer): site.id for site in stream.sites}
        super().__init__(self._names.values(), find_tolerance(self.chain) * len(self._states) ** 0.5)
        self.reason = self._find_obstacle()

    def list_observers(self, leaves: Leaves) -> Iterator[tuple[Value, Observer]]:
        """Yield the weights and biases of norms on the stream that operators compute, each with its observer."""
        norms = [norm for of_add in self.chain.norms_out for norm in of_add if not self.reason]
        for gain in filter(None, (gain for norm in norms for gain in (norm.weight, norm.bias))):
            if gain.op is not None:
                yield gain, partial(self._keep_gain, gain)
            elif (use := leaves.find_use(gain)) is not None:
                yield use, partial(self._keep_used, gain, leaves)
            else:  # an optimizer may change it before the map is computed
                leaf = leaves.read(gain)
                self._keep_gain(gain, gain.tensor if leaf is None else leaf)

    def _find_obstacle(self) -> str:
        """Return why components cannot be propagated: a step on the stream that is not a constant factor; else empty text."""
        for k, add in enumerate(self.chain.adds):
            if any(factor.kind != "constant" for factor in add.residual_path.factors):
                return f"add {k + 1} multiplies the stream by more than a constant"
            if any(norm.x.shape[-1] != self.width for norm in self.chain.norms_out[k]):
                return f"a norm after add {k + 1} normalizes a part of a token's {self.width} features"
        return find_step_obstacle(self.chain, ("constant",))

    def _keep_gain(self, gain: Value, tensor: Tensor) -> None:
        self._gains[gain] = tensor.detach().clone()

    def _keep_used(self, gain: Value, leaves: Leaves, tensor: Tensor) -> None:
        if (used := leaves.read_used(gain)) is not None:
            self._keep_gain(gain, used)

    def keep(self, key: Value | Sublayer, tokens: Tokens) -> None:
        """Keep a copy of the sampled tokens of a state, or of a sublayer's write."""
        if not self.reason and key in self._states + self._sublayers:
            try:
                self._kept[key] = self._copy_sampled(tokens, isinstance(key, Value))
            except OmittedError as error:
                self.refuse(f"{UNSAMPLED}: {error}")

    def _copy_sampled(self, tokens: Tokens, is_state: bool) -> Tensor:
        ordered = tokens.sort()
        if ordered is None:
            raise OmittedError("the order of its tokens is not known")
        rows = ordered.flat[:, None]
        count = len(rows)
        if self._chosen is None and is_state:
            size = len(self._states + self._sublayers) * self.width * rows.element_size()  # of one token
            self._count, self._chosen = count, self.choose(rows, ordered.mask, size)
        if count == 1 and not is_state:  # a bias, the same for all tokens
            return rows.clone()
        if self._chosen is None:
            raise OmittedError("the write is computed before the stream begins")
        if count != self._count:
            raise OmittedError(f"it has {count} tokens, x_0 has {self._count}")
        return rows[self._chosen]

    def _weigh(self) -> tuple[MemoryMap, Balance]:
        missing = len(self._states + self._sublayers) - len(self._kept)
        if not self.reason and missing:
            self.reason = f"{missing} of {missing + len(self._kept)} states and writes were not met in the last step"
        if not self.reason:
            self.states = [[self._kept[state]] for state in self._states]
            self.writes = [
                [(self._names.get(id(sublayer), BIASES), self._kept[sublayer]) for sublayer in of_add]
                for of_add in self.chain.sublayers
            ]
            self.equations = [[self._freeze_add(k)] for k in range(len(self.chain.adds))]
        return super()._weigh()

    def _freeze_add(self, k: int) -> Equation:
        """Return an add as an `Equation`, with the weights that the forward used."""
        path, state = self.chain.adds[k].residual_path, self.states[0][0]
        one = torch.ones(1, 1, 1, 1, dtype=torch.float64, device=state.device)
        columns = [Column(0, path.number * one), *(Column(1 + j, one) for j in range(len(self.chain.sublayers[k])))]
        after: list[FrozenNorm | Tensor | float] = []
        for path, norm in zip_longest(find_paths(self.chain, k), self.chain.norms_out[k]):
            after.append(path.number)
            if norm is not None:
                frozen = replace(norm, weight=self._freeze(norm.weight), bias=self._freeze(norm.bias))
                after.append(FrozenNorm(frozen))
        return Equation(columns, None, after)

    def _freeze(self, gain: Value | None) -> Value | None:
        """Return a weight or bias of a norm as of the forward."""
        return gain and replace(gain, tensor=self._gains.get(gain, gain.tensor))
