"""Recognition of what the operators of a run do to a residual stream: views, moves, factors and sums of values."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

import torch

from addnorm._util.torch_internals import FakeTensor
from addnorm.stream.dataflow.graph import DATA, NOISE, PARAMETER, Op, Value, walk


class Factor(NamedTuple):
    """Factor by which an operator multiplies a value.

    Attributes:
        x: the value.
        op: the operator that multiplies.
        kind: "constant", "learned", "noise" (dropout), "mask" (by token), "guard" (a clamp or the like).
        number: the constant; 1.0 for other kinds.
        value: the tensor that multiplies; None for a constant, or if there is no such tensor.
    """

    x: Value
    op: Op
    kind: str
    number: float = 1.0
    value: Value | None = None


class Term(NamedTuple):
    """Operand of the add `op`: factor * scale * value, where `scale` is a tensor that multiplies in the same operator."""

    value: Value
    op: Op | None = None
    factor: float = 1.0
    scale: Value | None = None


def get_number(x: Any) -> float | None:
    """Return x if it is a Python number, or the number in x if it is a constant of one element; None otherwise."""
    if isinstance(x, bool):
        return None
    if isinstance(x, Value) and not x.kind and x.tensor.numel() == 1 and not x.tensor.is_complex():
        tensor = x.tensor.constant if isinstance(x.tensor, FakeTensor) else x.tensor
        x = None if tensor is None else tensor.item()
    if not isinstance(x, int | float):
        return None
    short = float(f"{x:.7g}")  # 1e-6 after it was stored in float32
    return short if ctypes.c_float(short).value == x else float(x)


def get_fill(x: Any) -> float | None:
    """Return x if it is a Python number, or the number that all elements of x have if it is a constant; None otherwise."""
    if not isinstance(x, Value) or x.kind or isinstance(x.tensor, FakeTensor) or not x.tensor.numel():
        return get_number(x)
    first = x.tensor.flatten()[0]
    return get_number(first.item()) if bool((x.tensor == first).all()) else None


def has_numbers(value: Value) -> bool:
    """Return whether a value has real or complex numbers, not integers such as indices."""
    return value.tensor.is_floating_point() or value.tensor.is_complex()


def is_activation(value: Value) -> bool:
    """Return whether a value depends on both the data and the parameters."""
    return value.kind & (PARAMETER | DATA) == PARAMETER | DATA


# Views and moves: the same numbers, in another shape or place.


def strip_views(value: Value) -> Value:
    """Return the value from which `value` is computed by views, copies, casts and additions of zero."""
    while value.op is not None and value.op.inputs and ("view" in value.op.traits or _adds_zero(value.op)):
        value = value.op.inputs[0]
    return value


def strip_norm(value: Value) -> Value:
    """Return the value of which `value` is the norm; `value` itself if it is not the output of a norm."""
    return value if value.norm is None else strip_views(value.norm.x)


def is_view(op: Op) -> bool:
    """Return whether an operator returns a view, a copy or a cast, or adds zero."""
    return strip_views(op.out) is not op.out


def list_views(value: Value) -> Iterator[Value]:
    """Yield a value and the later views of it."""
    return walk([value], lambda v: [out for op in v.users for out in op.outputs[:1] if is_view(op)])


def _adds_zero(op: Op) -> bool:
    """Return whether an operator computes x + 0, as the first step of Python's sum does."""
    return op.name == "add" and len(op.inputs) == 1 and len(op.args) > 1 and get_number(op.args[1]) == 0.0


def is_move(op: Op) -> bool:
    """Return whether an operator only moves elements: a view, a cut or a join."""
    return bool(op.traits & {"cut", "join", "view"})


def find_moved(op: Op) -> Value | None:
    """Return the input of a view or a cut; None for other operators."""
    return op.inputs[0] if "cut" in op.traits or is_view(op) else None


def list_joined(op: Op) -> list[Value]:
    """Return the inputs that a join joins, without indices and masks; an empty list for other operators."""
    return [*filter(has_numbers, op.inputs)] if "join" in op.traits else []


def strip_moves(value: Value) -> Value:
    """Return the value from which `value` is computed by views and cuts."""
    while value.op is not None and (moved := find_moved(value.op)) is not None:
        value = moved
    return value


def list_carried(value: Value) -> list[Value]:
    """Return the inputs whose elements reappear in the value: of a view, cut, join or product with a factor.

    For the output of a norm or of another operator the list is empty.
    """
    op = value.op
    if op is None or value.norm is not None:
        return []
    if (moved := find_moved(op)) is not None:
        return [moved]
    product = match_factor(op)
    return list_joined(op) or ([] if product is None else [product.x])


def is_ancestor(value: Value, later: Value, without: Set[Op] = frozenset()) -> bool:
    """Return whether `later` is computed from `value` by operators that are not in `without`."""
    target = strip_views(value)

    def follow(v: Value) -> list[Value]:
        return v.inputs if v.index >= target.index and v.op not in without else []

    return any(v is value or v is target for v in walk([later], follow))


# Sums.


def match_terms(op: Op | None) -> tuple[Term, Term] | None:
    """Return the operands of an add of two tensors; None for other operators."""
    if op is None:
        return None
    args = op.args
    tensors = [a for a in args if isinstance(a, Value)]
    if op.name in ("add", "sub", "rsub") and len(tensors) == 2:
        alpha = get_number(op.get("alpha", 1))
        x, y = tensors if op.name != "rsub" else tensors[::-1]
        return None if alpha is None else (Term(x, op), Term(y, op, alpha if op.name == "add" else -alpha))
    if op.name == "addcmul" and len(tensors) == 3:
        number, product = get_number(op.get("value", 1)), match_scale(args[1], args[2], args[0])
        if number is None or product is None:
            return None
        return Term(args[0], op), Term(product[0], op, number, product[1])
    if (stack := find_summed_stack(op)) is not None:
        parts, factor = stack.args[0], 1.0 if op.name == "sum" else 0.5
        is_pair = op.get("dim") == [stack.get("dim", 0)] and len(parts) == 2
        return (Term(parts[0], op, factor), Term(parts[1], op, factor)) if is_pair else None
    if op.name == "lerp" and len(tensors) >= 2:
        weight = get_number(args[2])
        return None if weight is None else (Term(args[0], op, 1.0 - weight), Term(args[1], op, weight))
    return None


def pair_terms(op: Op | None) -> list[tuple[Term, Term]]:
    """Return the operands of an add of two tensors in both orders, [(p, q), (q, p)]; an empty list for other operators."""
    terms = match_terms(op)
    return [] if terms is None else [terms, terms[::-1]]


def find_summed_stack(op: Op) -> Op | None:
    """Return the `stack` operator whose output an operator sums or averages; None for other operators."""
    stack = op.inputs[0].op if "sum" in op.traits and op.inputs else None
    return stack if stack is not None and stack.name == "stack" else None


# Factors.


def match_factor(op: Op | None) -> Factor | None:
    """Return the factor by which an operator multiplies one of its inputs; None for other operators."""
    if op is None:
        return None
    args = op.args
    if op.name == "neg":
        return Factor(args[0], op, "constant", -1.0)
    if op.name in ("mul", "div") and len(args) >= 2 and not op.kwargs.get("rounding_mode"):
        for at, other in ((0, 1), (1, 0)) if op.name == "mul" else ((0, 1),):
            number = get_number(args[other]) if isinstance(args[at], Value) else None
            if number is not None and args[at].shape == op.out.shape:
                if op.name == "div":
                    number = 1.0 / number if number else math.inf
                return Factor(args[at], op, "constant", number) if math.isfinite(number) else None
        if op.name == "mul" and isinstance(args[0], Value) and isinstance(args[1], Value):
            product = match_scale(args[0], args[1], op.out)
            if product is not None:
                return Factor(product[0], op, _classify_scale(product[1]), value=product[1])
    if "guard" in op.traits:
        tensors = [v for v in op.inputs if v.kind and v.shape == op.out.shape and v.tensor.is_floating_point()]
        if len(tensors) == 1:
            return Factor(tensors[0], op, "guard")
    return _match_multiple(op)


def _match_multiple(op: Op) -> Factor | None:
    """Match a sum of constant multiples of one value as a product: x + 0.1 x is 1.1 x."""
    terms = match_terms(op)
    if terms is None or any(term.scale is not None or term.value.shape != op.out.shape for term in terms):
        return None
    first, second = (dict(trace_constants(term.value, term.factor)) for term in terms)
    x = next((value for value in first if value in second), None)
    number = 0.0 if x is None else first[x] + second[x]
    return None if x is None or number == 0.0 else Factor(x, op, "constant", number)


def trace_constants(value: Value, number: float) -> Iterator[tuple[Value, float]]:
    """Yield the values of which `number * value` is a constant multiple, the nearest first, each with the factor."""
    while True:
        yield value, number
        product = match_factor(value.op) if value.norm is None else None
        if "copy" in value.traits and value.inputs and value.inputs[0].shape == value.shape:
            value = value.inputs[0]
        elif product is not None and product.kind == "constant":
            value, number = product.x, number * product.number
        else:
            return


def match_scale(first: Value, second: Value, like: Value) -> tuple[Value, Value] | None:
    """Return the operands of a product as (value of the shape of `like`, scale); None if no operand is a scale (`is_scale`)."""
    for value, scale in ((first, second), (second, first)):
        if value.shape == like.shape and is_scale(scale, value):
            return value, scale
    return None


def is_scale(scale: Value, value: Value) -> bool:
    """Return whether `scale` is a number, a vector over the features, a random mask as of dropout, or a token mask.

    A token mask has one number per token, constant or computed from the model's inputs without parameters. A gate, which
    depends on parameters and inputs, is no scale.
    """
    if scale.kind & NOISE and not scale.has_data:
        return True
    if not value.shape or not torch.is_floating_point(value.tensor):
        return False
    if scale.has_data:  # a token mask depends on the inputs only; a gate depends on parameters too
        is_shared = len(scale.shape) == len(value.shape) > 2 and scale.shape[1] == 1 < value.shape[1]  # by the channels
        return not scale.kind & PARAMETER and (is_shared or scale.shape[-1:] in ((), (1,)))
    if not scale.kind and scale.shape[-1:] == (1,):  # a constant for each token
        return True
    # a vector over the channels, if they are not in the last dimension
    if sum(n > 1 for n in scale.shape) == 1 < len(value.shape) and scale.shape[-1:] == (1,):
        return len(scale.shape) <= len(value.shape)
    return scale.tensor.numel() in (1, value.shape[-1]) and scale.shape[-1:] in ((), (1,), value.shape[-1:])


def _classify_scale(scale: Value) -> str:
    if scale.kind & NOISE:
        return "noise"
    is_constant_mask = not scale.kind and scale.tensor.numel() > 1 and scale.shape[-1:] == (1,)
    return "mask" if scale.has_data or is_constant_mask else "learned"


def get_noise_mean(noise: Value) -> float | None:
    """Return the mean of a random factor: 1 for dropout, the keep probability for an unscaled mask; None if not known."""
    value, number = noise, 1.0
    for _ in range(8):
        op = strip_views(value).op
        if op is None:
            return None
        if op.name == "noise":
            return number
        product = match_factor(op)
        if product is None or product.kind != "constant":
            p = _get_probability(op)
            return None if p is None else number * p
        value, number = product.x, number * product.number
    return None


def _get_probability(op: Op) -> float | None:
    """Return the probability with which an element of a random mask of ones and zeros is 1; None for other operators.

    Such a mask is a Bernoulli sample, a comparison of uniform numbers with p, or floor(p + uniform numbers).
    """
    if op.name in ("bernoulli", "bernoulli_"):  # out-of-place without p, the input has the probabilities
        return get_fill(op.get("p", op.args[0] if op.name == "bernoulli" else 0.5))
    if op.name == "floor":  # of p + a uniform number
        added = strip_views(op.args[0]).op
        numbers = map(get_fill, added.args[1::-1]) if added is not None and added.name == "add" else ()
        return next((p for p in numbers if p is not None), None)
    if "comparison" in op.traits and len(op.args) == 2:
        drawn, p = strip_views(op.args[0]).op if isinstance(op.args[0], Value) else None, get_fill(op.args[1])
        if drawn is not None and "uniform" in drawn.traits and p is not None:
            return p if op.name in ("lt", "le") else 1.0 - p
    return None
