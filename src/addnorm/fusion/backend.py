"""Backends of torch.compile: the Add & Norms of each graph become fused calls, then the graph runs eagerly or goes to Inductor.

    torch.compile(model, backend="addnorm")
    torch.compile(model, backend="addnorm", options={"inductor": True})

The name works wherever addnorm is installed; `backend` itself is what torch.compile accepts. `ModelBackend` is the backend of
`fuse`: it records the Add & Norms of one model.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from addnorm.fusion.benchmark import NodeTimer, measure_share
from addnorm.fusion.call_proof import prove_calls
from addnorm.fusion.encoder import expand_encoder_layers
from addnorm.fusion.fused_call import choose_casting
from addnorm.fusion.graph import PathOf, TracedGraph, entered, source_of, trace_graph
from addnorm.fusion.match import Boundary, Match, match_sum, surplus
from addnorm.fusion.pattern import find_matches
from addnorm.fusion.rewrite import erase_unused, insert_fused_call, insert_streams_call, read_written_values
from addnorm.fusion.streams import StreamMatch, find_stream_matches
from addnorm.fusion.tolerance import Difference, failure, worst
from addnorm.fusion.unrecognized import unrecognized_writes
from addnorm.fusion.wiring import Rewrite
from addnorm.stream.dataflow.arithmetic import strip_views
from addnorm.stream.dataflow.graph import Flow
from addnorm.stream.dataflow.snapshot import StateSnapshot
from addnorm.stream.find.norms import find_norms
from addnorm.stream.inspect import capture_flow
from addnorm.stream.program.build import count_streams

Forward = Callable[..., Any]
PARAMETER_OF_SELF = re.compile(r"L\['self'\]((?:\._modules\[[^\]]*\])*)\._parameters\[")
TORCH_RNG = {"fallback_random": True}  # option of Inductor: draw random numbers as torch does
GRAPH_BREAK = "a graph break separates its add and its norm"
NOT_CAPTURED = "torch.compile captures no graph of it"
UNPROVEN = "a call of several streams in its graph does not pass the proof by itself"
CAPTURED_ANEW = (
    "torch.compile captures the model anew at every call, or no longer, as with a counter of calls, or a hook that appends to a "
    "list"
)
PLACE = attrgetter("add", "norm", "kind")
CALLS = 3  # an earlier graph must be reused within these: a number that changes between calls causes one more capture


def backend(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Forward:  # fmt: skip
    """Fuse the Add & Norms of a graph; the backend that torch.compile calls.

    Args:
        graph: the graph from torch.compile's frontend.
        example_inputs: the graph's example inputs.
        mode: Inductor's mode; None for its default.
        options: `{"inductor": True}` passes the graph on to Inductor; other entries are options of Inductor.

    Returns:
        The function that torch.compile runs in place of the graph.

    Raises:
        ValueError: options of Inductor are passed without `{"inductor": True}`.
    """
    inductor_options = dict(options or {})
    inductor = inductor_options.pop("inductor", False)
    if (inductor_options or mode) and not inductor:
        names = ", ".join([*inductor_options, *(["mode"] if mode else [])])
        raise ValueError(f'backend "addnorm" has no {names}; Inductor has: options={{"inductor": True, ...}}.')
    warn_of_failures(fuse_graph(graph).differences)
    return compile_graph(graph, example_inputs, mode, inductor_options) if inductor else run_eagerly(graph)


def warn_of_failures(differences: Sequence[Difference]) -> None:
    """Warn that a graph stays as it was, if one of the differences of its fused calls exceeds the tolerance."""
    most = worst(differences)
    if most is not None and not most.holds:
        warnings.warn(f"a graph is not fused: {most}.", stacklevel=3)


def run_eagerly(graph: fx.GraphModule) -> Forward:
    """Return a graph as a function that runs eagerly, activation checkpoints included."""
    for node in _checkpoint_nodes(graph):
        run_eagerly(_checkpoint_body(graph, node))
        node.target = _checkpoint
    graph.recompile()
    forward: Forward = graph.forward
    return forward


def _checkpoint(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Run an activation checkpoint.

    The frontend's own operator, run eagerly, draws other random numbers in the recomputation than in the forward.
    """
    options = {"preserve_rng_state": True, **kwargs, "use_reentrant": False}
    if "_checkpoint_context_fn" in body.meta:
        options["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *args, **options)


def _checkpoint_nodes(graph: fx.GraphModule) -> list[fx.Node]:
    target = torch.ops.higher_order.tag_activation_checkpoint
    return [node for node in graph.graph.nodes if node.op == "call_function" and node.target is target]


def _checkpoint_body(graph: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    """Return the graph that an activation checkpoint runs."""
    body: Any = node.args[0]
    return cast(fx.GraphModule, graph.get_submodule(body.target))


def compile_graph(
    graph: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None = None, options: dict[str, Any] | None = None
) -> Forward:
    """Compile a graph with Inductor."""
    from torch._inductor import compile_fx, list_mode_options  # slow to import

    patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    function: Any = compile_fx.compile_fx(graph, list(example_inputs), config_patches=patches or None)
    return cast(Forward, function)


class FusedGraph(NamedTuple):
    """Result of `fuse_graph`.

    Attributes:
        boundaries: all Add & Norms; those that are not fused have a reason.
        differences: of the fused calls from the operators that they replaced, as `prove_calls` returns them.
        matches: the Add & Norms as nodes of the graph before it was rewritten, without those of activation checkpoints.
        flow: the data flow of the graph before it was rewritten.
    """

    boundaries: list[Boundary]
    differences: list[Difference]
    matches: list[Match]
    flow: Flow


def fuse_graph(graph: fx.GraphModule, path_of: PathOf | None = None, kinds: Sequence[int] | None = None) -> FusedGraph:
    """Fuse the Add & Norms of a graph and of its activation checkpoints, and prove each fused call by itself.

    If a proof fails, the graph stays as it was.

    Args:
        graph: the graph, which is changed in place.
        path_of: function that returns the path of a node's module; None reads the node's metadata.
        kinds: what each input depends on, as in `trace_graph`.

    """
    path_of = _path_in_metadata if path_of is None else path_of
    expand_encoder_layers(graph.graph)
    read_written_values(graph.graph)
    traced = trace_graph(graph, path_of, kinds)
    norms = find_norms(traced.flow, proven=False)
    streams = find_stream_matches(traced, norms)
    written = {strip_views(match.sum) for match in streams if match.reason is None and match.written is not None}
    taken = {match.norm for match in streams}
    norms = [norm for norm in norms if norm not in taken]
    matches = [*streams, *find_matches(traced, norms, written, lambda match: choose_casting(match, traced))]
    matches.sort(key=lambda match: match.norm.y.index)
    fused = FusedGraph([], [], matches, traced.flow)
    for node in _checkpoint_nodes(graph):
        with entered(traced.contexts[node]):
            body = fuse_graph(_checkpoint_body(graph, node), path_of, [traced.kind(arg) for arg in node.args[1:]])
        fused.boundaries.extend(body.boundaries)
        fused.differences.extend(body.differences)
    rewrite, differences = _rewrite(traced, matches)
    if not all(difference.holds for difference in differences) and streams:
        for match in streams:
            match.reason = match.reason or UNPROVEN
        rewrite, differences = _rewrite(traced, matches)
    fused.boundaries.extend(match.to_boundary() for match in matches)
    fused.differences.extend(differences)
    if rewrite is not None and all(difference.holds for difference in differences):
        graph.graph = rewrite.graph
    graph.graph.lint()
    graph.recompile()
    return fused


def _rewrite(traced: TracedGraph, matches: Sequence[Match]) -> tuple[Rewrite | None, list[Difference]]:
    """Return a copy of a graph with its fused calls, or None if nothing can be fused, and the proof of each call."""
    fusable = [match for match in matches if match.reason is None]
    if not fusable:
        return None, []
    rewrite = Rewrite(traced, fusable)
    for match in fusable:
        if isinstance(match, StreamMatch):
            insert_streams_call(rewrite.graph, match, rewrite.current)
        else:
            insert_fused_call(rewrite.graph, match, rewrite.current)
    # Several nodes may return y, since a cast without effect does too.
    replaced = {rewrite.copies[node] for match in fusable for node in match.nodes}
    erase_unused(rewrite.graph, replaced)
    try:
        rewrite.graph.lint()
    except RuntimeError:
        return rewrite, [failure("order of the nodes")]
    return rewrite, prove_calls(rewrite)


def _path_in_metadata(node: fx.Node) -> str:
    """Return the path of the module that a node comes from, relative to the compiled module."""
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return stack[-1].partition("]")[2].lstrip(".") if stack else ""


class ModelBackend:
    """Backend for one model, which records the Add & Norms that ran.

    The frontend captures separate graphs with gradients and without. It may also run one graph for several identical layers,
    which only the parameters in its inputs tell apart.

    Attributes:
        inductor: whether graphs go to Inductor.
        runs: for each recorded call of the model, the Add & Norms of each graph that ran.
        differences: differences of the fused calls in all graphs from the operators that they replaced.
    """

    def __init__(self, model: nn.Module, inductor: bool) -> None:
        # The model itself is not stored: the frontend keeps its backends alive.
        self.inductor = inductor
        self.runs: list[list[tuple[Boundary, ...]]] = []
        self.differences: list[Difference] = []
        self._is_recording, self._is_timing = True, False
        self._timers: list[NodeTimer] = []
        self._num_captured = self._num_runs = 0
        self._has_checkpoints = self._has_streams = False
        self._root = ""
        self._paths = {str(id(module)): path for path, module in model.named_modules()}
        self._owners = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters(remove_duplicate=False)}

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Forward:
        """Fuse a graph and return the function that runs it, as torch.compile requires."""
        self._num_captured += 1
        self._root = self._root_of(graph)
        self._has_checkpoints |= bool(_checkpoint_nodes(graph))
        number = len(self._timers) if self._is_recording else None
        original = graph.graph
        boundaries, differences, matches, flow = fuse_graph(graph, self._path_of)
        if self._is_recording:
            self._has_streams = self._has_streams or count_streams(flow) > 1
            self._timers.append(NodeTimer(graph, original, matches))
            self.differences += differences
        else:
            warn_of_failures(differences)
        inputs = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        weights = [inputs.index(boundary.weight) if boundary.weight in inputs else None for boundary in boundaries]
        forward = compile_graph(graph, example_inputs, options=TORCH_RNG) if self.inductor else run_eagerly(graph)

        is_fused = any(boundary.is_fused for boundary in boundaries)

        def run(*values: Any) -> Any:
            self._num_runs += is_fused
            if self._is_timing and number is not None:
                return self._timers[number].run(*values)
            if self._is_recording:
                paths = (self._owner(values[k]) if k is not None else None for k in weights)
                located = tuple(_relocate(boundary, path) for boundary, path in zip(boundaries, paths, strict=True))
                self.runs[-1].append(located)
            return forward(*values)

        return run

    def _path_of(self, node: fx.Node) -> str:
        """Return the path of the module that a node comes from."""
        stack: list[str] = [*node.meta.get("nn_module_stack", {})]
        paths = (self._paths.get(key.partition("@")[0]) for key in reversed(stack))
        return next((path for path in paths if path is not None), self._root)

    def _root_of(self, graph: fx.GraphModule) -> str:
        """Return the path of the module in whose forward a graph starts: after a graph break perhaps a submodule.

        The path is "" for the model itself, and if no parameter of the graph tells the module.
        """
        for node in graph.graph.nodes:
            graph_arg = node.meta.get("grapharg") if node.op == "placeholder" else None
            path = self._owner(graph_arg.example) if graph_arg is not None else None
            match = PARAMETER_OF_SELF.match(source_of(graph_arg)) if path is not None else None
            if path is not None and match is not None:
                parts = path.split(".") if path else []
                return ".".join(parts[: len(parts) - match[1].count("._modules[")])
        return ""

    def _owner(self, parameter: Tensor) -> str | None:
        return self._owners.get(id(parameter))

    def recorded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call of the fused model that records which Add & Norms it runs."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.runs.append([])
            return call(*args, **kwargs)

        return recorded

    def stop_recording(self) -> None:
        """Record no more Add & Norms, and drop the timers' copies of the graphs."""
        self._is_recording = self._is_timing = False
        self._timers = []

    def is_reused(self, call: Callable[[], Any], state: StateSnapshot) -> bool:
        """Return whether another call of the fused model runs fused graphs that are captured already.

        The model's state changes from call to call, as in use, and is restored after the last call. The first call does not
        count: the graphs were captured with the same state.
        """
        with state.restored():
            call()
            for _ in range(CALLS):
                captured, runs = self._num_captured, self._num_runs
                call()
                if self._num_captured == captured:
                    return self._num_runs > runs
        return False

    def measure_share(self, call: Callable[[], Any], state: StateSnapshot) -> float | None:
        """Return the share of Add & Norm in a forward pass before fusing; None if unknown, as with checkpoints."""
        if self._has_checkpoints or not self._timers:
            return None
        self._is_timing = True
        try:
            return measure_share(self._timers, call, state)
        finally:
            self._is_timing = False

    @property
    def num_graphs(self) -> int:
        """Number of graphs in one run."""
        return max(map(len, self.runs), default=0)

    def boundaries(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Boundary, ...]:
        """Return the Add & Norms of one run in order, then those that are in no graph.

        An Add & Norm that is not fused in one of the runs, with or without gradients, counts as not fused.
        """
        runs = [[boundary for graph in graphs for boundary in graph] for graphs in self.runs]
        longest = max(runs, key=len, default=[])
        alike = [run for run in runs if [*map(PLACE, run)] == [*map(PLACE, longest)]]
        captured = tuple(
            next((boundary for boundary in same if not boundary.is_fused), same[0]) for same in zip(*alike, strict=True)
        )
        is_whole = self.num_graphs == 1 and not self._has_checkpoints
        if not is_whole:
            captured += self._uncaptured(model, args, kwargs, captured)
        if self._has_streams or not is_whole:
            captured += unrecognized_writes(model, args, kwargs, captured)
        return captured

    def _uncaptured(
        self, model: nn.Module, args: Any, kwargs: Any, captured: Sequence[Boundary]
    ) -> tuple[Boundary, ...]:
        """Return the Add & Norms that no graph contains, because a graph break separates add and norm."""
        with torch.no_grad():
            flow = capture_flow(model, args, kwargs)
        reason = GRAPH_BREAK if self.num_graphs else NOT_CAPTURED
        matches = filter(None, map(match_sum, find_norms(flow)))
        boundaries = (replace(match.to_boundary(), reason=reason) for match in matches)
        return tuple(surplus(boundaries, captured, attrgetter("norm", "kind")))


def _relocate(boundary: Boundary, norm: str | None) -> Boundary:
    """Return an Add & Norm with the paths of the layer whose norm is `norm`: one graph may serve several layers.

    A layer may compute the norm of a submodule itself; `norm` is the submodule's path then.
    """
    before, after = boundary.norm.split("."), (norm or "").split(".")
    if norm is None or norm == boundary.norm or len(before) > len(after):
        return boundary
    changed = {k: (old, new) for k, (old, new) in enumerate(zip(before, after, strict=False)) if old != new}
    parts = enumerate(boundary.add.split("."))
    add = [changed[k][1] if k in changed and changed[k][0] == part else part for k, part in parts]
    return replace(boundary, norm=norm, add=".".join(add))
