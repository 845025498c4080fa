"""onnxruntime as a peer: its fused operators SkipLayerNormalization and SkipSimplifiedLayerNormalization.

Inputs and outputs are bound to the storage of torch's tensors beforehand, so a call neither copies nor allocates. That is
the best that onnxruntime can do, and comparable to `out=`.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from addnorm._util.norms import KINDS
from addnorm.bench.case import Case
from addnorm.bench.jobs import EPS, Call, Set

OPERATORS = {norm: kind.onnx[2] for norm, kind in KINDS.items()}
OUTPUTS = {"forward": ["y"], "reuse": ["y"], "forward_stream": ["y", "", "", "z"]}  # those between are statistics
OPSET, IR_VERSION = 17, 10  # old enough for the runtimes in use


def status() -> str:
    """Return the version of onnxruntime, or a text that says what is not installed."""
    missing = [name for name in ("onnxruntime", "onnx") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    try:
        return version("onnxruntime")
    except PackageNotFoundError:  # under the name of another build, such as onnxruntime-gpu
        return "installed"


def applies(case: Case) -> bool:
    """Return whether onnxruntime is installed and supports the case: float32 on CPU, without gradients."""
    return case.dtype == "float32" and case.job in OUTPUTS and "not installed" not in status()


def bound(case: Case, tensors: Set) -> Call:
    """Return a function without arguments that runs the case's operator on `case.threads` threads and returns y or (y, z)."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = case.threads, 1
    args = [t for t in tensors.args[:4] if t is not None]
    session = onnxruntime.InferenceSession(model(case, args), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    outputs = {name: torch.empty_like(args[0]) for name in OUTPUTS[case.job] if name}
    for bind, some in ((binding.bind_input, dict(zip("xswb", args, strict=False))), (binding.bind_output, outputs)):
        for name, t in some.items():
            bind(name, "cpu", 0, np.float32, tuple(t.shape), t.data_ptr())
    result = (*outputs.values(),) if len(outputs) > 1 else outputs["y"]
    return partial(_run, session, binding, result, args)


def _run(session: Any, binding: Any, result: Any, args: list[Tensor]) -> Any:
    """Run the model, and return its outputs. `args` keeps the inputs alive, since the binding holds pointers only."""
    session.run_with_iobinding(binding)
    return result


def model(case: Case, args: list[Tensor]) -> bytes:
    """Return a serialized ONNX model with the case's operator as its only node."""
    from onnx import TensorProto, helper

    names = "xswb"[: len(args)]
    node = helper.make_node(
        OPERATORS[case.norm], [*names], OUTPUTS[case.job], domain="com.microsoft", epsilon=EPS[case.norm]
    )
    sizes = {name: [*t.shape] for name, t in zip(names, args, strict=True)}
    sizes |= {name: sizes["x"] for name in OUTPUTS[case.job] if name}
    infos = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in sizes.items()}
    graph = helper.make_graph(
        [node], "add_norm", [infos.pop(name) for name in names], list(infos.values())
    )  # fmt: skip
    domains = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=domains, ir_version=IR_VERSION).SerializeToString())
