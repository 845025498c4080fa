"""The operators: their schemas, and what they return without computing it (fake kernels).

The dispatcher is the registry of backends: `eager.py` registers the reference for every device, the C++ library (`cpu.py`)
the CPU kernels, and a call takes the best there is. The schemas are private; use `addnorm.functional`.

All but the last are functional: they return fresh, contiguous, distinct tensors. What an operator is not asked for it returns
with no elements, since the number of outputs is fixed. A null branch means the norm alone.

The first four have no options, because each argument costs, and a call on one row takes a few microseconds in all: y alone; y
and the stream; with the statistics for a backward; that backward. The next two have everything.

`add_norm_out` writes y and z into memory that is given, in the dtypes it is given in; where there is no z, the stream has the
residual's dtype. An element is read before it is written, so y and z may each be exactly the memory of residual or branch; any
other element that two of its tensors share is refused. Nobody but `ops/given.py` tells autograd that the memory changed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from addnorm.ops import validation

T = TypeVar("T")

NORMS = {"layer": 0, "rms": 1, "none": 2}
CASTINGS = {"float32": 0, "llama": 1, "t5": 2}

# What comes before the norm. A number is a factor (1.0 at rest); a tensor is a scale (None at rest).
ADD_OPTIONS = (
    "float residual_factor=1.0, Tensor? residual_scale=None, float branch_factor=1.0, Tensor? row_scale=None, "
    "Tensor? layer_scale=None, Tensor? branch_bias=None, float dropout_p=0.0, Tensor? seed=None, SymInt offset=0"
)
ADD_NAMES = (
    "residual_factor", "residual_scale", "branch_factor", "row_scale", "layer_scale", "branch_bias", "dropout_p", "seed",
    "offset",
)  # fmt: skip
CHECKED = (
    "residual_scale", "row_scale", "layer_scale", "branch_bias", "dropout_p", "seed", "offset", "weight_offset", "residual_dtype",
    "out_dtype",
)  # fmt: skip

SCHEMAS = {
    "add_norm": "(Tensor residual, Tensor? branch, Tensor? weight, Tensor? bias, float eps, bool rms) -> Tensor",
    "add_norm_stream": (
        "(Tensor residual, Tensor branch, Tensor? weight, Tensor? bias, float eps, bool rms) -> (Tensor y, Tensor z)"
    ),
    "add_norm_train": (
        "(Tensor residual, Tensor? branch, Tensor? weight, Tensor? bias, float eps, bool rms) "
        "-> (Tensor y, Tensor z, Tensor stats)"
    ),
    "add_norm_train_backward": (
        "(Tensor dy, Tensor? dz, Tensor z, Tensor stats, Tensor? weight, bool rms, ScalarType dresidual_dtype, "
        "ScalarType branch_dtype, ScalarType bias_dtype, int wants) "
        "-> (Tensor residual, Tensor branch, Tensor weight, Tensor bias)"
    ),
    "add_norm_forward": (
        "(Tensor residual, Tensor? branch, Tensor? weight, Tensor? bias, float eps, int norm, "
        f"{ADD_OPTIONS}, float weight_offset=0.0, int casting=0, "
        "ScalarType? residual_dtype=None, ScalarType? out_dtype=None, int outputs=3) -> (Tensor y, Tensor z, Tensor stats)"
    ),
    "add_norm_backward": (
        "(Tensor? dy, Tensor? dz, Tensor z, Tensor stats, Tensor? weight, int norm, ScalarType dresidual_dtype, "
        "ScalarType branch_dtype, ScalarType bias_dtype, int wants, float weight_offset=0.0, "
        f"Tensor? residual=None, Tensor? branch=None, {ADD_OPTIONS}) "
        "-> (Tensor residual, Tensor branch, Tensor weight, Tensor bias, "
        "Tensor residual_scale, Tensor row_scale, Tensor layer_scale, Tensor branch_bias)"
    ),
    "add_norm_out": (
        "(Tensor residual, Tensor? branch, Tensor? weight, Tensor? bias, float eps, int norm, Tensor(a!)? y, "
        f"Tensor(b!)? z, {ADD_OPTIONS}, float weight_offset=0.0, int casting=0) -> ()"
    ),
}

# Bits of `wants`, in the order of the outputs of add_norm_backward.
WANTS = ("residual", "branch", "weight", "bias", "residual_scale", "row_scale", "layer_scale", "branch_bias")

library = torch.library.Library("addnorm", "DEF")
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    # The same operator by another name: where the C++ kernels send what they were not instantiated for.
    library.define(f"{_name}_reference{_schema}", tags=(torch.Tag.pt2_compliant_tag,))


def nothing(like: Tensor) -> Tensor:
    """An output nobody asked for."""
    return like.new_empty(0, dtype=torch.float32)


def by_name(op: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """For a Python kernel of an operator with many arguments: all of them come by name."""
    names = re.findall(r"(\w+)(?:=[^,()]*)?[,)]", SCHEMAS[op].split(" -> ")[0])

    def decorate(kernel: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(kernel)
        def named(*args: Any, **options: Any) -> T:
            return kernel(**dict(zip(names, args, strict=False)), **options)

        return named

    return decorate


def checked(options: dict[str, Any]) -> dict[str, Any]:
    """Of the schema's options those that `checks.check` knows."""
    return {name: options[name] for name in CHECKED if name in options}


def stats_dtype(z_dtype: torch.dtype) -> torch.dtype:
    """Mean and rstd are kept in the dtype of the arithmetic."""
    return torch.float64 if z_dtype == torch.float64 else torch.float32


def _fake_add_norm(
    residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> Tensor:
    validation.check(residual, branch, weight, bias, eps)  # a compiled graph is refused with the sentence too
    y = residual if branch is None else branch
    return residual.new_empty(residual.shape, dtype=y.dtype)


def _fake_add_norm_stream(
    residual: Tensor, branch: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor]:
    validation.check(residual, branch, weight, bias, eps)
    return residual.new_empty(residual.shape, dtype=branch.dtype), residual.new_empty(residual.shape)


def _fake_add_norm_train(
    residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_add_norm_forward(residual, branch, weight, bias, eps, NORMS["rms" if rms else "layer"])


def _fake_add_norm_train_backward(
    dy: Tensor,
    dz: Tensor | None,
    z: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    rms: bool,
    dresidual_dtype: torch.dtype,
    branch_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    wants: int,
) -> tuple[Tensor, ...]:
    return _fake_add_norm_backward(
        dy, dz, z, stats, weight, NORMS["rms" if rms else "layer"],
        dresidual_dtype=dresidual_dtype, branch_dtype=branch_dtype, bias_dtype=bias_dtype, wants=wants,
    )[:4]  # fmt: skip


@by_name("add_norm_forward")
def _fake_add_norm_forward(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: int,
    *,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    outputs: int = 3,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    validation.check(
        residual, branch, weight, bias, eps, residual_dtype=residual_dtype, out_dtype=out_dtype, **checked(options)
    )
    z_dtype = residual_dtype or residual.dtype
    y_dtype = out_dtype or (residual if branch is None else branch).dtype
    alone = norm == NORMS["none"]
    with_z = branch is not None and (outputs > 1 or alone)
    z = residual.new_empty(residual.shape, dtype=z_dtype) if with_z else nothing(residual)
    if alone:
        return nothing(residual), z, nothing(residual)
    stats_shape = (*residual.shape[:-1], 2)
    stats = residual.new_empty(stats_shape, dtype=stats_dtype(z_dtype)) if outputs > 2 else nothing(residual)
    return residual.new_empty(residual.shape, dtype=y_dtype), z, stats


@by_name("add_norm_backward")
def _fake_add_norm_backward(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    norm: int,
    *,
    dresidual_dtype: torch.dtype,
    branch_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    wants: int,
    **options: Any,
) -> tuple[Tensor, ...]:
    parameter = z.shape[-1:]
    plain = {
        "residual": (z.shape, dresidual_dtype),
        "branch": (z.shape, branch_dtype),
        "weight": (parameter, z.dtype if weight is None else weight.dtype),
        "bias": (parameter, bias_dtype),
    }

    def gradient(name: str) -> Tensor:  # a scale's gradient is like the scale
        shape, dtype = plain[name] if name in plain else (options[name].shape, options[name].dtype)
        return z.new_empty(shape, dtype=dtype)

    return tuple(gradient(name) if wants >> bit & 1 else nothing(z) for bit, name in enumerate(WANTS))


@by_name("add_norm_out")
def _fake_add_norm_out(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: int,
    y: Tensor | None,
    z: Tensor | None,
    **options: Any,
) -> None:
    validation.check(residual, branch, weight, bias, eps, **checked(options))
    validation.check_targets({name: t for name, t in (("y", y), ("z", z)) if t is not None}, residual)


for _name, _fake in (
    ("add_norm", _fake_add_norm),
    ("add_norm_stream", _fake_add_norm_stream),
    ("add_norm_train", _fake_add_norm_train),
    ("add_norm_train_backward", _fake_add_norm_train_backward),
    ("add_norm_forward", _fake_add_norm_forward),
    ("add_norm_backward", _fake_add_norm_backward),
    ("add_norm_out", _fake_add_norm_out),
):
    for _op in (f"addnorm::{_name}", f"addnorm::{_name}_reference"):
        torch.library.register_fake(_op, _fake, lib=library)
