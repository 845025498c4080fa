"""`addnorm inspect`: a model's residual streams with their proof; with `--report`, a page about the model.

The report's path and packages are checked before the model runs.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import addnorm
from addnorm import report as pages
from addnorm._util.optional import require
from addnorm.cli._model import (
    ModelOptions,
    ablate_model,
    check_proof,
    describe_inputs,
    inspect_model,
    load_model,
    mask_name,
    model_facts,
    with_model,
)
from addnorm.cli._output import (
    ProofError,
    argument_errors,
    command_line,
    print_result,
    save_result,
    stdout,
    working,
)
from addnorm.cli._training_step import NoGradientsError, ProbeLoss, run_step
from addnorm.stream.ablate import Ablation
from addnorm.stream.find.inspection import Inspection
from addnorm.stream.models.hf import first_line, quiet
from addnorm.stream.models.load import LoadedModel
from addnorm.stream.record.recording import Recording


@with_model
def run(model: ModelOptions, report: Path | None, wiring: str | None, as_json: bool, float64: bool) -> None:
    """Find the residual streams of a model and prove their equations."""
    if report is not None:
        check_report(report)
    with argument_errors({"wiring": "--expect"}):
        expected = None if wiring is None else addnorm.wirings.get(wiring)
    loaded = load_model(model)
    inspection = inspect_model(loaded, float64)
    document = {**model_facts(loaded), **inspection.to_dict()}
    with argument_errors({"wiring": "--expect"}):
        verification = None if expected is None else addnorm.verify(inspection, wiring=expected)
    if verification is not None:
        document["verification"] = verification.to_dict()
    print_result(as_json, document, inspection, describe_inputs(loaded), loaded.source)
    if verification is not None and verification.agrees and not as_json:
        stdout().print(verification)
    if report is not None and inspection.sites:
        _write_report(report, loaded, inspection, model.seed, model.name)
    check_proof(inspection)
    if verification is not None and verification.deviations:
        raise ProofError("\n".join(f"It is not {verification.wiring.name}: {one}." for one in verification.deviations))


def check_report(path: Path) -> None:
    """Check that a report can be written to the path of `--report`."""
    with argument_errors({"path": "--report"}):
        require("jinja2", "write a report")
        pages.check_path(path)


def _write_report(path: Path, loaded: LoadedModel, inspection: Inspection, seed: int, name: str) -> None:
    """Record the model, ablate each sublayer and write the page."""
    loss = ProbeLoss(seed)
    recording = _record(loaded, inspection, loss)
    ablation = "the write of each sublayer is replaced by zero"
    ablations: Sequence[Ablation] = ()
    try:
        ablations = ablate_model(loaded, inspection)
    except Exception as error:  # an operand cannot be replaced, the output has no tensor, or another one of the model
        ablation = f"The model cannot be ablated ({first_line(error)})."
    has_gradients = bool(recording.series("grad", "l2") or recording.series("params", "grad_l2"))
    facts = {
        "model": f"{name} ({inspection.model})", "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "weights": loaded.source, "inputs": describe_inputs(loaded).removeprefix("Inputs: "), "seed": str(seed),
        "loss": loss.sentence if has_gradients else "none: forward only", "ablation": ablation, "command": command_line(),
    }  # fmt: skip
    versions = ", ".join(f"{package} {version}" for package, version in pages.versions().items())
    with working(f"write {path}"):
        foot = [f"Made with {versions}."]
        page = pages.build_model_page(inspection, recording, ablations, facts, title=name, footer=foot)
    save_result(path, lambda file: pages.write(page, file), "--report")


def _record(loaded: LoadedModel, inspection: Inspection, loss: ProbeLoss) -> Recording:
    """Record one forward and one backward, or only a forward where the output depends on no parameter."""
    for grads in (True, False):
        with (
            suppress(NoGradientsError),
            working(f"record {inspection.model}"),
            quiet(),
            addnorm.record(loaded.model, grads=grads, tokens=mask_name(loaded)) as recording,
        ):
            run_step(loaded, loaded.kwargs, loss if grads else None)
            break
    return recording
