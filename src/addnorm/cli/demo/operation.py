"""What addnorm does, in a few minutes: `addnorm demo`, which `make demo` runs.

Nine parts, each a sentence that says what to see, and a table: one token step by step, real tensors against PyTorch, the
bias gradient in bfloat16, the speed, a real model's wiring, the same by depth, the same fused; then two wirings trained, and the
reports. Where something is proved, `run` is False if it failed.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from addnorm import bench
from addnorm.bench import facts
from addnorm.bench.jobs import DTYPES, JOBS, NORMS, PLAIN, matrix
from addnorm.bench.summary import by_cell
from addnorm.bench.tables import digits
from addnorm.cli.demo import compare, fuse, stream
from addnorm.cli.demo.stream import RECORDING, heading
from addnorm.functional import add_layer_norm
from addnorm.ops import cpu
from addnorm.trace import PRESETS, show

LESSONS = ("lesson-000", "lesson-001")
STEPS = ("x", "sublayer", "z", "mean", "variance", "shifted")
FLOAT32_STEP = 1e-6  # what float32 may differ by from Python's float64 on numbers around one
ROUNDING = {"float32": 1e-7, "bfloat16": 2e-3}  # what rounding to a dtype alone costs, in relative L2, and a little
ROWS = 2048
ROWS_OF_ONES = (1024, 4096, 16384)
SPEED_SHAPES = ((1, 768), (512, 768), (2048, 1024))
SPEED_ROUNDS = 5


def run(screen: Console | None = None) -> bool:
    """Prints the demonstration, and returns whether every proof in it held."""
    screen = screen or bench.console()
    if cpu.ISA is None:
        screen.print(
            f"[yellow]The C++ kernels are absent[/]: {cpu.DETAIL}. In their place PyTorch computes the formulas."
        )
    held = [held for part in PARTS if (held := part(screen)) is not None]
    failed = held.count(False)
    screen.print(f"\n[bold red]{failed} of {len(held)} proofs failed.[/]" if failed else "\nEvery proof held.")
    command = f"{_program()} explore{f' --recording {RECORDING}' if RECORDING.exists() else ''}"
    screen.print("\nTo move the LayerNorm yourself, and look into what was recorded, in a browser:")
    screen.print(Text(f"  {command}", "bold"), soft_wrap=True)
    return not failed


def one_token(screen: Console) -> bool:
    """The worked examples of the lessons, by hand and by the operation."""
    heading(
        screen, "1. One token", "y = LayerNorm(x + Sublayer(x)): step by step in plain Python, and by add_layer_norm."
    )
    held = True
    for preset in map(PRESETS.__getitem__, LESSONS):
        screen.print(f"\n{preset.title}", style="italic")
        steps = preset.trace()
        x, sublayer = torch.tensor(preset.x), torch.tensor(preset.sublayer)
        y, z = add_layer_norm(x, sublayer, return_residual=True)
        found = (x, sublayer, z, z.mean(), z.var(correction=0), y)
        table = _table(("", "step by step", "add_layer_norm", "difference"), right=(3,))
        for name, tensor in zip(STEPS, found, strict=True):
            by_hand, computed = steps[name].value, tensor.tolist()
            off = float((tensor.double() - torch.tensor(by_hand, dtype=torch.float64)).abs().max())
            held &= off <= FLOAT32_STEP
            table.add_row(
                steps[name].symbol,
                show(by_hand),
                show(computed),
                _judged(f"{off:.0e}" if off else "0", off <= FLOAT32_STEP),
            )
        screen.print(table)
    return held


def real_tensors(screen: Console) -> bool:
    """Errors of both against float64."""
    heading(
        screen,
        "2. Real tensors",
        f"{ROWS:,} rows of 768, random gradients of y and of the stream: relative errors against float64. The stream "
        "is PyTorch's to the bit; y and the stream's gradient are as exact as their dtype lets them be; the gradients "
        "of LayerNorm's parameters are far closer than PyTorch's.",
    )
    table = _table(("norm", "dtype", "", "stream", "y", "dresidual", "dweight", "dbias"), right=(4, 5, 6, 7))
    held = True
    for norm in NORMS:
        for dtype in DTYPES:
            found = facts.errors(norm, DTYPES[dtype], rows=ROWS)
            ours, theirs = found["addnorm"], found["eager"]
            limits = [ROUNDING[dtype]] * 2 + [facts.LIMITS[dtype][1]] * 2
            fine = [off <= limit or math.isnan(off) for off, limit in zip(ours, limits, strict=False)]
            held &= all(fine) and ours.same_stream
            same = _judged("same bits" if ours.same_stream else "differs", ours.same_stream)
            numbers = [_judged(_error(off), ok) for off, ok in zip(ours, fine, strict=False)]
            table.add_row(NORMS[norm], dtype, "addnorm", same, *numbers)
            table.add_row("", "", "PyTorch", "", *map(_error, theirs[:4]), style="dim")
    screen.print(table)
    return held


def bias_gradient(screen: Console) -> bool:
    """The bias gradient of bfloat16 rows of ones."""
    heading(
        screen,
        "3. The bias gradient in bfloat16",
        "The gradient of every row is one, so that of the bias is the number of rows. PyTorch adds it up in bfloat16, "
        "where 256 + 1 = 256; addnorm in float32.",
    )
    table = _table(("rows", "addnorm", "PyTorch"), right=(0, 1, 2))
    held = True
    for rows in ROWS_OF_ONES:
        found = facts.bias_gradient_of_ones(rows)
        exact = found["addnorm"] == rows
        held &= exact
        table.add_row(f"{rows:,}", _judged(digits(found["addnorm"]), exact), f"[dim]{digits(found['eager'])}[/]")
    screen.print(table)
    return held


def speed(screen: Console) -> None:
    """A quick interleaved run; times prove nothing about another machine, so nothing fails here."""
    threads = torch.get_num_threads()
    heading(
        screen,
        "4. Speed",
        f"Times as fast as eager F.layer_norm(residual + branch), and the microseconds of both, on {threads} threads. "
        "This is a glance; addnorm bench is the measurement.",
    )
    errors = bench.console(stderr=True)
    document = bench.run(
        matrix(norms=("layer",), shapes=SPEED_SHAPES, jobs=PLAIN),
        rounds=SPEED_ROUNDS, compiled=False, proofs=False, progress=errors if errors.is_terminal else None,
    )  # fmt: skip
    table = _table(("rows x d", "dtype", *(JOBS[job].title for job in PLAIN)), right=(0, 2, 3, 4))
    lines: dict[tuple[int, int, str], list[str]] = {}
    for cell, row in by_cell(document["rows"]).items():
        ours, eager = row["addnorm"]["median_us"], row["eager"]["median_us"]
        text = f"[bold]{eager / ours:.2f}[/] ({digits(ours)} / {digits(eager)})"
        lines.setdefault((cell.rows, cell.d, cell.dtype), []).append(text)
    for (rows, d, dtype), texts in lines.items():
        table.add_row(f"{rows} x {d}", dtype, *texts)
    screen.print(table)
    bench.warn_if_busy(document, screen)


# Each returns whether what it proves held, and None where it proves nothing.
PARTS: tuple[Callable[[Console], bool | None], ...] = (
    one_token, real_tensors, bias_gradient, speed, stream.real_model, stream.recorded, fuse.fused,
    compare.compared, compare.reports,
)  # fmt: skip


def _program() -> str:
    """How this command is called from here: .venv/bin/addnorm, where no shell finds it by its name."""
    called = Path(sys.argv[0])
    if called.name != "addnorm" or shutil.which("addnorm") == str(called):
        return "addnorm"
    return str(called.relative_to(Path.cwd()) if called.is_relative_to(Path.cwd()) else called)


def _table(columns: tuple[str, ...], right: tuple[int, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for at, name in enumerate(columns):
        table.add_column(name, justify="right" if at in right else "left")
    return table


def _error(off: float) -> str:
    return "" if math.isnan(off) else f"{off:.1e}"


def _judged(text: str, fine: bool) -> str:
    return text if fine else f"[bold red]{text} !![/]"
