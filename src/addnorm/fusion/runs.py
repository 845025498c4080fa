"""Repeatable calls of a model: outputs and gradients."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from addnorm.stream.dataflow.state import LEAF_TYPES, find_tensors

Tensors = dict[str, Tensor]
INPUT = "input "  # prefix of the names of inputs, where gradients are named


class RunResult(NamedTuple):
    """Outputs of a call, and gradients of parameters and of inputs ("input x")."""

    outputs: Tensors
    gradients: Tensors


def run(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    signs: Tensors | None = None,
    inputs: bool = False,
) -> RunResult:
    """Call a model and return its outputs and gradients. `.grad` is not touched.

    The loss is the sum of all outputs, each element with a random sign.

    Args:
        call: the model, or a callable that replaces it.
        args: positional arguments.
        kwargs: keyword arguments.
        parameters: parameters of which to return gradients; if there are none and `inputs` is False, the call runs in no-grad
            mode.
        signs: the signs of earlier calls; new signs are added to it.
        inputs: whether to return gradients of all floating-point inputs; they require a gradient in the call then.
    """
    signs = {} if signs is None else signs
    with torch.inference_mode(False), torch.set_grad_enabled(bool(parameters) or inputs):
        args, kwargs = map_tensors((tuple(args), dict(kwargs)), _as_source if inputs else _as_leaf)
        sources = dict(parameters) | (floating_inputs(args, kwargs) if inputs else {})
        outputs = named_tensors(call(*args, **kwargs))
        loss = {name: t for name, t in outputs.items() if t.requires_grad and t.is_floating_point()}
        gradients: Sequence[Tensor | None] = [None] * len(sources)
        if sources and loss:
            signs.update({name: _random_signs(name, t) for name, t in loss.items() if name not in signs})
            cotangents = [signs[name] for name in loss]
            gradients = torch.autograd.grad([*loss.values()], [*sources.values()], cotangents, allow_unused=True)
        known = {name: g for name, g in zip(sources, gradients, strict=True) if g is not None}
        return RunResult({name: t.detach() for name, t in outputs.items()}, known)


def floating_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensors:
    """Return the floating-point tensors of the arguments, also inside of objects, as "input [0]" or "input x"."""
    tensors = named_tensors({f"[{k}]": value for k, value in enumerate(args)} | dict(kwargs))
    return {f"{INPUT}{name}": tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def _as_source(tensor: Tensor) -> Tensor:
    """Return a copy of an input that requires a gradient, if its dtype can have one."""
    return tensor.detach().clone().requires_grad_() if tensor.is_floating_point() else _as_leaf(tensor)


def _as_leaf(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory without the caller's graph, which must not be walked or extended."""
    if tensor.is_inference():
        return tensor.clone()
    if not tensor.requires_grad:
        return tensor.detach()
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_().clone()


def _random_signs(name: str, tensor: Tensor) -> Tensor:
    """Return random signs, always the same for the same name. They are exact in every dtype."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8)
    return signs.mul_(2).sub_(1).to(tensor.device, tensor.dtype)


def named_tensors(result: Any) -> Tensors:
    """Return the tensors of a result by name: in tuples, mappings and objects with attributes, such as a cache."""
    tensors: Tensors = {}
    seen: set[int] = set()

    def walk(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, Tensor):
            tensors[".".join(path) or "output"] = value
        if isinstance(value, LEAF_TYPES) or callable(value) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Mapping):
            items = [(str(key), child) for key, child in value.items()]
        elif isinstance(value, list | tuple):
            items = [(str(k) if path else f"[{k}]", child) for k, child in enumerate(value)]
        else:
            items = [*getattr(value, "__dict__", {}).items()]
        for key, child in items:
            walk(child, (*path, key))

    walk(result, ())
    return tensors


def map_tensors(arguments: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return arguments with a function applied to each tensor; objects that hold tensors, such as a cache, are copied."""
    memo: dict[int, Any] = {id(tensor): function(tensor) for tensor in find_tensors(arguments)}

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return memo[id(value)] if id(value) in memo else function(value)
        if isinstance(value, LEAF_TYPES) or callable(value):
            return value
        try:
            return copy.deepcopy(value, memo)  # with one memo, so that an object passed twice stays one object
        except Exception:  # an object may refuse to be copied with any error
            return value

    return pytree.tree_map(convert, arguments)
