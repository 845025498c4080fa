"""Program that checks a table of calls against float64. tests/ops/test_cpu.py runs it for every instruction set.

With the argument `cover` it runs a cover of the table, in which every value of an axis occurs. It prints the name of the backend that computed, then one line for every bound that does not hold.
"""

import sys

import torch

import addnorm
from support.cases import BASIC, DTYPES, OPTIONS, cotangents, f64, leaves, make
from support.oracle import UNIT, arithmetic, magnitudes, rms, truth, worst

# Below a vector, a vector, one more, blocks with and without a tail; chunks with and without a tail; rows that begin within a
# counter of the dropout mask.
NORMS = ("LayerNorm", "RMSNorm")
FULL = [
    *((variant, dtypes, (70, 41)) for variant in BASIC for dtypes in DTYPES),
    *((name, dtypes, (5, d)) for name in NORMS for dtypes in DTYPES for d in (1, 3, 16, 64, 200)),
    *((name, "float32", (9, d)) for name in NORMS for d in range(1, 70)),
    *((name, dtypes, (300, 129)) for name in NORMS for dtypes in ("float16", "float64", "bfloat16")),
    *((variant, dtypes, (3, 3, 37)) for variant in OPTIONS for dtypes in DTYPES),
    *((f"everything, {name}", dtypes, (7, d)) for name in NORMS for dtypes in ("float32", "float64") for d in range(1, 70)),
    *((f"everything, {name}", dtypes, (100, 67)) for name in NORMS for dtypes in DTYPES),
]  # fmt: skip
COVER = [
    *((variant, dtypes, (70, 41)) for i, variant in enumerate(BASIC) for dtypes in [*DTYPES][i % 3 :: 3]),
    *((NORMS[(i + j) % 2], dtypes, (5, d)) for i, dtypes in enumerate(DTYPES) for j, d in enumerate((1, 3, 16, 64, 200))),
    *((NORMS[d % 2], "float32", (9, d)) for d in range(1, 70)),
    *((NORMS[i % 2], dtypes, (300, 129)) for i, dtypes in enumerate(("float16", "float64", "bfloat16"))),
    *((variant, dtypes, (3, 3, 37)) for i, variant in enumerate(OPTIONS) for dtypes in [*DTYPES][i % 5 :: 5]),
    *((f"everything, {NORMS[d % 2]}", ("float32", "float64")[d // 2 % 2], (7, d)) for d in range(1, 70)),
    *((f"everything, {NORMS[i % 2]}", dtypes, (100, 67)) for i, dtypes in enumerate(DTYPES)),
]  # fmt: skip


def main() -> int:
    failed, table = 0, COVER if sys.argv[1:] == ["cover"] else FULL
    print(addnorm.backends()[1].detail)
    for variant, dtypes, shape in table:
        call = make(variant, dtypes, shape)
        tensors = leaves(call)
        outputs = call(tensors)
        grad_outputs = cotangents(outputs)
        torch.autograd.backward(list(outputs.values()), list(grad_outputs.values()))
        expected = truth(call, outputs["z"], grad_outputs)
        terms, unit = magnitudes(call, outputs["z"], grad_outputs), arithmetic(call)
        with torch.no_grad():
            again = call(tensors)
            same = all(again[name].equal(value) for name, value in outputs.items())
            same = same and (call.norm == "none" or call.y_alone(tensors).equal(outputs["y"]))
        wrong = [] if same else ["bits without grad"]
        actual = {name: t.detach() for name, t in outputs.items()} | {name: t.grad for name, t in tensors.items()}
        for name, value in actual.items():
            # One rounding to the dtype, and a few of the arithmetic: the bound of test_functional.py without PyTorch's error.
            error, round_off = value.to(f64) - expected[name], UNIT[value.dtype]
            rms_bound = round_off * rms(expected[name]) + 3 * unit * rms(terms[name])
            worst_bound = 1.01 * round_off * worst(expected[name]) + 6 * unit * worst(terms[name])
            if not (rms(error) <= rms_bound and worst(error) <= worst_bound):
                wrong.append(f"{name}: {rms(error):.3g} > {rms_bound:.3g} or {worst(error):.3g} > {worst_bound:.3g}")
        for what in wrong:
            print(f"{variant}, {dtypes}, {shape}: {what}")
        failed += len(wrong)
    print(f"{len(table)} calls, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
