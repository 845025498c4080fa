"""Memory map and balance sheet of a recorded step, computed from a sample of its tokens.

The tokens of every state and every write are kept for one step: all that count, or evenly spaced ones where all would take more
than `BYTES`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from addnorm._util.numbers import format_number
from addnorm.stream.dataflow.graph import Value
from addnorm.stream.dataflow.observers import Observer
from addnorm.stream.dataflow.replay import relative_error
from addnorm.stream.edits import edit_write
from addnorm.stream.find.adds import Add
from addnorm.stream.find.equation_errors import get_tolerance
from addnorm.stream.find.inspection import Stream
from addnorm.stream.find.paths import Path
from addnorm.stream.find.sublayers import Sublayer
from addnorm.stream.layout.token_layout import TokenLayout
from addnorm.stream.record.probes import Leaves
from addnorm.stream.record.schema import Balance, MemoryMap
from addnorm.stream.shares import Components, find_step_obstacle, propagate, source_shares, sum_components
from addnorm.stream.tokens import OmittedError, TokenMask, Tokens
from addnorm.stream.write_terms import WriteTerm, find_write_term

BYTES = 64 * 2**20  # that the sample of one stream takes
TOKENS = 64  # in any sample, and at once in the arithmetic


class TokenSample:
    """Sample of the tokens of one stream in one step.

    Args:
        model: the model.
        stream: the inspected stream.
        tokens: mask of the tokens to sample from.
    """

    def __init__(self, model: nn.Module, stream: Stream, tokens: TokenMask) -> None:
        self.model, self.stream, self.tokens = model, stream, tokens
        self.chain = stream.chain
        adds, layout = self.chain.adds, stream.layout
        self._states = [*map(layout.find_entry, range(len(adds))), self.chain.states()[-1]]
        self._layouts = {state: layout.of(state) for state in self._states}  # of states and writes
        self._terms: dict[Sublayer, WriteTerm] = {}
        for sublayers in self.chain.sublayers:
            for sublayer in sublayers:
                term = self._terms[sublayer] = find_write_term(sublayer)
                self._layouts[term.value] = layout.of_write(sublayer)
        self._writers = {term.value: sublayer for sublayer, term in self._terms.items()}
        self._rows: dict[
            Value, Tensor
        ] = {}  # the sampled tokens of states and writes, or one row that is the same for all
        self._gains: dict[Value, Tensor] = {}  # weights and biases of norms and factors of writes, as of the forward
        self._chosen: Tensor | None = None  # indices of the sampled tokens
        self._count = 0  # of a state's tokens
        self._counted = 0  # of those that the mask selects
        self._reason = self.find_obstacle()  # why there is no memory map

    def list_observers(self, leaves: Leaves) -> Iterator[tuple[Value, Observer]]:
        """Yield the values to sample, each with its observer; nothing if the samples could not be combined."""
        if self._reason:
            return
        for value, layout in self._layouts.items():
            yield value, partial(self._keep, value, layout)
        gains = [gain for norms in self.chain.norms_out for norm in norms for gain in (norm.weight, norm.bias)]
        gains += [scale for term in self._terms.values() for scale in term.scales]
        for gain in filter(None, gains):
            if gain.op is not None:
                yield gain, partial(self._keep_gain, gain)
            elif (use := leaves.find_use(gain)) is not None:
                yield use, partial(self._keep_used, gain, leaves)
            else:  # an optimizer may change it before the map is computed
                leaf = leaves.read(gain)
                self._keep_gain(gain, gain.tensor if leaf is None else leaf)

    def find_obstacle(self) -> str:
        """Return why components cannot be propagated: a step on the stream that is not a constant factor; else empty text."""
        width = self.stream.width
        for k, add in enumerate(self.chain.adds):
            if any(factor.kind != "constant" for factor in add.residual_path.factors):
                return f"add {k + 1} multiplies the stream by more than a constant"
            terms = [self._terms[sublayer] for sublayer in self.chain.sublayers[k]]
            if reason := next((term.obstacle for term in terms if term.obstacle), ""):
                return f"at add {k + 1} {reason}"
            if any(math.prod(scale.shape) not in (1, width) for term in terms for scale in term.scales):
                return f"add {k + 1} multiplies a write by another factor for each token"
            if any(norm.x.shape[-1] != width for norm in self.chain.norms_out[k]):
                return f"a norm after add {k + 1} normalizes a part of a token's {width} features"
        return find_step_obstacle(self.chain, ("constant",))

    # Observers.

    def _keep_gain(self, gain: Value, tensor: Tensor) -> None:
        self._gains[gain] = tensor.detach().clone()

    def _keep_used(self, gain: Value, leaves: Leaves, tensor: Tensor) -> None:
        if (used := leaves.read_used(gain)) is not None:
            self._keep_gain(gain, used)

    def _keep(self, value: Value, layout: TokenLayout | None, tensor: Tensor) -> None:
        try:
            with torch.no_grad():
                self._rows[value] = self._sample(value, layout, tensor)
        except OmittedError as error:
            self._reason = self._reason or str(error)

    def _sample(self, value: Value, layout: TokenLayout | None, tensor: Tensor) -> Tensor:
        """Return a copy of the sampled tokens of a state or write, in canonical order."""
        if (sublayer := self._writers.get(value)) is not None:
            tensor = edit_write(self.model, sublayer, tensor)
        try:
            tokens = Tokens.arrange(tensor.detach(), layout, self.tokens).sort()
        except OmittedError as error:
            raise OmittedError(f"a state or write of the stream cannot be sampled: {error}") from None
        if tokens is None:
            raise OmittedError("the order of the tokens is not known in a state or write of the stream")
        rows = tokens.flat
        count, is_state = len(rows), value in self._states
        if count == 1 and not is_state:  # a bias, the same for all tokens
            return rows.clone()
        if self._chosen is None:
            if not is_state:
                raise OmittedError("a write is computed before the stream begins")
            self._count, self._chosen = count, self._choose(rows, tokens.mask)
            if not self._counted:
                self._reason = self._reason or "no token counts"
        if count != self._count:
            raise OmittedError(f"a state or write of the stream has {count} tokens, x_0 has {self._count}")
        return rows[self._chosen]

    def _choose(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        """Return the indices of the tokens to sample, in canonical order."""
        size = len(self._layouts) * self.stream.width * rows.element_size()  # of one token
        chosen, self._counted = choose_tokens(rows, mask, size)
        return chosen

    # Results.

    def compute(self) -> tuple[MemoryMap | None, Balance]:
        """Return the memory map and the balance; without a map, the balance has the reason."""
        missing = len(self._layouts.keys() - self._rows.keys())
        reason = self._reason
        if not reason and missing:
            reason = f"{missing} of {len(self._layouts)} states and writes were not met in the last step"
        try:
            if reason:
                raise OmittedError(reason)
            with self._restored_gains(), torch.no_grad():
                return self._compute()
        except OmittedError as error:
            return None, Balance(reason=str(error))

    @contextmanager
    def _restored_gains(self) -> Iterator[None]:
        """Set the gains to their values of the forward while the block runs."""
        present = {gain: gain.tensor for gain in self._gains}
        for gain, tensor in self._gains.items():
            gain.tensor = tensor
        try:
            yield
        finally:
            for gain, tensor in present.items():
                gain.tensor = tensor

    def _compute(self) -> tuple[MemoryMap, Balance]:
        names = {id(site.sublayer): site.id for site in self.stream.sites}
        limit = get_tolerance(*(value.tensor.dtype for value in self._layouts)) * len(self._states) ** 0.5
        starts = range(0, len(self._rows[self._states[0]]), TOKENS)
        chunks = (self._iter_depths(names, slice(begin, begin + TOKENS)) for begin in starts)
        return weigh_sources(chunks, names.values(), limit, self._counted)

    def _iter_depths(self, names: dict[int, str], rows: slice) -> Iterator[tuple[Components, Tensor]]:
        for state, parts in zip(self._states, self._propagate(names, rows), strict=True):
            yield parts, self._read(state, rows)

    def _propagate(self, names: dict[int, str], rows: slice) -> Iterator[Components]:
        """Yield the components of some of the tokens at each depth."""
        start = self._read(self._states[0], rows)

        def write(sublayer: Sublayer) -> Tensor:
            term = self._terms[sublayer]
            part = (self._read(term.value, rows) * term.factor).expand(start.shape)
            for scale in term.scales:
                part = part * scale.tensor.detach().double().reshape(-1)  # a number, or one for each feature
            return part

        def scale_residual(add: Add, part: Tensor) -> Tensor:
            path = add.residual_path
            numbers = *(factor.number for factor in path.factors), *(term.factor for term in path.terms)
            return part * math.prod(numbers, start=1.0)

        def scale_sum(path: Path, parts: Components) -> Components:
            number = math.prod(factor.number for factor in path.factors)
            return parts if number == 1.0 else {name: part * number for name, part in parts.items()}

        return propagate(self.chain, names, start, write, scale_residual, scale_sum)

    def _read(self, value: Value, rows: slice) -> Tensor:
        """Return some of the tokens of a state or write, or the bias that is the same for all."""
        kept = self._rows[value]
        return (kept if len(kept) == 1 else kept[rows]).double()


def choose_tokens(rows: Tensor, mask: Tensor | None, size: int) -> tuple[Tensor, int]:
    """Return the indices of the tokens to sample, evenly spaced among those that count, and the number of these.

    Args:
        rows: the tokens, in dimension 0.
        mask: which of them count; None for all.
        size: bytes that the sample takes for one token.
    """
    among = torch.arange(len(rows), device=rows.device) if mask is None else mask.nonzero().reshape(-1)
    counted, most = among.numel(), max(TOKENS, BYTES // size)
    if counted > most:
        among = among[torch.arange(most, device=among.device) * counted // most]
    return among, counted


def weigh_sources(
    chunks: Iterable[Iterable[tuple[Components, Tensor]]], names: Iterable[str], limit: float, counted: int
) -> tuple[MemoryMap, Balance]:
    """Return the memory map and the balance from the components of the states.

    Args:
        chunks: for some of the tokens at a time, at each depth the components and the state, `(tokens, d)` in float64.
        names: the ids of the sublayers.
        limit: the largest relative error of the components' sum.
        counted: number of tokens from which the sample was taken.

    Raises:
        OmittedError: the components do not add up to a state.
    """
    shares: list[dict[str, float]] = []  # sums over the tokens, by depth
    amounts: dict[str, float] = {}
    length = closure = 0.0
    tokens = 0
    for chunk in chunks:
        parts: Components = {}
        state = torch.empty(0)
        for k, (parts, state) in enumerate(chunk):
            total = sum_components(parts)
            closure = max(closure, error := relative_error(state, total))
            if not error <= limit:
                raise OmittedError(
                    f"at depth {k} the components add up to the stream with a relative error of {format_number(error, 2)}, "
                    f"tolerance {format_number(limit, 1)}"
                )
            shares += [{}] * (k == len(shares))
            _add_to(shares[k], source_shares(parts, total))
        norms = torch.linalg.vector_norm(state, dim=-1)
        direction = state / norms.clamp_min(torch.finfo(norms.dtype).tiny)[:, None]
        _add_to(amounts, {name: (part * direction).sum(-1) for name, part in parts.items()})
        length += float(norms.sum())
        tokens += len(norms)
    sources = [*dict.fromkeys(("x_0", *names, *amounts))]  # those of `Decomposition`, in their order
    means = tuple(amounts[source] / tokens for source in sources)
    balance = Balance(tuple(sources), means, length / tokens, tokens, closure, total_tokens=counted)
    return (sources, [[depth.get(source, 0.0) / tokens for source in sources] for depth in shares]), balance


def _add_to(sums: dict[str, float], values: Mapping[str, Tensor]) -> None:
    """Add the sums of tensors to numbers of the same names."""
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + float(value.sum())
