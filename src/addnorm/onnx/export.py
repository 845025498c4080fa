"""Export of a module to an ONNX file that is checked before it is written.

`export` has many parameters, since most of them are those of `torch.onnx.export`.
"""

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from addnorm._util.arguments import check_bool, check_choice, check_int
from addnorm._util.files import atomic_path, check_writable
from addnorm._util.norms import BY_CODE, KINDS
from addnorm._util.optional import require
from addnorm.fusion.export import export_fused
from addnorm.fusion.fuse import is_fused
from addnorm.onnx.check import check as check_file
from addnorm.onnx.translations import DROPOUT, FORMS, PURPOSE, TRANSLATED, Form, translations
from addnorm.ops.decompositions import decompositions
from addnorm.ops.schema import arguments_of
from addnorm.ops.streams.schema import SCHEMAS as STREAMS
from addnorm.stream.dataflow.snapshot import StateSnapshot

OPSET = 18  # the oldest that torch's exporter writes without a conversion


def export(
    model: nn.Module | torch.export.ExportedProgram,
    inputs: Sequence[Any],
    path: str | Path,
    *,
    form: Form = "standard",
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    opset_version: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    check: bool = True,
) -> Path:
    """Write a module as an ONNX file, and check the file in onnxruntime first.

    The model is a module with layers of this library or one that `addnorm.fuse` has fused, in evaluation mode. It is exported
    without gradients. Boundaries of several streams become elementary operators in every form. The file is written as a whole or
    not at all. Weights of more than 1.6 GB go into a second file beside it, with the ending ".data".

    Args:
        model: the module, or a program that `torch.export.export` returned.
        inputs: positional arguments of an example call. They are the inputs of the check too: use realistic ones.
        path: the file to write.
        form: ONNX operators of an Add & Norm: "standard" (LayerNormalization, RMSNormalization), "skip" (onnxruntime's fused
            operators) or "plain" (elementary operators in float32); see `translations`.
        kwargs: keyword arguments of the example call.
        dynamic_shapes: as in `torch.export.export`. None: all sizes are those of the example call.
        opset_version: version of the operator set. None: 23 if a form other than "plain" contains an RMSNorm, else 18.
        input_names: names of the file's inputs. None: the names of the parameters of `forward`.
        output_names: names of the file's outputs.
        check: run the file in onnxruntime on the CPU and compare it with the model, as `addnorm.onnx.check` does. Pass False
            where onnxruntime has no kernels for the model, as for most of bfloat16.

    Returns:
        The path.

    Raises:
        ValueError: the model is in training mode, or a call draws a dropout mask, or `form` or `opset_version` has another
            value, or the exporter cannot write this version.
        OnnxMismatchError: onnxruntime's results differ from the model's. No file is written.
        RuntimeError: this version of onnxruntime has a faulty LayerNormalization. No file is written.
        ImportError: onnx, onnxscript or onnxruntime is not installed; the message has the command that installs it.
        OSError: the path cannot be written.

    Example:
        >>> import addnorm.onnx
        >>> model = addnorm.nn.Encoder(2, 64, nhead=4, wiring="pre_ln").eval()
        >>> addnorm.onnx.export(model, (torch.randn(1, 8, 64),), "encoder.onnx", form="skip")  # doctest: +SKIP
        PosixPath('encoder.onnx')
    """
    check_choice("form", form, FORMS)
    check_bool("check", check)
    if opset_version is not None:
        check_int("opset_version", opset_version, OPSET)
    for package in ("onnx", "onnxscript"):
        require(package, PURPOSE)
    if check:
        require("onnxruntime", "check an ONNX file, which check=False omits")
    check_writable(path)
    if isinstance(model, nn.Module) and model.training:
        raise ValueError(f"model is in training mode, expected evaluation mode: {DROPOUT}.")
    program = _decompose(_capture(model, tuple(inputs), dict(kwargs or {}), dynamic_shapes))
    calls = _calls(program)
    for call in calls:
        if call.get("dropout_p"):
            raise ValueError(f"dropout_p is {call['dropout_p']} in the model, expected 0: {DROPOUT}.")
    if opset_version is None:
        norms = {BY_CODE[call["norm"]] for call in calls if form != "plain" and call["norm"] in BY_CODE}
        opset_version = max([OPSET, *(names[1] for norm in norms if (names := KINDS[norm].onnx))])
    with _quiet():
        onnx_program: Any = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            custom_translation_table=translations(form, opset_version=opset_version),
            opset_version=opset_version,
            input_names=input_names,
            output_names=output_names,
        )
    written = onnx_program.model.opset_imports.get("", opset_version)
    if written != opset_version:  # the exporter leaves a file that it cannot convert at its own version
        raise ValueError(
            f"opset_version is {opset_version}, expected one that onnxscript can write for this model: leave it out, or use a "
            "lower one."
        )
    expected = model if isinstance(model, nn.Module) else program.module()
    test = (lambda file: check_file(file, expected, inputs, kwargs)) if check else None
    _save(onnx_program, Path(path), test)
    return Path(path)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's exporter, which warns about itself, about conversions and about packages that are not needed."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("torch.onnx", "onnxscript"))}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _capture(
    model: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    if isinstance(model, torch.export.ExportedProgram):
        return model
    with torch.no_grad(), StateSnapshot(model, (inputs, kwargs), contents=False).restored():
        if is_fused(model):
            return export_fused(model, inputs, kwargs, dynamic_shapes=dynamic_shapes)
        return torch.export.export(model, inputs, kwargs, dynamic_shapes=dynamic_shapes)


def _operators(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    """Return the nodes of a program that call operators of this library."""
    return [
        node for node in program.graph.nodes if node.op == "call_function" and str(node.target).startswith("addnorm.")
    ]


def _decompose(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program in which operators that ONNX has no node for, as `add_norm_streams`, are elementary operators."""
    targets = {node.target for node in _operators(program) if not _has_node(node)}
    table = {operator: formula for operator, formula in decompositions(core_aten=False).items() if operator in targets}
    if not table:
        return program
    with _quiet():
        return program.run_decompositions(table)  # type: ignore[no-any-return]  # torch does not type it


def _has_node(node: torch.fx.Node) -> bool:
    """Return whether ONNX has a node for a call: it is no call of several streams, and of no norm that ONNX does not have."""
    name = _name_of(node)
    if name not in TRANSLATED:
        return name not in STREAMS
    norm = BY_CODE.get(arguments_of(name)(*node.args, **node.kwargs).norm)
    return norm is None or KINDS[norm].onnx is not None


def _name_of(node: torch.fx.Node) -> str:
    return node.target._schema.name.removeprefix("addnorm::")  # type: ignore[union-attr,no-any-return]  # an operator


def _calls(program: torch.export.ExportedProgram) -> list[dict[str, Any]]:
    """Return the arguments by name of each operator of this library in a program.

    Raises:
        ValueError: an operator has no translation: it writes in place, or belongs to a backward.
    """
    calls = []
    for node in _operators(program):
        name = _name_of(node)
        if name not in TRANSLATED:
            raise ValueError(
                f"the program contains addnorm.{name}, expected forward calls without out=: call the functions out of place."
            )
        calls.append(arguments_of(name)(*node.args, **node.kwargs)._asdict())
    return calls


def _save(onnx_program: Any, path: Path, test: Callable[[Path], object] | None) -> None:
    """Write the ONNX file, after the file of the weights if torch separates them.

    `test` is called with a draft of the file, before an older file is replaced.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / path.name
        onnx_program.save(draft)
        if test:
            test(draft)
        for file in sorted(Path(folder).iterdir(), key=lambda file: file == draft):  # the weights first
            with atomic_path(path.with_name(file.name)) as temporary:
                file.replace(temporary)
