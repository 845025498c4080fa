"""The operators' schemas, and the fake kernels that return their outputs' shapes and dtypes without computing.

The dispatcher is the registry of backends: `eager.py` registers the reference for every device, the C++ library (`cpu.py`) the
CPU kernels, `triton/` the CUDA kernels. A kernel in Python takes one argument, a named tuple of the operator's arguments, and
`kernels_of` makes the functions to register from it. The operators are private; use `addnorm.functional`.

The C++ library defines the operators too, from the copy of these schemas in csrc/arguments.h, so that an exported program runs
in a process that loads the library and not this package. This module defines those that are not defined yet.

All but `add_norm_out` are functional: they return fresh, contiguous, distinct tensors. The number of outputs is fixed, so an
output that was not requested is an empty placeholder. Without a branch an operator computes the norm alone.

`add_norm` and `add_norm_stream` have no options: each argument costs time, and a call on one row takes a few microseconds in all.
`add_norm` returns y, `add_norm_stream` y and z. `add_norm_forward` and its backward take every option.

`add_norm_out` writes y and z into existing tensors and rounds to their dtypes. Without a z tensor, z has the residual's dtype.
Each element is read before it is written, so y and z may be exactly the memory of residual or branch; any other overlap raises
an error. Only `out.py` increments the version counters of the tensors that were written.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from addnorm._util.torch_internals import find_schemas, parse_schema
from addnorm.ops import cpu, validation  # cpu loads the C++ library, which defines the operators
from addnorm.ops.options import ADD_OPTIONS, DTYPE_OPTIONS, GRADIENTS, NORM_OPTIONS, NORMS, to_schema

Kernel = Callable[[Any], Any]  # takes a named tuple of the operator's arguments


def parse_arguments(schema: str) -> tuple[Any, ...]:
    """Return torch's descriptions of the arguments of a schema in their order.

    Example:
        >>> from addnorm.ops.schema import parse_arguments
        >>> [(argument.name, str(argument.type)) for argument in parse_arguments("(Tensor? bias, float eps=0.0) -> Tensor")]
        [('bias', 'Optional[Tensor]'), ('eps', 'float')]
    """
    return tuple(parse_schema(f"addnorm::unnamed{schema}").arguments)


_INPUTS = "Tensor residual, Tensor? branch, Tensor? weight, Tensor? bias, float eps"
_ADD, _NORM = to_schema(ADD_OPTIONS), to_schema(NORM_OPTIONS)
_FORWARD = f"({_INPUTS}, int norm, {_ADD}, {_NORM}, {to_schema(DTYPE_OPTIONS)}"

SCHEMAS = {
    "add_norm": f"({_INPUTS}, int norm) -> Tensor",
    "add_norm_stream": f"({_INPUTS}, int norm) -> (Tensor y, Tensor z)".replace("Tensor? branch", "Tensor branch"),
    "add_norm_forward": f"{_FORWARD}, int outputs=3) -> (Tensor y, Tensor z, Tensor stats)",
    "add_norm_backward": (
        "(Tensor? dy, Tensor? dz, Tensor z, Tensor stats, Tensor? weight, int norm, ScalarType dresidual_dtype, "
        "ScalarType branch_dtype, ScalarType bias_dtype, int grad_mask, float weight_offset=0.0, Tensor? residual=None, "
        f"Tensor? branch=None, {_ADD}) -> ({', '.join(f'Tensor {name}' for name in GRADIENTS)})"
    ),
    "add_norm_out": f"({_INPUTS}, int norm, Tensor(a!)? y, Tensor(b!)? z, {_ADD}, {_NORM}) -> ()",
}
# The forward operators are differentiable (`autograd.py`). The overload `kernel` of each is the same without autograd: eager
# calls use it inside an autograd node of their own, which costs less.
OVERLOADS = {name: ("", ".kernel") if name.endswith(("norm", "stream", "forward")) else ("",) for name in SCHEMAS}
# The autograd node in C++ (`autograd.py`), and the gradients as a formula that is differentiable itself.
NODE = f"add_norm_node{_FORWARD}) -> (Tensor y, Tensor z)"
FORMULA_BACKWARD = "add_norm_backward.formula(float eps, " + SCHEMAS["add_norm_backward"][1:]
# The operators without options, with the number of their outputs.
PLAIN = {"add_norm": 1, "add_norm_stream": 2}

ARGUMENTS: dict[str, tuple[Any, ...]] = {}
_TUPLES: dict[str, Any] = {}
library = torch.library.Library("addnorm", "DEF")


def define(definition: str) -> None:
    """Define an operator, unless the C++ library, which can be loaded without this package, has defined it."""
    name, _, overload = definition.partition("(")[0].partition(".")
    same = [other for other in find_schemas(f"addnorm::{name}") if other.overload_name == overload]
    if not same:
        library.define(definition, tags=(torch.Tag.pt2_compliant_tag,))
    elif same[0] != parse_schema(f"addnorm::{definition}"):
        raise ImportError(
            f"The C++ library {cpu.LIBRARY} is of another version of addnorm, whose operator {definition.partition('(')[0]} "
            "has other arguments: build it again, or reinstall addnorm."
        )


def declare(schemas: dict[str, str]) -> tuple[str, ...]:
    """Define operators with their overloads and references; return the definitions that the C++ library has too.

    A reference is the same operator under another name, which the C++ kernels call for arguments that they do not support.
    """
    for name, schema in schemas.items():
        arguments = ARGUMENTS[name] = parse_arguments(schema)
        defaults = [argument.default_value for argument in arguments if argument.has_default_value()]
        _TUPLES[name] = namedtuple(name, [argument.name for argument in arguments], defaults=defaults)
        define(f"{name}_reference{schema}")
    definitions = tuple(
        f"{name}{overload}{schema}" for name, schema in schemas.items() for overload in OVERLOADS.get(name, ("",))
    )
    for definition in definitions:
        define(definition)
    return definitions


def kernels_of(
    name: str, kernel: Kernel, overloads: tuple[str, ...] | None = None
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the names of the operators that `kernel` computes, each with the function to register for it.

    These are the overloads of operator `name`: those in `overloads`, by default all, and the operator of its reference (suffix
    "_reference"). For `add_norm_forward` the operators without options, `add_norm` and `add_norm_stream`, follow each.
    """
    for overload in overloads or (*OVERLOADS.get(name, ("",)), "_reference"):
        yield name + overload, _by_name(_TUPLES[name], kernel)
        for short, outputs in PLAIN.items() if name == "add_norm_forward" else ():
            yield short + overload, _without_options(kernel, outputs)


def _by_name(arguments: Any, kernel: Kernel) -> Callable[..., Any]:
    return lambda *args, **options: kernel(arguments(*args, **options))


def _without_options(kernel: Kernel, outputs: int) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        results = kernel(_TUPLES["add_norm_forward"](*args, **options, outputs=outputs))
        return results[0] if outputs == 1 else results[:outputs]

    return run


def arguments_of(name: str) -> Any:
    """Return the named-tuple class of the arguments of operator `name`."""
    return _TUPLES[name]


def overload_of(op: str) -> Any:
    """Return torch's overload of an operator by its name, such as "add_norm_forward.kernel"."""
    name, _, overload = op.partition(".")
    return getattr(getattr(torch.ops.addnorm, name), overload or "default")


DEFINITIONS = declare(SCHEMAS)
ForwardArguments, BackwardArguments = _TUPLES["add_norm_forward"], _TUPLES["add_norm_backward"]
# The schema arguments of the options before the norm.
ADD_ARGUMENTS = parse_arguments(f"({_ADD}) -> ()")
ADD_NAMES = tuple(argument.name for argument in ADD_ARGUMENTS)
ADD_TENSORS = tuple(argument.name for argument in ADD_ARGUMENTS if str(argument.type) == "Optional[Tensor]")


def empty_placeholder(like: Tensor) -> Tensor:
    """Return an empty placeholder for an output that was not requested."""
    return like.new_empty(0, dtype=torch.float32)


def stats_dtype(z_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of mean and rstd: that of the arithmetic."""
    return torch.float64 if z_dtype == torch.float64 else torch.float32


class Outputs(NamedTuple):
    """Shape and dtype of each output of `add_norm_forward`; None: an empty placeholder."""

    y: Any
    z: Any
    stats: Any


def outputs_of(a: Any) -> Outputs:
    """Return the outputs of a call of `add_norm_forward`."""
    shape, z_dtype = a.residual.shape, a.residual.dtype
    if a.branch is not None:
        z_dtype = a.residual_dtype or z_dtype
    add_only = a.norm == NORMS["none"]
    return Outputs(
        None if add_only else (shape, a.out_dtype or (a.residual if a.branch is None else a.branch).dtype),
        (shape, z_dtype) if a.branch is not None and (a.outputs > 1 or add_only) else None,
        ((*shape[:-1], 2), stats_dtype(z_dtype)) if a.outputs > 2 and not add_only else None,
    )


def make_empty(like: Tensor, output: Any) -> Tensor:
    """Return an uninitialized tensor with the shape and dtype in `output`, or a placeholder if `output` is None."""
    if output is None:
        return empty_placeholder(like)
    result: Tensor = like.new_empty(output[0], dtype=output[1])
    return result


def _fake_forward(a: Any) -> tuple[Tensor, ...]:
    validation.check(**a._asdict())  # a wrong call fails with the same message when it is traced
    return tuple(make_empty(a.residual, output) for output in outputs_of(a))


def gradients_of(a: Any) -> dict[str, Any]:
    """Return shape and dtype of each gradient that a call of `add_norm_backward` requests, by name, in the order of GRADIENTS."""
    features = a.z.shape[-1:]
    inputs = {
        "residual": (a.z.shape, a.dresidual_dtype),
        "branch": (a.z.shape, a.branch_dtype),
        "weight": (features, a.z.dtype if a.weight is None else a.weight.dtype),
        "bias": (features, a.bias_dtype),
    }
    return {  # an option's gradient has the option's shape and dtype
        name: inputs[name] if name in inputs else (getattr(a, name).shape, getattr(a, name).dtype)
        for bit, name in enumerate(GRADIENTS)
        if a.grad_mask >> bit & 1
    }


def _fake_backward(a: Any) -> tuple[Tensor, ...]:
    requested = gradients_of(a)
    return tuple(make_empty(a.z, requested.get(name)) for name in GRADIENTS)


def targets_of(a: Any) -> dict[str, Tensor]:
    """Return the tensors that a call of `add_norm_out` writes, by argument name."""
    return {name: t for name, t in (("y", a.y), ("z", a.z)) if t is not None}


def _fake_out(a: Any) -> None:
    validation.check(**a._asdict())
    validation.check_targets(targets_of(a), a.residual)


def register_fakes(fakes: dict[str, Kernel]) -> None:
    """Register fake kernels by the operators' names."""
    for name, fake in fakes.items():
        for op, function in kernels_of(name, fake):
            torch.library.register_fake(f"addnorm::{op}", function, lib=library)


register_fakes({"add_norm_forward": _fake_forward, "add_norm_backward": _fake_backward, "add_norm_out": _fake_out})
