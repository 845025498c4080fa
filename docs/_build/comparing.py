"""Write the generated sections of comparing.md from benchmarks/results/compare.json.

The sentences are the verdict of the comparison itself.
"""

from __future__ import annotations

import textwrap

import page

from addnorm.bench.pages import headline

SHORT = ("loss",)  # topics of the sentences in README


def verdict() -> str:
    """Return the verdict, a sentence a line."""
    return "\n".join(f"- {one['sentence']}" for one in page.document("compare")["comparison"]["verdict"])


def table() -> str:
    """Return a table of the runs, and where they were measured."""
    results = page.document("compare")
    rows = [
        [
            f"`{run['settings']['wiring']}`", str(run["settings"]["warm_up"] or "none"), f"{run['test']:.3f}",
            f"{run['recorded']['logit_change'][0]:.3f}", f"{run['seconds']:.0f}",
        ]
        for run in results["rows"]
    ]  # fmt: skip
    made = page.table(["wiring", "warm-up", "test loss", "first step moves the logits by", "seconds"], rows)
    seconds = f"{results['seconds']:.0f} seconds in all, on {results['machine']['cores']} cores, stacks before training included"
    return f"{made}\n\n{seconds}. {headline(results)}."


def short() -> str:
    """Return the figure's caption in README.md: how far it is evidence, then what it shows."""
    results = page.document("compare")["comparison"]
    protocol = results["protocol"]
    counts = [(len(protocol["rates"]), "learning rate"), (len(protocol["seeds"]), "seed")]
    of = ", ".join(f"{'one' if count == 1 else count} {name}{'s'[: count > 1]}" for count, name in counts)
    sentences = {one["about"]: one["sentence"] for one in results["verdict"]}
    text = " ".join(sentences[about] for about in SHORT if about in sentences)
    unit = " (The loss is the mean of -ln p, where p is the model's probability of the next character.)"
    head = (
        f"This is an illustration ({of}), not evidence: [Comparing wirings](docs/comparing.md). "
        if results["illustration"]
        else ""
    )
    return "\n".join(textwrap.wrap(head + text + unit, 130, break_long_words=False, break_on_hyphens=False))


SECTIONS = {"comparing:verdict": verdict, "comparing:table": table}
