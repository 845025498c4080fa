"""The tables of README.md and docs/, made from the JSON in results/: functional, stack, stream, fuse, lab, compile, gpu, claims.

python benchmarks/table.py            replaces what stands between the bench comments of each page
python benchmarks/table.py --check    changes nothing; 1 if a page is not what the results say
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from addnorm import bench
from addnorm.bench import JOBS, NORMS, PLAIN, SHAPES, compiles_shown, fuses, gpu, labs, stacks
from addnorm.bench.accuracy import COLUMNS as ERRORS
from addnorm.bench.summary import by_cell
from addnorm.bench.tables import digits, headline

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "functional.json"
CLAIMS = ROOT / "benchmarks" / "results" / "claims.json"
STACK = ROOT / "benchmarks" / "results" / "stack.json"
STREAM = ROOT / "benchmarks" / "results" / "stream.json"
FUSE = ROOT / "benchmarks" / "results" / "fuse.json"
LAB = ROOT / "benchmarks" / "results" / "lab.json"
COMPILE = ROOT / "benchmarks" / "results" / "compile.json"
GPU = ROOT / "benchmarks" / "results" / "gpu.json"
TRAINING = ("forward_backward", "dropout", "everything")
INFERENCE = ("forward", "reuse", "forward_stream", "in_place")

Document = dict[str, Any]
Lines = list[list[str]]


def speed(document: Document) -> str:
    """README's section."""
    return "\n\n".join([
        "Times as fast as eager PyTorch (median microseconds: addnorm / eager), LayerNorm:",
        times(document, "layer", PLAIN),
        targets(one for one in document["summary"] if one["target"] is not None),
        f"{headline(document)}. [How it is measured](benchmarks/README.md).",
    ])  # fmt: skip


def jobs(*names: str) -> Callable[[Document], str]:
    """The section of some jobs, against eager: a table a norm."""

    def section(document: Document) -> str:
        return "\n\n".join(
            f"{title}, times as fast as eager PyTorch (median microseconds: addnorm / eager):\n\n{table}"
            for norm, title in NORMS.items()
            if (table := times(document, norm, names))
        )

    return section


def one_thread(document: Document) -> str:
    """Every job on one thread, against eager."""
    if document["threads"] == 1:
        return ""  # the other tables are this one
    return "\n\n".join(
        f"{title}, one thread, times as fast as eager PyTorch:\n\n{table}"
        for norm, title in NORMS.items()
        if (table := times(document, norm, JOBS, threads=1, microseconds=False))
    )


def peers(document: Document) -> str:
    """torch.compile and onnxruntime: the ratios alone."""
    sections = []
    for peer, title in (("compile", "`torch.compile` of the eager expression"), ("onnxruntime", "onnxruntime")):
        for norm, name in NORMS.items():
            if table := times(document, norm, JOBS, peer, microseconds=False):
                sections.append(f"Times as fast as {title}, {name}:\n\n{table}")
    version = document["peers"].get("onnxruntime")
    return "\n\n".join([*sections, f"onnxruntime: {version}."] if version else sections)


def add(document: Document) -> str:
    """y into given memory beside torch.add(out=), which moves the same bytes."""
    lines = [["rows x d", "dtype", *NORMS.values()], ["--:", ":--", *["--:"] * len(NORMS)]]
    found = _by_size(document, document["threads"])
    for (rows, d, dtype), cells in found.items():
        row = [_against(cells.get((norm, "reuse"), {}), "add", inverse=True) for norm in NORMS]
        if any(row):
            lines.append([f"{rows} x {d}", dtype, *row])
    title = "Time of y into given memory, over that of `torch.add(out=)` (microseconds of both):"
    return f"{title}\n\n{_markdown(lines)}" if lines[2:] else ""


def everything(document: Document) -> str:
    """All claims about times, those without a target too."""
    threads = document["threads"]
    sections = []
    for count in dict.fromkeys(one["threads"] for one in document["summary"] if one["norm"]):
        claims = [one for one in document["summary"] if one["norm"] and one["threads"] == count]
        title = "" if count == threads else f"With {count} thread, for which there are no targets:\n\n"
        sections.append(title + targets(claims))
    return "\n\n".join([*sections, f"{headline(document)}."])


def saved(document: Document) -> str:
    """Bytes kept for the backward, a line a case."""
    facts = [fact for fact in document["facts"] if fact["name"].startswith("saved bytes")]
    lines = [["what autograd keeps besides the parameters", "norm", "addnorm", "PyTorch"], [":--", ":--", "--:", "--:"]]
    for fact in facts:
        what = fact["name"].removeprefix("saved bytes, ")
        lines.append([what, NORMS[fact["norm"]], digits(fact["value"]), digits(fact["torch"])])
    return _markdown(lines) if facts else ""


def accuracy(document: Document) -> str:
    """A line for each norm, dtype and variant."""
    lines = [["norm", "dtype", "", *ERRORS], [":--", ":--", ":--", *["--:"] * len(ERRORS)]]
    for one in document["accuracy"]:
        errors = [f"{one[name]:.1e}" if name in one else "" for name in ERRORS]
        who = {"addnorm": "addnorm", "eager": "PyTorch"}[one["variant"]]
        lines.append([NORMS[one["norm"]], one["dtype"], who, *errors])
    return _markdown(lines) if document["accuracy"] else ""


def claims(document: Document) -> str:
    """What is said, what was measured, what follows."""
    lines = [["what is said", "criterion", "measured", "verdict"], [":--"] * 4]
    for one in document["claims"]:
        said = f"{one['claim']} ({one['lesson'].replace('; ', ' / ')})"
        lines.append([said, one["criterion"], _numbers(one["measured"]), f"**{one['verdict']}**"])
    return f"{_markdown(lines)}\n\n{_where(document)}"


def claims_by_depth(document: Document) -> str:
    """Untrained stacks: a line a wiring and number, a column a depth."""
    titles = {
        "scale": "size of x_L (root mean square)", "gradient": "gradient at x_0 over that at x_L",
        "gradient_residual_alone": "the same, along the residual alone", "likeness": "cosine of two tokens of x_L",
        "memory": "cosine of a token's x_L and x_0",
    }  # fmt: skip
    rows = document["found"]["depth"]
    depths = list(dict.fromkeys(row["num_layers"] for row in rows))
    lines = [["", "wiring", *(f"L = {n}" for n in depths)], [":--", ":--", *["--:"] * len(depths)]]
    for key, title in titles.items():
        for wiring in dict.fromkeys(row["wiring"] for row in rows if key in row):
            values = {row["num_layers"]: row[key] for row in rows if row["wiring"] == wiring}
            lines.append([title, f"`{wiring}`", *(f"{_rounded(values[n]):.3g}" for n in depths)])
    return _markdown(lines)


def claims_trained(document: Document) -> str:
    """Trained stacks: a line a run."""
    head = ["wiring", "L", "learning rate", "warm-up", "loss", "gradient at x_0 over x_L: before", "after"]
    lines = [head, [":--", *["--:"] * (len(head) - 1)]]
    for row in document["found"]["training"]:
        numbers = [f"{row[key]:.3g}" for key in ("gradient_before", "gradient_after")]
        lines.append([
            f"`{row['wiring']}`", f"{row['num_layers']}", f"{row['lr']:g}", f"{row['warm_up']}", f"{row['loss']:.3f}", *numbers,
        ])  # fmt: skip
    steps, seeds = document["protocol"]["steps"], len(document["protocol"]["trained_seeds"])
    nothing = f"a model that knows only how often each character occurs has {document['found']['unigram']:.3f}"
    return f"{_markdown(lines)}\n\nLoss in nats a character after {steps} steps, the mean of {seeds} seeds; {nothing}."


def stack(document: Document) -> str:
    """Whole encoders: a line a size, a column a wiring, job and peer."""
    found = stacks.by_cell(document["rows"])
    columns = list(dict.fromkeys((cell.wiring, cell.job) for cell in found))
    head = [f"{wiring}, {stacks.JOBS[job]}" for wiring, job in columns]
    lines = [["batch x tokens x d", "beside", *head], ["--:", ":--", *["--:"] * len(head)]]
    sizes = dict.fromkeys((cell.batch, cell.tokens, cell.d) for cell in found)
    for size, (peer, title) in itertools.product(sizes, stacks.PEERS.items()):
        cells = {(c.wiring, c.job): row for c, row in found.items() if (c.batch, c.tokens, c.d) == size}
        values = [_against(cells.get(column, {}), peer) for column in columns]
        lines.append([" x ".join(map(str, size)), title, *values])
    return f"Times as fast (median microseconds: addnorm / the other):\n\n{_markdown(lines)}"


def stack_targets(document: Document) -> str:
    """The lowest and the mean of each, next to the target."""
    lines = [["measured over the cells", "target", "addnorm"], [":--", ":--", "--:"]]
    for one in document["summary"]:
        target = "" if one["target"] is None else f"{one['compare']} {digits(one['target'])}"
        met = f", {one['cells_met']} of {one['cells']} cells reach it" if one["met"] is False else ""
        lines.append([one["name"], target, digits(one["value"]) + (f" (missed{met})" if met else "")])
    return f"{_markdown(lines)}\n\n{headline(document)}."


def looking(document: Document) -> str:
    """What it costs to record, inspect and decompose: a line a size."""
    head = ["batch x tokens", "plain step, ms", "recorded", "without gradients", "inspect, s", "decompose, s",
            "closures"]  # fmt: skip
    lines = [head, ["--:"] * len(head)]
    for cell in dict.fromkeys((row["batch"], row["tokens"]) for row in document["rows"]):
        times = {row["variant"]: row["median_us"] for row in document["rows"] if (row["batch"], row["tokens"]) == cell}
        calls = {row["call"]: row for row in document["calls"] if (row["batch"], row["tokens"]) == cell}
        ratios = [f"**{times[name] / times['plain']:.2f}** x" for name in ("recorded", "without gradients")]
        seconds = [f"{calls[name]['median_s']:.2f}" for name in ("inspect", "decompose")]
        closures = ", ".join(f"{calls[name]['closure']:.0e}" for name in ("inspect", "decompose"))
        lines.append([" x ".join(map(str, cell)), f"{times['plain'] / 1000:.0f}", *ratios, *seconds, closures])
    goals = [one for one in document["summary"] if one["target"] is not None]
    missed = [one["name"] for one in goals if not one["met"]]
    said = "Every target is met" if not missed else f"Missed: {'; '.join(missed)}"
    title = "MiniLM on Python's own documentation; a step is a forward and a backward:"
    limits = "recording at most 1.9 times the plain step, inspect under 3 s, closures under 1e-5"
    return f"{title}\n\n{_markdown(lines)}\n\n{said} ({limits}). {headline(document)}."


def fused(document: Document) -> str:
    """MiniLM fused beside the model as it was: a line a cell."""
    head = ["batch x tokens", "", "dtype", "as it was, ms", "fused, ms", "times as fast", "the frontend alone",
            "share of Add & Norm", "kept for backward, MB"]  # fmt: skip
    lines, beside = [head, ["--:", ":--", ":--", *["--:"] * 6]], []
    for cell, found in fuses.by_cell(document["rows"]).items():
        fast = {name: f"**{fuses.ratio(found, name):.2f}**" for name in found}
        both = [found[name] for name in ("plain", "fused") if name in found]
        times = [digits(row["median_us"] / 1000) for row in both] + ["not proven"] * (2 - len(both))
        kept = " → ".join(f"{row['saved_bytes'] / 1e6:.1f}" for row in both if "saved_bytes" in row)
        ratios = [fast.get(name, "") for name in ("fused", "frontend")]
        size, part = f"{cell.batch} x {cell.tokens}", f"{found['plain']['share']:.1%}"
        lines.append([size, fuses.JOBS[cell.job], cell.dtype, *times, *ratios, part, kept])
        if each := [f"{what} {fast[name]}" for name, what in INDUCTOR.items() if name in found]:
            beside.append(f"With Inductor, {fuses.title(cell)}, times as fast: {', '.join(each)}.")
    missed = [f"{one['name']} ({digits(one['value'])})" for one in document["summary"] if one["met"] is False]
    said = f"Missed: {'; '.join(missed)}" if missed else "The target, 0.95 times as fast at least, is met in every cell"
    spent = [one["seconds"] for one in document["fusions"] if one["variant"] == "fused"] or [0.0]
    took = f"To fuse and to prove took {digits(min(spent))} to {digits(max(spent))} seconds"
    text = "MiniLM on Python's own documentation, medians; what is kept for backward before → after:"
    return "\n\n".join([text, _markdown(lines), *beside, f"{said}. {took}. {headline(document)}."])


def lab(document: Document) -> str:
    """The lab's training beside a loop by hand, and with recording: a line a model."""
    head = ["wiring", "layers x d", "batch x tokens", "plain PyTorch", "the lab", "times as fast",
            f"recording every {document['protocol']['every']}th", "the first"]  # fmt: skip
    lines = [head, [":--", *["--:"] * (len(head) - 1)]]
    for cell, found in labs.by_cell(document["rows"]).items():
        size = [f"`{cell.wiring}`", f"{cell.num_layers} x {cell.d}", f"{cell.batch} x {cell.tokens}"]
        rates = [digits(1e6 / found[name]["median_us"]) for name in ("plain", "addnorm")]
        costs = [f"**{labs.recording(found) - 1:+.1%}**", f"{labs.looking(found):+.2f} s"]
        lines.append([*size, *rates, f"**{labs.fast(found):.2f}**", *costs])
    targets = f"{labs.LEAST:g} times as fast at least, recording {labs.MOST - 1:.0%} at most"
    missed = [f"{one['name']} ({digits(one['value'])})" for one in document["summary"] if one["met"] is False]
    said = f"Missed: {'; '.join(missed)}" if missed else "Both targets are met"
    title = "Training steps a second, on one thread; what recording adds to the time of a run, and to its first step:"
    return f"{title}\n\n{_markdown(lines)}\n\n{said} ({targets}). {headline(document)}."


INDUCTOR = {"inductor": "torch.compile alone", "fused, inductor": "fused and compiled"}


PAGES: dict[Path, dict[str, Callable[[Document], str]]] = {
    ROOT / "README.md": {"speed": speed},
    ROOT / "docs" / "performance.md": {
        "training": jobs(*TRAINING), "saved": saved, "inference": jobs(*INFERENCE), "add": add, "peers": peers,
        "one-thread": one_thread, "targets": everything, "stack": stack, "stack-targets": stack_targets,
        "compile": compiles_shown.times, "compile-contract": compiles_shown.contract,
        "gpu": gpu.section,
    },
    ROOT / "docs" / "numerics.md": {"accuracy": accuracy},
    ROOT / "docs" / "streams.md": {"streams": looking},
    ROOT / "docs" / "fusing.md": {"fuse": fused},
    ROOT / "docs" / "comparing.md": {"lab": lab},
    ROOT / "docs" / "claims.md": {
        "claims": claims, "claims-by-depth": claims_by_depth, "claims-trained": claims_trained,
    },
}  # fmt: skip


def results_of(section: str) -> Path:
    """Where a section's numbers are."""
    starts = {"claims": CLAIMS, "streams": STREAM, "stack": STACK, "fuse": FUSE, "lab": LAB,
              "compile": COMPILE, "gpu": GPU}  # fmt: skip
    return next((path for start, path in starts.items() if section.startswith(start)), RESULTS)


def times(
    document: Document, norm: str, names: Iterable[str], peer: str = "eager",
    *, threads: int | None = None, microseconds: bool = True,
) -> str:  # fmt: skip
    """A line a size and dtype, a column a job that was measured with the peer; empty where none was."""
    found = _by_size(document, threads or document["threads"])
    measured = [job for job in names if any(peer in cells.get((norm, job), {}) for cells in found.values())]
    lines = [["rows x d", "dtype", *(JOBS[job].title for job in measured)], ["--:", ":--", *["--:"] * len(measured)]]
    for (rows, d, dtype), cells in found.items():
        line = [_against(cells.get((norm, job), {}), peer, microseconds=microseconds) for job in measured]
        if any(line):
            lines.append([f"{rows} x {d}", dtype, *line])
    return _markdown(lines) if measured else ""


def targets(claims: Iterable[dict[str, Any]]) -> str:
    """The targets next to what was measured, one column a norm."""
    claims = [one for one in claims if one["norm"] and one["value"] is not None]
    norms = dict.fromkeys(one["norm"] for one in claims)
    lines = [
        ["measured over the cells", "target", *(NORMS[norm] for norm in norms)],
        [":--", ":--", *["--:"] * len(norms)],
    ]
    goals: dict[tuple[str, str], dict[str, str]] = {}
    for one in claims:
        target = "" if one["target"] is None else f"{one['compare']} {digits(one['target'])}"
        missed = " (missed)" if one["met"] is False else ""
        goals.setdefault((f"{one['name']} ({one['versus']})", target), {})[one["norm"]] = digits(one["value"]) + missed
    lines += [[*what, *(found.get(norm, "") for norm in norms)] for what, found in goals.items()]
    return _markdown(lines)


def replaced(page: Path, text: str, sections: dict[str, str]) -> str:
    """The page's text with each section put between its two comments."""
    for name, section in sections.items():
        begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"{page.name} needs one {begin} and one {end}: add the two lines where the table belongs.")
        between = f"{begin}\n{section}\n{end}" if section else f"{begin}\n{end}"
        text = re.sub(f"{begin}.*{end}", lambda _, between=between: between, text, flags=re.DOTALL)  # type: ignore[misc]
    return text


def main(words: Sequence[str]) -> int:
    """Replace, or check; a section without results stays as it is."""
    others = (path for path in (CLAIMS, STACK, STREAM, FUSE, LAB, COMPILE) if path.exists())
    documents = {path: json.loads(path.read_text(encoding="utf-8")) for path in others}
    documents[GPU] = json.loads(GPU.read_text(encoding="utf-8")) if GPU.exists() else None  # its section says so
    documents[RESULTS] = bench.read(RESULTS)
    stale = 0
    for page, sections in PAGES.items():
        measured = {name: make for name, make in sections.items() if results_of(name) in documents}
        text = page.read_text(encoding="utf-8")
        made = {name: make(documents[results_of(name)]) for name, make in measured.items()}
        wanted = replaced(page, text, made)
        if list(words) != ["--check"]:
            page.write_text(wanted, encoding="utf-8")
        elif text != wanted:
            print(f"The tables of {page.name} are not what the results say: run benchmarks/table.py")
            stale = 1
    return stale


def _by_size(document: Document, threads: int) -> dict[tuple[int, int, str], dict[tuple[str, str], dict[str, Any]]]:
    """(rows, d, dtype), in the order of the sizes -> (norm, job) -> variant -> row."""
    found: dict[tuple[int, int, str], dict[tuple[str, str], dict[str, Any]]] = {}
    for cell, row in sorted(by_cell(document["rows"]).items(), key=lambda item: _place(item[0].rows, item[0].d)):
        if cell.threads == threads:
            found.setdefault((cell.rows, cell.d, cell.dtype), {})[cell.norm, cell.job] = row
    return found


def _place(rows: int, d: int) -> tuple[int, int, int]:
    return (SHAPES.index((rows, d)) if (rows, d) in SHAPES else len(SHAPES)), rows, d


def _against(row: dict[str, Any], peer: str, *, microseconds: bool = True, inverse: bool = False) -> str:
    """The peer's time over ours, or the inverse, and both; empty where it was not measured."""
    if peer not in row:
        return ""
    ours, theirs = row["addnorm"]["median_us"], row[peer]["median_us"]
    ratio = f"**{ours / theirs if inverse else theirs / ours:.2f}**"
    return f"{ratio} ({digits(ours)} / {digits(theirs)})" if microseconds else ratio


def _numbers(measured: dict[str, Any]) -> str:
    """What a claim was judged by, short: of the depths the first and the last."""
    said = []
    for name, value in measured.items():
        if isinstance(value, dict) and all(key.isdigit() for key in value):
            first, *_, last = value
            said.append(f"{name}: {_short(value[first])} at L = {first}, {_short(value[last])} at L = {last}")
        elif isinstance(value, dict):
            said.append(f"{name}: {', '.join(f'{key} {_short(one)}' for key, one in value.items() if one is not None)}")
        else:
            said.append(f"{name}: {_short(value)}")
    return "<br>".join(said)


def _short(value: float) -> str:
    return f"{_rounded(value):.3g}"


def _rounded(value: float) -> float:
    """Without the noise of what is zero, and without its sign."""
    return 0.0 if abs(value) < 1e-15 else value


def _where(document: Document) -> str:
    """On what, with what and when."""
    at = f"commit {document['commit'][:10]}{' with changes' if document['dirty'] else ''}" if document["commit"] else ""
    versions = f"torch {document['versions']['torch']}, Python {document['versions']['python']}"
    return (
        ", ".join(filter(None, [document["machine"]["cpu"], "one thread", versions, at, document["date"][:10]])) + "."
    )


def _markdown(lines: Lines) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except ValueError as error:  # a document that is not what its section is about
        raise SystemExit(f"table.py: {error}") from error
