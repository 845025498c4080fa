"""The loops that run the rows of a wiring, a layer at a time: `FLOWS` by name.

A flow is three functions over its state, a tuple of tensors: `start` makes it from x_0 and the first layer, `layer` takes it
through the sublayers of one, `end` makes the output of it. `after` is the layer that comes next, or None at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from addnorm import functional
from addnorm.nn.executor import NOTHING, End, Pass, seeded

if TYPE_CHECKING:
    from addnorm.nn.residual import SublayerConnection
    from addnorm.nn.stack import ResidualStack
    from addnorm.wirings.spec import Row

__all__ = ["FLOWS", "Flow"]

State = tuple[Tensor, ...]
Layer = Sequence["SublayerConnection"]


class Flow(NamedTuple):
    """How the rows of a stack are run."""

    start: Callable[[Pass, ResidualStack, Tensor, Layer], State]
    layer: Callable[[Pass, ResidualStack, State, Layer, Layer | None], State]
    end: Callable[[Pass, ResidualStack, State], Tensor]
    fits: Callable[[Row], bool] = lambda row: True
    rows: str = "any"  # `fits` in words
    at_once: bool = False  # layers mean nothing to it: it may run all as one


def _following(stack: ResidualStack, after: Layer | None) -> SublayerConnection | End:
    """What reads the stream after a layer."""
    return End(stack.norm_final) if after is None else after[0]


# Rows: every sublayer reads what the one before it left. The add of one and the norm of the next are one call.


def _rows_start(run: Pass, stack: ResidualStack, x: Tensor, first: Layer) -> State:
    return x, run.read(x, first[0])


def _rows_layer(run: Pass, stack: ResidualStack, state: State, layer: Layer, after: Layer | None) -> State:
    x, read = state
    for here, following in zip(layer, [*layer[1:], _following(stack, after)], strict=True):
        x, read = run.join(here, x, run.branch(here, read), following)
    return x, read


def _rows_end(run: Pass, stack: ResidualStack, state: State) -> Tensor:
    return state[-1]


# Parallel: x' = x + f_1(N x) + f_2(N x). The sublayers of a layer read the same stream.


def _parallel_reads(run: Pass, x: Tensor, layer: Layer, first: Tensor) -> State:
    """What each sublayer of a layer reads: of its own norm, or the same as the first."""
    return first, *(first if here.norm_in is None else run.read(x, here) for here in layer[1:])


def _parallel_start(run: Pass, stack: ResidualStack, x: Tensor, first: Layer) -> State:
    return x, *_parallel_reads(run, x, first, run.read(x, first[0]))


def _parallel_layer(run: Pass, stack: ResidualStack, state: State, layer: Layer, after: Layer | None) -> State:
    x, *reads = state
    for here, read in zip(layer[:-1], reads[:-1], strict=True):
        x, _ = run.join(here, x, run.branch(here, read), None)
    x, read = run.join(layer[-1], x, run.branch(layer[-1], reads[-1]), _following(stack, after))
    return (x, read) if after is None else (x, *_parallel_reads(run, x, after, read))


# Two streams: u' = N(u + f(u)), v' = v + f(u); the output is u + N(v).


def _two_start(run: Pass, stack: ResidualStack, x: Tensor, first: Layer) -> State:
    return x, x


def _two_layer(run: Pass, stack: ResidualStack, state: State, layer: Layer, after: Layer | None) -> State:
    u, v = state
    for here in layer:
        branch = run.branch(here, run.finish(u))
        options = seeded(run.options(here, u), u)
        v = run.add(here, v, branch, options)
        u, _ = run.join(here, u, branch, NOTHING, options)
    return u, v


def _two_end(run: Pass, stack: ResidualStack, state: State) -> Tensor:
    u, v = state
    v = v if stack.norm_final is None else run.normalize(v, stack.norm_final)
    return run.finish(functional.add_residual(u, v))


# Bottom to top: the last norm of a layer also gets the layer's input.


def _b2t_layer(run: Pass, stack: ResidualStack, state: State, layer: Layer, after: Layer | None) -> State:
    bottom, read = state
    x = bottom
    for here in layer[:-1]:
        x, read = run.join(here, x, run.branch(here, read), NOTHING)
    branch = run.branch(layer[-1], read)
    return run.join(layer[-1], functional.add_residual(x, bottom), branch, _following(stack, after))


def _post(row: Row) -> bool:
    return row.a == row.c == 1.0 and row.norm_out and not row.norm_in


def _parallel(row: Row) -> bool:
    return row.is_sum and (row.norm_in or row.c == 1.0)


FLOWS: dict[str, Flow] = {
    "rows": Flow(_rows_start, _rows_layer, _rows_end, at_once=True),
    "parallel": Flow(_parallel_start, _parallel_layer, _rows_end, _parallel, "a = 1, no N_out, and c = 1 without N_in"),
    "two_streams": Flow(_two_start, _two_layer, _two_end, _post, "a = c = 1, N_out and no N_in"),
    "bottom_to_top": Flow(_rows_start, _b2t_layer, _rows_end, _post, "a = c = 1, N_out and no N_in"),
}
