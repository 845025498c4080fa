"""The operators' rules for DTensors: each process computes its rows with the same kernels.

    rows        residual, branch, y, z, the statistics, row_scale, and their gradients: sharded on any dimension but the features,
                or replicated. The first of residual and branch that is sharded on a dimension of the mesh decides for all.
    parameters  weight, bias and the scales: replicated. Their gradients are `Partial` where the rows are sharded.

Inputs that are placed otherwise are redistributed. A `Partial` branch is reduce-scattered where the residual is sharded and
all-reduced where it is replicated. Sharded features are gathered, as `F.layer_norm` does. Placeholders are ordinary tensors.

The rules are registered with `torch.library.register_torch_dispatch`. A rule sees placements and values, so it can pass on the
part of the dropout mask that belongs to the shard: element i of the whole branch has the same bit wherever it is computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from addnorm import reference
from addnorm.ops import philox
from addnorm.ops.options import ADD_OPTIONS, GRADIENTS
from addnorm.ops.schema import OVERLOADS, arguments_of, library

Placements = tuple[Placement, ...]
# Arguments with the rows of the residual and features (or the two statistics), in the order in which they decide the placement.
_STREAM = ("z", "y", "residual", "branch", "stats", "dy", "dz")
_SAME_SHAPE = ("branch", "y", "dy", "dz")
_ROWS = tuple(option.name for option in ADD_OPTIONS if option.kind == "rows")
# Places of the gradients that are sums over the rows.
_SUMS = [place for place, name in enumerate(GRADIENTS) if name not in ("residual", "branch", *_ROWS)]
_BRANCH, _BRANCH_BIAS = GRADIENTS.index("branch"), GRADIENTS.index("branch_bias")


def replicate(value: Tensor, like: Tensor) -> Tensor:
    """Return a replicated DTensor with the value of the first process of the mesh of `like`."""
    mesh = like.device_mesh  # type: ignore[attr-defined]  # a DTensor's
    return distribute_tensor(value, mesh, [Replicate()] * mesh.ndim)


def spread(value: Tensor, like: Tensor) -> Tensor:
    """Return a value that every process of the mesh of `like` has, as a replicated DTensor."""
    mesh = like.device_mesh  # type: ignore[attr-defined]  # as above
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def replicate_dimensions(t: DTensor, first: int) -> DTensor:
    """Return `t` with its dimensions from `first` on replicated."""
    placements = [p if row_dimension(p, t.dim(), first) is not None else Replicate() for p in t.placements]
    return t if placements == [*t.placements] else t.redistribute(t.device_mesh, placements)


def linear(x: DTensor, weight: Tensor) -> DTensor:
    """Return x W^T, computed by each process for its rows: torch flattens the rows first, which uneven shards do not allow."""
    mesh = x.device_mesh
    x = replicate_dimensions(x, x.dim() - 1)
    weight = weight if isinstance(weight, DTensor) else spread(weight, x)
    partial = make_partial(x.placements)
    whole = weight.redistribute(mesh, [Replicate()] * mesh.ndim).to_local(grad_placements=partial)  # type: ignore[attr-defined]  # a DTensor's
    y = F.linear(x.to_local(grad_placements=x.placements), whole)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    strides = make_contiguous_strides_for(shape)
    return DTensor.from_local(y, mesh, x.placements, run_check=False, shape=shape, stride=strides)


def row_dimension(placement: Placement, ndim: int, first_feature: int) -> int | None:
    """Return the dimension that a placement shards if it is one of rows, before `first_feature`; else return None."""
    dim = getattr(placement, "dim", None)  # Shard, and the strided shards of views
    return None if dim is None or dim % ndim >= first_feature else dim % ndim


def place_rows(tensors: Sequence[DTensor], rows: int, ndim: int, *, plain: bool = False) -> Placements:
    """Return how the rows, the first `rows` dimensions of the tensors, are placed on each of `ndim` mesh dimensions.

    On each mesh dimension, the first tensor that shards a dimension of rows decides; if no tensor does, the placement is
    `Replicate`. With `plain`, placements of other types than `Shard`, such as strided shards, are ignored.
    """

    def place(i: int) -> Placement:
        for t in tensors:
            placement = t.placements[i]
            if row_dimension(placement, t.dim(), rows) is not None and (not plain or type(placement) is Shard):
                return placement
        return Replicate()

    return tuple(place(i) for i in range(ndim))


def make_partial(rows: Placements) -> Placements:
    """Return the placements of a sum over rows with placements `rows`: `Partial` where these are sharded, else `Replicate`."""
    return tuple(Replicate() if placement.is_replicate() else Partial() for placement in rows)


def localize(arguments: dict[str, Any], mesh: DeviceMesh, rows: Placements, with_rows: Collection[str]) -> None:
    """Replace each DTensor among the arguments by its local tensor.

    Those named in `with_rows` are redistributed to placements `rows`, the others replicated.
    """
    for name, t in arguments.items():
        if isinstance(t, DTensor):
            placements = rows if name in with_rows else (Replicate(),) * mesh.ndim
            arguments[name] = (t if t.placements == placements else t.redistribute(mesh, placements)).to_local()


class _Call:
    """One call of an operator: its arguments as this process's tensors, and the placement of the rows."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.local = arguments
        tensors = {name: t for name, t in arguments.items() if isinstance(t, Tensor)}
        self.mesh = find_mesh(tensors)
        whole = tensors["z"] if "z" in tensors else tensors["residual"]
        self.shape = whole.shape
        for name in _SAME_SHAPE:
            t = tensors.get(name)
            if isinstance(t, DTensor) and t.shape != whole.shape:  # the local shapes may be equal in some processes
                raise RuntimeError(f"{name} has shape {tuple(t.shape)}, expected {tuple(whole.shape)}.")
        stream = {name: t for name in _STREAM if (t := tensors.get(name)) is not None and t.dim() == whole.dim()}
        drops = bool(arguments.get("dropout_p", 0.0))
        placed = [t for t in stream.values() if isinstance(t, DTensor)]
        self.rows = place_rows(placed, whole.dim() - 1, self.mesh.ndim, plain=drops)
        localize(arguments, self.mesh, self.rows, (*stream, *_ROWS))
        self.keep: Tensor | None = None  # the dropout mask of this process's rows, if the operator cannot draw it
        if drops and ("grad_mask" in arguments or arguments["branch"] is not None):
            self._place_mask()

    def _place_mask(self) -> None:
        """Prepare this process's part of the dropout mask.

        If its rows are contiguous in the whole tensor and start at a Philox block, advance the operator's offset; else compute
        the mask here as `keep` and turn the operator's dropout off.
        """
        sizes, starts = self._find_rows()
        d = self.shape[-1]
        strides = [math.prod(self.shape[i + 1 : -1]) for i in range(len(sizes))]
        first = sum(start * stride for start, stride in zip(starts, strides, strict=True)) * d
        cut = max((i for i, size in enumerate(sizes) if size != self.shape[i]), default=0)
        if first % 4 == 0 and all(size == 1 for size in sizes[:cut]):
            self.local["offset"] += first // 4
            return
        device = self.local["seed"].device
        rows = torch.zeros((), dtype=torch.int64, device=device)
        for size, start, stride in zip(sizes, starts, strides, strict=True):
            rows = rows.unsqueeze(-1) + torch.arange(start, start + size, device=device) * stride
        self.keep = philox.keep_rows(rows, d, self.local["dropout_p"], self.local["seed"], self.local["offset"])
        self.probability = self.local["dropout_p"]
        self.local["dropout_p"], self.local["seed"] = 0.0, None

    def _find_rows(self) -> tuple[list[int], list[int]]:
        """Return the sizes of this process's part and its places in the whole tensor, of all dimensions but the features.

        The rows are sharded plainly. torch's own function reads numbers from tensors, which no graph has while it is traced.
        """
        sizes, starts = [*self.shape[:-1]], [0] * (len(self.shape) - 1)
        for placement, count, number in zip(self.rows, self.mesh.shape, self.mesh.get_coordinate() or (), strict=True):
            if isinstance(placement, Shard):
                i = placement.dim
                most = -(-sizes[i] // count)
                first = min(number * most, sizes[i])
                starts[i] += first
                sizes[i] = min(most, sizes[i] - first)
        return sizes, starts

    def drop(self, branch: Tensor, branch_bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return dropout(branch + branch_bias) with `keep`, the mask of this process's rows."""
        assert self.keep is not None
        factor = 1.0 / (1.0 - self.probability) if self.probability < 1.0 else 0.0
        return reference.drop_branch(branch.to(dtype), branch_bias, self.keep.to(dtype) * factor)


def wrap(t: Tensor, mesh: DeviceMesh, placements: Placements, shape: Sequence[int]) -> DTensor:
    """Return the DTensor of global shape `shape` whose local tensor is `t`."""
    if type(t) is Tensor:
        return DTensor(t, _make_spec(mesh, placements, tuple(shape), t.dtype), requires_grad=False)
    options: dict[str, Any] = (
        {"shape": torch.Size(shape), "stride": make_contiguous_strides_for(tuple(shape))} if shape else {}
    )  # a traced tensor
    return DTensor.from_local(t, mesh, placements, run_check=False, **options)


def wrap_results(
    results: Sequence[Tensor], mesh: DeviceMesh, rows: Placements, shape: Sequence[int], sums: Collection[int] = ()
) -> tuple[Tensor, ...]:
    """Return an operator's results as DTensors. Placeholders stay ordinary tensors.

    Args:
        results: the local tensors of this process.
        mesh: the mesh.
        rows: the placements of the rows.
        shape: the sizes of the rows' dimensions in the whole tensors.
        sums: places of results that are sums over the rows.
    """

    def wrap_result(place: int, t: Tensor) -> Tensor:
        if t.dim() == 1 and t.numel() == 0:
            return t
        if place in sums:
            return wrap(t, mesh, make_partial(rows), t.shape)
        return wrap(t, mesh, rows, (*shape, *t.shape[len(shape) :]))

    return tuple(map(wrap_result, range(len(results)), results))


# torch's own operators construct DTensors so too: `DTensor.from_local` takes several times as long as the operator on a few rows.
@functools.lru_cache(maxsize=1024)
def _make_spec(mesh: DeviceMesh, placements: Placements, shape: tuple[int, ...], dtype: torch.dtype) -> DTensorSpec:
    return DTensorSpec(
        mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), make_contiguous_strides_for(shape), dtype)
    )


def find_mesh(tensors: dict[str, Tensor]) -> DeviceMesh:
    """Return the mesh of all tensors; raise unless they are DTensors of one mesh."""
    meshes = {name: t.device_mesh for name, t in tensors.items() if isinstance(t, DTensor)}
    first, mesh = next(iter(meshes.items()))
    for name, t in tensors.items():
        if isinstance(t, DTensor):
            if t.device_mesh is not mesh and t.device_mesh != mesh:
                raise ValueError(
                    f"{name} is on {t.device_mesh}, expected {mesh}, the mesh of {first}: use one mesh for all."
                )
        elif name != "seed" and t.numel() and not getattr(DTensor._op_dispatcher, "_allow_implicit_replication", False):
            raise TypeError(
                f"{name} is a plain tensor and {first} a DTensor, expected DTensors: distribute_tensor({name}, mesh, "
                "[Replicate()]), or for a module's parameters addnorm.distributed.SequenceParallel."
            )
    return mesh


def _forward(op: Any, arguments: dict[str, Any]) -> Any:
    return _compute(op, _Call(arguments))


def _out(op: Any, arguments: dict[str, Any]) -> None:
    call = _Call(dict(arguments))
    for name in ("y", "z"):
        target = arguments[name]
        if target is not None and target.placements != call.rows:
            raise ValueError(
                f"the tensor for {name} is placed {target.placements}, expected {call.rows}, as the rows of the result: "
                "redistribute it first, or leave out out= and call the function without the underscore."
            )
    _compute(op, call)


def _compute(op: Any, call: _Call) -> Any:
    """Call the operator of a forward with this process's tensors, and return its results, if it has any, as DTensors."""
    local = call.local
    if call.keep is not None:
        branch, residual = local["branch"], local["residual"]
        dtype = reference.compute_dtype(residual, branch, local.get("z"), dtype=local.get("residual_dtype"))
        if "out_dtype" in local:
            local["out_dtype"] = local["out_dtype"] or branch.dtype
        local["branch"], local["branch_bias"] = call.drop(branch, local["branch_bias"], dtype), None
    outputs = op(*local.values())
    if isinstance(outputs, Tensor):
        return wrap(outputs, call.mesh, call.rows, call.shape)
    return outputs and wrap_results(outputs, call.mesh, call.rows, call.shape[:-1])


def _backward(op: Any, arguments: dict[str, Any]) -> Any:
    call = _Call(arguments)
    outputs = op(*call.local.values()) if call.keep is None else _backward_of_dropped(op, call)
    return wrap_results(outputs, call.mesh, call.rows, call.shape[:-1], _SUMS)


def _backward_of_dropped(op: Any, call: _Call) -> list[Tensor]:
    """Return the gradients of a call with the dropout mask `call.keep`.

    The operator computes the gradients without dropout; afterwards the mask is applied to the gradient of the branch.
    """
    local, mask = call.local, call.local["grad_mask"]
    dtype = reference.compute_dtype(local["z"])
    changed = {"branch_bias": None, "branch_dtype": dtype, "grad_mask": mask & ~(1 << _BRANCH_BIAS)}
    if mask >> _BRANCH_BIAS & 1:
        changed["grad_mask"] |= 1 << _BRANCH
    if local["branch"] is not None:
        changed["branch"] = call.drop(local["branch"], local["branch_bias"], dtype)
    outputs = [*op(*(local | changed).values())]
    if changed["grad_mask"] >> _BRANCH & 1:
        dbranch = call.drop(outputs[_BRANCH], None, dtype)
        if mask >> _BRANCH & 1:
            outputs[_BRANCH] = dbranch.to(local["branch_dtype"])
        if mask >> _BRANCH_BIAS & 1:
            outputs[_BRANCH_BIAS] = reference.sum_rows(dbranch).to(local["branch_bias"].dtype)
    return outputs


Rule = Callable[[Any, dict[str, Any]], Any]


def register(rules: dict[str, Rule]) -> None:
    """Register the rules of operators by name; a rule takes the overload that was called, and its arguments by name."""
    for name, rule in rules.items():
        for overload in (*OVERLOADS.get(name, ("",)), "_reference"):
            torch.library.register_torch_dispatch(
                f"addnorm::{name}{overload}", DTensor, _dispatch(name, rule), lib=library
            )


def _dispatch(name: str, rule: Rule) -> Callable[..., Any]:
    def run(cls: type, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.no_grad():
            return rule(op, arguments_of(name)(*args, **kwargs or {})._asdict())

    return run


register(dict.fromkeys(("add_norm", "add_norm_stream", "add_norm_forward"), _forward))
register({"add_norm_backward": _backward, "add_norm_out": _out})
