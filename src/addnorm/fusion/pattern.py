"""Where in a graph a norm reads a sum: the Add & Norms that one fused call can be; and why another one cannot.

A sum is any add of two tensors of the same shape: x + Sublayer(x), the stream at the end, embeddings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from addnorm.fusion import effects
from addnorm.fusion.traced import Traced, given_to, is_number, size_of
from addnorm.stream.dataflow.graph import CONSTANT, FAMILY, Op, Value
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.norms import find_norms
from addnorm.stream.find.operators import TRANSPARENT, match_terms, strip_views

__all__ = ["Boundary", "Match", "matches", "regions", "sum_of"]

COPIES = {"_to_copy", "clone", "contiguous"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Boundary:
    """An Add & Norm of a model.

    Attributes:
        add: the path of the module that adds.
        norm: the path of the module that normalizes the sum.
        kind: "layer", "rms" or "scale".
        eps: of the norm.
        stream: whether the sum itself goes on, as in pre-LN, or only what the norm makes of it.
        shape, dtype: of the sum.
        casting: where an RMSNorm in low precision rounds, as in `addnorm.add_rms_norm`.
        reason: why it is left as it was; None if it is fused.
        weight: the name of its weight in the graph.
    """

    add: str
    norm: str
    kind: str
    eps: float | None
    stream: bool
    shape: tuple[int, ...]
    dtype: str
    casting: str = "float32"
    reason: str | None = None
    weight: str | None = None

    @property
    def fused(self) -> bool:
        """Whether it is one call now."""
        return self.reason is None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {**dataclasses.asdict(self), "fused": self.fused}
        del found["weight"]
        return found


@dataclass(eq=False)
class Match:
    """A boundary in a graph: its nodes."""

    norm: Norm
    sum: Value
    add: fx.Node | None = None
    operands: tuple[fx.Node, ...] = ()
    z: tuple[fx.Node, ...] = ()  # all that return the sum
    y: tuple[fx.Node, ...] = ()  # all that return what the norm makes of it
    views: tuple[fx.Node, ...] = ()  # which the norm reads the sum through, the first one first
    weight: fx.Node | None = None
    bias: fx.Node | None = None
    casting: str = "float32"
    reason: str | None = None
    inner: list[fx.Node] = field(default_factory=list)  # from the sum to what the norm makes of it

    def told(self) -> Boundary:
        """For the user."""
        assert self.sum.op is not None
        if self.z:
            inner = {*self.inner, *self.z, *self.views}
            goes_on = any(user not in inner for node in self.z for user in node.users)
        else:
            goes_on = any(op not in self.norm.ops for op in self.sum.users)
        return Boundary(
            self.sum.op.frame.path, self.norm.path, self.norm.kind, self.norm.eps, goes_on, self.sum.shape,
            _word(self.sum.tensor.dtype), self.casting, self.reason, None if self.weight is None else self.weight.name,
        )  # fmt: skip


def matches(
    graph: fx.GraphModule, traced: Traced, settle: Callable[[Match], str | None] = lambda match: None
) -> list[Match]:
    """The boundaries of a graph, in order; one that cannot be fused has its reason: of its nodes, or what `settle` says."""
    order = {node: k for k, node in enumerate(graph.graph.nodes)}
    region = regions(graph)
    found: list[Match] = []
    fused: dict[Value, Match] = {}  # by their sum
    for norm in sorted(find_norms(traced.flow, proven=False), key=lambda norm: norm.y.index):
        match = sum_of(norm)
        if match is None:
            continue
        if match.sum in fused:
            match.reason = f"its sum is fused with the norm in {fused[match.sum].norm.path}"
        else:
            match.reason = _reason(match, traced, order, region)
            if match.reason is None:
                match.reason = settle(match)
            if match.reason is None:
                fused[match.sum] = match
        found.append(match)
    return found


def sum_of(norm: Norm) -> Match | None:
    """The norm with the add whose sum it reads; None where it reads something else, or our own operation did both."""
    value = strip_views(norm.x)
    if value.op is None or match_terms(value.op) is None or not value.tensor.is_floating_point():
        return None
    if value.op.origin.startswith(FAMILY) and any(op.origin.startswith(FAMILY) for op in norm.ops):
        return None
    return Match(norm, value)


REASONS: dict[str, Callable[[Norm], bool]] = {
    "its norm divides by a length, not by a root of a mean": lambda norm: norm.kind == "scale" or norm.uses_length,
    "its norm divides the squares by d - 1": lambda norm: norm.unbiased,
    "its norm adds eps to the root, not below it": lambda norm: norm.eps_outside,
}


def _reason(match: Match, traced: Traced, order: dict[fx.Node, int], region: dict[fx.Node, Any]) -> str | None:
    """Finds the nodes of a boundary, or why it cannot be fused."""
    for text, holds in REASONS.items():
        if holds(match.norm):
            return text
    steps: tuple[Callable[[], str | None], ...] = (
        lambda: _find_add(match, traced, order),
        lambda: _find_gains(match, traced),
        lambda: _find_norm(match, traced, order),
        lambda: _find_views(match, traced),
        lambda: _same_region(match, region),
        lambda: effects.add_in_place(match, traced, order),
        lambda: effects.norm_in_place(match, traced, order),
        lambda: effects.kept(match, traced, order),
        lambda: effects.detached(match, traced),
        lambda: effects.changing(match, traced),
        lambda: effects.gains_after(match, traced, order, region),
    )
    return next((reason for step in steps if (reason := step()) is not None), None)


def _find_add(match: Match, traced: Traced, order: dict[fx.Node, int]) -> str | None:
    op = match.sum.op
    assert op is not None
    node = traced.at[op]
    if node in traced.transformed:
        return "it is computed inside of a transform of torch.func"
    terms = match_terms(op)
    assert terms is not None
    if op.name != "add" or any(term.factor != 1.0 or term.scale is not None for term in terms):
        return f"its add is a {op.name} with a factor"
    if [other for other in traced.ran[node] if other is not op and other.name not in TRANSPARENT]:
        return f"its add is a part of {_name(node)}"
    operands = tuple(traced.nodes.get(term.value) for term in terms)
    if any(operand is None or order[operand] > order[node] for operand in operands):
        return f"its add is a part of {_name(node)}"
    z = tuple(other for other, value in traced.values.items() if value is match.sum)
    if node not in z:
        return f"its add is a part of {_name(node)}"
    match.add, match.z = node, z
    match.operands = tuple(operand for operand in operands if operand is not None)
    return _unlike(node, *match.operands)


def _unlike(node: fx.Node, one: fx.Node, two: fx.Node) -> str | None:
    """Why the operation would refuse the operands."""
    x, f = given_to(one), given_to(two)
    if not isinstance(x, Tensor) or not isinstance(f, Tensor):
        return f"its add is a part of {_name(node)}"
    if not _same_shape(x, f):
        return "its add broadcasts"
    if x.dtype not in DTYPES or f.dtype not in DTYPES:
        return f"it adds {_word(x.dtype)} and {_word(f.dtype)}"
    if x.device != f.device:
        return f"it adds tensors of {x.device} and {f.device}"
    return None


def _same_shape(x: Tensor, f: Tensor) -> bool:
    """Whether two shapes are the same for every size that the graph may be run with."""
    if x.dim() != f.dim():
        return False
    return all(size_of(m) == size_of(n) for m, n in zip(x.shape, f.shape, strict=True))


def _find_norm(match: Match, traced: Traced, order: dict[fx.Node, int]) -> str | None:
    value = match.norm.y
    while (cast := _only_cast(value)) is not None and cast in traced.nodes:
        value = cast
    y = tuple(node for node, other in traced.values.items() if other is value)
    if not y:
        assert value.op is not None
        return f"its norm is a part of {_name(traced.at[value.op])}"
    match.y = y
    inner = _between(y[0], {*match.z, match.weight, match.bias}, traced)
    if inner is None:
        return "its norm depends on more than the sum and its parameters"
    match.inner = sorted(inner, key=order.__getitem__)
    return None


def _only_cast(value: Value) -> Value | None:
    """The same in another dtype, if nobody reads this one."""
    users = {*value.users}
    op = next(iter(users)) if len(users) == 1 else None
    if op is None or op.name != "_to_copy" or op.outputs[0].tensor.dtype not in DTYPES:
        return None
    return op.outputs[0] if op.outputs[0].tensor.device == value.tensor.device else None


def _between(y: fx.Node, ends: set[fx.Node | None], traced: Traced) -> set[fx.Node] | None:
    """The nodes that make y of the sum, weight and bias; None if anything but constants comes in from elsewhere."""
    found: set[fx.Node] = set()
    todo = [y]
    while todo:
        node = todo.pop()
        if node in found or node in ends or is_number(given_to(node)):
            continue
        if node.op == "placeholder" or (node.op == "get_attr" and traced.kind(node) != CONSTANT):
            return None
        found.add(node)
        todo += node.all_input_nodes
    return found


def _find_gains(match: Match, traced: Traced) -> str | None:
    d = match.sum.shape[-1]
    if match.norm.x.shape[-1:] != (d,):
        return "its norm is not over the last dimension of its sum"
    for name in ("weight", "bias"):
        value: Value | None = getattr(match.norm, name)
        if value is None:
            continue
        node = traced.nodes.get(value)
        if node is None:
            return f"its {name} is made inside {_name(traced.at[value.op]) if value.op is not None else 'another call'}"
        if value.tensor.numel() != d:
            return f"its {name} is one number, not one for each of {d} features"
        if value.tensor.dtype not in DTYPES:
            return f"its {name} is {_word(value.tensor.dtype)}"
        setattr(match, name, node)
    return None


def _find_views(match: Match, traced: Traced) -> str | None:
    """The views through which the norm reads the sum, where they change its shape."""
    if match.norm.y.shape == match.sum.shape and _same_shape(given_to(match.y[0]), given_to(match.z[0])):
        return None
    value, views = max((_down(match, op) for op in match.norm.ops), key=lambda pair: len(pair[1]))
    nodes = dict.fromkeys(traced.at[op] for op in reversed(views))
    ran = {node: {op.name for op in traced.ran[node]} for node in nodes}
    if any(names - TRANSPARENT for names in ran.values()) or value.shape != match.norm.y.shape:
        return f"the sum has the shape {match.sum.shape}, and its norm {match.norm.y.shape}"
    match.views = tuple(node for node, names in ran.items() if names - COPIES)
    return None


def _down(match: Match, op: Op) -> tuple[Value, list[Op]]:
    """What an operator of the norm reads of the sum, and the views on the way, the last one first."""
    for start in op.inputs:
        value, views = start, []
        while value is not match.sum and value.op is not None and value.op.name in TRANSPARENT and value.op.inputs:
            views.append(value.op)
            value = value.op.inputs[0]
        if value is match.sum:
            return start, views
    return match.sum, []


def _same_region(match: Match, region: dict[fx.Node, Any]) -> str | None:
    assert match.add is not None
    here = region[match.add]
    if any(region[node] != here for node in match.inner):
        return "autocast, or whether gradients are taken, changes between the add and the norm"
    return None


def regions(graph: fx.GraphModule) -> dict[fx.Node, tuple[Any, ...]]:
    """For each node the contexts that the graph has entered: whether gradients are taken, and the autocasts.

    It begins as it is now: the frontend gives a graph to its backend in the state in which the graph will begin.
    """
    grad: Any = torch.is_grad_enabled()
    entered: list[fx.Node] = []
    found: dict[fx.Node, tuple[Any, ...]] = {}
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "_set_grad_enabled":
            grad = node.args[0]
        elif name.startswith("_enter_"):
            entered.append(node)
        elif name.startswith("_exit_") and node.args and node.args[0] in entered:
            entered.remove(node.args[0])
        found[node] = (grad, *entered)
    return found


def _name(node: fx.Node) -> str:
    target = node.target
    return str(getattr(target, "__name__", target)) if not isinstance(target, str) else target


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
