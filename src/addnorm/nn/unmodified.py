"""Check whether a module computes just the formula of its class, so that other code may compute the formula instead.

A call does more than the formula where the module is of another class (a subclass, a parametrization, a wrapper), has hooks, is
compiled, or has a method of its own, where a method of its class was replaced, or where hooks of all modules are registered.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    kind, own = module.__class__, module.__dict__
    if kind not in methods:
        return False
    forward, others = methods[kind]
    if (
        kind.forward is not forward
        or kind.__call__ is not Module.__call__  # tracers replace that of all modules
        or kind._call_impl is not Module._call_impl
        or "forward" in own
        or own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "_call_impl" in own
        or "_compiled_call_impl" in own
        or has_any_global_hook()
    ):
        return False
    if others:
        for name, method in others.items():  # any() of a generator takes twice the time
            if name in own or getattr(kind, name) is not method:
                return False
    return True


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
