"""Plant each fault in a copy of the tree and report which test finds it.

    make mutants                                          every fault that has no result for this commit yet
    PYTHONPATH=tests python tests/mutants/run.py --only ID ...    these faults again
    PYTHONPATH=tests python tests/mutants/run.py --check          only check that each fault applies

The copy is build/mutants/tree; the working tree is not edited. A fault runs against the tests of its area up to the first
failure, and against the whole default suite if it survives those. The test that fails must pass without the fault.
build/mutants/results.json is written after every fault: an interrupted run continues where it stopped.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

from mutants.faults import AREAS
from mutants.structure import find_matches, replace
from support import ROOT

LIBRARY = "src/addnorm/_C.so"
SUITE = ("tests src -n3 --dist=loadfile",)  # as in make test
AREA_SECONDS, SUITE_SECONDS = 900, 3600  # timeouts of one pytest run
FAULTS = {fault.id: (area, fault) for area in AREAS.values() for fault in area.faults}
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


def locate(root, fault):
    """Return all matches of the pattern of a fault in a tree, each with its file."""
    place, _, scope = fault.place.partition(":")
    start = root / place if place.startswith("csrc") else root / "src/addnorm" / place
    return [
        (path, match)
        for path in sorted((start, *start.rglob("*")))
        if path.suffix in (".h", ".cpp", ".py", ".js")
        for match in find_matches(path.read_text(), fault.old, scope)
    ]


def find_problems():
    """Return one sentence for each fault that does not apply to the tree, and for each pattern of tests without a file."""
    problems = []
    for _, fault in FAULTS.values():
        lines = [
            (str(path.relative_to(ROOT)), match.string.count("\n", 0, match.start()) + 1)
            for path, match in locate(ROOT, fault)
        ]
        if len(lines) != 1:
            found = f"matches {len(lines)} places of {fault.place} {lines}"
            problems.append(f"{fault.id}: {fault.old!r} {found}, expected one: update the fault.")
    patterns = {pattern for area in AREAS.values() for run in area.tests for pattern in run.split()}
    missing = sorted(pattern for pattern in patterns if not any(ROOT.glob(pattern)))
    return problems + [f"{pattern} matches no file, expected tests: update its area." for pattern in missing]


class TreeCopy:
    """A copy of the tree in which faults are planted and tests run."""

    def __init__(self, root, folder):
        self.folder = folder
        self.times = itertools.count(int(time.time()))  # bytecode is matched by file size and whole seconds
        self.passing = set()  # tests that pass without a fault
        self.broken = set()  # tests that fail without a fault
        shutil.rmtree(folder, ignore_errors=True)
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout.split("\0")
        for name in [*names[:-1], LIBRARY]:
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        self.library = (folder / LIBRARY).read_bytes()

    @contextlib.contextmanager
    def planted(self, fault):
        """Edit the place of a fault, rebuild the kernels if it is in C++, and restore both at the end."""
        [(path, match)] = locate(self.folder, fault)
        content = path.read_bytes()
        try:
            self._write(path, replace(match, fault.new).encode())
            if fault.place.startswith("csrc"):
                build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
                environment = os.environ | {"ADDNORM_NODE": "0"}  # the node has no faults, and takes half as long again
                subprocess.run(build, cwd=self.folder, env=environment, check=True, stdout=sys.stderr)
            yield
        finally:
            self._write(path, content)
            (self.folder / LIBRARY).write_bytes(self.library)

    def _write(self, path, content):
        path.write_bytes(content)
        when = next(self.times)
        os.utime(path, (when, when))

    def first_failure(self, arguments, seconds):
        """Run pytest and return the first test that fails; "timeout" if it takes longer than `seconds`, "crash" if it crashes."""
        environment = os.environ | {"PYTHONPATH": str(self.folder / "src"), "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, "-m", "pytest", "-xq", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow"]
        command += [f"--deselect={test}" for test in self.broken]
        process = subprocess.Popen(
            [*command, *arguments], cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:  # kill all test processes, also after an interrupt
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        failed = FAILED.findall(output)
        if process.returncode > 0 and not failed:
            raise RuntimeError(f"pytest {' '.join(arguments)} ended with {process.returncode}:\n{output[-2000:]}")
        return failed[0] if failed else "crash" if process.returncode else None

    def find_test(self, fault, runs, seconds):
        """Return the first test of these runs that fails with a fault and passes without, "timeout", "crash", or None."""
        for run in runs:
            arguments = [str(path) for part in run.split() for path in sorted(self.folder.glob(part)) or [part]]
            while True:
                with self.planted(fault):
                    test = self.first_failure(arguments, seconds)
                if test is None:
                    break
                again = arguments if test in ("timeout", "crash") else [test]
                if test in self.passing or self.first_failure(again, seconds) is None:
                    self.passing |= {test} - {"timeout", "crash"}
                    return test
                if test in ("timeout", "crash"):
                    raise RuntimeError(f"{test} without {fault.id} too: pytest {run}")
                print(f"{test} fails without a fault too: it is left out", file=sys.stderr)
                self.broken.add(test)
        return None


def main():
    """Run the faults that the arguments choose; return 1 if one survives or does not apply."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check that each fault applies")
    parser.add_argument("--only", nargs="+", metavar="ID", help="run these faults, also if they have a result")
    options = parser.parse_args()
    if problems := find_problems():
        print(*problems, sep="\n", file=sys.stderr)
    if problems or options.check:
        return len(problems) > 0
    copy = TreeCopy(ROOT, ROOT / "build/mutants/tree")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    path = ROOT / "build/mutants/results.json"
    kept = json.loads(path.read_text()) if path.is_file() else {}
    rows = {name: row for name, row in kept.items() if row["commit"] == commit and name not in (options.only or ())}
    todo = [name for name in options.only or FAULTS if name not in rows]
    for number, name in enumerate(todo, 1):
        start, (area, fault) = time.monotonic(), FAULTS[name]
        test = copy.find_test(fault, area.tests, AREA_SECONDS) or copy.find_test(fault, SUITE, SUITE_SECONDS)
        seconds = round(time.monotonic() - start)
        rows[name] = {"test": test, "seconds": seconds, "commit": commit}
        path.with_suffix(".tmp").write_text(json.dumps(rows, indent=0))
        path.with_suffix(".tmp").replace(path)
        print(
            f"{number}/{len(todo)} {name}: {f'found by {test}' if test else 'SURVIVES'} ({seconds} s)", file=sys.stderr
        )
    survivors = [name for name, row in rows.items() if row["test"] is None]
    print(f"{len(rows) - len(survivors)} of {len(rows)} faults are found.", *survivors, sep="\n", file=sys.stderr)
    return len(survivors) > 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
