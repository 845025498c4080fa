"""The schemas of the operators of n streams, and their fake kernels.

    add_norm_streams             X, w, A, b, c, parameters -> X', r, c', A', b', logits, statistics
    add_norm_streams_backward    these, and the gradients of the outputs -> the gradients of the inputs

Outputs that a call does not have are empty placeholders: X' without a branch, the read without c, and c', A', b' that the kind
does not compute. The gradients of A, b and c have a row for each token, even if one value serves all tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm.ops.schema import define, empty_placeholder, library, parse_arguments
from addnorm.ops.streams import validation
from addnorm.ops.streams.kinds import sizes_of

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
ARGUMENTS = {name: parse_arguments(schema) for name, schema in SCHEMAS.items()}
INPUTS = tuple(argument.name for argument in ARGUMENTS["add_norm_streams"])
DEFINITIONS = tuple(name + schema for name, schema in SCHEMAS.items())


for _definition in (*DEFINITIONS, *(f"{name}_reference{schema}" for name, schema in SCHEMAS.items())):
    define(_definition)


def fake_forward(*args: Any) -> tuple[Tensor, ...]:
    """Return the outputs of the forward without computing them."""
    a = dict(zip(INPUTS, args, strict=True))
    validation.check(**a)
    streams, kind = a["streams"], a["kind"]
    rows, n, d = streams.shape[:-2], streams.shape[-2], streams.shape[-1]
    sizes, reads = sizes_of(kind, n), a["collapse"] is not None or kind != 0
    wide = validation.compute_dtype(**a)

    def make(wanted: bool, *tail: Any, dtype: torch.dtype = wide) -> Tensor:
        return streams.new_empty((*rows, *tail), dtype=dtype) if wanted else empty_placeholder(streams)

    return (
        make(a["branch"] is not None, n, d, dtype=a["streams_dtype"] or streams.dtype),
        make(reads, d, dtype=a["out_dtype"] or streams.dtype),
        make(kind != 0, n),
        make(sizes.mix, n, n),
        make(sizes.inject, n),
        make(kind != 0, sizes.logits),
        make(reads, 2 + sizes.stats),
    )


def fake_backward(*args: Any) -> tuple[Tensor, ...]:
    """Return the gradients without computing them."""
    a = dict(zip((argument.name for argument in ARGUMENTS["add_norm_streams_backward"]), args, strict=True))
    streams: Tensor = a["streams"]
    mask: int = a["grad_mask"]
    rows, n, d = streams.shape[:-2], streams.shape[-2], streams.shape[-1]
    wide = validation.compute_dtype(**{name: a[name] for name in INPUTS})
    per_row = {"mix": (n, n), "inject": (n,)}
    per_row["collapse"] = (n, d) if a["collapse"] is not None and a["collapse"].dim() == streams.dim() else (n,)

    def make(name: str) -> Tensor:
        if name in per_row:
            return streams.new_empty((*rows, *per_row[name]), dtype=wide)
        return streams.new_empty(a[name].shape, dtype=a[name].dtype)

    return tuple(make(name) if mask >> bit & 1 else empty_placeholder(streams) for bit, name in enumerate(GRADIENTS))


for _suffix in ("", "_reference"):
    torch.library.register_fake(f"addnorm::add_norm_streams{_suffix}", fake_forward, lib=library)
    torch.library.register_fake(f"addnorm::add_norm_streams_backward{_suffix}", fake_backward, lib=library)
