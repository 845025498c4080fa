"""Memory map and balance sheet of a recorded step, computed from a sample of its tokens.

The tokens of every state and every write are kept for one step: all that the mask selects, or evenly spaced ones where all would
take more than `BYTES`. With norms frozen, the components of a state follow from those of the state before it: `Equation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from addnorm._util.numbers import format_number
from addnorm.stream.dataflow.graph import Value
from addnorm.stream.dataflow.replay import relative_error
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.sites import Stream
from addnorm.stream.find.sublayers import Sublayer
from addnorm.stream.record.probes import Leaves, Observed
from addnorm.stream.record.schema import Balance, MemoryMap
from addnorm.stream.shares import (
    BIASES,
    Components,
    find_paths,
    find_step_obstacle,
    find_tolerance,
    join_components,
    propagate_through,
    source_shares,
    sum_components,
)
from addnorm.stream.tokens import OmittedError, Tokens

BYTES = 64 * 2**20  # limit of the sample of one stream, unless it has only `TOKENS` tokens
UNSAMPLED = "a state or write of the stream cannot be sampled"
TOKENS = 64  # tokens that any sample may have, and tokens in one step of the arithmetic

# Function from the components of a value to those of another value, for the tokens of a slice.
Step = Callable[[Components, slice], Components]
Operand = tuple[int, Sequence[Step]]  # the index of its source, and the steps from the source to the operand


class Equation(NamedTuple):
    """The equation of one value of a state, for the sampled tokens: a sum of operands, and the steps after it.

    Attributes:
        operands: for each the index of its source among the values of the state before and the writes, and the steps from the
            source to the operand.
        after: the norms and factors after the sum.
        bias: `(tokens, n, d)`, or `(1, n, d)` if it is the same for all tokens; None if there is no bias.
    """

    operands: Sequence[Operand]
    after: Sequence[Step]
    bias: Tensor | None = None

    def apply(self, sources: Sequence[Components], rows: slice) -> Components:
        """Return the components of the value, given those of the values of the state before it and of the writes."""
        total: Components = {}
        for source, steps in self.operands:
            for name, part in _run(steps, sources[source], rows).items():
                total[name] = total[name] + part if name in total else part
        if self.bias is not None:
            bias = _select(self.bias, rows).expand_as(next(iter(total.values())))
            total[BIASES] = total.get(BIASES, 0.0) + bias
        return _run(self.after, total, rows)


def _run(steps: Iterable[Step], parts: Components, rows: slice) -> Components:
    for step in steps:
        parts = step(parts, rows)
    return parts


def multiply(matrix: Tensor, parts: Components, rows: slice) -> Components:
    """Return a matrix `(tokens, n_out, n_in, d)` times the components."""
    own = _select(matrix, rows)
    return {name: (own * part.unsqueeze(1)).sum(2) for name, part in parts.items()}


def scale(factor: Tensor | float, parts: Components, rows: slice) -> Components:
    """Return the components times a factor that is the same for all tokens."""
    return {name: part * factor for name, part in parts.items()}


def normalize(norm: Norm, denominator: Tensor | None, parts: Components, rows: slice) -> Components:
    """Return the components of a norm's output. The denominator None is that of the sum of `parts`."""
    return propagate_through(norm, parts, None if denominator is None else _select(denominator, rows))


def _select(t: Tensor, rows: slice) -> Tensor:
    """Return the tokens `rows` of a tensor in float64, or its only row if it has one row for all tokens."""
    return (t if len(t) == 1 else t[rows]).double()


class Sample:
    """Sample of the tokens of one stream in one step.

    Args:
        names: the ids of the sublayers.
        tolerance: the largest relative error that the sum of the components may have.

    Attributes:
        states: the sampled tokens of the values of each state, `(tokens, n, d)`, or `(1, n, d)` if all tokens are the same.
        writes: for each state but the first the writes since the state before, each with the name of its sublayer.
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
        """Return the indices of the tokens to sample, evenly spaced among those that the mask selects.

        Args:
            rows: the tokens, in dimension 0.
            mask: mask of the tokens to choose from; None for all.
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
        """Yield the components of each state, and the state itself, for the tokens `rows`, both `(tokens, n d)`."""

        def read(t: Tensor) -> Tensor:
            return _select(t, rows).expand(rows.stop - rows.start, -1, -1)

        values: list[Components] = [{"x_0": read(part)} for part in self.states[0]]
        yield join_components(values, _join), _join([*map(read, self.states[0])])
        for writes, equations, state in zip(self.writes, self.equations, self.states[1:], strict=True):
            sources = [*values, *({name: read(write)} for name, write in writes)]
            values = [equation.apply(sources, rows) for equation in equations]
            yield join_components(values, _join), _join([*map(read, state)])


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Return the values of a state, `(tokens, n, d)`, as one tensor `(tokens, n d)`."""
    return torch.cat([*tensors], 1).flatten(1)


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
        # The sampled tokens of states and writes; None until `keep` receives them.
        self._kept: dict[Value | Sublayer, Any] = dict.fromkeys(
            [*self._states, *chain.from_iterable(self.chain.sublayers)]
        )
        self._gains: dict[Value, Tensor] = {}  # weights and biases of norms, as of the forward
        self._chosen: Tensor | None = None  # indices of the sampled tokens
        self._count = 0  # number of tokens of a state
        self._names = {site.sublayer: site.id for site in stream.sites}
        super().__init__(self._names.values(), find_tolerance(self.chain) * len(self._states) ** 0.5)
        self.reason = self._find_obstacle()

    def list_observers(self, leaves: Leaves) -> Observed:
        """Yield the observers of the weights and biases of norms on the stream."""
        norms = [norm for of_add in self.chain.norms_out for norm in of_add if not self.reason]
        for gain in filter(None, (gain for norm in norms for gain in (norm.weight, norm.bias))):
            yield from leaves.observe(gain, partial(self._keep_gain, gain))

    def _find_obstacle(self) -> str:
        """Return why components cannot be propagated: a step on the stream that is not a constant factor; else empty text."""
        for k, add in enumerate(self.chain.adds):
            if any(factor.kind != "constant" for factor in add.residual_path.factors):
                return f"add {k + 1} multiplies the stream by more than a constant"
            if any(norm.x.shape[-1] != self.width for norm in self.chain.norms_out[k]):
                return f"a norm after add {k + 1} normalizes a part of a token's {self.width} features"
        return find_step_obstacle(self.chain, ("constant",))

    def _keep_gain(self, gain: Value, tensor: Tensor) -> None:
        self._gains[gain] = tensor.detach().clone()  # an optimizer may change it before the map is computed

    def keep(self, key: Value | Sublayer, tokens: Tokens) -> None:
        """Keep a copy of the sampled tokens of a state, or of a sublayer's write."""
        if not self.reason and key in self._kept:
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
            size = len(self._kept) * self.width * rows.element_size()  # of one token
            self._count, self._chosen = count, self.choose(rows, ordered.mask, size)
        if count == 1 and not is_state:  # a bias, the same for all tokens
            return rows.clone()
        if self._chosen is None:
            raise OmittedError("the write is computed before the stream begins")
        if count != self._count:
            raise OmittedError(f"it has {count} tokens, x_0 has {self._count}")
        return rows[self._chosen]

    def _weigh(self) -> tuple[MemoryMap, Balance]:
        missing = sum(tokens is None for tokens in self._kept.values())
        if missing:
            self.refuse(f"{missing} of {len(self._kept)} states and writes were not met in the last step")
        if not self.reason:
            self.states = [[self._kept[state]] for state in self._states]
            self.writes = [
                [(self._names.get(sublayer, BIASES), self._kept[sublayer]) for sublayer in of_add]
                for of_add in self.chain.sublayers
            ]
            self.equations = [[self._freeze_add(k)] for k in range(len(self.chain.adds))]
        return super()._weigh()

    def _freeze_add(self, k: int) -> Equation:
        """Return an add as an `Equation`, with the weights that the forward used."""
        add = self.chain.adds[k]
        operands: list[Operand] = [(0, [partial(scale, add.residual_path.number)])]
        operands += ((1 + j, ()) for j in range(len(self.chain.sublayers[k])))
        after: list[Step] = []
        for path, norm in zip_longest(find_paths(self.chain, k), self.chain.norms_out[k]):
            after.append(partial(scale, path.number))
            if norm is not None:
                frozen = replace(norm, weight=self._freeze(norm.weight), bias=self._freeze(norm.bias))
                after.append(partial(normalize, frozen, None))
        return Equation(operands, after)

    def _freeze(self, gain: Value | None) -> Value | None:
        """Return a weight or bias of a norm with the numbers that the forward used."""
        return gain and replace(gain, tensor=self._gains.get(gain, gain.tensor))
