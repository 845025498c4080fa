"""onnxruntime as a peer: its fused operators SkipLayerNormalization and SkipSimplifiedLayerNormalization.

Inputs and outputs are bound to the storage of torch's tensors beforehand, so a call neither copies nor allocates. That is
the best that onnxruntime can do, and comparable to `out=`.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from addnorm._util.norms import KINDS
from addnorm.bench.case import Case
from addnorm.bench.environment import version_of
from addnorm.bench.jobs import EPS, Call, Set

Tensors = dict[str, Tensor]

OPERATORS = {norm: kind.onnx[2] for norm, kind in KINDS.items()}
OUTPUTS = {"forward": "y", "reuse": "y", "forward_stream": "y, , , z"}  # those between are statistics
MODEL = """<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]> add_norm ({inputs}) => ({outputs}) {{
    {names} = com.microsoft.{operator} <epsilon = {eps}> ({arguments})
}}"""  # versions old enough for the runtimes in use


def status() -> str:
    """Return the version of onnxruntime, or a text that says what is not installed."""
    missing = [name for name in ("onnxruntime", "onnx") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    return version_of("onnxruntime") or "installed"  # under the name of another build, such as onnxruntime-gpu


def applies(case: Case) -> bool:
    """Return whether onnxruntime is installed and supports the case: float32 on CPU, without gradients."""
    return case.dtype == "float32" and case.job in OUTPUTS and "not installed" not in status()


def bound(case: Case, tensors: Set) -> Call:
    """Return a function without arguments that runs the case's operator on `case.threads` threads and returns y or (y, z)."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = case.threads, 1
    inputs = dict(zip("xswb", [t for t in tensors.args[:4] if t is not None], strict=False))
    outputs = {name: torch.empty_like(inputs["x"]) for name in OUTPUTS[case.job] if name.isalpha()}
    model = make_model(case, inputs, outputs)
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


def make_model(case: Case, inputs: Tensors, outputs: Tensors) -> bytes:
    """Return a serialized ONNX model with the case's operator as its only node."""
    from onnx import parser

    typed = [", ".join(f"float{[*t.shape]} {name}" for name, t in some.items()) for some in (inputs, outputs)]
    text = MODEL.format(
        inputs=typed[0], outputs=typed[1], names=OUTPUTS[case.job], operator=OPERATORS[case.norm], eps=EPS[case.norm],
        arguments=", ".join(inputs),
    )  # fmt: skip
    return bytes(parser.parse_model(text).SerializeToString())
