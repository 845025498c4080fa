"""One layer of a stack: its sublayers, and the way in which they read and write the stream."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, NoReturn, overload

from torch import Tensor, nn

from addnorm.nn.ablation import find_inside
from addnorm.nn.checks import check_tensor
from addnorm.nn.connection import SublayerConnection, call_with_tensor
from addnorm.nn.plain_steps import run_plain
from addnorm.nn.state import StreamState, is_state, without_views


class ResidualLayer(nn.Module):
    r"""The sublayers of one layer of a `ResidualStack`, each with its residual connection.

    The stack calls each layer with the stream as the layer before left it: `layer(state, **context)` returns the next state. The
    write of the last sublayer may still be pending; the next layer adds it in the same call that computes its own first norm.
    So a layer uses no parameter of another layer: hooks, `compile()`, `fully_shard`, activation checkpoints and pipeline stages
    treat it like any other module. A hook, or a module that replaces the layer, must return a state too, such as
    `output._replace(x=...)`.

    A layer that is called with a tensor `(*, d_model)` returns the tensor after its last write.

    Args:
        connections: a `SublayerConnection` for each sublayer.

    Attributes:
        connections: an `nn.ModuleList` of the connections.

    Example:
        >>> stack = addnorm.ResidualStack([torch.nn.Linear(8, 8) for _ in range(4)], 8, sublayers_per_layer=2)
        >>> stack.layers[0](torch.randn(3, 8)).shape
        torch.Size([3, 8])
    """

    def __init__(self, connections: Iterable[SublayerConnection]) -> None:
        super().__init__()
        self.connections = nn.ModuleList(connections)

    @overload
    def forward(self, state: StreamState, /, **context: Any) -> StreamState: ...

    @overload
    def forward(self, state: Tensor, /, **context: Any) -> Tensor: ...

    def forward(self, state: StreamState | Tensor, /, **context: Any) -> StreamState | Tensor:
        """Return the state after this layer. The keyword arguments are passed to the sublayers.

        Raises:
            ValueError: the layer is called with a tensor, and its wiring has several streams.
        """
        if not is_state(state):
            inside = find_inside(self, SublayerConnection)
            return call_with_tensor(
                "state", "layer", state, context, inside, lambda begin, _: self.forward(begin, **context)
            )
        connections: Any = self._modules["connections"]  # without the time of `nn.Module.__getattr__`
        each = connections._modules.values()
        current, number = run_plain(each, state, context)
        for connection in islice(each, number, None):
            current = connection(current, **context)
        return without_views(current) if self._forward_hooks else current


def refuse_state(layers: nn.ModuleList, layer: nn.Module, state: Any) -> NoReturn:
    """Raise a TypeError for a layer of a stack whose output `state` is not a `StreamState`."""
    if isinstance(state, tuple):
        check_tensor(state)  # raises: a reentrant checkpoint turned the state into a plain tuple
    place = [*layers].index(layer)
    raise TypeError(
        f"layers[{place}] ({type(layer).__name__}) returned {type(state).__name__}, expected a StreamState: a module among the "
        "layers, and a hook on one, passes the stream on with its pending write; return state._replace(x=...)."
    )
