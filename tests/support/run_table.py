"""Program that checks a compact table of calls against float64. tests/ops/test_cpu.py runs it for every instruction set.

It prints the name of the backend that computed, then one line for every bound that does not hold.
"""

import sys

import torch

import addnorm
from support.cases import BASIC, DTYPES, OPTIONS, cotangents, f64, leaves, make
from support.oracle import UNIT, arithmetic, magnitudes, rms, truth, worst

# Below a vector, a vector, one more, blocks with and without a tail; chunks with and without a tail; rows that begin within a
# counter of the dropout mask.
NORMS = ("LayerNorm", "RMSNorm")
TABLE = [
    *((variant, dtypes, (70, 41)) for variant in BASIC for dtypes in DTYPES),
    *((name, dtypes, (5, d)) for name in NORMS for dtypes in DTYPES for d in (1, 3, 16, 64, 200)),
    *((name, "float32", (9, d)) for name in NORMS for d in range(1, 70)),
    *((name, dtypes, (300, 129)) for name in NORMS for dtypes in ("float16", "float64", "bfloat16")),
    *((variant, dtypes, (3, 3, 37)) for variant in OPTIONS for dtypes in DTYPES),
    *((f"everything, {name}", dtypes, (7, d)) for name in NORMS for dtypes in ("float32", "float64") for d in range(1, 70)),
    *((f"everything, {name}", dtypes, (100, 67)) for name in NORMS for dtypes in DTYPES),
]  # fmt: skip


def main() -> int:
    failed = 0
    print(addnorm.backends()[1].detail)
    for variant, dtypes, shape in TABLE:
        call = make(variant, dtypes, shape)
        tensors = leaves(call)
        outputs = call(tensors)
        given = cotangents(outputs)
        torch.autograd.backward(list(outputs.values()), list(given.values()))
        want = truth(call, outputs["z"], given)
        terms, unit = magnitudes(call, outputs["z"], given), arithmetic(call)
        with torch.no_grad():
            again = call(tensors)
            same = all(again[name].equal(value) for name, value in outputs.items())
            same = same and (call.norm == "none" or call.y_alone(tensors).equal(outputs["y"]))
        wrong = [] if same else ["bits without grad"]
        got = {name: t.detach() for name, t in outputs.items()} | {name: t.grad for name, t in tensors.items()}
        for name, value in got.items():
            # One rounding to the dtype, and a few of the arithmetic: the bound of test_functional.py without PyTorch's error.
            error, round_off = value.to(f64) - want[name], UNIT[value.dtype]
            rms_bound = round_off * rms(want[name]) + 3 * unit * rms(terms[name])
            worst_bound = 1.01 * round_off * worst(want[name]) + 6 * unit * worst(terms[name])
            if not (rms(error) <= rms_bound and worst(error) <= worst_bound):
                wrong.append(f"{name}: {rms(error):.3g} > {rms_bound:.3g} or {worst(error):.3g} > {worst_bound:.3g}")
        for what in wrong:
            print(f"{variant}, {dtypes}, {shape}: {what}")
        failed += len(wrong)
    print(f"{len(TABLE)} calls, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
