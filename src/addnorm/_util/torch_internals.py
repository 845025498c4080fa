"""Undocumented parts of torch that the package uses, and settings of the whole process, each with its reason.

Tested with torch 2.10 to 2.15. If a version of torch lacks such a part, nothing fails at import. A part that the operation needs
has a replacement, or the formulas of `reference.py` compute in eager torch (`MISSING`). A tool that needs the part raises an
error that names it. `tests/util/test_torch_internals.py` removes each part. The tests of the tools fail if a newer torch changes
a part.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.hooks import RemovableHandle

# The parts that the kernels need and this torch lacks. If there are any, the formulas of `reference.py` compute the operation,
# and `addnorm.backends()` says so.
MISSING: list[str] = []


def _find(name: str, otherwise: Any = None) -> Any:
    """Return a part of torch by its name. If torch lacks it, return `otherwise`, or a function that raises an error."""

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"torch is {torch.__version__}, which has no {name}: this needs torch 2.10 to 2.15, or a newer addnorm."
        )

    try:
        return resolve_name(name)
    except (AttributeError, ImportError):
        return fail if otherwise is None else otherwise


def _kernels_need(name: str, otherwise: Any = None) -> Any:
    """Return a part of torch without which no kernel is called. If torch lacks it, add its name to `MISSING`."""
    part = _find(name, MISSING)
    if part is not MISSING:
        return part
    MISSING.append(name)
    return _find(name, otherwise)


def _any_requires_grad(*arguments: Any, **options: Any) -> bool:
    return any(
        _any_requires_grad(*value) if isinstance(value, list | tuple) else getattr(value, "requires_grad", False)
        for value in (*arguments, *options.values())
    )


def _parse_schema(text: str) -> Any:
    """Parse a schema by defining an operator with it, for versions of torch without a schema parser."""
    name = f"schema{len(_parsed)}"
    _parsed.append(torch.library.Library("addnorm_schemas", "FRAGMENT"))
    _parsed[-1].define(f"{name}({text.partition('(')[2]}")
    return getattr(torch.ops.addnorm_schemas, name).default._schema


_parsed: list[Any] = []


class _NoTensor:
    """Placeholder for a tensor class that this torch lacks. It has no instances."""


# Whether any argument, or an item of a list, is a tensor that requires a gradient: one call instead of a loop at every call.
any_requires_grad = _find("torch._C._any_requires_grad", _any_requires_grad)
# Increments the version counters of tensors that an operator wrote, so that autograd detects the change.
increment_version = _find("torch._C._increment_version", torch.autograd.graph.increment_version)
# The autograd node whose backward is running, for a hook of one of the node's outputs.
current_node = _find("torch._C._current_autograd_node")
# Contexts in which operators have no gradient; the second one also leaves version counters as they are.
BelowAutograd = _kernels_need("torch._C._AutoDispatchBelowAutograd", nullcontext)
BelowAutogradInPlace = _kernels_need("torch._C._AutoDispatchBelowADInplaceOrView", nullcontext)
# The dispatch keys that are left for an autograd kernel's own call of its operator.
AfterAutograd = _kernels_need("torch._C._after_autograd_keyset")
# The parser of schemas, and the schemas of an operator by name, empty if it is not defined: the C++ library may have defined it.
parse_schema = _kernels_need("torch._C.parse_schema", _parse_schema)
find_schemas = _kernels_need("torch._C._jit_get_schemas_for_operator", lambda name: [])

# Tensors without elements, in a trace, and the modes that make them.
FakeTensor = _find("torch._subclasses.fake_tensor.FakeTensor", _NoTensor)
FakeTensorMode = _find("torch._subclasses.fake_tensor.FakeTensorMode")
unset_fake_temporarily = _find("torch._subclasses.fake_tensor.unset_fake_temporarily")
# Context in which operators skip the `__torch_function__` of subclasses.
WithoutSubclasses = _find("torch._C.DisableTorchFunctionSubclass")
# Whether a tensor belongs to a transform of `torch.func`.
is_transformed = _find("torch._C._functorch.is_functorch_wrapped_tensor")
# Whether a tensor is a batch of gradients of `torch.autograd.grad(..., is_grads_batched=True)`, an older form of vmap.
is_batch_of_gradients = _find("torch._C._functorch.is_legacy_batchedtensor")
# torch's operators of a whole encoder layer and of attention, which a graph of `nn.TransformerEncoderLayer` has.
encoder_layer = _find("torch._transformer_encoder_layer_fwd")
multi_head_attention = _find("torch._native_multi_head_attention")
# The code of `nn.Module._call_impl`, and folders of torch: frames of the call stack are recognized by them.
MODULE_CALL = _find("torch.nn.Module._call_impl", nn.Module.__call__).__code__
TORCH_FOLDER = f"{Path(torch.__file__).parent}{os.sep}"
FSDP_FOLDER = str(Path(torch.__file__).parent / "distributed" / "fsdp")
# torch's tables of global module hooks, which act on every module. With such hooks a module's call does more than its forward.
GLOBAL_HOOKS = [
    hooks for name, hooks in vars(nn.modules.module).items() if name.startswith(("_global_forward", "_global_backward"))
]
_has_any_global_hook = _find("torch.nn.modules.module._has_any_global_hook", lambda: any(GLOBAL_HOOKS))

_threads: dict[int, int] = {}  # the thread of each hook that acts in one thread alone, by its key in torch's tables
in_function_transform = _kernels_need("torch._C._are_functorch_transforms_active", lambda: False)
_dispatch_modes = _kernels_need("torch._C._len_torch_dispatch_stack", lambda: 0)
_jit_trace = _kernels_need("torch._C._get_tracing_state", lambda: None)
_mode = _kernels_need("torch._C._get_dispatch_mode", lambda key: None)
_TRACERS = [_find(f"torch._C._TorchDispatchModeKey.{name}", name) for name in ("PROXY", "FUNCTIONAL")]
_forward_ad: Any = forward_ad  # its level is a module attribute: the public function is several times slower
for _name in (  # used in functions below
    "torch.autograd.forward_ad._current_level", "torch._C._ExcludeDispatchKeyGuard", "torch._C.DispatchKeySet",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy", "torch._C._dynamo.eval_frame._FrameAction",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
):  # fmt: skip
    _kernels_need(_name)


def get_default_store() -> Any:
    """Return the store of the default process group, through which processes exchange values without a collective."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def count_hooks() -> int:
    """Return the number of hooks that were ever registered in this process, or 0 if torch does not count them.

    If a later call returns a larger number, there are new hooks.
    """
    return getattr(RemovableHandle, "next_id", 0)


def count_global_hooks() -> list[int]:
    """Return the number of global module hooks in each of torch's tables.

    Hooks that act only in other threads are not counted.
    """
    here = threading.get_ident()
    return [sum(_threads.get(key, here) == here for key in [*hooks]) for hooks in GLOBAL_HOOKS]


def has_any_global_hook() -> bool:
    """Return whether any global module hook acts in this thread."""
    return bool(_has_any_global_hook()) and any(count_global_hooks())


@contextmanager
def hook_this_thread(before: Callable[[nn.Module], None], after: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call `before` and `after` around each call of a module in this thread. Other threads are not affected.

    torch's global module hooks belong to the process. In a thread where such hooks act, this library calls modules whose formulas
    it computes without a call otherwise.
    """
    here = threading.get_ident()

    def in_this_thread(function: Callable[[nn.Module], None]) -> Callable[..., None]:
        return lambda module, *_: function(module) if threading.get_ident() == here else None

    handles = [
        nn.modules.module.register_module_forward_pre_hook(in_this_thread(before)),
        nn.modules.module.register_module_forward_hook(in_this_thread(after), always_call=True),
    ]
    _threads.update((handle.id, here) for handle in handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
            _threads.pop(handle.id, None)


def direct_call(op: Any) -> Callable[..., Any]:
    """Return the C++ function of an overload. Calling it directly saves a twelfth of the time of a call on one token.

    torch.compile's frontend traces only the overload itself.
    """
    return getattr(op, "_op", op)  # type: ignore[no-any-return]  # torch does not type it


def has_transform() -> bool:
    """Return whether a transform of `torch.func` or a forward-mode derivative is active."""
    return _forward_ad._current_level >= 0 or in_function_transform()  # type: ignore[no-any-return]  # torch does not type it


# Whether the formulas of `reference.py` must compute the operation: a transform of `torch.func` or a forward-mode derivative is
# active, or parts that the kernels need are missing.
in_transform: Callable[[], bool] = (lambda: True) if MISSING else has_transform


def is_recording() -> bool:
    """Return whether a dispatch mode or `torch.jit.trace` sees the operators that are called."""
    return bool(_dispatch_modes()) or _jit_trace() is not None


def has_dispatch_mode() -> bool:
    """Return whether a dispatch mode sees the operators that are called."""
    return bool(_dispatch_modes())


def is_tracing() -> bool:
    """Return whether a mode records a graph, so that no code may read the values of tensors."""
    return any(_mode(key) for key in _TRACERS)


def without_autocast(key: str) -> Any:
    """Return a context that skips the autocast kernels of the dispatch key `key`, such as "AutocastCPU"."""
    if MISSING:
        return nullcontext()
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)))


def mark_as_constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make torch.compile call `function` during tracing and treat its result as a constant.

    `torch.compiler.assume_constant_result` does the same, but imports all of Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def exclude_from_capture(*functions: Any) -> None:
    """Exclude functions, and the functions that they call, from capture by torch.compile's frontend.

    A model that returns gradients runs a backward in Python between two compiled graphs. The frontend would compile this
    backward too, and a compiled backward has no second derivative. `torch.compiler.disable` would import all of Dynamo.
    """
    if MISSING:
        return
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    for function in functions:
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def forget_code(code: CodeType) -> None:
    """Free the compiled graphs of a code object, which torch.compile's frontend would keep."""
    from torch._C._dynamo import eval_frame  # slow to import

    eval_frame.reset_code(code)


def keep_donated_buffers(keep: bool) -> AbstractContextManager[None]:
    """Return a context in which compiled backwards of this thread do not reuse the memory of saved tensors.

    With `keep` False they may reuse it.
    """
    from torch._functorch import config

    return config.patch(donated_buffer=not keep)  # type: ignore[no-any-return]  # torch does not type it


@contextmanager
def guard_hooks() -> Iterator[None]:
    """Make torch.compile guard on module hooks in the block.

    Without these guards a compiled graph ignores hooks that are added or removed later.
    The setting applies to the whole process. `config.patch` is not used: it must be left in the thread that enters it.
    """
    from torch._dynamo import config  # slow to import

    previous, config.skip_nnmodule_hook_guards = config.skip_nnmodule_hook_guards, False
    try:
        yield
    finally:
        config.skip_nnmodule_hook_guards = previous
