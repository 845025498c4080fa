"""Launcher of tests that need several processes: cases of one file, run by gloo processes that start once.

A test file has cases, which run in every process, and one test that reports them by name:

    from support.distributed import case, launch, list_cases

    @case(2)                                # in two processes; @case(1, 2): in one, and in two; @case(2, slow=True): a slow test
    def all_reduce_sums_ranks():
        t = torch.full((3,), 1.0 + dist.get_rank())
        dist.all_reduce(t)
        assert t.tolist() == [3.0] * 3

    @pytest.fixture(scope="module")
    def results():
        return launch(__file__)

    @pytest.mark.parametrize(("name", "world_size"), list_cases(globals()))
    def test_sharded(results, name, world_size):
        results.check(name, world_size)     # fails with the traceback of the rank that failed; returns the ranks' values

A case sees an initialized default process group (gloo, one thread each). It returns a value that `torch.save` can store, or None.
The processes of a world size start when its first case is checked. A crash or a hang is reported for the case in which it happened;
the other cases run in new processes. `results.check` then names the signal or the time limit. `-k NAME` runs all cases of the world
size and reports one; `python tests/support/distributed.py FILE WORLD_SIZE NAME...` runs only the named cases.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

TIMEOUT = 300  # seconds that one case may take
PATIENCE = 20  # seconds that a rank which failed waits for the others before the processes are replaced


def case(*world_sizes: int, slow: bool = False) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Mark a function as a case that runs in each process of these numbers of processes; slow ones start processes of their own."""

    def mark(function: Callable[[], Any]) -> Callable[[], Any]:
        function.world_sizes = world_sizes  # type: ignore[attr-defined]
        function.is_slow = slow  # type: ignore[attr-defined]
        return function

    return mark


def list_cases(namespace: dict[str, Any]) -> list[Any]:
    """Return the names and the numbers of processes of the cases in a module's namespace, as parameters of a test."""
    cases = [(name, value) for name, value in namespace.items() if hasattr(value, "world_sizes")]
    slow = (pytest.mark.slow,)
    return [pytest.param(name, n, marks=slow if case.is_slow else ()) for name, case in cases for n in case.world_sizes]


def _select_names(module: Any, world_size: int, is_slow: bool | None = None) -> list[str]:
    cases = [(name, value) for name, value in vars(module).items() if world_size in getattr(value, "world_sizes", ())]
    return [name for name, case in cases if is_slow is None or case.is_slow == is_slow]


class Results:
    """Results of the cases of one file."""

    def __init__(self, file: Path, timeout: float) -> None:
        self.file, self.timeout = file, timeout
        self._results: dict[
            tuple[int, bool], dict[str, list[Any]]
        ] = {}  # by kind of launch and case: one result a rank

    def check(self, name: str, world_size: int) -> list[Any]:
        """Return what a case returned in each rank; fail as it failed."""
        module = _load(self.file)
        launch = world_size, getattr(module, name).is_slow
        if launch not in self._results:
            self._results[launch] = run_cases(self.file, world_size, _select_names(module, *launch), self.timeout)
        results = self._results[launch][name]
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(results) if not ok]
        assert not failures, f"{name} with {world_size} processes\n" + "\n".join(failures)
        return [value for _, value in results]


def launch(file: str, timeout: float = TIMEOUT) -> Results:
    """Return the results of a file's cases; `timeout` is the number of seconds that one case may take."""
    return Results(Path(file), timeout)


def run_cases(file: Path, world_size: int, names: Sequence[str], timeout: float = TIMEOUT) -> dict[str, list[Any]]:
    """Run cases and return for each rank of each case whether it passed, and its value or the reason of the failure."""
    results: dict[str, list[Any]] = {}
    left = [*names]
    while left:
        with tempfile.TemporaryDirectory() as folder:
            done = _run_processes(file, world_size, left, Path(folder), timeout)
        results |= done
        left = left[len(done) :]
    return results


def _run_processes(file: Path, world_size: int, names: list[str], folder: Path, timeout: float) -> dict[str, list[Any]]:
    """Run cases in one set of processes, up to the first one after which they cannot go on."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    paths = (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, __file__, str(file), str(world_size), *names]
    logs = [(folder / f"log-{rank}").open("wb") for rank in range(world_size)]
    workers = [
        subprocess.Popen(
            [*command, "--rank", str(rank), "--folder", str(folder)], env=environment, stdout=log, stderr=log
        )
        for rank, log in enumerate(logs)
    ]
    reason = ""
    try:
        last, since = -1, time.monotonic()
        while any(worker.poll() is None for worker in workers):
            finished = len([*folder.glob("result-*")])
            if finished != last:
                last, since = finished, time.monotonic()
            if any(worker.poll() for worker in workers):
                time.sleep(0.5)  # the other ranks may be about to report the same
                break
            if time.monotonic() - since > timeout:
                reason = f"the case took more than {timeout:g} s; "
                for worker in workers:
                    worker.send_signal(signal.SIGABRT)  # faulthandler prints where they are
                time.sleep(0.5)
                break
            time.sleep(0.02)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
        codes = [worker.wait() for worker in workers]
        for log in logs:
            log.close()
    results: dict[str, list[Any]] = {}
    for name in names:
        paths = [folder / f"result-{name}-{rank}" for rank in range(world_size)]
        results[name] = [
            torch.load(path, weights_only=False)
            if path.exists()
            else (False, reason + _explain_exit(codes[rank], (folder / f"log-{rank}").read_text(errors="replace")))
            for rank, path in enumerate(paths)
        ]
        if not all(path.exists() for path in paths):
            break
    return results


def _explain_exit(code: int, log: str) -> str:
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{ended}; its last lines:\n{log[-6000:]}"


def _load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and pickles look it up
    spec.loader.exec_module(module)
    return module


def _run_rank(file: Path, world_size: int, names: Sequence[str], rank: int, folder: Path) -> None:
    """Run the cases in one process."""
    faulthandler.enable()
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    status = dist.PrefixStore("status", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT))
    module = _load(file)
    for name in names:
        torch.manual_seed(0)
        try:
            result: tuple[bool, Any] = (True, getattr(module, name)())
        except BaseException:
            result = (False, traceback.format_exc())
        partial = folder / f"partial-{rank}"
        torch.save(result, partial)
        partial.rename(folder / f"result-{name}-{rank}")
        status.set(f"{name}-{rank}", "done")
        limit = TIMEOUT if result[0] else PATIENCE  # ranks that did not fail may wait for one that did
        try:
            status.wait([f"{name}-{other}" for other in range(world_size)], timedelta(seconds=limit))
        except Exception:
            os._exit(3)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Run cases by name and print their results, or run one process of such a run."""
    if "--rank" in arguments:
        *arguments, _, rank, _, folder = arguments
        _run_rank(Path(arguments[0]), int(arguments[1]), arguments[2:], int(rank), Path(folder))
        return
    file, world_size = Path(arguments[0]), int(arguments[1])
    names = arguments[2:] or _select_names(_load(file), world_size)
    for name, results in run_cases(file, world_size, names).items():
        for rank, (ok, value) in enumerate(results):
            print("ok  " if ok else "FAIL", name, f"rank {rank}:", value, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
