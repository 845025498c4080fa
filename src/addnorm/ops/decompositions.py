"""Decompositions of the operators into torch's own, for programs that run without this library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from addnorm import reference
from addnorm.ops import eager
from addnorm.ops.schema import OVERLOADS, kernels_of, overload_of
from addnorm.ops.streams import eager as streams


def decompositions(*, core_aten: bool = True) -> dict[Any, Callable[..., Any]]:
    """Return the table of decompositions that `ExportedProgram.run_decompositions` takes.

    After `program.run_decompositions(addnorm.decompositions())` no operator of this library is left. The program then loads,
    runs and compiles in a process without this library, on every device, and its dynamic shapes stay dynamic:

        z = residual + dropout(branch)          with every option of `addnorm.add_layer_norm`
        y = norm(z) * weight + bias

    The arithmetic keeps the contract of docs/numerics.md in these points:

    - It is in float32, in float64 if residual, branch or z is float64, and the variance is centred.
    - z is rounded once, to its dtype. y is the norm of the rounded z and is rounded once.
    - The dropout mask has the same bits: Philox is written out in int64 arithmetic, and the seed stays an input of the graph
      or a draw from torch's generator.

    It differs from the kernels in these points:

    - Whatever runs the program chooses the order of the sums over a row and of the products. Results agree within rounding,
      not to the bit, and can depend on the batch and on the number of threads.
    - In eager mode every step reads and writes memory: it is slower than the operator. AOTInductor and other compilers fuse the
      steps.
    - Gradients of the program are those that torch derives from the steps.

    Each functional operator is in the table with both of its overloads, and so are the operators of `add_norm_streams`, whose
    Sinkhorn iterations are written out, and the backward operators of joint graphs.
    `add_norm_out`, which `out=` and the in-place functions call, has no decomposition, since its result is a write into memory:
    export the out-of-place call.

    Args:
        core_aten: start from torch's table, `torch.export.default_decompositions()`, which reduces the whole program to the
            core operators. False: only the operators of this library, the rest of the program stays as it is. The result is a
            mapping in both cases, so entries can be added and removed.

    Returns:
        A mapping from operator overloads to functions of torch's operators.

    Example:
        >>> norm, x = addnorm.LayerNorm(4), torch.randn(2, 4)
        >>> program = torch.export.export(norm, (x,)).run_decompositions(addnorm.decompositions())
        >>> [node for node in program.graph.nodes if "addnorm" in str(node.target)]
        []
        >>> torch.allclose(program.module()(x), norm(x), atol=1e-6)
        True
    """
    table: Any = torch.export.default_decompositions() if core_aten else {}
    for name, kernel in {**eager.KERNELS, **streams.KERNELS}.items():
        if name != "add_norm_out":
            for op, function in kernels_of(name, kernel, OVERLOADS.get(name, ("",))):
                table[overload_of(op)] = _traced(function)
    return table  # type: ignore[no-any-return]  # torch's table is a dict


def _traced(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a formula so that it computes each row sum by one operator (`reference.sums_in_one_loop`), not by adding halves."""

    @functools.wraps(formula)
    def decomposed(*arguments: Any, **options: Any) -> Any:
        with reference.sums_in_one_loop():
            return formula(*arguments, **options)

    return decomposed
