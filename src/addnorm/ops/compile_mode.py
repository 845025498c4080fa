"""What a call becomes in a graph that Dynamo traces: the operator, or the operator's formulas.

"op" is one node that no compiler looks into: the kernels of eager mode, with their bits. "formula" traces into the reference
that is registered for every device (`eager.py`), so that Inductor fuses the add and the norm with what stands around them. The
autograd nodes, what they save, dropout's mask, dtypes and refusals are those of the operator either way; only who computes
differs.

Memory that is given (`out=`, in place) is the operator's in both forms: a formula cannot judge what it overwrites.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from addnorm.ops import autocast, eager
from addnorm.ops.schema import NORMS, by_name

Form = Literal["op", "formula"]
FORMS: tuple[Form, ...] = ("op", "formula")

# The form by device type; where nothing is said it is the operator. "cpu" follows from benchmarks/bench_compile.py, by the rule
# of `addnorm.bench.compiles.choice`. "cuda" has not been measured.
CHOICE: dict[str, Form] = {"cpu": "op", "cuda": "op"}

_asked: Form | None = None  # what the user asked for; Dynamo guards it


def set_compile_mode(form: Form | None) -> None:
    """What calls become under `torch.compile`, from now on and in the whole process.

    "op" is the operator: one opaque node, the kernels and the bits of eager mode. "formula" is the written-out formula, which
    Inductor fuses with the operators around it: sums are in Inductor's order then, so results equal those of the operator within
    rounding, and what docs/numerics.md says of bits does not hold. None is what was measured to be best on the device
    (docs/performance.md).

    A function that is compiled already is compiled once more at its next call; going back costs nothing. Eager calls, `out=` and
    the functions in place are the operator in any case. Call it outside compiled code.

    Args:
        form: "op", "formula" or None.

    Raises:
        ValueError: form is something else.

    Example:
        >>> addnorm.set_compile_mode("formula")
        >>> addnorm.set_compile_mode(None)
    """
    global _asked  # noqa: PLW0603  # one switch for the process, as torch's own are
    if form is not None and form not in FORMS:
        raise ValueError(f"form is {form!r}, expected 'op', 'formula', or None for what was measured to be best.")
    _asked = form


def kernel(op: str, like: Tensor) -> Callable[..., Any]:
    """What an operator of `SCHEMAS` is in a graph: itself, or a function with its arguments and results."""
    form = _asked or CHOICE.get(like.device.type, "op")
    return FORMULAS[op] if form == "formula" else OPERATORS[op]


@by_name("add_norm_forward")
def _forward(residual: Tensor, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    device = residual.device.type
    if arguments.get("out_dtype") is None and torch.is_autocast_enabled(
        device
    ):  # what the dispatcher does for the operator
        arguments["out_dtype"] = autocast.y_dtype(device, arguments.get("residual_dtype") or residual.dtype)
    return eager.add_norm_forward(residual=residual, **arguments)


def _train(
    residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(residual, branch, weight, bias, eps, NORMS["rms" if rms else "layer"])


# What is computed here and not returned, the compiler drops.
FORMULAS: dict[str, Callable[..., Any]] = {
    "add_norm": lambda *arguments: _train(*arguments)[0],
    "add_norm_stream": lambda *arguments: _train(*arguments)[:2],
    "add_norm_train": _train,
    "add_norm_train_backward": eager.add_norm_train_backward,
    "add_norm_forward": _forward,
    "add_norm_backward": eager.add_norm_backward,
}
OPERATORS: dict[str, Callable[..., Any]] = {name: getattr(torch.ops.addnorm, name).default for name in FORMULAS}
