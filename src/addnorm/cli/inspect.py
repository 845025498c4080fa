"""`addnorm inspect`: a model's residual streams with their proof; with `--report`, a page about the model.

The report's path and packages are checked before the model runs.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import addnorm
from addnorm import report as pages
from addnorm.cli._model import (
    ModelOptions,
    NoGradientsError,
    ProbeLoss,
    ablate_model,
    check_proof,
    describe_inputs,
    inspect_model,
    load_model,
    mask_name,
    model_facts,
    run_step,
    with_model,
)
from addnorm.cli._output import (
    ArgumentError,
    ProofError,
    argument_errors,
    command_line,
    print_result,
    save_result,
    stdout,
    working,
)
from addnorm.cli.wirings import make_wiring
from addnorm.stream.ablate import Ablation
from addnorm.stream.inspect import to_float64
from addnorm.stream.inspection import Inspection
from addnorm.stream.models.hf import ModelLoadError, first_line, quiet
from addnorm.stream.models.load import LoadedModel, input_error
from addnorm.stream.record.recording import Recording
from addnorm.stream.verify import Verification, inspect_reference
from addnorm.wirings.spec import Wiring


@with_model
def run(
    model: ModelOptions, report: Path | None, wiring: str | None, like: str | None, as_json: bool, float64: bool
) -> None:
    """Find the residual streams of a model and prove their equations."""
    if report is not None:
        check_report(report)
    with argument_errors({"wiring": "--expect"}):
        expected = None if wiring is None else make_wiring(wiring, "--expect mix_ln:k=3", argument="wiring")
    if like is not None and wiring is not None:
        raise ArgumentError("--expect and --like are both set, expected one of them.")
    loaded = load_model(model)
    inspection = inspect_model(loaded, float64)
    document = {**model_facts(loaded), **inspection.to_dict()}
    with argument_errors({"wiring": "--expect"}):
        verification = None if expected is None else _verify(inspection, loaded, expected, float64)
    if like is not None:
        with argument_errors({"like": "--like"}):
            reference = like if Path(like).is_file() else _inspect_other(like, model, loaded)
            verification = addnorm.verify(inspection, like=reference)
    if verification is not None:
        document["verification"] = verification.to_dict()
    print_result(as_json, document, inspection, describe_inputs(loaded), loaded.source)
    failure = ""
    if verification is not None:
        failure = "\n".join(f"It is not {verification.expected}: {one}." for one in verification.list_sentences())
        if not failure and not as_json:
            stdout().print(verification)
    if report is not None and inspection.list_sites():
        _write_report(report, loaded, inspection, model.seed, model.name)
    check_proof(inspection)
    if failure:
        raise ProofError(failure)


def _verify(inspection: Inspection, loaded: LoadedModel, wiring: Wiring, float64: bool) -> Verification:
    """Compare a model with a wiring. If either has several streams, run the model again with moved coefficients."""
    if wiring.has_rows and inspection.program is None:
        return addnorm.verify(inspection, wiring=wiring)
    call = (loaded.model, loaded.args, loaded.kwargs)
    model, args, kwargs = to_float64(*call) if float64 else call
    with working(f"verify {loaded.name}"), quiet():
        return addnorm.verify(model, *args, wiring=wiring, **kwargs)


def _inspect_other(name: str, options: ModelOptions, loaded: LoadedModel) -> Inspection:
    """Return the inspection of the model of `--like`, called with the inputs of MODEL."""
    is_built = ":" not in name and name != "minilm" and not Path(name).is_dir()
    own = dataclasses.replace(options, name=name, text=None, input=None, tokens=None, batch=None, dtype=None)
    try:
        other = load_model(own if is_built else dataclasses.replace(own, layers=None))
        other = dataclasses.replace(other, args=loaded.args, kwargs=loaded.kwargs)
        try:
            with working(f"inspect {name}"), quiet():
                return inspect_reference(other.model, loaded.args, loaded.kwargs, loaded.model)
        except Exception as error:  # whatever the model raises
            raise input_error(error, other) from error
    except ModelLoadError as error:
        raise ArgumentError(str(error).replace("MODEL", "--like", 1)) from None


def check_report(path: Path) -> None:
    """Check that a report can be written to the path of `--report`."""
    with argument_errors({"path": "--report"}):
        pages.check_path(path)


def _write_report(path: Path, loaded: LoadedModel, inspection: Inspection, seed: int, name: str) -> None:
    """Record the model, ablate each sublayer and write the page."""
    recording = _record(loaded, inspection, ProbeLoss(seed))
    ablation = "the write of each sublayer is replaced by zero"
    ablations: Sequence[Ablation] = ()
    try:
        ablations = ablate_model(loaded, inspection)
    except Exception as error:  # an operand cannot be replaced, the output has no tensor, or another one of the model
        ablation = f"The model cannot be ablated ({first_line(error)})."
    facts = {"weights": loaded.source, "seed": str(seed), "ablation": ablation, "command": command_line()}
    with working(f"write {path}"):
        page = pages.build_model_page(inspection, recording, ablations, facts, title=name)
    save_result(path, lambda file: pages.write(page, file), "--report")


def _record(loaded: LoadedModel, inspection: Inspection, loss: ProbeLoss) -> Recording:
    """Record one forward and one backward, or only a forward if the output depends on no parameter."""
    for grads in (True, False):
        with (
            suppress(NoGradientsError),
            working(f"record {inspection.model}"),
            quiet(),
            addnorm.record(loaded.model, grads=grads, tokens=mask_name(loaded)) as recording,
        ):
            run_step(loaded, loaded.kwargs, loss if grads else None)
            break
    recording.metadata |= model_facts(loaded) | {"loss": loss.sentence if grads else None}
    recording.metadata["inputs"] = describe_inputs(loaded).removeprefix("Inputs: ")
    return recording
