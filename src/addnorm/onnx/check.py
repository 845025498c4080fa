"""Comparison of an ONNX file in onnxruntime with the program it was exported from."""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from addnorm._util.numbers import format_number
from addnorm._util.optional import require
from addnorm.fusion.rng_replay import copy_in_dtype
from addnorm.fusion.tolerance import compare, largest_errors
from addnorm.stream.dataflow.snapshot import preserve_state

# Before 1.30 the results of onnxruntime's CPU kernels are those of a variance E[x^2] - E[x]^2: LayerNormalization until 1.26,
# SkipLayerNormalization, to which it fuses Add and LayerNormalization itself, until 1.29. The result is wrong, or NaN, for
# rows whose mean is far larger than their deviation, such as constant rows.
MINIMUM = (1, 30)
AFFECTED = ("LayerNormalization", "SkipLayerNormalization")
# onnxruntime's error against float64 may be GROWTH torch's own. Both round the same formula and differ in the order of sums and
# in the steps that they fuse, so the ratio does not depend on width and depth: it was at most 1.6 in 54 runs of encoders with 1
# to 6 layers of width 16 to 128, in each form, in float32 and float16. Errors are maxima, which vary by another factor of two.
GROWTH = 2
# In an output with fewer elements the largest error may by chance be small: each node may then add a rounding, in a random
# direction.
FEW = 64


class OnnxMismatchError(RuntimeError):
    """Failed check of an ONNX file: onnxruntime's results differ from torch's by more than the tolerance.

    Example:
        >>> import addnorm.onnx
        >>> try:
        ...     error = addnorm.onnx.check("model.onnx", model, (x,))
        ... except addnorm.onnx.OnnxMismatchError as mismatch:
        ...     print(mismatch)  # doctest: +SKIP
    """


def check(
    path: str | Path, program: Callable[..., Any], inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> float:
    """Run an ONNX file in onnxruntime on the CPU and compare its outputs with those of the program.

    A copy of the program runs in float64. The tolerance for the difference from the program is four times the program's own error
    against float64, plus one rounding of the coarsest dtype in the file. (In an output of less than 64 elements this rounding is
    multiplied by the square root of the number of nodes.) Without a float64 result (for a callable that is no module, or a
    program with fixed dtypes), the tolerance is 256 such roundings, at most a tenth of the largest magnitude.

    Args:
        path: the file.
        program: the module, or another callable, that returns the expected outputs.
        inputs: positional arguments. The tensors in `inputs` and `kwargs`, in their order, are the inputs of the file.
        kwargs: keyword arguments.

    Returns:
        The largest difference, relative to the largest magnitude of the same output.

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
    tensors = _list_tensors((tuple(inputs), kwargs))
    names = [entry.name for entry in session.get_inputs()]
    if len(names) != len(tensors):
        raise OnnxMismatchError(
            f"{path} has {len(names)} inputs, expected {len(tensors)}, one for each tensor of the call."
        )
    feeds = {name: tensor.detach().cpu().numpy() for name, tensor in zip(names, tensors, strict=True)}
    expected = _run(program, tuple(inputs), kwargs)
    actual = [torch.from_numpy(array) for array in session.run(None, feeds)]
    if len(actual) != len(expected):
        raise OnnxMismatchError(f"{path} has {len(actual)} outputs, expected {len(expected)}, as the program returns.")
    try:
        exact = _run(program, tuple(inputs), kwargs, torch.float64)
    except Exception:  # a program that fixes its dtypes fails with any error
        exact = []
    exact = exact if len(exact) == len(expected) else []
    eps = max((torch.finfo(dtype).eps for dtype in _list_dtypes(onnx, graph, (*tensors, *expected))), default=0.0)
    differences = [0.0]
    for k, (result, t, truth) in enumerate(itertools.zip_longest(actual, expected, exact)):
        rounding = eps * math.sqrt(len(graph.node)) if t.numel() < FEW else eps
        differences.append(_difference(f"Output {k}", result, t, truth, rounding))
    return max(differences)


def _list_tensors(values: Any) -> list[Tensor]:
    return [value for value in _pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _run(
    program: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any], wide: torch.dtype | None = None
) -> list[Tensor]:
    """Return the outputs of a program, or with `wide` those of a copy in that dtype; the program does not change.

    With `wide` a program that is no module has no outputs.
    """
    with torch.no_grad():
        if not isinstance(program, nn.Module):
            return [] if wide else _list_tensors(program(*inputs, **kwargs))
        with preserve_state(program, (inputs, kwargs)) as state:
            if wide:
                program, (inputs, kwargs) = copy_in_dtype(program, (inputs, kwargs), state.tensors, wide)
            outputs: list[Tensor] = state.copy_aliases(_list_tensors(program(*inputs, **kwargs)))
            return outputs


def _list_dtypes(onnx: Any, graph: Any, tensors: Sequence[Tensor]) -> set[torch.dtype]:
    """Return the floating-point dtypes of inputs, outputs, weights and casts."""
    numbers = {onnx.TensorProto.FLOAT16: torch.float16, onnx.TensorProto.BFLOAT16: torch.bfloat16}
    # Attributes, such as epsilon, are float32 in a file that is float64 otherwise.
    dtypes = {torch.float32} | {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    casts = {a.i for node in graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"}
    return dtypes | {numbers[k] for k in casts | {value.data_type for value in graph.initializer} if k in numbers}


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


def _difference(name: str, actual: Tensor, expected: Tensor, exact: Tensor | None, eps: float) -> float:
    """Return an output's largest difference relative to its magnitude. Raise an error if it exceeds the tolerance."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise OnnxMismatchError(
            f"{name} is a {actual.dtype} tensor of shape {tuple(actual.shape)} in onnxruntime, "
            f"expected {expected.dtype} and {tuple(expected.shape)}."
        )
    before = {name: expected.detach().cpu()}
    errors = {} if exact is None else largest_errors(before, {name: exact.detach().cpu()})
    grown = {name: GROWTH * error for name, error in errors.items()}
    (difference,) = compare(before, {name: actual}, grown, eps)
    scale = difference.magnitude or 1.0
    if not difference.holds:
        raise OnnxMismatchError(
            f"{name} differs by {format_number(difference.max_abs / scale, 2)} of its largest magnitude in onnxruntime, "
            f"tolerance {format_number(difference.tolerance / scale, 2)}: try form='plain'."
        )
    return difference.max_abs / scale
