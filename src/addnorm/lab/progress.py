"""What is seen of a comparison while it runs: a bar with the time that is left, and a line that tells where the open runs stand.

On a terminal both move; elsewhere each result is a line. All of it goes to stderr.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from addnorm.lab.measure import Numbers
from addnorm.lab.result_store import Journal, step_of

__all__ = ["Live"]

EVERY = 0.25  # seconds between two looks at the open runs
BESIDE = 40  # columns of what stands beside the bar and the open runs, of which those are told for which there is room


class Live:
    """Shows how far a comparison is.

    Args:
        journal: in whose directory open runs tell where they stand.
        steps: of each result that is missing, by its key: how much work it is.
        names: what each is called.
        console: stderr by default; None shows nothing.
    """

    def __init__(
        self, journal: Journal, steps: Mapping[str, int], names: Mapping[str, str], console: Console | None
    ) -> None:
        self.journal, self.steps, self.names, self.console = journal, steps, names, console
        self.finished: set[str] = set()
        self.total = sum(steps.values())
        self.moves = console is not None and console.is_terminal
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        width = 0 if console is None else console.width
        bar = max(1, min(width // 4, width - BESIDE))
        self._room = width - bar - BESIDE
        columns = (TextColumn("compare"), BarColumn(bar_width=bar), TextColumn("{task.percentage:.0f} %"), TimeElapsedColumn(),
                   TextColumn("·"), TimeRemainingColumn(), TextColumn("left  {task.description}"))  # fmt: skip
        self._bar = Progress(*columns, console=console, transient=True, disable=not self.moves)

    def __enter__(self) -> Live:
        if self.moves:
            self._bar.start()
            begun = sum(step for step, _ in self.standing().values())  # before, which says nothing of how fast it goes
            self._task = self._bar.add_task("", total=max(self.total, 1), completed=begun)
            self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self.moves:
            self._watcher.join()
            self._bar.stop()

    def done(self, result: Numbers) -> None:
        """A result is there."""
        key = result["key"]
        self.finished.add(key)
        if self.console is not None and result["kind"] == "run":
            of = sum(name.startswith("run ") for name in self.names.values())
            number = sum(self.names[one].startswith("run ") for one in self.finished)
            line = f"{number}/{of}  {self.names[key].removeprefix('run ')}: {outcome(result)}"
            self.console.print(Text(line), soft_wrap=True)

    def _watch(self) -> None:
        while not self._over.wait(EVERY):
            standing = self.standing()
            done = sum(self.steps[key] for key in self.finished) + sum(step for step, _ in standing.values())
            told: list[str] = []
            for key, (step, loss) in standing.items():
                more = f"{self.names[key].removeprefix('run ').split(', ')[0]} {step}/{self.steps[key]} {loss:.2f}"
                if len("  ".join([*told, more])) <= self._room:
                    told.append(more)
            self._bar.update(self._task, completed=done, description="  ".join(told))

    def standing(self) -> dict[str, tuple[int, float]]:
        """The steps and the last loss of each open run."""
        found = {key: step_of(self.journal.open / f"{key}.json") for key in self.steps if key not in self.finished}
        return {key: where for key, where in found.items() if where is not None}


def outcome(result: Numbers) -> str:
    """How a run ended, in a few words."""
    took = f"{result['seconds']:.0f} s"
    if result["diverged"]:
        return f"diverged, {took}"
    return f"{result['test']:.3f} nats a character, {took}" + (", continued" if result["resumed"] else "")
