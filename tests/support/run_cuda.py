"""Program that runs every variant of the operation once on the GPU, forward and backward, under a memory checker.

It does not check results.

compute-sanitizer --tool memcheck python tests/support/run_cuda.py
compute-sanitizer --tool racecheck python tests/support/run_cuda.py 0 4      the first of four parts, which may run side by side
"""

import itertools
import sys
from dataclasses import replace

import torch

from addnorm.ops.streams.kinds import GATE_KINDS
from support.cases import VARIANTS, gradients, make, moved
from support.stream_calls import make_call, make_cotangents, run

SHAPES = [(37, 132), (3, 17), (2, 8200), (2, 20001)]
STREAMS = [(3, 100), (4, 1024), (8, 33)]  # n and d_model


def main(part=0, parts=1):
    """Run all variants, or one of several parts of them; return 0, or 1 without a GPU."""
    if not torch.cuda.is_available():
        print("torch sees no CUDA device", file=sys.stderr)
        return 1
    calls = [
        *itertools.product(VARIANTS, ("bfloat16", "float32 stream, bfloat16 branch"), SHAPES),
        *itertools.product(GATE_KINDS, STREAMS),
    ][part::parts]
    for call in calls:
        run_streams(*call) if len(call) == 2 else run_one(*call)
    torch.cuda.synchronize()
    print(f"{len(calls)} calls, forward and backward")
    return 0


def run_one(variant, dtypes, shape):
    call = moved(make(variant, dtypes, shape))
    gradients(call)
    if call.norm != "none":
        call.y_alone()


def run_streams(kind, size):
    streams = make_call(*size, (37,), kind, dtype=torch.bfloat16)
    streams = replace(streams, tensors={name: t.cuda() for name, t in streams.tensors.items()})
    run(streams, streams.leaves(), make_cotangents(streams))


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))
