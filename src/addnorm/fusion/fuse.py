"""`fuse` replaces the Add & Norms of a model by fused calls, whatever its class, and proves that it computes the same.

torch.compile's frontend captures the model, `backend` rewrites its graphs, and they run eagerly or go to Inductor. `fuse` sets
the attribute that `torch.nn.Module.compile` sets; parameters, buffers, hooks and the state dict do not change. `unfuse` removes
it.
"""

from __future__ import annotations

import inspect
import operator
import types
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from addnorm._util.torch_internals import count_global_hooks, forget_code, guard_hooks
from addnorm.fusion.backend import CAPTURED_ANEW, ModelBackend
from addnorm.fusion.benchmark import measure
from addnorm.fusion.encoder import keep_padding_zero, padding_encoders
from addnorm.fusion.match import Boundary
from addnorm.fusion.proof import modes_of, prove
from addnorm.fusion.result import Fusion, VerificationError
from addnorm.fusion.runs import run
from addnorm.stream.dataflow.snapshot import StateSnapshot
from addnorm.stream.dataflow.state import share_context
from addnorm.stream.dataflow.wrappers import find_fsdp_modules, find_wrapped_parameter
from addnorm.stream.inspect import check_inputs, hint_inputs

UNDO = "_addnorm_undo"  # attribute of the compiled call: the function that unfuse calls
USAGE = "addnorm.fuse(model, *args, **kwargs)"
# Options of torch.compile: each model has its own recompilations, enough for several modes, dtypes and shapes.
OWN_CACHE = {"isolate_recompiles": True, "recompile_limit": 32}

FORWARD = operator.attrgetter("forward")


def fuse(model: nn.Module, *args: Any, compile: bool = False, benchmark: bool = True, **kwargs: Any) -> Fusion:
    r"""Replace every Add & Norm of a model by one fused call, and prove that the model computes the same.

        z = x + Sublayer(x);  y = Norm(z)        becomes        y, z = add_layer_norm(x, Sublayer(x), weight, bias, eps, ...)

    With n residual streams, the write X' = A X + b w and the read Norm(sum of c_j X'_j) become one call of `add_norm_streams`,
    or two if c is computed from X'.

    A fused model checks at each call that its graphs still fit. `fuse` measures whether the fused model is slower than before; if
    it is, the model is left as it was.

    The model is changed in place and keeps its class, parameters, buffers, hooks, `state_dict` and `save_pretrained`. It trains,
    and accepts other shapes, masks and caches, as before. The sums of one stream have the same bits as before. Random numbers
    are drawn as before, since dropout stays the model's own. Calls of the model are fused; a submodule that is called by itself
    is not, nor is a copy of the model (`copy.deepcopy`, pickle): fuse the copy.

    Args:
        model: any `torch.nn.Module`.
        args: positional arguments for the proof. Use realistic inputs, such as text or images, not zeros.
        compile: pass the graphs on to Inductor, as torch.compile does. By default they run eagerly.
        benchmark: measure the time of a forward pass and, if parameters require gradients, of a training step, before and after
            in turns, and the memory that autograd saves. It takes about a second each; where 12 rounds take longer, up to ten
            seconds and the time of a round. A model is left as it is if one of the two is slower when fused and the other is
            not faster, judged by the 95% interval of the ratio of the paired times. The report has the numbers. False: measure
            nothing, and fuse what is proven.
        kwargs: keyword arguments for the proof.

    Returns:
        A `Fusion`: the Add & Norms that are fused, the others with the reason, the proof, the share of Add & Norm in the
        forward pass, which bounds the gain in time, and the benchmark.

    Raises:
        TypeError: `model` is not a module.
        ValueError: the model is fused or compiled already, its parameters are sharded or quantized (fuse it before), it is
            `DistributedDataParallel` (fuse the module inside), or its outputs contain no finite number.
        VerificationError: the fused model differs by more than the tolerance. The model is unchanged.
        Exception: any error of the model for these inputs, in the proof or in the benchmark, which calls it up to 400 times. The
            model is unchanged.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        >>> fusion = addnorm.fuse(model, torch.randn(2, 5, 16))
        >>> len(fusion.fused), fusion.proof.holds
        (6, True)
        >>> fusion.is_applied == (not fusion.benchmark.is_slower)
        True
        >>> model = addnorm.unfuse(model)
    """
    _check_model(model)
    check_inputs(model, args, kwargs, USAGE)
    _check_parameters(model)
    backend = ModelBackend(model, compile)
    before, after = model._call_impl, _compiled_call(model, backend)

    def result(boundaries: Iterable[Boundary]) -> Fusion:
        """Return the `Fusion` so far; raise `VerificationError` if the proof, with the calls captured by now, does not hold."""
        proven = replace(proof, calls=tuple(backend.differences))
        fusion = Fusion(type(model).__name__, tuple(boundaries), num_graphs, proven, compile)
        if not proven.holds:
            raise VerificationError(fusion)
        return fusion

    with ExitStack() as undo:
        undo.callback(backend.stop_recording)
        for encoder in padding_encoders(model):
            undo.callback(keep_padding_zero(encoder))
        with hint_inputs(args, kwargs):
            proof = prove(model, before, backend.recorded(after), args, kwargs)
        num_graphs = backend.num_graphs  # of the proof; later calls add more
        fusion = result(backend.boundaries(model, args, kwargs))
        if fusion.fused:
            state = StateSnapshot(model, (args, kwargs))
            modes = [mode for mode in modes_of(model, args, kwargs) if mode.is_in(proof)]
            runs = [partial(run, after, args, kwargs, mode.parameters, inputs=mode.inputs) for mode in modes]
            reason = None if all(backend.is_reused(call, state) for call in runs) else CAPTURED_ANEW
            fusion = result(replace(one, reason=one.reason or reason) for one in fusion.boundaries)
        if fusion.fused:
            share = backend.measure_share(lambda: run(after, args, kwargs, {}), state)
            backend.stop_recording()
            parameters = next((mode.parameters for mode in modes if mode.parameters), {})
            times = measure(before, after, args, kwargs, parameters, state) if benchmark else None
            fusion = replace(result(fusion.boundaries), share=share, benchmark=times)
        _unchanged.add(model)
        if fusion.is_applied:
            _unchanged.discard(model)
            vars(after)[UNDO] = undo.pop_all().close
            model._compiled_call_impl = after
    return fusion


def unfuse(model: nn.Module) -> nn.Module:
    """Restore a fused model to what it was before, and return it.

    A model that `fuse` did not change is returned unchanged.

    Raises:
        ValueError: the model is not fused.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        >>> fusion = addnorm.fuse(model, torch.randn(2, 5, 16), benchmark=False)
        >>> addnorm.unfuse(model) is model
        True
    """
    if model in _unchanged:
        _unchanged.discard(model)
        return model
    if not is_fused(model):
        raise ValueError(f"model is {type(model).__name__}, which is not fused: fuse it with {USAGE}.")
    undo = vars(model._compiled_call_impl)[UNDO]
    del model._compiled_call_impl
    undo()
    return model


_unchanged: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that `fuse` left as they are


def is_fused(model: Any) -> bool:
    """Return whether a model is a module that `fuse` has fused."""
    return isinstance(model, nn.Module) and UNDO in getattr(model._compiled_call_impl, "__dict__", {})


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module: {USAGE}.")
    if isinstance(model, nn.parallel.DistributedDataParallel):  # whose call torch.compile's frontend does not capture
        raise ValueError(
            "model is DistributedDataParallel, expected the module inside, before or after it is wrapped: "
            "addnorm.fuse(model.module, ...)."
        )
    if is_fused(model):
        raise ValueError("model is fused already, expected one that is not: addnorm.unfuse(model) restores it.")
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise ValueError(
            "model is compiled already, expected one that is not: fuse the original, with compile=True for Inductor."
        )


def _check_parameters(model: nn.Module) -> None:
    """Check that parameters are plain tensors: the proof copies and perturbs them."""
    name, kind = find_wrapped_parameter(model)
    if name:
        change = "shard" if kind == "DTensor" else "quantize"
        raise ValueError(
            f"model has {name}, a {kind}, expected plain tensors: fuse the model first, and {change} it then."
        )
    if find_fsdp_modules(model):
        raise ValueError(
            "model is sharded by FSDP, expected plain parameters: fuse the model first, and shard it then."
        )


_hook_guards = share_context(guard_hooks)


def _compiled_call(model: nn.Module, backend: ModelBackend) -> Callable[..., Any]:
    """Return the compiled call of a model. It has its own code object, since the frontend stores graphs by code."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    code = forward.__code__.replace(co_name=f"fused_{type(model).__name__}")
    function = types.FunctionType(code, forward.__globals__, code.co_name, None, forward.__closure__)
    options = {name: value for name, value in OWN_CACHE.items() if name in inspect.signature(torch.compile).parameters}
    compiled: Callable[..., Any] = torch.compile(function, backend=backend, **options)  # type: ignore[call-overload]  # mypy cannot read **options

    # The frontend has no guards for the methods of classes, nor for hooks that are registered for all modules. While either
    # differs from now, the model runs as it was before fusing.
    classes = [cls for cls in {type(module) for module in model.modules()} if hasattr(cls, "forward")]
    forwards, hooks = [*map(FORWARD, classes)], count_global_hooks()

    def call(*args: Any, **kwargs: Any) -> Any:
        if [*map(FORWARD, classes)] != forwards or count_global_hooks() != hooks:
            return model._call_impl(*args, **kwargs)
        with _hook_guards():
            return compiled(*args, **kwargs)

    weakref.finalize(call, forget_code, code)
    return call
