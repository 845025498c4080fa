"""Program that checks random calls against float64 and against each other: `make fuzz`, or

    python tests/support/fuzz.py --seconds 60      from a seed of the clock on
    python tests/support/fuzz.py --cases 100 --first 7
    python tests/support/fuzz.py --seed 1234       one case again, the one that a failure printed

The calls run in a second process. If it crashes, that is a failure like any other: the seed is printed, and a new process
continues with the next seed.
"""

import argparse
import multiprocessing
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from support import fuzz_accuracy, fuzz_bits, fuzz_calls, fuzz_operators, fuzz_streams

STREAMS_EVERY = 4  # each fourth case has a call of n streams too


def run(seed):
    """Run the call of this seed; return its description and one line for each error."""
    what = "no case"
    try:
        case = fuzz_calls.make(seed)
        what = str(case)
        actual = fuzz_bits.compute_results(case)
        outputs = {name: actual[name] for name in ("y", "z") if name in actual}
        grads = {name.removeprefix("d"): t for name, t in actual.items() if name not in outputs}
        lines = fuzz_accuracy.find_errors(case.call, outputs, grads, case.grad_outputs)
        lines += fuzz_bits.find_differences(case, actual) + fuzz_bits.check_norm_alone(case)
        fuzz_operators.call_operators(
            lambda: fuzz_bits.compute_results(case), case.call.tensors["residual"].detach(), case.rng
        )
        if seed % STREAMS_EVERY == 0:
            lines += fuzz_streams.find_errors(seed)
    except Exception:
        lines = [traceback.format_exc()]
    return what, lines


def run_many(first, cases, seconds):
    """Run cases in another process, a new one after each crash, until the time or the cases are used up; return how many fail."""
    context, begin, failed, pool = multiprocessing.get_context("spawn"), time.monotonic(), 0, None
    print(f"seeds from {first}", flush=True)
    for seed in range(first, first + cases):
        if time.monotonic() - begin > seconds:
            cases = seed - first
            break
        pool = pool or ProcessPoolExecutor(1, context)
        try:
            what, lines = pool.submit(run, seed).result()
        except BrokenProcessPool as error:
            what, lines, pool = "the process died", [str(error)], None
        failed += bool(lines)
        report(seed, what, lines)
    print(f"{cases} cases in {time.monotonic() - begin:.0f} s, {failed} failed")
    return failed


def report(seed, what, lines):
    """Print the errors of a case."""
    if lines:
        again = f"again: python tests/support/fuzz.py --seed {seed}"
        print(f"seed {seed}: {what}", *lines, again, sep="\n    ", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="one case")
    parser.add_argument("--first", type=int, default=time.time_ns() // 10**6 % 10**9 * 10**3, help="the first seed")
    parser.add_argument("--cases", type=int, default=sys.maxsize // 2)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    chosen = parser.parse_args()
    if chosen.seed is None:
        return min(run_many(chosen.first, chosen.cases, chosen.seconds), 1)
    what, lines = run(chosen.seed)
    report(chosen.seed, what, lines)
    return min(len(lines), 1)


if __name__ == "__main__":
    sys.exit(main())
