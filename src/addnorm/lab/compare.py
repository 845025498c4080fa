"""`compare`: train the runs of a protocol in parallel processes, measure untrained stacks, and show the progress.

Results that exist are reused, also by another comparison in the same directory. After a crash the same call continues, open runs
from their last checkpoint. Only the parent process writes results.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text as RichText

from addnorm import wirings
from addnorm._util.arguments import check_int
from addnorm._util.files import UnwritableError
from addnorm._util.optional import require
from addnorm.lab import theory
from addnorm.lab.comparison import Comparison
from addnorm.lab.data import Text, python_docs
from addnorm.lab.result_store import ResultStore, read_progress, write_progress
from addnorm.lab.run import ILLUSTRATION, SCHEMA, Protocol, Run, describe_behaviour, hash_json, wiring_label
from addnorm.lab.streams import Numbers
from addnorm.lab.train import one_thread, train
from addnorm.nn import Row, Wiring

PROGRESS_INTERVAL = 0.3  # seconds between two progress files of a run, and between two checks that the parent lives
DISPLAY_INTERVAL = 0.25  # seconds between two updates of the progress bar
FIRST_LINE, NEXT_LINE = 2.0, 10.0  # seconds until a line of progress where there is no bar, and between two such lines
INIT_STEPS = 1  # cost of one layer of a wiring's untrained stacks, in training steps
BAR_MARGIN = 40  # columns beside the progress bar and the open runs


def compare(
    compared: Iterable[Wiring | Row | str] | Wiring | Row | str = ("post_ln", "pre_ln"),
    protocol: Protocol = ILLUSTRATION,
    *,
    text: Text | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    cluster: str | None = None,
    training: bool = True,
    at_init: bool = True,
    seconds: float = 5.0,
    progress: bool | Console = False,
) -> Comparison:
    """Train a character model under each wiring, measure untrained stacks, and return the comparison.

    Args:
        compared: the wirings, or their names.
        protocol: the runs. `ILLUSTRATION` takes two minutes, `FULL` about an hour.
        text: the training text; Python's documentation by default.
        out: directory of the results. Existing results are reused, so that the same call continues an interrupted
            comparison. None keeps no results.
        jobs: number of processes; None is one per core.
        cluster: address of a Dask scheduler, as in "tcp://10.0.0.5:8786", whose workers run the jobs. addnorm must be installed
            there. Workers that cannot access `out` cannot continue a run from its checkpoint.
        training: False measures only the untrained stacks.
        at_init: False skips the untrained stacks.
        seconds: minimum time between two checkpoints of a run.
        progress: show a progress bar on stderr, or on the given console.

    There are ten parameters, since each is an option of the command line.

    Raises:
        TypeError: `protocol` or `text` is another object.
        ValueError: an argument has a wrong value.
        OSError: the directory can no longer be written. Finished results are in `out`.
        ImportError: joblib, or dask, is not installed.
        RunError: a run or its process failed. Finished results are in `out`.
        KeyboardInterrupt: the user interrupted it. Finished results are in `out`.

    Example:
        >>> from addnorm import lab
        >>> quick = lab.Protocol(num_layers=2, warm_ups=0, steps=4, d_model=16, nhead=2, tokens=8, batch=4)
        >>> comparison = lab.compare(["post_ln", "pre_ln"], quick, at_init=False, jobs=1)
        >>> [run["settings"]["wiring"] for run in comparison.runs]
        ['post_ln', 'pre_ln']
    """
    chosen = [
        wirings.as_wiring(wiring) for wiring in ([compared] if isinstance(compared, str | Wiring | Row) else compared)
    ]
    names = tuple(map(wiring_label, chosen))
    _check_names(names)
    for wiring in chosen:
        if repr(wiring).startswith("Wiring(") and wiring.name in wirings.CONSTRUCTORS:
            raise ValueError(
                f"compared has a wiring named {wiring.name!r} that differs from addnorm's, expected a name of its own."
            )
    if not isinstance(protocol, Protocol):
        raise TypeError(f"protocol is {type(protocol).__name__}, expected a lab.Protocol: lab.Protocol(num_layers=6).")
    if text is not None and not isinstance(text, Text):
        raise TypeError(f"text is {type(text).__name__}, expected a lab.Text: lab.read_text(path) reads a file.")
    text = (text or python_docs()).require_length(protocol.tokens)
    runs = protocol.runs(chosen) if training else []
    if jobs is not None:
        check_int("jobs", jobs, 1)
    if cluster is not None and not re.fullmatch(r"(tcp|tls|wss?)://\S+:\d+", cluster):
        raise ValueError(
            f"cluster is {cluster!r}, expected the address of a Dask scheduler, as in tcp://10.0.0.5:8786."
        )
    console = progress if isinstance(progress, Console) else Console(stderr=True, quiet=not progress)
    todo = [Job(run.key(text), f"run {run}", run.steps, run, text) for run in runs]
    todo += _init_jobs(chosen) if at_init else []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out
        store = stack.enter_context(ResultStore(Path(folder)).writing())
        for job in todo:
            store.check(job.key)
        _run_jobs([job for job in todo if job.key not in store.results], store, jobs, cluster, seconds, console)
        results = [job.renamed(store.results[job.key]) for job in todo]
    return Comparison(
        names, protocol, [result for result in results if result["kind"] == "run"],
        [
            {**{name: result[name] for name in _provenance() if name in result}, **row}
            for result in results if result["kind"] == "untrained" for row in result["stacks"]
        ],
        text.describe(),
    )  # fmt: skip


def _check_names(names: Sequence[str]) -> None:
    """Raise a ValueError if there is no wiring, or if two wirings have the same name."""
    if not names:
        raise ValueError("compared is empty, expected at least one wiring, such as 'pre_ln'.")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"compared has {name} {names.count(name)} times, expected each wiring once, each with a name of its own."
            )


@dataclass(frozen=True)
class Job:
    """Result that is to be computed: a run, or the untrained stacks of one wiring and depth."""

    key: str
    name: str
    steps: int
    work: Run | tuple[theory.InitStack, ...]
    text: Text | None = None

    def renamed(self, result: Numbers) -> Numbers:
        """Return `result` with the name of this job's wiring. A stored result may come from an equal wiring with another name."""
        if isinstance(self.work, Run):
            return {**result, "settings": self.work.settings()}
        name = wiring_label(self.work[0].wiring)
        return {**result, "stacks": [{**stack, "wiring": name} for stack in result["stacks"]]}


def _init_jobs(compared: Sequence[Wiring]) -> list[Job]:
    """Return the jobs that measure untrained stacks, for the wirings of the published results and for the `compared` ones."""
    rows = {
        wiring_label(wiring): wiring
        for wiring in (*map(wirings.get, (*theory.WIRINGS, *theory.STREAM_WIRINGS)), *compared)
        if wiring.is_sequential or wiring.name in theory.STREAM_WIRINGS
    }
    jobs = []
    for wiring in rows.values():
        for n in theory.DEPTHS if wiring.has_rows else theory.STREAM_DEPTHS:
            stacks = tuple(theory.init_stacks([wiring], [n]))
            document = {
                "schema": SCHEMA, "init": describe_behaviour(wiring, n), "seeds": [stack.seed for stack in stacks], "n": n,
                "own": stacks[0].own_init, "sequences": theory.SEQUENCES,
            }  # fmt: skip
            jobs.append(Job(hash_json(document), f"init {wiring_label(wiring)}, {n} layers", n * INIT_STEPS, stacks))
    return jobs


def _run_jobs(
    todo: Sequence[Job],
    store: ResultStore,
    jobs: int | None,
    cluster: str | None,
    seconds: float,
    console: Console,
) -> None:
    """Compute the results of the jobs `todo` in parallel, and append each to `store` when it is finished."""
    if not todo:
        return
    # Wirings with the same rows share a result. Long jobs come first, so that no process still runs a long job at the end.
    todo = sorted({job.key: job for job in todo}.values(), key=lambda job: -job.steps)
    work = require("joblib", "compare").delayed(_work)
    with _pool(jobs, cluster, len(todo)) as parallel, show_progress(store, todo, console) as finish:
        parent = None if cluster else os.getpid()
        results = parallel(work(job, str(store.open.resolve()), seconds, parent) for job in todo)
        try:
            for result in results:
                store.append(result)
                finish(result)
        except (RunError, ValueError, ImportError, UnwritableError):
            raise
        except Exception as error:  # the pool's errors depend on the backend: a killed worker, a lost scheduler
            where = "of the cluster " if cluster else ""
            raise RunError(
                f"a process {where}was lost ({type(error).__name__}), perhaps for lack of memory: repeat the call, which "
                "continues here; fewer jobs need less memory."
            ) from error
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings about tasks that are cancelled after an error
                results.close()


@contextmanager
def _pool(jobs: int | None, cluster: str | None, n_jobs: int) -> Iterator[Any]:
    """Yield joblib's `Parallel`, for processes on this machine or, with `cluster`, for a Dask scheduler."""
    joblib = require("joblib", "compare")
    options: dict[str, Any] = {"return_as": "generator_unordered"}
    if cluster is None:
        n = min(jobs or joblib.cpu_count(), n_jobs)
        with joblib.parallel_config(backend="loky", inner_max_num_threads=1):
            yield joblib.Parallel(n_jobs=n, **options)
        return
    distributed = require("distributed", "compare on a cluster")
    client = distributed.Client.__new__(distributed.Client)
    try:
        client.__init__(cluster, timeout="10s", set_as_default=False)
    except (
        OSError,
        ValueError,
        TypeError,
        MemoryError,
    ) as error:  # MemoryError: another server's answer, read as a length
        client.close = lambda: None  # its finalizer would wait for the scheduler
        raise ValueError(f"cluster is {cluster!r}, where no Dask scheduler answers ({error}).") from None
    with client, joblib.parallel_config(backend="dask", client=client):
        yield joblib.Parallel(n_jobs=jobs or -1, **options)


def _work(job: Job, folder: str, seconds: float, parent: int | None) -> Numbers:
    """Compute the result of `job` in a worker process. Any error becomes a `RunError` that names the job."""
    if parent not in (None, os.getpid()):
        _follow_parent(parent)
    try:
        return {**_compute(job, folder, seconds), **_provenance()}
    except Exception as error:  # any error: the parent cannot see which run it came from
        raise RunError(f"{job.name} failed, {type(error).__name__}: {error}") from error


class RunError(RuntimeError):
    """Failed run. The message names the run and the reason. The runs that had ended are kept in the folder of the comparison.

    Example:
        >>> from addnorm import lab
        >>> quick = lab.Protocol(num_layers=2, warm_ups=0, steps=4, d_model=16, nhead=2, tokens=8, batch=4)
        >>> try:
        ...     comparison = lab.compare(["pre_ln"], quick, at_init=False, jobs=1)
        ... except lab.RunError as error:
        ...     print(error)
    """


@cache
def _follow_parent(parent: int) -> None:
    """Leave interrupts to the parent process, and end this process when the parent ends."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PROGRESS_INTERVAL)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


def _compute(job: Job, folder: str, seconds: float) -> Numbers:
    """Return the result of `job`: train its run, or measure its untrained stacks."""
    if isinstance(job.work, tuple):
        with one_thread():
            return {"kind": "untrained", "key": job.key, "stacks": [theory.measure_init(stack) for stack in job.work]}
    visible = Path(folder).is_dir()
    written = 0.0

    def on_step(step: int, loss: float) -> None:
        nonlocal written
        if visible and time.monotonic() - written > PROGRESS_INTERVAL:
            write_progress(Path(folder) / f"{job.key}.json", step, loss)
            written = time.monotonic()

    assert job.text is not None
    checkpoint = Path(folder) / f"{job.key}.pt" if visible else None
    return train(job.work, job.text, checkpoint=checkpoint, seconds=seconds, on_step=on_step)


def _provenance() -> Numbers:
    """Return the versions of addnorm and torch and the current time. Each result stores them."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"addnorm": version("addnorm"), "torch": version("torch"), "date": date}


@contextmanager
def show_progress(store: ResultStore, jobs: Sequence[Job], console: Console) -> Iterator[Callable[[Numbers], None]]:
    """Show the progress of a comparison: a line for each finished run, and a bar with the open runs.

    If the console is not a terminal, it gets lines of progress instead of a bar.

    Args:
        store: the store whose directory has the progress files of open runs.
        jobs: the jobs of the missing results.
        console: the console. A quiet console shows nothing.

    Yields:
        The function that counts a finished result.
    """
    steps = {job.key: job.steps for job in jobs}
    runs = {job.key: job.work for job in jobs if isinstance(job.work, Run)}
    total, finished = max(sum(steps.values()), 1), set[str]()
    is_animated = console.is_terminal and not console.quiet  # a bar redirects what the program prints
    bar_width = max(1, min(console.width // 4, console.width - BAR_MARGIN))
    columns = (TextColumn("compare"), BarColumn(bar_width=bar_width), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn(),
               TextColumn("·"), TimeRemainingColumn(), TextColumn("left  {task.description}"))  # fmt: skip
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not is_animated)
    over = threading.Event()

    def print_line(line: str) -> None:
        console.print(RichText(line), soft_wrap=True)

    def read_steps() -> tuple[int, str]:
        """Return the number of finished steps, and the open runs as text that fits the bar."""
        done, text = sum(steps[key] for key in finished), ""
        for key, run in runs.items():
            if key not in finished and (progress := read_progress(store.open / f"{key}.json")) is not None:
                step, loss = progress
                done += step
                longer = f"{text}  {run.name} {step}/{steps[key]} {loss:.2f}".strip()
                text = longer if len(longer) <= console.width - bar_width - BAR_MARGIN else text
        return done, text

    def update() -> None:
        wait = DISPLAY_INTERVAL if is_animated else FIRST_LINE
        while not over.wait(wait):
            done, text = read_steps()
            bar.update(task, completed=done, description=text, refresh=True)
            if not is_animated:
                wait = NEXT_LINE
                print_line(f"{len(finished)} of {len(steps)} results finished, {done / total:.0%} of all steps")

    def finish(result: Numbers) -> None:
        key = result["key"]
        finished.add(key)
        if key in runs:
            number = len(finished & runs.keys())
            print_line(f"{number}/{len(runs)}  {runs[key]}: {describe_outcome(result)}")

    updater = threading.Thread(target=update, daemon=True)
    with bar:
        task = bar.add_task("", total=total, completed=read_steps()[0])  # earlier steps do not count for the speed
        updater.start()
        try:
            yield finish
        finally:
            over.set()
            updater.join()


def describe_outcome(result: Numbers) -> str:
    """Return the loss and the time of a run as text, as in "2.501 nats a character, 37 s"."""
    seconds = f"{result['seconds']:.0f} s"
    if result["diverged"]:
        return f"diverged, {seconds}"
    return f"{result['test']:.3f} nats a character, {seconds}" + (", continued" if result["resumed"] else "")
