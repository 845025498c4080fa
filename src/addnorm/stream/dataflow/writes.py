"""Writes of operators: which tensors an operator writes, and the contents of memory before its first write."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from addnorm.stream.dataflow.memory import disable_modes, storage_key
from addnorm.stream.dataflow.operators import bind_arguments, find_traits, operator_name
from addnorm.stream.dataflow.wrappers import find_fsdp_modules, find_tensors_of, runs_in_fsdp

UNWRITTEN = {"monitored_barrier_"}  # operators of c10d that write nothing


def find_written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operator writes in place, by its schema."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace == "c10d" and name.endswith("_") and name not in UNWRITTEN:  # its schema does not declare it
        return [t for t in pytree.tree_leaves(args[0]) if isinstance(t, Tensor)]
    if not func._schema.is_mutable:
        return []
    bound = bind_arguments(func, args, kwargs)
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for name in names for t in pytree.tree_leaves(bound.get(name)) if isinstance(t, Tensor)]


def list_outputs(func: Any, out: Any, written: Sequence[Tensor]) -> list[Tensor]:
    """Return the new outputs of an operator, and then the tensors `written`, which the operator writes in place."""
    if not written:
        return find_tensors_of(out)
    returns = func._schema.returns
    outs = out if len(returns) > 1 else (out,)
    new = [t for t, declared in zip(outs, returns, strict=False) if declared.alias_info is None]
    return [*(t for t in new if isinstance(t, Tensor)), *written]


def find_first(out: Any) -> Tensor | None:
    """Return the first output of an operator that has floating-point numbers; None for one that writes in place only."""
    return next((t for t in find_tensors_of(out) if t.is_floating_point()), None)


def running_statistics(func: Any, args: Any) -> list[Tensor]:
    """Return the running statistics that a batch norm writes undeclared by its schema; [] for other operators."""
    return [x for x in args[3:5] if isinstance(x, Tensor)] if "running" in find_traits(operator_name(func)) else []


class UndoLog(TorchDispatchMode):
    """Dispatch mode that copies memory before an operator writes to it for the first time.

    Args:
        model: the model that runs. Writes of FSDP itself are not undone.
        storages: keys of the memory to restore (`storage_key`). Other memory keeps what the run writes.
    """

    def __init__(self, model: nn.Module, storages: Container[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._storages = storages
        self._has_fsdp = bool(find_fsdp_modules(model))
        self._copies: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy the memory that an operator writes, and run the operator."""
        kwargs = kwargs or {}
        written = (*find_written(func, args, kwargs), *running_statistics(func, args))
        if written and not (self._has_fsdp and runs_in_fsdp()):
            with disable_modes(), torch.no_grad():
                for tensor in find_tensors_of(written):
                    self._save(tensor)
        return func(*args, **kwargs)

    def _save(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key in self._storages and key not in self._copies:
            memory = tensor.untyped_storage() if tensor.layout == torch.strided else tensor
            self._copies[key] = memory, memory.clone()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the copied memory after the block."""
        try:
            yield
        finally:
            with disable_modes(), torch.no_grad():
                for memory, copy in self._copies.values():
                    if isinstance(memory, torch.UntypedStorage) and memory.nbytes() != copy.nbytes():
                        memory.resize_(copy.nbytes())
                    memory.copy_(copy)
