"""The usual steps of one stream without module calls: rows without factors, dropout, stochastic depth or another dtype.

    R = N_in(x)        x' = N_out(x + N_branch(f(R)))

In a small model the call of a connection and the states between two connections take as long as the operation. The result is that
of `SublayerConnection.forward`, to the bit. A connection that does more than its class does (a hook, a subclass, a patched
method) ends the loop, and the layer calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from addnorm.nn.connection import SublayerConnection
from addnorm.nn.state import NO_OPTIONS, PendingWrite, StreamState
from addnorm.nn.step import ONE, add_and_norm
from addnorm.nn.unmodified import Methods, is_unmodified, methods_of

CONNECTIONS = methods_of(SublayerConnection, names=("options", "adds_plainly"))


def run_plain(connections: Iterable[Any], state: StreamState, context: Mapping[str, Any]) -> tuple[StreamState, int]:
    """Compute the leading plain connections without calling them; return the state after them and their number."""
    x, write = state.x, state.pending
    is_general = (
        is_compiling()  # a graph has no module calls, and each check would be a guard
        or x.__class__ is not Tensor
        or state.read is not None
        or state.base is not None
        or state.sites is not None
        or state.dtype is not None
        or state.collapse is not None
        or (write is not None and (write.inject is not None or bool(write.options)))
    )
    if is_general:
        return state, 0
    branch, number = None if write is None else write.branch, 0
    for connection in connections:
        if not (is_unmodified(connection, CONNECTIONS) and _is_plain(connection)):
            break
        modules, kind = connection._modules, connection.norm
        x, own = add_and_norm(x, branch, modules["norm_in"], kind)
        branch = connection._branch(own, context)
        norm_out = modules["norm_out"]
        if norm_out is not None:
            _, x = add_and_norm(x, branch, norm_out, kind, return_stream=False)
            branch = None
        number += 1
    return StreamState(x, None if branch is None else PendingWrite(branch, NO_OPTIONS)), number


def run_layers(
    layers: Sequence[Any], methods: Methods, state: StreamState, context: Mapping[str, Any]
) -> tuple[StreamState, int]:
    """Compute the leading layers that only call their connections, without calling them; return the state and their number."""
    if is_compiling():
        return state, 0
    entered: list[Any] = []  # the connections of each layer

    def connections() -> Iterator[Any]:
        for layer in layers:
            # Asked when the layer is reached: the layer before may have changed it.
            if not is_unmodified(layer, methods):
                return
            entered.append(layer._modules["connections"]._modules.values())
            yield from entered[-1]

    state, number = run_plain(connections(), state, context)
    missing = sum(map(len, entered)) - number  # of the layer that was entered last
    if missing:
        for connection in islice(entered[-1], len(entered[-1]) - missing, None):
            state = connection(state, **context)
    return state, len(entered)


def _is_plain(connection: SublayerConnection) -> bool:
    """Return whether a connection is a row of its own state, without factors and options."""
    own = connection.__dict__  # a learned factor is in another table
    c = own.get("c")
    return (
        own["is_row"]
        and c.__class__ is float
        and c == ONE
        and not own["shares_state"]
        and not own["keeps_state"]
        and connection.adds_plainly()
    )
