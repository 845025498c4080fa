"""Functions that save and restore the state of Python objects, for each class in `HOLDER_KINDS` and for others."""

from __future__ import annotations

import contextvars
import copy
import enum
import functools
import gc
import math
import random
import sys
import types
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from addnorm.stream.dataflow.memory import is_leaf, is_strided, place_of
from addnorm.stream.dataflow.wrappers import inner_tensors, is_wrapper

ATOMS = {
    int, float, complex, bool, str, bytes, type(None), type(...), range, slice, types.ModuleType, types.CodeType, torch.Size,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip
CACHE = functools._lru_cache_wrapper
# Objects of these parts of torch depend on state in C++ or in other processes, which is not restored.
PARALLEL = ("torch.distributed", "torch.nn.parallel", "torch.jit")
OPAQUE = (*PARALLEL, "torch._", "torch.fx", "torch.export", "torch.cuda")
# Modules of the standard library whose objects may hold state of a model. The others serve threads, files and the interpreter.
HOLDERS = {"collections", "functools", "argparse", "queue", "weakref", "_weakrefset", "_thread"}
MAX_ARRAY = 1 << 26  # bytes of the largest numpy array that is copied
MISSING = object()


class Kind(NamedTuple):
    """How to save and restore an object.

    Attributes:
        save: takes the object; returns a shallow copy of its state.
        restore: takes the object and the copy, and writes back in place what differs; returns a text that names what it cannot
            restore, or None. A kind without this function restores nothing.
        refer: takes the object; returns the objects to which it refers.
    """

    save: Callable[[Any], Any]
    restore: Callable[[Any, Any], str | None] | None = None
    refer: Callable[[Any], Iterable[Any]] = gc.get_referents


class Record(NamedTuple):
    """Saved object: its kind, the object itself, and the copy of its state."""

    kind: Kind
    item: Any
    saved: Any


def save_reachable(
    todo: list[Any], kinds_of: Callable[[Any], list[Kind]], seen: dict[int, Any], limit: float = math.inf
) -> list[Record]:
    """Save the state of objects and of all objects to which they refer.

    Args:
        todo: the objects; the list is consumed.
        kinds_of: returns the kinds of an object; an object without kinds is not followed.
        seen: receives all objects by id. This dict keeps the objects alive, so that no id is used twice.
        limit: number of records at which the search stops; the rest is missing.
    """
    records: list[Record] = []
    while todo and len(records) < limit:
        item = todo.pop()
        if type(item) in ATOMS or id(item) in seen:
            continue
        seen[id(item)] = item
        for kind in kinds_of(item):
            records.append(Record(kind, item, kind.save(item)))
            todo += kind.refer(item)
    return records


def find_kinds(cls: type) -> list[Kind]:
    """Return the kinds of objects of a class; an empty list if such objects hold no state that can be restored."""
    if issubclass(cls, enum.Enum | random.SystemRandom | types.ModuleType):
        return []
    module = cls.__module__
    if issubclass(cls, nn.Module):  # the class with the forward, from which `fully_shard` derives another class
        module = next(base.__module__ for base in cls.__mro__ if "forward" in vars(base))
        if module.startswith(PARALLEL):
            return [Kind(lambda item: None, refer=lambda item: (item._modules, item._parameters, item._buffers))]
    found = [(base, kind) for base, kind in (*HOLDER_KINDS.items(), *_numpy_kinds()) if issubclass(cls, base)]
    has_attributes = _is_followed(cls.__module__) and (
        not found or (found[0][0] is not cls and found[0][0] is not Tensor)
    )
    if not found and not has_attributes and issubclass(cls, Iterator):
        return [Kind(_save_iterator, _compare_iterator, _list_iterated)]
    return [kind for _, kind in found[:1]] + [OBJECT] * has_attributes


def _is_followed(module: Any) -> bool:
    """Return whether an object is searched for state if its class is defined in the Python module `module`."""
    name = str(module)
    top = name.partition(".")[0]
    if top == "torch":
        return not name.startswith(OPAQUE)
    return (top not in sys.stdlib_module_names and top != "numpy") or name in HOLDERS


def is_library(module: Any) -> bool:
    """Return whether a Python module belongs to Python, torch, numpy or this library, so that it keeps no state of models."""
    top = str(module).partition(".")[0]
    return top in ("torch", "numpy", "addnorm") or top in sys.stdlib_module_names


def _is_of_library(cls: type) -> bool:
    """Return whether a library's source defines a class; False for a class made at run time, as by a parametrization."""
    module = cls.__module__
    if not is_library(module):
        return False
    owner = sys.modules.get(str(module))
    return str(module).startswith(OPAQUE) or "." in cls.__qualname__ or getattr(owner, cls.__qualname__, None) is cls


def is_same(first: Any, second: Any) -> bool:
    """Return whether two copies of an object's state have the same contents."""
    if first is second:
        return True
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and torch.equal(first, second)
    if hasattr(first, "tobytes"):
        return hasattr(second, "tobytes") and first.tobytes() == second.tobytes()
    if isinstance(first, list | tuple) and type(first) is type(second):
        return len(first) == len(second) and all(map(is_same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return is_same([*first.items()], [*second.items()])
    if isinstance(first, set) and isinstance(second, set):
        return {*map(id, first)} == {*map(id, second)}
    return type(first) in ATOMS and type(first) is type(second) and bool(first == second)


# Objects with attributes.


def _save_object(item: Any) -> tuple[type, Any, dict[Any, Any]]:
    cls, table = type(item), getattr(item, "__dict__", None)
    slots = {
        slot: _read(slot, item)
        for base in cls.__mro__ if "__slots__" in vars(base)
        for slot in vars(base).values() if isinstance(slot, types.MemberDescriptorType)
    }  # fmt: skip
    return cls, table if isinstance(table, dict) else None, slots


def _list_attributes(item: Any) -> Iterable[Any]:
    return getattr(item, "__dict__", None), *gc.get_referents(item)  # the dict of a `threading.local` is no referent


def _read(slot: Any, item: Any) -> Any:
    try:
        return slot.__get__(item)
    except AttributeError:  # a slot without a value
        return MISSING


def _restore_object(item: Any, saved: tuple[type, Any, dict[Any, Any]]) -> None:
    cls, table, slots = saved
    if type(item) is not cls:
        item.__class__ = cls  # a lazy module becomes one of another class in its first call
    if table is not None and item.__dict__ is not table:
        item.__dict__ = table
    for slot, value in slots.items():
        if _read(slot, item) is not value:
            slot.__delete__(item) if value is MISSING else slot.__set__(item, value)


def _save_class(cls: type) -> dict[str, Any]:
    is_saved = not _is_of_library(cls)
    return {name: value for name, value in vars(cls).items() if is_saved and not name.startswith("__")}


def _list_class(cls: type) -> Iterable[Any]:
    return () if _is_of_library(cls) else (*cls.__bases__, *vars(cls).values())


def _restore_class(cls: type, saved: dict[str, Any]) -> None:
    if not saved and _is_of_library(cls):
        return
    for name in [*vars(cls)]:
        if not name.startswith("__") and name not in saved:
            type.__delattr__(cls, name)
    for name, value in saved.items():
        if vars(cls).get(name, MISSING) is not value:
            type.__setattr__(cls, name, value)


# Containers.


def _items(table: dict[Any, Any]) -> list[tuple[Any, Any]]:
    return [*(OrderedDict if isinstance(table, OrderedDict) else dict).items(table)]


def _restore_dict(table: dict[Any, Any], saved: list[tuple[Any, Any]]) -> None:
    """Restore a dict in place. Clear it only if the order of its keys has changed, since another thread may read it."""
    now = _items(table)
    if len(now) == len(saved) and all(k is a and v is b for (k, v), (a, b) in zip(now, saved, strict=True)):
        return
    base, before = OrderedDict if isinstance(table, OrderedDict) else dict, dict(saved)
    for key, _ in now:
        if key not in before:
            base.__delitem__(table, key)
    for key, value in saved:
        if dict.get(table, key, MISSING) is not value:
            base.__setitem__(table, key, value)
    if not _same([key for key, _ in _items(table)], [key for key, _ in saved]):  # another order
        base.clear(table)
        for key, value in saved:
            base.__setitem__(table, key, value)


def _restore_sequence(items: Any, saved: Any) -> None:
    base: Any = next(base for base in (list, bytearray, array) if isinstance(items, base))
    base.__setitem__(items, slice(None), saved)


def _restore_set(items: set[Any], saved: set[Any]) -> None:
    if items != saved:
        set.clear(items)
        set.update(items, saved)


def _restore_deque(items: deque[Any], saved: list[Any]) -> None:
    if not _same(items, saved):
        deque.clear(items)
        deque.extend(items, saved)


def _same(first: Iterable[Any], second: Iterable[Any]) -> bool:
    """Return whether two sequences consist of the same objects."""
    return [*map(id, first)] == [*map(id, second)]


# Python objects whose state can be compared, but not always restored.


def _save_iterator(items: Any) -> Any:
    """Save the position of an iterator or of a file."""
    try:
        if isinstance(items, types.GeneratorType):
            frame = items.gi_frame
            return None if frame is None else (frame.f_lasti, [*frame.f_locals.values()])
        return items.tell() if hasattr(items, "tell") else items.__reduce__()[1:]
    except Exception:  # a closed file, or an iterator that does not tell its place
        return repr(items)


def _compare_iterator(items: Any, saved: Any) -> str | None:
    return None if is_same(_save_iterator(items), saved) else f"the place of a {type(items).__name__}"


def _list_iterated(items: Any) -> Iterable[Any]:
    return () if hasattr(items, "tell") else gc.get_referents(items)


def _read_variable(variable: contextvars.ContextVar[Any]) -> Any:
    return variable.get(MISSING)


def _restore_context(variable: contextvars.ContextVar[Any], saved: Any) -> str | None:
    if variable.get(MISSING) is saved:
        return None
    if saved is MISSING:
        return f"the ContextVar {variable.name}, which had no value"
    variable.set(saved)
    return None


# Functions, and the variables in their closures.


def _list_function(function: types.FunctionType) -> Iterable[Any]:
    if is_library(function.__module__):
        return ()
    return function.__defaults__, function.__kwdefaults__, function.__closure__, vars(function)


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return MISSING


def _restore_cell(cell: types.CellType, saved: Any) -> None:
    if _read_cell(cell) is not saved:
        if saved is MISSING:
            del cell.cell_contents
        else:
            cell.cell_contents = saved


def _restore_cache(function: Any, misses: int) -> None:
    """Empty a functools cache if it has new entries. Removed entries are computed again when they are needed."""
    if function.cache_info().misses != misses:
        function.cache_clear()


# Tensors, and arrays of numpy.


def _save_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Save a tensor without its contents: its place in memory, its gradient, its flags and hooks."""
    alias = tensor.data if not is_wrapper(tensor) and is_strided(tensor) else None
    grad = tensor.grad if is_leaf(tensor) else None
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return type(tensor), alias, is_leaf(tensor), tensor.requires_grad, grad, hooks


def _list_tensor(tensor: Tensor) -> Iterable[Any]:
    *_, grad, hooks = _save_tensor(tensor)
    attributes = {} if getattr(tensor, "_is_flat_param", False) else vars(tensor)
    return *(t for t in inner_tensors(tensor) if t is not tensor), grad, *hooks, attributes


def _restore_tensor(tensor: Tensor, saved: Any) -> None:
    cls, alias, was_leaf, requires_grad, grad, hooks = saved
    if type(tensor) is not cls:
        tensor.__class__ = cls  # an uninitialized parameter becomes one of another class
    if alias is not None and place_of(tensor) != place_of(alias):
        tensor.data = alias
    if was_leaf and not is_leaf(tensor) and not tensor._is_view():
        tensor.detach_()  # from the graph of values that were written into this tensor
    if was_leaf and is_leaf(tensor):
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if tensor.grad is not grad:
            tensor.grad = grad
    if tensor._backward_hooks is not hooks[0]:
        tensor._backward_hooks = hooks[0]
    if tensor._post_accumulate_grad_hooks is not hooks[1]:
        tensor._post_accumulate_grad_hooks = hooks[1]


def _restore_generator(generator: torch.Generator, saved: Tensor) -> None:
    generator.set_state(saved)


def _numpy_kinds() -> list[tuple[type, Kind]]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return []

    def save_array(items: Any) -> Any:
        return items.copy() if items.nbytes <= MAX_ARRAY and items.flags.writeable else None

    def restore_array(items: Any, saved: Any) -> str | None:
        if saved is None:
            return None
        try:
            if items.size == saved.size:
                items.shape = saved.shape
            else:
                items.resize(saved.shape, refcheck=False)
            if items.tobytes() != saved.tobytes():
                items[...] = saved
        except ValueError:  # a view of another shape
            return "the shape of an array"
        return None

    random_state = numpy.random.RandomState
    return [
        (numpy.ndarray, Kind(save_array, restore_array, lambda items: items.flat if items.dtype.hasobject else ())),
        (
            numpy.random.BitGenerator,
            Kind(lambda generator: generator.state, lambda g, state: setattr(g, "state", state)),
        ),
        (numpy.random.Generator, REFERRING),
        (random_state, Kind(random_state.get_state, random_state.set_state)),
    ]


OBJECT = Kind(_save_object, _restore_object, _list_attributes)
REFERRING = Kind(lambda item: None)
# Objects that do not change, but refer to objects that may.
UNCHANGING: tuple[type, ...] = (
    tuple, frozenset, types.MethodType, types.BuiltinFunctionType, functools.partial, property, staticmethod, classmethod,
)  # fmt: skip
HOLDER_KINDS: dict[type, Kind] = {
    OrderedDict: Kind(_items, _restore_dict),
    defaultdict: Kind(_items, _restore_dict),
    dict: Kind(_items, _restore_dict),
    list: Kind(list.copy, _restore_sequence),
    set: Kind(set, _restore_set),
    deque: Kind(list, _restore_deque),
    bytearray: Kind(bytes, _restore_sequence),
    array: Kind(copy.copy, _restore_sequence),
    **dict.fromkeys(UNCHANGING, REFERRING),
    types.MappingProxyType: REFERRING._replace(refer=types.MappingProxyType.values),
    type: Kind(_save_class, _restore_class, _list_class),
    types.FunctionType: REFERRING._replace(refer=_list_function),
    types.SimpleNamespace: OBJECT,
    types.CellType: Kind(_read_cell, _restore_cell),
    CACHE: Kind(lambda function: function.cache_info().misses, _restore_cache),
    contextvars.ContextVar: Kind(_read_variable, _restore_context, lambda variable: [_read_variable(variable)]),
    weakref.ref: REFERRING._replace(refer=lambda reference: [reference()]),
    Tensor: Kind(_save_tensor, _restore_tensor, _list_tensor),
    torch.Generator: Kind(torch.Generator.get_state, _restore_generator),
    random.Random: Kind(random.Random.getstate, random.Random.setstate),
}
