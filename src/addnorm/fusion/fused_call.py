"""The fused call that replaces an Add & Norm, and the check that it computes the same as the graph's nodes.

The call and the nodes get the same random sum, weight and bias, in the model's dtypes. In low precision they may differ only
where the last rounding goes the other way. So the casting of an RMSNorm is determined, not guessed, and a norm that rounds at
other steps is not fused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, fx

from addnorm import functional
from addnorm.fusion.graph import TracedGraph, concrete, entered, example_value, given_value, is_number, shape_of
from addnorm.fusion.match import Match, NotFusableError
from addnorm.reference import Casting

ROWS = 64  # rows of random numbers, if the nodes accept any shape
FLIPPED = 1e-2  # share of elements whose last rounding may differ: about 1e-4 do, with the wrong casting half do
ROUNDINGS = 64  # in eps of float32 or float64: allowed difference between two orders of summing a row
ROW_SCALES = (1.0, 1e-9, 0.0, 1.0)  # factors of the rows, in turn; small rows reveal a lower bound, or eps
OTHER_ROUNDING = "its norm rounds intermediate results that the fused call keeps exact"
OTHER_FORMULA = "its norm does not compute the formula that was found"
LOW_PRECISION = (torch.bfloat16, torch.float16)
OPERATIONS: dict[str, Callable[..., Any]] = {kind: add for kind, (_, add) in functional.FUNCTIONS.items()}


def operation_of(match: Match) -> Callable[..., Any]:
    """Return the function of this library that computes an Add & Norm."""
    return OPERATIONS[match.norm.kind]


def call_arguments(match: Match) -> dict[str, Any]:
    """Return the keyword arguments of the fused call, without `return_residual`."""
    x, branch = (example_value(node) for node in match.operands)
    z, y = example_value(match.z[0]), example_value(match.y[0])
    arguments: dict[str, Any] = {"eps": match.norm.eps or 0.0}
    if match.casting != "float32":
        arguments["casting"] = match.casting
    if z.dtype != x.dtype:
        arguments["residual_dtype"] = z.dtype
    if len({x.dtype, branch.dtype, y.dtype}) > 1:  # explicit, so that autocast does not decide
        arguments["out_dtype"] = y.dtype
    return arguments


def choose_casting(match: Match, traced: TracedGraph) -> None:
    """Set the casting with which the fused call matches the graph's nodes.

    Raises:
        NotFusableError: no casting matches.
    """
    dtype = example_value(match.z[0]).dtype
    is_low = dtype in LOW_PRECISION
    castings: Sequence[str] = get_args(Casting) if is_low and match.norm.kind == "rms" else ("float32",)
    problem = ""
    for shape in (probe_shape(match), match.shape):
        rows = max(math.prod(shape[:-1]), 1)
        count = math.ceil(ROWS / rows) if rows < len(ROW_SCALES) else 1
        draws = [_random_tensors(match, shape, seed) for seed in range(count)]
        try:
            with entered(traced.contexts[match.y[0]]), torch.no_grad():
                expected = torch.stack([_run_nodes(match, tensors, traced.graph) for tensors in draws])
                for match.casting in castings:
                    results = torch.stack([_run_call(match, tensors) for tensors in draws])
                    if agree(expected, results, dtype):
                        return
        except Exception as error:  # the nodes may accept no other shape than that of the graph
            problem = f"its norm could not be run on its own ({type(error).__name__})"
            continue
        if takes_any_rows(match) or shape == match.shape:
            problem = OTHER_ROUNDING if is_low else OTHER_FORMULA
            break
    raise NotFusableError(problem)


def probe_shape(match: Match) -> tuple[int, ...]:
    """Return the shape of the sum in a proof of the call: that of the model, with few rows."""
    shape = match.shape
    most = ROWS if takes_any_rows(match) else max(shape[-2:-1], default=1)  # few numbers do not tell castings apart
    rows = (*(1,) * (len(shape) - 2), min(ROWS, max(most, 1)))
    return (*rows[: len(shape) - 1], shape[-1])


def takes_any_rows(match: Match) -> bool:
    """Return whether no operator of the norm depends on the number of rows."""
    inputs = (input_node for node in match.inner for input_node in node.all_input_nodes)
    return match.streams_dim is None and not match.views and not any(is_number(example_value(node)) for node in inputs)


def draw_normal(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
    """Return random numbers in float64 on the CPU, whatever torch's defaults are."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64, device="cpu")


def draw_row_factors(generator: torch.Generator, shape: Sequence[int]) -> Tensor:
    """Return random factors of the rows of a tensor, from 0.001 to 10."""
    drawn = torch.rand((*shape[:-1], 1), generator=generator, dtype=torch.float64, device="cpu")
    return 10.0 ** (4.0 * drawn - 3.0)


def repeat_factors(factors: Sequence[float], shape: Sequence[int], start: int = 0) -> Tensor:
    """Return one factor for each row of `shape`, `(*, 1)`: cycle through `factors`, starting at index `start`."""
    turn = torch.arange(start, start + math.prod(shape[:-1]), device="cpu") % len(factors)
    return torch.tensor(factors, dtype=torch.float64, device="cpu")[turn].reshape(*shape[:-1], 1)


def _random_tensors(match: Match, shape: tuple[int, ...], seed: int) -> dict[fx.Node, Tensor]:
    """Return a random sum, weight and bias. Rows range from small against eps to large, with a mean; some are tiny or zero."""
    generator = torch.Generator().manual_seed(seed)
    scale = draw_row_factors(generator, shape) * repeat_factors(ROW_SCALES, shape, seed)
    tensors = dict.fromkeys(match.z, (draw_normal(generator, shape) + 0.3) * scale)
    tensors |= {node: draw_normal(generator, shape_of(node)) for node in match.parameters.values()}
    return {node: tensor.to(example_value(node).device, example_value(node).dtype) for node, tensor in tensors.items()}


def _run_nodes(match: Match, tensors: dict[fx.Node, Tensor], graph: fx.GraphModule) -> Tensor:
    """Return y as the graph's own nodes compute it."""
    values: dict[fx.Node, Any] = {node: tensor.clone() for node, tensor in tensors.items()}
    read = {other for node in match.inner for other in node.all_input_nodes}
    values |= {node: given_value(graph, node) for node in read - {*values, *match.inner}}
    run_nodes(match.inner, values)
    y: Tensor = values[match.y[0]]
    return y


def _run_call(match: Match, tensors: dict[fx.Node, Tensor]) -> Tensor:
    """Return y as the fused call computes it, for a residual that is the sum and a branch of zeros, or the reverse."""
    z = tensors[match.z[0]]
    x_dtype, branch_dtype = (example_value(node).dtype for node in match.operands)
    weight, bias = (None if node is None else tensors[node].reshape(-1) for node in (match.weight, match.bias))
    if x_dtype == z.dtype:
        residual, branch = z, torch.zeros_like(z, dtype=branch_dtype)
    else:
        residual, branch = torch.zeros_like(z, dtype=x_dtype), z
    y: Tensor = operation_of(match)(residual, branch, weight, bias, **call_arguments(match))
    for view in match.views:
        y = apply_view(view, y)
    return y


def apply_view(view: fx.Node, tensor: Tensor) -> Tensor:
    """Apply a view of the graph to another tensor."""
    args, kwargs = fx.map_arg((view.args[1:], dict(view.kwargs)), lambda node: concrete(example_value(node)))
    y: Tensor = call_node(view, (tensor, *args), kwargs)
    return y


def call_node(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Call the method or function of a node."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]  # the target of a call_function is callable


def run_nodes(
    nodes: Iterable[fx.Node], values: dict[fx.Node, Any], call: Callable[[fx.Node, Any, Any], Any] = call_node
) -> None:
    """Run nodes in order; add their results to `values`, which has the values of all other nodes that they read."""
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = call(node, args, kwargs)


def agree(expected: Tensor, result: Tensor, dtype: torch.dtype, flips: int = 0) -> bool:
    """Return whether two results differ by no more than the order of summing a row explains.

    In low precision, a small share of the elements and `flips` further ones may be rounded the other way.
    """
    if expected.shape != result.shape or expected.dtype != result.dtype:
        return False
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    a, b = expected.double(), result.double()
    if not (a.isfinite() == b.isfinite()).all():
        return False
    difference = (a - b).nan_to_num(0.0, 0.0, 0.0).abs()
    differs = difference > ROUNDINGS * eps * a.abs().clamp_min(1.0)
    if expected.dtype not in LOW_PRECISION:
        return not differs.any()
    info = torch.finfo(expected.dtype)
    one_rounding = difference <= 2.0 * info.eps * a.abs().clamp_min(info.tiny)
    return bool((one_rounding | ~differs).all()) and int(differs.sum()) <= FLIPPED * differs.numel() + flips
