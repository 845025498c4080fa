"""Decomposition of fused operators into primitive steps: factors, dropout mask, product, add, norm.

A data flow then has the same adds and norms whether the model fuses them or not. Fused operators are this library's, torch's
dropout, and its `addmm(x, a, b)` if x has the shape of the product and is not a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from addnorm._util.norms import BY_CODE, KINDS, torch_norm
from addnorm.ops import philox
from addnorm.stream.dataflow.operators import bind_arguments

DECOMPOSED = ("add_norm", "add_norm_stream", "add_norm_forward", "add_norm_out")
SUFFIX = "_reference"
PRODUCTS = {"addmm": torch.mm, "baddbmm": torch.bmm}


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
    own = name.removeprefix("addnorm::").removesuffix(SUFFIX)
    return name == "native_dropout" or (name.startswith("addnorm::") and own in DECOMPOSED)


def decompose_fused(
    name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor],
    get_old: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> list[Step]:  # fmt: skip
    """Return the steps of one call of a fused operator. `get_old` returns the contents of a tensor before the call."""
    if name in PRODUCTS:
        return _decompose_product(name, args, kwargs, outputs[0], get_old)
    if name == "native_dropout":
        return _decompose_dropout(args, outputs)
    arguments = bind_arguments(func, args, kwargs)
    kind = BY_CODE.get(arguments["norm"])  # None without a norm
    y, z = _find_outputs(name, arguments, outputs)
    residual, branch = arguments["residual"], arguments["branch"]
    steps: list[Step] = []

    def step(name: str, part: str, output: Tensor, *inputs: Tensor, numbers: tuple[Any, ...] = ()) -> Tensor:
        func = getattr(torch, name, torch.ones)  # noise is never computed again
        steps.append(Step(name, func, (*inputs, *numbers), ((part, output),)))
        return output

    with torch.no_grad():
        if branch is not None:
            wide = torch.float64 if residual.dtype == torch.float64 else torch.float32
            old = {id(residual): get_old(residual), id(branch): get_old(branch)}

            def value(t: Tensor) -> Tensor:
                return old.get(id(t), t).detach().to(wide)

            def times(t: Tensor, factor: Tensor | float | None, part: str) -> Tensor:
                if isinstance(factor, Tensor):
                    return step("mul", part, value(t) * factor.detach().to(wide), t, factor)
                return t if factor in (None, 1.0) else step("mul", part, value(t) * factor, t, numbers=(factor,))

            stream = times(residual, arguments.get("residual_factor"), "a")
            stream = times(stream, arguments.get("residual_scale"), "a_scale")
            write = branch
            if (bias := arguments.get("branch_bias")) is not None:
                write = step("add", "branch", value(write) + bias.detach().to(wide), write, bias)
            if p := arguments.get("dropout_p", 0.0):
                keep = philox.keep_scale(tuple(branch.shape), p, arguments["seed"], arguments["offset"], wide)
                write = times(write, step("noise", "keep", keep), "dropped")
            write = times(write, arguments.get("layer_scale"), "layer_scale")
            if (rows := arguments.get("row_scale")) is not None:
                column = step("unsqueeze", "rows", rows.detach()[..., None], rows, numbers=(-1,))
                write = times(write, column, "row_scale")
            write = times(write, arguments.get("branch_factor"), "b")
            if z is None:
                z = (value(stream) + value(write)).to(arguments.get("residual_dtype") or residual.dtype)
            residual = step("add", "z", z, stream, write)
        if kind is not None and y is not None:
            weight, offset = arguments["weight"], arguments.get("weight_offset", 0.0)
            if weight is not None and offset:
                weight = step("add", "weight", weight.detach().double() + offset, weight, numbers=(offset,))
            options = {"weight": weight, "bias": arguments["bias"], "eps": arguments["eps"]}
            steps.append(Step(KINDS[kind].operators[0], partial(torch_norm, kind), (residual,), (("y", y),), options))
    return steps


def _decompose_product(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor, get_old: Callable[[Tensor], Tensor]
) -> list[Step]:
    """Return the steps of beta * x + alpha * (a @ b)."""
    x, a, b = args[:3]
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    with torch.no_grad():
        product = PRODUCTS[name](get_old(a).detach(), get_old(b).detach())
        bare = name.replace("add", "").replace("bbmm", "bmm")
        steps = [Step(bare, PRODUCTS[name], (a, b), (("product", product),))]
        stream = x
        if alpha != 1:
            branch = product * alpha
            steps.append(Step("mul", torch.mul, (product, alpha), (("branch", branch),)))
            product = branch
        if beta != 1:
            stream = get_old(x).detach() * beta
            steps.append(Step("mul", torch.mul, (x, beta), (("a", stream),)))
    return [*steps, Step("add", torch.add, (stream, product), (("z", out),))]


def _decompose_dropout(args: Sequence[Any], outputs: Sequence[Tensor]) -> list[Step]:
    """Return the steps of torch's dropout: the mask, scaled so that the mean stays, and a product."""
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
    y = outputs[0]
    z = outputs[1] if len(outputs) > 1 else None
    return (y if y.numel() or not arguments["residual"].numel() else None), (z if z is not None and z.numel() else None)
