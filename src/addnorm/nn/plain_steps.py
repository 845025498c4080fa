"""The usual steps of one stream without module calls: rows without factors, dropout, stochastic depth or another dtype.

    R = N_in(x)        x' = N_out(x + N_branch(f(R)))

In a small model the call of a connection and the states between two connections take as long as the operation. The result is that
of `SublayerConnection.forward`, to the bit. A connection that does more than its class does (a hook, a subclass, a patched
method) ends the loop, and the layer calls it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from addnorm.nn.connection import SublayerConnection
from addnorm.nn.state import NO_OPTIONS, PendingWrite, StreamState
from addnorm.nn.step import ONE, add_and_norm
from addnorm.nn.unmodified import is_unmodified, methods_of

CONNECTIONS = methods_of(SublayerConnection, names=("options",))


def run_plain(connections: Collection[Any], state: StreamState, context: Mapping[str, Any]) -> tuple[StreamState, int]:
    """Return the state after the first connections, as many as are plain, and their number."""
    x, write = state.x, state.pending
    is_general = (
        x.__class__ is not Tensor
        or state.read is not None
        or state.base is not None
        or state.sites is not None
        or state.dtype is not None
        or state.collapse is not None
        or (write is not None and (write.inject is not None or bool(write.options)))
        or is_compiling()  # a graph has no module calls, and each check would be a guard
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


def _is_plain(connection: SublayerConnection) -> bool:
    """Return whether a connection is a row of its own state, without factors and options."""
    c = connection.c
    return (
        connection.is_row
        and c.__class__ is float
        and c == ONE
        and not connection.shares_state
        and not connection.keeps_state
        and connection.adds_plainly()
    )
