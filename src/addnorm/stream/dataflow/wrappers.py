"""Tensors that wrap others (DTensor, quantized weights), and modules whose parameters are gathered for each call (FSDP).

A wrapper has no memory of its own. Its operators run operators on its inner tensors, and the data flow consists of those:
an `InnerOperatorMode` sees them. FSDP gathers parameters in hooks, whose operators are none of the model's:
`runs_in_fsdp` recognizes them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from addnorm._util.torch_internals import FSDP_FOLDER, MODULE_CALL, FakeTensor


def is_wrapper(value: Any) -> bool:
    """Return whether a value is a tensor subclass that wraps other tensors, such as a DTensor."""
    return isinstance(value, Tensor) and bool(is_traceable_wrapper_subclass(value))


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors in a wrapper, at any depth; a plain tensor is returned itself."""
    if not is_wrapper(tensor):
        return [tensor]
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    inner = (getattr(tensor, name) for name in names)
    return [t for part in inner if isinstance(part, Tensor) for t in inner_tensors(part)]


def find_tensors_of(result: Any) -> list[Tensor]:
    """Return the tensors in the arguments or the result of an operator, with the inner tensors of wrappers in their place."""
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
    """Return the part of a DTensor that this process has, a plain tensor itself.

    Args:
        tensor: the tensor. Its summands are added up over the processes if it is a partial sum; all processes must call it then.
        placements: the placements of the result; those of the tensor by default.
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
    """Return the whole of a DTensor, a plain tensor itself. All processes must call it."""
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


def find_parameter(model: nn.Module, name: str) -> Tensor | None:
    """Return the parameter that a module uses now: its local part, under FSDP the gathered one."""
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


def runs_in_fsdp() -> bool:
    """Return whether FSDP runs the current operator, in a hook or in the forward of its wrapper, and not the wrapped module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not MODULE_CALL:
        if frame.f_code.co_filename.startswith(FSDP_FOLDER):
            return True
        frame = frame.f_back
    return False


@contextmanager
def preserve_shards(model: nn.Module) -> Iterator[None]:
    """Reshard the parameters that FSDP gathers in the block: an optimizer step would not change a gathered copy."""
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
    """Dispatch mode that sees the operators on inner tensors in place of those on wrappers.

    Attributes:
        outer: for each inner tensor in a wrapper that such an operator returned, by its id, the wrapper.
        depth: number of operators on wrappers that are running.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.outer: dict[int, Tensor] = {}
        self.depth = 0
        self._passes_on = False

    def run_wrapped(self, func: Any, types: Sequence[type], args: Any, kwargs: Any) -> Any:
        """Run an operator on wrappers, whose inner operators the mode sees.

        The mode calls the operator once more and declines it: torch then asks the wrapper's class, with the mode enabled.
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
        self.note_wrappers(out)
        return out

    def note_wrappers(self, values: Any) -> None:
        """Add the wrappers among arguments or results to `outer`."""
        for tensor in filter(is_wrapper, pytree.tree_leaves(values)):
            self.outer |= {id(inner): tensor for inner in inner_tensors(tensor)}


def has_wrappers(types: Sequence[type]) -> bool:
    """Return whether an operator has an argument of a class with operators of its own, other than fake tensors."""
    return any(not issubclass(kind, FakeTensor) for kind in types)


def computes_shapes(arguments: Any) -> bool:
    """Return whether an operator has arguments without contents: DTensor computes shapes with such tensors."""
    return any(
        isinstance(x, Tensor) and (isinstance(x, FakeTensor) or x.is_meta) for x in pytree.tree_leaves(arguments)
    )
