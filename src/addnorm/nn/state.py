"""State that the sublayers of a stack pass on: the streams, and the write that is not added to the streams yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from addnorm.ops import dtensor

Options = Mapping[str, Any]
NO_OPTIONS: Options = {}


class PendingWrite(NamedTuple):
    """A write that is not added to the streams yet.

    Attributes:
        branch: W = N_branch(f(R)), `(*, d_model)`.
        options: dropout, stochastic depth and the dtype of the streams, as keyword arguments of `addnorm.add_residual`; for a
            `Row` the factors a and b too. Empty for a plain sum.
        mix, inject, bias: A, B and the bias, as in `Coefficients`; None for a `Row`.
    """

    branch: Tensor
    options: Options
    mix: Any = None
    inject: Any = None
    bias: Any = None


class StreamState(NamedTuple):
    """State that one layer of a stack passes to the next.

    Attributes:
        x: the stream, `(*, d_model)`, before the pending write; or n streams: one tensor `(*, n, d_model)`, or a tuple of n
            tensors `(*, d_model)`.
        pending: the write that the next reader adds; None if there is none.
        read: the input of the sublayer before, if the next sublayer is parallel to it.
        base: the stream without the write of the sublayer before, if the next sublayer is parallel to it.
        sites: a `Site` for each sublayer so far; None if they are not kept.
        dtype: dtype of the sublayers' inputs, if the stream has another dtype.
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
    """The write of one sublayer in one call, and its coefficients: X' = N_out(A X + B W + bias).

    Attributes:
        write: W after N_branch, dropout and stochastic depth; for a `Row` also times b, and B is 1.
        mix, inject, bias: A, B and the bias.
        collapse: C.
        total: A X + B W + bias, one entry for each stream, if the sublayer has an N_out.
        norms: the module of N_out, or None, for each stream, if the sublayer has an N_out.
    """

    write: Tensor
    mix: Any = None
    inject: Any = (1.0,)
    bias: Any = None
    collapse: Any = None
    total: Any = None
    norms: Any = None


def is_state(value: Any) -> TypeGuard[StreamState]:
    """Return whether a value is a state.

    A graph of torch.compile has fewer guards if it compares the class in this function alone.
    """
    return value.__class__ is StreamState


def without_views(state: StreamState) -> StreamState:
    """Return the state with a pending branch that is no view, for the output of a module with hooks.

    FSDP2 registers hooks on a module's outputs and warns if an output is a view, since an in-place operator would detach it from
    its hook. The output of a projection is a view. It is safe to hide this, since the stack writes nothing in place.
    """
    write = state.pending
    if write is None or write.branch._base is None:
        return state
    branch = torch.ops.aten._unsafe_view(write.branch, write.branch.shape)
    return state._replace(pending=write._replace(branch=branch))


def with_seed(options: Options, x: Tensor) -> Options:
    """Return the options with a seed of the dropout mask, so that two adds can use the same mask."""
    if "dropout_p" not in options or "seed" in options:
        return options
    return {**options, "seed": dtensor.draw_seed(x)}


def is_distributed() -> bool:
    """Return whether a process group exists. Without a process group no parameter is sharded."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
