"""Measured matrices of a residual program: how each state and read depends on the state before it and on the write.

    target = N(M_1 X_1 + M_2 X_2 + ... + bias)

The operators between the X_i and the target are run again in float64, with one stream all ones, the others zero, and all other
operands frozen at the run's values. The result, less the bias, is one column of a matrix, for every token and feature. Then the
equation is computed with the run's values: if it gives the target, no term is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from addnorm._util.numbers import format_number
from addnorm.stream.dataflow.arithmetic import Factor, is_move, is_view, match_factor, strip_views
from addnorm.stream.dataflow.graph import DATA, PARAMETER, Op, Value, walk
from addnorm.stream.dataflow.replay import relative_error, replay_op, run_op
from addnorm.stream.find.norm import Norm
from addnorm.stream.program.carried import Carrier, find_weights
from addnorm.stream.program.spine import list_carried_inputs, trace_single

BETWEEN = "a norm of a sum lies between two states"
EARLIER = "a value from before the state is read again"
TOKENS = "tokens are cut or joined between two states"
MAX_ENTRIES = 64  # in JSON a matrix with more entries has only its sizes
EQUAL = 1e-6  # coefficients of the features that differ by less are stored as one number


@dataclass(eq=False)
class Column:
    """Term of a target's equation: a matrix and the state or write that it multiplies.

    Attributes:
        source: the value of the state, or the write.
        operand: the source, or its norm.
        norm: the norm of the source that makes the operand, or None.
        matrix: `(tokens, n_out, n_in, d)`, or `(tokens, n_out, n_in, 1)` if it is the same for all features. The tokens are in
            the order of the operand's.
        kind: what the matrix depends on, as the bits of `Value.kind`.
        operands: the frozen values from which the matrix is computed.
    """

    source: Value
    operand: Value
    norm: Norm | None
    matrix: Tensor
    kind: int
    operands: list[Value]


@dataclass(eq=False)
class Map:
    """The equation of one value: a sum of matrices times earlier values, and its norm.

    Attributes:
        target: the value.
        norm: the norm of the sum, or None.
        after: the views and factors after this norm.
        columns: the terms of the sum.
        bias: `(tokens, n_out, d)`, the terms of the sum that depend on no source; None if they are zero.
        error: relative error of the equation, computed in float64 with the values of the run.
        reason: why the equation does not describe the value; empty if it does.
    """

    target: Value
    norm: Norm | None
    after: list[Op]
    columns: list[Column]
    bias: Tensor | None
    error: float
    reason: str = ""

    @property
    def factors(self) -> list[Factor]:
        """The factors after the norm."""
        products = [match_factor(op) for op in self.after if not is_view(op)]
        return [product for product in products if product is not None]

    def describe_factors(self) -> str:
        """Return the factors after the norm in words, such as "0.5", without masks and dropout; empty if there is none."""
        numbers = [format_number(one.number, 4, trim=True) for one in self.factors if one.kind == "constant"]
        return " times ".join([*numbers, *("learned" for one in self.factors if one.kind == "learned")])


def to_streams(carrier: Carrier, value: Value, tensor: Tensor | None = None, like: Iterable[Value] = ()) -> Tensor:
    """Return a carried value in float64, or another tensor in its layout, as `(tokens, n, d)`.

    Its tokens get the order that they have in `like` (`Carrier.order`).
    """
    sizes, order, n = carrier.order(value, like)
    tensor = value.exact if tensor is None else tensor
    return tensor.reshape(sizes).permute(order).reshape(-1, n, carrier.width)


def join_streams(
    carrier: Carrier, values: Sequence[Value], tensors: Sequence[Tensor] | None = None, like: Iterable[Value] = ()
) -> Tensor:
    """Return the streams of carried values in float64, or of other tensors in their layouts, as `(tokens, n, d)`."""
    pairs = zip(values, [None] * len(values) if tensors is None else tensors, strict=True)
    return torch.cat([to_streams(carrier, *pair, like) for pair in pairs], 1)


def _from_streams(carrier: Carrier, value: Value, streams: Tensor, like: Iterable[Value] = ()) -> Tensor:
    """Return `(tokens, n, d)` in the layout of a carried value: the inverse of `to_streams`."""
    sizes, order, _ = carrier.order(value, like)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return streams.reshape([sizes[k] for k in order]).permute(inverse).reshape(value.shape)


def measure_map(carrier: Carrier, target: Value, sources: Sequence[Value], freeze: bool = False) -> Map:
    """Measure the matrices by which `target` is computed from `sources`.

    With `freeze`, a norm of a source is part of the matrix, as a factor with the run's statistics. Otherwise the matrix
    multiplies the norm's output.
    """
    norm, after = _peel(carrier, target, sources)
    total = norm.x if norm is not None else target
    operands, region, reason = _find_operands(carrier, total, sources, freeze)
    if reason == EARLIER:
        return Map(target, norm, after, [], None, math.inf, reason)
    zeros = {operand: operand.tensor.new_zeros(operand.shape, dtype=torch.float64) for operand in operands}
    bias = to_streams(carrier, total, _evaluate(carrier, total, zeros, region), operands)
    columns: list[Column] = []
    for operand, (source, own_norm) in operands.items():
        columns.append(_measure_column(carrier, total, operand, source, own_norm, zeros, bias, region))
    part = Map(target, norm, after, columns, bias if bool(bias.any()) else None, 0.0, reason)
    result = apply_map(carrier, part, {source: to_streams(carrier, source) for source in sources})
    if result is None:  # the target has other tokens than the sources
        part.reason = part.reason or TOKENS
        actual = {operand: operand.exact for operand in operands}
        result = _finish(carrier, part, to_streams(carrier, total, _evaluate(carrier, total, actual, region)))
    part.error = relative_error(to_streams(carrier, target), result)
    return part


def apply_map(carrier: Carrier, part: Map, streams: Mapping[Value, Tensor]) -> Tensor | None:
    """Return the target for the values `streams` of the sources, `(tokens, n, d)`; None if its tokens differ.

    Norms are computed by their formulas.
    """
    result = part.target.tensor.new_zeros((1, 1, 1), dtype=torch.float64) if part.bias is None else part.bias
    for column in part.columns:
        own = streams[column.source]
        if column.norm is not None and column.operand is not column.source:
            own = _normalize(carrier, column, own)
        if column.matrix.shape[0] != len(own):
            return None
        result = result + (column.matrix * own.unsqueeze(1)).sum(2)
    total, like = part.target if part.norm is None else part.norm.x, [column.operand for column in part.columns]
    if carrier.order(total, like) != carrier.order(total):
        result = to_streams(carrier, total, _from_streams(carrier, total, result, like))
    return _finish(carrier, part, result)


def _normalize(carrier: Carrier, column: Column, streams: Tensor) -> Tensor:
    """Return the output of the norm of a column's source, for the values `streams` of this source."""
    assert column.norm is not None
    x = column.norm.x

    def follow(value: Value) -> list[Value]:
        return [] if value is column.source else list_carried_inputs(carrier, value)

    region = sorted(walk([x], follow), key=lambda value: value.index)
    inputs = {column.source: _from_streams(carrier, column.source, streams)}
    return column.norm(to_streams(carrier, x, _evaluate(carrier, x, inputs, region)))


def _finish(carrier: Carrier, part: Map, total: Tensor) -> Tensor:
    """Return the target from the value of its sum, `total`: apply the norm, and the operators after the norm."""
    if part.norm is None:
        return total
    y = part.norm(total)
    if not part.after:
        return y
    given = {part.norm.y: _from_streams(carrier, part.norm.y, y)}
    after = [op.outputs[0] for op in part.after]
    return to_streams(carrier, part.target, _evaluate(carrier, part.target, given, after))


def _peel(carrier: Carrier, target: Value, sources: Sequence[Value]) -> tuple[Norm | None, list[Op]]:
    """Return the norm whose output `target` is up to views and factors, and these operators; else None and []."""
    values = [*trace_single(carrier, target, _is_multiple)]
    norm: Norm | None = values[-1].norm
    is_whole = len({carrier.count_streams(value) for value in values}) == 1
    if norm is None or not is_whole or not {*sources}.isdisjoint(values):
        return None, []
    return norm, [value.op for value in values[-2::-1] if value.op is not None]


def _is_multiple(op: Op) -> bool:
    """Return whether an operator is a view or a factor."""
    return is_view(op) or match_factor(op) is not None


def _find_operands(
    carrier: Carrier, total: Value, sources: Sequence[Value], freeze: bool
) -> tuple[dict[Value, tuple[Value, Norm | None]], dict[Value, None], str]:
    """Return the operands of a sum, the values between them and the sum, and why the search fails, or an empty string.

    Each operand is mapped to its source and to the norm of this source that makes it, or None.
    """
    operands: dict[Value, tuple[Value, Norm | None]] = {}
    reason = ""

    def follow(value: Value) -> Iterable[Value]:
        nonlocal reason
        if value in sources:
            operands[value] = (value, None)
            return []
        if value.norm is not None:
            source = _find_single(carrier, value.norm.x, sources)
            if source is not None and not freeze:
                operands[value] = (source, value.norm)
                return []
            if source is None and not _is_joined(carrier, value.norm.x, sources):
                reason = BETWEEN
        if value in carrier.sources_set:
            reason = EARLIER
        return list_carried_inputs(carrier, value)

    region = sorted(walk([total], follow), key=lambda value: value.index)
    order = {source: k for k, source in enumerate(sources)}
    operands = dict(sorted(operands.items(), key=lambda item: order[item[1][0]]))
    return operands, dict.fromkeys(region), reason


def _find_single(carrier: Carrier, value: Value, sources: Sequence[Value]) -> Value | None:
    """Return the source of which a value is a view or a multiple, or None."""
    return next((one for one in trace_single(carrier, value, _is_multiple) if one in sources), None)


def _is_joined(carrier: Carrier, value: Value, sources: Sequence[Value]) -> bool:
    """Return whether a value holds the streams of sources side by side, unchanged."""
    values = walk([value], lambda v: [] if v in sources else list_carried_inputs(carrier, v))
    return all(v in sources or (v.op is not None and is_move(v.op) and v.norm is None) for v in values)


def _evaluate(carrier: Carrier, total: Value, inputs: Mapping[Value, Tensor], region: Iterable[Value]) -> Tensor:
    """Return the value `total` computed from `inputs`, other contents of carried values, with everything else frozen."""
    known = dict(inputs)
    for value in region:
        if value in known or value.op is None:
            continue
        carried = carrier.used[value.op]
        known[value] = replay(value, carried, known)
    return known[total]


def replay(value: Value, carried: Sequence[Value], known: Mapping[Value, Tensor]) -> Tensor:
    """Return a carried value computed again in float64, with `known` as the contents of its carried inputs.

    A norm has the denominators of the run, and its bias is left out.
    """
    op = value.op
    assert op is not None
    if value.norm is not None:
        norm: Norm = value.norm
        frozen = norm.denominator(norm.x.exact)
        return norm.linear(known[norm.x].reshape(norm.x.shape), frozen).reshape(value.shape)
    if "guard" in op.traits:
        return known[carried[0]]
    if "attention" in op.traits:
        weights = find_weights(op)
        assert weights is not None
        return weights @ known[carried[0]]
    if is_view(op):
        return replay_op(op, known[carried[0]])
    inputs = {v: known[v] if v in carried else _freeze(v) for v in op.inputs}
    return run_op(op, inputs)[op.outputs.index(value)]


def _freeze(value: Value) -> Tensor:
    tensor = value.tensor.detach()
    return tensor.double() if tensor.is_floating_point() else tensor


def _measure_column(
    carrier: Carrier, total: Value, operand: Value, source: Value, norm: Norm | None, zeros: Mapping[Value, Tensor],
    bias: Tensor, region: Mapping[Value, None],
) -> Column:  # fmt: skip
    streams = to_streams(carrier, operand)
    columns = []
    for j in range(streams.shape[1]):
        ones = torch.zeros_like(streams)
        ones[:, j] = 1.0
        inputs = {**zeros, operand: _from_streams(carrier, operand, ones)}
        columns.append(to_streams(carrier, total, _evaluate(carrier, total, inputs, region), zeros) - bias)
    matrix = torch.stack(columns, 2)
    size = matrix.abs().amax().clamp_min(1e-30)
    if bool(((matrix - matrix[..., :1]).abs() <= EQUAL * size).all()):
        matrix = matrix[..., :1]
    reached, frozen = {operand}, dict[Value, None]()
    for value in region:
        if value.op is not None and value not in zeros and not reached.isdisjoint(carrier.used[value.op]):
            reached.add(value)
            frozen.update(dict.fromkeys(v for v in value.op.inputs if v not in carrier.used[value.op]))
    kind = 0
    for value in frozen:
        kind |= 0 if _is_softmax_of_one(value) else value.kind
    return Column(source, operand, norm, matrix, kind, [*frozen])


def _is_softmax_of_one(value: Value) -> bool:
    """Return whether a coefficient is a softmax over one entry, as over the first state alone, and so always 1."""
    op = strip_views(value).op
    return op is not None and "softmax" in op.traits and op.outputs[0].shape[op.get("dim")] == 1


@dataclass(eq=False, repr=False)
class Matrix:
    """One matrix of a stage, or of the read at the end.

    Attributes:
        values: `(tokens, rows, columns, d)`, on the CPU; the last dimension has size one if all features have the same entries,
            and so has the first if all tokens do.
        source: "constant", "learned", or "computed" from the streams.
        operands: the frozen values of the run from which it is made.
    """

    values: Tensor
    source: str
    operands: list[Value]

    @property
    def mean(self) -> Tensor:
        """The mean over tokens and features, `(rows, columns)`."""
        return self.values.mean((0, 3))

    def to_dict(self) -> dict[str, Any]:
        """Return the source and the mean entries as JSON types."""
        rows, columns = self.values.shape[1:3]
        small = {"mean": self.mean.tolist()} if rows * columns <= MAX_ENTRIES else {}
        return {"source": self.source, "rows": rows, "columns": columns, **small}

    def __repr__(self) -> str:
        return f"<{self.source}, {self.values.shape[1]} x {self.values.shape[2]}>"


def assemble(carrier: Carrier, maps: Sequence[Map], sources: Sequence[Value], normed: bool = False) -> Matrix:
    """Return the matrices of several maps as one: its rows are their targets, its columns the streams of `sources`.

    The matrix multiplies the sources, or with `normed` the norms of the sources.
    """
    columns: list[Column] = []
    rows: list[Tensor] = []
    for part in maps:
        own = {column.source: column for column in part.columns if (column.norm is not None) == normed}
        blocks = []
        for source in sources:
            n = carrier.count_streams(source)
            if source in own:
                blocks.append(shrink(own[source].matrix))
                columns.append(own[source])
            else:
                shape = (1, carrier.count_streams(part.target), n, 1)
                blocks.append(part.target.tensor.new_zeros(shape, dtype=torch.float64))
        rows.append(join_blocks(blocks, 2))
    kind = 0
    for column in columns:
        kind |= column.kind
    name = "computed" if kind & DATA else "learned" if kind & PARAMETER else "constant"
    operands = [*dict.fromkeys(value for column in columns for value in column.operands)]
    return Matrix(join_blocks(rows, 1).cpu(), name, operands)


def shrink(matrix: Tensor) -> Tensor:
    """Return a matrix with one token if it is the same for all tokens."""
    first = matrix[:1]
    size = matrix.abs().amax().clamp_min(1e-30) if matrix.numel() else 1.0
    return first if len(matrix) and bool(((matrix - first).abs() <= 1e-9 * size).all()) else matrix


def join_blocks(blocks: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate matrices along `dim`. Dimensions of tokens and features of size 1 are expanded."""
    tokens, features = (max(block.shape[k] for block in blocks) for k in (0, -1))
    return torch.cat([block.expand(tokens, *block.shape[1:-1], features) for block in blocks], dim)
