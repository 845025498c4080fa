"""Measurements of a stack with several streams: states, gradients and coefficients by depth and stream.

The pending write of each sublayer is added before the next sublayer is called, so that each state is a tensor with a gradient.
The values differ from those of the fused call by round-off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.lab.toy_model import token_similarity
from addnorm.nn import ResidualStack
from addnorm.nn.state import Site, StreamState
from addnorm.nn.step import collapse, finish, read
from addnorm.nn.unrolling import find_gains, to_entries
from addnorm.wirings.stage import identity

Numbers = dict[str, Any]


class StreamsRecorder:
    """The states of one call of a stack with several streams, and of its backward.

    Use it as a context in which the model is called once. Afterwards `statistics` and `coefficients` return plain numbers.

    Args:
        stack: the stack.

    Attributes:
        states: the streams before each sublayer and after the last one: one tensor `(*, n, d_model)`, or n tensors.
        sites: a `Site` for each sublayer, with its write and coefficients.
        last_read: C X of the head, before the final norm.

    Raises:
        ValueError: the stack has one stream.

    Example:
        >>> from addnorm.lab.streams import StreamsRecorder
        >>> stack = addnorm.ResidualStack([torch.nn.Linear(8, 8) for _ in range(4)], 8, "mhc")
        >>> with StreamsRecorder(stack) as recorder:
        ...     stack(torch.randn(2, 5, 8)).square().mean().backward()
        >>> recorder.statistics()["streams"][0] == [recorder.statistics()["streams"][0][0]] * 4  # four copies of x_0
        True
    """

    def __init__(self, stack: ResidualStack) -> None:
        if not stack.has_streams:
            raise ValueError(
                f"stack has the wiring {stack.wiring.name!r}, expected one with several streams: addnorm.record measures others."
            )
        self.stack = stack
        self.states: list[tuple[Tensor, ...]] = []
        self.sites: Sequence[Site] = ()
        self.collapse: Any = None
        self.last_read: Any = None
        self._handles: list[Any] = []

    def __enter__(self) -> StreamsRecorder:
        for connection in self.stack.connections:
            self._handles.append(connection.register_forward_pre_hook(self._before, prepend=True))
        head: Any = self.stack.head
        self._handles.append(head.register_forward_pre_hook(self._before, prepend=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Add the pending write to the streams and store the streams in `states`: a hook before each sublayer and the head."""
        state, *others = args
        head: Any = self.stack.head
        if not isinstance(state, StreamState):
            return args
        streams = finish(state)
        if module is self.stack.connections[0]:
            self.states, state = [], state._replace(sites=())
        tensors = (streams,) if isinstance(streams, Tensor) else streams
        for x in tensors:
            if x.requires_grad:
                x.retain_grad()
        self.states.append(tensors)
        if module is head:
            self.sites = state.sites or ()
            reading = read(head, head.stage, state._replace(x=streams, pending=None), (None,))
            self.collapse, self.last_read = reading.collapse, reading.reads[0].detach()
        return (state._replace(x=streams, pending=None), *others)

    def statistics(self) -> Numbers:
        """Return lists over the places, x_0 and after each sublayer, each of numbers.

        `streams` and `gradients` have one number for each stream: the root mean square of the state, and the norm of the loss's
        gradient. `stream` and `gradient` are the same for all streams together, `similarity` is the mean cosine of two tokens.
        `ratio` is the root mean square of a sublayer's write divided by that of the streams before the sublayer. `reads` is the
        root mean square of C X, the sublayer's first input before its norm. The last of `reads` is the head's C X.
        """
        states = [self._split(state) for state in self.states]
        gradients = [self._split_gradient(state) for state in self.states]
        streams = [[rms(x) for x in state] for state in states]
        total = [rms(torch.stack(state)) for state in states]
        writes = [rms(site.write.detach()) for site in self.sites]
        return {
            "streams": streams,
            "gradients": [[float(g.double().norm()) for g in gradient] for gradient in gradients],
            "stream": total,
            "gradient": [float(torch.stack(gradient).double().norm()) for gradient in gradients],
            "similarity": [token_similarity(torch.cat(state, -1).flatten(0, -3)) for state in states],
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
            rows = site.collapse if _is_nested(site.collapse) else (site.collapse,)
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
        """Yield C X of every sublayer and of the head."""
        for state, row in zip(self.states, [*(site.collapse for site in self.sites), self.collapse], strict=True):
            yield collapse(row[0] if _is_nested(row) else row, state[0] if self.stack.is_stacked else state)

    def _split(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        each = state[0].unbind(-2) if self.stack.is_stacked else state
        return tuple(x.detach() for x in each)

    def _split_gradient(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        grads = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in state)
        return grads[0].unbind(-2) if self.stack.is_stacked else grads


def measure_streams(stack: ResidualStack, call: Callable[[], Tensor]) -> Numbers:
    """Return the statistics and coefficients by depth of one forward and backward. `call` runs the model and returns the loss.

    The `.grad` of the stack's parameters is as before afterwards.
    """
    with StreamsRecorder(stack) as recorder, _without_gradients(stack):
        call().backward()
        return {**recorder.statistics(), "coefficients": recorder.coefficients()}


@contextmanager
def _without_gradients(stack: nn.Module) -> Iterator[None]:
    before = [(p, p.grad) for p in stack.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def amax_gains(mixes: Sequence[Any]) -> Numbers | None:
    """Return the largest gains of mixing matrices `(*, n, n)` and of their products, averaged over tokens.

    The forward gain of a matrix is its largest absolute row sum, the backward gain its largest absolute column sum. `forward` has
    the forward gains of A_l ... A_1, `backward` the backward gains of A_L ... A_l, and `site` the larger gain of each A_l.
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

    forward, backward = [matrices[0]], [matrices[-1]]
    for matrix in matrices[1:]:
        forward.append(matrix @ forward[-1])
    for matrix in reversed(matrices[:-1]):
        backward.append(backward[-1] @ matrix)
    return {
        "site": [max(gain(matrix, -1), gain(matrix, -2)) for matrix in matrices],
        "forward": [gain(matrix, -1) for matrix in forward],
        "backward": [gain(matrix, -2) for matrix in reversed(backward)],
    }


def rms(x: Tensor) -> float:
    """Return the root mean square of all elements, in float64."""
    return float(x.double().square().mean().sqrt())


def _is_nested(rows: Any) -> bool:
    return isinstance(rows, tuple) and isinstance(rows[0], tuple)


def _mean_entries(entries: Sequence[Any]) -> list[float]:
    return [float(entry.detach().double().mean()) if isinstance(entry, Tensor) else float(entry) for entry in entries]


def _mean_matrix(mix: Any, n: int) -> list[list[float]]:
    """Return the matrix `mix`, `n` by `n`, with its entries averaged over tokens. `mix` None is the identity."""
    if not isinstance(mix, Tensor):
        return [_mean_entries(row) for row in (identity(n) if mix is None else mix)]
    mean: list[list[float]] = mix.detach().double().reshape(-1, *mix.shape[-2:]).mean(0).tolist()
    return mean
