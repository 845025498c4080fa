"""The backend of torch.compile: a graph's Add & Norms become fused calls, and it runs eagerly or goes on to Inductor.

    torch.compile(model, backend="addnorm")
    torch.compile(model, backend="addnorm", options={"inductor": True})

Installed, it has that name; elsewhere `backend` itself is what torch.compile takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from addnorm.fusion import call, encoder
from addnorm.fusion.pattern import Boundary, matches, regions
from addnorm.fusion.rewrite import rewrite, straighten
from addnorm.fusion.traced import Named, Traced, trace

__all__ = ["Graph", "backend", "bodies", "compiled", "eager", "fused_graph", "path_of"]

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
    for node in bodies(graph):
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


def bodies(graph: fx.GraphModule) -> list[fx.Node]:
    """The activation checkpoints of a graph."""
    target = torch.ops.higher_order.tag_activation_checkpoint
    return [node for node in graph.graph.nodes if node.op == "call_function" and node.target is target]


def _body(graph: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    """The graph of what is checkpointed."""
    body = node.args[0]
    assert isinstance(body, fx.Node)
    inner = graph.get_submodule(str(body.target))
    assert isinstance(inner, fx.GraphModule)
    return inner


def compiled(
    graph: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None = None, options: dict[str, Any] | None = None
) -> Graph:
    """The graph compiled by Inductor."""
    from torch._inductor import compile_fx, list_mode_options  # heavy

    patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    function: Any = compile_fx.compile_fx(graph, list(example_inputs), config_patches=patches or None)
    return cast(Graph, function)


def fused_graph(
    graph: fx.GraphModule, named: Named | None = None, kinds: Sequence[int] | None = None
) -> list[Boundary]:
    """Rewrites a graph, and those that it calls; its boundaries, fused or left.

    Args:
        graph: is changed.
        named: the path of the module in which the frontend met a node.
        kinds: of its inputs (`stream.flow.graph`), where their nodes do not tell it.
    """
    named = path_of if named is None else named
    encoder.lower(graph.graph)
    straighten(graph.graph)
    traced = trace(graph, named, kinds)
    found = _inside(graph, traced, named)
    now: dict[fx.Node, fx.Node] = {}
    for match in matches(graph, traced, lambda match: call.settle(match, graph)):
        found.append(match.told())
        if match.reason is None:
            rewrite(graph.graph, match, now)
    graph.graph.lint()
    graph.recompile()
    return found


def _inside(graph: fx.GraphModule, traced: Traced, named: Named) -> list[Boundary]:
    """The boundaries in what is checkpointed."""
    found = []
    region = regions(graph)
    for node in bodies(graph):
        with call.inside(region[node]):
            found += fused_graph(_body(graph, node), named, [traced.kind(arg) for arg in node.args[1:]])
    return found


def path_of(node: fx.Node) -> str:
    """The path of the module in which the frontend met a node, from the compiled one."""
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return stack[-1].partition("]")[2].lstrip(".") if stack else ""
