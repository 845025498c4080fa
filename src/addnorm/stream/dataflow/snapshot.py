"""Snapshot of the state that a model keeps between its calls, and its restoration in place.

A call of a model may replace, grow or write what the model keeps: buffers, attributes, caches, counters, generators. The tools of
this library call models more often than their users do, and later calls may not notice it.

    with preserve_state(model, arguments):
        model(*args, **kwargs)

`StateSnapshot` walks over all objects that can be reached from the model and its arguments, and keeps a shallow copy of each
that can change (holders.py). Restoration writes back what differs, in place: each object stays the same object. Contents of
tensors are not copied in advance: `UndoLog` copies memory when an operator is about to write to it.

Out of reach are global variables, files, iterators, and objects of the standard library and of torch's compiled and distributed
parts. They stay as the call leaves them. A call that changes a global variable of a Python module that defines one of the
model's classes gives a warning.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_versions
from torch.utils import _pytree as pytree

from addnorm.stream.dataflow.holders import ATOMS, CACHE, Kind, find_kinds, is_leaf, is_library, restore_cache
from addnorm.stream.dataflow.memory import disable_modes, storage_key
from addnorm.stream.dataflow.state import fork_rng
from addnorm.stream.dataflow.wrappers import is_wrapper, preserve_shards
from addnorm.stream.dataflow.writes import UndoLog

__all__ = ["StateSnapshot", "preserve_state"]

Namespace = dict[str, Any]
EMPTIED = {dict, OrderedDict, list, set}
CONTAINERS = (dict, list, set, deque)
VARIABLES = (*CONTAINERS, type(None), int, float, complex, str, tuple, Tensor)  # global variables that may be state


@contextmanager
def preserve_state(model: nn.Module, arguments: Any = ()) -> Iterator[StateSnapshot]:
    """Restore after the block what it changes in a model, in arguments and in the global random generators.

    A dispatch mode watches the operators of the block, so the model must run eagerly. Parameters that FSDP gathers in the block
    are sharded again.
    """
    with _fork_rng_of(model):
        snapshot = StateSnapshot(model, arguments, contents=False)
        undo = UndoLog(model, snapshot.storages)
        with snapshot.restored(fork=False), undo.restored(), preserve_shards(model), undo:
            yield snapshot


class StateSnapshot:
    """State of a model and of arguments at the time of its construction.

    Args:
        model: the model.
        arguments: containers and objects whose state belongs to it.
        contents: also copy the contents of all tensors; False if an `UndoLog` restores them.

    Attributes:
        tensors: the strided tensors that were reached, without gradients.
        storages: keys of the memory of all tensors that were reached.
    """

    def __init__(self, model: nn.Module, arguments: Any = (), contents: bool = True) -> None:
        self.model = model
        self._records: list[tuple[Callable[[Any, Any], None], Any, Any]] = []
        self._empty: list[Any] = []  # empty containers: most of what a module holds are tables of hooks without any
        modules = [*model.modules()]
        names = {
            base.__module__ for cls in {*map(type, modules)} for base in cls.__mro__ if not is_library(base.__module__)
        }
        namespaces = [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]
        with _plain_operators():
            # The modules and tensors of a ScriptModule are no attributes.
            roots = [arguments, *_find_caches(namespaces), *model.buffers(), *model.parameters(), *reversed(modules)]
            reached = self._walk(roots)
            self._records += [
                (restore_cache, f, f.cache_info().misses) for f in _find_caches(_find_imported(namespaces))
            ]
            self.storages = {storage_key(t) for t in reached}
            self._versioned = tuple(t for t in reached if not t.is_inference())
            gradients = {id(t.grad) for t in reached if is_leaf(t) and t.grad is not None}
            self.tensors = [
                t for t in reached if id(t) not in gradients and t.layout == torch.strided and not t.is_nested
            ]
            self._contents = [(t, t.detach().clone()) for t in reached if not t.is_nested] if contents else []
        self._globals = [
            (space, {name: _copy_variable(value) for name, value in space.items()}) for space in namespaces
        ]

    def _walk(self, todo: list[Any]) -> list[Tensor]:
        """Save all objects that can be reached from some, and return the tensors among them, the inner ones of wrappers."""
        seen: dict[int, Any] = {}  # holds the objects, so that no id is used twice
        kinds: dict[type, list[Kind]] = {}
        tensors = []
        while todo:
            item = todo.pop()
            cls = type(item)
            if cls in ATOMS or id(item) in seen:
                continue
            seen[id(item)] = item
            if cls in EMPTIED and not item:
                self._empty.append(item)
                continue
            if cls not in kinds:
                kinds[cls] = find_kinds(cls)
            for save, restore in kinds[cls]:
                saved, references = save(item)
                todo += references
                if restore is not None:
                    self._records.append((restore, item, saved))
            if isinstance(item, Tensor) and not is_wrapper(item):
                tensors.append(item)
        return tensors

    @contextmanager
    def restored(self, fork: bool = True) -> Iterator[None]:
        """Restore the state after the block. With `fork` the global random generators are restored too."""
        with ExitStack() as stack:
            if fork:
                stack.enter_context(_fork_rng_of(self.model))
            stack.enter_context(preserve_versions(self._versioned))
            try:
                yield
            finally:
                try:
                    self._restore()
                except KeyboardInterrupt:
                    self._restore()
                    raise
        self._warn_of_globals()

    def copy_aliases(self, outputs: Any) -> Any:
        """Return outputs with those tensors copied that are in memory that restoration may write."""
        return pytree.tree_map_only(Tensor, lambda t: t.clone() if storage_key(t) in self.storages else t, outputs)

    def _restore(self) -> None:
        with _plain_operators():
            for item in filter(None, self._empty):
                item.clear()
            for restore, item, saved in self._records:
                restore(item, saved)
            for tensor, saved in self._contents:
                if tensor.layout != torch.strided or not _equal(tensor, saved):
                    tensor.copy_(saved)

    def _warn_of_globals(self) -> None:
        changed = [
            f"{space['__name__']}.{name}" for space, before in self._globals for name in _find_changes(space, before)
        ]
        if changed:
            warnings.warn(
                f"a call of {type(self.model).__name__} changed {', '.join(changed)}: global variables are not part of a model "
                "and are not restored, so its next calls may differ from those without this one.",
                stacklevel=2,
            )


@contextmanager
def _plain_operators() -> Iterator[None]:
    """Run operators without modes, subclasses' functions and gradients."""
    with disable_modes(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        yield


@contextmanager
def _fork_rng_of(model: nn.Module) -> Iterator[None]:
    with fork_rng({p.device for p in model.parameters() if p.device.type == "cuda"}):
        yield


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN equal to NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


# Global variables of Python modules.


def _find_caches(namespaces: Iterable[Namespace]) -> list[Any]:
    """Return the functools caches in Python modules."""
    return [f for space in namespaces for f in [*space.values()] if isinstance(f, CACHE)]


def _find_imported(namespaces: Iterable[Namespace]) -> Iterable[Namespace]:
    """Return the Python modules from which others import functions."""
    functions = [f for space in namespaces for f in [*space.values()] if isinstance(f, types.FunctionType)]
    return {id(f.__globals__): f.__globals__ for f in functions if not is_library(f.__module__)}.values()


def _copy_variable(value: Any) -> tuple[Any, Any]:
    """Return a global variable's value, and what tells whether the value has changed."""
    if isinstance(value, dict):
        return value, [x for item in [*value.items()] for x in item]
    if isinstance(value, CONTAINERS):
        return value, [*value]
    return value, value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _find_changes(space: Namespace, before: dict[str, tuple[Any, Any]]) -> Iterator[str]:
    """Return the names of global variables that hold another value than before, or a value that has changed."""
    for name, value in [*space.items()]:
        old, content = before.get(name, (None, None))
        if name.startswith("__") or not isinstance(value, VARIABLES) or not isinstance(old, VARIABLES):
            continue
        if name not in before and isinstance(value, bool):  # a condition of the graphs of torch.compile
            continue
        now = _copy_variable(value)[1]
        same = (
            [*map(id, now)] == [*map(id, content)]
            if isinstance(value, CONTAINERS) and content is not None
            else now == content
        )
        if value is not old or not same:
            yield name
