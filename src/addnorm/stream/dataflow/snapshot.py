"""Snapshot of the state that a model keeps between its calls, and its restoration in place.

A call of a model may replace, grow or write what the model keeps: buffers, attributes, caches, counters, generators. The tools of
this library call models more often than their users do, and this must not change the results of later calls.

    with preserve_state(model, arguments):
        model(*args, **kwargs)

`StateSnapshot` walks over all objects that can be reached from the model and its arguments, and keeps a shallow copy of each
that can change (holders.py). Restoration writes back what differs, in place: each object stays the same object. Contents of
tensors are not copied in advance: `UndoLog` copies memory when an operator is about to write to it.

Out of reach are global variables, files, iterators, and objects of the standard library and of torch's compiled and distributed
parts. They stay as the call leaves them. A warning names the global variables of Python modules that define the model's classes,
and the iterators and open files of the model, that a call has changed.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_versions
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from addnorm._util.torch_internals import WithoutSubclasses
from addnorm.stream.dataflow.holders import (
    ATOMS,
    CACHE,
    HOLDER_KINDS,
    Kind,
    Record,
    find_kinds,
    is_library,
    is_same,
    save_reachable,
)
from addnorm.stream.dataflow.memory import disable_modes, is_in_memory, is_leaf, is_strided, place_of, storage_key
from addnorm.stream.dataflow.operators import find_written, running_statistics
from addnorm.stream.dataflow.state import fork_rng
from addnorm.stream.dataflow.wrappers import (
    find_fsdp_modules,
    find_tensors_of,
    is_wrapper,
    preserve_shards,
    runs_in_fsdp,
)

MAX_COPY = 1 << 24  # bytes of a tensor that is copied in advance
Namespace = dict[str, Any]
SKIPPED = (nn.Module, types.FunctionType, types.MethodType, types.ModuleType, CACHE, type, property)
WEAK = ("weakref", "_weakrefset", "torch.utils.weak")  # their objects change when other objects are garbage-collected
MAX_OBJECTS = 2000  # largest number of objects that are saved for one global variable


@contextmanager
def preserve_state(model: nn.Module, arguments: Any = ()) -> Iterator[StateSnapshot]:
    """Restore after the block what the block changes in a model, in arguments and in the global random generators.

    A dispatch mode watches the operators of the block, so the model must run eagerly. Parameters that FSDP gathers in the block
    are sharded again.
    """
    with _fork_rng_of(model):
        snapshot = StateSnapshot(model, arguments, contents=False)
        undo = UndoLog(model, snapshot.storages)
        with snapshot.restored(), undo.restored(), preserve_shards(model), undo:
            yield snapshot


class StateSnapshot:
    """State of a model and of arguments at the time of its construction.

    Args:
        model: the model.
        arguments: containers and objects whose state is saved too.
        contents: whether to copy the contents of all tensors. Pass False if an `UndoLog` restores them. Then only small CPU
            tensors that are not parameters are copied, since numpy may write to such tensors without an operator.

    Attributes:
        tensors: the strided tensors that were reached, without gradients.
        storages: keys of the memory of all tensors that were reached.
    """

    def __init__(self, model: nn.Module, arguments: Any = (), contents: bool = True) -> None:
        self.model = model
        self._lost: list[str] = []  # what could not be restored
        namespaces = find_namespaces(model)
        seen: dict[int, Any] = {}
        with _plain_operators():
            # The modules and tensors of a ScriptModule are no attributes.
            parameters, modules = [*model.parameters()], [*model.modules()]
            starts = [arguments, *list_functions(namespaces), *model.buffers(), *parameters, *reversed(modules)]
            kinds_of: Callable[[type], list[Kind]] = cache(find_kinds)
            self._records = save_reachable(starts, lambda item: kinds_of(type(item)), seen)
            self._records += [
                Record(HOLDER_KINDS[CACHE], f, f.cache_info().misses) for f in list_imported_caches(namespaces)
            ]
            reached = [item for item in seen.values() if isinstance(item, Tensor) and not is_wrapper(item)]
            self.storages = {storage_key(t) for t in reached}
            self._versioned = tuple(t for t in reached if not t.is_inference())
            gradients = {id(t.grad) for t in reached if is_leaf(t) and t.grad is not None}
            self.tensors = [
                t for t in reached if id(t) not in gradients and t.layout == torch.strided and not t.is_nested
            ]
            learned = {*map(id, parameters)}
            self._contents = [
                (t, t.detach().clone())
                for t in reached
                if not t.is_nested and is_in_memory(t, tuple(t.shape))  # not a parameter that FSDP frees
                and (contents or (id(t) not in learned and _is_small(t)))
            ]  # fmt: skip
        self._globals = GlobalValues(namespaces, seen)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state and the global random generators after the block."""
        with _fork_rng_of(self.model), preserve_versions(self._versioned):
            try:
                yield
            finally:
                try:
                    self._restore()
                except KeyboardInterrupt:
                    self._restore()
                    raise
        self._warn()

    def copy_aliases(self, outputs: Any) -> Any:
        """Return `outputs` with copies of the tensors whose memory is restored later."""
        return pytree.tree_map_only(Tensor, lambda t: t.clone() if storage_key(t) in self.storages else t, outputs)

    def _restore(self) -> None:
        with _plain_operators():
            lost = (kind.restore(item, saved) for kind, item, saved in self._records if kind.restore is not None)
            self._lost = [name for name in lost if name is not None]
            for tensor, saved in self._contents:
                if tensor.layout != torch.strided or not _equal(tensor, saved):
                    tensor.copy_(saved)

    def _warn(self) -> None:
        changed = [*self._globals.list_changes(), *self._lost]
        if changed:
            warnings.warn(
                f"a call of {type(self.model).__name__} changed {', '.join(changed)}: global variables, iterators and files are "
                "not restored, so the next calls of the model may differ from those without this one.",
                stacklevel=2,
            )


@contextmanager
def _plain_operators() -> Iterator[None]:
    """Run operators without modes, subclasses' functions and gradients."""
    with disable_modes(), torch.no_grad(), WithoutSubclasses():
        yield


@contextmanager
def _fork_rng_of(model: nn.Module) -> Iterator[None]:
    with fork_rng({p.device for p in model.parameters() if p.device.type == "cuda"}):
        yield


def _is_small(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.is_cpu and is_strided(tensor) and 0 < tensor.nbytes <= MAX_COPY


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN equal to NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


# Global variables of the Python modules that define a model's classes. Functions belong to the model: their caches, closures and
# defaults are restored. If other variables change (containers, plain objects, arrays, tensors, generators), a warning names them.


def find_namespaces(model: nn.Module) -> list[Namespace]:
    """Return the global variables of the Python modules that define the classes of a model's modules."""
    classes = {*map(type, model.modules())}
    names = {base.__module__ for cls in classes for base in cls.__mro__ if not is_library(base.__module__)}
    return [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]


def list_functions(namespaces: Iterable[Namespace]) -> list[Any]:
    """Return the functions and the functools caches in Python modules."""
    return [f for space in namespaces for f in [*space.values()] if isinstance(f, types.FunctionType | CACHE)]


def list_imported_caches(namespaces: Iterable[Namespace]) -> list[Any]:
    """Return the functools caches in the Python modules from which `namespaces` import functions."""
    functions = [f for f in list_functions(namespaces) if not isinstance(f, CACHE) and not is_library(f.__module__)]
    spaces = {id(f.__globals__): f.__globals__ for f in functions}.values()
    return [f for f in list_functions(spaces) if isinstance(f, CACHE)]


class GlobalValues:
    """The values of global variables at the time of construction.

    Args:
        namespaces: the variables of some Python modules.
        restored: ids of objects that are restored, and so not searched.
    """

    def __init__(self, namespaces: Iterable[Namespace], restored: Container[int]) -> None:
        self._restored = restored
        self._before = [
            (space, {name: (value, self._save(value)) for name, value in _list_values(space)}) for space in namespaces
        ]

    def list_changes(self) -> list[str]:
        """Return the names of variables that hold another value, or a value that has changed."""
        return [
            f"{space['__name__']}.{name}" for space, before in self._before for name in _find_changes(space, before)
        ]

    def _save(self, value: Any) -> list[Record]:
        """Save a value and all objects that it refers to, except objects that are restored anyway."""

        def kinds_of(item: Any) -> list[Kind]:
            is_skipped = isinstance(item, SKIPPED) and (item is not value or not isinstance(item, type))
            is_weak = any(base.__module__ in WEAK for base in type(item).__mro__)
            if id(item) in self._restored or is_skipped or is_weak:
                return []
            return [PLACE] if isinstance(item, Tensor) else find_kinds(type(item))

        return save_reachable([value], kinds_of, {}, MAX_OBJECTS)


def _list_values(space: Namespace) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each variable that may hold state; of classes, only those that the module defines."""
    for name, value in [*space.items()]:
        is_skipped = value.__module__ != space["__name__"] if isinstance(value, type) else isinstance(value, SKIPPED)
        if not name.startswith("__") and not is_skipped:
            yield name, value


def _save_place(tensor: Tensor) -> tuple[Any, ...]:
    return place_of(tensor), None if tensor.is_inference() else tensor._version


PLACE = Kind(_save_place, refer=lambda tensor: ())


def _find_changes(space: Namespace, before: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    for name, value in _list_values(space):
        if name not in before:  # other types come from graphs of torch.compile and from imports
            if isinstance(value, int | float | str | list | dict | set | Tensor) and not isinstance(value, bool):
                yield name
            continue
        old, saved = before[name]
        is_new = value is not old and not (type(value) in ATOMS and is_same(value, old))
        if is_new or not all(is_same(kind.save(item), content) for kind, item, content in saved):
            yield name


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
