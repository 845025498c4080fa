"""Global variables of the Python modules that define a model's classes: functions that may hold state, and changes of values.

Functions belong to the model: what they cache, close over and have as defaults is restored (snapshot.py). Other values do not.
`GlobalValues` names those that have changed: containers, plain objects, arrays, tensors and generators, at any depth.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from addnorm.stream.dataflow.holders import ATOMS, CACHE, Kind, find_kinds, is_library, is_same, place_of

Namespace = dict[str, Any]
SKIPPED = (nn.Module, types.FunctionType, types.MethodType, types.ModuleType, CACHE, type, property)
WEAK = ("weakref", "_weakrefset", "torch.utils.weak")  # whose objects change when others are collected
MAX_OBJECTS = 2000  # of one global variable


def find_namespaces(model: nn.Module) -> list[Namespace]:
    """Return the global variables of the Python modules that define the classes of a model's modules."""
    classes = {*map(type, model.modules())}
    names = {base.__module__ for cls in classes for base in cls.__mro__ if not is_library(base.__module__)}
    return [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]


def list_functions(namespaces: Iterable[Namespace]) -> list[Any]:
    """Return the functions and the functools caches in Python modules."""
    return [f for space in namespaces for f in [*space.values()] if isinstance(f, types.FunctionType | CACHE)]


def list_imported_caches(namespaces: Iterable[Namespace]) -> list[Any]:
    """Return the functools caches in the Python modules from which others import functions."""
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

    def _save(self, value: Any) -> list[tuple[Callable[[Any], Any], Any, Any]]:
        """Save a value and all objects that it refers to, except objects that are restored anyway."""
        saved: list[tuple[Callable[[Any], Any], Any, Any]] = []
        seen: dict[int, Any] = {}
        todo = [value]
        while todo and len(seen) < MAX_OBJECTS:
            item = todo.pop()
            if type(item) in ATOMS or id(item) in seen or id(item) in self._restored:
                continue
            seen[id(item)] = item
            if isinstance(item, SKIPPED) and (item is not value or not isinstance(item, type)):
                continue
            if any(base.__module__ in WEAK for base in type(item).__mro__):
                continue
            for kind in _find_kinds(item):
                content, references = kind.save(item)
                saved.append((kind.save, item, content))
                todo += references
        return saved


def _list_values(space: Namespace) -> Iterator[tuple[str, Any]]:
    """Return the variables that may hold state; of classes those that the Python module defines."""
    for name, value in [*space.items()]:
        is_skipped = value.__module__ != space["__name__"] if isinstance(value, type) else isinstance(value, SKIPPED)
        if not name.startswith("__") and not is_skipped:
            yield name, value


def _find_kinds(item: Any) -> list[Kind]:
    if isinstance(item, Tensor):
        return [Kind(_save_tensor)]
    return [Kind(_save_class)] if isinstance(item, type) else find_kinds(type(item))


def _save_tensor(tensor: Tensor) -> tuple[Any, Iterable[Any]]:
    return (place_of(tensor), None if tensor.is_inference() else tensor._version), ()


def _save_class(cls: type) -> tuple[Any, Iterable[Any]]:
    values = {name: value for name, value in vars(cls).items() if not name.startswith("__")}
    return values, [*values.values()]


def _find_changes(space: Namespace, before: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    for name, value in _list_values(space):
        if name not in before:  # conditions of the graphs of torch.compile, and imports
            if isinstance(value, int | float | str | list | dict | set | Tensor) and not isinstance(value, bool):
                yield name
            continue
        old, saved = before[name]
        is_new = value is not old and not (type(value) in ATOMS and is_same(value, old))
        if is_new or not all(is_same(save(item)[0], content) for save, item, content in saved):
            yield name
