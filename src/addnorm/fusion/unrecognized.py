"""The writes of several streams that `inspect` proves in a model, but `streams` recognizes in none of its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import nn

from addnorm.fusion.match import Boundary, dtype_name, surplus
from addnorm.stream.dataflow.operators import FAMILY
from addnorm.stream.inspect import inspect_run

SEPARATE = "its streams are separate tensors"
UNRECOGNIZED = (
    "no graph has its write in a form that is recognized: A X + b w of one tensor, not cast between, "
    "or X + b w before a read"
)


def unrecognized_writes(model: nn.Module, args: Any, kwargs: Any, captured: Sequence[Boundary]) -> tuple[Boundary, ...]:
    """Return the writes of several streams that `inspect` proves in a model, other than those that graphs contain."""
    try:
        inspection = inspect_run(model, args, kwargs, as_program=False)
    except Exception:  # of any kind: for a model that cannot be inspected nothing is reported
        return ()
    program: Any = inspection.program or inspection.unnamed
    if program is None:
        return ()
    found = []
    for state, size in zip(program.spine.states[1:], program.sizes[1:], strict=True):
        op = state[0].op
        if size > 1 and op is not None and not op.origin.startswith(FAMILY):
            reason = SEPARATE if len(state) > 1 else UNRECOGNIZED
            found.append(
                Boundary(
                    op.frame.path, op.frame.path, "none", None, True, state[0].shape, dtype_name(state[0].tensor.dtype),
                    reason=reason, streams=size,
                )
            )  # fmt: skip
    known = [boundary for boundary in captured if boundary.writes_streams]
    return tuple(surplus(found, known, attrgetter("add"))[: max(len(found) - len(known), 0)])
