"""`fuse`: a model's Add & Norms as fused calls, whatever its class, with proof that nothing changed; `unfuse` gives it back.

torch.compile's frontend captures the model, its graphs are rewritten (backend.py) and run eagerly, or go on to Inductor. What
is set is what `torch.nn.Module.compile` sets: parameters, buffers, hooks and the state dict stay what they are.
"""

from __future__ import annotations

import inspect as python
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from addnorm.fusion.encoder import as_eager, padded
from addnorm.fusion.fusion import Fusion, VerificationError
from addnorm.fusion.graphs import Backend, Graphs
from addnorm.fusion.measured import measured
from addnorm.fusion.proof import prove
from addnorm.stream.find.inspect import check_inputs

__all__ = ["fuse", "unfuse"]


UNDO = "_addnorm_undo"  # in what the model calls, so that all goes with it
USUAL = "addnorm.fuse(model, *args, **kwargs)"
# Each model has recompilations of its own, and room for those of several modes, dtypes and shapes.
APART = {"isolate_recompiles": True, "recompile_limit": 32}


def fuse(model: nn.Module, *args: Any, compile: bool = False, benchmark: bool = False, **kwargs: Any) -> Fusion:
    r"""Makes every Add & Norm of a model that is understood one fused call, and proves that nothing changed.

        z = x + Sublayer(x);  y = Norm(z)        becomes        y, z = add_layer_norm(x, Sublayer(x), weight, bias, eps, ...)

    The model is changed in place and stays what it was: class, parameters, buffers, hooks, `state_dict`, `save_pretrained`. It
    trains, and takes other shapes, masks and caches, as before. Random numbers are drawn as before: dropout is the model's
    own. Sums have the same bits as before. Calls of the model itself are fused; a submodule called by itself is not.

    Args:
        model: any `torch.nn.Module`.
        args: what the model is called with, for the proof: shapes and values that mean something to it.
        compile: hand the rewritten graphs on to Inductor, as torch.compile does. Else they run eagerly.
        benchmark: measure the times of a forward pass and of a training step, before and after, and the memory that autograd
            keeps. It takes about two seconds each.
        kwargs: the keyword arguments of that call.

    Returns:
        A `Fusion`: what was fused and what was not and why, the proof, times before and after. It prints as a table.

    Raises:
        TypeError: `model` is no module.
        ValueError: it is fused or compiled already, or has no numbers.
        VerificationError: the fused model differed by more than twice its own rounding errors. The model is as it was.
        Whatever the model raises on these inputs.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        >>> done = addnorm.fuse(model, torch.randn(2, 5, 16))
        >>> len(done.fused), done.proof.holds
        (6, True)
        >>> model = addnorm.unfuse(model)
    """
    _check(model)
    check_inputs(model, args, kwargs, USUAL)
    graphs = Graphs(model, compile)
    after = _entry(model, graphs)
    undo = [as_eager(encoder) for encoder in padded(model)]
    fused = False
    try:
        proof = prove(model, model._call_impl, after, args, kwargs)
        graphs.watching = False
        found = graphs.boundaries(model, args, kwargs)
        done = Fusion(type(model).__name__, found, graphs.count, proof, compile)
        if not proof.holds:
            raise VerificationError(done)
        if done.fused and benchmark:
            calls = (model._call_impl, after, lambda backend: _entry(model, backend))
            took = measured(model, *calls, args, kwargs, bool(proof.gradients))
            done = replace(done, measured=took)
        fused = bool(done.fused)
    finally:
        if not fused:
            _call_all(undo)
    if fused:
        vars(after)[UNDO] = undo
        model._compiled_call_impl = after
    return done


def unfuse(model: nn.Module) -> nn.Module:
    """Gives a fused model back as it was, and returns it.

    Raises:
        ValueError: it is not fused.
    """
    if not _is_fused(model):
        raise ValueError(f"model is {type(model).__name__}, which is not fused: fuse it with {USUAL}.")
    undo = vars(model._compiled_call_impl)[UNDO]
    del model._compiled_call_impl
    _call_all(undo)
    return model


def _is_fused(model: Any) -> bool:
    """Whether what a model calls is ours."""
    return isinstance(model, nn.Module) and UNDO in getattr(model._compiled_call_impl, "__dict__", {})


def _call_all(undo: Sequence[Callable[[], Any]]) -> None:
    for one in undo:
        one()


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module: {USUAL}.")
    if _is_fused(model):
        raise ValueError("model is fused already: addnorm.unfuse(model) gives it back.")
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise ValueError(
            "model is compiled already, expected one that is not: fuse what was compiled, with compile=True for Inductor."
        )


class _Hooks:
    """While a fused model runs, the frontend looks for hooks.

    Else it does not notice that modules have got some since, or lost them. The setting is the process's, so runs are counted.
    """

    def __init__(self) -> None:
        self.lock, self.running, self.before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        from torch._dynamo import config  # heavy

        with self.lock:
            if not self.running:
                self.before, config.skip_nnmodule_hook_guards = config.skip_nnmodule_hook_guards, False
            self.running += 1

    def __exit__(self, *_: object) -> None:
        from torch._dynamo import config

        with self.lock:
            self.running -= 1
            if not self.running:
                config.skip_nnmodule_hook_guards = self.before


_hooks = _Hooks()


def _entry(model: nn.Module, backend: Backend) -> Callable[..., Any]:
    """The compiled call of a model, with code of its own: the frontend keeps its graphs by code."""
    from torch._C._dynamo import eval_frame  # heavy

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    code = forward.__code__.replace(co_name=f"fused_{type(model).__name__}")
    function = types.FunctionType(code, forward.__globals__, code.co_name, None, forward.__closure__)
    apart = {name: value for name, value in APART.items() if name in python.signature(torch.compile).parameters}
    compiled: Callable[..., Any] = torch.compile(function, backend=backend, **apart)  # type: ignore[call-overload]  # mypy cannot read **apart

    def call(*args: Any, **kwargs: Any) -> Any:
        with _hooks:
            return compiled(*args, **kwargs)

    weakref.finalize(call, eval_frame.reset_code, code)  # the frontend keeps all code that it captured more than once
    return call
