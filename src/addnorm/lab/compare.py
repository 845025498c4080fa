"""`compare`: the runs of a protocol, trained side by side in processes, and what they and the stacks at init say.

What it guarantees: a result that is there is not made again, also not by another comparison in the same directory; after a crash
the same call goes on, open runs from their last checkpoint. The parent alone writes results.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from addnorm import wirings
from addnorm._util.arguments import check_int
from addnorm._util.optional import require
from addnorm.lab import theory
from addnorm.lab.comparison import Comparison
from addnorm.lab.data import Text, topics
from addnorm.lab.measure import Numbers
from addnorm.lab.progress import Live
from addnorm.lab.protocol import ILLUSTRATION, Protocol
from addnorm.lab.result_store import Journal, tell_step
from addnorm.lab.run import SCHEMA, Run, digest, does, label
from addnorm.lab.train import one_thread, train
from addnorm.nn import Row, Wiring

__all__ = ["RunError", "compare"]

TOLD_EVERY = (
    0.3  # seconds between two words of where an open run stands, and between two looks whether the parent lives
)
INIT_STEPS = 1  # what a layer of the stacks of one wiring at init is worth, in steps of training


def compare(
    compared: Iterable[Wiring | Row | str] = ("post_ln", "pre_ln"),
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
    """Trains a character model under each wiring, and measures untrained stacks; all of it from seeds.

    Args:
        compared: the wirings.
        protocol: which runs; `ILLUSTRATION` takes two minutes, `FULL` about an hour.
        text: what the models learn; Python's documentation by default.
        out: a directory for the results. What is in it is not made again, so that the same call goes on where one was killed;
            None: nothing is kept.
        jobs: how many processes; None: one for each core.
        cluster: the address of a Dask scheduler, as in "tcp://10.0.0.5:8786", whose workers do it instead. They have addnorm
            installed; where they do not see the directory `out`, runs are not continued in the middle.
        training: False: only the stacks at init.
        at_init: False: only the training.
        seconds: between two checkpoints of a run.
        progress: a bar and a line on stderr, or on that console.

    Raises:
        ValueError: an argument that does not fit, or a directory that cannot be written to any more.
        ImportError: joblib is not installed, or dask.
        RunError: a run has failed, or the process in which it ran; what was finished before is in `out`.
        KeyboardInterrupt: it was interrupted; what was finished is in `out`.

    Example:
        >>> from addnorm import lab
        >>> quick = lab.Protocol(num_layers=2, warm_ups=0, steps=4, d_model=16, nhead=2, tokens=8, batch=4)
        >>> found = lab.compare(["post_ln", "pre_ln"], quick, at_init=False, jobs=1)
        >>> [run["settings"]["wiring"] for run in found.runs]
        ['post_ln', 'pre_ln']
    """
    given = [wirings.as_wiring(one) for one in ([compared] if isinstance(compared, str | Wiring | Row) else compared)]
    _refuse_twice([label(one) for one in given])
    for one in given:
        if repr(one).startswith("Wiring(") and one.name in wirings.CONSTRUCTORS:
            raise ValueError(f"compared has a wiring {one.name!r} that is not addnorm's, expected a name of its own.")
    text = (text or topics()).fits(protocol.tokens)
    runs = protocol.runs(given) if training else []
    if jobs is not None:
        check_int("jobs", jobs, 1)
    console = progress if isinstance(progress, Console) else Console(stderr=True) if progress else None
    todo = [_Job(run.key(text), f"run {run}", run.steps, run, text) for run in runs]
    todo += _at_init(given) if at_init else []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out
        journal = stack.enter_context(Journal(Path(folder)).writing())
        _make([job for job in todo if job.key not in journal.found], journal, jobs, cluster, seconds, console)
        found = [job.called(journal.found[job.key]) for job in todo]
    return Comparison(
        tuple(label(one) for one in given), protocol, [one for one in found if one["kind"] == "run"],
        [{**_made_with(one), **row} for one in found if one["kind"] == "init" for row in one["found"]],
        {"name": text.name, "characters": len(text.text), "symbols": len(text.characters), "digest": text.digest,
         "entropy": text.entropy, "uniform": text.uniform},
    )  # fmt: skip


def _made_with(result: Numbers) -> Numbers:
    return {name: result[name] for name in MADE_BY if name in result}


def _refuse_twice(names: Sequence[str]) -> None:
    if not names:
        raise ValueError("compared is empty, expected at least one wiring, such as 'pre_ln'.")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"compared has {name} {names.count(name)} times, expected each wiring once, and a name of its own for each."
            )


@dataclass(frozen=True)
class _Job:
    """A result that is to be made."""

    key: str
    name: str
    steps: int
    what: Run | tuple[theory.AtInit, ...]
    text: Text | None = None

    def called(self, result: Numbers) -> Numbers:
        """The result under this one's name: it may have been made for a wiring that does the same and is called otherwise."""
        if isinstance(self.what, Run):
            return {**result, "settings": self.what.settings()}
        return {**result, "found": [{**one, "wiring": theory.label(self.what[0].wiring)} for one in result["found"]]}


def _at_init(given: Sequence[Wiring]) -> list[_Job]:
    """The untrained stacks: those of the figures, and of what is compared."""
    which = {label(one): one for one in (*map(wirings.get, theory.WIRINGS), *given) if one.flow == "rows"}
    found = []
    for wiring in which.values():
        for n in theory.DEPTHS:
            stacks = tuple(theory.jobs([wiring], [n]))
            what = {"schema": SCHEMA, "init": does(wiring, n), "seeds": [one.seed for one in stacks], "n": n,
                    "own": stacks[0].own_init, "sequences": theory.SEQUENCES}  # fmt: skip
            found.append(_Job(digest(what), f"init {label(wiring)}, {n} layers", n * INIT_STEPS, stacks))
    return found


def _make(
    todo: Sequence[_Job],
    journal: Journal,
    jobs: int | None,
    cluster: str | None,
    seconds: float,
    console: Console | None,
) -> None:
    """Makes what is missing, and appends it as it comes."""
    if not todo:
        return
    # Wirings that do the same share a result. The long ones first, so that no process is left with one at the end.
    todo = sorted({job.key: job for job in todo}.values(), key=lambda job: -job.steps)
    names, steps = {job.key: job.name for job in todo}, {job.key: job.steps for job in todo}
    with _pool(jobs, cluster, len(todo)) as (parallel, delayed), Live(journal, steps, names, console) as live:
        local = None if cluster else os.getpid()
        made = parallel(delayed(_work)(job, str(journal.open.resolve()), seconds, local) for job in todo)
        try:
            for result in made:
                journal.append(result)
                live.done(result)
        except (RunError, ValueError, ImportError):
            raise
        except Exception as error:  # of the pool, by where it runs: a worker was killed, a scheduler has gone
            where = "of the cluster " if cluster else ""
            raise RunError(
                f"a process {where}was lost ({type(error).__name__}), for want of memory perhaps: the same call goes on; fewer "
                "jobs at a time need less."
            ) from error
        finally:
            made.close()


@contextmanager
def _pool(jobs: int | None, cluster: str | None, n_jobs: int) -> Iterator[tuple[Any, Any]]:
    """joblib's Parallel and delayed: on processes of this machine, or on a cluster."""
    joblib = require("joblib", "compare")
    options: dict[str, Any] = {"return_as": "generator_unordered"}
    if cluster is None:
        n = min(jobs or joblib.cpu_count(), n_jobs)
        with joblib.parallel_config(backend="loky", inner_max_num_threads=1):
            yield joblib.Parallel(n_jobs=n, **options), joblib.delayed
        return
    distributed = require("distributed", "compare on a cluster")
    if not re.fullmatch(r"(tcp|tls|wss?)://\S+:\d+", cluster):
        raise ValueError(
            f"cluster is {cluster!r}, expected the address of a Dask scheduler, as in tcp://10.0.0.5:8786."
        )
    try:
        client = distributed.Client(cluster, timeout="10s", set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"cluster is {cluster!r}, where no Dask scheduler answers ({error}).") from None
    with client, joblib.parallel_config(backend="dask", client=client):
        yield joblib.Parallel(n_jobs=jobs or -1, **options), joblib.delayed


def _work(job: _Job, folder: str, seconds: float, parent: int | None) -> Numbers:
    """Makes one result, in whatever process, or says which it was that failed."""
    if parent not in (None, os.getpid()):
        _serve(parent)
    try:
        return {**_made(job, folder, seconds), **made_by()}
    except Exception as error:  # whatever it was: in another process nobody sees which run it was in
        raise RunError(f"{job.name} has failed, {type(error).__name__}: {error}") from error


class RunError(RuntimeError):
    """A run has failed; the sentence says which, and why."""


@cache
def _serve(parent: int) -> None:
    """Makes this process one that works for its parent alone: an interrupt is the parent's, and it ends with it, busy or not."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(TOLD_EVERY)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


def _made(job: _Job, folder: str, seconds: float) -> Numbers:
    if isinstance(job.what, tuple):
        with one_thread():
            return {"kind": "init", "key": job.key, "found": [theory.at_init(one) for one in job.what]}
    visible = Path(folder).is_dir()
    told_at = 0.0

    def told(step: int, loss: float) -> None:
        nonlocal told_at
        if visible and time.monotonic() - told_at > TOLD_EVERY:
            tell_step(Path(folder) / f"{job.key}.json", step, loss)
            told_at = time.monotonic()

    assert job.text is not None
    checkpoint = Path(folder) / f"{job.key}.pt" if visible else None
    return train(job.what, job.text, checkpoint=checkpoint, seconds=seconds, told=told)


MADE_BY = ("addnorm", "torch", "date")


def made_by() -> Mapping[str, str]:
    """With what a result was made, and when."""
    return {
        "addnorm": version("addnorm"),
        "torch": version("torch"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
