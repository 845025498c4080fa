"""Training of one run: the steps, statistics by depth on the way, and checkpoints.

A run that stops at a checkpoint and continues gives the same numbers, to the bit, as an uninterrupted run. Weights and batches
come from the seed, and torch uses one thread, so sums keep their order.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from addnorm._util.files import atomic_path
from addnorm.lab import measure
from addnorm.lab.cost import count_cost
from addnorm.lab.data import Text
from addnorm.lab.models import CharLM
from addnorm.lab.run import Run
from addnorm.lab.streams import Numbers, StreamsRecorder, list_sites
from addnorm.stream.record.recorder import record
from addnorm.stream.record.recording import Recording

OnStep = Callable[[int, float], None]  # called with the number of finished steps and the last loss
STEP_PROBE = 4  # sequences whose logits are compared before and after a step
RECORDED = 8  # maximum number of recorded sequences of a batch, enough tokens for a mean; at most half of the batch is recorded


_computing = threading.RLock()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the block with one torch thread, in one Python thread at a time.

    Small matrices gain nothing from more threads. The lock keeps recordings apart: a recorder installs hooks on the modules of
    every thread, and norms with hooks round differently.
    """
    with _computing:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def train(
    run: Run, text: Text, *, checkpoint: Path | None = None, seconds: float = 5.0, on_step: OnStep | None = None
) -> Numbers:
    """Train a run, or continue it, and return its result.

    Args:
        run: the settings.
        text: the training text.
        checkpoint: a file for checkpoints. If it has a checkpoint of this run, training continues there. It is not deleted.
        seconds: minimum time between two checkpoints.
        on_step: function called after each step with the number of finished steps and the last loss.

    Returns:
        The result as JSON types with NaN and infinity: `losses` by step, `validation` and `test` losses in nats a character,
        `diverged`, statistics by depth at recorded steps (`recorded`) and after training (`after`), `ablation`, and more.

    Raises:
        ValueError: the text is too short.

    Example:
        >>> from addnorm.lab import Run, Text, train
        >>> run = Run("pre_ln", num_layers=2, d_model=16, nhead=2, tokens=8, steps=3)
        >>> result = train(run, Text("counting", "one two three four five six seven eight nine ten " * 20))
        >>> len(result["losses"]), [*result["recorded"]["stream"][0]][0] is not None
        (3, True)
    """
    with one_thread():
        training = Training(run, text)
        if checkpoint is not None:
            training.resume(checkpoint)
        saved = time.monotonic()
        with closing(training.each_step()) as steps:
            for loss in steps:
                if on_step is not None:
                    on_step(training.step, loss)
                if checkpoint is not None and time.monotonic() - saved >= seconds:
                    with suppress(OSError, RuntimeError):  # a full disk must not end a run
                        training.save(checkpoint)
                    saved = time.monotonic()
        return training.result()


class Training:
    """State of a run between two steps."""

    def __init__(self, run: Run, text: Text) -> None:
        self.run, self.text = run, text.require_length(run.tokens)
        self.key = run.key(text)
        first, _ = text.batch(run.seed, 0, run.batch, run.tokens)
        self.model = CharLM(
            len(text.characters), run.num_layers, run.wiring, d_model=run.d_model, nhead=run.nhead, tokens=run.tokens,
            norm=run.norm,
            seed=run.seed, text=first,
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=run.lr, fused=True)
        self.probe = text.held_out("validation", STEP_PROBE, run.tokens)[0]
        self.losses: list[float] = []
        self.recorded: Numbers = {"steps": [], "logit_change": [], **{name: [] for name in measure.BY_DEPTH}}
        self.places: list[Numbers] = []
        self.map: Numbers | None = None  # memory map before training
        self.seconds = 0.0
        self.resumed = 0  # number of continuations
        self.recording_error = ""  # reason why nothing is recorded

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return len(self.losses)

    @property
    def diverged(self) -> bool:
        """Whether the last loss is not finite."""
        return bool(self.losses) and not math.isfinite(self.losses[-1])

    def each_step(self) -> Generator[float, None, None]:
        """Take the remaining steps, one per iteration, and yield their losses. Closing the generator ends the recording."""
        is_recorded = self.run.every and not self.model.decoder.stack.has_streams
        with record(self.model) if is_recorded else nullcontext() as recording:
            while self.step < self.run.steps and not self.diverged:
                begin = time.monotonic()
                self._advance(recording)
                self.seconds += time.monotonic() - begin
                yield self.losses[-1]

    def _advance(self, recording: Recording | None) -> None:
        """Take one training step. Recording does not change the result of the step."""
        step, run = self.step, self.run
        inputs, targets = self.text.batch(run.seed, step, run.batch, run.tokens)
        records = run.every > 0 and step % run.every == 0 and self._record(recording, inputs, targets)
        before = measure.logits(self.model, self.probe) if records else None
        loss = measure.cross_entropy(self.model.forward(inputs), targets)  # forward: the recorder does not see it
        self.optimizer.zero_grad()
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = run.lr * min(1.0, (step + 1) / (run.warm_up + 1))
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        if before is not None:
            self.recorded["logit_change"].append(
                measure.relative_change(before, measure.logits(self.model, self.probe))
            )

    def _record(self, recording: Recording | None, inputs: Tensor, targets: Tensor) -> bool:
        """Record a forward and a backward of a part of the batch. Return False if `addnorm.record` does not support the model.

        A model with several streams, which `addnorm.record` does not support, has a recorder of its own.

        The training step does not use the gradient of this backward: recorded norms are not fused and round differently.
        """
        if self.recording_error:
            return False
        some = slice(max(1, min(RECORDED, self.run.batch // 2)))
        inputs, targets = inputs[some], targets[some]
        if recording is None:
            with StreamsRecorder(self.model.decoder.stack) as recorder:
                measure.cross_entropy(self.model(inputs), targets).backward()
            self._keep(measure.streams_by_depth(recorder.statistics()))
            return True
        try:
            loss = measure.cross_entropy(self.model(inputs), targets)
        except ValueError as error:
            self.recording_error = str(error)  # a model that the recorder does not support still trains
            return False
        loss.backward()
        self._keep(measure.statistics_by_depth(recording, recording.steps[-1]))
        if self.step == 0:
            self.map = measure.memory_map(recording)
        return True

    def _keep(self, statistics: Numbers) -> None:
        """Add the statistics by depth of a recorded step to the result."""
        self.recorded["steps"].append(self.step)
        for name, values in statistics.items():
            self.recorded[name].append(values)
        self.places = list_sites(len(self.model.decoder.stack.connections))

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically."""
        state = {
            "key": self.key, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "losses": torch.tensor(self.losses, dtype=torch.float64), "seconds": self.seconds, "resumed": self.resumed,
            "measured": json.dumps([self.recorded, self.places, self.map]),
        }  # fmt: skip
        with atomic_path(path, parents=False) as temporary:
            torch.save(state, temporary)

    def resume(self, path: Path) -> None:
        """Load a checkpoint of this run if there is one. A missing, damaged or foreign file is ignored."""
        state: dict[str, Any] = {}
        with suppress(Exception):  # torch.load raises many kinds of errors for a damaged file
            state = torch.load(path, weights_only=True)
        if state.get("key") != self.key:
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = state["losses"].tolist()
        self.seconds, self.resumed = state["seconds"], state["resumed"] + 1
        self.recorded, self.places, self.map = json.loads(state["measured"])

    def result(self) -> Numbers:
        """Return the result of the run, which `train` describes. Measurements after training use held-out text."""
        run, text = self.run, self.text
        result: Numbers = {
            "kind": "run", "key": self.key, "settings": run.settings(), "text": text.name, "digest": text.digest,
            "entropy": text.entropy, "uniform": text.uniform, "torch": torch.__version__,
            "seconds": self.seconds, "resumed": self.resumed, "losses": self.losses, "sites": self.places,
            "recorded": self.recorded, "map": self.map, "recording_error": self.recording_error,
        }  # fmt: skip
        result["cost"] = count_cost(self.model.decoder.stack)._asdict()
        result |= self.evaluate()
        if run.every and not self.recording_error and math.isfinite(result["test"]):
            result["after"] = measure.measure_probe(self.model, text, run.tokens)
            result["ablation"] = measure.measure_ablation(self.model, text, run.tokens)
        return result

    def evaluate(self) -> Numbers:
        """Return the losses on the validation and test parts, and whether the run diverged."""
        losses: Numbers = {
            part: math.nan if self.diverged else measure.held_out_loss(self.model, self.text, part, self.run.tokens)
            for part in ("validation", "test")
        }
        # Before training a loss is above that of a uniform guess, and the loss of one batch is up to a tenth off.
        limit = max(self.text.uniform, 1.1 * self.losses[0])
        return {**losses, "diverged": not all(loss <= limit for loss in losses.values())}
