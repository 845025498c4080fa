"""One layer of a stack: its sublayers, and the way in which they read and write the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn, overload

from torch import Tensor, nn

from addnorm import functional
from addnorm.nn.executor import StreamState, add, without_views
from addnorm.nn.removal import find_inside
from addnorm.nn.residual import SublayerConnection, check_kwargs, check_tensor, to_dtype
from addnorm.wirings.row import Row

__all__ = ["FLOWS", "Flow", "ResidualLayer", "refuse_state"]


class ResidualLayer(nn.Module):
    r"""The sublayers of one layer of a `ResidualStack`, each with its residual connection.

    The stack calls each layer with the stream as the layer before left it: `layer(state, **context)` returns the next state. The
    write of the last sublayer may still be pending; the next layer, which owns the norm that follows, adds it in the same call.
    So a layer uses no parameter of another one: hooks, `compile()`, `fully_shard`, activation checkpoints and pipeline stages
    treat it like any other module. A hook or a module in its place must return a state too, such as `output._replace(x=...)`.

    A layer that is called with a tensor `(*, d_model)` returns the tensor after its last write.

    Args:
        connections: a `SublayerConnection` for each sublayer.
        flow: how the sublayers read the stream, the flow of the wiring.

    Attributes:
        connections: an `nn.ModuleList` of them.
    """

    def __init__(self, connections: Iterable[SublayerConnection], flow: str = "rows") -> None:
        super().__init__()
        self.connections = nn.ModuleList(connections)
        self.flow = flow

    @overload
    def forward(self, state: StreamState, **context: Any) -> StreamState: ...

    @overload
    def forward(self, state: Tensor, **context: Any) -> Tensor: ...

    def forward(self, state: StreamState | Tensor, **context: Any) -> StreamState | Tensor:
        """Return the state after this layer; the keyword arguments are the sublayers'.

        Raises:
            ValueError: the layer is called with a tensor, and its wiring has two streams.
        """
        if not isinstance(state, StreamState):
            return self._call_alone(state, context)
        connections: Any = self._modules["connections"]  # without the time of `nn.Module.__getattr__`
        state = FLOWS[self.flow].run([*connections._modules.values()], state, context)
        return without_views(state) if self._forward_hooks else state

    def _call_alone(self, x: Tensor, context: dict[str, Any]) -> Tensor:
        """Return the stream after this layer as a tensor, for a caller that is no stack."""
        check_tensor(x)
        if FLOWS[self.flow].has_dual:
            raise ValueError(
                f"state is a tensor and the layer's flow is {self.flow!r}, expected a StreamState: a tensor has one of the two "
                "streams only; call the stack."
            )
        connections = find_inside(self, SublayerConnection)
        accepted = [connection.accepted_kwargs for connection in connections]
        check_kwargs(context, None if None in accepted else frozenset().union(*accepted))  # type: ignore[arg-type]  # without None
        residual_dtype = connections[0].residual_dtype if connections else None
        dtype = None if residual_dtype is None else x.dtype
        state = self.forward(StreamState(to_dtype(x, residual_dtype), dtype=dtype), **context)
        return to_dtype(state.x if state.pending is None else add(state.x, state.pending), dtype)

    def extra_repr(self) -> str:
        """Return the flow if it is not the usual one."""
        return "" if self.flow == "rows" else self.flow


def refuse_state(layers: nn.ModuleList, layer: nn.Module, state: Any) -> NoReturn:
    """Raise an error for a layer of a stack that returned something else than a state."""
    if isinstance(state, tuple):
        check_tensor(state)  # raises: a reentrant checkpoint made it plain
    place = [*layers].index(layer)
    raise TypeError(
        f"layers[{place}] ({type(layer).__name__}) returned {type(state).__name__}, expected a StreamState: a module among the "
        "layers, and a hook on one, passes the stream on with its pending write; return state._replace(x=...)."
    )


Connections = list[Any]  # SublayerConnections, or modules that wrap them
Context = dict[str, Any]


def _run_rows(connections: Connections, state: StreamState, context: Context) -> StreamState:
    """Let every sublayer read the stream after the sublayer before."""
    for connection in connections:
        state = connection(state, **context)
    return state


def _run_parallel(connections: Connections, state: StreamState, context: Context) -> StreamState:
    """Compute x' = x + f_1(N x) + f_2(N x); a sublayer without a norm of its own reads what the first one does."""
    first, *others = connections
    if not others:
        return first(state, **context)  # type: ignore[no-any-return]  # torch does not type a module's call
    x, pending, read, _, writes, dtype, _ = first(state._replace(keeps_read=True), **context)
    total = x
    for connection in others:
        total = add(total, pending)
        own = StreamState(x, None, None if connection.norm_in is not None else read, None, writes, dtype)
        _, pending, _, _, writes, _, _ = connection(own, **context)
    return StreamState(total, pending, None, None, writes, dtype)


def _run_bottom_to_top(connections: Connections, state: StreamState, context: Context) -> StreamState:
    """Let the last norm of the layer read a sum that also contains the layer's input."""
    bottom = state.x
    *others, last = connections
    for connection in others:
        state = connection(state, **context)
    read = state.x if state.dtype is None else state.x.to(state.dtype)
    total = functional.add_residual(state.x, bottom)
    return last(state._replace(x=total, read=read), **context)  # type: ignore[no-any-return]  # as above


def _is_post_row(row: Row) -> bool:
    return row.a == row.c == 1.0 and row.norm_out and not row.norm_in


def _is_parallel_row(row: Row) -> bool:
    return row.is_sum and (row.norm_in or row.c == 1.0)


class Flow(NamedTuple):
    """How the sublayers of a layer read and write the stream.

    Attributes:
        run: the state after a layer.
        supports: whether a row can be part of it.
        supported_rows: `supports` in words.
        has_dual: whether every write is also added to a second stream, whose norm is added to the output.
    """

    run: Callable[[Connections, StreamState, Context], StreamState]
    supports: Callable[[Row], bool] = lambda row: True
    supported_rows: str = "any"
    has_dual: bool = False


POST_ROWS = "a = c = 1, N_out and no N_in"
FLOWS: dict[str, Flow] = {
    "rows": Flow(_run_rows),
    "parallel": Flow(_run_parallel, _is_parallel_row, "a = 1, no N_out, and c = 1 without N_in"),
    "two_streams": Flow(_run_rows, _is_post_row, POST_ROWS, has_dual=True),
    "bottom_to_top": Flow(_run_bottom_to_top, _is_post_row, POST_ROWS),
}
