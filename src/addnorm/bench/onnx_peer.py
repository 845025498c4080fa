"""onnxruntime as a peer, where it is installed: its fused operators SkipLayerNormalization and SkipSimplifiedLayerNormalization.

Inputs and outputs are bound to the memory of torch's tensors beforehand, so that a call neither copies nor asks for
memory: the best that onnxruntime can do, and comparable to writing into given memory.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from addnorm.bench.expressions import EPS, Call
from addnorm.bench.jobs import Cell

OPERATORS = {"layer": "SkipLayerNormalization", "rms": "SkipSimplifiedLayerNormalization"}
STREAM_OUTPUT = ["y", "", "", "z"]  # those between are statistics
OUTPUTS = {"forward": ["y"], "reuse": ["y"], "forward_stream": STREAM_OUTPUT}
OPSET, IR_VERSION = 17, 10  # old enough for the runtimes in use


def status() -> str:
    """Its version, or why it is not measured."""
    missing = [name for name in ("onnxruntime", "onnx") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    try:
        return version("onnxruntime")
    except PackageNotFoundError:  # under the name of another build, such as onnxruntime-gpu
        return "installed"


def applies(cell: Cell) -> bool:
    """Whether it is there, and has this operation: float32 on CPU, without gradients."""
    return cell.dtype == "float32" and cell.job in OUTPUTS and "not installed" not in status()


def bound(cell: Cell, args: list[Tensor]) -> Call:
    """A call of a model of the one node, on as many threads as torch has in this cell; returns y, or (y, z)."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = cell.threads, 1
    session = onnxruntime.InferenceSession(model(cell), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    given = dict(zip(_inputs(cell), args, strict=False))
    found = {name: torch.empty_like(args[0]) for name in OUTPUTS[cell.job] if name}
    for bind, tensors in ((binding.bind_input, given), (binding.bind_output, found)):
        for name, t in tensors.items():
            bind(name, "cpu", 0, np.float32, tuple(t.shape), t.data_ptr())
    # The binding knows pointers alone: `args` live as long as the cell is measured, the outputs in this function.
    outputs, run = tuple(found.values()), session.run_with_iobinding  # which returns None
    result = outputs if len(outputs) > 1 else outputs[0]
    return lambda *_: run(binding) or result


def model(cell: Cell) -> bytes:
    """The one node as a serialized model."""
    from onnx import TensorProto, helper

    sizes = {"x": [cell.rows, cell.d], "s": [cell.rows, cell.d], "w": [cell.d], "b": [cell.d]}
    names = _inputs(cell)
    node = helper.make_node(
        OPERATORS[cell.norm], names, OUTPUTS[cell.job], domain="com.microsoft", epsilon=EPS[cell.norm]
    )
    graph = helper.make_graph(
        [node],
        "add_norm",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes[name]) for name in names],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes["x"]) for name in OUTPUTS[cell.job] if name],
    )
    domains = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=domains, ir_version=IR_VERSION).SerializeToString())


def _inputs(cell: Cell) -> list[str]:
    return ["x", "s", "w", "b"] if cell.norm == "layer" else ["x", "s", "w"]
