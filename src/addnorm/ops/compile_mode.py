"""Form of a call in a graph that Dynamo traces: the operator, or the operator's formula.

"op" is one opaque node: the kernels of eager mode, with the same bits. "formula" is the add and torch's own norm, which torch
differentiates and Inductor fuses with the operators around them. The dropout mask, the dtypes and the errors are the same in both
modes. In both modes a call is one node of Dynamo's graph. The node of "formula" is an overload of the operator that becomes the
formula when a compiler traces the graph; a backend that runs the graph as it is runs the operator.

`out=` and in-place calls use the operator in both modes: a formula cannot check the memory that it overwrites.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from addnorm._util.torch_internals import mark_as_constant
from addnorm.ops.dtensor import register_rules

Mode = Literal["op", "formula"]
MODES: tuple[Mode, ...] = ("op", "formula")

# Device types on which the formula is the default: Inductor's loops were measured there (benchmarks/bench_compile.py).
FORMULA_DEVICES = frozenset({"cpu"})
FEWEST_FOR_OP = 2**20  # elements from which the operator saves more time than fusing the formula with its neighbours

# Overload of the operators that is the formula. torch's caches of compiled graphs know it by this name, across processes and
# versions of this library: the number must change with the formula.
OVERLOAD = "formula1"

_mode: Mode | None = None  # the caller's choice; Dynamo guards it


def set_compile_mode(mode: Mode | None) -> None:
    """Set what calls of this library become under `torch.compile`, from now on and in the whole process.

    "op" is the operator: one opaque node with the kernels, and the bits, of eager mode. "formula" is the sum and torch's own
    norm, which Inductor fuses with the operators around them, as it does without this library. Inductor then chooses the order of
    the sums: results equal those of the operator within rounding, and the guarantees about bits in docs/numerics.md do not hold.
    None chooses for each call by what was measured (docs/performance.md): on CPU the formula for fewer than 2^20 elements of one
    dtype without options, otherwise the operator.

    After `torch.use_deterministic_algorithms(True)` every call is the operator, in all modes.

    A function that is already compiled is compiled once more at its next call after a change; changing back reuses the first
    graph. Eager calls, `out=` and the in-place functions use the operator in all modes. Call this function outside compiled
    code. It is not a context manager.

    Args:
        mode: "op", "formula" or None.

    Raises:
        ValueError: mode has another value.

    Example:
        >>> addnorm.set_compile_mode("op")
        >>> addnorm.set_compile_mode(None)
    """
    global _mode  # noqa: PLW0603  # one switch for the process, like torch's own
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode is {mode!r}, expected 'op', 'formula', or None for the measured default.")
    _mode = mode


def form(residual: Tensor, plain: bool) -> Mode | None:
    """Return the form of a call that torch.compile traces, or None in an export, which keeps the default overload.

    `plain` says that the call has no options and that all its tensors have one dtype. Each global that is read here becomes a
    guard of the compiled graph, and a slow one if the object can be reached in two ways. So `choose_form`, which has no guards,
    reads everything that no call can change.
    """
    chosen, fewest = choose_form(_mode, plain, residual.__class__, residual.device.type)
    return "op" if fewest and residual.numel() >= fewest else chosen


@mark_as_constant  # Dynamo itself guards the deterministic algorithms and what a tensor is
def choose_form(mode: Mode | None, plain: bool, cls: type, device: str) -> tuple[Mode | None, int]:
    """Return the form of a call, and the number of elements from which the operator replaces it; 0 if it never does."""
    register_rules()  # for DTensors, before the call: a traced call cannot be repeated after an error
    if torch.compiler.is_exporting():
        return None, 0
    if torch.are_deterministic_algorithms_enabled():
        return "op", 0
    if mode is not None:
        return mode, 0
    # A DTensor, or another subclass, takes the operator: there are rules for DTensors.
    is_formula = plain and cls in (Tensor, torch.nn.Parameter) and device in FORMULA_DEVICES
    return ("formula", FEWEST_FOR_OP) if is_formula else ("op", 0)
