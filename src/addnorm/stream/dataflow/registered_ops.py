"""Operators of other libraries as equations in torch's operators, which are analysed in their place.

Every run proves the equations that it uses: it computes them in float64 on its own values, and compares them with what the
operators returned. One that differs is not used, and `Op.note` says by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from addnorm._util.numbers import format_number
from addnorm.ops.streams import formula
from addnorm.stream.dataflow.fused_ops import Step
from addnorm.stream.dataflow.operators import FAMILY, bind_arguments, operator_name
from addnorm.stream.dataflow.replay import relative_error
from addnorm.stream.dataflow.wrappers import find_tensors_of

Equation = Callable[..., Any]
EQUATIONS: dict[str, Equation] = {}  # by an operator's name, or a pattern of names


def register_operator(name: str, equation: Equation) -> None:
    """Register what an operator of another library computes, so that `inspect` and the tools that use it understand it.

    Built in are the norms of vLLM, SGLang, FlashInfer, QuACK, torch_npu and the layers of the kernels hub. Every run proves an
    equation before it is used: in float64, on the run's own values.

    Args:
        name: name of the operator, as in "mylib::add_rms_norm"; `*` stands for any characters.
        equation: function in ordinary torch operators, none of them in place. It gets those of the operator's arguments that it
            names, as before the call. It returns a tensor or a tuple, as the operator does. For an operator in place it returns a
            dict: what an argument becomes, by the argument's name, and an output by its index. None, or a missing entry, leaves
            an output out. The operator's schema must declare what the operator writes.

    Example:
        >>> @torch.library.custom_op("mylib::add_half", mutates_args=("residual",))
        ... def add_half(residual: torch.Tensor, branch: torch.Tensor) -> None:
        ...     residual += 0.5 * branch
        >>> addnorm.stream.register_operator("mylib::add_half", lambda residual, branch: {"residual": residual + 0.5 * branch})
        >>> class Model(torch.nn.Sequential):
        ...     def forward(self, x):
        ...         x = x.clone()
        ...         for layer in self:
        ...             add_half(x, layer(x))
        ...         return x
        >>> layers = [torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)) for _ in range(3)]
        >>> found = addnorm.inspect(Model(*layers), torch.randn(4, 8))
        >>> str(found.sites[0].row), found.closes
        ("x' = x + 0.5 f(N(x))", True)
    """
    if not isinstance(name, str) or "::" not in name or name.startswith(("aten::", FAMILY)):
        raise ValueError(f"name is {name!r}, expected that of another library's operator: 'mylib::add_rms_norm'.")
    if not callable(equation):
        raise TypeError(f"equation is {type(equation).__name__}, expected a function of the operator's arguments.")
    EQUATIONS[name] = equation


def find_equation(name: str) -> Equation | None:
    """Return the equation of an operator; None if none is registered."""
    if "::" not in name or name in EQUATIONS:
        return EQUATIONS.get(name)
    return next((found for key, found in EQUATIONS.items() if "*" in key and fnmatchcase(name, key)), None)


def suggest_equation(func: Any) -> str:
    """Return the line of code that registers an operator, with dots in place of what it computes."""
    schema = func._schema
    names = ", ".join(argument.name for argument in schema.arguments)
    written = [f'"{a.name}": ...' for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    result = f"{{{', '.join(written)}}}" if written else "..."
    return f'addnorm.stream.register_operator("{schema.name}", lambda {names}: {result})'


class Expansion(NamedTuple):
    """Steps of one call of a registered operator.

    Attributes:
        steps: the steps, with the arguments of the call.
        results: by the index of each output of the call that the equation describes, the equal output of a step.
        error: why the equation is not used; an empty string if it is used. After an error, there are no steps and no results.
    """

    steps: list[Step]
    results: dict[int, Tensor]
    error: str


def expand(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor], get_old: Callable[[Tensor], Tensor],
    proven: bool = True,
) -> Expansion:  # fmt: skip
    """Return the steps of one call of a registered operator, or an error if its equation fails.

    With `proven`, the equation is also computed in float64, and fails if its results differ from the outputs of the call by more
    than round-off. `get_old` returns the contents of a tensor before the call.
    """
    name = operator_name(func)
    equation = find_equation(name)
    assert equation is not None
    arguments = bind_arguments(func, args, kwargs)
    old = pytree.tree_map_only(Tensor, lambda t: get_old(t).detach(), arguments)
    originals = {id(t): own for t, own in zip(find_tensors_of(old), find_tensors_of(arguments), strict=True)}
    try:
        with torch.no_grad():
            with _Recorder() as recorder:
                results: dict[int, Tensor] = {}
                for k, value in _apply(equation, old, arguments, outputs).items():
                    is_taken = id(value) in originals or any(value is other for other in results.values())
                    cast = value if value.dtype == outputs[k].dtype else value.to(outputs[k].dtype)
                    results[k] = value.clone() if is_taken and cast is value else cast
            wide = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, old)
            error = _compare(results, _apply(equation, wide, arguments, outputs), outputs) if proven else ""
    except Exception as raised:  # the equation is the user's, and may raise anything
        lines = str(raised).splitlines()
        error = f"it raises {type(raised).__name__}{': ' + lines[0] if lines else ''}"
    if error:
        return Expansion([], {}, f"the equation registered for {name} is not what the operator computed: {error}")
    numbers = {id(value): k for k, value in results.items()}
    steps = []
    for n, (step, given, out) in enumerate(recorder.calls):
        own, options = pytree.tree_map_only(Tensor, lambda t: originals.get(id(t), t), given)
        parts = tuple((numbers.get(id(t), f"{n}.{k}"), t) for k, t in enumerate(find_tensors_of(out)))
        steps.append(Step(operator_name(step), step, own, parts, options))
    return Expansion(steps, results, "")


def _apply(
    equation: Equation, values: Mapping[str, Any], arguments: Mapping[str, Any], outputs: Sequence[Tensor]
) -> dict[int, Tensor]:  # fmt: skip
    """Return the results of an equation on `values`, by the index of the operator's output that each describes."""
    parameters = signature(equation).parameters
    takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    found = equation(**{name: value for name, value in values.items() if takes_all or name in parameters})
    found = (found,) if isinstance(found, Tensor) else found
    results = {}
    for key, value in found.items() if isinstance(found, dict) else enumerate(found):
        if value is None or (isinstance(key, str) and key in arguments and arguments[key] is None):
            continue
        target = arguments.get(key) if isinstance(key, str) else outputs[key]
        k = next((k for k, out in enumerate(outputs) if out is target), None)
        if k is None:
            raise ValueError(f"{key!r} is no argument that the operator writes")
        if value.shape != outputs[k].shape:
            raise ValueError(f"{key!r} has shape {tuple(value.shape)}, expected {tuple(outputs[k].shape)}")
        results[k] = value
    return results


def _compare(results: Mapping[int, Tensor], exact: Mapping[int, Tensor], outputs: Sequence[Tensor]) -> str:
    """Return a text on the first output that differs from `exact` by more than round-off; "" if none does."""
    for k, out in enumerate(outputs):
        if k not in results or not out.numel():
            continue
        eps = torch.finfo(out.dtype).eps if out.is_floating_point() else 0.0
        own = relative_error(results[k], exact[k])  # of the equation itself, in the dtypes of the run
        error, tolerance = relative_error(out.detach(), exact[k]), max(1e-10, 4 * eps + min(4 * own, 16 * eps))
        if not error <= tolerance:
            return f"output {k}: relative error {format_number(error, 2)}, tolerance {format_number(tolerance, 1)}"
    return ""


PRODUCTS = ("matmul", "einsum")  # recorded as views and products of two factors, as in a model's run


class _Recorder(TorchDispatchMode):
    """Dispatch mode that records operators with their arguments and outputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            raise ValueError(f"{operator_name(func)} writes in place, expected an operator that returns a new tensor")
        if operator_name(func) in PRODUCTS:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, (args, kwargs or {}), out))
        return out


# Built-in operators: the key of the norm and the key of the sum in the result of the equation, the number that is added to the
# weight, and the names of the operators. Names of arguments and the order of outputs are those of each library's schema.
Key = int | str
BUILT_IN: list[tuple[Key, Key | None, float, str]] = [
    ("out", None, 0.0, "_C::rms_norm sgl_kernel::rmsnorm flashinfer::rmsnorm"),
    ("out", None, 1.0, "sgl_kernel::gemma_rmsnorm flashinfer::gemma_rmsnorm"),
    ("out", "residual_out", 0.0, "quack::_rmsnorm_fwd"),
    ("input", "residual", 0.0, "_C::fused_add_rms_norm sgl_kernel::fused_add_rmsnorm* flashinfer::fused_add_rmsnorm"),
    ("input", "residual", 1.0, "sgl_kernel::gemma_fused_add_rmsnorm* flashinfer::gemma_fused_add_rmsnorm"),
    (0, None, 0.0, "sgl_kernel::rmsnorm_cpu vllm_ir::rms_norm vllm::rocm_aiter_rms_norm npu::npu_rms_norm"),
    (0, None, 0.0, "*::apply_rms_norm *::dropout_add_ln_fwd"),  # of the hub, whose namespaces have a hash
    (0, None, 1.0, "sgl_kernel::gemma_rmsnorm_cpu _C_ascend::npu_gemma_rms_norm"),
    (0, 1, 0.0, "vllm_ir::fused_add_rms_norm vllm::rocm_aiter_rmsnorm2d_fwd_with_add"),
    (0, 2, 0.0, "npu::npu_add_rms_norm"),
]
ARGUMENTS = (
    ("input", "x", "self", "x1", "hidden_states"), ("residual", "x2", "x_residual"), ("weight", "gamma"), ("bias", "beta"),
    ("eps", "epsilon", "variance_epsilon"),
)  # fmt: skip


def _make_equation(y: Key, z: Key | None, offset: float) -> Equation:
    def equation(**arguments: Any) -> dict[Key, Tensor]:
        values: list[Any] = [next((arguments[n] for n in names if n in arguments), None) for names in ARGUMENTS]
        x, residual, weight, bias, eps = values
        total = x if residual is None else x + residual
        gain = weight if weight is None or not offset else weight + offset
        if arguments.get("is_layernorm") or arguments.get("is_rms_norm") is False:
            normed = F.layer_norm(total, total.shape[-1:], gain, bias, eps)
        else:
            normed = F.rms_norm(total, total.shape[-1:], gain, eps)
            normed = normed if bias is None else normed + bias
        key = next(key for key in ("result", "output", y) if key in arguments or key == y)
        return {key: normed} if z is None else {key: normed, z: total}

    return equation


EQUATIONS |= {name: _make_equation(y, z, offset) for y, z, offset, names in BUILT_IN for name in names.split()}


def _compute_boundary(**arguments: Any) -> tuple[Tensor | None, ...]:
    """Return what this library's operator of n streams computes: the streams, the read, and the coefficients."""
    return formula.boundary(SimpleNamespace(**arguments))[:5]


EQUATIONS["addnorm::add_norm_streams"] = _compute_boundary
