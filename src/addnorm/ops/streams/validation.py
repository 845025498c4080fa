"""Checks of the arguments of the operators of n streams; an error names argument, value, expectation and remedy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm._util.arguments import check_dtype
from addnorm.ops.options import NORMS
from addnorm.ops.streams.kinds import GATE_KINDS, sizes_of
from addnorm.ops.validation import check_code, check_eps, check_tensor, check_tensors

MAX_ITERATIONS = 10000  # kMaxIterations in csrc/streams.cpp
Shape = tuple[int, ...]


def compute_dtype(a: Any) -> torch.dtype:
    """Return the dtype of the arithmetic and of the coefficients: float64 if streams, branch or an output is, else float32."""
    dtypes = (a.streams.dtype, None if a.branch is None else a.branch.dtype, a.streams_dtype, a.out_dtype)
    return torch.float64 if torch.float64 in dtypes else torch.float32


def check(a: Any) -> None:
    """Raise ValueError or TypeError unless the arguments of the forward, by name, fit together."""
    check_code("norm", a.norm, len(NORMS) - 1)
    check_code("kind", a.kind, len(GATE_KINDS) - 1)
    check_tensor("streams", a.streams)
    if a.streams.dim() < 2 or a.streams.shape[-2] == 0:
        raise ValueError(
            f"streams has shape {tuple(a.streams.shape)}, expected (*, n, d_model) with n >= 1: unsqueeze(-2) makes one stream "
            "of a tensor."
        )
    *rows, n, d = a.streams.shape
    sizes, hyper, has_gates = sizes_of(a.kind, n), a.kind == GATE_KINDS["hyper"], a.kind != GATE_KINDS["given"]
    tails: dict[str, Shape] = {"mix": (n, n), "inject": (n,), "collapse": (n,)}
    _check_shape(a, "branch", [(*rows, d)], "reshape it")
    for name, tail in tails.items():
        per_feature = [(*rows, n, d)] if name == "collapse" else []
        _check_shape(a, name, [(*rows, *tail), tail, *per_feature], "reshape it")
    if (a.branch is None) != (a.inject is None) or (a.mix is not None and a.branch is None):
        missing, other = ("inject", "branch") if a.inject is None else ("branch", "inject" if a.mix is None else "mix")
        raise ValueError(f"{missing} is None and {other} is not, expected both: X' = mix X + inject branch.")
    parameters: dict[str, Shape] = {
        "project": (n + 2, d) if hyper else (sizes.logits, n * d), "scale": (sizes.scales,), "base": (sizes.base,),
    }  # fmt: skip
    for name, shape in parameters.items():
        if (getattr(a, name) is not None) != has_gates:
            value = "a tensor" if has_gates is False else "None"
            raise ValueError(f"{name} is {value}, expected a tensor exactly with gates: pass `gates=`.")
        _check_shape(a, name, [shape], "build the gates for these streams", " of the gates")
    for name in ("weight", "bias"):
        _check_shape(a, name, [(d,)], "pass one number a feature")
    for name in ("eps", "gate_eps", "project_eps"):
        check_eps(name, getattr(a, name))
    if a.kind == GATE_KINDS["manifold"] and (isinstance(a.iterations, str) or not 1 <= a.iterations <= MAX_ITERATIONS):
        raise ValueError(f"iterations is {a.iterations!r}, expected 1 to {MAX_ITERATIONS}: DeepSeek V4 has 20.")
    for name in ("streams_dtype", "out_dtype"):
        check_dtype(name, getattr(a, name))


def backward_shapes(a: Any) -> dict[str, Shape]:
    """Return by name the shapes of those saved tensors and gradients of outputs that a call has."""
    *rows, n, d = a.streams.shape
    has_gates, sizes = a.kind != GATE_KINDS["given"], sizes_of(a.kind, n)
    tails: dict[str, Shape] = {"dnew": (n, d)}
    if has_gates or a.collapse is not None:
        tails |= {"stats": (2 + sizes.stats,), "dread": (d,)}
    if has_gates:
        tails |= {
            "logits": (sizes.logits,),
            "dmix": (n, n),
            "computed_collapse": (n,),
            "dcollapse": (n,),
            "dinject": (n,),
        }
    return {name: (*rows, *tail) for name, tail in tails.items()}


def check_backward(a: Any, gradients: tuple[str, ...]) -> None:
    """Raise ValueError or TypeError unless the arguments of the backward by name fit together; `gradients` are its outputs."""
    check(a)
    for name, shape in backward_shapes(a).items():
        _check_shape(a, name, [shape], "pass the forward's")
    requested = {name for bit, name in enumerate(gradients) if a.grad_mask >> bit & 1}
    missing = sorted(name for name in requested if getattr(a, name) is None)
    if missing or not 0 <= a.grad_mask < 2 ** len(gradients):
        raise ValueError(
            f"grad_mask is {a.grad_mask}, expected a bit for each of {', '.join(gradients)} that is a tensor"
            f"{f', and {missing[0]} is None' if missing else ''}: request the others only."
        )


def _check_shape(a: Any, name: str, allowed: list[Shape], remedy: str, owner: str = "") -> None:
    """Raise unless an argument is None, or a tensor on the streams' device with one of the shapes."""
    t = getattr(a, name)
    if t is None:
        return
    check_tensors({name: t}, "streams", a.streams)
    if not any(_has_shape(t, shape) for shape in allowed):
        raise ValueError(
            f"{name}{owner} has shape {tuple(t.shape)}, expected {' or '.join(map(str, allowed))} for streams "
            f"{tuple(a.streams.shape)}: {remedy}."
        )


def _has_shape(t: Tensor, shape: Shape) -> bool:
    """Return whether a tensor has a shape.

    Sizes are compared only if the number of dimensions is right, since each comparison becomes a guard in a trace.
    """
    return t.dim() == len(shape) and all(own == size for own, size in zip(t.shape, shape, strict=True))
