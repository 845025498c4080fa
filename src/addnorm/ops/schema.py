"""The operators' schemas, and the fake kernels that return their outputs' shapes and dtypes without computing.

The dispatcher is the registry of backends: `eager.py` registers the reference for every device, the C++ library (`cpu.py`) the
CPU kernels, `triton/` the CUDA kernels. The operators are private; use `addnorm.functional`.

The C++ library defines the operators too, from the copy of these schemas in csrc/arguments.h, so that an exported program runs
in a process that loads the library and not this package. This module defines those that are not defined yet.

All but `add_norm_out` are functional: they return fresh, contiguous, distinct tensors. The number of outputs is fixed, so an
output that was not requested is an empty placeholder. Without a branch an operator computes the norm alone.

The first four operators have no options: each argument costs time, and a call on one row takes a few microseconds in all. They
return y; y and z; y, z and the statistics for a backward; the gradients. The next two take every option.

`add_norm_out` writes y and z into existing tensors and rounds to their dtypes. Without a z tensor, z has the residual's dtype.
Each element is read before it is written, so y and z may be exactly the memory of residual or branch; any other overlap raises
an error. Only `out.py` increments the version counters of the tensors that were written.
"""

from __future__ import annotations

import ast
import functools
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from addnorm.ops import cpu, validation  # cpu loads the C++ library, which defines the operators
from addnorm.ops.options import ADD_OPTIONS, DTYPE_OPTIONS, GRADIENTS, NORM_OPTIONS, NORMS, norm_number, to_schema

T = TypeVar("T")

_INPUTS = "Tensor residual, Tensor? branch, Tensor? weight, Tensor? bias, float eps"
_GRADS = "ScalarType dresidual_dtype, ScalarType branch_dtype, ScalarType bias_dtype, int grad_mask"
_ADD, _NORM = to_schema(ADD_OPTIONS), to_schema(NORM_OPTIONS)

SCHEMAS = {
    "add_norm": f"({_INPUTS}, bool rms) -> Tensor",
    "add_norm_stream": f"({_INPUTS}, bool rms) -> (Tensor y, Tensor z)".replace("Tensor? branch", "Tensor branch"),
    "add_norm_train": f"({_INPUTS}, bool rms) -> (Tensor y, Tensor z, Tensor stats)",
    "add_norm_train_backward": (
        f"(Tensor dy, Tensor? dz, Tensor z, Tensor stats, Tensor? weight, bool rms, {_GRADS}) "
        f"-> ({', '.join(f'Tensor {name}' for name in GRADIENTS[:4])})"
    ),
    "add_norm_forward": (
        f"({_INPUTS}, int norm, {_ADD}, {_NORM}, {to_schema(DTYPE_OPTIONS)}, int outputs=3) "
        "-> (Tensor y, Tensor z, Tensor stats)"
    ),
    "add_norm_backward": (
        f"(Tensor? dy, Tensor? dz, Tensor z, Tensor stats, Tensor? weight, int norm, {_GRADS}, float weight_offset=0.0, "
        f"Tensor? residual=None, Tensor? branch=None, {_ADD}) -> ({', '.join(f'Tensor {name}' for name in GRADIENTS)})"
    ),
    "add_norm_out": f"({_INPUTS}, int norm, Tensor(a!)? y, Tensor(b!)? z, {_ADD}, {_NORM}) -> ()",
}


class Argument(NamedTuple):
    """One argument of a schema; `default` is its text, empty where there is none."""

    type: str
    name: str
    default: str


def parse_arguments(schema: str) -> tuple[Argument, ...]:
    """Return the arguments of a schema in their order.

    Example:
        >>> from addnorm.ops.schema import parse_arguments
        >>> parse_arguments("(Tensor? bias, float eps=0.0) -> Tensor")
        (Argument(type='Tensor?', name='bias', default=''), Argument(type='float', name='eps', default='0.0'))
    """
    texts = schema[1:].split(") -> ")[0].split(", ")
    parts = [(text.partition("=")[0].rsplit(" ", 1), text.partition("=")[2]) for text in texts]
    return tuple(Argument(kind, name, default) for (kind, name), default in parts)


def _arguments_tuple(name: str, arguments: tuple[Argument, ...]) -> Any:
    defaults = [ast.literal_eval(argument.default) for argument in arguments if argument.default]
    return namedtuple(name, [argument.name for argument in arguments], defaults=defaults)


ARGUMENTS = {name: parse_arguments(schema) for name, schema in SCHEMAS.items()}
# The arguments of the operators with options as tuples. ForwardArguments leaves out `outputs`, the last one.
ForwardArguments = _arguments_tuple("ForwardArguments", ARGUMENTS["add_norm_forward"][:-1])
BackwardArguments = _arguments_tuple("BackwardArguments", ARGUMENTS["add_norm_backward"])
OutArguments = _arguments_tuple("OutArguments", ARGUMENTS["add_norm_out"])
# The schema arguments of the options before the norm.
ADD_ARGUMENTS = parse_arguments(f"({_ADD}) -> ()")
ADD_NAMES = tuple(argument.name for argument in ADD_ARGUMENTS)

# The functional forward operators are differentiable (`capture.py`). The overload `kernel` of each is the same without
# autograd: eager calls use it inside an autograd node of their own, which costs less.
FORWARDS = ("add_norm", "add_norm_stream", "add_norm_train", "add_norm_forward")
# Every operator with a kernel for each device, by the name of its schema.
OVERLOADS = {name: (name, f"{name}.kernel") if name in FORWARDS else (name,) for name in SCHEMAS}

# The definitions of the operators that have kernels, and of the references. A reference is the same operator under another
# name, which the C++ kernels call for arguments that they do not support.
DEFINITIONS = tuple(overload + SCHEMAS[name] for name, overloads in OVERLOADS.items() for overload in overloads)
_REFERENCES = tuple(f"{name}_reference{schema}" for name, schema in SCHEMAS.items())

library = torch.library.Library("addnorm", "DEF")


def define(definition: str) -> None:
    """Define an operator, unless the C++ library, which can be loaded without this package, has defined it."""
    schema = torch._C.parse_schema(f"addnorm::{definition}")
    defined = torch._C._jit_get_schemas_for_operator(schema.name)
    same_overload = [other for other in defined if other.overload_name == schema.overload_name]
    if not same_overload:
        library.define(definition, tags=(torch.Tag.pt2_compliant_tag,))
    elif same_overload[0] != schema:
        raise ImportError(
            f"The C++ library {cpu.LIBRARY} is of another version of addnorm, whose operator {definition.partition('(')[0]} "
            "has other arguments: build it again, or reinstall addnorm."
        )


for _definition in (*DEFINITIONS, *_REFERENCES):
    define(_definition)


def empty_placeholder(like: Tensor) -> Tensor:
    """Return an empty placeholder for an output that was not requested."""
    return like.new_empty(0, dtype=torch.float32)


def by_name(op: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorate a Python kernel of an operator so that it receives all arguments by name."""
    names = [argument.name for argument in ARGUMENTS[op]]

    def decorate(kernel: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(kernel)
        def named(*args: Any, **options: Any) -> T:
            return kernel(**dict(zip(names, args, strict=False)), **options)

        return named

    return decorate


def stats_dtype(z_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of mean and rstd: that of the arithmetic."""
    return torch.float64 if z_dtype == torch.float64 else torch.float32


def _fake_add_norm(
    residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> Tensor:
    return _fake_add_norm_forward(residual, branch, weight, bias, eps, norm_number(rms), outputs=1)[0]


def _fake_add_norm_stream(
    residual: Tensor, branch: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor]:
    return _fake_add_norm_forward(residual, branch, weight, bias, eps, norm_number(rms), outputs=2)[:2]


def _fake_add_norm_train(
    residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_add_norm_forward(residual, branch, weight, bias, eps, norm_number(rms))


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
    grad_mask: int,
) -> tuple[Tensor, ...]:
    return _fake_add_norm_backward(
        dy, dz, z, stats, weight, norm_number(rms),
        dresidual_dtype=dresidual_dtype, branch_dtype=branch_dtype, bias_dtype=bias_dtype, grad_mask=grad_mask,
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
    # A wrong call fails with the same message when it is traced.
    validation.check(
        residual, branch, weight, bias, eps, norm=norm, residual_dtype=residual_dtype, out_dtype=out_dtype, outputs=outputs,
        **options,
    )  # fmt: skip
    z_dtype = residual_dtype or residual.dtype
    y_dtype = out_dtype or (residual if branch is None else branch).dtype
    add_only = norm == NORMS["none"]
    with_z = branch is not None and (outputs > 1 or add_only)
    z = residual.new_empty(residual.shape, dtype=z_dtype) if with_z else empty_placeholder(residual)
    if add_only:
        return empty_placeholder(residual), z, empty_placeholder(residual)
    stats = empty_placeholder(residual)
    if outputs > 2:
        stats = residual.new_empty((*residual.shape[:-1], 2), dtype=stats_dtype(z_dtype))
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
    grad_mask: int,
    **options: Any,
) -> tuple[Tensor, ...]:
    features = z.shape[-1:]
    inputs = {
        "residual": (z.shape, dresidual_dtype),
        "branch": (z.shape, branch_dtype),
        "weight": (features, z.dtype if weight is None else weight.dtype),
        "bias": (features, bias_dtype),
    }

    def gradient(name: str) -> Tensor:  # an option's gradient has the option's shape and dtype
        shape, dtype = inputs[name] if name in inputs else (options[name].shape, options[name].dtype)
        return z.new_empty(shape, dtype=dtype)

    return tuple(gradient(name) if grad_mask >> bit & 1 else empty_placeholder(z) for bit, name in enumerate(GRADIENTS))


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
    validation.check(residual, branch, weight, bias, eps, norm=norm, **options)
    validation.check_targets({name: t for name, t in (("y", y), ("z", z)) if t is not None}, residual)


for _name in SCHEMAS:
    for _op in (*OVERLOADS[_name], f"{_name}_reference"):
        torch.library.register_fake(f"addnorm::{_op}", globals()[f"_fake_{_name}"], lib=library)
