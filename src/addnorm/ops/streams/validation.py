"""Checks of the arguments of the operators of n streams: one sentence with argument, value, expectation and remedy."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from addnorm.ops.options import NORMS
from addnorm.ops.streams.kinds import KINDS, sizes_of
from addnorm.ops.validation import check_fake

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_ITERATIONS = 10000  # kMaxIterations in csrc/streams.cpp


def compute_dtype(
    *, streams: Tensor, branch: Tensor | None = None, streams_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None, **_: Any,
) -> torch.dtype:  # fmt: skip
    """Return the dtype of the arithmetic and of the coefficients: float64 if streams, branch or an output is, else float32."""
    dtypes = [streams.dtype, None if branch is None else branch.dtype, streams_dtype, out_dtype]
    return torch.float64 if torch.float64 in dtypes else torch.float32


def check(
    streams: Any, branch: Any, mix: Any, inject: Any, collapse: Any, project: Any, scale: Any, base: Any, weight: Any,
    bias: Any, eps: float, norm: int, kind: int, iterations: int, gate_eps: float, project_eps: float, magnitude: float,
    streams_dtype: Any, out_dtype: Any,
) -> None:  # fmt: skip
    """Raise ValueError or TypeError unless all arguments fit together."""
    for name, code, codes in (("norm", norm, NORMS), ("kind", kind, KINDS)):
        if code not in codes.values():
            raise ValueError(
                f"{name} is {code}, expected 0 to {len(codes) - 1}: call addnorm.add_norm_streams, which passes it."
            )
    _check_tensor("streams", streams)
    if streams.dim() < 2 or streams.shape[-2] == 0:
        raise ValueError(
            f"streams has shape {tuple(streams.shape)}, expected (*, n, d_model) with n >= 1: unsqueeze(-2) makes one stream of "
            "a tensor."
        )
    n, d = streams.shape[-2:]
    each = {"mix": (n, n), "inject": (n,), "collapse": (n,)}
    for name, t in (("branch", branch), ("mix", mix), ("inject", inject), ("collapse", collapse)):
        if t is None:
            continue
        _check_tensor(name, t)
        _check_device(name, t, streams)
        rows = tuple(streams.shape[:-2])
        tail = each.get(name, (d,))
        allowed = [(*rows, *tail)] + [tail] * (name != "branch") + [(*rows, n, d)] * (name == "collapse")
        if not any(_has_shape(t, shape) for shape in allowed):
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}, expected {' or '.join(map(str, allowed))} for streams "
                f"{tuple(streams.shape)}: reshape it."
            )
    if (branch is None) != (inject is None) or (mix is not None and branch is None):
        missing, other = ("inject", "branch") if inject is None else ("branch", "inject" if mix is None else "mix")
        raise ValueError(f"{missing} is None and {other} is not, expected both: X' = mix X + inject branch.")
    sizes = sizes_of(kind, n)
    hyper = kind == KINDS["hyper"]
    shapes = {
        "project": (n + 2, d) if hyper else (sizes.logits, n * d),
        "scale": (sizes.scales,),
        "base": (sizes.base,),
    }
    for name, t in (("project", project), ("scale", scale), ("base", base)):
        if (t is None) != (kind == KINDS["given"]):
            raise ValueError(
                f"{name} is {'None' if t is None else 'a tensor'}, expected a tensor exactly with gates: pass `gates=`."
            )
        if t is not None:
            _check_tensor(name, t)
            _check_device(name, t, streams)
            if tuple(t.shape) != shapes[name]:
                raise ValueError(
                    f"{name} of the gates has shape {tuple(t.shape)}, expected {shapes[name]} for {n} streams of width {d}: "
                    "build the gates for these streams."
                )
    for name, t in (("weight", weight), ("bias", bias)):
        if t is None:
            continue
        _check_tensor(name, t)
        _check_device(name, t, streams)
        if tuple(t.shape) != (d,):
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}, expected ({d},), the width of the streams: pass one number a feature."
            )
    for name, number in (("eps", eps), ("gate_eps", gate_eps), ("project_eps", project_eps)):
        if isinstance(number, str) or not number >= 0:
            raise ValueError(f"{name} is {number!r}, expected a number >= 0.")
    if kind == KINDS["manifold"] and (isinstance(iterations, str) or not 1 <= iterations <= MAX_ITERATIONS):
        raise ValueError(f"iterations is {iterations!r}, expected 1 to {MAX_ITERATIONS}: DeepSeek V4 has 20.")
    for name, dtype in (("streams_dtype", streams_dtype), ("out_dtype", out_dtype)):
        if dtype is not None and dtype not in DTYPES:
            raise TypeError(f"{name} is {dtype}, expected one of {', '.join(map(str, DTYPES))}.")


def check_backward(a: dict[str, Any], gradients: tuple[str, ...]) -> None:
    """Raise ValueError or TypeError unless the arguments of the backward by name fit together; `gradients` are its outputs."""
    check(**{name: a[name] for name in inspect.signature(check).parameters})
    rows, (n, d), sizes = a["streams"].shape[:-2], a["streams"].shape[-2:], sizes_of(a["kind"], a["streams"].shape[-2])
    computes, reads = a["kind"] != KINDS["given"], a["kind"] != KINDS["given"] or a["collapse"] is not None
    shapes: dict[str, tuple[int, ...]] = {"dnew": (n, d)}
    if reads:
        shapes |= {"stats": (2 + sizes.stats,), "dread": (d,)}
    if computes:
        shapes |= {"logits": (sizes.logits,), "dmix": (n, n)}
        shapes |= dict.fromkeys(("computed_collapse", "dcollapse", "dinject"), (n,))
    for name, tail in shapes.items():
        t = a[name]
        if t is None:
            continue
        _check_tensor(name, t)
        _check_device(name, t, a["streams"])
        if tuple(t.shape) != (*rows, *tail):
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}, expected {(*rows, *tail)} for streams {tuple(a['streams'].shape)}: pass the "
                "forward's."
            )
    mask = a["grad_mask"]
    requested = {name for bit, name in enumerate(gradients) if mask >> bit & 1}
    missing = sorted(name for name in requested if a[name] is None)
    if missing or not 0 <= mask < 2 ** len(gradients):
        raise ValueError(
            f"grad_mask is {mask}, expected a bit for each of {', '.join(gradients)} that is a tensor"
            f"{f', and {missing[0]} is None' if missing else ''}: request the others only."
        )


def _has_shape(t: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has a shape; sizes are compared only if there are as many, since a comparison guards a trace."""
    return t.dim() == len(shape) and all(own == size for own, size in zip(t.shape, shape, strict=True))


def _check_tensor(name: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is of type {type(t).__name__}, expected a tensor.")
    if t.is_nested or t.layout != torch.strided:
        what = "is a nested tensor" if t.is_nested else f"has layout {t.layout}"
        remedy = f"{name}.to_padded_tensor(0.0)" if t.is_nested else f"{name}.to_dense()"
        raise TypeError(f"{name} {what}, expected an ordinary strided tensor: {remedy}.")
    if t.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {t.dtype}, expected one of {', '.join(map(str, DTYPES))}: convert it with {name}.float()."
        )


def _check_device(name: str, t: Tensor, streams: Tensor) -> None:
    check_fake(name, t, "streams", streams)
    if t.device != streams.device:
        raise ValueError(f"{name} is on {t.device}, expected {streams.device}, the device of streams: move it there.")
