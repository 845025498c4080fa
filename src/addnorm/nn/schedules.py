"""The loops that run the rows of a wiring, one layer at a time: `SCHEDULES` by name.

A schedule consists of three functions over its state, a tuple of tensors: `start` makes the state from x_0 and the first layer,
`layer` runs the sublayers of one layer, `end` returns the output. `following` is the next layer, or None after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from addnorm import functional
from addnorm.nn.executor import NO_NORM, Connection, Reader, StackRun, with_seed
from addnorm.wirings.row import Row

__all__ = ["SCHEDULES", "Schedule"]

State = tuple[Tensor, ...]
Layer = Sequence[Connection]


class Schedule(NamedTuple):
    """The functions that run the rows of a stack."""

    start: Callable[[StackRun, Tensor, Layer], State]
    layer: Callable[[StackRun, State, Layer, Layer | None], State]
    end: Callable[[StackRun, State], Tensor]
    supports: Callable[[Row], bool] = lambda row: True
    supported_rows: str = "any"  # `supports` in words
    ignores_layers: bool = False  # several layers may run as one


def _reader_after(run: StackRun, following: Layer | None) -> Reader:
    """Return the reader of the stream after a layer."""
    return run.end if following is None else following[0]


# Rows: every sublayer reads the stream after the sublayer before. Its add and the next norm are one call.


def _start_rows(run: StackRun, x: Tensor, first: Layer) -> State:
    return x, run.read(x, first[0])


def _run_rows(run: StackRun, state: State, layer: Layer, following: Layer | None) -> State:
    x, read = state
    for connection, reader in zip(layer, [*layer[1:], _reader_after(run, following)], strict=True):
        x, read = run.add_and_norm(connection, x, run.branch(connection, read), reader)
    return x, read


def _end_rows(run: StackRun, state: State) -> Tensor:
    return state[-1]


# Parallel: x' = x + f_1(N x) + f_2(N x). The sublayers of a layer read the same stream.


def _parallel_reads(run: StackRun, x: Tensor, layer: Layer, first: Tensor) -> State:
    """Return the input of each sublayer of a layer: its own norm of x, or the input of the first sublayer."""
    return first, *(
        first if connection._modules["norm_in"] is None else run.read(x, connection) for connection in layer[1:]
    )


def _start_parallel(run: StackRun, x: Tensor, first: Layer) -> State:
    return x, *_parallel_reads(run, x, first, run.read(x, first[0]))


def _run_parallel(run: StackRun, state: State, layer: Layer, following: Layer | None) -> State:
    x, *reads = state
    for connection, read in zip(layer[:-1], reads[:-1], strict=True):
        x, _ = run.add_and_norm(connection, x, run.branch(connection, read), None)
    x, read = run.add_and_norm(layer[-1], x, run.branch(layer[-1], reads[-1]), _reader_after(run, following))
    return (x, read) if following is None else (x, *_parallel_reads(run, x, following, read))


# Two streams: u' = N(u + f(u)), v' = v + f(u); the output is u + N(v).


def _start_two(run: StackRun, x: Tensor, first: Layer) -> State:
    return x, x


def _run_two(run: StackRun, state: State, layer: Layer, following: Layer | None) -> State:
    u, v = state
    for connection in layer:
        branch = run.branch(connection, run.from_stream(u))
        options = with_seed(run.add_options(connection, u), u)
        v = run.add(connection, v, branch, options)
        u, _ = run.add_and_norm(connection, u, branch, NO_NORM, options)
    return u, v


def _end_two(run: StackRun, state: State) -> Tensor:
    u, v = state
    norm = run.end._modules["norm_in"]
    return run.from_stream(functional.add_residual(u, v if norm is None else run.normalize(v, norm)))


# Bottom to top: the last norm of a layer reads a sum that also contains the layer's input.


def _run_bottom_to_top(run: StackRun, state: State, layer: Layer, following: Layer | None) -> State:
    bottom, read = state
    x = bottom
    for connection in layer[:-1]:
        x, read = run.add_and_norm(connection, x, run.branch(connection, read), NO_NORM)
    branch = run.branch(layer[-1], read)
    total = functional.add_residual(x, bottom)
    return run.add_and_norm(layer[-1], total, branch, _reader_after(run, following))


def _is_post_row(row: Row) -> bool:
    return row.a == row.c == 1.0 and row.norm_out and not row.norm_in


def _is_parallel_row(row: Row) -> bool:
    return row.is_sum and (row.norm_in or row.c == 1.0)


POST_ROWS = "a = c = 1, N_out and no N_in"
SCHEDULES: dict[str, Schedule] = {
    "rows": Schedule(_start_rows, _run_rows, _end_rows, ignores_layers=True),
    "parallel": Schedule(
        _start_parallel, _run_parallel, _end_rows, _is_parallel_row, "a = 1, no N_out, and c = 1 without N_in"
    ),
    "two_streams": Schedule(_start_two, _run_two, _end_two, _is_post_row, POST_ROWS),
    "bottom_to_top": Schedule(_start_rows, _run_bottom_to_top, _end_rows, _is_post_row, POST_ROWS),
}
