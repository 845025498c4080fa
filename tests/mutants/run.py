"""Plant each fault in a copy of the tree and report which test finds it.

    make mutants                                          every fault that has no result for this commit yet
    PYTHONPATH=tests python tests/mutants/run.py --only ID ...    these faults again
    PYTHONPATH=tests python tests/mutants/run.py --check          only check that each fault applies

The copy is build/mutants/tree; the working tree is not edited. A fault runs against the tests of its area up to the first
failure. Faults that survive run against the whole default suite. At the end each test that found a fault must pass without it.
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
from pathlib import Path

from mutants.fault import Fault
from mutants.faults import AREAS
from mutants.structure import Edit, find_edits

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "src/addnorm/_C.so"
SUITE = ("tests src -n3 --dist=loadfile",)  # as in make test
AREA_SECONDS, SUITE_SECONDS = 900, 3600  # timeouts of one pytest run
FAULTS = {fault.id: fault for area in AREAS.values() for fault in area.faults}
AREA_OF = {fault.id: name for name, area in AREAS.items() for fault in area.faults}
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


def locate(root: Path, fault: Fault) -> list[tuple[Path, Edit]]:
    """Return all files of a tree and places in them that the pattern of a fault matches."""
    place, _, scope = fault.place.partition(":")
    is_cpp = place.startswith("csrc")
    start = root / place if is_cpp else root / "src/addnorm" / place
    found = []
    for path in sorted((start, *start.rglob("*"))):
        if path.suffix in ((".h", ".cpp") if is_cpp else (".py", ".js")):
            language = scope if path.suffix == ".py" else None
            found += [(path, edit) for edit in find_edits(path.read_text(), fault.old, fault.new, language)]
    return found


def find_problems(root: Path = ROOT) -> list[str]:
    """Return one sentence for each fault that does not apply to a tree, and for each pattern of tests without a file."""
    problems = []
    for fault in FAULTS.values():
        lines = [
            (str(path.relative_to(root)), path.read_bytes().count(b"\n", 0, edit.start) + 1)
            for path, edit in locate(root, fault)
        ]
        if len(lines) != 1:
            found = f"matches {len(lines)} places of {fault.place} {lines}"
            problems.append(f"{fault.id}: {fault.old!r} {found}, expected one: update the fault.")
    patterns = {pattern for area in AREAS.values() for run in area.tests for pattern in run.split()}
    missing = sorted(pattern for pattern in patterns if not any(root.glob(pattern)))
    return problems + [f"{pattern} matches no file, expected tests: update its area." for pattern in missing]


class TreeCopy:
    """A copy of the tree in which faults are planted and tests run."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        self.times = itertools.count(int(time.time()))  # bytecode is matched by file size and whole seconds
        self.broken: list[str] = []  # tests that fail without a fault
        shutil.rmtree(folder, ignore_errors=True)
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout.split("\0")
        for name in [*names[:-1], LIBRARY]:
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        self.library = (folder / LIBRARY).read_bytes()

    @contextlib.contextmanager
    def planted(self, fault: Fault):
        """Edit the place of a fault, rebuild the kernels if it is in C++, and restore both at the end."""
        [(path, edit)] = locate(self.folder, fault)
        content, library = path.read_bytes(), self.folder / LIBRARY
        try:
            self._write(path, content[: edit.start] + edit.new.encode() + content[edit.end :])
            if fault.place.startswith("csrc"):
                build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
                subprocess.run(build, cwd=self.folder, check=True, stdout=sys.stderr)
            yield
        finally:
            self._write(path, content)
            library.write_bytes(self.library)

    def _write(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        when = next(self.times)
        os.utime(path, (when, when))

    def failures(self, arguments: list[str], seconds: float) -> list[str]:
        """Run pytest and return the tests that fail; ["timeout"] if it takes longer than `seconds`, ["crash"] if it crashes."""
        environment = os.environ | {"PYTHONPATH": str(self.folder / "src"), "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow"]
        command += [f"--deselect={test}" for test in self.broken]
        process = subprocess.Popen(
            [*command, *arguments], cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return ["timeout"]
        finally:  # kill all test processes, also after an interrupt
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        failed = FAILED.findall(output)
        if process.returncode < 0 and not failed:
            return ["crash"]
        if process.returncode and not failed:
            raise RuntimeError(f"pytest {' '.join(arguments)} ended with {process.returncode}:\n{output[-2000:]}")
        return failed

    def find_test(self, fault: Fault, runs: tuple[str, ...], seconds: float) -> str | None:
        """Return the first test of these runs that fails with a fault, "timeout", "crash", or None if all pass.

        Raises:
            RuntimeError: pytest crashes without the fault too.
        """
        with self.planted(fault):
            for run in runs:
                arguments = [str(path) for part in run.split() for path in sorted(self.folder.glob(part)) or [part]]
                if failed := self.failures(["-x", *arguments], seconds):
                    break
        if failed == ["crash"] and self.failures(["-x", *arguments], seconds) == failed:
            raise RuntimeError(f"pytest {run} crashes without {fault.id} too.")
        return failed[0] if failed else None


class Results:
    """The results of one commit in a file, one row for each fault."""

    def __init__(self, path: Path, commit: str) -> None:
        self.path, self.commit = path, commit
        self.passing: set[str] = set()  # tests that pass without a fault
        times = json.loads(path.read_text()) if path.is_file() else {}
        self.rows = {name: row for name, row in times.items() if row["commit"] == commit}

    def add(self, fault: Fault, test: str | None, stage: str, seconds: float) -> None:
        """Add the result of a fault and write the file."""
        row = {
            "area": AREA_OF[fault.id],
            "test": test,
            "survives": None if test else stage,
            "seconds": round(seconds, 1),
        }
        self.rows[fault.id] = row | {"commit": self.commit}
        self.write()

    def write(self) -> None:
        """Write the file, whole or not at all."""
        text = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in self.rows.items())
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(f"{{\n{text}\n}}\n")
        temporary.replace(self.path)

    def drop_broken(self, copy: TreeCopy) -> None:
        """Run each test that found a fault without the fault; if it fails then too, leave it out and drop its results."""
        tests = {row["test"] for row in self.rows.values()} - {None, "timeout", "crash"} - self.passing
        broken = {*copy.failures(sorted(tests), SUITE_SECONDS)} & tests if tests else set()
        self.passing |= tests - broken
        copy.broken += broken
        self.rows = {name: row for name, row in self.rows.items() if row["test"] not in broken}
        self.write()
        for test in broken:
            print(f"{test} fails without a fault too: it is left out", file=sys.stderr)


def main() -> int:
    """Run the faults that the arguments choose; return 1 if one survives or does not apply."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check that each fault applies")
    parser.add_argument("--only", nargs="+", metavar="ID", help="run these faults, also if they have a result")
    parser.add_argument("--no-suite", action="store_true", help="do not run survivors against the whole suite")
    parser.add_argument("--tree", type=Path, default=ROOT, help="tree to copy (default: this one)")
    parser.add_argument("--folder", type=Path, help="folder of the copy and the results (default: build/mutants)")
    options = parser.parse_args()
    if problems := find_problems(options.tree):
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    if options.check:
        return 0
    folder = options.folder or options.tree / "build/mutants"
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=options.tree, stdout=subprocess.PIPE, text=True, check=True)
    copy = TreeCopy(options.tree, folder / "tree")
    results = Results(folder / "results.json", head.stdout.strip())
    chosen = [fault for fault in FAULTS.values() if options.only is None or fault.id in options.only]
    for fault in chosen if options.only else ():
        results.rows.pop(fault.id, None)

    def next_stage(fault: Fault) -> str | None:
        row = results.rows.get(fault.id)
        return "area" if row is None else "suite" if row["survives"] == "area" and not options.no_suite else None

    suite_runs = 0
    while faults := sorted((fault for fault in chosen if next_stage(fault)), key=next_stage):
        for number, fault in enumerate(faults, 1):
            start, stage = time.monotonic(), next_stage(fault)
            runs, limit = (SUITE, SUITE_SECONDS) if stage == "suite" else (AREAS[AREA_OF[fault.id]].tests, AREA_SECONDS)
            if stage == "suite" and suite_runs == 0:  # leave out tests that fail without any fault
                copy.broken += copy.failures(SUITE[0].split(), SUITE_SECONDS)
            suite_runs += stage == "suite"
            test = copy.find_test(fault, runs, limit)
            seconds = time.monotonic() - start
            results.add(fault, test, stage, seconds)
            outcome = f"found by {test}" if test else f"SURVIVES the {stage}"
            print(f"{number}/{len(faults)} {fault.id}: {outcome} ({seconds:.0f} s)", file=sys.stderr)
        results.drop_broken(copy)
    survivors = [name for name, row in results.rows.items() if row["survives"]]
    summary = f"{len(results.rows) - len(survivors)} of {len(results.rows)} faults are found."
    print(summary, *survivors, sep="\n", file=sys.stderr)
    return 1 if survivors else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
