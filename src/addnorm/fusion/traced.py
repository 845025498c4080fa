"""A graph of torch.compile's frontend as a data flow: which operators each of its nodes runs, and on which values.

The graph is run once on tensors that have shapes, dtypes and memory, but no numbers: it costs no memory to speak of and leaves
no trace. What a node cannot do without numbers, or hides from the dispatcher, is what the frontend says that it returned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from addnorm.stream.dataflow.capture import Capture
from addnorm.stream.dataflow.graph import CONSTANT, DATA, PARAMETER, Flow, Frame, Op, Value

__all__ = ["Named", "Traced", "given_to", "is_number", "numbers_of", "size_of", "source_of", "trace", "writes_in_place"]

Named = Callable[[fx.Node], str]
OWNED = re.compile(r"\._(parameters|buffers)\[[^\]]*\]$")
SOME = 2  # in place of a size that nobody knows yet
KINDS = {"parameters": PARAMETER, "buffers": CONSTANT}


class Traced:
    """A graph's data flow, and where in the graph it is.

    Attributes:
        flow: the operators and values.
        values: what each node returned, of those that return a tensor.
        nodes: the first node that returned a value.
        ran: the operators of each node.
        memory: a number for the memory in which each node's tensor lies.
        transformed: the nodes that run inside of `torch.func.vmap`, `grad` or the like.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.values: dict[fx.Node, Value] = {}
        self.nodes: dict[Value, fx.Node] = {}
        self.ran: dict[fx.Node, list[Op]] = {}
        self.at: dict[Op, fx.Node] = {}
        self.memory: dict[fx.Node, int] = {}
        self.transformed: set[fx.Node] = set()

    def kind(self, node: Any) -> int:
        """What a node's value depends on."""
        return self.values[node].kind if node in self.values else CONSTANT


def trace(graph: fx.GraphModule, named: Named, kinds: Sequence[int] | None = None) -> Traced:
    """The data flow of a graph.

    Args:
        graph: stays as it is.
        named: the path of the module in which the frontend met a node.
        kinds: of its inputs (`stream.flow.graph`), where their nodes do not tell it.
    """
    tracer = _Tracer(graph, named, kinds)
    tracer.capture.frames.start()
    with torch.no_grad(), tracer.mode, tracer.capture:
        tracer.run(*(None for node in graph.graph.nodes if node.op == "placeholder"))
    return tracer.traced


def given_to(node: fx.Node) -> Any:
    """What the frontend says that a node returns: tensors without numbers, with symbols for the sizes that may change."""
    return node.meta.get("example_value", node.meta.get("val"))


def is_number(given: Any) -> bool:
    """Whether a node returns no tensor, but a number, or sizes."""
    return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(given))


def numbers_of(given: Any) -> Any:
    """Sizes with numbers in place of symbols, those of the call for which the graph was made."""
    if isinstance(given, torch.SymInt | torch.SymFloat | torch.SymBool):
        return _hint(given)
    return tuple(map(numbers_of, given)) if isinstance(given, tuple | list) else given


def _hint(given: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The number of that call; of one that only the run itself will tell, as how many elements of a mask are set, any."""
    if given.node.hint is not None:
        return given.node.hint
    shapes, expr = given.node.shape_env, given.node.expr
    known = shapes.backed_var_to_val if hasattr(shapes, "backed_var_to_val") else shapes.var_to_val
    return given.node.pytype(expr.subs({symbol: known.get(symbol, SOME) for symbol in expr.free_symbols}))


def size_of(given: Any) -> Any:
    """A number, or the expression of one that may change."""
    return given.node.expr if isinstance(given, torch.SymInt | torch.SymFloat | torch.SymBool) else given


def writes_in_place(node: fx.Node) -> bool:
    """Whether a node is called what is in place."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator":
        return str(name) in ("iadd", "isub", "imul", "itruediv", "ipow", "setitem")
    return node.op == "call_method" and str(name).endswith("_") and not str(name).endswith("__")


class _Tracer(fx.Interpreter):
    """Runs the nodes one by one, and notes what each did."""

    def __init__(self, graph: fx.GraphModule, named: Named, kinds: Sequence[int] | None) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.capture = Capture(graph, contents=False)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.traced = Traced(self.capture.flow)
        self._named = named
        self._kinds = iter(kinds) if kinds is not None else None
        self._frames: dict[tuple[str, ...], Frame] = {}

    def run_node(self, n: fx.Node) -> Any:
        """One node: its operators, and the value that it returned."""
        ops = self.capture.flow.ops
        first = len(ops)
        self.capture.frames.current = self._frame(n)
        try:
            out = self._higher(n) if isinstance(n.target, torch._ops.HigherOrderOperator) else super().run_node(n)
        except Exception:  # of whatever kind: it needs numbers, or objects of the real run
            out = self._stated(n)
        ran = self.traced.ran[n] = [op for op in ops[first:] if op.outputs]
        self.traced.at.update(dict.fromkeys(ran, n))
        if isinstance(out, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(out):
            self.traced.transformed.add(n)
        elif isinstance(out, Tensor):
            value = self.capture.value(out)
            self.traced.values[n] = value
            self.traced.nodes.setdefault(value, n)
            self.traced.memory[n] = out.untyped_storage()._cdata
        return out

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An input, as the frontend saw it."""
        raise NotImplementedError  # `_stated` makes it

    def _higher(self, node: fx.Node) -> Any:
        """An operator that runs graphs: what they may write in place is not known afterwards."""
        args, _ = self.fetch_args_kwargs_from_env(node)
        if any(isinstance(arg, fx.GraphModule) and any(map(writes_in_place, arg.graph.nodes)) for arg in args):
            for tensor in pytree.tree_leaves(args):
                if isinstance(tensor, Tensor):
                    tensor.copy_(torch.empty_like(tensor))
        return self._stated(node)

    def _stated(self, node: fx.Node) -> Any:
        """New values like those that a node returned when the frontend met it."""
        frame, self.capture.frames.current = (
            self.capture.frames.current,
            None,
        )  # to make them is no operator of the graph's
        out = pytree.tree_map_only(Tensor, _like, given_to(node))
        self.capture.frames.current = frame
        kind, number = _owned(node) if node.op == "placeholder" else (DATA, None)
        if node.op == "placeholder" and self._kinds is not None:
            kind = next(self._kinds)
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                value = self.capture.add_leaf(tensor, kind)
                value.tensor = tensor if number is None else number
        return pytree.tree_map_only((torch.SymInt, torch.SymFloat, torch.SymBool), numbers_of, out)

    def _frame(self, node: fx.Node) -> Frame:
        """The call of the module in which the frontend met a node."""
        stack = tuple(node.meta.get("nn_module_stack", {}))
        return self._frames.setdefault(stack, Frame(self._named(node), len(self._frames), None))


def _like(tensor: Tensor) -> Tensor:
    size, stride = numbers_of(tuple(tensor.shape)), numbers_of(tensor.stride())
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)


def source_of(given: Any) -> str:
    """Where the frontend found an input, as Python would say it."""
    name = given.source.name
    return str(name() if callable(name) else name)


def _owned(node: fx.Node) -> tuple[int, Tensor | None]:
    """Whether an input is a parameter, a buffer, or data; and the tensor, of a buffer that is one number."""
    given = node.meta.get("grapharg")
    if given is None:
        return DATA, None
    found = OWNED.search(source_of(given))
    example = given.example if found is None or found[1] == "buffers" else None
    if isinstance(example, nn.Parameter):
        return PARAMETER, None
    if found is None:
        return DATA, None
    single = isinstance(example, Tensor) and example.numel() == 1 and not isinstance(example, FakeTensor)
    return KINDS[found[1]], example if single else None
