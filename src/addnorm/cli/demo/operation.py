"""Parts of the demonstration on the operation: one token, real tensors, the bias gradient in bfloat16, the speed."""

from __future__ import annotations

import itertools

import torch
from rich.console import Console

from addnorm import bench
from addnorm._util.blocks import Cell, TableRow
from addnorm._util.numbers import format_count, format_number
from addnorm.bench import exactness
from addnorm.bench.case import by_case
from addnorm.bench.jobs import FIELDS, JOBS, NORMS
from addnorm.bench.operation import DTYPES, PLAIN, matrix
from addnorm.cli._output import stderr_if_terminal
from addnorm.cli.demo._parts import mark, part, print_table
from addnorm.functional import add_layer_norm
from addnorm.trace import PRESETS, show

LESSONS = ("lesson-000", "lesson-001")
STEPS = ("x", "sublayer", "z", "mean", "variance", "shifted")
FLOAT32_STEP = 1e-6  # tolerance of float32 against Python's float64, for numbers around one
ROUNDING = {"float32": 1e-7, "bfloat16": 2e-3}  # a little above the relative L2 error of rounding alone
ROWS = 2048
ROWS_OF_ONES = (1024, 4096, 16384)
SPEED_SHAPES = ((1, 768), (512, 768), (2048, 1024))
SPEED_ROUNDS = 5


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
