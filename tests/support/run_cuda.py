"""Program that runs every variant of the operation once on the GPU, forward and backward, under a memory checker.

It does not check results.

compute-sanitizer --tool memcheck python tests/support/run_cuda.py
"""

import sys
from dataclasses import replace

import torch

from addnorm.ops.streams.kinds import KINDS
from support.cases import VARIANTS, gradients, make, moved
from support.stream_calls import make_call, make_cotangents, run

SHAPES = [(37, 132), (3, 17), (2, 8200), (2, 20001)]
STREAMS = [(3, 100), (4, 1024), (8, 33)]  # n and d_model


def main():
    """Run all variants; return 0, or 1 without a GPU."""
    if not torch.cuda.is_available():
        print("torch sees no CUDA device", file=sys.stderr)
        return 1
    for dtypes in ("bfloat16", "float32 stream, bfloat16 branch"):
        for variant in VARIANTS:
            for shape in SHAPES:
                call = moved(make(variant, dtypes, shape))
                gradients(call)
                if call.norm != "none":
                    call.y_alone()
    for kind in KINDS:
        for n, d in STREAMS:
            streams = make_call(n, d, (37,), kind, dtype=torch.bfloat16)
            streams = replace(streams, tensors={name: t.cuda() for name, t in streams.tensors.items()})
            run(streams, streams.leaves(), make_cotangents(streams))
    torch.cuda.synchronize()
    print(f"{2 * len(VARIANTS) * len(SHAPES) + len(KINDS) * len(STREAMS)} calls, forward and backward")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
