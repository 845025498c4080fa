"""Routes of the table in docs/routes.md: ways in which PyTorch runs a model, and their results beside those of eager mode.

A route computes the output of a model and the gradients of its parameters for the loss mean(output * cotangent). The routes in
one process are here; route_processes.py has those in two.
"""

import functools
import re
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from addnorm import set_compile_mode
from support.fuzz_bits import is_same
from support.parallel_models import whole

Gradients = dict[str, Tensor | None]
WRAPPER = re.compile(r"^module\.|_checkpoint_wrapped_module\.|_orig_mod\.")  # what wrappers add to names of parameters
SAME_BITS = "same bits"


class Run(NamedTuple):
    """What a route computed: the output, the gradients (None where the route has none), and the number of fused calls."""

    output: Tensor
    gradients: Gradients | None
    calls: int | None = None


def cotangent(output, part=0, parts=1):
    """Return random numbers in the shape of an output; with `parts`, a part of those for all samples."""
    shape = parts * output.shape[0], *output.shape[1:]
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(output.dtype).chunk(parts)[part]


def gradients_of(model):
    """Return the gradients under the names that the parameters had without wrappers."""
    return {WRAPPER.sub("", name): whole(p.grad) for name, p in model.named_parameters()}


def train(call, model, x, part=0, parts=1):
    """Return output and gradients of one training step of a call whose parameters are the model's."""
    model.zero_grad()
    with torch.profiler.profile() as profile:
        output = call(x)
    (output * cotangent(output, part, parts)).mean().backward()
    calls = sum(event.name.startswith("addnorm::") for event in profile.events())
    return Run(output.detach(), gradients_of(model), calls)


@functools.lru_cache(maxsize=1)
def share_model(operation, dtype):
    """Return a model for the routes that do not change it: fusing takes seconds."""
    return operation.build(dtype)


def take_model(operation, dtype):
    """Return a model that may be changed: the shared one, which the next route has to build again."""
    model = share_model(operation, dtype)
    share_model.cache_clear()
    return model


@functools.lru_cache(maxsize=2)
def run_eager(operation, dtype):
    model = share_model(operation, dtype)
    return train(model, model, operation.inputs(dtype))


def run_plain(operation, dtype):
    """Return the result of the formula in plain PyTorch."""
    model = share_model(operation, dtype)
    return train(lambda x: operation.plain(model, x), model, operation.inputs(dtype))


def run_compiled(operation, dtype):
    torch._dynamo.reset()
    model, call = operation.compile(dtype)
    set_compile_mode("op")  # the other mode has other bits
    try:
        return train(call, model, operation.inputs(dtype))
    finally:
        set_compile_mode(None)


def run_exported(operation, dtype, *, strict=False):
    model, x = share_model(operation, dtype), operation.inputs(dtype)
    program = operation.export(model, x, strict=strict).module()
    return train(program, program, x)


def run_aoti(operation, dtype):
    model, x = share_model(operation, dtype), operation.inputs(dtype)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = f"{folder}/model.pt2"
        torch._inductor.aoti_compile_and_package(operation.export(model, x), package_path=path)
        return Run(torch._inductor.aoti_load_package(path)(x), None)


def run_onnx(operation, dtype):
    import onnxruntime

    import addnorm.onnx

    model, x = share_model(operation, dtype), operation.inputs(dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = addnorm.onnx.export(model.eval(), (x,), Path(folder) / "model.onnx", form="skip")
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return Run(torch.from_numpy(output), None)


def run_traced(operation, dtype):
    x = operation.inputs(dtype)
    model = operation.traceable(share_model(operation, dtype), x)
    return train(torch.jit.trace(model, (x,), check_trace=False), model, x)


def run_checkpointed(operation, dtype):
    model = share_model(operation, dtype)
    return train(lambda x: checkpoint(model, x, use_reentrant=False), model, operation.inputs(dtype))


def run_wrapped(operation, dtype, units="layers", **options):
    """Return the result of a model with checkpoints around modules."""
    model = take_model(operation, dtype)
    modules = {*getattr(operation, units)(model)}
    wrapper = functools.partial(checkpoint_wrapper, **options)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=modules.__contains__)
    return train(model, model, operation.inputs(dtype))


def keep_products(context, operator, *args, **kwargs):
    """Save the results of matrix products and recompute the others, norms among them."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, keep_products)
ROUTES = {
    "eager": run_eager,
    "torch.compile": run_compiled,
    "export": run_exported,
    "export, strict": functools.partial(run_exported, strict=True),
    "AOTInductor": run_aoti,
    "ONNX": run_onnx,
    "jit.trace": run_traced,
    "checkpoint, reentrant": functools.partial(
        run_wrapped, units="reentrant_units", checkpoint_impl=CheckpointImpl.REENTRANT
    ),
    "checkpoint": run_checkpointed,
    "apply_activation_checkpointing": run_wrapped,
    "checkpoint, selective": functools.partial(run_wrapped, context_fn=SELECTIVE),
}


def largest_difference(actual, expected):
    """Return the largest difference of a tensor in parts of its largest element.

    A gradient that is zero but for rounding, as a key's bias has in attention, is measured by the largest gradient of all.
    """
    assert [name for name in expected if expected[name] is not None]
    sizes = {name: float(t.abs().max()) for name, t in expected.items() if t is not None}
    largest, worst = max(sizes.values()), 0.0
    for name, t in expected.items():
        other = actual.get(name)
        if t is None:
            assert other is None, name
            continue
        assert other is not None, f"{name} has no gradient"
        assert (other.shape, other.dtype) == (t.shape, t.dtype)
        size = sizes[name] if sizes[name] > 1e-6 * largest else largest
        error = float((other.double() - t.double()).abs().max()) / size
        assert error == error, f"{name} is NaN"
        worst = max(worst, error)
    return worst


def compare(actual, expected):
    """Return "same bits" or the largest relative difference of output and gradients; None where the route has none."""
    result = {}
    for name, a, e in (
        ("outputs", {"output": actual.output}, {"output": expected.output}),
        ("gradients", actual.gradients, expected.gradients),
    ):
        if a is None:
            result[name] = None
            continue
        worst = largest_difference(a, e)
        equal = all(t is None or is_same(a[key], t) for key, t in e.items())
        result[name] = SAME_BITS if equal else worst
    return {**result, "fused": None if actual.calls is None else actual.calls > 0}


def measure(route, operation, dtype):
    """Return the comparison of a route with eager mode, and of eager mode with plain PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, while it captures
        eager = run_eager(operation, dtype)
        return (
            compare(eager, run_plain(operation, dtype))
            if route == "eager"
            else compare(ROUTES[route](operation, dtype), eager)
        )


def measure_error(operation):
    """Return the largest error of float32 in eager mode against float64, in parts of each tensor's largest element."""
    single, model = run_eager(operation, torch.float32), operation.build_unfused(torch.float64)
    double = train(lambda x: operation.plain(model, x), model, operation.inputs(torch.float64))

    def widen(tensors):
        return {name: None if t is None else t.double() for name, t in tensors.items()}

    outputs = largest_difference(widen({"output": single.output}), {"output": double.output})
    return max(outputs, largest_difference(widen(single.gradients), double.gradients))
