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
`run_cases` returns the ranks' values. The processes of a world size start when its first case is checked; they are forks of Python's
fork server, which has imported torch. A crash or a hang is reported for the case in which it happened, with the last lines of the
rank; the other cases run in new processes. `-k NAME` runs all cases of the world size and reports one.
"""

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import signal
import tempfile
import traceback
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.loading import ROOT, load

TIMEOUT = 300  # seconds that one case may take
PATIENCE = 20  # seconds that a rank which failed waits for the others before the processes are replaced
FORKS = multiprocessing.get_context("forkserver")
# What the cases import; each rank has it at its start.
FORKS.set_forkserver_preload([
    "addnorm.distributed", "pytest", "torch.distributed.fsdp", "torch.distributed.tensor.debug", "torch.distributed.tensor.parallel",
    "torch._dynamo",
])  # fmt: skip


def case(*world_sizes, slow=False):
    """Mark a function as a case that runs in each process of these numbers of processes; slow ones start processes of their own."""

    def mark(function):
        function.world_sizes = world_sizes
        function.is_slow = slow
        return function

    return mark


def make_test(namespace):
    """Return the test that reports the cases of a module's namespace, one by one."""
    cases = [(name, value) for name, value in namespace.items() if hasattr(value, "world_sizes")]
    slow = (pytest.mark.slow,)
    parameters = [
        pytest.param(name, n, marks=slow if case.is_slow else ()) for name, case in cases for n in case.world_sizes
    ]

    @functools.cache
    def run(world_size, is_slow):
        names = [name for name, case in cases if world_size in case.world_sizes and case.is_slow == is_slow]
        return run_cases(Path(namespace["__file__"]), world_size, names)

    @pytest.mark.parametrize(("name", "world_size"), parameters)
    def test(name, world_size):
        results = run(world_size, namespace[name].is_slow)[name]
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(results) if not ok]
        assert not failures, f"{name} with {world_size} processes\n" + "\n".join(failures)

    return test


def run_cases(file, world_size, names, timeout=TIMEOUT):
    """Run cases and return for each rank of each case whether it passed, and its value or the reason of the failure."""
    results = {}
    left = [*names]
    while left:
        with tempfile.TemporaryDirectory() as folder:
            done = _run_processes(file, world_size, left, Path(folder), timeout)
        results |= done
        left = left[len(done) :]
    return results


def _run_processes(file, world_size, names, folder, timeout):
    """Run cases in one set of processes, up to the first one after which they cannot go on."""
    ranks = [
        FORKS.Process(target=_run_rank, args=(file, world_size, names, rank, folder, timeout), daemon=True)
        for rank in range(world_size)
    ]
    for rank, process in enumerate(ranks):
        (folder / f"log-{rank}").touch()
        process.start()
    try:
        while (running := [process.sentinel for process in ranks if process.exitcode is None]) and not any(
            process.exitcode for process in ranks
        ):
            connection.wait(running)
        for process in ranks:
            process.join(0.5)  # the other ranks may be about to report the same
    finally:
        for process in ranks:
            process.kill()
            process.join()
    results = {}
    for name in names:
        paths = [folder / f"result-{name}-{rank}" for rank in range(world_size)]
        results[name] = [
            torch.load(path, weights_only=False)
            if path.exists()
            else (False, _explain_exit(ranks[rank], folder / f"log-{rank}"))
            for rank, path in enumerate(paths)
        ]
        if not all(path.exists() for path in paths):
            break
    return results


def _explain_exit(process, log):
    code = process.exitcode
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{ended}; its last lines:\n{log.read_text(errors='replace')[-6000:]}"


def _run_rank(file, world_size, names, rank, folder, timeout):
    """Run the cases in one process."""
    with (folder / f"log-{rank}").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable()
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    status = dist.PrefixStore("status", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT))
    module = load(str(file.relative_to(ROOT)))
    for name in names:
        faulthandler.dump_traceback_later(timeout, exit=True)
        torch.manual_seed(0)
        try:
            result = (True, getattr(module, name)())
        except BaseException:
            result = (False, traceback.format_exc())
        partial = folder / f"partial-{rank}"
        torch.save(result, partial)
        partial.rename(folder / f"result-{name}-{rank}")
        status.set(f"{name}-{rank}", "done")
        limit = timeout if result[0] else PATIENCE  # ranks that did not fail may wait for one that did
        try:
            status.wait([f"{name}-{other}" for other in range(world_size)], timedelta(seconds=limit))
        except Exception:
            os._exit(3)
    faulthandler.cancel_dump_traceback_later()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
