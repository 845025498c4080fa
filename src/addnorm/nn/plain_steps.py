"""The usual steps of one stream without module calls: rows without factors, dropout, stochastic depth or another dtype.

    R = N_in(x)        x' = N_out(x + N_branch(f(R)))

In a small model the call of a connection and the states between two connections take as long as the operation. The result is that
of `SublayerConnection.forward`, to the bit. A connection that does more than its class does (a hook, a subclass, a patched
method), or whose norm does, ends the loop, and the layer calls it.

All modules are examined before the first is computed. A sublayer takes most of the caches, and what asks between two sublayers
would have to be read from memory each time. So what a sublayer changes in its connection and the modules after it acts from the
next call on. Only new values of parameters, parametrizations, hooks and another `SublayerConnection.forward` act at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, is_tensor
from torch.compiler import is_compiling

from addnorm._util.norms import KINDS
from addnorm._util.torch_internals import count_hooks
from addnorm.functional import add_residual
from addnorm.nn.checks import refuse_output
from addnorm.nn.connection import SublayerConnection
from addnorm.nn.state import NO_OPTIONS, PendingWrite, StreamState
from addnorm.nn.step import ONE, PLAIN, add_and_norm, fits_formula
from addnorm.nn.unmodified import Methods, examine, methods_of
from addnorm.ops.dispatch import default_rms_eps, fast_path

CONNECTIONS = methods_of(SublayerConnection, names=("options", "adds_plainly", "_advance", "_branch"))

# A connection that computes just the equation, its sublayer as a function of R alone, and its norms as parameters, their number,
# eps and code.
PlainNorm = tuple[Mapping[str, Tensor | None], int, float, int]
Step = tuple[SublayerConnection, Callable[[Tensor], Any], PlainNorm | None, PlainNorm | None]


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
    branch, number, dtype = None if write is None else write.branch, 0, x.dtype
    registered, forward = count_hooks(), SublayerConnection.forward
    for connection, sublayer, norm_in, norm_out in _list_steps(connections, x, context):
        if norm_in is None:
            own = x = x if branch is None else add_residual(x, branch)
        else:
            table, size, eps, code = norm_in
            if len(table) != size:  # the sublayer before took a parameter out, as a parametrization does
                break
            if branch is None:
                own = fast_path(x, None, table["weight"], table.get("bias"), eps, code, False)
            else:
                own, x = fast_path(x, branch, table["weight"], table.get("bias"), eps, code, True)
        branch = sublayer(own)
        fits = is_tensor(branch) and branch.shape == own.shape
        if not fits and sublayer.__class__ is not partial:  # `_branch` refuses what does not come from a norm
            refuse_output(connection, branch, own)
        number += 1
        is_changed = count_hooks() != registered or SublayerConnection.forward is not forward
        if norm_out is not None:
            table, size, eps, code = norm_out
            if is_changed or len(table) != size:
                _, x = add_and_norm(x, branch, connection._modules["norm_out"], connection.norm, return_stream=False)
            else:
                x = fast_path(x, branch, table["weight"], table.get("bias"), eps, code, False)
            branch = None
            is_changed = is_changed or x.dtype is not dtype  # whose machine epsilon is another
        if is_changed:
            break
    return StreamState(x, None if branch is None else PendingWrite(branch, NO_OPTIONS)), number


def run_layers(
    layers: Sequence[Any], methods: Methods, state: StreamState, context: Mapping[str, Any]
) -> tuple[StreamState, int]:
    """Compute the leading layers that only call their connections, without calling them; return the state and their number."""
    if is_compiling():
        return state, 0
    check, entered = examine(methods), []

    def connections() -> Iterator[Any]:
        for layer in layers:
            if not check(layer):
                return
            entered.append([*layer._modules["connections"]._modules.values()])
            yield from entered[-1]

    state, number = run_plain(connections(), state, context)
    for done, own in enumerate(entered):
        if number == 0:
            return state, done
        if number < len(own):
            for connection in own[number:]:  # the rest of a layer
                state = connection(state, **context)
            return state, done + 1
        number -= len(own)
    return state, len(entered)


def _list_steps(connections: Iterable[Any], x: Tensor, context: Mapping[str, Any]) -> list[Step]:
    """Return the leading plain connections: rows of their own state, without factors, options and changed norms."""
    steps: list[Step] = []
    check, checks = examine(CONNECTIONS), {kind: examine(PLAIN[kind]) for kind in PLAIN}
    for connection in connections:
        if not check(connection):
            break
        own, modules, kind = connection.__dict__, connection._modules, connection.norm
        c = own.get("c")  # a learned factor is in another table
        if (
            not own["is_row"]
            or c.__class__ is not float
            or c != ONE
            or own["shares_state"]
            or own["keeps_state"]
            or not connection.adds_plainly()
        ):
            break
        norms: list[PlainNorm | None] = []
        for norm in (modules["norm_in"], modules["norm_out"]):
            if norm is None:
                norms.append(None)
            elif checks[kind](norm) and fits_formula(norm, kind, x):
                eps = default_rms_eps(x, None) if norm.eps is None and KINDS[kind].eps is None else norm.eps
                norms.append((norm._parameters, len(norm._parameters), eps, KINDS[kind].code))
            else:
                return steps
        sublayer = modules.get("sublayer")
        if context or sublayer is None or modules["norm_branch"] is not None:
            sublayer = partial(connection._branch, context=context)
        steps.append((connection, sublayer, norms[0], norms[1]))
    return steps
