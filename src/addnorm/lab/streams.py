"""Measurements of a stack with one or several streams: states, gradients and coefficients by depth and stream.

The pending write of each sublayer is added before the next sublayer is called, so that each state is a tensor with a gradient.
The values differ from those of the fused call by round-off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from addnorm.nn import ResidualStack
from addnorm.nn.state import Site, StreamState
from addnorm.nn.step import collapse, finish, read
from addnorm.nn.unrolling import find_gains, to_entries, to_row
from addnorm.wirings.stage import identity

Numbers = dict[str, Any]  # JSON types, with NaN and infinity
State = tuple[Tensor, ...]  # one tensor of all streams, or n tensors
ONE_STREAM = (1.0,)  # C of one stream


class StreamsRecorder:
    """Recorder of the states of one call of a stack, and of their gradients.

    Use it as a context in which the model is called once. Afterwards `to_dict` returns plain numbers.

    Args:
        stack: the stack.

    Attributes:
        states: the streams before each sublayer and after the last one, as a tuple: one tensor, `(*, d_model)` or
            `(*, n, d_model)`, or n tensors `(*, d_model)`.
        sites: a `Site` for each sublayer, with its write and coefficients.
        last_read: C X of the last read, before the final norm.

    Example:
        >>> from addnorm.lab.streams import StreamsRecorder
        >>> stack = addnorm.ResidualStack([torch.nn.Linear(8, 8) for _ in range(4)], 8, "mhc")
        >>> with StreamsRecorder(stack) as recorder:
        ...     stack(torch.randn(2, 5, 8)).square().mean().backward()
        >>> recorder.statistics()["streams"][0] == [recorder.statistics()["streams"][0][0]] * 4  # four copies of x_0
        True
    """

    def __init__(self, stack: ResidualStack) -> None:
        self.stack = stack
        self.states: list[State] = []
        self.sites: Sequence[Site] = ()
        self.collapse: Any = ONE_STREAM
        self.last_read: Any = None
        self._handles: list[Any] = []

    def __enter__(self) -> StreamsRecorder:
        connections = self.stack.connections
        self._handles += [
            connection.register_forward_pre_hook(self._before, prepend=True) for connection in connections
        ]
        self._handles.append(connections[-1].register_forward_hook(self._after_last))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Store the streams before a sublayer."""
        state, *others = args
        if module is self.stack.connections[0]:
            self.states, state = [], state._replace(sites=())
        return (self._keep(state), *others)

    def _after_last(self, module: Any, args: Any, state: StreamState) -> StreamState:
        """Store the streams after the last sublayer, all writes and coefficients."""
        state = self._keep(state)
        self.sites, head = state.sites or (), self.stack.head
        if head is None:  # the c of a `Row` is a factor after its norm
            self.sites = [site._replace(collapse=ONE_STREAM) for site in self.sites]
            self.last_read = state.x.detach()
        else:
            reading = read(head, head.stage, state, (None,))
            self.collapse, self.last_read = reading.collapse, reading.reads[0].detach()
        for site in self.sites:
            _retain_grad(site.write)
        return state

    def _keep(self, state: StreamState) -> StreamState:
        """Add the pending write to the streams, and store them in `states`."""
        streams = finish(state)
        self.states.append((streams,) if isinstance(streams, Tensor) else streams)
        for x in self.states[-1]:
            _retain_grad(x)
        return state._replace(x=streams, pending=None)

    def to_dict(self) -> Numbers:
        """Return the `statistics`, and the `coefficients` under this key."""
        return {**self.statistics(), "coefficients": self.coefficients()}

    def statistics(self) -> Numbers:
        """Return the statistics of the streams, each as a list over the places: x_0, and after each sublayer.

        `streams` and `gradients` have one number for each stream: the root mean square of the state, and the norm of the loss's
        gradient. `stream` and `gradient` are the same for all streams together, `similarity` is the mean cosine of two tokens.
        `ratio` is the root mean square of a sublayer's write divided by that of the streams before the sublayer. `reads` is the
        root mean square of C X, the sublayer's first input before its norm. The last of `reads` is the head's C X.
        """
        states = [self._split(state) for state in self.states]
        gradients = [
            self._split(tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in state))
            for state in self.states
        ]
        streams = [[rms(x) for x in state] for state in states]
        total = [rms(torch.stack(state)) for state in states]
        writes = [rms(site.write.detach()) for site in self.sites]
        return {
            "streams": streams,
            "gradients": [[norm(g) for g in gradient] for gradient in gradients],
            "stream": total,
            "gradient": [norm(torch.stack(gradient)) for gradient in gradients],
            "similarity": [float(token_similarities(torch.cat(state, -1).double()).mean()) for state in states],
            "ratio": [
                None,
                *(write / before if before else None for write, before in zip(writes, total, strict=False)),
            ],
            "reads": [rms(read.detach()) for read in self._reads()],
        }

    def coefficients(self) -> Numbers:
        """Return A, B and C of every sublayer, each entry averaged over tokens and features, and their gains.

        `sites` has for each sublayer A as `mix`, B as `inject` and C as `collapse`, and `head` has the head's C. `direct_path`
        has the factor with which x_0 and each write reach the last read (`ResidualStack.direct_path`). `gains` is what
        `amax_gains` returns for all A.
        """
        dim = self.states[0][0].dim()
        sites = []
        for site, state in zip(self.sites, self.states, strict=False):
            n = len(self._split(state))
            inject = _mean_entries(to_entries(site.inject, dim))
            rows = (site.collapse,) if to_row(site.collapse) is site.collapse else site.collapse
            collapse = [_mean_entries(to_entries(row, dim)) for row in rows]
            sites.append({"mix": _mean_matrix(site.mix, n), "inject": inject, "collapse": collapse})
        gains = find_gains(
            self.sites, self.stack.wiring.embedding, self.collapse, self.stack.norm, stacked=self.stack.is_stacked
        )  # fmt: skip
        return {
            "sites": sites,
            "head": _mean_entries(to_entries(self.collapse, dim)),
            "direct_path": [float(gain.detach().mean()) for gain in gains],
            "gains": amax_gains([site.mix for site in self.sites]),
        }

    def _reads(self) -> Iterator[Tensor]:
        """Yield what each sublayer and the head read: the sum of the streams with the weights C, before the norm."""
        for state, row in zip(self.states, [*(site.collapse for site in self.sites), self.collapse], strict=True):
            yield collapse(to_row(row), state[0] if self.stack.is_stacked else state)

    def _split(self, state: State) -> State:
        """Return the streams of a state, or of its gradient, as n tensors without gradient."""
        each = state[0].unbind(-2) if self.stack.is_stacked else state
        return tuple(x.detach() for x in each)


def amax_gains(mixes: Sequence[Any]) -> Numbers | None:
    """Return the largest gains of mixing matrices `(*, n, n)` and of their products, averaged over tokens.

    The forward gain of a matrix is the largest absolute value of its row sums, the backward gain that of its column sums.
    `forward` has the forward gains of A_l ... A_1, `backward` the backward gains of A_L ... A_l, and `site` the larger gain of
    each A_l.
    Return None if a sublayer has no mixing matrix.

    Source: arXiv 2512.24880, section 3.

    Example:
        >>> from addnorm.lab.streams import amax_gains
        >>> amax_gains([torch.tensor([[1.0, 1.0], [0.0, 1.0]])] * 3)["forward"]
        [2.0, 3.0, 4.0]
    """
    if not mixes or not all(isinstance(mix, Tensor) for mix in mixes):
        return None
    matrices = [mix.detach().double() for mix in mixes]

    def gain(matrix: Tensor, dim: int) -> float:
        return float(matrix.sum(dim).abs().amax(-1).mean())

    forward = accumulate(matrices, lambda product, matrix: matrix @ product)
    backward = accumulate(reversed(matrices), lambda product, matrix: product @ matrix)
    return {
        "site": [max(gain(matrix, -1), gain(matrix, -2)) for matrix in matrices],
        "forward": [gain(product, -1) for product in forward],
        "backward": [gain(product, -2) for product in backward][::-1],
    }


def largest_gain(gains: Numbers | None) -> float | None:
    """Return the larger gain, forward or backward, of the product of all mixing matrices, from their `amax_gains`."""
    return None if gains is None else float(max(gains["forward"][-1], gains["backward"][0]))


def rms(x: Tensor) -> float:
    """Return the root mean square of all elements, in float64."""
    return float(x.double().square().mean().sqrt())


def norm(x: Tensor) -> float:
    """Return the norm of all elements, in float64."""
    return float(x.detach().double().norm())


def list_sites(sublayers: int) -> list[Numbers]:
    """Return the sites by depth as JSON types, without the final norm: x_0, then attention and feed-forward in turn."""
    sites: list[Numbers] = [{"id": "x_0", "kind": "start", "layer": None}]
    for i in range(sublayers):
        kind = ("attention", "feed-forward")[i % 2]
        sites.append({"id": f"{kind} {i // 2 + 1}", "kind": kind, "layer": i // 2})
    return sites


def token_similarities(x: Tensor) -> Tensor:
    """Return the mean cosine of two different tokens, `(*)`, for each sequence `(*, n, d_model)`: 1 if all are equal."""
    n = x.shape[-2]
    unit: Tensor = x / x.norm(dim=-1, keepdim=True)
    return (unit.sum(-2).square().sum(-1) - n) / (n * (n - 1))


def _retain_grad(x: Tensor) -> None:
    if x.requires_grad:
        x.retain_grad()


def _mean_entries(entries: Sequence[Any]) -> list[float]:
    return [float(entry.detach().double().mean()) if isinstance(entry, Tensor) else float(entry) for entry in entries]


def _mean_matrix(mix: Any, n: int) -> list[list[float]]:
    """Return the matrix `mix`, `n` by `n`, with its entries averaged over tokens. `mix` None is the identity."""
    if not isinstance(mix, Tensor):
        return [_mean_entries(row) for row in (identity(n) if mix is None else mix)]
    mean: list[list[float]] = mix.detach().double().reshape(-1, *mix.shape[-2:]).mean(0).tolist()
    return mean
