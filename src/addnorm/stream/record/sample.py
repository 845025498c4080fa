"""The memory map of a recorded step, the share of each source at every depth; and the balance sheet of the stream in the end.

Both are over a few tokens, so that they cost little: at most `TOKENS`, evenly spread, are kept of every state and every write,
for one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from addnorm.stream.dataflow.capture import Value
from addnorm.stream.dataflow.observers import Tap
from addnorm.stream.decompose import carried, shares_of, sum_of
from addnorm.stream.find.adds import Add
from addnorm.stream.find.closure import relative, tolerance
from addnorm.stream.find.inspect import Found
from addnorm.stream.find.inspection import Stream
from addnorm.stream.find.ops import Factor
from addnorm.stream.find.sites import Branch
from addnorm.stream.record.balance import Balance
from addnorm.stream.record.plan import Plan, write_of
from addnorm.stream.record.recording import Map
from addnorm.stream.record.statistics import Tokens, rows

__all__ = ["TOKENS", "Sample"]

TOKENS = 64


class Sample:
    """What is kept of one stream in one step."""

    def __init__(self, plan: Plan, name: str, tokens: Tokens) -> None:
        self.stream, _ = plan.streams[name]
        self.found: Found = self.stream.found
        self.tokens = tokens
        self._kept: dict[Value, Tensor] = {}
        self._gains: dict[Value, Tensor] = {}  # the parameters among the norms' gains, as the forward found them
        self._chosen: Tensor | None = None
        self._count = 0

    def taps(self, stream: Stream) -> Iterator[tuple[Value, Tap]]:
        """What is to be heard; nothing, where it could not be put together."""
        if self.refusal():
            return
        for value in dict.fromkeys(self._values()):
            yield value, partial(self._keep, value)
        gains = [gain for norms in self.found.norms_out for norm in norms for gain in (norm.weight, norm.bias)]
        gains += [scale for branches in self.found.branches for branch in branches for scale in write_of(branch).scales]
        for gain in filter(None, gains):
            if gain.op is not None:
                yield gain, partial(self._now, gain)
            else:  # an optimizer may have changed it by the time that the map is asked for
                self._gains[gain] = gain.tensor.detach().clone()

    def refusal(self) -> str:
        """Why components cannot be carried through, where a step on the stream is none that numbers alone describe."""
        for k, add in enumerate(self.found.adds):
            if _number(add.kept.factors) is None:
                return f"add {k + 1} multiplies the stream by more than a constant"
            if k and add.retokened:
                return f"tokens join or leave the stream before add {k + 1}"
            if k and add.source is not None:
                return f"add {k + 1} adds to a norm what was read before it"
            if k and _number([*add.early, *add.late]) is None:
                return f"the stream is multiplied or masked between add {k} and add {k + 1}"
        return ""

    def made(self) -> tuple[Map | None, Balance]:
        """The map: the sources, and their mean shares at each depth. And the sheet. Neither where components do not add up."""
        if refusal := self.refusal():
            return None, Balance(refused=refusal)
        with self._as_then():
            return self._made()

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        """The gains are those of the forward."""
        present = {gain: gain.tensor for gain in self._gains}
        for gain, tensor in self._gains.items():
            gain.tensor = tensor
        try:
            yield
        finally:
            for gain, tensor in present.items():
                gain.tensor = tensor

    def _made(self) -> tuple[Map | None, Balance]:
        values = [*dict.fromkeys(self._values())]
        missing = sum(value not in self._kept for value in values)
        if missing or not self._kept:
            return None, Balance(refused=f"{missing} of {len(values)} states and writes were not met in the last step")
        names = {id(site.found[2]): site.id for site in self.stream.sites}

        def write(branch: Branch) -> Tensor:
            heard = write_of(branch)
            part = self._kept[heard.value] * heard.factor
            for scale in heard.scales:
                part = part * scale.tensor.detach().double()
            return part

        def keep(add: Add, part: Tensor) -> Tensor:
            number = _number(add.kept.factors) or 1.0
            for term in (add.kept.term, *add.kept.sums):
                number *= term.factor
            return part * number

        def late(add: Add, part: Tensor) -> Tensor:
            return part * (_number([*add.early, *add.late]) or 1.0)

        states = [self._kept[value] for value in self._states()]
        limit = tolerance(*(value.tensor.dtype for value in values)) * len(states) ** 0.5
        sources: dict[str, None] = {}
        depths: list[dict[str, float]] = []
        closure = 0.0
        with torch.no_grad():
            for k, parts in enumerate(carried(self.found, names, states[0], write, keep, late)):
                total = sum_of(parts)
                closure = max(closure, off := relative(states[k], total))
                if not off <= limit:
                    text = f"at depth {k} the components add up to the stream with a relative error of {off:.1e}, "
                    return None, Balance(refused=f"{text}allowed {limit:.0e}")
                depths.append({name: float(share.mean()) for name, share in shares_of(parts, total).items()})
                sources |= dict.fromkeys(parts)
            length = torch.linalg.vector_norm(states[-1], dim=-1)
            along = states[-1] / length.clamp_min(torch.finfo(length.dtype).tiny)[:, None]
            amounts = {name: float((part * along).sum(-1).mean()) for name, part in parts.items()}
        sheet = Balance(tuple(amounts), tuple(amounts.values()), float(length.mean()), length.numel(), closure)
        return ([*sources], [[depth.get(source, 0.0) for source in sources] for depth in depths]), sheet

    def _states(self) -> list[Value]:
        norms = self.found.norms_out[-1]
        return [add.x for add in self.found.adds] + [norms[-1].y if norms else self.found.adds[-1].out]

    def _values(self) -> Iterator[Value]:
        yield from self._states()
        for branches in self.found.branches:
            for branch in branches:
                yield write_of(branch).value

    def _keep(self, value: Value, tensor: Tensor) -> None:
        with torch.no_grad():
            t = rows(tensor.detach(), self.stream.width, self.stream.axis)
            if t.shape[-1] != self.stream.width:
                return
            flat = t.reshape(-1, self.stream.width)
            if self._chosen is None:
                self._count = flat.shape[0]
                mask = self.tokens.of(t)
                among = torch.arange(flat.shape[0], device=flat.device) if mask is None else mask.nonzero().reshape(-1)
                step = max(1, -(-among.numel() // TOKENS))
                self._chosen = among[::step]
            if flat.shape[0] == self._count and self._chosen.numel():
                self._kept[value] = flat[self._chosen].double()
            elif flat.shape[0] == 1:  # a bias, the same for all
                self._kept[value] = flat.double().expand(self._chosen.numel(), -1)

    def _now(self, gain: Value, tensor: Tensor) -> None:
        gain.tensor = tensor.detach().clone()  # it may be a view of a parameter


def _number(factors: list[Factor]) -> float | None:
    """The product of constant factors; None where there are others."""
    number = 1.0
    for factor in factors:
        if factor.kind != "constant":
            return None
        number *= factor.number
    return number
