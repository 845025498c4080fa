"""benchmarks/results/zoo.json and docs/zoo.md: what `inspect` says of the models of other packages."""

import json
from collections import Counter

from addnorm._util.blocks import Column, Table
from addnorm._util.numbers import format_number
from addnorm._util.render import to_markdown
from support import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "zoo.json"
PAGE = ROOT / "docs" / "zoo.md"
WORDS = ("right", "partly", "refused", "wrong", "crash", "not built")
USES = ("record", "verify", "decompose", "ablate", "fuse")
NOT_RUN, LATE = "not run", "not finished"
HEAD = """# Other packages

Is `inspect` right about models that others wrote?

`make zoo` runs `inspect`, `verify`, `record`, `decompose`, `ablate` and `fuse` on small random instances of the models of other
packages, each package in an environment of its own and in a pinned version. The answers in `tests/zoo/answers/` were written by
hand from the packages' code, which they quote, and committed before `inspect` saw the models; an answer that proved mistaken
was corrected in a commit of its own. Those of transformers are the families of the tests. The default tests use none of the
other packages.

- **right**: wiring, number and kinds of sublayers, norms, embedding norm, final norm and rows are those of the answer, and the
  inspection closes. For a model that no rows describe: no wiring is named, and the inspection says that something is not
  understood.
- **partly**: what is named is right, but a part is missing and said to be missing.
- **refused**: no wiring is named, with a reason.
- **wrong**: a wiring is named that is not the answer's, or the inspection closes in silence and differs from the answer.

`verify` compares a model with the wiring that `inspect` names, and with itself in a second run: a difference is a false alarm, but
for a missing final norm, of which the answers tell.
"""


def write(rows, packages):
    """Write both files, with the rows in the order of the answers."""
    by_model = {(row["package"], row["model"]): row for row in rows}
    plain = [
        {k: v for k, v in row.items() if k not in ("source", "seconds")} | {"version": package.requirements[0].split("==")[1]}
        for name, package in packages.items() for model in package.models
        if (row := by_model.get((name, model.name)))
    ]  # fmt: skip
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in plain) + "\n]\n")
    PAGE.write_text(render(plain))
    print(summarize(plain))


def summarize(rows):
    """Return the number of each verdict as a sentence."""
    count = Counter(row["verdict"] for row in rows)
    return f"{count.total()} models: " + ", ".join(f"{count[word]} {word}" for word in WORDS if count[word]) + "."


def render(rows):
    """Return the page."""
    crashes = [
        f"{row['package']}, {row['model']}: {use}" + f" is {row[use]}" * row[use].startswith(LATE)
        for row in rows
        for use in USES
        if row.get(use, "ok").startswith(("crash", "wrong", LATE))
    ]
    packages = {row["package"]: [one for one in rows if one["package"] == row["package"]] for row in rows}
    parts = [HEAD, f"**{summarize(rows)}**", "", _render_counts(packages), ""]
    ran = {use: sum(row.get(use, NOT_RUN) != NOT_RUN for row in rows) for use in USES}
    parts += [
        "Right results or refusals in a sentence, of the models on which the function was run: "
        + ", ".join(f"`{use}` {sum(_is_fine(row.get(use, NOT_RUN)) for row in rows)} of {ran[use]}" for use in USES)
        + ".",
        *(["", *(f"- {line}" for line in crashes)] if crashes else []),
    ]
    head = "model", "answer", "`inspect`", Column("closure", "right"), "verdict"
    for name, mine in packages.items():
        parts += ["", f"## {name} {mine[0]['version']}", "", to_markdown(Table(head, map(_list_cells, mine)))]
    return "\n".join(parts) + "\n"


def _is_fine(result):
    return not result.startswith(("crash", "wrong", LATE, NOT_RUN))


def _render_counts(packages):
    lines = []
    for name, rows in packages.items():
        count = Counter(row["verdict"] for row in rows)
        lines.append([name, rows[0]["version"], str(len(rows)), *(str(count[word] or "") for word in WORDS)])
    return to_markdown(Table(["package", "version", *(Column(word, "right") for word in ("models", *WORDS))], lines))


def _list_cells(row):
    names = row.get("wiring")
    said = ", ".join(name or "no name" for name in names) if names else ("no stream" if names is not None else "")
    detail = f": {_shorten(row['detail'])}" if row.get("detail") else ""
    closure = format_number(row.get("closure"), 1)
    return [row["model"], _shorten(row.get("expected", "")), said, closure, f"{row['verdict']}{detail}"]


def _shorten(text):
    """Return text that fits into a cell of a Markdown table."""
    text = " ".join(text.split()).replace("<", "&lt;")
    return text if len(text) <= 300 else text[:299] + "…"
