"""The schemas of the operators of n streams, and their fake kernels.

    add_norm_streams             X, w, A, b, c, parameters -> X', r, c', A', b', logits, statistics
    add_norm_streams_backward    these, and the gradients of the outputs -> the gradients of the inputs

Outputs that a call does not have are empty placeholders: X' without a branch, the read without c, and c', A', b' that the kind
does not compute. The gradients of A, b and c have a row for each token, even if one value serves all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from addnorm.ops.schema import ARGUMENTS, declare, empty_placeholder, make_empty, register_fakes
from addnorm.ops.streams import validation
from addnorm.ops.streams.kinds import GATE_KINDS, sizes_of

_TENSORS = ("branch", "mix", "inject", "collapse", "project", "scale", "base", "weight", "bias")
_INPUTS = (
    f"Tensor streams, {', '.join(f'Tensor? {name}' for name in _TENSORS)}, float eps, int norm, int kind, int iterations, "
    "float gate_eps, float project_eps, float magnitude, ScalarType? streams_dtype, ScalarType? out_dtype"
)
OUTPUTS = ("new_streams", "read", "new_collapse", "new_mix", "new_inject", "logits", "stats")
GRADIENTS = ("streams", "branch", "mix", "inject", "collapse", "project", "weight", "bias", "scale", "base")
SCHEMAS = {
    "add_norm_streams": f"({_INPUTS}) -> ({', '.join(f'Tensor {name}' for name in OUTPUTS)})",
    "add_norm_streams_backward": (
        f"({_INPUTS}, Tensor logits, Tensor stats, Tensor computed_collapse, "
        f"{', '.join(f'Tensor? d{name}' for name in ('new', 'read', 'collapse', 'mix', 'inject'))}, int grad_mask) "
        f"-> ({', '.join(f'Tensor grad_{name}' for name in GRADIENTS)})"
    ),
}
DEFINITIONS = declare(SCHEMAS)
INPUTS = tuple(argument.name for argument in ARGUMENTS["add_norm_streams"])


def reads(a: Any) -> bool:
    """Return whether a call reads the streams."""
    return bool(a.collapse is not None or a.kind != GATE_KINDS["given"])


def outputs_of(a: Any) -> tuple[Any, ...]:
    """Return shape and dtype of each output of the forward; None: an empty placeholder."""
    *rows, n, d = a.streams.shape
    sizes, wide = sizes_of(a.kind, n), validation.compute_dtype(a)

    def describe(has: bool, *tail: Any, dtype: torch.dtype = wide) -> Any:
        return ((*rows, *tail), dtype) if has else None

    return (
        describe(a.branch is not None, n, d, dtype=a.streams_dtype or a.streams.dtype),
        describe(reads(a), d, dtype=a.out_dtype or a.streams.dtype),
        describe(a.kind != 0, n),
        describe(sizes.mix, n, n),
        describe(sizes.inject, n),
        describe(a.kind != 0, sizes.logits),
        describe(reads(a), 2 + sizes.stats),
    )


def fake_forward(a: Any) -> tuple[Tensor, ...]:
    """Return the outputs of the forward without computing them."""
    validation.check(a)
    return tuple(make_empty(a.streams, output) for output in outputs_of(a))


def gradient_shape(a: Any, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and dtype of a gradient of the backward; those of A, b and c have a value for each token."""
    *rows, n, d = a.streams.shape
    per_token = {"mix": (n, n), "inject": (n,), "collapse": (n, d) if is_per_feature(a) else (n,)}
    if name in per_token:
        return (*rows, *per_token[name]), validation.compute_dtype(a)
    return getattr(a, name).shape, getattr(a, name).dtype


def is_per_feature(a: Any) -> bool:
    """Return whether `collapse` has a weight for each stream and feature, not only one for each stream."""
    return a.collapse is not None and a.collapse.dim() == a.streams.dim()


def requested(a: Any) -> set[str]:
    """Return the names of the gradients that `grad_mask` requests."""
    return {name for bit, name in enumerate(GRADIENTS) if a.grad_mask >> bit & 1}


def fill_gradients(a: Any, grads: Mapping[str, Tensor | None]) -> tuple[Tensor, ...]:
    """Return the gradients in the order of `GRADIENTS`: zeros in place of None, placeholders if not requested."""
    wanted = requested(a)

    def fill(name: str) -> Tensor:
        if name not in wanted:
            return empty_placeholder(a.streams)
        grad = grads.get(name)
        if grad is not None:
            return grad
        shape, dtype = gradient_shape(a, name)
        return a.streams.new_zeros(shape, dtype=dtype)  # type: ignore[no-any-return]

    return tuple(fill(name) for name in GRADIENTS)


def fake_backward(a: Any) -> tuple[Tensor, ...]:
    """Return the gradients without computing them."""
    wanted = requested(a)
    return tuple(make_empty(a.streams, gradient_shape(a, name) if name in wanted else None) for name in GRADIENTS)


register_fakes({"add_norm_streams": fake_forward, "add_norm_streams_backward": fake_backward})
