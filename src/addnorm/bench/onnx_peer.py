"""onnxruntime as a peer: its fused operators SkipLayerNormalization and SkipSimplifiedLayerNormalization.

Inputs and outputs are bound to the storage of torch's tensors beforehand, so a call neither copies nor allocates. That is
the best that onnxruntime can do, and comparable to `out=`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from addnorm.bench.cases import EPS, Call
from addnorm.bench.harness import Case

OPERATORS = {"layer": "SkipLayerNormalization", "rms": "SkipSimplifiedLayerNormalization"}
STREAM_OUTPUT = ["y", "", "", "z"]  # those between are statistics
OUTPUTS = {"forward": ["y"], "reuse": ["y"], "forward_stream": STREAM_OUTPUT}
OPSET, IR_VERSION = 17, 10  # old enough for the runtimes in use


def status() -> str:
    """Return the version of onnxruntime, or why it is not measured."""
    missing = [name for name in ("onnxruntime", "onnx") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    try:
        return version("onnxruntime")
    except PackageNotFoundError:  # under the name of another build, such as onnxruntime-gpu
        return "installed"


def applies(case: Case) -> bool:
    """Return whether onnxruntime is installed and has this operation: float32 on CPU, without gradients."""
    return case.dtype == "float32" and case.job in OUTPUTS and "not installed" not in status()


def bound(case: Case, args: list[Tensor]) -> Call:
    """Return a function that runs a model of one node, on as many threads as torch has in this case, and returns y or (y, z)."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = case.threads, 1
    session = onnxruntime.InferenceSession(model(case), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    tensors_in = dict(zip(_inputs(case), args, strict=False))
    tensors_out = {name: torch.empty_like(args[0]) for name in OUTPUTS[case.job] if name}
    for bind, tensors in ((binding.bind_input, tensors_in), (binding.bind_output, tensors_out)):
        for name, t in tensors.items():
            bind(name, "cpu", 0, np.float32, tuple(t.shape), t.data_ptr())
    # The binding holds pointers only: `args` live as long as the case is measured, the outputs in this function.
    outputs, run = tuple(tensors_out.values()), session.run_with_iobinding  # which returns None
    result = outputs if len(outputs) > 1 else outputs[0]
    return lambda *_: run(binding) or result


def model(case: Case) -> bytes:
    """Return a model of one node, serialized."""
    from onnx import TensorProto, helper

    sizes = {"x": [case.rows, case.d], "s": [case.rows, case.d], "w": [case.d], "b": [case.d]}
    names = _inputs(case)
    node = helper.make_node(
        OPERATORS[case.norm], names, OUTPUTS[case.job], domain="com.microsoft", epsilon=EPS[case.norm]
    )
    graph = helper.make_graph(
        [node],
        "add_norm",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes[name]) for name in names],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes["x"]) for name in OUTPUTS[case.job] if name],
    )
    domains = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=domains, ir_version=IR_VERSION).SerializeToString())


def _inputs(case: Case) -> list[str]:
    return ["x", "s", "w", "b"] if case.norm == "layer" else ["x", "s", "w"]
