"""The rules for DTensors of the operators of n streams: each process computes its tokens with the same kernels.

    rows        streams, branch, coefficients and logits of each token, and their gradients: sharded on any dimension of the
                tokens, or replicated. The first of them that is sharded on a dimension of the mesh decides for all.
    parameters  of the gates and the norm, and coefficients that all tokens share: replicated. The gradients of parameters are
                `Partial` where the rows are sharded. Coefficients have a gradient for each token, which `autograd.py` sums.

Inputs that are placed otherwise are redistributed: n and d_model are gathered, and a `Partial` branch is reduce-scattered where
the streams are sharded. Placeholders are ordinary tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from addnorm.ops.sharding import find_mesh, localize, place_rows, register, wrap_results
from addnorm.ops.streams.schema import GRADIENTS, SCHEMAS

# Arguments with a value for each token, in the order in which they decide the placement, and their dimensions after the tokens'.
_TAILS = {
    "streams": 2, "branch": 1, "dnew": 2, "dread": 1, "mix": 2, "inject": 1, "collapse": 1, "logits": 1, "stats": 1,
    "computed_collapse": 1, "dcollapse": 1, "dmix": 2, "dinject": 1,
}  # fmt: skip
# Places of the gradients that are sums over the rows: those of parameters.
_SUMS = [*map(GRADIENTS.index, ("project", "weight", "bias", "scale", "base"))]


def _has_rows(name: str, t: Tensor, rows: int) -> bool:
    """Return whether an argument has a value for each token; `collapse` may have one for each feature too."""
    return rows > 0 and (t.dim() == rows + _TAILS[name] or (name == "collapse" and t.dim() == rows + 2))


def _run(op: Any, a: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the outputs of the operator as DTensors, computed from the local tensors of this process."""
    tensors = {name: t for name, t in a.items() if isinstance(t, Tensor)}
    mesh, shape = find_mesh(tensors), tensors["streams"].shape[:-2]
    with_rows = [name for name in _TAILS if name in tensors and _has_rows(name, tensors[name], len(shape))]
    deciding = [t for name in with_rows if isinstance(t := tensors[name], DTensor)]
    placed = place_rows(deciding, len(shape), mesh.ndim)
    localize(a, mesh, placed, with_rows)
    return wrap_results(op(*a.values()), mesh, placed, shape, _SUMS if "grad_mask" in a else ())


register(dict.fromkeys(SCHEMAS, _run))
