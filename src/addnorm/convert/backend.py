"""The backend of torch.compile: the graph's Add & Norms become fused calls, and it runs eagerly or goes on to Inductor.

    torch.compile(model, backend="addnorm")
    torch.compile(model, backend="addnorm", options={"inductor": True})
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from addnorm.convert import call, encoder
from addnorm.convert.boundary import Boundary, Match, matches
from addnorm.convert.rewrite import rewrite, straighten
from addnorm.convert.traced import Traced, given_to, numbers_of, trace

__all__ = ["backend", "fused_graph"]

Graph = Callable[..., Any]


def backend(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Graph:  # fmt: skip
    """What torch.compile calls with each graph.

    Args:
        graph: as torch.compile's frontend captured it.
        example_inputs: of the graph.
        mode: of Inductor; None for its default.
        options: `{"inductor": True}` hands the graph on to Inductor; other entries are Inductor's.
    """
    given = dict(options or {})
    inductor = given.pop("inductor", False)
    if (given or mode) and not inductor:
        what = ", ".join([*given, *(["mode"] if mode else [])])
        raise ValueError(f'backend "addnorm" has no {what}; Inductor has: options={{"inductor": True, ...}}.')
    fused_graph(graph)
    return compiled(graph, example_inputs, mode, given) if inductor else eager(graph)


def eager(graph: fx.GraphModule) -> Graph:
    """The graph as a function, its activation checkpoints as they are without a compiler."""
    for node in _bodies(graph):
        eager(_body(graph, node))
        node.target = checkpointed
    graph.recompile()
    forward: Graph = graph.forward
    return forward


def checkpointed(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """An activation checkpoint.

    Run eagerly, the frontend's own operator would draw other random numbers when it computes again than it drew before.
    """
    options = {"preserve_rng_state": True, **kwargs, "use_reentrant": False}
    if "_checkpoint_context_fn" in body.meta:
        options["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *args, **options)


def _bodies(graph: fx.GraphModule) -> list[fx.Node]:
    """The activation checkpoints of a graph."""
    target = torch.ops.higher_order.tag_activation_checkpoint
    return [node for node in graph.graph.nodes if node.op == "call_function" and node.target is target]


def _body(graph: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    """The graph of what is checkpointed."""
    body = node.args[0]
    assert isinstance(body, fx.Node)
    return graph.get_submodule(str(body.target))


def compiled(
    graph: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None = None, options: dict[str, Any] | None = None
) -> Graph:
    """The graph compiled by Inductor."""
    from torch._inductor import compile_fx, list_mode_options  # heavy

    patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    return compile_fx.compile_fx(graph, list(example_inputs), config_patches=patches or None)  # type: ignore[no-any-return]


def fused_graph(
    graph: fx.GraphModule, named: Callable[[fx.Node], str] | None = None, kinds: Sequence[int] | None = None
) -> list[Boundary]:
    """Rewrites a graph, and those that it calls; its boundaries, fused or left.

    Args:
        graph: is changed.
        named: the path of the module in which the frontend met a node.
        kinds: of its inputs (`stream.flow.graph`), where their nodes do not tell it.
    """
    named = named or _path
    encoder.lower(graph.graph)
    straighten(graph.graph)
    traced = trace(graph, kinds)
    found = _inside(graph, traced, named)
    now: dict[fx.Node, fx.Node] = {}
    for match in matches(graph, traced):
        if match.reason is None:
            match.reason = call.settle(match, graph)
        told = boundary(match, traced, named)
        if match.reason is None:
            rewrite(graph.graph, match, now)
        found.append(told)
    graph.graph.lint()
    graph.recompile()
    return found


def boundary(match: Match, traced: Traced, named: Callable[[fx.Node], str]) -> Boundary:
    """As the user is told."""
    assert match.sum.op is not None and match.norm.y.op is not None
    norm = match.norm
    inner = {*match.inner, *match.z}
    return Boundary(
        add=named(traced.at[match.sum.op]), norm=named(traced.at[match.norm.y.op]), kind=norm.kind, eps=norm.eps,
        stream=any(user not in inner for node in match.z for user in node.users), shape=match.sum.shape,
        dtype=str(match.sum.tensor.dtype).removeprefix("torch."), casting=match.casting, reason=match.reason,
    )  # fmt: skip


def _inside(graph: fx.GraphModule, traced: Traced, named: Callable[[fx.Node], str]) -> list[Boundary]:
    """The boundaries in what is checkpointed."""
    found = []
    for node in _bodies(graph):
        found += fused_graph(_body(graph, node), named, [traced.kind(arg) for arg in node.args[1:]])
    return found


def _path(node: fx.Node) -> str:
    """The path of the module in which the frontend met a node, from the compiled one."""
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return stack[-1].partition("]")[2].lstrip(".") if stack else ""


