"""Check whether a module computes just the formula of its class, so that other code may compute the formula instead.

A call does more than the formula where the module is of another class (a subclass, a parametrization, a wrapper), has hooks, is
compiled, or has a method of its own, where a method of its class was replaced, or where hooks of all modules are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn import Module

from addnorm._util.torch_internals import has_any_global_hook

# Classes whose formula is computed elsewhere, with the methods that define it: `forward`, and others by name.
Methods = Mapping[type[nn.Module], tuple[Any, Mapping[str, Any]]]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def methods_of(*classes: type[nn.Module], names: tuple[str, ...] = ()) -> Methods:
    """Return for each class its present `forward` and methods in `names`, so that later replacements can be detected."""
    return {
        kind: (kind.forward, {name: getattr(kind, name) for name in names if hasattr(kind, name)}) for kind in classes
    }


def is_unmodified(module: Any, methods: Methods) -> bool:
    """Return whether a call of a module runs exactly the methods that `methods` has for its class: no subclass, hook or patch."""
    return _is_unmodified_class(module.__class__, methods) and not _is_changed(
        module.__dict__, methods[module.__class__][1]
    )


def examine(methods: Methods) -> Callable[[Any], bool]:
    """Return `is_unmodified` for a pass over many modules, which asks each class and the hooks of all modules once."""
    classes: dict[Any, bool] = {}

    def check(module: Any) -> bool:
        kind = module.__class__
        if kind not in classes:
            classes[kind] = _is_unmodified_class(kind, methods)
        return classes[kind] and not _is_changed(module.__dict__, methods[kind][1])

    return check


def _is_unmodified_class(kind: Any, methods: Methods) -> bool:
    """Return whether a class has the methods that it had at first, and no hook of all modules is registered."""
    if kind not in methods:
        return False
    forward, others = methods[kind]
    return (
        kind.forward is forward
        and kind.__call__ is Module.__call__  # tracers replace that of all modules
        and kind._call_impl is Module._call_impl
        and not has_any_global_hook()
        and (not others or [getattr(kind, name) for name in others] == [*others.values()])
    )


def _is_changed(own: Mapping[str, Any], names: Mapping[str, Any]) -> bool:
    """Return whether a module with the attributes `own` has hooks, is compiled, or has one of its methods as an attribute."""
    if (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or "_call_impl" in own
        or "_compiled_call_impl" in own
    ):
        return True
    for name in names:  # noqa: SIM110  # any() of a generator takes twice the time
        if name in own:
            return True
    return False


def find_modification(module: nn.Module, methods: Methods) -> str | None:
    """Return what was changed in a module or its class, as "hooks" or the name of a replaced method, or None.

    Global hooks and a compiled call are not reported: global hooks also act on a copy, and a copy need not be compiled.
    """
    if any(vars(module)[hooks] for hooks in HOOKS):
        return "hooks"
    for name, value in vars(module).items():
        if callable(value) and hasattr(type(module), name) and name != "_compiled_call_impl":
            return f"a {name} of its own"
    forward, others = methods.get(type(module), (type(module).forward, {}))
    calls = {"__call__": Module.__call__, "_call_impl": Module._call_impl}
    for name, method in {**calls, "forward": forward, **others}.items():
        if getattr(type(module), name) is not method:
            return f"another {name} than its class had at first"
    return None
