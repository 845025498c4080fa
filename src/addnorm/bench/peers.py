"""The operation in other libraries: onnxruntime on a CPU; Liger, flash-attn and QuACK on a GPU.

onnxruntime has fused operators, SkipLayerNormalization and SkipSimplifiedLayerNormalization. Inputs and outputs are bound to
the storage of torch's tensors beforehand, so a call neither copies nor allocates. That is the best that onnxruntime can do,
and comparable to `out=`.

Kernel libraries are called as their own documentation calls them. Each function returns a call of (residual, branch, weight,
bias) that returns y, or (y, z). Peers take the branch first, and the residual as an option. Signatures: liger-kernel 0.8.5,
flash-attn's main branch, quack-kernels 0.6.5.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from addnorm._util.norms import KINDS
from addnorm.bench.case import Call, Case, Condition, has
from addnorm.bench.environment import version_of
from addnorm.bench.jobs import DROPOUT, DTYPES, EPS, JOBS, Set, Tensors, compiled, eager, ours

# ---------------------------------------------------------------------------------------------------------- onnxruntime

OUTPUTS = {"forward": "y", "reuse": "y", "forward_stream": "y, , , z"}  # the outputs between are statistics
MODEL = """<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]> add_norm ({inputs}) => ({outputs}) {{
    {names} = com.microsoft.{operator} <epsilon = {eps}> ({arguments})
}}"""  # versions old enough for the runtimes in use


def onnxruntime_status() -> str:
    """Return the version of onnxruntime, or a text that says what is not installed."""
    missing = [name for name in ("onnxruntime", "onnx") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    return version_of("onnxruntime") or "installed"  # under the name of another build, such as onnxruntime-gpu


def onnxruntime_applies(case: Case) -> bool:
    """Return whether onnxruntime is installed and supports the case: float32 on CPU, without gradients."""
    supports = case.dtype == "float32" and case.job in OUTPUTS and _onnx_operator(case) is not None
    return supports and "not installed" not in onnxruntime_status()


def _onnx_operator(case: Case) -> str | None:
    """Return the name of onnxruntime's operator of add and norm, or None if it has none."""
    names = KINDS[case.norm].onnx
    return names and names[2]


def bind_onnxruntime(case: Case, tensors: Set) -> Call:
    """Return a function without arguments that runs the case's operator on `case.threads` threads and returns y or (y, z)."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = case.threads, 1
    inputs = dict(zip("xswb", [t for t in tensors.args[:4] if t is not None], strict=False))
    outputs = {name: torch.empty_like(inputs["x"]) for name in OUTPUTS[case.job] if name.isalpha()}
    model = make_onnx(case, inputs, outputs)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for bind, some in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for name, t in some.items():
            bind(name, "cpu", 0, np.float32, tuple(t.shape), t.data_ptr())
    result = (*outputs.values(),) if len(outputs) > 1 else outputs["y"]
    return partial(_run, session, binding, result, inputs)


def _run(session: Any, binding: Any, result: Any, inputs: Tensors) -> Any:
    """Run the model, and return its outputs. `inputs` keeps the inputs alive, since the binding holds pointers only."""
    session.run_with_iobinding(binding)
    return result


def make_onnx(case: Case, inputs: Tensors, outputs: Tensors) -> bytes:
    """Return a serialized ONNX model with the case's operator as its only node."""
    from onnx import parser

    typed = [", ".join(f"float{[*t.shape]} {name}" for name, t in some.items()) for some in (inputs, outputs)]
    text = MODEL.format(
        inputs=typed[0], outputs=typed[1], names=OUTPUTS[case.job], operator=_onnx_operator(case), eps=EPS[case.norm],
        arguments=", ".join(inputs),
    )  # fmt: skip
    return bytes(parser.parse_model(text).SerializeToString())


# ----------------------------------------------------------------------------------------------------- kernels for GPUs


class Variant(NamedTuple):
    """One implementation of the operation, such as addnorm or a kernel library.

    Attributes:
        title: name in tables.
        make: function of a case that returns the call.
        fits: function of a case that returns whether the variant supports it.
        package: name of the package that must be installed.
        module: name by which the package is imported.
    """

    title: str
    make: Callable[[Case], Call]
    fits: Condition = lambda case: True
    package: str = ""
    module: str = ""


def liger(case: Case) -> Call:
    """Return a call of `LigerFusedAddRMSNormFunction`."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    # Offset 0 and the casting of Llama are its defaults. Not in place: that would overwrite the gradient of y, which the next
    # call reads again.
    more, place = (EPS[case.norm], 0.0, "llama", False), slice(None) if JOBS[case.job].stream else 0
    return lambda x, s, w, b: LigerFusedAddRMSNormFunction.apply(s, x, w, *more)[place]


def flash_attn(case: Case) -> Call:
    """Return a call of flash-attn's `layer_norm_fn` or `rms_norm_fn`."""
    from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn

    call = {"layer": layer_norm_fn, "rms": rms_norm_fn}[case.norm]
    job = JOBS[case.job]
    options: Any = {"eps": EPS[case.norm], "prenorm": job.stream, "dropout_p": DROPOUT if job.dropout else 0.0}
    return lambda x, s, w, b: call(s, w, b, residual=x, **options)


def quack(case: Case) -> Call:
    """Return a call of QuACK's `rmsnorm`."""
    from quack import rmsnorm

    options = {"eps": EPS[case.norm], "prenorm": JOBS[case.job].stream}
    return lambda x, s, w, b: rmsnorm(s, w, residual=x, **options)


def _fits_flash_attn(case: Case) -> bool:
    """Return whether flash-attn has the norm, and one token of the widest tensor that its kernel keeps has at most 64 KB."""
    dtypes = DTYPES[case.dtype]
    widest = dtypes.stream if JOBS[case.job].backward else dtypes.branch
    return case.norm in ("layer", "rms") and int(case.d * widest.itemsize) <= 65536


# QuACK's LayerNorm adds no residual.
fits_quack = has(norm="rms", job=[name for name, job in JOBS.items() if not job.dropout])
VARIANTS = {
    "eager": Variant("eager", eager),
    "compile": Variant("torch.compile", compiled),
    "liger": Variant(
        "Liger", liger, lambda case: fits_quack(case) and case.dtype != "mixed", "liger-kernel", "liger_kernel"
    ),
    "flash_attn": Variant("flash-attn", flash_attn, _fits_flash_attn, "flash-attn", "flash_attn"),
    "quack": Variant("QuACK", quack, fits_quack, "quack-kernels", "quack"),
    "addnorm": Variant("addnorm", ours),
}


def list_versions() -> dict[str, str | None]:
    """Return the version of each kernel library, or None where it is not installed."""
    return {
        name: (version_of(one.package) or "of unknown version") if find_spec(one.module) else None
        for name, one in VARIANTS.items() if one.module
    }  # fmt: skip


def choose(case: Case, requested: Sequence[str] | None = None) -> list[str]:
    """Return the `requested` variants (None: all) that are installed and support the case and its device.

    A requested variant that this machine cannot run is named in a warning.
    """
    missing = {
        name: f"{VARIANTS[name].package} is not installed" if version is None else "it needs a CUDA device"
        for name, version in list_versions().items() if version is None or case.device != "cuda"
    }  # fmt: skip
    for name in requested or ():
        if name in missing:
            warnings.warn(f"{name} is not measured: {missing[name]}.", stacklevel=2)
    named = {*(requested or VARIANTS)} - missing.keys()
    return [name for name, one in VARIANTS.items() if name in named and one.fits(case)]
