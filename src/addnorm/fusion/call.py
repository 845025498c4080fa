"""The call that a boundary becomes, and the proof on random numbers that it computes what the graph's nodes compute.

Both run on the same random sum, weight and bias, in the dtypes of the model. In low precision only what a last rounding flips
may differ: so the order of casts is found, not guessed, and a norm that rounds elsewhere is left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, fx

from addnorm import functional
from addnorm.fusion.pattern import Match, regions
from addnorm.fusion.traced import given_to, is_number, numbers_of
from addnorm.reference import Casting

__all__ = ["arguments", "fused", "inside", "settle", "viewed"]

OPERATION: dict[str, Callable[..., Any]] = {"layer": functional.add_layer_norm, "rms": functional.add_rms_norm}
ROWS = 64  # of random numbers, where the nodes take any shape
FLIPPED = 1e-2  # the share of elements that a last rounding may turn: about 1e-4 are, of a wrong order of casts half
ROUNDINGS = 64  # of float32, or of float64: what two ways of adding up a row may differ by
SIZES = (1.0, 1e-9, 0.0, 1.0)  # of rows in turn: where a lower bound, or an eps, is all that there is
ROUNDS = "its norm rounds to low precision where the operation does not"
ANOTHER = "its norm is not the formula that it looks like"
LOW = (torch.bfloat16, torch.float16)


def fused(match: Match) -> Callable[..., Any]:
    """The function of this library that does add and norm."""
    return OPERATION[match.norm.kind]


def arguments(match: Match) -> dict[str, Any]:
    """Its keyword arguments but return_residual."""
    x, f = (given_to(node) for node in match.operands)
    z, y = given_to(match.z[0]), given_to(match.y[0])
    found: dict[str, Any] = {"eps": match.norm.eps or 0.0}
    if match.casting != "float32":
        found["casting"] = match.casting
    if z.dtype != x.dtype:
        found["residual_dtype"] = z.dtype
    if y.dtype != f.dtype or len({x.dtype, f.dtype, y.dtype}) > 1:  # said, so that autocast has no say
        found["out_dtype"] = y.dtype
    return found


def settle(match: Match, graph: fx.GraphModule) -> str | None:
    """Finds with which order of casts the call computes what the nodes do; the reason why not, if with none."""
    low = given_to(match.z[0]).dtype in LOW
    castings: Sequence[str] = get_args(Casting) if low and match.norm.kind == "rms" else ("float32",)
    entered = regions(graph)[match.y[0]]
    problem = None
    for shape, last in _shapes(match):
        draws = [
            _random(match, shape, first) for first in range(len(SIZES) if math.prod(shape[:-1]) < len(SIZES) else 1)
        ]
        try:
            with inside(entered), torch.no_grad():
                wanted = [_replayed(match, tensors, graph) for tensors in draws]
                for match.casting in castings:
                    came = (_called(match, tensors) for tensors in draws)
                    if all(
                        _same(one, other, given_to(match.z[0]).dtype) for one, other in zip(wanted, came, strict=True)
                    ):
                        return None
        except Exception as error:  # the nodes may take no other shape than that of the graph
            problem = f"its norm could not be computed by itself ({type(error).__name__})"
            continue
        if last:
            return ROUNDS if low else ANOTHER
    return problem


def _shapes(match: Match) -> Iterator[tuple[tuple[int, ...], bool]]:
    """A few rows, and the shape of the graph; and whether that is the last word, as of nodes without shapes written into them."""
    shape = tuple(numbers_of(tuple(given_to(match.z[0]).shape)))
    rows = (*(1,) * (len(shape) - 2), min(ROWS, max(shape[-2], 1)) if len(shape) > 1 else 1)
    free = not match.views and not any(is_number(given_to(n)) for node in match.inner for n in node.all_input_nodes)
    yield (*rows[: len(shape) - 1], shape[-1]), free
    yield shape, True


def _random(match: Match, shape: tuple[int, ...], first: int) -> dict[fx.Node, Tensor]:
    """A sum whose rows have sizes from small against eps to large, off their mean, some tiny or zero; a weight and a bias."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    size = 10.0 ** (4.0 * torch.rand((*shape[:-1], 1), generator=generator, dtype=torch.float64) - 3.0)
    turn = torch.arange(size.numel()).add(first).reshape(size.shape) % 4
    size = size * torch.tensor(SIZES, dtype=torch.float64)[turn]
    found = dict.fromkeys(match.z, (draw(*shape) + 0.3) * size)
    for node in (match.weight, match.bias):
        if node is not None:
            found[node] = draw(*numbers_of(tuple(given_to(node).shape)))
    return {node: given.to(given_to(node).device, given_to(node).dtype) for node, given in found.items()}


def _replayed(match: Match, tensors: dict[fx.Node, Tensor], graph: fx.GraphModule) -> Tensor:
    """What the graph's own nodes make of it."""
    known: dict[fx.Node, Any] = {node: tensor.clone() for node, tensor in tensors.items()}

    def value(node: fx.Node) -> Any:
        if node not in known:
            if node.op == "get_attr":
                known[node] = getattr(graph, str(node.target))
            else:
                known[node] = numbers_of(given_to(node))
        return known[node]

    for node in match.inner:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        if node.op == "call_method":
            known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]  # of a call_function it is one
    result: Tensor = known[match.y[0]]
    return result


def _called(match: Match, tensors: dict[fx.Node, Tensor]) -> Tensor:
    """What the fused call makes of it: the sum and nothing."""
    z = tensors[match.z[0]]
    x, f = (given_to(node).dtype for node in match.operands)
    weight, bias = (None if node is None else tensors[node].reshape(-1) for node in (match.weight, match.bias))
    kind: dict[str, Any] = {} if match.norm.kind == "rms" else {"bias": bias}
    if match.norm.kind == "rms" and bias is not None:
        kind["bias"] = bias
    residual, branch = (z, torch.zeros_like(z, dtype=f)) if x == z.dtype else (torch.zeros_like(z, dtype=x), z)
    y: Tensor = fused(match)(residual, branch, weight, **kind, **arguments(match))
    for view in match.views:
        y = viewed(view, y)
    return y


def viewed(view: fx.Node, tensor: Tensor) -> Tensor:
    """A view of the graph's, of another tensor."""
    args, kwargs = fx.map_arg((view.args[1:], dict(view.kwargs)), lambda node: numbers_of(given_to(node)))
    if view.op == "call_method":
        found: Tensor = getattr(tensor, str(view.target))(*args, **kwargs)
    else:
        found = view.target(tensor, *args, **kwargs)  # type: ignore[operator]  # of a call_function it is one
    return found


def _same(wanted: Tensor, came: Tensor, dtype: torch.dtype) -> bool:
    """Whether they differ by no more than the order in which a row is added up."""
    if wanted.shape != came.shape or wanted.dtype != came.dtype:
        return False
    exact = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    wide, other = wanted.double(), came.double()
    if not (wide.isfinite() == other.isfinite()).all():
        return False
    off = (wide - other).nan_to_num(0.0, 0.0, 0.0).abs()
    least = ROUNDINGS * exact * wide.abs().clamp_min(1.0)
    flips = off > least
    if wanted.dtype not in LOW:
        return not flips.any()
    ulps = off <= 2.0 * torch.finfo(wanted.dtype).eps * wide.abs().clamp_min(torch.finfo(wanted.dtype).tiny)
    return bool(ulps.all()) and float(flips.double().mean()) <= FLIPPED


@contextmanager
def inside(entered: Sequence[Any]) -> Iterator[None]:
    """What the graph has entered there: whether gradients are taken, and the autocasts."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(entered[0]))
        for node in entered[1:]:
            if node.target is torch.amp.autocast_mode._enter_autocast:
                device, dtype, enabled, cache = node.args
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield
