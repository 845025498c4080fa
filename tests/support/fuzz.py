"""Program that checks random calls against float64 and against each other: `make fuzz`, or

    python tests/support/fuzz.py --seconds 60      from a seed of the clock on
    python tests/support/fuzz.py --cases 100 --first 7
    python tests/support/fuzz.py --seed 1234       one case again, the one that a failure printed

The calls run in a second process. If it crashes, that is a failure like any other: the seed is printed, and a new process
continues with the next seed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback

from support import fuzz_accuracy, fuzz_bits, fuzz_calls, fuzz_invalid, fuzz_streams

STREAMS_EVERY = 4  # each fourth case has a call of n streams too


def run(seed: int) -> tuple[str, list[str]]:
    """Run the call of this seed; return its description and one line for each error."""
    what = "no case"
    try:
        case = fuzz_calls.make(seed)
        what = str(case)
        actual = fuzz_bits.compute_results(case)
        outputs = {name: actual[name] for name in ("y", "z") if name in actual}
        grads = {name.removeprefix("d"): t for name, t in actual.items() if name not in outputs}
        lines = fuzz_accuracy.find_errors(case.call, outputs, grads, case.grad_outputs)
        lines += (
            fuzz_bits.find_differences(case, actual) + fuzz_bits.check_norm_alone(case) + fuzz_invalid.check_error(case)
        )
        fuzz_invalid.call_operators(case)
        if seed % STREAMS_EVERY == 0:
            lines += fuzz_streams.find_errors(seed)
    except Exception:
        lines = [traceback.format_exc()]
    return what, lines


def report(seed: int) -> bool:
    """Run one case and print its errors; return whether there are any."""
    what, lines = run(seed)
    if lines:
        print(
            f"seed {seed}: {what}",
            *lines,
            f"again: python tests/support/fuzz.py --seed {seed}",
            sep="\n    ",
            flush=True,
        )
    return bool(lines)


def worker(first: int, cases: int, seconds: float) -> int:
    """Run cases and print each seed first, so that the parent process knows the seed of a crash."""
    end = time.monotonic() + seconds
    for seed in range(first, first + cases):
        if time.monotonic() > end:
            break
        print(f"at {seed}", flush=True)
        if report(seed):
            print(f"failed {seed}", flush=True)
    print("done", flush=True)
    return 0


def parent(first: int, cases: int, seconds: float) -> int:
    """Run worker processes, a new one after each crash, until the time or the cases are used up."""
    begin, at, failed, last = time.monotonic(), first, 0, first + cases
    print(f"seeds from {first}", flush=True)
    while at < last and (left := seconds - (time.monotonic() - begin)) > 0:
        command = [sys.executable, *(f"-W{option}" for option in sys.warnoptions), __file__, "--worker"]
        command += ["--first", str(at), "--cases", str(last - at), "--seconds", str(left)]
        done, seed = False, at
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                match line.split():
                    case ["at", number]:
                        seed = int(number)
                    case ["failed", _]:
                        failed += 1
                    case ["done"]:
                        done = True
                    case _:
                        print(line, end="", flush=True)
        at = seed + 1
        if done:
            break
        failed += 1
        print(f"seed {seed}: the process died with {process.returncode}")
        print(f"    again: python tests/support/fuzz.py --seed {seed}", flush=True)
    print(f"{at - first} cases in {time.monotonic() - begin:.0f} s, {failed} failed")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="one case")
    parser.add_argument("--first", type=int, default=time.time_ns() // 10**6 % 10**9 * 10**3, help="the first seed")
    parser.add_argument("--cases", type=int, default=sys.maxsize // 2)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.seed is not None:
        return int(report(chosen.seed))
    return (worker if chosen.worker else parent)(chosen.first, chosen.cases, chosen.seconds)


if __name__ == "__main__":
    sys.exit(main())
