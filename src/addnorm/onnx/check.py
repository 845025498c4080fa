"""Comparison of an ONNX file in onnxruntime with the program it was exported from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from addnorm._util.optional import require

# Before 1.30 onnxruntime's CPU kernels compute the variance as E[x^2] - E[x]^2: LayerNormalization until 1.26,
# SkipLayerNormalization, to which it fuses Add and LayerNormalization itself, until 1.29. The result is wrong, or NaN, for
# rows whose mean is far larger than their deviation, such as constant rows.
MINIMUM = (1, 30)
AFFECTED = ("LayerNormalization", "SkipLayerNormalization")
# Largest difference in parts of an output's largest magnitude: sums in another order, through all layers of a model.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2}


class OnnxMismatchError(RuntimeError):
    """Failed check of an ONNX file: onnxruntime's results differ from torch's by more than the tolerance."""


def check(
    path: str | Path, program: Callable[..., Any], inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> float:
    """Run an ONNX file in onnxruntime on the CPU and compare its outputs with those of the program.

    The tolerance is a share of the largest magnitude of each output: 1e-4, but 1e-2 if an input, an output or a weight is
    float16, and 1e-6 if all are float64.

    Args:
        path: the file.
        program: the module, or another callable, that returns the expected outputs.
        inputs: positional arguments; the tensors in them, and in `kwargs`, are the inputs of the file, in their order.
        kwargs: keyword arguments.

    Returns:
        The largest difference in shares of the largest magnitude of its output.

    Raises:
        OnnxMismatchError: an output differs by more than the tolerance, in its shape or in its dtype.
        RuntimeError: this version of onnxruntime has a faulty LayerNormalization.
        ImportError: onnx or onnxruntime is not installed; the message has the command that installs it.

    Example:
        >>> import addnorm.onnx
        >>> addnorm.onnx.check("model.onnx", model, (x,))  # doctest: +SKIP
        1.2e-07
    """
    onnxruntime = require("onnxruntime", "check an ONNX file")
    onnx = require("onnx", "check an ONNX file")
    graph = onnx.load(str(path), load_external_data=False).graph
    check_version(onnxruntime.__version__, {node.op_type for node in graph.node})
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    kwargs = dict(kwargs or {})
    tensors = [value for value in _pytree.tree_leaves((tuple(inputs), kwargs)) if isinstance(value, Tensor)]
    names = [entry.name for entry in session.get_inputs()]
    if len(names) != len(tensors):
        raise OnnxMismatchError(
            f"{path} has {len(names)} inputs, expected {len(tensors)}, one for each tensor of the call."
        )
    feeds = {name: tensor.detach().cpu().numpy() for name, tensor in zip(names, tensors, strict=True)}
    with torch.no_grad():
        expected = [value for value in _pytree.tree_leaves(program(*inputs, **kwargs)) if isinstance(value, Tensor)]
    actual = [torch.from_numpy(array) for array in session.run(None, feeds)]
    if len(actual) != len(expected):
        raise OnnxMismatchError(f"{path} has {len(actual)} outputs, expected {len(expected)}, as the program returns.")
    half = onnx.TensorProto.FLOAT16
    in_half = any(value.data_type == half for value in graph.initializer)
    dtypes = {torch.float16} if in_half else {tensor.dtype for tensor in (*tensors, *expected)}
    tolerance = max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    return max(
        (_difference(*pair, tolerance) for pair in zip(range(len(actual)), actual, expected, strict=True)), default=0.0
    )


def check_version(version: str, operators: set[str]) -> None:
    """Raise RuntimeError if this version of onnxruntime computes one of the operators wrong."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    faulty = sorted(operators & {*AFFECTED})
    if numbers < MINIMUM and faulty:
        minimum = ".".join(map(str, MINIMUM))
        raise RuntimeError(
            f"onnxruntime is {version}, expected {minimum} or later: its {faulty[0]} is wrong for rows whose mean is far larger "
            "than their deviation. Install a later one, or export with form='plain'."
        )


def _difference(index: int, actual: Tensor, expected: Tensor, tolerance: float) -> float:
    expected = expected.detach().cpu()
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise OnnxMismatchError(
            f"Output {index} is a {actual.dtype} tensor of shape {tuple(actual.shape)} in onnxruntime, "
            f"expected {expected.dtype} and {tuple(expected.shape)}."
        )
    if not actual.is_floating_point() or not actual.numel():
        if not actual.equal(expected):
            raise OnnxMismatchError(f"Output {index} differs in onnxruntime, expected equal {expected.dtype} values.")
        return 0.0
    same = actual.double().nan_to_num(), expected.double().nan_to_num()
    scale = float(same[1].abs().max()) or 1.0
    difference = float((same[0] - same[1]).abs().max()) / scale
    if not actual.isnan().equal(expected.isnan()):
        difference = float("nan")
    if not difference <= tolerance:
        raise OnnxMismatchError(
            f"Output {index} differs by {difference:.1e} of its largest magnitude in onnxruntime, "
            f"tolerance {tolerance:.0e}: try form='plain'."
        )
    return difference
