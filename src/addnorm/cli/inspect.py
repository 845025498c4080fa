"""`addnorm inspect`: a model's residual streams with their proof; with `--report`, a page about the model.

The report's path and packages are checked before the model runs.
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import addnorm
from addnorm import report as pages
from addnorm._util.optional import require
from addnorm.cli._model import (
    ModelOptions,
    describe_failure,
    describe_inputs,
    inspect_model,
    load_model,
    model_facts,
    token_mask,
    with_model,
)
from addnorm.cli._output import (
    ArgumentError,
    print_json,
    print_message,
    print_notes,
    save_result,
    stderr_if_terminal,
    stdout,
    working,
)
from addnorm.cli._probe import NoGradientsError, ProbeLoss, run_step
from addnorm.stream.ablate import Ablation
from addnorm.stream.find.inspection import Inspection
from addnorm.stream.models.hf import first_line, quiet
from addnorm.stream.models.load import LoadedModel
from addnorm.stream.record.recording import Recording

__all__ = ["check_report", "run"]


@with_model
def run(model: ModelOptions, report: Path | None, as_json: bool, float64: bool) -> str | None:
    """Find the residual streams of a model and prove their equations."""
    if report is not None:
        check_report(report)
    loaded = load_model(model)
    inspection = inspect_model(loaded, float64)
    if as_json:
        print_json({**model_facts(loaded), **inspection.to_dict()})
    else:
        console = stdout()
        console.print(inspection)
        print_notes(console, describe_inputs(loaded), loaded.source)
    if report is not None and inspection.sites:
        _write_report(report, loaded, inspection, model, float64)
    return describe_failure(inspection)


def check_report(path: Path) -> None:
    """Check that a report can be written to the path of `--report`."""
    try:
        require("jinja2", "write a report")
        pages.check_path(path)
    except ImportError as error:
        raise ArgumentError(error) from None
    except (OSError, ValueError) as error:
        raise ArgumentError(str(error).replace("path is", "--report is", 1)) from None


def _write_report(path: Path, loaded: LoadedModel, inspection: Inspection, model: ModelOptions, float64: bool) -> None:
    """Record the model, ablate each sublayer and write the page."""
    loss = ProbeLoss(model.seed)
    recording = _record(loaded, inspection, loss)
    ablation = "the write of each sublayer is replaced by zero"
    ablations: Sequence[Ablation] = ()
    try:
        with working(f"ablate {inspection.model}", has_bar=True), quiet():
            ablations = addnorm.ablate_each(inspection, *loaded.args, progress=stderr_if_terminal(), **loaded.kwargs)
    except Exception as error:  # an operand cannot be replaced, the output has no tensor, or another one of the model
        ablation = f"The model cannot be ablated ({first_line(error)})."
    has_gradients = bool(recording.series("grad", "l2") or recording.series("params", "grad_l2"))
    now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    facts = {
        "model": f"{model.name} ({inspection.model})", "date": now, "weights": loaded.source,
        "inputs": describe_inputs(loaded).removeprefix("Inputs: "),
        "seed": str(model.seed), "loss": loss.sentence if has_gradients else "none: forward only", "ablation": ablation,
        "command": _command_line(model, path, float64),
    }  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in pages.versions().items())
    foot = f"Made with {versions}."
    with working(f"write {path}"):
        page = pages.build_model_page(inspection, recording, ablations, facts, title=model.name, footer=[foot])
    save_result(path, lambda file: pages.write(page, file), "--report")
    print_message(f"Written: {path}")


def _record(loaded: LoadedModel, inspection: Inspection, loss: ProbeLoss) -> Recording:
    """Record one forward and one backward, or only a forward where the output depends on no parameter."""
    mask = "attention_mask" if token_mask(loaded.kwargs) is not None else None
    for grads in (True, False):
        try:
            with (
                working(f"record {inspection.model}"),
                quiet(),
                addnorm.record(loaded.model, grads=grads, tokens=mask) as recording,
            ):
                run_step(loaded, loaded.kwargs, loss if grads else None)
            break
        except NoGradientsError:
            continue
    return recording


def _command_line(model: ModelOptions, report: Path, float64: bool) -> str:
    """Return the command that writes the same report again."""
    words = ["addnorm", "inspect", model.name]
    for field in fields(ModelOptions):
        value = getattr(model, field.name)
        if field.name != "name" and value != field.default:
            words += [f"--{field.name}"] if value is True else [f"--{field.name}", str(value)]
    return shlex.join([*words, *["--float64"] * float64, "--report", str(report)])
