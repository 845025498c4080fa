"""Fused operators as the plain ones that they stand for: factors, dropout mask, product, add, norm, each a step of its own.

So whoever reads a data flow meets an add as an add and a norm as a norm, whether they were fused or not. Fused are this
library's operators, and torch's `addmm(x, a, b)` where x is no bias but as large as the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from addnorm.ops import philox, schema

__all__ = ["Step", "known", "lower"]

KINDS = {number: kind for kind, number in schema.NORMS.items()}
LOWERED = ("add_norm", "add_norm_stream", "add_norm_train", "add_norm_forward", "add_norm_out")
SUFFIX = "_reference"
PRODUCTS = {"addmm": torch.mm, "baddbmm": torch.bmm}


class Step(NamedTuple):
    """A plain operator: what it is given, what it returned, and what that is called among the parts of the fused one."""

    name: str
    func: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    numbers: tuple[Any, ...]
    output: Tensor
    part: str


def known(name: str, args: Sequence[Any]) -> bool:
    """Whether an operator is such a one."""
    if name in PRODUCTS:
        x, a, b = args[:3]
        return tuple(x.shape) == (*a.shape[:-1], b.shape[-1])
    return name.startswith("addnorm::") and name.removeprefix("addnorm::").removesuffix(SUFFIX) in LOWERED


def lower(
    name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], returned: Sequence[Tensor],
    was: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> list[Step]:  # fmt: skip
    """The steps of one call; `was` gives what a tensor held before the call."""
    if name in PRODUCTS:
        return _product(name, args, kwargs, returned[0], was)
    names = [argument.name for argument in func._schema.arguments]
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    given: dict[str, Any] = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    kind = KINDS[given["norm"]] if "norm" in given else "rms" if given["rms"] else "layer"
    y, z = _results(name, given, returned)
    residual, branch = given["residual"], given["branch"]
    steps: list[Step] = []

    def step(name: str, part: str, output: Tensor, *inputs: Tensor, numbers: tuple[Any, ...] = ()) -> Tensor:
        steps.append(Step(name, STEPS[name], inputs, numbers, output, part))
        return output

    with torch.no_grad():
        if branch is not None:
            wide = torch.float64 if residual.dtype == torch.float64 else torch.float32
            held = {id(residual): was(residual), id(branch): was(branch)}

            def value(t: Tensor) -> Tensor:
                return held.get(id(t), t).detach().to(wide)

            def times(t: Tensor, factor: Tensor | float, part: str) -> Tensor:
                if isinstance(factor, Tensor):
                    return step("mul", part, value(t) * factor.detach().to(wide), t, factor)
                return t if factor == 1.0 else step("mul", part, value(t) * factor, t, numbers=(factor,))

            stream = times(residual, given.get("residual_factor", 1.0), "a")
            if (scale := given.get("residual_scale")) is not None:
                stream = times(stream, scale, "a_scale")
            write = branch
            if (bias := given.get("branch_bias")) is not None:
                write = step("add", "branch", value(write) + bias.detach().to(wide), write, bias)
            if p := given.get("dropout_p", 0.0):
                keep = philox.keep_scale(tuple(branch.shape), p, given["seed"], given["offset"], wide)
                write = times(write, step("noise", "keep", keep), "dropped")
            if (scale := given.get("layer_scale")) is not None:
                write = times(write, scale, "layer_scale")
            if (rows := given.get("row_scale")) is not None:
                write = times(
                    write, step("unsqueeze", "rows", rows.detach()[..., None], rows, numbers=(-1,)), "row_scale"
                )
            write = times(write, given.get("branch_factor", 1.0), "b")
            if z is None:
                z = (value(stream) + value(write)).to(given.get("residual_dtype") or residual.dtype)
            residual = step("add", "z", z, stream, write)
        if kind != "none" and y is not None:
            gains = [given[name] for name in ("weight", "bias") if given[name] is not None]
            has = (given["weight"] is not None, given["bias"] is not None)
            eps, offset = given["eps"], given.get("weight_offset", 0.0)
            step("addnorm::norm", "y", y, residual, *gains, numbers=(kind, eps, offset, *has))
    return steps


def _product(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor, was: Callable[[Tensor], Tensor]
) -> list[Step]:
    """beta * x + alpha * (a @ b)."""
    x, a, b = args[:3]
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    with torch.no_grad():
        product = PRODUCTS[name](was(a).detach(), was(b).detach()) * alpha
        steps = [Step(name.replace("add", "").replace("bbmm", "bmm"), PRODUCTS[name], (a, b), (), product, "product")]
        stream = x
        if beta != 1:
            stream = was(x).detach() * beta
            steps.append(Step("mul", torch.mul, (x,), (beta,), stream, "a"))
    return [*steps, Step("add", torch.add, (stream, product), (), out, "z")]


def _results(name: str, given: dict[str, Any], returned: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """y and z, None where the call did not make them."""
    if "out" in name:
        return given["y"], given["z"]
    y = returned[0]
    z = returned[1] if len(returned) > 1 else None
    return (y if y.numel() or not given["residual"].numel() else None), (z if z is not None and z.numel() else None)


def _norm(*given: Any) -> Any:
    raise NotImplementedError  # a norm is computed by its formula (norms.py), never replayed


STEPS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "mul": torch.mul,
    "noise": torch.ones,
    "unsqueeze": torch.unsqueeze,
    "addnorm::norm": _norm,
}
