"""Everything that the operators use of torch that torch does not document, each with its reason.

Tested with torch 2.10 and 2.13. `tests/util/test_torch_internals.py` fails where a newer torch lacks one of them or changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # public through `isinstance` only
from torch.autograd import forward_ad

__all__ = [
    "AfterAutograd", "BelowAutograd", "BelowAutogradInPlace", "FakeTensor", "any_requires_grad", "exclude_from_capture",
    "find_schemas", "in_transform", "increment_version", "is_recording", "is_tracing", "mark_as_constant", "parse_schema",
    "without_autocast",
]  # fmt: skip

# Whether any of the arguments is a tensor that requires a gradient: one call instead of a loop in Python at every call.
any_requires_grad = torch._C._any_requires_grad
# Increments the version counters of tensors that an operator wrote, so that autograd detects the change.
increment_version = torch._C._increment_version
# Contexts in which operators have no gradient; the second one also leaves version counters as they are.
BelowAutograd = torch._C._AutoDispatchBelowAutograd
BelowAutogradInPlace = torch._C._AutoDispatchBelowADInplaceOrView
# The dispatch keys that are left for an autograd kernel's own call of its operator.
AfterAutograd = torch._C._after_autograd_keyset
# The operators that are defined already, for one that the C++ library may have defined.
parse_schema = torch._C.parse_schema
find_schemas = torch._C._jit_get_schemas_for_operator

_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_jit_trace = torch._C._get_tracing_state
_mode = torch._C._get_dispatch_mode
_TRACERS = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL)
_forward_ad: Any = forward_ad  # whose level is a module attribute: the public way to ask is several times slower


def in_transform() -> bool:
    """Return whether a transform of `torch.func` or a forward-mode derivative is active."""
    return _forward_ad._current_level >= 0 or _transforms_active()


def is_recording() -> bool:
    """Return whether a dispatch mode or `torch.jit.trace` sees the operators that are called."""
    return bool(_dispatch_modes()) or _jit_trace() is not None


def has_dispatch_mode() -> bool:
    """Return whether a dispatch mode sees the operators that are called."""
    return bool(_dispatch_modes())


def is_tracing() -> bool:
    """Return whether a mode records a graph, in which no value of a tensor can be looked at."""
    return any(_mode(key) for key in _TRACERS)


def without_autocast(key: str) -> Any:
    """Return a context without the autocast kernels of a device, such as "AutocastCPU"."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)))


def mark_as_constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a traced call run the function while it is traced, as `torch.compiler.assume_constant_result` does.

    That one imports all of Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def exclude_from_capture(*functions: Any) -> None:
    """Exclude functions, and what they call, from capture by torch.compile's frontend.

    A backward in Python that runs between two graphs of a compiled model, as where a model returns gradients, would be captured
    as if it were compiled, and a compiled backward has no second derivative. `torch.compiler.disable` would import all of Dynamo.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    for function in functions:
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
