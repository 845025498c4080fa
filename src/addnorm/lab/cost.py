"""Cost of a residual wiring: parameters, arithmetic and memory traffic of its streams, without the sublayers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from addnorm.nn import ResidualStack, SublayerConnection
from addnorm.wirings.matrices import append_zero
from addnorm.wirings.stage import Row


class Cost(NamedTuple):
    """Cost of a stack's residual wiring, without its sublayers.

    Attributes:
        parameters: weights of norms, factors and coefficients in the whole stack.
        flops: additions and multiplications for one token: factors, sums and the projections that compute coefficients; norms
            are not counted.
        elements: the fewest tensor elements that must be read and written for one token. Between two sublayers, one kernel reads
            the streams and the last sublayer's write, and writes the new streams and the next sublayer's input.
    """

    parameters: int
    flops: int
    elements: int


def count_cost(stack: ResidualStack) -> Cost:
    """Count the parameters, the arithmetic and the memory traffic of a stack's residual wiring.

    Example:
        >>> from addnorm.lab.cost import count_cost
        >>> layers = [torch.nn.Linear(8, 8) for _ in range(4)]
        >>> count_cost(addnorm.ResidualStack(layers, 8, "pre_ln", norm="rms"))  # 5 norms; an add, and 4 d elements a sublayer
        Cost(parameters=40, flops=32, elements=128)
    """
    parameters = sum(p.numel() for p in own_parameters(stack))
    flops = elements = 0
    for connection in stack.connections:
        own = _count_stage(connection)
        flops, elements = flops + own[0], elements + own[1]
    if stack.head is not None:
        used = _projections(stack.head)
        flops += used + 2 * stack.head.stage.n * stack.d_model
        elements += (stack.head.stage.n + 1) * stack.d_model
    return Cost(parameters, flops, elements)


def own_parameters(stack: ResidualStack, without: Iterable[nn.Module] = ()) -> list[nn.Parameter]:
    """Return the parameters of a stack that are not in a sublayer, nor in a module of `without`."""
    modules = [*without, *(one.sublayer for one in stack.connections if isinstance(one.sublayer, nn.Module))]
    excluded = {id(parameter) for module in modules for parameter in module.parameters()}
    return [parameter for parameter in stack.parameters() if id(parameter) not in excluded]


def _count_stage(connection: SublayerConnection) -> tuple[int, int]:
    """Return the operations of a sublayer's stage and the elements that it reads and writes, for one token."""
    stage, d = connection.stage, connection.d_model
    n, n_out = stage.n, stage.n_out
    is_row = isinstance(stage, Row)
    flops = d * _operations([stage.c]) if is_row else _projections(connection)
    dense: Any = [[None] * n] * n_out
    mix = stage.mix or (dense if "mix" in stage.computes else append_zero(n)[:n_out])  # computed, or the identity
    collapse: Any = stage.collapse or [[None] * n] * stage.reads
    inject: Any = stage.inject or [None] * n_out
    read, written = set(), 0
    for row in collapse:
        flops += d * _operations(row)
        read |= {j for j, entry in enumerate(row) if entry != 0.0}
    for k, row in enumerate(mix):
        terms = [*row, inject[k]]
        flops += d * _operations(terms)
        used = [j for j, entry in enumerate(row) if entry != 0.0]
        moves = terms.count(0.0) == len(terms) - 1 and 1.0 in terms  # a stream, or the write, as it is
        if not moves:
            written += not (is_row and stage.norms_out[k])  # then x' is the next sublayer's input
            read |= set(used)
    return flops, d * (len(read) + 1 + written + stage.reads)


def _operations(entries: Any) -> int:
    """Return the number of additions and multiplications in a sum with the coefficients `entries`."""
    terms = [entry for entry in entries if entry != 0.0]
    factors = [entry for entry in terms if entry != 1.0]
    return len(factors) + max(0, len(terms) - 1)


def _projections(module: Any) -> int:
    """Return the number of operations in the matrix products that compute the coefficients of `module` from the streams."""
    if module.coefficients is None:
        return 0
    matrices = [getattr(module.coefficients, name) for name in module.coefficients.decays]
    return sum(2 * int(matrix.numel()) for matrix in matrices if matrix is not None)
