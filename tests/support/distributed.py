"""Launcher of tests that need several processes: cases of one file, run by gloo processes that start once.

A test file has cases, which run in every process, and one test that reports them by name:

    from support.distributed import case, make_test

    @case(2)                                # in two processes; @case(1, 2): in one, and in two; @case(2, slow=True): a slow test
    def all_reduce_sums_ranks():
        t = torch.full((3,), 1.0 + dist.get_rank())
        dist.all_reduce(t)
        assert t.tolist() == [3.0] * 3

    test_sharded = make_test(globals())     # a test for each case, which fails with the traceback of the rank that failed

A case sees an initialized default process group (gloo, one thread each). It returns a value that `torch.save` can store, or None;
`run_cases` returns the ranks' values. The processes of a world size start when its first case is
checked; they are forks of one process per pytest process. A crash or a hang is reported for the case in which it happened, with the
signal or the time limit; the other cases run in new processes. `-k NAME` runs all cases of the world size and reports one;
`python tests/support/distributed.py FILE WORLD_SIZE NAME...` runs only the named cases.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib.util
import json
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
# What the cases import; each rank has it at its start.
PREPARED = (
    "addnorm.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
)
PATIENCE = 20  # seconds that a rank which failed waits for the others before the processes are replaced


def case(*world_sizes: int, slow: bool = False) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Mark a function as a case that runs in each process of these numbers of processes; slow ones start processes of their own."""

    def mark(function: Callable[[], Any]) -> Callable[[], Any]:
        function.world_sizes = world_sizes  # type: ignore[attr-defined]
        function.is_slow = slow  # type: ignore[attr-defined]
        return function

    return mark


def _select_names(namespace: dict[str, Any], world_size: int, is_slow: bool | None = None) -> list[str]:
    cases = [(name, value) for name, value in namespace.items() if world_size in getattr(value, "world_sizes", ())]
    return [name for name, case in cases if is_slow is None or case.is_slow == is_slow]


def make_test(namespace: dict[str, Any]) -> Callable[..., None]:
    """Return the test that reports the cases of a module's namespace, one by one."""
    cases = [(name, value) for name, value in namespace.items() if hasattr(value, "world_sizes")]
    slow = (pytest.mark.slow,)
    parameters = [
        pytest.param(name, n, marks=slow if case.is_slow else ()) for name, case in cases for n in case.world_sizes
    ]

    @functools.cache
    def run(world_size: int, is_slow: bool) -> dict[str, list[Any]]:
        return run_cases(Path(namespace["__file__"]), world_size, _select_names(namespace, world_size, is_slow))

    @pytest.mark.parametrize(("name", "world_size"), parameters)
    def test(name: str, world_size: int) -> None:
        results = run(world_size, namespace[name].is_slow)[name]
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(results) if not ok]
        assert not failures, f"{name} with {world_size} processes\n" + "\n".join(failures)

    return test


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


class Server:
    """Process that has imported torch and forks the ranks of each request, so that they need not import it again."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        paths = (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that `stop` ends the ranks too
        )
        atexit.register(self.stop)

    def run(self, *request: Any) -> dict[str, Any]:
        """Run one set of processes; return the exit code of each rank and whether the time limit was reached."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        except BaseException:  # an interrupt too
            self.stop()
            raise
        return answer

    def stop(self) -> None:
        """End the process and the ranks."""
        _server.cache_clear()
        atexit.unregister(self.stop)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.__exit__(None, None, None)  # closes the pipes


@functools.cache
def _server() -> Server:
    return Server()


def _run_processes(file: Path, world_size: int, names: list[str], folder: Path, timeout: float) -> dict[str, list[Any]]:
    """Run cases in one set of processes, up to the first one after which they cannot go on."""
    answer = _server().run(str(file), world_size, names, str(folder), timeout)
    reason = f"the case took more than {timeout:g} s; " if answer["late"] else ""
    results: dict[str, list[Any]] = {}
    for name in names:
        paths = [folder / f"result-{name}-{rank}" for rank in range(world_size)]
        results[name] = [
            torch.load(path, weights_only=False)
            if path.exists()
            else (
                False,
                reason + _explain_exit(answer["codes"][rank], (folder / f"log-{rank}").read_text(errors="replace")),
            )
            for rank, path in enumerate(paths)
        ]
        if not all(path.exists() for path in paths):
            break
    return results


def _serve() -> None:
    """Answer requests until the standard input is closed."""
    for module in PREPARED:
        importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(_fork_ranks(*json.loads(line))), flush=True)


def _fork_ranks(file: str, world_size: int, names: list[str], folder: str, timeout: float) -> dict[str, Any]:
    """Run the ranks to their end; end them all soon after the first failure or after `timeout` seconds in one case."""
    pids = [_fork_rank(Path(file), world_size, names, rank, Path(folder)) for rank in range(world_size)]
    codes: dict[int, int] = {}

    def wait(options: int) -> None:
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, options)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)

    last, since, late = -1, time.monotonic(), False
    while len(codes) < world_size:
        finished = len([*Path(folder).glob("result-*")])
        if finished != last:
            last, since = finished, time.monotonic()
        late = time.monotonic() - since > timeout
        if late:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGABRT)  # faulthandler prints where they are
        if late or any(codes.values()):
            time.sleep(0.5)  # the other ranks may be about to report the same
            break
        time.sleep(0.02)
        wait(os.WNOHANG)
    wait(os.WNOHANG)
    for pid in set(pids) - codes.keys():
        os.kill(pid, signal.SIGKILL)
    wait(0)
    return {"codes": [codes[pid] for pid in pids], "late": late}


def _fork_rank(file: Path, world_size: int, names: Sequence[str], rank: int, folder: Path) -> int:
    """Return the process id of a new rank, whose output goes to its log."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with (folder / f"log-{rank}").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        _run_rank(file, world_size, names, rank, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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
    """Run cases by name and print their results, or serve such runs."""
    if arguments == ["--serve"]:
        _serve()
        return
    file, world_size = Path(arguments[0]), int(arguments[1])
    names = arguments[2:] or _select_names(vars(_load(file)), world_size)
    for name, results in run_cases(file, world_size, names).items():
        for rank, (ok, value) in enumerate(results):
            print("ok  " if ok else "FAIL", name, f"rank {rank}:", value, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
