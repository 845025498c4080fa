"""Calls that a graph records, and the operators' autograd kernels, which run when the graph does.

An eager call makes an autograd node around an operator that has no gradient of its own: that is the cheapest way. What records
operators (export, AOTAutograd, pipelining, `torch.jit.trace`, any dispatch mode) does not see such a node and would lose the
gradients. A recorded call is therefore one operator whose gradient is registered with the dispatcher: `add_norm`,
`add_norm_stream`, or with options `add_norm_forward`. Its autograd kernel makes the node of an eager call, with the same bits, if
a gradient is required. Otherwise nothing is computed for a backward, so a program that is exported in grad mode serves as fast
as one that is exported without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from addnorm import reference
from addnorm.ops import autocast, autograd, compile_mode, dtensor, eager, validation
from addnorm.ops.options import NORMS, norm_number
from addnorm.ops.schema import ARGUMENTS, FORWARDS, ForwardArguments, empty_placeholder, library

_ops = torch.ops.addnorm
_forward_kernel = _ops.add_norm_forward.kernel
_compiling = torch.compiler.is_dynamo_compiling
_exporting = torch.compiler.is_exporting
_transforms_active = torch._C._are_functorch_transforms_active
_forward_ad: Any = forward_ad  # the level is a module attribute


def fast_path(arguments: tuple[Any, ...], requires_grad: bool, return_residual: bool) -> Any:
    """Return y, or `(y, z)`, of a call without options."""
    dtensor.register_rules()  # a traced call cannot be repeated
    name = "add_norm_stream" if return_residual else "add_norm"
    op = _select(name, arguments[0], requires_grad)
    if op is not None:
        return op(*arguments)
    if requires_grad:
        outputs: Any = autograd.FastFunction.apply(*arguments)  # type: ignore[no-untyped-call]  # torch does not type it
        return outputs if return_residual else outputs[0]
    return compile_mode.FORMULAS[name](*arguments)


def run(arguments: Any, requires_grad: bool, return_residual: bool) -> tuple[Tensor, Tensor]:
    """Return `(y, z)` of a call with options; y or z is a placeholder if it is not requested."""
    dtensor.register_rules()
    op = _select("add_norm_forward", arguments.residual, requires_grad)
    if op is None and requires_grad:
        return autograd.AddNormFunction.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]  # as above
    forward = op or compile_mode.FORMULAS["add_norm_forward"]
    y, z, _ = forward(*arguments, 2 if return_residual else 1)
    return y, z


def _select(name: str, like: Tensor, requires_grad: bool) -> Any:
    """Return the overload that the graph records, None for the formula in its place."""
    overloads = getattr(_ops, name)
    if not _compiling() or _exporting():
        return overloads.default
    if compile_mode.mode(like) == "formula":
        return None
    return (
        overloads.default if requires_grad else overloads.kernel
    )  # no graph of torch.compile becomes differentiable later


def formula(a: Any) -> tuple[Tensor, Tensor]:
    """Return `(y, z)` in torch's operators, which torch differentiates, batches and linearizes itself."""
    options = a._asdict()
    validation.check(**options)
    z = a.residual
    if a.branch is not None:
        z = reference.add(a.residual, a.branch, dtype=a.residual_dtype, **eager.add_options(a.residual, options))
    if a.norm == NORMS["none"]:
        return z, z
    out_dtype = a.out_dtype or (a.residual if a.branch is None else a.branch).dtype
    if a.out_dtype is None and torch.is_autocast_enabled(z.device.type):
        out_dtype = autocast.y_dtype(z.device.type, z.dtype)
    y = reference.normalize(
        z, a.weight, a.bias, norm=eager.norm_kind(a.norm), eps=a.eps, weight_offset=a.weight_offset,
        casting=eager.CASTING_NAMES[a.casting], dtype=out_dtype,
    )  # fmt: skip
    return y, z


def transforms_active() -> bool:
    """Return whether a function transform or a forward-mode derivative is active: such calls use the formula."""
    return _forward_ad._current_level >= 0 or _transforms_active()


_OUTPUTS = {
    "add_norm": 1,
    "add_norm_stream": 2,
    "add_norm_train": 3,
}  # and of add_norm_forward as many as its argument says
_NAMES = tuple(argument.name for argument in ARGUMENTS["add_norm_forward"])


def _autograd_kernel(name: str) -> Callable[..., Any]:
    op = getattr(_ops, name).default

    def kernel(keyset: Any, *args: Any, **options: Any) -> Any:
        differentiate = torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **options)
        if not transforms_active() and not differentiate:
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **options)
        if name == "add_norm_forward":
            named = dict(zip(_NAMES, args, strict=False)) | options
            outputs = named.pop("outputs", 3)
            a = ForwardArguments(**named)
        else:
            outputs, a = _OUTPUTS[name], ForwardArguments(*args[:-1], norm_number(args[-1]))
        if transforms_active():
            y, z = formula(a)
        elif name == "add_norm_forward":
            y, z = autograd.full_apply(*a)
        else:
            y, z = autograd.fast_apply(*args)
        results = _to_results(a, outputs, y, z)
        return results[0] if name == "add_norm" else results[: _OUTPUTS.get(name, 3)]

    return kernel


def _to_results(a: Any, outputs: int, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, z and the statistics, with placeholders where the operator has them."""
    add_only = a.norm == NORMS["none"]
    stats = empty_placeholder(a.residual)
    if outputs > 2 and not add_only:
        final = (a.residual if a.branch is None else z).detach()
        stats = _forward_kernel(final, None, None, None, a.eps, a.norm)[2]
    return (
        empty_placeholder(a.residual) if add_only else y,
        z if a.branch is not None and (outputs > 1 or add_only) else empty_placeholder(a.residual),
        stats,
    )


for _name in FORWARDS:
    library.impl(_name, _autograd_kernel(_name), "Autograd", with_keyset=True)
    library.impl(f"{_name}.kernel", getattr(_ops, _name).default, "Tracer")
