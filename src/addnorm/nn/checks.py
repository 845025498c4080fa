"""Whether a stack's input and its sublayers fit together: width, shared factors, shared states, numbers of streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from addnorm.nn.connection import SublayerConnection
from addnorm.wirings.factors import FACTORS, Learned
from addnorm.wirings.spec import Wiring
from addnorm.wirings.stage import Head, Row

__all__ = ["check_layers", "check_streams", "list_sublayers", "refuse_width"]


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


def check_layers(wiring: Wiring, layers: Sequence[Sequence[SublayerConnection]]) -> None:
    """Check that the sublayers of each layer agree on shared factors, and that those that share a state can."""
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


def check_streams(wiring: Wiring, connections: Sequence[SublayerConnection], head: Head | None) -> bool:
    """Check that each stage finds as many streams as the one before it leaves; return whether they are one tensor."""
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
