"""One layer of a stack: its sublayers, and the way in which they read and write the stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, overload

from torch import Tensor, nn

from addnorm.nn.executor import StreamState, add, without_views
from addnorm.nn.removal import find_inside
from addnorm.nn.residual import SublayerConnection, check_kwargs, check_tensor, to_dtype
from addnorm.nn.stream_step import finish
from addnorm.nn.streams import StreamsConnection

__all__ = ["ResidualLayer", "refuse_state"]


class ResidualLayer(nn.Module):
    r"""The sublayers of one layer of a `ResidualStack`, each with its residual connection.

    The stack calls each layer with the stream as the layer before left it: `layer(state, **context)` returns the next state. The
    write of the last sublayer may still be pending; the next layer, which owns the norm that follows, adds it in the same call.
    So a layer uses no parameter of another one: hooks, `compile()`, `fully_shard`, activation checkpoints and pipeline stages
    treat it like any other module. A hook or a module in its place must return a state too, such as `output._replace(x=...)`.

    A layer that is called with a tensor `(*, d_model)` returns the tensor after its last write.

    Args:
        connections: a `SublayerConnection` for each sublayer.

    Attributes:
        connections: an `nn.ModuleList` of them.
    """

    def __init__(self, connections: Iterable[SublayerConnection]) -> None:
        super().__init__()
        self.connections = nn.ModuleList(connections)

    @overload
    def forward(self, state: StreamState, **context: Any) -> StreamState: ...

    @overload
    def forward(self, state: Tensor, **context: Any) -> Tensor: ...

    def forward(self, state: StreamState | Tensor, **context: Any) -> StreamState | Tensor:
        """Return the state after this layer; the keyword arguments are the sublayers'.

        Raises:
            ValueError: the layer is called with a tensor, and its wiring has several streams.
        """
        if not isinstance(state, StreamState):
            return self._call_alone(state, context)
        connections: Any = self._modules["connections"]  # without the time of `nn.Module.__getattr__`
        current: StreamState = state
        for connection in connections._modules.values():
            current = connection(current, **context)
        return without_views(current) if self._forward_hooks else current

    def _call_alone(self, x: Tensor, context: dict[str, Any]) -> Tensor:
        """Return the stream after this layer as a tensor, for a caller that is no stack."""
        check_tensor(x)
        connections = find_inside(self, SublayerConnection)
        stages = [connection.stage for connection in connections if isinstance(connection, StreamsConnection)]
        if stages and (stages[0].n > 1 or stages[-1].n_out > 1 or stages[0].is_stacked):
            raise ValueError(
                f"state is a tensor and the layer has {stages[0].n} streams, expected a StreamState: a tensor has one of them "
                "only; call the stack."
            )
        accepted = [connection.accepted_kwargs for connection in connections]
        check_kwargs(context, None if None in accepted else frozenset().union(*accepted))  # type: ignore[arg-type]  # without None
        residual_dtype = connections[0].residual_dtype if connections else None
        dtype = None if residual_dtype is None else x.dtype
        stream = to_dtype(x, residual_dtype)
        if stages:
            return to_dtype(finish(self.forward(StreamState((stream,), dtype=dtype), **context))[0], dtype)
        state = self.forward(StreamState(stream, dtype=dtype), **context)
        return to_dtype(state.x if state.pending is None else add(state.x, state.pending), dtype)


def refuse_state(layers: nn.ModuleList, layer: nn.Module, state: Any) -> NoReturn:
    """Raise an error for a layer of a stack that returned something else than a state."""
    if isinstance(state, tuple):
        check_tensor(state)  # raises: a reentrant checkpoint made it plain
    place = [*layers].index(layer)
    raise TypeError(
        f"layers[{place}] ({type(layer).__name__}) returned {type(state).__name__}, expected a StreamState: a module among the "
        "layers, and a hook on one, passes the stream on with its pending write; return state._replace(x=...)."
    )
