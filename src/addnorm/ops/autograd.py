"""Gradients: one autograd node around the forward and the backward operator.

Saved for backward: z, or y in `save_outputs`, and the statistics (8 bytes a token); the branch only if an option that scales it
requires a gradient, the residual only if residual_scale does; for dropout, the seed.

The node always returns z as its second output, even where the caller drops it. The saved z is then an output with its place in
the autograd graph, so that a second derivative (through the formulas of `reference.py`, with statistics recomputed from z)
reaches residual and branch.

An eager call makes the node around an operator that has no gradient of its own: that is the cheapest way. Tools that record
operators (export, AOTAutograd, pipelining, `torch.jit.trace`, any dispatch mode) do not see such a node and would lose the
gradients. A recorded call is therefore one operator. Its autograd kernel, registered here, makes the same node when the recorded
program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any

import torch
from torch import Tensor

from addnorm import reference
from addnorm._util.norms import BY_CODE
from addnorm._util.torch_internals import (
    AfterAutograd,
    BelowAutograd,
    any_requires_grad,
    exclude_from_capture,
    has_dispatch_mode,
    in_transform,
    is_batch_of_gradients,
    is_transformed,
)
from addnorm.ops import compile_mode, cpu, eager, formulas, save_outputs
from addnorm.ops.autocast import disable_autocast
from addnorm.ops.options import ADD_OPTIONS, GRADIENTS, NORMS
from addnorm.ops.schema import (
    ADD_ARGUMENTS,
    ADD_TENSORS,
    FORMULA_BACKWARD,
    NODE,
    SCHEMAS,
    BackwardArguments,
    ForwardArguments,
    define,
    empty_placeholder,
    kernels_of,
    library,
    outputs_of,
)

_ops = torch.ops.addnorm
# Indices of the differentiable arguments of add_norm_forward, in the order of GRADIENTS.
PLACES = tuple(ForwardArguments._fields.index(name) for name in GRADIENTS)
# Number of the arguments of a call without options.
_INPUTS = ForwardArguments._fields.index(ADD_ARGUMENTS[0].name)
_BITS = {name: 1 << bit for bit, name in enumerate(GRADIENTS)}
_RESIDUAL, _BRANCH, _PARAMETERS = _BITS["residual"], _BITS["branch"], _BITS["weight"] | _BITS["bias"]
# Bits of the options whose gradient is computed from residual, or from the branch; names and bits of options that are only added.
_FROM_RESIDUAL = sum(_BITS[option.name] for option in ADD_OPTIONS if option.gradient == "residual")
_FROM_BRANCH = sum(_BITS[option.name] for option in ADD_OPTIONS if option.gradient == "branch")
_ADDED = tuple(option.name for option in ADD_OPTIONS if option.additive)
_ADDITIVE = sum(_BITS[name] for name in _ADDED)
# Tensors that scale, and the values of the float options with which the gradients of residual and branch equal that of z.
_SCALES = tuple(name for name in ADD_TENSORS if name not in _ADDED and name != "seed")
_PLAIN_ADD = {argument.name: argument.default_value for argument in ADD_ARGUMENTS if str(argument.type) == "float"}
_WITHOUT_TENSORS: dict[str, Any] = dict.fromkeys(("weight", *ADD_TENSORS))


class AddNormFunction(torch.autograd.Function):
    """Autograd function of Add & Norm in Python.

    Takes the arguments of `add_norm_forward` without `outputs`, returns `(y, z)`.

    y is an empty placeholder where `norm` is "none", z where branch is None. csrc/autograd/node.cpp is the same node in C++, but
    does not support `save_outputs`. Where it is built, it is used instead of this class.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        y, z, stats = _ops.add_norm_forward.kernel(*arguments)
        a: Any = ForwardArguments(*arguments)
        mask = 0
        for bit, place in enumerate(PLACES):
            if place < len(arguments) and ctx.needs_input_grad[place]:
                mask |= 1 << bit
        ctx.mask = mask
        has_options = len(arguments) > _INPUTS
        if has_options and not mask & (_FROM_BRANCH | _ADDITIVE):
            # No gradient depends on the options that are only added, and the kernels are faster without them.
            a = a._replace(**dict.fromkeys(_ADDED))
        ctx.z_dtype = None  # of the z that backward computes from y
        if a.branch is not None and a.norm != NORMS["none"] and save_outputs.is_active():
            save_outputs.check_weight(a.weight, a.bias, a.weight_offset)
            ctx.z_dtype = z.dtype
        keeps_z = ctx.z_dtype is None
        ctx.save_for_backward(
            a.residual if a.branch is None else z if keeps_z else y,
            stats if keeps_z else save_outputs.mark_statistics(stats),
            a.weight,
            None if keeps_z else a.bias,
            a.residual if mask & _FROM_RESIDUAL else None,
            a.branch if mask & _FROM_BRANCH else None,
            *([getattr(a, name) for name in ADD_TENSORS] if has_options else ()),
        )
        branch_dtype = None if a.branch is None else a.branch.dtype
        # For a plain add one tensor is the gradient of both residual and branch.
        ctx.shared = branch_dtype == a.residual.dtype and (not has_options or _is_plain_add(a))
        bias_dtype = torch.float32 if a.bias is None else a.bias.dtype
        ctx.call = a._replace(residual=a.residual.dtype, branch=branch_dtype, bias=bias_dtype, **_WITHOUT_TENSORS)
        ctx.set_materialize_grads(False)
        if not mask & ~_PARAMETERS:
            ctx.mark_non_differentiable(z)  # no summand requires a gradient
        return y, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        a, mask = ctx.call, ctx.mask
        # A placeholder has no gradient, but a compiled graph passes zeros for it.
        dy = None if a.norm == NORMS["none"] else grads[0]
        dz = None if a.branch is None else grads[1]
        results: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if dy is None:
            if dz is None:
                return tuple(results)
            mask &= ~_PARAMETERS  # only z was used, not the norm's parameters
        both = ctx.shared and mask & _RESIDUAL and mask & _BRANCH
        if both:
            mask &= ~_BRANCH
        if dy is None and dz is not None and ctx.shared and not mask & _ADDITIVE:
            results[0 if mask & _RESIDUAL else 1] = dz.to(a.residual)  # the gradient of z, unchanged
        else:
            for bit, (place, grad) in enumerate(zip(PLACES, _gradients(ctx, dy, dz, mask), strict=True)):
                if mask >> bit & 1:
                    results[place] = grad
        if both:
            results[1] = results[0]
        return tuple(results)


def _is_plain_add(a: Any) -> bool:
    """Return whether the options leave the gradients of residual and branch equal to that of z."""
    return all(getattr(a, name) is None for name in _SCALES) and all(
        getattr(a, name) == value for name, value in _PLAIN_ADD.items()
    )


def _gradients(ctx: Any, dy: Tensor | None, dz: Tensor | None, mask: int) -> tuple[Tensor, ...]:
    """Return the gradients that `mask` requests, in the order of GRADIENTS, from the tensors that the node saved."""
    a = ctx.call
    z, stats, weight, bias, residual, branch, *tensors = ctx.saved_tensors
    if ctx.z_dtype is not None:
        z, stats = save_outputs.rebuild(z, stats, weight, bias, ctx.z_dtype, a.weight_offset)
    options: dict[str, Any] = {}
    if tensors:
        options = {argument.name: getattr(a, argument.name) for argument in ADD_ARGUMENTS}
        options |= dict(zip(ADD_TENSORS, tensors, strict=True))
    arguments = (
        dy, dz, z, stats, weight, a.norm, a.residual, a.branch or a.residual, a.bias, mask, a.weight_offset, residual, branch
    )  # fmt: skip
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a compiled graph has no second derivative
        return _differentiable_gradients(a.eps, *arguments, **options)
    return _ops.add_norm_backward(*arguments, **options)  # type: ignore[no-any-return]  # torch.ops is not typed


def _differentiable_gradients(eps: float, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    """Compute the gradients by differentiable formulas, as `create_graph=True` needs.

    Mean and rstd are computed again from z, so that they are differentiated too.
    """
    a: Any = BackwardArguments(*arguments, **options)
    stats = None
    if a.dy is not None:
        stats = reference.statistics(a.z.to(reference.compute_dtype(a.z)), BY_CODE[a.norm], eps)
    return tuple(empty_placeholder(a.z) if grad is None else grad for grad in eager.gradients(a, stats))


exclude_from_capture(AddNormFunction.backward)
define(FORMULA_BACKWARD)
library.impl("add_norm_backward.formula", _differentiable_gradients, "CompositeImplicitAutograd")


def _load_node() -> tuple[Any, Any, Any]:
    """Load the C++ library of the autograd node, which works only with the torch and Python that it was built with.

    Returns the operator of the node, and two functions that compute a call without torch's dispatcher: the first returns new
    tensors, the second writes existing ones. Each of the three is None if it cannot be used.
    """
    path = cpu.LIBRARY.with_name(f"_autograd-{torch.__version__}{EXTENSION_SUFFIXES[0]}")
    if cpu.ISA is None or cpu.OVERRIDE or not path.exists():
        return None, None, None
    define(NODE)
    try:
        torch.ops.load_library(str(path))
        loader = ExtensionFileLoader("addnorm._autograd", str(path))
        module = module_from_spec(spec_from_loader(loader.name, loader))  # type: ignore[arg-type]  # a loader has a spec
        module.connect(*cpu.addresses(), save_outputs.active)
    except (OSError, AttributeError):  # a torch of this version that was built otherwise, or another `_C`
        return None, None, None
    except ImportError:  # built without Python's headers
        return _ops.add_norm_node.default, None, None
    return _ops.add_norm_node.default, module.add_norm, module.add_norm_out


# The node in C++, and the functions that compute a call without the dispatcher, or return None if the call needs the dispatcher.
node, direct, direct_out = _load_node()


def apply(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute `(y, z)` with autograd, by the C++ node if it is built and `save_outputs` is off, else by `AddNormFunction`.

    Takes the arguments of `add_norm_forward` without `outputs`.
    """
    if node is None or save_outputs.is_active():
        return AddNormFunction.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]
    return node(*arguments)  # type: ignore[no-any-return]


def differentiate(
    compute: Callable[..., Any], arguments: Sequence[Any], needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Evaluate a formula again, without autocast, and return the gradients of its arguments by torch's autograd.

    It serves `create_graph=True`, and batches of gradients, for which the operators of this library have no rule.

    Args:
        compute: the formula, which returns tensors, and None in place of a result that it does not compute.
        arguments: its arguments.
        needs: whether the gradient of each argument is needed.
        grads: the gradients of its results.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: an argument may depend on an earlier one, and this gradient must not pass through it.
        arguments = [a.view_as(a) if isinstance(a, Tensor) else a for a in arguments]
    needed = [a for a, need in zip(arguments, needs, strict=True) if need]
    with disable_autocast(needed[0]), torch.enable_grad():
        pairs = zip(compute(*arguments), grads, strict=True)
        outputs, grads = zip(*((result, grad) for result, grad in pairs if result is not None), strict=True)
        found = iter(torch.autograd.grad(outputs, needed, grads, create_graph=create_graph))
    return tuple(next(found) if need else None for need in needs)


def is_any_batched(grads: Sequence[Tensor | None]) -> bool:
    """Return whether a gradient is a batch of gradients, by `is_grads_batched=True` or a transform of `torch.func`."""
    if torch.compiler.is_compiling():
        return False
    return any(g is not None and (is_batch_of_gradients(g) or is_transformed(g)) for g in grads)


def register(name: str, differentiate: Callable[..., Any]) -> None:
    """Register an operator's autograd kernel, which exported and traced programs and `torch.func` transforms run.

    If no input requires a gradient, nothing is computed for a backward. So a program that is exported in grad mode runs as fast
    as a program that is exported in no-grad mode.

    Args:
        name: the operator.
        differentiate: function that computes the operator with a gradient: in an autograd node, or under a transform in torch's
            own operators.
    """
    op = getattr(_ops, name).default

    def kernel(keyset: Any, *args: Any, **options: Any) -> Any:
        if in_transform() or (torch.is_grad_enabled() and any_requires_grad(*args, **options)):
            return differentiate(*args, **options)
        with BelowAutograd():
            return op.redispatch(keyset & AfterAutograd, *args, **options)

    library.impl(name, kernel, "Autograd", with_keyset=True)


def _differentiate(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _to_results(a, *(formulas.formula(a) if in_transform() else apply(*a[:-1])))


def _to_results(a: Any, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operator's outputs y, z and statistics for arguments `a`, with placeholders for those not requested."""
    outputs = outputs_of(a)
    results: list[Any] = [y, z, None]
    if outputs.stats is not None:
        final = (a.residual if a.branch is None else z).detach()
        results[2] = _ops.add_norm_forward.kernel(final, None, None, None, a.eps, a.norm)[2]
    pairs = zip(results, outputs, strict=True)
    return tuple(empty_placeholder(a.residual) if output is None else result for result, output in pairs)  # type: ignore[return-value]


for _name, _kernel in kernels_of("add_norm_forward", _differentiate, ("",)):
    register(_name, _kernel)
    library.impl(f"{_name}.kernel", getattr(_ops, _name).default, "Tracer")


def _register_formula(name: str, fusible: Callable[..., Any]) -> None:
    """Register the overload of operator `name` that a compiler replaces by the formula.

    Under a dispatch mode, as when a compiler traces, the overload runs `fusible`, else the operator.
    """
    op, overload = getattr(_ops, name).default, f"{name}.{compile_mode.OVERLOAD}"

    def kernel(*args: Any, **options: Any) -> Any:
        return fusible(*args, **options) if has_dispatch_mode() else op(*args, **options)

    define(overload + SCHEMAS[name])
    library.impl(overload, kernel, "CompositeImplicitAutograd")


def _fusible(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _to_results(a._replace(outputs=min(a.outputs, 2)), *formulas.fusible_formula(a))


for _name, _kernel in kernels_of("add_norm_forward", _fusible, ("",)):
    _register_formula(_name, _kernel)
