"""Add & Norm on a GPU beside eager PyTorch, torch.compile, Liger, flash-attn and QuACK. Writes results/gpu.json.

    python benchmarks/bench_gpu.py                       # under ten minutes; the most important cases first
    python benchmarks/bench_gpu.py --resume              # continues after an interrupt or at the end of the budget
    python benchmarks/bench_gpu.py --d 4096 --rows 8192 --job forward --variants eager addnorm
    python benchmarks/bench_gpu.py --device cpu --d 64 --rows 8      # a trial of everything but the clock

README.md in this folder has the protocol.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from addnorm import backends
from addnorm.bench import gpu
from addnorm.bench.cases import NORMS
from addnorm.bench.harness import write

RESULTS = Path(__file__).parent / "results" / "gpu.json"
TRIAL = Path(tempfile.gettempdir()) / "addnorm-gpu.json"  # for a part of the plan, or a CPU, which measures no GPU
PARTS = ("norm", "dtype", "job", "d", "rows", "variants")


def main() -> int:
    """Measure, print, write; return 2 for usage, 3 if addnorm was wrong or failed, 130 if the run was cut short."""
    options = arguments()
    try:
        cases = gpu.plan(options.norm or tuple(NORMS), options.dtype, options.job, options.d, options.rows)
    except ValueError as error:
        return usage(str(error))
    if options.list:
        print("\n".join(map(gpu.title, cases)))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        return usage("there is no CUDA device: --device cpu tries everything but the clock")
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    part = any(getattr(options, name) for name in PARTS)
    triton = next(one for one in backends() if one.name == "triton")
    if device.type == "cuda" and not triton.available:  # the formulas would be timed as addnorm
        return usage(f"addnorm has no kernels: {triton.detail}")
    path = options.json or (TRIAL if part or device.type == "cpu" else RESULTS)
    if device.type == "cpu" and path.resolve() == RESULTS.resolve():
        return usage(f"{path} is for times of a GPU, and this run is on cpu: choose another --json")
    try:
        earlier = gpu.resumable(path, device, options.commit) if options.resume else None
    except ValueError as error:
        return usage(str(error))
    document = gpu.run(
        cases, device, rounds=options.rounds, budget=options.budget or None, requested=options.variants, earlier=earlier,
        save=lambda document: write(document, path), progress=lambda line: print(line, file=sys.stderr, flush=True),
        commit=options.commit,
    )  # fmt: skip
    place = write(document, path)  # before anything else can fail
    print(f"{gpu.report(document)}\n\nWritten: {place}")
    if not document["complete"]:
        print(f"Cut short ({document['ended']}): the same command with --resume continues.", file=sys.stderr)
        return 130
    return 3 if gpu.failed_cases(document["failures"]) else 0


def arguments() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--norm", nargs="+", choices=[*NORMS])
    parser.add_argument("--dtype", nargs="+", choices=[*gpu.DTYPES], help="mixed: float32 stream, bfloat16 branch")
    parser.add_argument("--job", nargs="+", choices=[*gpu.JOBS])
    parser.add_argument("--d", nargs="+", type=positive, help="with --rows too: cases of these sizes, planned or not")
    parser.add_argument("--rows", nargs="+", type=positive)
    parser.add_argument(
        "--variants", nargs="+", choices=[*gpu.VARIANTS], help="measure these wherever they fit (default: as planned)"
    )
    parser.add_argument("--rounds", type=positive, default=gpu.ROUNDS, help=f"(default {gpu.ROUNDS})")
    parser.add_argument(
        "--budget", type=float, default=gpu.BUDGET, help=f"seconds (default {gpu.BUDGET:g}); 0: no limit"
    )
    parser.add_argument(
        "--json", type=Path, help="results file (default results/gpu.json; for a part, or on cpu, a temporary file)"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the results file")
    parser.add_argument("--commit", help="commit of the sources, if they are a copy and no checkout")
    parser.add_argument("--list", action="store_true", help="list the cases and measure nothing")
    return parser.parse_args()


def positive(text: str) -> int:
    """Parse a whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def usage(sentence: str) -> int:
    """Print what is wrong with the call, and return 2."""
    print(f"bench_gpu.py: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
