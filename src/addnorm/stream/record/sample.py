"""Memory map and balance sheet of a recorded step, computed from a sample of its tokens.

At most `TOKENS` evenly spaced tokens of every state and every write are kept, for one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from addnorm.stream.dataflow.graph import Value
from addnorm.stream.dataflow.observers import Observer
from addnorm.stream.decompose import find_step_obstacle, propagate, source_shares, sum_components
from addnorm.stream.find.adds import Add
from addnorm.stream.find.chain import Chain
from addnorm.stream.find.closure import get_tolerance, relative_error
from addnorm.stream.find.inspection import Stream
from addnorm.stream.find.operators import Factor
from addnorm.stream.find.sublayers import Sublayer
from addnorm.stream.layout.token_layout import TokenLayout
from addnorm.stream.record.plan import find_use, write_probe
from addnorm.stream.record.schema import Balance, MemoryMap
from addnorm.stream.record.statistics import OmittedError, TokenMask, Tokens

__all__ = ["TOKENS", "TokenSample"]

TOKENS = 64


class TokenSample:
    """Sample of the tokens of one stream in one step.

    Args:
        stream: the inspected stream.
        tokens: mask of the tokens to sample from.
        read_live: returns a parameter as the model uses it during the operator that is observed; None: parameters do not change
            during the forward.
    """

    def __init__(
        self, stream: Stream, tokens: TokenMask, read_live: Callable[[Value], Tensor | None] | None = None
    ) -> None:
        self.stream = stream
        self.chain: Chain = stream.chain
        self.tokens = tokens
        self.read_live = read_live
        self._states: dict[Value, Tensor] = {}
        self._parameters: dict[Value, Tensor] = {}  # copies of the gains that are parameters, as of the forward
        self._chosen: Tensor | None = None  # indices of the sampled tokens
        self._count = 0
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
                self._parameters[gain] = gain.tensor.detach().clone()

    def find_obstacle(self) -> str:
        """Return why components cannot be propagated: a step on the stream that is not a constant factor; else empty text."""
        for k, add in enumerate(self.chain.adds):
            if any(factor.kind != "constant" for factor in add.residual_path.factors):
                return f"add {k + 1} multiplies the stream by more than a constant"
            if k and (reason := find_step_obstacle(k, add, "constant")):
                return reason
            scales = (scale for sublayer in self.chain.sublayers[k] for scale in write_probe(sublayer).scales)
            if any(math.prod(scale.shape) not in (1, self.stream.width) for scale in scales):
                return f"add {k + 1} multiplies a write by another factor for each token"
        return ""

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

        def write(sublayer: Sublayer) -> Tensor:
            probe = write_probe(sublayer)
            part = (self._states[probe.value] * probe.factor).expand(states[0].shape)
            for scale in probe.scales:
                part = part * scale.tensor.detach().double().reshape(-1)  # a number, or one for each feature
            return part

        def scale_residual(add: Add, part: Tensor) -> Tensor:
            number = _product(add.residual_path.factors)
            for term in (add.residual_path.term, *add.residual_path.sums):
                number *= term.factor
            return part * number

        def scale_sum(add: Add, part: Tensor) -> Tensor:
            return part * _product([*add.early_factors, *add.late_factors])

        states = [self._states[value] for value in self._observed_states()]
        limit = get_tolerance(*(value.tensor.dtype for value in values)) * len(states) ** 0.5
        sources: dict[str, None] = {}
        depths: list[dict[str, float]] = []
        closure = 0.0
        with torch.no_grad():
            for k, parts in enumerate(propagate(self.chain, names, states[0], write, scale_residual, scale_sum)):
                total = sum_components(parts)
                closure = max(closure, error := relative_error(states[k], total))
                if not error <= limit:
                    reason = f"at depth {k} the components add up to the stream with a relative error of {error:.1e}, "
                    return None, Balance(reason=f"{reason}tolerance {limit:.0e}")
                depths.append({name: float(share.mean()) for name, share in source_shares(parts, total).items()})
                sources |= dict.fromkeys(parts)
            norms = torch.linalg.vector_norm(states[-1], dim=-1)
            direction = states[-1] / norms.clamp_min(torch.finfo(norms.dtype).tiny)[:, None]
            amounts = {name: float((part * direction).sum(-1).mean()) for name, part in parts.items()}
        balance = Balance(tuple(amounts), tuple(amounts.values()), float(norms.mean()), norms.numel(), closure)
        return ([*sources], [[depth.get(source, 0.0) for source in sources] for depth in depths]), balance

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
                self._states[value] = rows.reshape(1, -1).double()
                return
            if self._chosen is None and value not in self._observed_states():
                self._reason = self._reason or "a write is computed before the stream begins"
                return
            if self._chosen is None:
                self._count = count
                self._chosen = self._choose(tokens)
            if count == self._count:
                places = torch.unravel_index(self._chosen, rows.shape[:-1])
                self._states[value] = rows[places].double()
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
        return among[:: max(1, -(-among.numel() // TOKENS))]

    def _keep_live(self, gain: Value, tensor: Tensor) -> None:
        live = self.read_live(gain) if self.read_live is not None else None
        if live is not None:
            self._parameters[gain] = live.detach().clone()

    def _keep_gain(self, gain: Value, tensor: Tensor) -> None:
        gain.tensor = tensor.detach().clone()  # it may be a view of a parameter


def _product(factors: list[Factor]) -> float:
    return math.prod((factor.number for factor in factors), start=1.0)
