"""Form of a call in a graph that Dynamo traces: the operator, or the operator's formulas.

"op" is one opaque node: the kernels of eager mode, with the same bits. "formula" traces the reference that is registered for
every device (`eager.py`), so that Inductor fuses the add and the norm with the operators around them. The autograd nodes, the
tensors that they save, the dropout mask, the dtypes and the errors are the same in both modes.

`out=` and in-place calls use the operator in both modes: a formula cannot check the memory that it overwrites.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from addnorm.ops import autocast, eager
from addnorm.ops.options import norm_number
from addnorm.ops.schema import by_name

Mode = Literal["op", "formula"]
MODES: tuple[Mode, ...] = ("op", "formula")

# The mode by device type; "op" for the others. "cpu" follows from benchmarks/bench_compile.py, by the rule of
# its `choose`. "cuda" has not been measured.
DEFAULT_MODES: dict[str, Mode] = {"cpu": "op", "cuda": "op"}

_mode: Mode | None = None  # the caller's choice; Dynamo guards it


def set_compile_mode(mode: Mode | None) -> None:
    """Set what calls of this library become under `torch.compile`, from now on and in the whole process.

    "op" is the operator: one opaque node with the kernels, and the bits, of eager mode. "formula" is the written-out formula,
    which Inductor fuses with the operators around it. Inductor then chooses the order of the sums: results equal those of the
    operator within rounding, and the guarantees about bits in docs/numerics.md do not hold. None selects the mode that was
    measured to be the faster one on the device (docs/performance.md).

    A function that is already compiled is compiled once more at its next call after a change; changing back reuses the first
    graph. Eager calls, `out=` and the in-place functions use the operator in both modes. Call this function outside compiled
    code. It is not a context manager.

    Args:
        mode: "op", "formula" or None.

    Raises:
        ValueError: mode has another value.

    Example:
        >>> addnorm.set_compile_mode("formula")
        >>> addnorm.set_compile_mode(None)
    """
    global _mode  # noqa: PLW0603  # one switch for the process, like torch's own
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode is {mode!r}, expected 'op', 'formula', or None for the measured default.")
    _mode = mode


def mode(like: Tensor) -> Mode:
    """Return the mode of calls with tensors on the device of `like`."""
    return _mode or DEFAULT_MODES.get(like.device.type, "op")


@by_name("add_norm_forward")
def _forward(residual: Tensor, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    device = residual.device.type
    # The dispatcher does this for the operator.
    if arguments.get("out_dtype") is None and torch.is_autocast_enabled(device):
        arguments["out_dtype"] = autocast.y_dtype(device, arguments.get("residual_dtype") or residual.dtype)
    return eager.add_norm_forward(residual=residual, **arguments)


def _train(
    residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(residual, branch, weight, bias, eps, norm_number(rms))


# The compiler removes the results that are computed here and not returned.
FORMULAS: dict[str, Callable[..., Any]] = {
    "add_norm": lambda *arguments: _train(*arguments)[0],
    "add_norm_stream": lambda *arguments: _train(*arguments)[:2],
    "add_norm_train": _train,
    "add_norm_train_backward": eager.add_norm_train_backward,
    "add_norm_forward": _forward,
    "add_norm_backward": eager.add_norm_backward,
}
