"""The states of a residual program as sums of one component for each source, with all coefficients and statistics frozen.

    X_k = c_0 + c_1 + ... + c_k        sources: x_0 (the embeddings), every sublayer's write, joined tokens, the biases on the way

The operators between the sources are linear in what they carry. So each of them is computed again in float64 on the component
of one source after the other, with its other operands and the denominators of norms as in the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from addnorm._util.numbers import format_count
from addnorm.stream.dataflow.graph import Value, walk
from addnorm.stream.decomposition import Decomposition
from addnorm.stream.program.carried import AFFINE, Carrier
from addnorm.stream.program.maps import join_streams, replay
from addnorm.stream.program.result import Program
from addnorm.stream.program.spine import list_carried_inputs
from addnorm.stream.shares import BIASES, Components, join_components, source_shares, sum_components

START = "x_0"  # the component of the embeddings
JOINED = "joined tokens"  # the component of learned tokens that join the streams after the first write


class ProgramDecomposition(Decomposition):
    """Decomposition of the states of a `Program`, and of what the sublayers read.

    Depth k is the state after k sublayers: all streams, `(*, n, d)`. The last depth is the read at the end before its norm,
    `(*, d)`.

    Attributes:
        program: the inspected `Program`.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        end = program.spine.end if program.head.norm is None else program.head.norm.x
        self._targets = [*program.spine.states, [end]]
        sources = [site.id for site in program.sites]
        steps = format_count(len(sources), "sublayer")
        super().__init__("the last read", steps, len(sources) + 1, sources, program.tolerance)

    def state(self, depth: int = -1) -> Tensor:
        """Return the recorded streams at a depth, `(*, n, d)`, or the read at the end, `(*, d)`, in float64."""
        k = self._check_depth(depth)
        return self._join(self._targets[k], k == self.depth)

    def read(self, k: int) -> Components:
        """Return the component of each source in what sublayer k reads, before its norm, `(*, d)` in float64.

        The components sum to C X. If the coefficients are one number per token, the component of sublayer j is its write w_j
        times such a number, kappa_kj. Several reads of a sublayer are streams, `(*, n, d)`.

        Raises:
            IndexError: there is no such sublayer.
        """
        reads = self.program.sites[k].reads
        targets = [part.norm.x if part.norm is not None else part.target for part in reads]
        return self._join_all(targets, next(self._propagate([targets])), is_read=True)

    def lens(self, head: Any = None, *, norm: Any = None) -> list[Tensor]:
        """Raise a ValueError: the weights of the last read are for the end, not for streams at earlier depths."""
        raise ValueError(
            "lens takes a model of one stream, expected another tool: the last read's weights are those of the streams at the "
            "end, and no earlier depth has any. state(depth) has the streams, for a read of your own."
        )

    def _propagate(self, targets: Sequence[Sequence[Value]]) -> Iterator[dict[Value, Components]]:
        program = self.program
        sources = dict.fromkeys([*program.spine.starts, *program.spine.states[0]], START)
        sources |= {site.write.value: site.id for site in program.sites}
        return propagate_components(program.carrier, sources, targets)

    def _iter_components(self) -> Iterator[Components]:
        for k, parts in enumerate(self._propagate(self._targets)):
            yield self._join_all(self._targets[k], parts, k == self.depth)

    def _join_all(self, target: Sequence[Value], parts: dict[Value, Components], is_read: bool) -> Components:
        joined = join_components([parts[value] for value in target], partial(self._join, target, is_read))
        names = (START, *(site.id for site in self.program.sites), JOINED, BIASES)
        return {name: joined[name] for name in names if name in joined}

    def _join(self, target: Sequence[Value], is_read: bool, tensors: Sequence[Tensor] | None = None) -> Tensor:
        """Return the streams of a target as one tensor `(*, n, d)`; the only stream of a read as `(*, d)`."""
        whole = join_streams(self.program.carrier, target, tensors)
        whole = whole.reshape(*self.program.carrier.list_sizes(target[0]), *whole.shape[1:])
        return whole.squeeze(-2) if is_read and whole.shape[-2] == 1 else whole

    def _measure_shares(self, depth: int, parts: Components) -> dict[str, Tensor]:
        """Return the share of each source in each token, with all streams of the token taken as one vector."""
        tokens = len(self.program.carrier.list_sizes(self._targets[depth][0]))
        flat = {name: part.flatten(tokens) for name, part in parts.items()}
        return source_shares(flat, sum_components(flat))

    def _flatten_mask(self, depth: int, tokens: Tensor | None) -> Tensor | slice:
        sizes = self.program.carrier.list_sizes(self._targets[depth][0])
        if tokens is not None and [*tokens.shape] != sizes:
            raise ValueError(
                f"the mask does not fit the streams at depth {depth}: its shape is {tuple(tokens.shape)}, expected "
                f"{tuple(sizes)}, in the model's own order."
            )
        return slice(None) if tokens is None else tokens.bool().reshape(-1)

    def _normalize(self) -> tuple[Components, Tensor | None]:
        end = self.program.spine.end
        parts = self._join_all([end], next(self._propagate([[end]])), is_read=True)
        return parts, self._join([end], is_read=True)


def propagate_components(
    carrier: Carrier, sources: dict[Value, str], targets: Sequence[Sequence[Value]]
) -> Iterator[dict[Value, Components]]:
    """Yield the components of the values of each target, in the layout of the run and in float64.

    Args:
        carrier: the carried values.
        sources: the values in which components begin, each with the name of its component.
        targets: lists of carried values, in the order of the run.
    """

    def follow(value: Value) -> list[Value]:
        return [] if value in sources else list_carried_inputs(carrier, value)

    region = sorted(walk([v for target in targets for v in target], follow), key=lambda value: value.index)
    first = min(value.index for value, name in sources.items() if name != START)
    last_use = {other: value.index for value in region for other in follow(value)}
    known: dict[Value, Components] = {}
    done = 0
    for value in region:
        known[value] = (
            {sources[value]: value.exact}
            if value in sources
            else _compute(carrier, value, known, START if value.index < first else JOINED)
        )
        while done < len(targets) and all(v in known for v in targets[done]):
            yield {v: known[v] for v in targets[done]}
            done += 1
        needed = {v for target in targets[done:] for v in target}
        for v in [v for v in known if last_use.get(v, -1) < value.index and v not in needed]:
            del known[v]


def _compute(carrier: Carrier, value: Value, known: dict[Value, Components], joined: str) -> Components:
    """Return the components of a carried value, computed from the components of the inputs that its operator carries.

    `joined` is the name of the component of constant tokens that a `cat` or `stack` adds, such as a learned class token.
    """
    op = value.op
    assert op is not None
    carried = list_carried_inputs(carrier, value)
    zeros = {v: v.tensor.new_zeros(v.shape, dtype=torch.float64) for v in carried}
    is_join = op.name in ("cat", "stack")  # perhaps with a learned token, such as a class token
    constant = replay(value, carried, zeros) if is_join or op.name in AFFINE else None
    parts: Components = {}
    for name in dict.fromkeys(name for v in carried for name in known[v]):
        inputs = {v: known[v].get(name, zeros[v]) for v in carried}
        parts[name] = replay(value, carried, inputs)
        if constant is not None:
            parts[name] = parts[name] - constant
    shift = constant if value.norm is None else value.norm.shift(torch.float64)
    if isinstance(shift, Tensor) and bool(shift.any()):
        name = joined if is_join else BIASES
        parts[name] = parts.get(name, value.tensor.new_zeros(value.shape, dtype=torch.float64)) + shift
    return parts
