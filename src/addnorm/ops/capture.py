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
from addnorm.ops.schema import ARGUMENTS, FORWARDS, SCHEMAS, ForwardArguments, define, empty_placeholder, library

_ops = torch.ops.addnorm
_forward_kernel = _ops.add_norm_forward.kernel
_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_exporting = torch.compiler.is_exporting
_transforms_active = torch._C._are_functorch_transforms_active
_forward_ad: Any = forward_ad  # the level is a module attribute


def fast_path(arguments: tuple[Any, ...], requires_grad: bool, return_residual: bool) -> Any:
    """Return y, or `(y, z)`, of a call without options."""
    dtensor.register_rules()  # a traced call cannot be repeated
    name = "add_norm_stream" if return_residual else "add_norm"
    residual, *others = arguments[:4]
    plain = all(t is None or t.dtype == residual.dtype for t in others)
    return _select(name, residual, requires_grad, plain)(*arguments)


def run(arguments: Any, requires_grad: bool, return_residual: bool) -> tuple[Tensor, Tensor]:
    """Return `(y, z)` of a call with options; y or z is a placeholder if it is not requested."""
    dtensor.register_rules()
    op = _select("add_norm_forward", arguments.residual, requires_grad, plain=False)
    y, z, _ = op(*arguments, 2 if return_residual else 1)
    return y, z


def _select(name: str, residual: Tensor, requires_grad: bool, plain: bool) -> Any:
    """Return the overload that the graph records."""
    overloads = getattr(_ops, name)
    if not _compiling() or _exporting():
        return overloads.default
    if compile_mode.mode(residual, plain) == "formula":
        return getattr(overloads, compile_mode.OVERLOAD)
    return (
        overloads.default if requires_grad else overloads.kernel
    )  # no graph of torch.compile becomes differentiable later


def formula(a: Any) -> tuple[Tensor, Tensor]:
    """Return `(y, z)` in the reference's operators, which torch differentiates, batches and linearizes itself."""
    options = a._asdict()
    validation.check(**options)
    z = a.residual
    if a.branch is not None:
        z = reference.add(a.residual, a.branch, dtype=a.residual_dtype, **eager.add_options(a.residual, options))
    if a.norm == NORMS["none"]:
        return z, z
    return reference.normalize(z, a.weight, a.bias, **norm_options(a, z.dtype)), z


def fusible_formula(a: Any) -> tuple[Tensor, Tensor]:
    """Return `(y, z)` in torch's operators for torch.compile: the norm is torch's own, for which Inductor has a loop.

    Without options that is what torch.compile makes of the same call in plain PyTorch. With options the norm has the rounded z,
    but its gradient meets that of z before either is rounded, as in the operator.
    """
    options = a._asdict()
    validation.check(**options)
    if _is_plain(a):
        z = a.residual if a.branch is None else (a.residual + a.branch).contiguous()  # as the operator's outputs
        return compile_mode.plain_norm(z, a.weight, a.bias, eager.norm_kind(a.norm), a.eps).contiguous(), z
    exact = z = a.residual
    if a.branch is not None:
        dtype = a.residual_dtype or a.residual.dtype
        acc = reference.compute_dtype(a.residual, a.branch, dtype=dtype)
        exact = reference.add(a.residual, a.branch, dtype=acc, **eager.add_options(a.residual, options))
        z = exact.to(dtype).contiguous()  # as the operator's outputs
    if a.norm == NORMS["none"]:
        return z, z
    rounded = exact
    if z.dtype != exact.dtype:
        wide = z.to(exact.dtype)
        rounded = exact + torch.where(wide == exact, 0.0, wide - exact).detach()  # not inf - inf
    with reference.sums_in_one_loop():
        y = compile_mode.normalize(rounded, a.weight, a.bias, **norm_options(a, z.dtype))
    return y.contiguous(), z


def _is_plain(a: Any) -> bool:
    """Return whether a call has no options, and one dtype."""
    tensors = (a.residual, a.branch, a.weight, a.bias)
    if a.norm == NORMS["none"] or a.residual.shape[-1] == 0:
        return False
    if any(t is not None and t.dtype != a.residual.dtype for t in tensors):
        return False
    defaults = ForwardArguments._field_defaults
    options = ((value, defaults[name]) for name, value in a._asdict().items() if name in defaults)
    return all(not isinstance(value, Tensor) and value == default for value, default in options)


def norm_options(a: Any, z_dtype: torch.dtype) -> dict[str, Any]:
    """Return the options of the norm for `reference.normalize`, y's dtype as the dispatcher would choose it."""
    out_dtype = a.out_dtype or (a.residual if a.branch is None else a.branch).dtype
    device = a.residual.device.type
    if a.out_dtype is None and torch.is_autocast_enabled(device):
        out_dtype = autocast.y_dtype(device, z_dtype)
    return {
        "norm": eager.norm_kind(a.norm), "eps": a.eps, "weight_offset": a.weight_offset,
        "casting": eager.CASTING_NAMES[a.casting], "dtype": out_dtype,
    }  # fmt: skip


def transforms_active() -> bool:
    """Return whether a function transform or a forward-mode derivative is active: such calls use the formula."""
    return _forward_ad._current_level >= 0 or _transforms_active()


_OUTPUTS = {
    "add_norm": 1,
    "add_norm_stream": 2,
    "add_norm_train": 3,
}  # and of add_norm_forward as many as its argument says
_NAMES = tuple(argument.name for argument in ARGUMENTS["add_norm_forward"])


def _to_arguments(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, int]:
    """Return an operator's arguments as `ForwardArguments`, and the number of its outputs."""
    if name != "add_norm_forward":
        return ForwardArguments(*args[:-1], norm_number(args[-1])), _OUTPUTS[name]
    named = dict(zip(_NAMES, args, strict=False)) | options
    outputs = named.pop("outputs", 3)
    return ForwardArguments(**named), outputs


def _select_results(name: str, a: Any, outputs: int, y: Tensor, z: Tensor) -> Any:
    """Return y and z as the operator returns them."""
    results = _to_results(a, outputs, y, z)
    return results[0] if name == "add_norm" else results[: _OUTPUTS.get(name, 3)]


def _autograd_kernel(name: str) -> Callable[..., Any]:
    op = getattr(_ops, name).default

    def kernel(keyset: Any, *args: Any, **options: Any) -> Any:
        differentiate = torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **options)
        if not transforms_active() and not differentiate:
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **options)
        a, outputs = _to_arguments(name, args, options)
        if transforms_active():
            y, z = formula(a)
        elif name == "add_norm_forward":
            y, z = autograd.full_apply(*a)
        else:
            y, z = autograd.fast_apply(*args)
        return _select_results(name, a, outputs, y, z)

    return kernel


def _formula_kernel(name: str) -> Callable[..., Any]:
    """Return the kernel of the formula's overload: a compiler that traces it gets the formula, all others the operator."""
    op = getattr(_ops, name).default

    def kernel(*args: Any, **options: Any) -> Any:
        if not _dispatch_modes():
            return op(*args, **options)
        a, outputs = _to_arguments(name, args, options)
        return _select_results(name, a, min(outputs, 2), *fusible_formula(a))

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


for _name in ("add_norm", "add_norm_stream", "add_norm_forward"):
    define(f"{_name}.{compile_mode.OVERLOAD}{SCHEMAS[_name]}")
    library.impl(f"{_name}.{compile_mode.OVERLOAD}", _formula_kernel(_name), "CompositeImplicitAutograd")
for _name in FORWARDS:
    library.impl(_name, _autograd_kernel(_name), "Autograd", with_keyset=True)
    library.impl(f"{_name}.kernel", getattr(_ops, _name).default, "Tracer")
