"""`fuse`: a model's Add & Norms as fused calls, whatever its class, with proof that nothing changed; `unfuse` gives it back.

torch.compile's frontend captures the model, its graphs are rewritten (backend.py) and run eagerly, or go on to Inductor. What
is set is what `torch.nn.Module.compile` sets: parameters, buffers, hooks and the state dict stay what they are.
"""

from __future__ import annotations

import inspect as python
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from addnorm.convert.backend import Graph, bodies, compiled, eager, fused_graph
from addnorm.convert.boundary import Boundary, sum_of
from addnorm.convert.encoder import as_eager, padded
from addnorm.convert.fusion import Fusion, NotProven
from addnorm.convert.measured import measured
from addnorm.convert.proof import prove
from addnorm.stream.find.inspect import capture, refuse
from addnorm.stream.find.norms import find_norms

__all__ = ["fuse", "unfuse"]

Backend = Callable[[fx.GraphModule, Sequence[Any]], Graph]

USUAL = "addnorm.fuse(model, *args, **kwargs)"
# Each model has recompilations of its own, and room for those of several modes, dtypes and shapes.
APART = {"isolate_recompiles": True, "recompile_limit": 32}


@dataclass
class _Held:
    """What undoes it."""

    undo: list[Callable[[], None]] = field(default_factory=list)


_held: weakref.WeakKeyDictionary[nn.Module, _Held] = weakref.WeakKeyDictionary()


def fuse(model: nn.Module, *args: Any, compile: bool = False, timed: bool = True, **kwargs: Any) -> Fusion:
    r"""Makes every Add & Norm of a model that is understood one fused call, and proves that nothing changed.

        z = x + Sublayer(x);  y = Norm(z)        becomes        y, z = add_layer_norm(x, Sublayer(x), weight, bias, eps, ...)

    The model is changed in place and stays what it was: class, parameters, buffers, hooks, `state_dict`, `save_pretrained`. It
    trains, and takes other shapes, masks and caches, as before. Random numbers are drawn as before: dropout is the model's
    own. Sums have the same bits as before. Calls of the model itself are fused; a submodule called by itself is not.

    Args:
        model: any `torch.nn.Module`.
        args: what the model is called with, for the proof: shapes and values that mean something to it.
        compile: hand the rewritten graphs on to Inductor, as torch.compile does. Else they run eagerly.
        timed: also measure times, memory and the share of Add & Norm.
        kwargs: the keyword arguments of that call.

    Returns:
        A `Fusion`: what was fused and what was not and why, the proof, times before and after. It prints as a table.

    Raises:
        TypeError: `model` is no module.
        ValueError: it is fused or compiled already, or has no numbers.
        NotProven: the fused model differed by more than twice its own rounding errors. The model is as it was.
        Whatever the model raises on these inputs.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        >>> done = addnorm.fuse(model, torch.randn(2, 5, 16), timed=False)
        >>> len(done.fused), done.proof.holds
        (6, True)
        >>> model = addnorm.unfuse(model)
    """
    _check(model)
    refuse(model, args, kwargs, USUAL)
    held, graphs = _Held(), Graphs(model, compile)
    after = _entry(model, graphs)
    try:
        for encoder in padded(model):
            held.undo.append(as_eager(encoder))
        proof = prove(model, model._call_impl, after, args, kwargs)
        found = graphs.boundaries()
        if graphs.apart:
            found += _between(model, args, kwargs, found)
        done = Fusion(type(model).__name__, found, graphs.count, proof, compile)
        if not proof.holds:
            raise NotProven(done)
        if done.fused and timed:
            took = measured(model, model._call_impl, after, lambda backend: _entry(model, backend), args, kwargs)
            done = replace(done, measured=took)
    except BaseException:
        _undo(held)
        raise
    if not done.fused:
        _undo(held)
        return done
    model._compiled_call_impl = after
    _held[model] = held
    return done


def _between(model: nn.Module, args: Any, kwargs: Any, found: Sequence[Boundary]) -> tuple[Boundary, ...]:
    """The boundaries that no graph has: their add is in one, their norm in another."""
    with torch.no_grad():
        flow = capture(model, args, kwargs)
    seen = Counter((boundary.norm, boundary.kind) for boundary in found)
    left = []
    for norm in find_norms(flow):
        match = sum_of(norm)
        if match is None:
            continue
        match.reason = "the frontend ends a graph between its add and its norm"
        one = match.told()
        seen[one.norm, one.kind] -= 1
        if seen[one.norm, one.kind] < 0:
            left.append(one)
    return tuple(left)


def unfuse(model: nn.Module) -> nn.Module:
    """Gives a fused model back as it was, and returns it.

    Raises:
        ValueError: it is not fused.
    """
    held = _held.pop(model, None) if isinstance(model, nn.Module) else None
    if held is None:
        raise ValueError(f"model is {type(model).__name__}, which is not fused: fuse it with {USUAL}.")
    model._compiled_call_impl = None
    _undo(held)
    return model


def _undo(held: _Held) -> None:
    for undo in reversed(held.undo):
        undo()


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module: {USUAL}.")
    if model in _held:
        raise ValueError("model is fused already: addnorm.unfuse(model) gives it back.")
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise ValueError(
            "model is compiled already, expected one that is not: fuse what was compiled, with compile=True for Inductor."
        )


class Graphs:
    """The backend for one model: rewrites the graphs, and keeps what was found in them.

    The frontend makes graphs anew for runs with and without gradients; those of each kind are kept apart.
    """

    def __init__(self, model: nn.Module, inductor: bool) -> None:
        self.inductor = inductor
        self.found: dict[bool, list[Boundary]] = {}
        self.graphs: dict[bool, int] = {}
        self.bodies = False  # graphs inside of graphs
        self._paths = {str(id(module)): path for path, module in model.named_modules()}

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Graph:
        """As torch.compile wants it."""
        grad = torch.is_grad_enabled()
        self.graphs[grad] = self.graphs.get(grad, 0) + 1
        self.found.setdefault(grad, []).extend(fused_graph(graph, self._named))
        self.bodies |= bool(bodies(graph))
        return compiled(graph, example_inputs) if self.inductor else eager(graph)

    def _named(self, node: fx.Node) -> str:
        """The path of the module in which the frontend met a node; in the model's own forward it is empty."""
        stack: list[str] = [*node.meta.get("nn_module_stack", {})]
        known = (self._paths.get(key.partition("@")[0]) for key in reversed(stack))
        return next((path for path in known if path is not None), "")

    def boundaries(self) -> tuple[Boundary, ...]:
        """In the order in which they run; one that is left with gradients or without counts as left."""
        runs = [*self.found.values()]
        if not runs:
            return ()
        most = max(runs, key=len)
        reasons = {(b.add, b.norm): b for run in runs for b in run if b.reason is not None}
        return tuple(reasons.get((b.add, b.norm), b) for b in most)

    @property
    def count(self) -> int:
        """How many graphs one run of the model is."""
        return max(self.graphs.values(), default=0)

    @property
    def apart(self) -> bool:
        """Whether an add and its norm may be in different graphs, of which none sees both."""
        return self.bodies or self.count != 1


def _entry(model: nn.Module, backend: Backend) -> Callable[..., Any]:
    """The compiled call of a model, with code of its own: the frontend keeps its graphs by code."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    code = forward.__code__.replace(co_name=f"fused_{type(model).__name__}")
    function = types.FunctionType(code, forward.__globals__, code.co_name, None, forward.__closure__)
    apart = {name: value for name, value in APART.items() if name in python.signature(torch.compile).parameters}
    return torch.compile(function, backend=backend, **apart)  # type: ignore[call-overload, no-any-return]
