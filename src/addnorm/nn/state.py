"""What the sublayers of a stack hand on to each other: the streams, and the write that is not added to them yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from addnorm.ops import dtensor

__all__ = ["Options", "PendingWrite", "Site", "StreamState", "is_distributed", "with_seed", "without_views"]

Options = Mapping[str, Any]


class PendingWrite(NamedTuple):
    """A write that is not added to the streams yet.

    Attributes:
        branch: W = N_branch(f(R)), `(*, d_model)`.
        options: dropout, stochastic depth and the dtype of the streams, as keyword arguments of `addnorm.add_residual`; of a
            `Row` the factors a and b too. Empty for a plain sum.
        mix, inject, bias: A, B and the bias, as in `Coefficients`; None of a `Row`.
    """

    branch: Tensor
    options: Options
    mix: Any = None
    inject: Any = None
    bias: Any = None


class StreamState(NamedTuple):
    """What one layer of a stack passes to the next.

    Attributes:
        x: the stream, `(*, d_model)`, before the pending write; or n streams: one tensor `(*, n, d_model)`, or a tuple of n
            tensors `(*, d_model)`.
        pending: the write that the next reader adds; None if there is none.
        read: the input of the sublayer before, if the next one shares its state.
        base: that state, the stream without the write of the sublayer before.
        sites: a `Site` for each sublayer so far; None if they are not kept.
        dtype: dtype of the sublayers' inputs, if the stream has another one.
        collapse: the coefficients of the next read, if the sublayer before computed them.
    """

    x: Any
    pending: PendingWrite | None = None
    read: Tensor | None = None
    base: Tensor | None = None
    sites: tuple[Site, ...] | None = None
    dtype: torch.dtype | None = None
    collapse: Any = None


class Site(NamedTuple):
    """What one sublayer did to the streams, with its coefficients as they were: X' = N_out(A X + B W + bias).

    Attributes:
        write: W after N_branch, dropout and stochastic depth; of a `Row` after the factor b too, and B is 1.
        mix, inject, bias: A, B and the bias.
        collapse: C.
        total: with N_out, what it normalized: one entry for each stream.
        norms: with N_out, the norms, None for a stream without.
    """

    write: Tensor
    mix: Any = None
    inject: Any = (1.0,)
    bias: Any = None
    collapse: Any = None
    total: Any = None
    norms: Any = None


def without_views(state: StreamState) -> StreamState:
    """Return the state with a pending branch that is no view, for modules with hooks.

    FSDP2 hooks a module's outputs and warns of a view, which an operator in place would detach from its hook. A projection
    returns a view, and the stack writes nothing in place.
    """
    write = state.pending
    if write is None or write.branch._base is None:
        return state
    branch = torch.ops.aten._unsafe_view(write.branch, write.branch.shape)
    return state._replace(pending=write._replace(branch=branch))


def with_seed(options: Options, x: Tensor) -> Options:
    """Return the options with a seed of the dropout mask, so that two adds can share it."""
    if "dropout_p" not in options or "seed" in options:
        return options
    return {**options, "seed": dtensor.draw_seed(x)}


def is_distributed() -> bool:
    """Return whether there is a process group, without which no parameter is sharded."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
