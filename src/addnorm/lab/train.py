"""A run, trained: step by step, with numbers by depth on the way, and a checkpoint from which it goes on as if nothing had been.

What it guarantees: a run that was stopped at a checkpoint and continued leaves the same numbers, to the bit, as one that was
not. Weights, batches and order are the seed's; torch computes on one thread meanwhile, so that sums keep their order.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from addnorm.lab import measure
from addnorm.lab.data import Text
from addnorm.lab.measure import Numbers
from addnorm.lab.models import CharLM
from addnorm.lab.run import Run
from addnorm.stream.record.recorder import record
from addnorm.stream.record.recording import Recording

__all__ = ["Told", "Training", "train"]

Told = Callable[[int, float], None]  # is told the number of steps that are done, and the last loss
PROBE = 4  # sequences whose logits are compared before and after a step
HEARD = 8  # sequences of a batch that are recorded at most, and half of it at most: enough tokens for a mean


_computing = threading.RLock()


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on one thread, and for one of Python's: small matrices gain nothing by more, and sums keep their order.

    While one thread records, torch has hooks on the modules of all, and norms that are listened to round otherwise.
    """
    with _computing:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def train(
    run: Run, text: Text, *, checkpoint: Path | None = None, seconds: float = 5.0, told: Told | None = None
) -> Numbers:
    """Trains, or goes on training, and returns what was measured, as JSON types (with NaN and inf as they are).

    Args:
        run: what to train.
        text: on what.
        checkpoint: a file; where it is there and of this run, the training goes on from it. The caller takes it away.
        seconds: between two checkpoints.
        told: is called after each step.

    Example:
        >>> from addnorm.lab import Run, Text, train
        >>> run = Run("pre_ln", num_layers=2, d_model=16, nhead=2, tokens=8, steps=3)
        >>> found = train(run, Text("counting", "one two three four five six seven eight nine ten " * 20))
        >>> len(found["losses"]), [*found["recorded"]["stream"][0]][0] is not None
        (3, True)
    """
    with one_thread():
        training = Training(run, text)
        if checkpoint is not None:
            training.resume(checkpoint)
        training.go(checkpoint, seconds, told)
        return training.result()


class Training:
    """The state of a run between two steps."""

    def __init__(self, run: Run, text: Text) -> None:
        self.run, self.text = run, text.fits(run.tokens)
        self.key = run.key(text)
        first, _ = text.batch(run.seed, 0, run.batch, run.tokens)
        self.model = CharLM(
            len(text.characters), run.num_layers, run.wiring, d_model=run.d_model, nhead=run.nhead, tokens=run.tokens,
            norm=run.norm,
            seed=run.seed, text=first,
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=run.lr, fused=True)
        self.probe = text.held_out("validation", PROBE, run.tokens)[0]
        self.losses: list[float] = []
        self.recorded: Numbers = {"steps": [], "moved": [], **{name: [] for name in measure.BY_DEPTH}}
        self.places: list[Numbers] = []
        self.map: Numbers | None = None  # of the stream before training
        self.seconds = 0.0
        self.resumed = 0  # how often
        self.trouble = ""  # why nothing is recorded

    @property
    def step(self) -> int:
        """How many are done."""
        return len(self.losses)

    @property
    def diverged(self) -> bool:
        """Whether the last loss is no number."""
        return bool(self.losses) and not math.isfinite(self.losses[-1])

    def go(self, checkpoint: Path | None = None, seconds: float = 5.0, told: Told | None = None) -> None:
        """All steps that are left."""
        saved = time.monotonic()
        with closing(self.each_step()) as steps:
            for loss in steps:
                if told is not None:
                    told(self.step, loss)
                if checkpoint is not None and time.monotonic() - saved >= seconds:
                    with suppress(OSError, RuntimeError):  # of a full disk: a run is not worse for what it cannot keep
                        self.save(checkpoint)
                    saved = time.monotonic()

    def each_step(self) -> Generator[float, None, None]:
        """Takes the steps that are left, one whenever the next loss is asked for; closed, it listens to the model no more."""
        with ExitStack() as stack:
            recording = stack.enter_context(record(self.model)) if self.run.every else None
            while self.step < self.run.steps and not self.diverged:
                begun = time.monotonic()
                self._advance(recording)
                self.seconds += time.monotonic() - begun
                yield self.losses[-1]

    def _advance(self, recording: Recording | None) -> None:
        """One step; nothing in it depends on whether it is recorded."""
        step, run = self.step, self.run
        read, following = self.text.batch(run.seed, step, run.batch, run.tokens)
        records = recording is not None and step % run.every == 0 and self._record(recording, read, following)
        before = measure.logits(self.model, self.probe) if records else None
        loss = measure.judge(self.model.forward(read), following)  # of which the recorder does not hear
        self.optimizer.zero_grad()
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = run.lr * min(1.0, (step + 1) / (run.warm_up + 1))
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        if before is not None:
            self.recorded["moved"].append(measure.moved(before, measure.logits(self.model, self.probe)))

    def _record(self, recording: Recording, read: Tensor, following: Tensor) -> bool:
        """Passes some of the batch forward and backward first, so that it is heard, and keeps the numbers; False: it cannot be.

        The step is not taken with this gradient: norms that are listened to are not fused, and round otherwise.
        """
        if self.trouble:
            return False
        some = slice(max(1, min(HEARD, self.run.batch // 2)))
        read, following = read[some], following[some]
        try:
            loss = measure.judge(self.model(read), following)
        except ValueError as error:
            self.trouble = str(error)  # the recorder does not understand the model, which trains all the same
            return False
        loss.backward()
        self.recorded["steps"].append(self.step)
        for name, values in measure.by_depth(recording, recording.steps[-1]).items():
            self.recorded[name].append(values)
        if self.step == 0:
            self.places = measure.sites_of(recording)
            self.map = measure.map_of(recording)
        return True

    # The checkpoint.

    def save(self, path: Path) -> None:
        """Writes the state, whole or not at all."""
        state = {
            "key": self.key, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "losses": torch.tensor(self.losses, dtype=torch.float64), "seconds": self.seconds, "resumed": self.resumed,
            "measured": json.dumps([self.recorded, self.places, self.map]),
        }  # fmt: skip
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            torch.save(state, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def resume(self, path: Path) -> None:
        """Takes the state of a checkpoint over, if there is one of this run; what cannot be read is as if it were not there."""
        state: dict[str, Any] = {}
        with suppress(Exception):  # torch.load raises what it likes for a file that is damaged
            state = torch.load(path, weights_only=True)
        if state.get("key") != self.key:
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = state["losses"].tolist()
        self.seconds, self.resumed = state["seconds"], state["resumed"] + 1
        self.recorded, self.places, self.map = json.loads(state["measured"])

    # What is left behind.

    def result(self) -> Numbers:
        """Everything that was measured; after training on text that the model has not seen."""
        run, text = self.run, self.text
        found: Numbers = {
            "kind": "run", "key": self.key, "settings": run.settings(), "text": text.name, "digest": text.digest,
            "entropy": text.entropy, "uniform": text.uniform, "torch": torch.__version__,
            "seconds": self.seconds, "resumed": self.resumed, "losses": self.losses, "sites": self.places,
            "recorded": self.recorded, "map": self.map, "trouble": self.trouble,
        }  # fmt: skip
        found |= self.judged()
        if run.every and not self.trouble and math.isfinite(found["test"]):
            found["after"] = measure.probed(self.model, text, run.tokens)
            found["ablation"] = measure.ablation(self.model, text, run.tokens)
        return found

    def judged(self) -> Numbers:
        """The losses on the two parts of the text that the model has not seen, and whether it has diverged."""
        found: Numbers = {
            part: math.nan if self.diverged else measure.loss_on(self.model, self.text, part, self.run.tokens)
            for part in ("validation", "test")
        }
        # Before training a loss is above that of knowing nothing, and that of one batch is a tenth off.
        most = max(self.text.uniform, 1.1 * self.losses[0])
        return {**found, "diverged": not all(loss <= most for loss in found.values())}
