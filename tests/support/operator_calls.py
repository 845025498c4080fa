"""Calls of the library's operators as data: recorded while public functions run, repeated, and compared with the reference."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from addnorm.ops.options import GRADIENTS
from support.accuracy import agree
from support.cases import cotangents, f64, gradients, make
from support.inplace_calls import into, nan
from support.memory_layouts import LAYOUTS
from support.oracle import arithmetic, magnitudes
from support.stream_calls import make_cotangents, run

OUTPUTS = {
    "add_norm": ("y",), "add_norm_stream": ("y", "z"), "add_norm_forward": ("y", "z", "stats"), "add_norm_backward": GRADIENTS,
}  # fmt: skip


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


def record_calls(variant, dtypes, shape, layout=None):
    """Return a call with one factor a row, as the operators take it, its output gradients and the operators' calls.

    These are the calls in all uses: with all gradients, with each alone, without, and with out=.
    """
    call = make(variant, dtypes, shape)
    if "row_scale" in call.tensors:
        call.tensors["row_scale"] = call.tensors["row_scale"].expand(shape[:-1]).clone()
    for name in ("residual", "branch") if layout else ():
        call.tensors[name] = LAYOUTS[layout](call.tensors[name])
    grad_outputs = cotangents(call())
    with Recorder() as recorder:
        for wanted in (call.tensors, *([name] for name in call.tensors)):
            gradients(call, grad_outputs, *(name for name in call.tensors if name not in wanted))
        with torch.no_grad():
            outputs = [nan(t) for t in call().values()]
            into(call, outputs[0] if call.norm == "none" else tuple(outputs))
            if call.norm != "none":
                call.y_alone()
                into(call, outputs[0])
    assert recorder.calls
    return call, grad_outputs, recorder.calls


def record_streams(call):
    """Return the calls of the operators in forwards and backwards of n streams: of X' alone, and of all outputs."""
    cotangents = make_cotangents(call)
    with Recorder() as recorder:
        for used in ({"streams": cotangents["streams"]}, cotangents):
            run(call, call.leaves(), used)
    assert recorder.calls
    return recorder.calls


def assert_separate(results, others):
    """Check that no result shares memory with another, or with a tensor of `others`."""
    own = [t.untyped_storage().data_ptr() for t in results if t.numel() > 0]
    all_of_them = own + [t.untyped_storage().data_ptr() for t in others if isinstance(t, Tensor) and t.numel() > 0]
    assert all(all_of_them.count(address) == 1 for address in own)


def assert_equal_references(call, grad_outputs, calls):
    """Check that recorded calls return what the reference returns, within rounding, in memory of their own."""
    z, unit = call()["z"], arithmetic(call)
    terms = magnitudes(call, z, grad_outputs)
    for one in calls:
        actual, expected = one.repeat(change=lambda t: t), one.repeat("_reference")
        if one.name in OUTPUTS:
            assert_separate(actual, one.arguments.values())
        written = [name for name in ("y", "z") if one.arguments.get(name) is not None]
        for name, a, e in zip(OUTPUTS.get(one.name, written), actual, expected, strict=True):
            assert (a.shape, a.dtype) == (e.shape, e.dtype), name
            if name == "z":
                assert a.equal(e)  # the same products and sums, the same mask
            elif name == "stats" and e.numel():
                assert_same_statistics(a, e, z, unit)
            elif e.numel():  # the terms of a 0-d scale are those of all features
                assert agree(a, e, unit, terms[name].reshape(e.shape)), (one.name, name)


def assert_same_statistics(actual, expected, z, unit):
    """Check mean and rstd: the mean's error is relative to the averaged values, that of rstd to rstd."""
    assert agree(actual[..., 0], expected[..., 0], unit, z.to(f64).abs().mean(-1))
    spread = 1 + (z.to(f64).abs().mean(-1) * expected[..., 1]) ** 2  # a rounded mean's effect on a small variance
    assert agree(actual[..., 1], expected[..., 1], unit, expected[..., 1] * spread)
