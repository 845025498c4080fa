"""Whether a stack's input and its sublayers fit together: width, shared factors, shared states, numbers of streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from addnorm.nn.residual import SublayerConnection
from addnorm.nn.streams import StreamHead, StreamsConnection
from addnorm.wirings.factors import FACTORS, Factor, Learned
from addnorm.wirings.spec import Wiring

__all__ = ["check_layers", "check_streams", "is_shared", "list_sublayers", "refuse_width"]


def list_sublayers(sublayers: Any) -> list[Any]:
    """Return the sublayers of a stack as a list, which has at least one."""
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
    """Raise an error for an input of another width than the stack's."""
    raise ValueError(
        f"x has shape {tuple(x.shape)}, expected (*, {d_model}), features last: transpose x, or build the stack "
        "with the d_model of x."
    )


def is_shared(factor: Factor) -> bool:
    """Return whether the sublayers of a layer have one parameter for this factor."""
    return isinstance(factor, Learned) and factor.shared


def check_layers(wiring: Wiring, layers: Sequence[Sequence[SublayerConnection]]) -> None:
    """Check that the sublayers of each layer agree on shared factors, and that those that share a state can."""
    for layer in layers:
        for name in FACTORS:
            factors = [getattr(connection.row, name) for connection in layer]
            if any(map(is_shared, factors)) and factors != factors[:1] * len(factors):
                raise ValueError(
                    f"{name} is {', '.join(map(repr, factors))} in the rows of one layer of {wiring.name!r}, expected the "
                    "same in all: a factor that is shared is one parameter."
                )
        if layer[0].row.shares:
            raise ValueError(
                f"wiring {wiring.name!r} has the row {layer[0].row!r} first in a layer, expected shares = '': no sublayer of the "
                "layer comes before it."
            )
        for connection, following in itertools.pairwise(layer):
            if following.row.shares and not connection.row.is_sum:
                raise ValueError(
                    f"wiring {wiring.name!r} has the row {connection.row!r} before one that shares its {following.row.shares}, "
                    "expected a = 1 and no norm_out: the writes of parallel sublayers are added to the same state."
                )


def check_streams(wiring: Wiring, connections: Sequence[SublayerConnection], head: StreamHead | None) -> bool:
    """Check that each stage finds as many streams as the one before it leaves; return whether they are one tensor."""
    if head is None and not any(isinstance(connection, StreamsConnection) for connection in connections):
        return False
    n, stages = len(wiring.embedding), []
    for i, connection in enumerate(connections):
        if not isinstance(connection, StreamsConnection):
            raise ValueError(
                f"wiring {wiring.name!r} has the row {connection.row!r} for sublayers[{i}] and stages for others, expected one "
                "kind: write the row as a Stage."
            )
        stages.append(connection.stage)
    assert head is not None  # the first sublayer has a stage
    specs: list[tuple[str, Any]] = [(f"sublayers[{i}]", stage) for i, stage in enumerate(stages)]
    for where, spec in [*specs, ("the head", head.head)]:
        if spec.n != n:
            raise ValueError(
                f"wiring {wiring.name!r} has n = {spec.n} streams at {where}, expected {n}: as many as what comes before "
                "leaves."
            )
        n = getattr(spec, "n_out", n)
    for (before, stage), (where, spec) in itertools.pairwise([*specs, ("the head", head.head)]):
        if spec.delayed and not stage.delayed:
            raise ValueError(
                f"wiring {wiring.name!r} has delayed = True at {where} and False at {before}, expected True at both: one reads "
                "with what the other computes."
            )
    with_modules = [spec for _, spec in [*specs, ("", head.head)] if spec.coefficients is not None]
    forms = {spec.is_stacked for spec in with_modules}
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
