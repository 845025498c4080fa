"""The last parts of the demonstration: post-LN and pre-LN trained side by side, and both reports written.

They lie in a folder where the demonstration was run; one that was interrupted there goes on.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.text import Text

import addnorm
from addnorm import lab, report
from addnorm._util.optional import require
from addnorm.cli.demo.stream import FOLDER, MODEL, heading, minilm, written
from addnorm.lab.data import topics
from addnorm.stream.models.load import quiet

__all__ = ["compared", "reports"]

COMPARED = ("post_ln", "pre_ln")
PROTOCOL = lab.ILLUSTRATION
AT_INIT = True
JOBS: int | None = None
TEXTS: int | None = None  # all of those that MiniLM reads


def compared(screen: Console) -> bool | None:
    """The default comparison, and its report; whether the published figures at init are met, None where joblib is missing."""
    heading(
        screen,
        "8. Post-LN against pre-LN, trained",
        f"{' and '.join(COMPARED)}, each with warm-up and without: a character model of {PROTOCOL.num_layers[0]} layers learns "
        f"Python's documentation ({len(topics().text):,} characters), same batches, same weights. Beside it untrained stacks, "
        "against what the papers say of them.",
    )
    errors = Console(stderr=True, highlight=False)
    try:
        report.check(FOLDER / "compare.html")
        for package, to in (("matplotlib", "draw"), ("joblib", "compare")):
            require(package, to)
        found = lab.compare(COMPARED, PROTOCOL, out=FOLDER, jobs=JOBS, at_init=AT_INIT, progress=errors)
    except (ImportError, OSError) as error:
        screen.print(Text(f"{str(error).rstrip('.')}.", "yellow"))
        return None
    screen.print()
    screen.print(found)
    path = report.write(report.of_comparison(found, {"command": "addnorm demo"}), FOLDER / "compare.html")
    written(screen, path)
    return all(check.holds is not False for check in found.checks)


def reports(screen: Console) -> None:
    """The report of MiniLM; nothing is proved here that was not before."""
    heading(
        screen, "9. A report to keep: MiniLM",
        "addnorm inspect minilm --report FILE: its wiring with the proof, stream and gradients by depth, what the stream is made "
        "of, and the model without each of its sublayers.",
    )  # fmt: skip
    loaded = minilm(screen, TEXTS)
    if loaded is None:
        return
    try:
        report.check(FOLDER / "minilm.html")
        require("matplotlib", "draw")
    except (ImportError, OSError) as error:
        screen.print(Text(f"{str(error).rstrip('.')}.", "yellow"))
        return
    mask = loaded.kwargs["attention_mask"].bool()
    with quiet():
        found = addnorm.inspect(loaded.model, **loaded.kwargs)
        with addnorm.record(loaded.model, tokens="attention_mask") as rec:
            y = loaded.model(**loaded.kwargs).last_hidden_state
            v = torch.randn(y.shape[1:], generator=torch.Generator().manual_seed(0)) / y.shape[-1] ** 0.5
            (y * v).sum(-1)[mask].mean().backward()
        loaded.model.zero_grad()
        without = addnorm.ablate_each(found, **loaded.kwargs)
    facts = {"weights": loaded.source, "loss": "each token's output along a random direction, the mean over the tokens"}
    page = report.of_model(found, rec, without, {**facts, "command": "addnorm demo"}, title=MODEL)
    written(screen, report.write(page, FOLDER / "minilm.html"))
