"""Calls of the library's operators as data: recorded while public functions run, and repeated."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from support.cases import gradients
from support.inplace_calls import into, nan
from support.stream_calls import make_cotangents, run


class OperatorCall(NamedTuple):
    """An operator's name, without its overload, and its arguments by name."""

    name: str
    arguments: dict[str, Any]

    def repeat(self, suffix="", change=Tensor.clone):
        """Call the operator, or with the suffix its reference, on changed tensors; return its outputs, or what it has written."""
        arguments = tree_map_only(Tensor, change, self.arguments)
        outputs = getattr(torch.ops.addnorm, self.name + suffix).default(**arguments)
        if outputs is None:
            outputs = tuple(t for name in ("y", "z") if (t := arguments[name]) is not None)
        return outputs if isinstance(outputs, tuple | list) else (outputs,)


class Recorder(TorchDispatchMode):
    """Dispatch mode that records the calls of the library's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "addnorm":
            names = [argument.name for argument in func._schema.arguments]
            arguments = dict(zip(names, args, strict=False)) | (kwargs or {})
            detached = tree_map_only(Tensor, Tensor.detach, arguments)
            self.calls.append(OperatorCall(func._schema.name.removeprefix("addnorm::"), detached))
        return func(*args, **kwargs or {})


def record(call, grad_outputs):
    """Return the calls of the operators in all uses of a call: with all gradients, with each alone, without, and with out=."""
    with Recorder() as recorder:
        for wanted in (call.tensors, *([name] for name in call.tensors)):
            gradients(call, grad_outputs, *(name for name in call.tensors if name not in wanted))
        with torch.no_grad():
            outputs = [nan(t) for t in call().values()]
            into(call, outputs[0] if call.norm == "none" else tuple(outputs))
            if call.norm != "none":
                call.y_alone()
                into(call, outputs[0])
    return recorder.calls


def record_streams(call):
    """Return the calls of the operators in a forward and backward of n streams."""
    cotangents = make_cotangents(call)
    with Recorder() as recorder:
        run(call, call.leaves(), cotangents)
    return recorder.calls
