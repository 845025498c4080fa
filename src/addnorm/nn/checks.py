"""Checks of the arguments of a stack: its sublayers and their signatures, stages, inputs and outputs."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter
from typing import Any, NoReturn

from torch import Tensor, is_tensor, nn

from addnorm.wirings.factors import FACTORS, Learned
from addnorm.wirings.spec import Wiring
from addnorm.wirings.stage import Head, Row


def list_sublayers(sublayers: Any) -> list[Any]:
    """Return the sublayers of a stack as a list. Raise an error if there is none."""
    if not isinstance(sublayers, Iterable):
        name = sublayers.__name__ if isinstance(sublayers, type) else type(sublayers).__name__
        remedy = (
            f"[{name}(...)]" if isinstance(sublayers, nn.Module | type) else "[attention, feed_forward], for example"
        )
        raise TypeError(f"sublayers is {name}, expected a list of sublayers: pass {remedy}.")
    if listed := list(sublayers):
        return listed
    raise ValueError("sublayers is empty, expected at least one: without any there is nothing to connect.")


def refuse_width(x: Tensor, d_model: int) -> NoReturn:
    """Raise a ValueError for an input whose last dimension is not the stack's `d_model`."""
    raise ValueError(
        f"x has shape {tuple(x.shape)}, expected (*, {d_model}), features last: transpose x, or build the stack "
        "with the d_model of x."
    )


def check_layers(wiring: Wiring, layers: Sequence[Sequence[Any]]) -> None:
    """Check that shared factors are equal in each layer, and that sublayers which read the same state are parallel."""
    for layer in layers:
        rows: list[Any] = [connection.stage for connection in layer if connection.is_row]
        for name in FACTORS:
            factors = [getattr(row, name) for row in rows]
            is_shared = any(isinstance(factor, Learned) and factor.shared for factor in factors)
            if is_shared and factors != factors[:1] * len(factors):
                raise ValueError(
                    f"{name} is {', '.join(map(repr, factors))} in the rows of one layer of {wiring.name!r}, expected the "
                    "same in all: a factor that is shared is one parameter."
                )
        if layer[0].shares_state:
            raise ValueError(
                f"wiring {wiring.name!r} has the row {rows[0]!r} first in a layer, expected shares = '': no sublayer of the "
                "layer comes before it."
            )
        for row, following in itertools.pairwise(rows):
            if following.shares and not row.is_sum:
                raise ValueError(
                    f"wiring {wiring.name!r} has the row {row!r} before one that shares its {following.shares}, "
                    "expected a = 1 and no norm_out: the writes of parallel sublayers are added to the same state."
                )


def check_streams(wiring: Wiring, connections: Sequence[Any], head: Head | None) -> bool:
    """Check that each stage reads as many streams as the stage before it writes. Return whether one tensor holds all streams."""
    stages = [connection.stage for connection in connections]
    if head is None and all(isinstance(stage, Row) for stage in stages):
        return False
    for i, stage in enumerate(stages):
        if isinstance(stage, Row):
            raise ValueError(
                f"wiring {wiring.name!r} has the row {stage!r} for sublayers[{i}] and stages for others, expected one "
                "kind: write the row as a Stage."
            )
    assert head is not None  # the first sublayer has a stage
    n = len(wiring.embedding)
    specs: list[tuple[str, Any]] = [*((f"sublayers[{i}]", stage) for i, stage in enumerate(stages)), ("the head", head)]
    for where, spec in specs:
        if spec.n != n:
            raise ValueError(
                f"wiring {wiring.name!r} has n = {spec.n} streams at {where}, expected {n}: as many as what comes before "
                "leaves."
            )
        n = getattr(spec, "n_out", n)
    for (before, stage), (where, spec) in itertools.pairwise(specs):
        if spec.delayed and not stage.delayed:
            raise ValueError(
                f"wiring {wiring.name!r} has delayed = True at {where} and False at {before}, expected True at both: one reads "
                "with what the other computes."
            )
    forms = {spec.is_stacked for _, spec in specs if spec.coefficients is not None}
    if len(forms) > 1:
        raise ValueError(
            f"wiring {wiring.name!r} has modules that take the streams as one tensor and others that take a tuple, expected one "
            "kind: both take what the sublayer before leaves."
        )
    stacked = True in forms
    if stacked and any(stage.mix is not None or stage.coefficients is None for stage in stages):
        raise ValueError(
            f"wiring {wiring.name!r} has constant matrices beside modules that take the streams as one tensor, expected "
            "A = I or a module that computes A in each stage."
        )
    return stacked


def list_accepted(connections: Iterable[Any]) -> frozenset[str] | None:
    """Return the keyword arguments that at least one of the sublayers accepts. None means any keyword argument."""
    accepted: set[str] = set()
    for connection in connections:
        names = connection.accepted_kwargs
        if names is None:
            return None
        accepted |= names
    return frozenset(accepted)


def check_tensor(x: Any) -> None:
    """Raise a TypeError unless the stream `x` is a tensor."""
    if isinstance(x, tuple):  # a `StreamState` that torch turned into a plain tuple
        raise TypeError(
            f"x is {type(x).__name__}, expected a tensor of shape (*, d_model), or a StreamState inside a stack: a reentrant "
            "checkpoint accepts tensors only; pass use_reentrant=False, or put it around the whole stack."
        )
    if not is_tensor(x):
        raise TypeError(f"x is {type(x).__name__}, expected a tensor of shape (*, d_model).")


def _list_parameters(sublayer: Callable[..., Any]) -> list[Parameter] | None:
    """Return the parameters of a sublayer's signature, or None for a C function without a signature."""
    try:
        signature = inspect.signature(sublayer.forward if isinstance(sublayer, nn.Module) else sublayer)
    except ValueError:
        return None
    return list(signature.parameters.values())


def accepted_kwargs(sublayer: Callable[..., Any], reads: int = 1) -> frozenset[str] | None:
    """Return the keyword arguments in a sublayer's signature, without its `reads` inputs. None means any keyword argument."""
    while hasattr(sublayer, "_orig_mod"):  # a compiled module accepts what its module does
        sublayer = sublayer._orig_mod
    if hasattr(sublayer, "accepted_kwargs"):
        return sublayer.accepted_kwargs  # type: ignore[no-any-return]  # a stack's or a connection's
    parameters = _list_parameters(sublayer) or []
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    names = getattr(sublayer, "read_names", ()) if reads > 1 else ()  # inputs that are passed by name
    parameters = [p for p in parameters if p.name not in names] if names else parameters[reads:]
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def check_reads(sublayer: Callable[..., Any], reads: int) -> None:
    """Raise a TypeError if a sublayer takes fewer than `reads` inputs, by position or by the names in its `read_names`."""
    number: float = len(getattr(sublayer, "read_names", ()))
    if not number:
        parameters = _list_parameters(sublayer)
        if parameters is None:
            return
        kinds = [p.kind for p in parameters]
        number = sum(kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
        number = math.inf if Parameter.VAR_POSITIONAL in kinds else number
    if number < reads:
        raise TypeError(
            f"sublayer is {type(sublayer).__name__} with {number} positional arguments, expected {reads} inputs, as many as its "
            "stage has reads: as in forward(self, query, key, value)."
        )


def check_kwargs(context: Mapping[str, Any], accepted: frozenset[str] | None) -> None:
    """Raise a TypeError if a keyword argument in `context` is not `accepted`. None accepts any."""
    if accepted is not None:
        for name in context:
            if name not in accepted:
                raise TypeError(
                    f"no sublayer takes the keyword argument {name!r}, expected "
                    f"{', '.join(map(repr, sorted(accepted))) or 'none'}: name it in the signature of the sublayer it is for."
                )


def format_path(connection: Any) -> str:
    """Return a sublayer's place in its stack and its name for a message, as in "sublayers[3] (FeedForward)"."""
    place, name = connection.place, getattr(connection.sublayer, "__name__", type(connection.sublayer).__name__)
    return f"sublayers[{place.position}] ({name})"


def check_output(connection: Any, output: Tensor, read: Tensor) -> None:
    """Check the dtype and device of a sublayer's output. An add itself checks an output that it gets without a norm."""
    if output.dtype is not read.dtype and not output.is_floating_point():
        raise TypeError(
            f"{format_path(connection)} returned dtype {output.dtype}, expected a real floating-point dtype: let the sublayer "
            "return output.float()."
        )
    if output.device != read.device:
        raise ValueError(
            f"{format_path(connection)} returned a tensor on {output.device}, expected {read.device}, the device of its input: "
            "move the sublayer there."
        )


def refuse_output(connection: Any, output: Any, read: Tensor) -> NoReturn:
    """Raise an error for a sublayer whose output is not a tensor in the shape of its input."""
    path = format_path(connection)
    if isinstance(output, Tensor):
        raise ValueError(
            f"{path} returned shape {tuple(output.shape)}, expected {tuple(read.shape)}, the shape of its input: the output "
            "is added to the stream element by element; let the sublayer's last projection have the stream's width."
        )
    if isinstance(output, Sequence) and output and isinstance(output[0], Tensor):
        raise TypeError(
            f"{path} returned a {type(output).__name__} of {len(output)}, expected one tensor: wrap the sublayer so that it "
            "returns the tensor to add, as in lambda x, **kw: module(x, **kw)[0]."
        )
    raise TypeError(f"{path} returned {type(output).__name__}, expected a tensor of shape {tuple(read.shape)}.")


def refuse_norm(norm: Any, output: Any, x: Tensor) -> NoReturn:
    """Raise a TypeError for a norm that is called as a module and returns no tensor. None would be taken for no write."""
    raise TypeError(
        f"the norm {type(norm).__name__} returned {type(output).__name__}, expected a tensor of shape {tuple(x.shape)}, that of "
        "its input: let the forward of the module return the normalized tensor."
    )
