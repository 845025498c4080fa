"""Memory map and balance sheet of a recorded step, computed from a sample of its tokens.

The tokens of every state and every write are kept for one step: all that count, or evenly spaced ones where all would take more
than `BYTES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from addnorm.stream.dataflow.arithmetic import Factor
from addnorm.stream.dataflow.graph import Value
from addnorm.stream.dataflow.observers import Observer
from addnorm.stream.decompose import Components, find_step_obstacle, propagate, source_shares, sum_components
from addnorm.stream.edits import edit_write
from addnorm.stream.find.adds import Add
from addnorm.stream.find.chain import Chain
from addnorm.stream.find.inspection import Stream
from addnorm.stream.find.paths import Path
from addnorm.stream.find.proof import get_tolerance, relative_error
from addnorm.stream.find.sublayers import Sublayer
from addnorm.stream.layout.token_layout import TokenLayout
from addnorm.stream.record.plan import find_use, write_probe
from addnorm.stream.record.schema import Balance, MemoryMap
from addnorm.stream.record.statistics import OmittedError, TokenMask, Tokens

__all__ = ["TokenSample"]

BYTES = 64 * 2**20  # that the sample of one stream takes
TOKENS = 64  # in any sample, and at once in the arithmetic


class TokenSample:
    """Sample of the tokens of one stream in one step.

    Args:
        model: the model.
        stream: the inspected stream.
        tokens: mask of the tokens to sample from.
        read_leaf: returns an input or a parameter of this forward.
        read_live: returns a parameter as the model uses it during the operator that is observed; None: parameters do not change
            during the forward.
    """

    def __init__(
        self,
        model: nn.Module,
        stream: Stream,
        tokens: TokenMask,
        read_leaf: Callable[[Value], Tensor | None],
        read_live: Callable[[Value], Tensor | None] | None = None,
    ) -> None:
        self.model, self.stream = model, stream
        self.chain: Chain = stream.chain
        self.tokens = tokens
        self.read_leaf, self.read_live = read_leaf, read_live
        self._writers = {write_probe(sublayer).value: sublayer for _, sublayer in self.chain.numbered()}
        self._states: dict[Value, Tensor] = {}
        self._parameters: dict[Value, Tensor] = {}  # copies of the gains that are parameters, as of the forward
        self._chosen: Tensor | None = None  # indices of the sampled tokens
        self._count = 0  # of a state's tokens
        self._counted = 0  # of those that the mask selects
        self._reason = ""  # why some state or write is not sampled

    def list_observers(self) -> Iterator[tuple[Value, Observer]]:
        """Yield the values to sample, each with its observer; nothing if the samples could not be combined."""
        if self.find_obstacle():
            return
        for value, layout in self._values().items():
            yield value, partial(self._keep, value, layout)
        gains = [gain for norms in self.chain.norms_out for norm in norms for gain in (norm.weight, norm.bias)]
        gains += [
            scale
            for sublayers in self.chain.sublayers
            for sublayer in sublayers
            for scale in write_probe(sublayer).scales
        ]
        for gain in filter(None, gains):
            if gain.op is not None:
                yield gain, partial(self._keep_gain, gain)
            elif self.read_live is not None and (used := find_use(gain)) is not None:
                yield used, partial(self._keep_live, gain)
            else:  # an optimizer may change it before the map is computed
                leaf = self.read_leaf(gain)
                self._parameters[gain] = (gain.tensor if leaf is None else leaf).detach().clone()

    def find_obstacle(self) -> str:
        """Return why components cannot be propagated: a step on the stream that is not a constant factor; else empty text."""
        for k, add in enumerate(self.chain.adds):
            if any(factor.kind != "constant" for factor in add.residual_path.factors):
                return f"add {k + 1} multiplies the stream by more than a constant"
            probes = [write_probe(sublayer) for sublayer in self.chain.sublayers[k]]
            if reason := next((probe.obstacle for probe in probes if probe.obstacle), ""):
                return f"at add {k + 1} {reason}"
            scales = (scale for probe in probes for scale in probe.scales)
            if any(math.prod(scale.shape) not in (1, self.stream.width) for scale in scales):
                return f"add {k + 1} multiplies a write by another factor for each token"
            if any(norm.x.shape[-1] != self.stream.width for norm in self.chain.norms_out[k]):
                return f"a norm after add {k + 1} normalizes a part of a token's {self.stream.width} features"
        return find_step_obstacle(self.chain, ("constant",))

    def compute(self) -> tuple[MemoryMap | None, Balance]:
        """Return the memory map and the balance; without a map, the balance has the reason."""
        if reason := self.find_obstacle():
            return None, Balance(reason=reason)
        with self._restored_parameters():
            return self._compute()

    @contextmanager
    def _restored_parameters(self) -> Iterator[None]:
        """Set the gains that are parameters to their values of the forward while the block runs."""
        present = {gain: gain.tensor for gain in self._parameters}
        for gain, tensor in self._parameters.items():
            gain.tensor = tensor
        try:
            yield
        finally:
            for gain, tensor in present.items():
                gain.tensor = tensor

    def _compute(self) -> tuple[MemoryMap | None, Balance]:
        if self._reason:
            return None, Balance(reason=self._reason)
        values = [*self._values()]
        missing = sum(value not in self._states for value in values)
        if missing or not self._states:
            return None, Balance(reason=f"{missing} of {len(values)} states and writes were not met in the last step")
        names = {id(site.sublayer): site.id for site in self.stream.sites}
        states = self._observed_states()
        limit = get_tolerance(*(value.tensor.dtype for value in values)) * len(states) ** 0.5
        shares: list[dict[str, float]] = [{} for _ in states]  # sums over the tokens, by depth
        amounts: dict[str, float] = {}
        length = closure = 0.0
        tokens = len(self._states[states[0]])
        with torch.no_grad():
            for begin in range(0, tokens, TOKENS):
                rows = slice(begin, begin + TOKENS)
                parts: Components = {}
                for k, parts in enumerate(self._propagate(names, rows)):
                    total = sum_components(parts)
                    closure = max(closure, error := relative_error(self._read(states[k], rows), total))
                    if not error <= limit:
                        reason = (
                            f"at depth {k} the components add up to the stream with a relative error of {error:.1e}, "
                        )
                        return None, Balance(reason=f"{reason}tolerance {limit:.0e}")
                    _add_to(shares[k], source_shares(parts, total))
                end = self._read(states[-1], rows)
                norms = torch.linalg.vector_norm(end, dim=-1)
                direction = end / norms.clamp_min(torch.finfo(norms.dtype).tiny)[:, None]
                _add_to(amounts, {name: (part * direction).sum(-1) for name, part in parts.items()})
                length += float(norms.sum())
        sources = [*dict.fromkeys(("x_0", *names.values(), *amounts))]  # those of `Decomposition`, in their order
        means = tuple(amounts[source] / tokens for source in sources)
        balance = Balance(tuple(sources), means, length / tokens, tokens, closure, total_tokens=self._counted)
        return (sources, [[depth.get(source, 0.0) / tokens for source in sources] for depth in shares]), balance

    def _propagate(self, names: dict[int, str], rows: slice) -> Iterator[Components]:
        """Yield the components of some of the tokens at each depth."""
        start = self._read(self._observed_states()[0], rows)

        def write(sublayer: Sublayer) -> Tensor:
            probe = write_probe(sublayer)
            part = (self._read(probe.value, rows) * probe.factor).expand(start.shape)
            for scale in probe.scales:
                part = part * scale.tensor.detach().double().reshape(-1)  # a number, or one for each feature
            return part

        def scale_residual(add: Add, part: Tensor) -> Tensor:
            number = _product(add.residual_path.factors)
            for term in add.residual_path.terms:
                number *= term.factor
            return part * number

        def scale_sum(path: Path, parts: Components) -> Components:
            number = _product(path.factors)
            return parts if number == 1.0 else {name: part * number for name, part in parts.items()}

        return propagate(self.chain, names, start, write, scale_residual, scale_sum)

    def _read(self, value: Value, rows: slice) -> Tensor:
        """Return some of the tokens of a state or write, or the bias that is the same for all."""
        kept = self._states[value]
        return (kept if len(kept) == 1 else kept[rows]).double()

    def _values(self) -> dict[Value, TokenLayout | None]:
        """Return the states and writes to sample, with their layouts."""
        layout = self.stream.layout
        values = {value: layout.of(value) for value in self._observed_states()}
        for k, sublayers in enumerate(self.chain.sublayers):
            values |= {write_probe(sublayer).value: layout.of_write(k, sublayer) for sublayer in sublayers}
        return values

    def _observed_states(self) -> list[Value]:
        """Return the states, where they are expanded over the batch after that."""
        entries = [self.stream.layout.find_entry(k) for k in range(len(self.chain.adds))]
        return [*entries, self.chain.states()[-1]]

    def _keep(self, value: Value, layout: TokenLayout | None, tensor: Tensor) -> None:
        with torch.no_grad():
            if (sublayer := self._writers.get(value)) is not None:
                tensor = edit_write(self.model, sublayer, tensor)
            try:
                tokens = Tokens.arrange(tensor.detach(), layout, self.tokens)
            except OmittedError as error:
                self._reason = self._reason or f"a state or write of the stream cannot be sampled: {error}"
                return
            rows = tokens.layout.sort_tokens(tokens.t)
            if rows is None:
                self._reason = self._reason or "the order of the tokens is not known in a state or write of the stream"
                return
            count = math.prod(rows.shape[:-1])
            if count == 1 and value not in self._observed_states():  # a bias, the same for all tokens
                self._states[value] = rows.reshape(1, -1).clone()
                return
            if self._chosen is None and value not in self._observed_states():
                self._reason = self._reason or "a write is computed before the stream begins"
                return
            if self._chosen is None:
                self._count = count
                self._chosen = self._choose(tokens)
                if not self._chosen.numel():
                    self._reason = self._reason or "no token counts"
            if count == self._count:
                places = torch.unravel_index(self._chosen, rows.shape[:-1])
                self._states[value] = rows[places]  # a copy
            else:
                self._reason = (
                    self._reason or f"a state or write of the stream has {count} tokens, x_0 has {self._count}"
                )

    def _choose(self, tokens: Tokens) -> Tensor:
        """Return the indices of the tokens to sample, in canonical order."""
        among = torch.arange(tokens.t.shape[:-1].numel(), device=tokens.t.device)
        if tokens.mask is not None:
            mask = tokens.layout.sort_tokens(tokens.mask.reshape(tokens.t.shape[:-1]), has_features=False)
            assert mask is not None
            among = mask.reshape(-1).nonzero().reshape(-1)
        self._counted = among.numel()
        size = len(self._values()) * self.stream.width * tokens.t.element_size()  # of one token
        most = max(TOKENS, BYTES // size)
        return (
            among if self._counted <= most else among[torch.arange(most, device=among.device) * self._counted // most]
        )

    def _keep_live(self, gain: Value, tensor: Tensor) -> None:
        live = self.read_live(gain) if self.read_live is not None else None
        if live is not None:
            self._parameters[gain] = live.detach().clone()

    def _keep_gain(self, gain: Value, tensor: Tensor) -> None:
        gain.tensor = tensor.detach().clone()  # it may be a view of a parameter


def _add_to(sums: dict[str, float], values: Mapping[str, Tensor]) -> None:
    """Add the sums of tensors to numbers of the same names."""
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + float(value.sum())


def _product(factors: list[Factor]) -> float:
    return math.prod((factor.number for factor in factors), start=1.0)
