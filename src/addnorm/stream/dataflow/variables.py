"""Global variables of the Python modules that define a model's classes: functions that may hold state, and changes of values.

Functions belong to the model: their caches, closures and defaults are restored (snapshot.py). Other values are not restored.
`GlobalValues` names the variables whose values have changed: containers, plain objects, arrays, tensors and generators, at any
depth.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from addnorm.stream.dataflow.holders import (
    ATOMS,
    CACHE,
    Kind,
    Record,
    find_kinds,
    is_library,
    is_same,
    save_reachable,
)  # fmt: skip
from addnorm.stream.dataflow.memory import place_of

Namespace = dict[str, Any]
SKIPPED = (nn.Module, types.FunctionType, types.MethodType, types.ModuleType, CACHE, type, property)
WEAK = ("weakref", "_weakrefset", "torch.utils.weak")  # their objects change when other objects are garbage-collected
MAX_OBJECTS = 2000  # largest number of objects that are saved for one global variable


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
            return [Kind(_save_tensor)] if isinstance(item, Tensor) else find_kinds(type(item))

        return save_reachable([value], kinds_of, {}, MAX_OBJECTS)


def _list_values(space: Namespace) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each variable that may hold state. Classes must be defined in this Python module."""
    for name, value in [*space.items()]:
        is_skipped = value.__module__ != space["__name__"] if isinstance(value, type) else isinstance(value, SKIPPED)
        if not name.startswith("__") and not is_skipped:
            yield name, value


def _save_tensor(tensor: Tensor) -> tuple[Any, Iterable[Any]]:
    return (place_of(tensor), None if tensor.is_inference() else tensor._version), ()


def _find_changes(space: Namespace, before: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    for name, value in _list_values(space):
        if name not in before:  # conditions of the graphs of torch.compile, and imports
            if isinstance(value, int | float | str | list | dict | set | Tensor) and not isinstance(value, bool):
                yield name
            continue
        old, saved = before[name]
        is_new = value is not old and not (type(value) in ATOMS and is_same(value, old))
        if is_new or not all(is_same(kind.save(item)[0], content) for kind, item, content in saved):
            yield name
