"""Tensors that wrap others (DTensor, quantized weights), and modules whose parameters are gathered for each call (FSDP).

A wrapper has no memory of its own. Its operators run operators on its inner tensors. The data flow consists of these inner
operators, which an `InnerOperatorMode` sees. FSDP gathers parameters in hooks. The operators in these hooks do not belong to the
model, and `runs_in_fsdp` recognizes them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from addnorm._util.torch_internals import FSDP_FOLDER, MODULE_CALL, FakeTensor, get_default_store

PATIENCE = 30.0  # seconds for which `meet` waits for other processes


def is_wrapper(value: Any) -> bool:
    """Return whether a value is a tensor subclass that wraps other tensors, such as a DTensor."""
    return isinstance(value, Tensor) and bool(is_traceable_wrapper_subclass(value))


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors in a wrapper, at any depth. For a plain tensor, return a list of itself."""
    if not is_wrapper(tensor):
        return [tensor]
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    inner = (getattr(tensor, name) for name in names)
    return [t for part in inner if isinstance(part, Tensor) for t in inner_tensors(part)]


def find_tensors_of(result: Any) -> list[Tensor]:
    """Return the tensors in arguments or in a result of an operator. Wrappers are replaced by their inner tensors."""
    return [t for x in pytree.tree_leaves(result) if isinstance(x, Tensor) for t in inner_tensors(x)]


def find_wrapped_parameter(model: nn.Module) -> tuple[str, str]:
    """Return the name and the class of a parameter that is a wrapper; empty strings if there is none."""
    for name, parameter in model.named_parameters():
        if is_wrapper(parameter):
            return name, type(parameter).__name__
    return "", ""


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # slow to import; without it there is no DTensor
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor, placements: Sequence[Any] | None = None) -> Tensor:
    """Return the part of a DTensor that this process holds. A plain tensor is returned unchanged.

    Args:
        tensor: the tensor. A partial sum is reduced over the processes, so all processes must call this function then.
        placements: the placements of the result; by default the placements of the tensor.
    """
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    wanted = [replicate if p.is_partial() else p for p in placements or sharded.placements]
    if [*sharded.placements] != wanted:
        sharded = sharded.redistribute(placements=wanted)
    return inner_tensors(sharded.detach())[0]


def gather(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor. A plain tensor is returned unchanged. All processes must call this function."""
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


def distribute(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor, which all processes have, with the placements of a DTensor; unchanged if `like` is a plain tensor."""
    if not is_sharded(like):
        return tensor
    sharded: Any = like
    place = sys.modules["torch.distributed.tensor"].distribute_tensor
    placed: Tensor = place(tensor, sharded.device_mesh, sharded.placements, src_data_rank=None)
    return placed


def find_parameter(model: nn.Module, name: str) -> Tensor | None:
    """Return the local part of the parameter `name`, under FSDP of the gathered parameter; None if there is none."""
    path, _, attribute = name.rpartition(".")
    try:
        found = getattr(model.get_submodule(path), attribute)
    except AttributeError:
        return None
    return inner_tensors(found)[0] if isinstance(found, Tensor) else None


def reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP has gathered, so that the model's parameters are the sharded ones."""
    for module in find_fsdp_modules(model):
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]  # of FSDPModule


def find_fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model to which `fully_shard` or `FullyShardedDataParallel` was applied."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return []
    return [m for m in model.modules() if isinstance(m, module.FSDPModule | module.FullyShardedDataParallel)]


def has_flat_parameters(model: nn.Module) -> bool:
    """Return whether `FullyShardedDataParallel` was applied to a module of a model."""
    return not all(hasattr(module, "reshard") for module in find_fsdp_modules(model))


def find_split_parameter(model: nn.Module) -> str:
    """Return the name of a parameter that stays split over processes in the forward; an empty string if there is none.

    Such a parameter is a DTensor that FSDP does not gather, or not wholly, as in tensor parallelism.
    """
    gathered = {p for module in find_fsdp_modules(model) for p in module.parameters()}
    for name, p in model.named_parameters():
        if is_sharded(p) and (p not in gathered or p.device_mesh.ndim > 1):  # type: ignore[attr-defined]  # a DTensor's
            return name
    return ""


def find_ranks(model: nn.Module) -> list[int]:
    """Return the ranks of the processes that communicate in a model's forward; an empty list for a single process."""
    meshes = [p.device_mesh for p in model.parameters() if is_sharded(p)]  # type: ignore[attr-defined]  # a DTensor's
    ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    groups = (getattr(module, "process_group", None) for module in find_fsdp_modules(model))  # FSDP1 has one
    ranks |= {
        rank for group in groups if group is not None for rank in torch.distributed.get_process_group_ranks(group)
    }
    return sorted(ranks) if len(ranks) > 1 else []


_meetings: list[str] = []  # argument `what` of each call of `meet` that returned


def meet(ranks: Sequence[int], what: str) -> None:
    """Wait until all processes in `ranks` have called this function.

    The wait uses no collective, which would hang if one of the processes never made the call.

    Args:
        ranks: the ranks of all processes.
        what: the common action of the processes, as text for the error message.

    Raises:
        RuntimeError: a process did not make the call within `PATIENCE` seconds.
    """
    store, here = get_default_store(), torch.distributed.get_rank()
    names = {rank: f"addnorm/{len(_meetings)}/{rank}" for rank in ranks}
    store.set(names[here], "")
    for rank, name in names.items():
        try:
            store.wait([name], timedelta(seconds=PATIENCE))
        except RuntimeError:  # of a class that depends on the store
            store.delete_key(names[here])
            raise RuntimeError(
                f"{what}, and process {rank} did not begin to within {PATIENCE:g} s: do it in all processes."
            ) from None
    _meetings.append(what)


def runs_in_fsdp() -> bool:
    """Return whether the current operator is run by FSDP (a hook, or its wrapper's forward), not by the wrapped module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not MODULE_CALL:
        if frame.f_code.co_filename.startswith(FSDP_FOLDER):
            return True
        frame = frame.f_back
    return False


@contextmanager
def preserve_shards(model: nn.Module) -> Iterator[None]:
    """Reshard after the block the parameters that FSDP gathered in it, since optimizer steps do not change gathered copies."""
    modules = [m for m in find_fsdp_modules(model) if hasattr(m, "reshard")]
    before = {id(m): _parameter_ids(m) for m in modules}
    try:
        yield
    finally:
        for module in modules:
            if _parameter_ids(module) != before[id(module)]:
                module.reshard()  # type: ignore[operator]  # of FSDPModule


def _parameter_ids(module: nn.Module) -> list[int]:
    return [id(p) for p in module.parameters()]


class InnerOperatorMode(TorchDispatchMode):
    """Dispatch mode that sees the operators on the inner tensors of wrappers in place of the operators on wrappers.

    Attributes:
        outer: wrappers among the arguments and results of operators, by the ids of their inner tensors.
        depth: number of operators on wrappers that are running.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.outer: dict[int, Tensor] = {}
        self.depth = 0
        self._passes_on = False

    def run_wrapped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on wrappers, so that the mode sees the operators on their inner tensors.

        The mode calls the operator again and returns NotImplemented for this second call. Torch then calls the operator of the
        wrapper's class, with the mode enabled.
        """
        if self._passes_on:
            self._passes_on = False
            return NotImplemented
        self._passes_on = True
        self.depth += 1
        try:
            with self:
                out = func(*args, **kwargs)
        finally:
            self.depth -= 1
            self._passes_on = False
        self.note_wrappers((args, out))  # a collective may end in the operator that reads its output
        return out

    def note_wrappers(self, values: Any) -> None:
        """Add the wrappers among arguments or results to `outer`."""
        for tensor in filter(is_wrapper, pytree.tree_leaves(values)):
            self.outer |= {id(inner): tensor for inner in inner_tensors(tensor)}


def has_wrappers(types: Sequence[type]) -> bool:
    """Return whether an operator has a wrapper among its arguments: `types` has a class other than `FakeTensor`."""
    return any(not issubclass(kind, FakeTensor) for kind in types)


def computes_shapes(arguments: Any) -> bool:
    """Return whether an argument is a fake or meta tensor, with which DTensor computes shapes."""
    return any(
        isinstance(x, Tensor) and (isinstance(x, FakeTensor) or x.is_meta) for x in pytree.tree_leaves(arguments)
    )
