"""Data flow of a graph from torch.compile's frontend: the operators that each node runs, and their values.

The graph runs once on fake tensors: with shapes, dtypes and memory, but without numbers. This takes almost no memory and has
no side effects. Where a node needs numbers, or hides its operators from the dispatcher, the node's example value is used.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from addnorm._util.torch_internals import FakeTensor, FakeTensorMode, is_transformed
from addnorm.stream.dataflow.flow_capture import FlowCapture
from addnorm.stream.dataflow.graph import CONSTANT, DATA, PARAMETER, Flow, Frame, Op, Value
from addnorm.stream.dataflow.wrappers import inner_tensors

PathOf = Callable[[fx.Node], str]  # the path of the module that a node comes from
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
OWNED = re.compile(r"\._(parameters|buffers)\[[^\]]*\]$")
UNKNOWN_SIZE = 2  # in place of a size that depends on the data
TENSOR_KINDS = {"parameters": PARAMETER, "buffers": CONSTANT}


class TracedGraph:
    """Data flow of a graph, and its relation to the graph's nodes.

    Attributes:
        graph: the graph.
        contexts: of each node, as `contexts_of` returns them.
        flow: operators and values.
        values: node -> value, for nodes that return a tensor.
        nodes: value -> first node that returns it.
        ops_of: node -> the operators that it runs.
        node_of: operator -> the node that runs it.
        memory: node -> number of the storage of its tensor.
        transformed: nodes that run inside `torch.func.vmap`, `grad` or a similar transform.
    """

    def __init__(self, graph: fx.GraphModule, flow: Flow) -> None:
        self.graph, self.flow = graph, flow
        self.contexts = contexts_of(graph.graph)
        self.values: dict[fx.Node, Value] = {}
        self.nodes: dict[Value, fx.Node] = {}
        self.ops_of: dict[fx.Node, list[Op]] = {}
        self.node_of: dict[Op, fx.Node] = {}
        self.memory: dict[fx.Node, int] = {}
        self.transformed: set[fx.Node] = set()

    def kind(self, node: Any) -> int:
        """Return what the value of a node depends on, as bits of `stream.dataflow.graph`."""
        return self.values[node].kind if node in self.values else CONSTANT

    def nodes_in_memory(self, memory: int, without: Container[fx.Node]) -> list[fx.Node]:
        """Return the nodes whose tensors are in the storage with number `memory`, except those in `without`."""
        return [node for node, other in self.memory.items() if other == memory and node not in without]


def trace_graph(graph: fx.GraphModule, path_of: PathOf, kinds: Sequence[int] | None = None) -> TracedGraph:
    """Return the data flow of a graph. The graph is not changed.

    Args:
        graph: the graph from torch.compile's frontend.
        path_of: function that returns the path of the module that a node comes from.
        kinds: what each input depends on (bits of `stream.dataflow.graph`); None reads the metadata of the input nodes.
    """
    tracer = _Tracer(graph, path_of, kinds)
    tracer.capture.frames.start()
    with torch.no_grad(), tracer.mode, tracer.capture:
        tracer.run(*(None for node in graph.graph.nodes if node.op == "placeholder"))
    return tracer.traced


def example_value(node: fx.Node) -> Any:
    """Return the frontend's example of what a node returns: fake tensors, with symbols for dynamic sizes."""
    return node.meta.get("example_value", node.meta.get("val"))


def is_number(value: Any) -> bool:
    """Return whether an example value contains no tensor, only numbers or sizes."""
    return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def concrete(value: Any) -> Any:
    """Return sizes with symbols replaced by the numbers of the call for which the graph was captured."""
    if isinstance(value, SYMBOLS):
        return _hint(value)
    return tuple(map(concrete, value)) if isinstance(value, tuple | list) else value


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor in the call for which the graph was captured."""
    shape: tuple[int, ...] = concrete(tuple(example_value(node).shape))
    return shape


def _hint(symbol: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """Return the number of a symbol in the call that the graph was captured for; any number if it depends on data."""
    if symbol.node.hint is not None:
        return symbol.node.hint
    shapes, expr = symbol.node.shape_env, symbol.node.expr
    known = shapes.backed_var_to_val if hasattr(shapes, "backed_var_to_val") else shapes.var_to_val
    return symbol.node.pytype(expr.subs({free: known.get(free, UNKNOWN_SIZE) for free in expr.free_symbols}))


def given_value(graph: fx.GraphModule, node: fx.Node) -> Any:
    """Return the value of a node that is the same in every call: an attribute of the graph, a number, or sizes."""
    if node.op != "get_attr":
        return concrete(example_value(node))
    value = operator.attrgetter(str(node.target))(graph)
    return value.detach() if isinstance(value, Tensor) else value


def size_expr(size: Any) -> Any:
    """Return a size as a number, or as an expression if it is dynamic."""
    return size.node.expr if isinstance(size, SYMBOLS) else size


def with_strides(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a copy of a tensor with the strides `stride`; it is expanded along dimensions of stride 0."""
    expanded = [k for k, step in enumerate(stride) if not step and tensor.shape[k] > 1]
    single = tensor
    for k in expanded:
        single = single.narrow(k, 0, 1)
    copied = torch.empty_strided(single.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(single)
    return copied.expand(tensor.shape) if expanded else copied


def layout_of(tensor: Tensor) -> Any:
    """Return a key by which to compare tensors: symbolic and concrete sizes, strides, dtype, device, requires_grad."""
    sizes = [str(size_expr(size)) for size in tensor.shape]
    size, stride = concrete(tuple(tensor.shape)), concrete(tensor.stride())
    return sizes, size, stride, tensor.dtype, tensor.device, tensor.requires_grad


def is_external(node: fx.Node) -> bool:
    """Return whether a node is an input, a parameter or a buffer."""
    return node.op in ("placeholder", "get_attr")


def same_layout(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same shape, and the same strides where a size is more than one."""
    sizes = zip(first.shape, first.stride(), second.stride(), strict=True)
    return first.shape == second.shape and all(n < 2 or a == b for n, a, b in sizes)


def empty_like(tensor: Tensor, device: Any = None) -> Tensor:
    """Return an empty tensor with the sizes and strides of the call for which the graph was captured."""
    size, stride = concrete(tuple(tensor.shape)), concrete(tensor.stride())
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device=device or tensor.device)


def is_in_place(op: Op) -> bool:
    """Return whether an operator writes in place."""
    schema = getattr(op.func, "_schema", None)
    return schema is not None and schema.is_mutable


def writes_in_place(node: fx.Node) -> bool:
    """Return whether a node calls an in-place function, judged by its name."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator":
        return str(name) in ("iadd", "isub", "imul", "itruediv", "ipow", "setitem")
    return node.op == "call_method" and str(name).endswith("_") and not str(name).endswith("__")


def contexts_of(graph: fx.Graph) -> dict[fx.Node, tuple[Any, ...]]:
    """Return for each node the contexts in which it runs: the grad mode, then the nodes that entered autocast or the like.

    Call this in the frontend's backend: there the grad mode is that in which the graph starts.
    """
    grad: Any = torch.is_grad_enabled()
    entered: list[fx.Node] = []
    contexts: dict[fx.Node, tuple[Any, ...]] = {}
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "_set_grad_enabled":
            grad = node.args[0]
        elif name.startswith("_enter_"):
            entered.append(node)
        elif name.startswith("_exit_") and node.args and node.args[0] in entered:
            entered.remove(node.args[0])
        contexts[node] = (grad, *entered)
    return contexts


@contextmanager
def entered(contexts: Sequence[Any]) -> Iterator[None]:
    """Enter the grad mode and the autocasts of `contexts_of`."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(contexts[0]))
        for node in contexts[1:]:
            if node.target is torch.amp.autocast_mode._enter_autocast:
                device, dtype, enabled, cache = node.args
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield


class _Tracer(fx.Interpreter):
    """Interpreter that records the operators and the value of each node."""

    def __init__(self, graph: fx.GraphModule, path_of: PathOf, kinds: Sequence[int] | None) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.capture = FlowCapture(graph, contents=False)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.traced = TracedGraph(graph, self.capture.flow)
        self._path_of = path_of
        self._kinds = iter(kinds) if kinds is not None else None
        self._frames: dict[tuple[str, ...], Frame] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and record its operators and its value."""
        ops = self.capture.flow.ops
        first = len(ops)
        self.capture.frames.current = self._frame(n)
        try:
            out = self._higher_order(n) if isinstance(n.target, torch._ops.HigherOrderOperator) else super().run_node(n)
        except Exception:  # of any kind: the node needs numbers, or objects of the real run
            out = self._example(n)
        node_ops = self.traced.ops_of[n] = [op for op in ops[first:] if op.outputs]
        self.traced.node_of.update(dict.fromkeys(node_ops, n))
        if isinstance(out, Tensor) and is_transformed(out):
            self.traced.transformed.add(n)
        elif isinstance(out, Tensor) and (inner := inner_tensors(out)):
            value = self.capture.value(inner[0])
            self.traced.values[n] = value
            self.traced.nodes.setdefault(value, n)
            self.traced.memory[n] = inner[0].untyped_storage()._cdata
        return out

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Refuse to run: inputs are made from their example values."""
        raise NotImplementedError

    def _higher_order(self, node: fx.Node) -> Any:
        """Return the example value of an operator that runs graphs; if these write in place, its inputs count as written."""
        args, _ = self.fetch_args_kwargs_from_env(node)
        if any(isinstance(arg, fx.GraphModule) and any(map(writes_in_place, arg.graph.nodes)) for arg in args):
            for tensor in pytree.tree_leaves(args):
                if isinstance(tensor, Tensor):
                    tensor.copy_(torch.empty_like(tensor))
        return self._example(node)

    def _example(self, node: fx.Node) -> Any:
        """Return new values like the node's example value, and record them as leaves of the flow."""
        frame, self.capture.frames.current = self.capture.frames.current, None  # allocation is not a graph operator
        out = pytree.tree_map_only(Tensor, empty_like, example_value(node))
        self.capture.frames.current = frame
        kind, number = _owner_kind(node) if node.op == "placeholder" else (DATA, None)
        if node.op == "placeholder" and self._kinds is not None:
            kind = next(self._kinds)
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                value = self.capture.add_leaf(tensor, kind)
                value.tensor = tensor if number is None else number
        return pytree.tree_map_only(SYMBOLS, concrete, out)

    def _frame(self, node: fx.Node) -> Frame:
        """Return the frame of the module call that a node comes from."""
        stack = tuple(node.meta.get("nn_module_stack", {}))
        return self._frames.setdefault(stack, Frame(self._path_of(node), len(self._frames), None))


def source_of(graph_arg: Any) -> str:
    """Return the Python expression by which the frontend reached an input."""
    name = graph_arg.source.name
    return str(name() if callable(name) else name)


def _owner_kind(node: fx.Node) -> tuple[int, Tensor | None]:
    """Return whether an input is a parameter, a buffer or data, and the tensor if it is a buffer of one element."""
    graph_arg = node.meta.get("grapharg")
    if graph_arg is None:
        return DATA, None
    owned = OWNED.search(source_of(graph_arg))
    example = graph_arg.example if owned is None or owned[1] == "buffers" else None
    if isinstance(example, nn.Parameter):
        return PARAMETER, None
    if owned is None:
        return DATA, None
    single = isinstance(example, Tensor) and example.numel() == 1 and not isinstance(example, FakeTensor)
    return TENSOR_KINDS[owned[1]], example if single else None
