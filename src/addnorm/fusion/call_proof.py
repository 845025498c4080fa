"""Proof of each fused call by itself, against the operators that it replaces.

A rewritten graph computes what the original computes if two things hold, and both are checked:

1. Every node that stays reads what it read before, or the result that replaced it.
2. The results of each call, as functions of all that either side reads, are those of the operators that it replaced: outputs and
   gradients, with random cotangents. They are compared in float64, where no rounding hides a difference, and in the graph's own
   dtypes, where the call may have as much round-off as the operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from addnorm.fusion.boundary import Match, dtype_name
from addnorm.fusion.fused_call import call_node, entered, probe_shape, takes_any_rows
from addnorm.fusion.graph import TracedGraph, concrete, example_value, is_number
from addnorm.fusion.rewrite import dimension_order
from addnorm.fusion.tolerance import Difference, worst

__all__ = ["Original", "prove_calls"]

ROUNDINGS = 64  # in eps of float64, times the root of the width: between two orders of computing
GROWTH = 1.1  # of the root mean square of the operators' errors, plus half an eps; documented is a factor of 1.02
TIMES = 2  # the largest error may be that many times the operators' largest, plus two eps
SUMS = 4  # in eps of the dtype in which sums over rows are accumulated
USUAL = 8  # at most, the largest feature of a row of random numbers in standard deviations
SUM = "the sum"
MAX_ELEMENTS = 2**20  # of a sum that is also compared in the shape of the graph
NARROWING = {"float", "half", "bfloat16", "double"}  # methods that cast to a dtype

Results = dict[str, Tensor]


class Original:
    """Copy of a graph before the rewrite.

    Attributes:
        graph: the copy.
        twins: node of the graph -> its copy.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph: fx.Graph = graph.__deepcopy__()
        self.twins = dict(zip(graph.nodes, self.graph.nodes, strict=True))


def prove_calls(
    graph: fx.GraphModule, original: Original, traced: TracedGraph, matches: Iterable[Match],
    replaced: Mapping[fx.Node, fx.Node], contexts: Mapping[fx.Node, Sequence[Any]],
) -> list[Difference]:  # fmt: skip
    """Compare each fused call of a rewritten graph with the operators that it replaced.

    Args:
        graph: the graph after the rewrite.
        original: the graph before it.
        traced: the data flow of the graph before it.
        matches: the Add & Norms that were replaced.
        replaced: nodes of the graph before -> the nodes that replaced them.
        contexts: of the nodes before, as `contexts_of` returns them.

    Returns:
        For each call and precision the difference that is closest to its tolerance; an infinite one for each node that reads
        something else than before.
    """
    differences = [*_changed_nodes(graph.graph, original, replaced)]
    for match in matches:
        assert match.add is not None
        differences += _Replacement(graph, original, traced, match, replaced).compare(contexts[match.add])
    return differences


def _changed_nodes(graph: fx.Graph, original: Original, replaced: Mapping[fx.Node, fx.Node]) -> Iterator[Difference]:
    """Yield an infinite difference for each node that stays and reads something else than before."""
    current = {twin: replaced.get(node, node) for node, twin in original.twins.items()}
    for node in graph.nodes:
        twin = original.twins.get(node)
        if twin is None:
            continue
        expected = fx.map_arg((twin.args, twin.kwargs), current.__getitem__)
        if (node.op, node.target, node.args, node.kwargs) != (twin.op, twin.target, *expected):
            yield Difference(f"arguments of {node.name}", math.inf, None, 0.0, 0.0)


@dataclass(frozen=True)
class _Side:
    """One side of a replacement: nodes in order, their outputs, and the leaves that they read.

    A leaf is a node of the rewritten graph, so that both sides have the same.
    """

    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    leaves: Mapping[fx.Node, fx.Node]


def _collect(
    outputs: Sequence[fx.Node], is_inside: Callable[[fx.Node], bool], leaf_of: Callable[[fx.Node], fx.Node]
) -> _Side:
    """Return the nodes inside that compute the outputs, and what they read."""
    inside, leaves, todo = set[fx.Node](), dict[fx.Node, fx.Node](), [*outputs]
    while todo:
        node = todo.pop()
        if node in inside or node in leaves:
            continue
        if is_inside(node):
            inside.add(node)
            todo += node.all_input_nodes
        else:
            leaves[node] = leaf_of(node)
    return _Side(tuple(sorted(inside)), tuple(outputs), leaves)


class _Replacement:
    """The operators of one Add & Norm, and the call with the views around it that replaced them."""

    def __init__(
        self, graph: fx.GraphModule, original: Original, traced: TracedGraph, match: Match,
        replaced: Mapping[fx.Node, fx.Node],
    ) -> None:  # fmt: skip
        self.graph, self.match, twins = graph, match, original.twins
        node_of = {twin: node for node, twin in twins.items()}

        def leaf_of(node: fx.Node) -> fx.Node:
            """Return one node for all that return the same tensor, as dropout without effect does."""
            first = traced.nodes[traced.values[node]] if node in traced.values else node
            return replaced.get(first, first)

        y, z = ([node for node in dict.fromkeys(nodes) if node in replaced] for nodes in (match.y, match.z))
        counts = (("y", len(y)), (SUM, len(z)))
        self.names = [f"{name} {k}" if k else name for name, count in counts for k in range(count)]
        region = {twins[node] for node in (*match.inner, *match.z, *match.y) if not _is_given(node)}
        outputs = [*y, *z]
        self.before = _collect(
            [twins[node] for node in outputs], region.__contains__, lambda twin: leaf_of(node_of[twin])
        )
        results = [replaced[node] for node in outputs]
        others = {*replaced.values()} - {*results}
        self.after = _collect(results, lambda node: node not in twins and node not in others, leaf_of)
        self.leaves = [*dict.fromkeys((*self.before.leaves.values(), *self.after.leaves.values()))]
        roles = zip((*match.operands, match.weight, match.bias), ("residual", "branch", "weight", "bias"), strict=True)
        self.roles = {leaf_of(node): role for node, role in roles if node is not None}
        self.operands = [leaf_of(node) for node in match.operands]

    def compare(self, contexts: Sequence[Any]) -> list[Difference]:
        """Return the worst difference of each precision, on few rows and in the shape of the graph."""
        few, full = probe_shape(self.match), tuple(concrete(tuple(example_value(self.match.z[0]).shape)))
        found: dict[str, Difference] = {}
        for shape in dict.fromkeys((few, full)):
            if shape == few != full and not takes_any_rows(self.match):
                continue
            if shape == full and found and math.prod(full) > MAX_ELEMENTS:
                continue
            try:
                with torch.inference_mode(False):
                    differences = [*self._compare(shape, contexts)]
            except Exception as error:  # of any kind: the operators may accept no other shape than that of the graph
                problem = f"{self.match.norm.path}: {type(error).__name__} in a call by itself"
                differences = [("error", Difference(problem, math.inf, None, 0.0, 0.0))] * (shape == full)
            for precision, difference in differences:
                found[precision] = worst([*filter(None, [found.get(precision)]), difference]) or difference
        return [*found.values()]

    def _compare(self, shape: tuple[int, ...], contexts: Sequence[Any]) -> Iterator[tuple[str, Difference]]:
        """Yield all differences on random numbers of one shape, each with its precision."""
        leaves, scale = self._draw(shape)
        with entered(contexts):
            before, after = (self._run(side, leaves, scale) for side in (self.before, self.after))
        with entered(contexts[:1]):
            exact = self._run_exactly(self.before, leaves, scale)
            widened = None if exact is None else self._run_exactly(self.after, leaves, scale)
        dtype, condition = dtype_name(example_value(self.match.z[0]).dtype), self._condition(leaves)
        for name in before.keys() | after.keys():
            truth = None if exact is None else exact[name]
            for suffix, difference in _round_off(name, before.get(name), after.get(name), truth, condition):
                yield dtype, replace(difference, name=f"{self.match.norm.path}: {name}{suffix}, {dtype}")
        if exact is not None and widened is not None:
            bound = ROUNDINGS * torch.finfo(torch.float64).eps * math.sqrt(shape[-1]) * condition
            for name, truth in exact.items():
                size = max(_largest(truth), 1.0)
                error = _largest(truth - widened[name]) if truth.shape == widened[name].shape else math.inf
                label = f"{self.match.norm.path}: {name}, in float64"
                yield "float64", Difference(label, error, None, size, bound * size)

    def _draw(self, shape: tuple[int, ...]) -> tuple[dict[fx.Node, Any], Tensor]:
        """Return random leaves, and the factors of their rows; numbers and constants are the graph's."""
        generator = torch.Generator().manual_seed(0)
        full = tuple(concrete(tuple(example_value(self.match.z[0]).shape)))
        scale = 10.0 ** (4.0 * torch.rand((*shape[:-1], 1), generator=generator, dtype=torch.float64) - 3.0)
        leaves: dict[fx.Node, Any] = {}
        for node in self.leaves:
            example = example_value(node)
            if _is_given(node):
                leaves[node] = concrete(example) if node.op != "get_attr" else _attribute(self.graph, str(node.target))
                continue
            size = tuple(concrete(tuple(example.shape)))
            noise = torch.randn(shape if size == full else size, generator=generator, dtype=torch.float64)
            drawn = (noise + 0.3) * scale if size == full else noise
            order = dimension_order(example)
            drawn = drawn.permute(order).contiguous().permute(sorted(order, key=order.__getitem__))
            leaves[node] = drawn.to(example.device, example.dtype).requires_grad_(example.requires_grad)
        return leaves, scale

    def _condition(self, leaves: Mapping[fx.Node, Any]) -> float:
        """Return how much a LayerNorm magnifies round-off: more where the features of a row are nearly equal, as with d = 1."""
        if self.match.norm.kind != "layer":
            return 1.0
        z: Tensor = sum(leaves[node].detach().double() for node in self.operands)
        deviation = z.var(-1, correction=0).add(self.match.norm.eps or 0.0).sqrt()
        return max(1.0, float((z.abs().amax(-1) / deviation).max()) / USUAL)

    def _run_exactly(self, side: _Side, leaves: Mapping[fx.Node, Any], scale: Tensor) -> Results | None:
        """Return the results in float64; None if an operator computes in another dtype, or cannot run in it."""
        wide = {node: _widen(value) for node, value in leaves.items()}
        try:
            results = self._run(side, wide, scale, _call_in_float64)
        except Exception:  # of any kind: not every operator has float64
            return None
        return results if all(tensor.dtype == torch.float64 for tensor in results.values()) else None

    def _run(
        self, side: _Side, leaves: Mapping[fx.Node, Any], scale: Tensor, call: Callable[..., Any] = call_node
    ) -> Results:
        """Return the outputs of one side, and the gradients of the leaves if they are enabled, by name."""
        inputs = {node: value for node, value in leaves.items() if isinstance(value, Tensor) and value.requires_grad}
        values = {node: _copy(leaves[leaf]) for node, leaf in side.leaves.items()}
        for node in side.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = call(node, args, kwargs)
        outputs = dict(zip(self.names, (values[node] for node in side.outputs), strict=True))
        results = {name: output.detach() for name, output in outputs.items()}
        outputs = {name: output for name, output in outputs.items() if output.requires_grad}
        if outputs and inputs:
            cotangents = [self._cotangent(name, output, scale) for name, output in outputs.items()]
            gradients = torch.autograd.grad([*outputs.values()], [*inputs.values()], cotangents, allow_unused=True)
            for (node, value), gradient in zip(inputs.items(), gradients, strict=True):
                name = f"gradient of {self.roles.get(node, node.name)}"
                results[name] = torch.zeros_like(value) if gradient is None else gradient
        return results

    def _cotangent(self, name: str, output: Tensor, scale: Tensor) -> Tensor:
        """Return a random cotangent; that of y lets the gradients of all rows have about one size."""
        generator = torch.Generator().manual_seed(len(name))
        drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        is_row = name.startswith("y") and output.shape[:-1] == scale.shape[:-1]
        narrow = (drawn * scale if is_row else drawn).to(self._dtype_of(name))
        return narrow.to(output.device, output.dtype)

    def _dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of an output in the graph, whatever dtype it is computed in."""
        nodes = self.match.y if name.startswith("y") else self.match.z
        dtype: torch.dtype = example_value(nodes[0]).dtype
        return dtype


def _round_off(
    name: str, before: Tensor | None, after: Tensor | None, exact: Tensor | None, condition: float
) -> Iterator[tuple[str, Difference]]:
    """Yield what a call differs by in the graph's dtypes, with as much as round-off explains, and which norm that is."""
    if before is None or after is None or before.shape != after.shape or before.dtype != after.dtype:
        yield "", Difference(name, math.inf, None, 0.0, 0.0)
        return
    size, difference = max(_largest(before), 1.0), _largest(before.double() - after.double())
    eps = torch.finfo(before.dtype).eps
    if name.startswith(SUM):  # its bits are the original's
        yield "", Difference(name, difference, None, size, 0.0)
    elif exact is None:
        yield "", Difference(name, difference, None, size, ROUNDINGS * eps * size)
    else:
        errors = [tensor.double() - exact for tensor in (before, after)]
        sums = SUMS * condition * torch.finfo(torch.float64 if before.dtype == torch.float64 else torch.float32).eps
        own, error = map(_largest, errors)
        yield "", Difference(name, error, own, size, TIMES * own + (2 * eps + sums) * size)
        own, error = map(_root_mean_square, errors)
        size = max(_root_mean_square(exact), 0.1)
        yield " (RMS)", Difference(name, error, own, size, GROWTH * own + (eps / 2 + sums) * size)


def _call_in_float64(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Call a node with float64 in place of the dtypes to which it casts."""
    args, kwargs = pytree.tree_map(
        lambda value: torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value,
        (args, kwargs),
    )
    if node.op == "call_method" and node.target in NARROWING:
        return args[0].double()
    return call_node(node, args, kwargs)


def _is_given(node: fx.Node) -> bool:
    """Return whether a node is a number, or a constant of one element: the same in every call, as eps."""
    example = example_value(node)
    if node.op == "get_attr":
        return example is None or example.numel() == 1
    return example is not None and is_number(example)


def _attribute(graph: fx.GraphModule, name: str) -> Any:
    value: Any = graph
    for part in name.split("."):
        value = getattr(value, part)
    return value.detach() if isinstance(value, Tensor) else value


def _widen(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(torch.is_grad_enabled())


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value; infinite if there is a NaN."""
    return float(tensor.abs().nan_to_num(nan=math.inf).max()) if tensor.numel() else 0.0


def _root_mean_square(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt().nan_to_num(nan=math.inf)) if tensor.numel() else 0.0
