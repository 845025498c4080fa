"""Add & Norm on a GPU against eager PyTorch, torch.compile, Liger, flash-attn and QuACK, into results/gpu.json.

    python benchmarks/bench_gpu.py                       # under ten minutes; the most important cells first
    python benchmarks/bench_gpu.py --resume              # goes on with what an interrupt or the budget has left
    python benchmarks/bench_gpu.py --d 4096 --rows 8192 --job forward --variants eager addnorm
    python benchmarks/bench_gpu.py --device cpu --d 64 --rows 8      # a trial of everything but the clock

README.md beside this file has the protocol.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from addnorm import backends
from addnorm.bench import gpu
from addnorm.bench.jobs import NORMS

RESULTS = Path(__file__).parent / "results" / "gpu.json"
ASIDE = Path(tempfile.gettempdir()) / "addnorm-gpu.json"  # of a part of the plan, or of a CPU, which measures no GPU
PARTS = ("norm", "dtype", "job", "d", "rows", "variants")


def main() -> int:
    """Measure, print, write; 2 for usage, 3 where addnorm was wrong or failed, 130 if it was cut short."""
    options = arguments()
    try:
        cells = gpu.plan(options.norm or tuple(NORMS), options.dtype, options.job, options.d, options.rows)
    except ValueError as error:
        return usage(str(error))
    if options.list:
        print("\n".join(cell.title for cell in cells))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        return usage("there is no CUDA device here: --device cpu tries everything but the clock")
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    part = any(getattr(options, name) for name in PARTS)
    triton = next(one for one in backends() if one.name == "triton")
    if device.type == "cuda" and not triton.available:  # what was timed as addnorm would be its formulas
        return usage(f"addnorm has no kernels here: {triton.detail}")
    path = options.json or (ASIDE if part or device.type == "cpu" else RESULTS)
    if device.type == "cpu" and path.resolve() == RESULTS.resolve():
        return usage(f"{path} is for times of a GPU, and this is a run on cpu: give another --json")
    try:
        earlier = gpu.resumable(path, device, options.commit) if options.resume else None
    except ValueError as error:
        return usage(str(error))
    document = gpu.run(
        cells, device, rounds=options.rounds, budget=options.budget or None, asked=options.variants, earlier=earlier,
        save=lambda document: gpu.write(document, path), progress=lambda line: print(line, file=sys.stderr, flush=True),
        commit=options.commit,
    )  # fmt: skip
    place = gpu.write(document, path)  # before anything else can go wrong
    print(f"{gpu.report(document)}\n\nWritten: {place}")
    if not document["complete"]:
        print(f"Cut short ({document['ended']}): the same command with --resume goes on.", file=sys.stderr)
        return 130
    return 3 if gpu.broken(document["failures"]) else 0


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--norm", nargs="+", choices=[*NORMS])
    parser.add_argument("--dtype", nargs="+", choices=[*gpu.DTYPES], help="mixed: float32 stream, bfloat16 branch")
    parser.add_argument("--job", nargs="+", choices=[*gpu.JOBS])
    parser.add_argument("--d", nargs="+", type=positive, help="with --rows too: cells of these sizes, planned or not")
    parser.add_argument("--rows", nargs="+", type=positive)
    parser.add_argument(
        "--variants", nargs="+", choices=[*gpu.VARIANTS], help="everywhere they fit (default: as planned)"
    )
    parser.add_argument("--rounds", type=positive, default=gpu.ROUNDS, help=f"(default {gpu.ROUNDS})")
    parser.add_argument(
        "--budget", type=float, default=gpu.BUDGET, help=f"seconds (default {gpu.BUDGET:g}); 0 is without end"
    )
    parser.add_argument(
        "--json", type=Path, help="where to (default results/gpu.json; of a part, or on cpu, a temporary file)"
    )
    parser.add_argument("--resume", action="store_true", help="keep what is measured there, and go on")
    parser.add_argument("--commit", help="of the sources, where they are a copy and no checkout")
    parser.add_argument("--list", action="store_true", help="only tell the cells")
    return parser.parse_args()


def positive(text: str) -> int:
    """A whole number of one and more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def usage(sentence: str) -> int:
    """Says what is wrong with the call."""
    print(f"bench_gpu.py: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
