"""Decomposition of fused operators into primitive steps: factors, dropout mask, product, add, norm.

A data flow then has the same adds and norms whether the model fuses them or not. Fused operators are the Add & Norm operators of
this library, torch's dropout, and torch's `addmm(x, a, b)` and `baddbmm` if x has the shape of the product and is not a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from addnorm._util.norms import BY_CODE, KINDS
from addnorm.ops import philox
from addnorm.reference import torch_norm
from addnorm.stream.dataflow.operators import FAMILY, bind_arguments

OWN = ("add_norm", "add_norm_stream", "add_norm_forward", "add_norm_out")
DECOMPOSED = {"native_dropout", *(f"{FAMILY}{name}{suffix}" for name in OWN for suffix in ("", "_reference"))}
PRODUCTS = {"addmm": "mm", "baddbmm": "bmm"}  # operators x + a @ b, each with the operator that computes a @ b


class Step(NamedTuple):
    """Primitive operator that is a step of a fused operator.

    Attributes:
        name: the name of the primitive operator.
        func: its function.
        args, kwargs: its arguments.
        outputs: its outputs, each with its name or index in the fused operator.
    """

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    outputs: tuple[tuple[int | str, Tensor], ...]
    kwargs: Mapping[str, Any] = {}


def is_fused(name: str, args: Sequence[Any]) -> bool:
    """Return whether an operator is fused, so that `decompose_fused` decomposes it."""
    if name in PRODUCTS:
        x, a, b = args[:3]
        return tuple(x.shape) == (*a.shape[:-1], b.shape[-1])
    return name in DECOMPOSED


class _Steps(list[Step]):
    """List of the steps of one fused call, computed in one dtype from the contents of the inputs before the call.

    Args:
        dtype: the dtype.
        old: the contents of the call's arguments before it, by the ids of the arguments.
    """

    def __init__(self, dtype: torch.dtype, old: Mapping[int, Tensor]) -> None:
        self.dtype, self.old = dtype, old

    def read(self, x: Any) -> Any:
        """Return the contents of a tensor in the dtype of the steps; a number as it is."""
        return self.old.get(id(x), x).detach().to(self.dtype) if isinstance(x, Tensor) else x

    def add(self, name: str, part: str, *inputs: Any, output: Tensor | None = None) -> Tensor:
        """Add a step, and return its output: `output`, or what torch's function of this name returns."""
        func = getattr(torch, name, torch.ones)  # a placeholder for `noise`, which is never computed again
        output = func(*map(self.read, inputs)) if output is None else output
        self.append(Step(name, func, inputs, ((part, output),)))
        return output

    def multiply(self, x: Tensor, factor: Tensor | float | None, part: str) -> Tensor:
        """Add the product of x and `factor` as a step, and return the product; if `factor` is None or 1, return x."""
        is_needed = isinstance(factor, Tensor) or factor not in (None, 1.0)
        return self.add("mul", part, x, factor) if is_needed else x


def decompose_fused(
    name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor],
    get_old: Callable[[Tensor], Tensor],
) -> list[Step]:  # fmt: skip
    """Return the steps of one call of a fused operator. `get_old` returns the contents of a tensor before the call."""
    if name == "native_dropout":
        return _decompose_dropout(args, outputs)
    arguments = bind_arguments(func, args, kwargs)
    old = {id(t): get_old(t) for t in arguments.values() if isinstance(t, Tensor)}
    with torch.no_grad():
        if name in PRODUCTS:  # beta * x + alpha * (a @ b)
            x, a, b = args[:3]
            build = _Steps(outputs[0].dtype, old)
            product = build.multiply(build.add(PRODUCTS[name], "product", a, b), arguments["alpha"], "branch")
            build.add("add", "z", build.multiply(x, arguments["beta"], "a"), product, output=outputs[0])
            return build
        return _decompose_add_norm(name, arguments, outputs, old)


def _decompose_add_norm(
    name: str, arguments: dict[str, Any], outputs: Sequence[Tensor], old: Mapping[int, Tensor]
) -> list[Step]:
    """Return the steps of one call of an Add & Norm operator of this library."""
    y, z = _find_outputs(name, arguments, outputs)
    total, write = arguments["residual"], arguments["branch"]
    build = _Steps(torch.float64 if total.dtype == torch.float64 else torch.float32, old)
    if write is not None:
        stream = build.multiply(total, arguments.get("residual_factor"), "a")
        stream = build.multiply(stream, arguments.get("residual_scale"), "a_scale")
        if (bias := arguments.get("branch_bias")) is not None:
            write = build.add("add", "branch", write, bias)
        if p := arguments.get("dropout_p"):
            keep = philox.keep_scale(tuple(write.shape), p, arguments["seed"], arguments["offset"], build.dtype)
            write = build.multiply(write, build.add("noise", "keep", output=keep), "dropped")
        write = build.multiply(write, arguments.get("layer_scale"), "layer_scale")
        if (rows := arguments.get("row_scale")) is not None:
            write = build.multiply(write, build.add("unsqueeze", "rows", rows, -1), "row_scale")
        write = build.multiply(write, arguments.get("branch_factor"), "b")
        if z is None:
            z = (build.read(stream) + build.read(write)).to(arguments.get("residual_dtype") or total.dtype)
        total = build.add("add", "z", stream, write, output=z)
    kind = BY_CODE.get(arguments["norm"])  # None without a norm
    if kind is not None and y is not None:
        weight, offset = arguments["weight"], arguments.get("weight_offset")
        if weight is not None and offset:
            weight = build.add("add", "weight", weight, offset)
        options = {"weight": weight, "bias": arguments["bias"], "eps": arguments["eps"]}
        norm = partial(torch_norm, kind)
        build.append(Step(KINDS[kind].operators[0], norm, (total,), (("y", y),), options))
    return build


def _decompose_dropout(args: Sequence[Any], outputs: Sequence[Tensor]) -> list[Step]:
    """Return the steps of torch's dropout: the mask, scaled to a mean of 1, and its product with the input."""
    x, p, train = args
    y, mask = outputs
    keep = mask.to(y.dtype) * (1.0 / (1.0 - p) if train is not False and p < 1.0 else 1.0)
    noise = Step("noise", torch.ones, (), (("keep", keep), (1, mask)))
    return [noise, Step("mul", torch.mul, (x, keep), ((0, y),))]


def _find_outputs(
    name: str, arguments: dict[str, Any], outputs: Sequence[Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the outputs y and z; None in place of an output that was not requested."""
    if "out" in name:
        return arguments["y"], arguments["z"]
    is_empty = not arguments["residual"].numel()
    y, z, *_ = (*(t if t.numel() or is_empty else None for t in outputs), None)
    return y, z
