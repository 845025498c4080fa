"""Proof of each fused call by itself, against the operators that it replaces.

A rewritten graph computes what the original computes if two things hold, and both are checked:

1. Every node that stays reads what it read before, or the result that replaced it (`wiring`).
2. The results of each call, as functions of all that either side reads, are those of the operators that it replaced: outputs and
   gradients, with random cotangents. They are compared in float64, where no rounding hides a difference, and in the graph's own
   dtypes, where the call may have as much round-off as the operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from addnorm.fusion.fused_call import (
    call_node,
    draw_normal,
    draw_row_factors,
    probe_shape,
    repeat_factors,
    run_nodes,
    takes_any_rows,
)
from addnorm.fusion.graph import (
    concrete,
    entered,
    example_value,
    given_value,
    is_number,
    layout_of,
    same_layout,
    shape_of,
    with_strides,
)
from addnorm.fusion.match import Match, dtype_name
from addnorm.fusion.rewrite import COEFFICIENTS, dimension_order
from addnorm.fusion.tolerance import (
    VERY_FEW,
    Difference,
    compare_exactly,
    compare_round_off,
    condition_of,
    failure,
    same_special,
    worst,
)  # fmt: skip
from addnorm.fusion.wiring import Rewrite, wiring_changes
from addnorm.stream.dataflow.graph import walk

MAX_ELEMENTS = 2**20  # of a sum that is also compared in the shape of the graph
MANY_ROWS = 131  # at least, in one of the comparisons: gradients of the weight are sums over rows
RMS_NORMS = (F.rms_norm, torch.rms_norm, torch.ops.aten.rms_norm.default)
NARROWING = {"float", "half", "bfloat16", "double"}  # methods that cast to a dtype
UNUSUAL = (1e4, 1e-6, 0.0, 1.0)  # factors of rows, in turn
UNUSUAL_HALF = (1e2, 1e-4, 0.0, 1.0)  # in float16, whose numbers end at 65504
# Factor of the round-off with several streams: terms of a coefficient's gradient cancel, since a norm ignores its input's scale.
CANCELLING = 8.0
SPECIAL = (math.nan, math.inf, -math.inf, None)  # put into one element of each row, in turn; None: the row is unchanged

Results = dict[str, Tensor]


def prove_calls(rewrite: Rewrite) -> list[Difference]:
    """Compare each fused call of a rewritten graph with the operators that it replaced.

    Calls with the same operators, arguments and kinds of inputs get the same random numbers, so one of them is run.

    Returns:
        For each call and precision the difference that is closest to its tolerance; an infinite one for each node that reads
        something else than before.
    """
    calls = [_Replacement(rewrite, match) for match in rewrite.matches]
    differences = [*wiring_changes(rewrite, {node: call.match for call in calls for node in call.after.nodes})]
    compared: dict[str, list[Difference]] = {}
    for call in calls:
        context = rewrite.traced.contexts[call.match.add]
        key = f"{call.key()} {context}"
        if key not in compared:
            compared[key] = call.compare(context)
        path = call.match.norm.path
        differences += [replace(difference, name=f"{path}: {difference.name}") for difference in compared[key]]
    return differences


@dataclass(frozen=True)
class _Side:
    """One side of a comparison: the operators before, or the fused call after.

    It has its nodes, its outputs, and for each outside node that it reads the node of the original graph, so that both sides can
    be fed the same values.
    """

    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    leaves: Mapping[fx.Node, fx.Node]


def _collect(rewrite: Rewrite, outputs: Sequence[fx.Node], is_inside: Callable[[fx.Node], bool]) -> _Side:
    """Collect the nodes for which `is_inside` is true and on which the outputs depend, and the outside nodes that they read."""
    nodes = [*walk(outputs, lambda node: node.all_input_nodes if is_inside(node) else ())]
    leaves = {node: rewrite.leaf_of(node) for node in nodes if not is_inside(node)}
    return _Side(tuple(sorted(filter(is_inside, nodes))), tuple(outputs), leaves)


class _Replacement:
    """The operators of one Add & Norm, and the call with the views around it that replaced them."""

    def __init__(self, rewrite: Rewrite, match: Match) -> None:
        self.graph, self.match, self.shape = rewrite.traced.graph, match, match.shape
        nodes = {name: [*dict.fromkeys(nodes)] for name, nodes in match.results.items()}
        self.names = [f"{name} {k}" if k else name for name, some in nodes.items() for k in range(len(some))]
        self.dtypes = {name: example_value(some[0]).dtype for name, some in nodes.items()}
        region = {node for node in match.nodes if not _is_given(node)}
        originals = [node for some in nodes.values() for node in some]
        results = [rewrite.current[node] for node in originals]
        self.before = _collect(rewrite, originals, region.__contains__)
        self.after = _collect(rewrite, results, lambda node: node in results or node not in rewrite.originals)
        self.leaves = [*dict.fromkeys((*self.before.leaves.values(), *self.after.leaves.values()))]
        self.roles = {rewrite.leaf_of(node): role for role, node in match.tensors.items()}
        self.operands = [rewrite.leaf_of(node) for node in match.operands]
        self.streams_dim = match.streams_dim

    def key(self) -> str:
        """Return a text that is equal for replacements that compute the same from inputs of the same kinds."""
        numbers: dict[fx.Node, str] = {leaf: f"leaf {k}" for k, leaf in enumerate(self.leaves)}
        sides = []
        for side in (self.before, self.after):
            names = {node: numbers[leaf] for node, leaf in side.leaves.items()}
            names |= {node: f"node {k}" for k, node in enumerate(side.nodes)}
            nodes = [
                (node.op, node.target if isinstance(node.target, str) else id(node.target),
                 fx.map_arg((node.args, node.kwargs), names.__getitem__))
                for node in side.nodes
            ]  # fmt: skip
            sides.append((nodes, [names[node] for node in side.outputs]))
        leaves = [(self._describe(leaf), self.roles.get(leaf), leaf in self.operands) for leaf in self.leaves]
        match = self.match
        results = [layout_of(example_value(nodes[0])) for nodes in (match.z, match.y) if nodes]
        return str((sides, leaves, self.names, results, match.norm.kind, match.norm.eps, takes_any_rows(match)))

    def _describe(self, leaf: fx.Node) -> Any:
        """Return a description of a leaf: all that decides which values `_fill` returns for it."""
        if leaf.op == "get_attr" and _is_given(leaf):
            value = given_value(self.graph, leaf)
            return (value.dtype, value.tolist()) if isinstance(value, Tensor) else leaf.name
        return concrete(example_value(leaf)) if _is_given(leaf) else layout_of(example_value(leaf))

    def compare(self, contexts: Sequence[Any]) -> list[Difference]:
        """Return the worst difference of each precision, on few rows and in the shape of the graph."""
        few, full = probe_shape(self.match), self.shape
        shapes = [few] if takes_any_rows(self.match) and few != full else []
        if shapes and math.prod(full[:-1]) < MANY_ROWS:
            shapes.append((*few[:-2], MANY_ROWS, few[-1]))
        found: dict[str, Difference] = {}
        for shape in (*shapes, full):
            if shape == full and found and math.prod(full) > MAX_ELEMENTS:
                continue
            try:
                with torch.inference_mode(False):
                    scale = self._scale(shape)
                    differences = [*self._compare_draw(shape, contexts, scale, apart=not found)]
                    if not found:  # large, small and zero rows, NaN and infinities too
                        differences += self._compare_draw(shape, contexts, self._scale(shape, unusual=True))
                        differences += self._compare_special(contexts, self._fill(shape, scale))
            except Exception as error:  # of any kind: the operators may accept no other shape than that of the graph
                differences = [("error", failure(f"{type(error).__name__} in a call by itself"))] * (shape == full)
            for precision, difference in differences:
                found[precision] = worst([*filter(None, [found.get(precision)]), difference]) or difference
        return [*found.values()]

    def _compare_draw(
        self, shape: tuple[int, ...], contexts: Sequence[Any], scale: Tensor, apart: bool = False
    ) -> Iterator[tuple[str, Difference]]:
        """Yield the differences for one draw of inputs, whose rows have the factors `scale`.

        With `apart` the gradient from each output alone is compared as well.
        """
        leaves = self._fill(shape, scale)
        before_effects, effects = set[str](), set[str]()
        with entered(contexts):
            before = self._run(self.before, leaves, scale, apart, before_effects)
            after = self._run(self.after, leaves, scale, apart, effects)
        with entered(contexts[:1]):
            exact = self._run_exactly(self.before, leaves, scale, apart)
            widened = None if exact is None else self._run_exactly(self.after, leaves, scale, apart)
        dtype, norm = dtype_name(example_value((*self.match.z, *self.match.y)[0]).dtype), self.match.norm
        total: Tensor = sum(leaves[node].detach().double() for node in self.operands)
        condition = condition_of(total, norm.kind, norm.eps or 0.0) * (1.0 if self.streams_dim is None else CANCELLING)
        yield from ((dtype, failure(effect)) for effect in effects - before_effects)
        for name in dict.fromkeys((*before, *after)):
            own, other = before.get(name), after.get(name)
            truth = None if exact is None else exact[name]
            for suffix, difference in compare_round_off(name, own, other, truth, condition, norm.kind):
                yield dtype, replace(difference, name=f"{name}{suffix}, {dtype}")
        for name in self.names if shape == self.shape else ():
            if before[name].numel() and not same_layout(before[name], after[name]):
                yield dtype, failure(f"strides of {name}")
        for name, truth in (exact or {}).items():
            other = None if widened is None else widened.get(name)
            yield "float64", compare_exactly(name, truth, other, shape[-1], condition)

    def _compare_special(
        self, contexts: Sequence[Any], leaves: Mapping[fx.Node, Any]
    ) -> Iterator[tuple[str, Difference]]:
        """Yield a failure for each result in which NaN or infinities are in other places after fusing."""
        for leaf in {*self.operands}:
            rows = leaves[leaf].detach().clone().reshape(-1, leaves[leaf].shape[-1])
            for k, row in enumerate(rows[:MANY_ROWS]):
                special = SPECIAL[k % len(SPECIAL)]
                if special is not None:
                    row[k // len(SPECIAL) % len(row)] = special
            with entered((False, *contexts[1:])):
                changed = {**leaves, leaf: rows.view_as(leaves[leaf])}
                before, after = (self._run(side, changed, rows) for side in (self.before, self.after))
            for name, result in before.items():
                other = after.get(name)
                if other is None or result.shape != other.shape or not same_special(result, other):
                    yield dtype_name(result.dtype), failure(f"places of NaN and infinity in {name}")

    def _scale(self, shape: tuple[int, ...], unusual: bool = False) -> Tensor:
        """Return a factor for each row of the inputs: random, or with `unusual` a fixed cycle of large, small and zero ones."""
        rows, factored = [*shape], (*shape[:-1], 1)
        if self.streams_dim is not None:  # one factor for all streams of a token: else the largest dominates their sum
            rows[self.streams_dim] = 1
        if not unusual:
            return draw_row_factors(torch.Generator().manual_seed(0), rows).expand(factored)
        is_half = torch.float16 in {*self.dtypes.values(), *(example_value(node).dtype for node in self.operands)}
        factors: Sequence[float] = UNUSUAL_HALF if is_half else UNUSUAL
        if self.match.norm.kind == "layer" and shape[-1] <= VERY_FEW:
            factors = [float(factor != 0.0) for factor in factors]
        if not self.match.norm.eps:
            factors = tuple(
                factor or 1.0 for factor in factors
            )  # else the row is NaN, and so are gradients of the weight
        return repeat_factors(factors, rows).expand(factored)

    def _fill(self, shape: tuple[int, ...], scale: Tensor) -> dict[fx.Node, Any]:
        """Return a value for each node that both sides read.

        It is a random tensor with the node's strides, or the graph's own number or constant of one element.
        """
        generator = torch.Generator().manual_seed(0)
        leaves: dict[fx.Node, Any] = {}
        for node in self.leaves:
            example = example_value(node)
            if _is_given(node):
                leaves[node] = given_value(self.graph, node)
                continue
            size, stride = shape_of(node), concrete(example.stride())
            noise = draw_normal(generator, shape if size == self.shape else size)
            if self.roles.get(node) in COEFFICIENTS:  # else streams may cancel, and their sum is round-off
                noise = noise.abs() + 0.3
            drawn = (noise + 0.3) * scale if size == self.shape else noise
            if drawn.shape != size:
                order = dimension_order(example)
                drawn = drawn.permute(order).contiguous().permute(sorted(order, key=order.__getitem__))
                stride = drawn.stride()
            drawn = with_strides(drawn.to(example.device, example.dtype), stride)
            leaves[node] = drawn.requires_grad_(example.requires_grad)
        return leaves

    def _run_exactly(self, side: _Side, leaves: Mapping[fx.Node, Any], scale: Tensor, apart: bool) -> Results | None:
        """Return the results in float64; None if an operator computes in another dtype, or cannot run in it."""
        wide = {node: _widen(value) for node, value in leaves.items()}
        try:
            results = self._run(side, wide, scale, apart, call=partial(_call_in_float64, self.match.norm.eps))
        except Exception:  # of any kind: not every operator has float64
            return None
        return results if all(tensor.dtype == torch.float64 for tensor in results.values()) else None

    def _run(
        self, side: _Side, leaves: Mapping[fx.Node, Any], scale: Tensor, apart: bool = False, effects: set[str] | None = None,
        call: Callable[..., Any] = call_node,
    ) -> Results:  # fmt: skip
        """Return the outputs of one side by name, and in grad mode the gradients of the leaves.

        `effects` receives a text for each leaf that is written, and for each result in the memory of another tensor.
        """
        inputs = {node: value for node, value in leaves.items() if isinstance(value, Tensor) and value.requires_grad}
        values = {node: _copy(leaves[leaf]) for node, leaf in side.leaves.items()}
        run_nodes(side.nodes, values, call)
        outputs = dict(zip(self.names, (values[node] for node in side.outputs), strict=True))
        if effects is not None:
            effects.update(_effects_of(outputs, {leaf: (values[n], leaves[leaf]) for n, leaf in side.leaves.items()}))
        results = {name: output.detach() for name, output in outputs.items()}
        outputs = {name: output for name, output in outputs.items() if output.requires_grad}
        if outputs and inputs:
            alone = outputs if apart and len(outputs) > 1 else ()
            for names, only in (([*outputs], ""), *(([name], f" from {name}") for name in alone)):
                cotangents = [self._cotangent(name, outputs[name], scale) for name in names]
                gradients = torch.autograd.grad(
                    [outputs[name] for name in names], [*inputs.values()], cotangents, allow_unused=True,
                    retain_graph=True,
                )  # fmt: skip
                for (node, value), gradient in zip(inputs.items(), gradients, strict=True):
                    name = f"gradient of {self.roles.get(node, node.name)}{only}"
                    results[name] = torch.zeros_like(value) if gradient is None else gradient
        return results

    def _cotangent(self, name: str, output: Tensor, scale: Tensor) -> Tensor:
        """Return a random gradient of an output.

        The gradient of y is multiplied by about the size of each row, so that small and large rows have input gradients of
        similar size.
        """
        drawn = draw_normal(torch.Generator().manual_seed(len(name)), output.shape)
        is_row = name.startswith("y") and output.shape[:-1] == scale.shape[:-1]
        deviation = scale.square().add(self.match.norm.eps or 0.0).sqrt().clamp_max(UNUSUAL[0])
        dtype = next(dtype for start, dtype in self.dtypes.items() if name.startswith(start))  # in the graph
        return (drawn * deviation if is_row else drawn).to(dtype).to(output.device, output.dtype)


def _call_in_float64(eps: float | None, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Call a node with float64 in place of the dtypes to which it casts.

    `eps` is for RMSNorm nodes without an eps, whose default depends on the dtype: it is the default for the dtype of the graph.
    """
    args, kwargs = pytree.tree_map(
        lambda value: torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value,
        (args, kwargs),
    )
    if node.op == "call_method" and node.target in NARROWING:
        return args[0].double()
    if node.target in RMS_NORMS and (args[3] if len(args) > 3 else kwargs.get("eps")) is None:
        args, kwargs = args[:3], {**kwargs, "eps": eps}
    return call_node(node, args, kwargs)


def _is_given(node: fx.Node) -> bool:
    """Return whether a node's value is fixed, such as eps, and must not become random.

    It is a number, or an attribute without a tensor or with a tensor of one element.
    """
    example = example_value(node)
    if node.op == "get_attr":
        return example is None or example.numel() == 1
    return example is not None and is_number(example)


def _widen(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    wide = with_strides(value.detach().double(), value.stride())
    return wide.requires_grad_(torch.is_grad_enabled() and value.requires_grad)


def _copy(value: Any) -> Any:
    """Return a copy of a tensor in memory of its own with the same strides."""
    return with_strides(value, value.stride()) if isinstance(value, Tensor) else value


def _effects_of(outputs: Results, leaves: Mapping[fx.Node, tuple[Any, Any]]) -> Iterator[str]:
    """Yield a text for each leaf that was written, and for each result in the memory of another tensor."""
    tensors = {leaf.name: pair for leaf, pair in leaves.items() if isinstance(pair[0], Tensor)}
    yield from (f"{name} is written" for name, (value, drawn) in tensors.items() if not torch.equal(value, drawn))
    places = {name: value for name, (value, _) in tensors.items()} | outputs
    memory = {name: tensor.untyped_storage().data_ptr() for name, tensor in places.items() if tensor.numel()}
    for name in outputs:
        others = [other for other in memory if memory[other] == memory.get(name) and other != name]
        yield from (f"{name} in the memory of {other}" for other in others)
