"""The data of the race view: two wirings that the lab trains in alternating steps, as a stream of events.

    for event in run_race(parse({"left": "post_ln", "right": "pre_ln", "steps": 100})):
        ...                                  {"event": "start"}, then {"event": "step"} of both in turn, then {"event": "end"}

Each racer is a `Run` of `addnorm.lab` with the same text, batches and seed, and its losses are those of
`addnorm.lab.train(run, python_docs())` to the bit. Closing the generator ends both trainings and removes all hooks.
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from functools import cache
from itertools import chain
from typing import Any

from addnorm import wirings
from addnorm._util.jsonio import to_jsonable
from addnorm.explorer.params import Choice, Field, Number, describe_fields, read_params
from addnorm.lab.data import Text, python_docs
from addnorm.lab.measure import BY_DEPTH
from addnorm.lab.results import Results
from addnorm.lab.run import Protocol, Run
from addnorm.lab.streams import Numbers
from addnorm.lab.train import Training, one_thread
from addnorm.lab.verdict import find_verdict

Events = Generator[Numbers, None, None]

HEADS = 4
FAILING_RATE = 3e-3  # the default, at which post-LN learns nothing without warm-up, and pre-LN learns
LESSON_RATE = 1e-3  # at which post-LN and pre-LN both learn: of several rates the best one for the worse of the two
LESSON_WARM_UP = 60  # steps with which post-LN learns at that rate
WIRINGS = tuple(name for name in wirings.CONSTRUCTORS if name not in wirings.EXAMPLES)  # those that need no options

FIELDS: dict[str, Field] = {
    "left": Choice("post_ln", WIRINGS),
    "right": Choice("pre_ln", WIRINGS),
    "layers": Number(6, 1, 12, step=1),
    "d_model": Number(64, 16, 128, step=16),
    "tokens": Number(32, 8, 64, step=1),
    "batch": Number(8, 1, 32, step=1),
    "steps": Number(120, 1, 500, step=1),
    "lr": Number(FAILING_RATE, 1e-5, 1.0),
    "warm_up": Number(0, 0, 500, step=1),
    "seed": Number(0, 0, 2**31 - 1, step=1),
}

default_text = cache(python_docs)


@cache
def describe() -> dict[str, Any]:
    """Return the view's data for the page: parameters, wirings with their texts, number of heads, and lesson."""
    descriptions = {name: wirings.get(name) for name in WIRINGS}
    return {
        "fields": describe_fields(FIELDS),
        "wirings": {
            name: {"equation": wiring.equation(), "description": wiring.describe(), "drawing": wiring.draw()}
            for name, wiring in descriptions.items()
        },
        "heads": HEADS,
        "lesson": {"rate": LESSON_RATE, "warm_up": LESSON_WARM_UP},
    }


def parse(params: Any) -> list[Run]:
    """Return the two runs of a request, which differ only in the wiring.

    Raises:
        ValueError: a parameter is wrong.

    Example:
        >>> from addnorm.explorer.race import parse
        >>> parse({"steps": 10, "warm_up": 20})
        Traceback (most recent call last):
        ...
        ValueError: warm_up is 20, expected at most steps = 10: the rate would never be reached.
    """
    values = read_params(FIELDS, params)
    values["num_layers"] = values.pop("layers")
    names = values.pop("left"), values.pop("right")
    return [Run(name, nhead=HEADS, every=1, **values) for name in names]


def run_race(runs: Sequence[Run], text: Text | None = None) -> Events:
    """Train both runs and yield events of JSON types, with NaN and infinity as words.

    - start: `settings`, `text` (`Text.describe`), `racers` (two: name, wiring, equation, parameters, places: id, kind and layer
      by depth, recording_error: why nothing is recorded, or "")
    - step: `racer` 0 or 1, `step` from 0, its `loss`, and `logit_change`, the relative change of the logits by this step; by
      depth, before the weights change, the numbers of `addnorm.lab.measure.BY_DEPTH`: stream, ratio, similarity, gradient,
      parameters (None where there is no number, as for a write at x_0). A racer stops when its loss is not finite.
    - end: `racers` (two: name, steps, loss, validation, test, diverged, seconds) and `verdict`, the sentences that
      `addnorm.lab.compare` would state

    The training starts with the first event. Any thread may request the next event.

    Args:
        runs: the two runs.
        text: the training text; `addnorm.lab.python_docs()` by default.

    Raises:
        ValueError: the text is too short.

    Example:
        >>> from addnorm.explorer.race import parse, run_race
        >>> events = run_race(parse({"layers": 1, "steps": 2, "d_model": 16, "tokens": 8, "batch": 2}))
        >>> [event["event"] for event in events]
        ['start', 'step', 'step', 'step', 'step', 'end']
    """
    text = text or default_text()
    text.require_length(runs[0].tokens)
    return _events(runs, text)


def _events(runs: Sequence[Run], text: Text) -> Events:
    with one_thread():
        trainings = [Training(run, text) for run in runs]
    names = [run.name for run in runs]
    if names[0] == names[1]:
        names = [f"{name} ({side})" for name, side in zip(names, ("left", "right"), strict=True)]
    with closing(_alternate(trainings)) as turns:
        first = [next(turns), next(turns)]  # the places are known once a step is recorded
        yield to_jsonable({"event": "start", **_start(names, trainings)})
        for k in chain(first, turns):
            yield to_jsonable({"event": "step", "racer": k, **_step(trainings[k])})
    with one_thread():
        ends = [{"name": name, **_end(training)} for name, training in zip(names, trainings, strict=True)]
    yield to_jsonable({"event": "end", "racers": ends, "verdict": judge(trainings, ends)})


def _alternate(trainings: list[Training]) -> Generator[int, None, None]:
    """Take a step of each training in turn until both have ended, and yield the number of the training after each step."""
    with ExitStack() as stack:
        running = {k: stack.enter_context(closing(training.each_step())) for k, training in enumerate(trainings)}
        while running:
            for k in [*running]:
                with one_thread():  # not across the yield: the next event may be requested by another thread
                    stepped = next(running[k], None) is not None
                if stepped:
                    yield k
                else:
                    del running[k]


def _start(names: list[str], trainings: list[Training]) -> Numbers:
    run, text = trainings[0].run, trainings[0].text
    racers = [
        {
            "name": name,
            "wiring": training.run.wiring.name,
            "equation": training.run.wiring.equation(run.num_layers),
            "parameters": sum(p.numel() for p in training.model.parameters()),
            "places": training.places,
            "recording_error": training.recording_error,
        }
        for name, training in zip(names, trainings, strict=True)
    ]
    settings = {name: value for name, value in run.settings().items() if name != "wiring"}
    return {"settings": settings, "text": text.describe(), "racers": racers}


def _step(training: Training) -> Numbers:
    """Return the number, the loss and the recorded statistics of a training's last step."""
    step, recorded = training.step - 1, training.recorded
    is_recorded = bool(recorded["steps"]) and recorded["steps"][-1] == step
    numbers = {name: recorded[name][-1] if is_recorded else None for name in ("logit_change", *BY_DEPTH)}
    return {"step": step, "loss": training.losses[-1], **numbers}


def _end(training: Training) -> Numbers:
    return {
        "steps": training.step,
        "loss": training.losses[-1],
        **training.evaluate(),
        "seconds": training.seconds,
    }


def judge(trainings: Sequence[Training], ends: Sequence[Numbers]) -> list[str]:
    """Return the verdict of `addnorm.lab` on the two trainings, whose names and losses at the end are `ends`, as sentences."""
    text, settings = trainings[0].text, trainings[0].run.settings()
    rates, warm_ups, seeds, _ = (settings.pop(name) for name in ("lr", "warm_up", "seed", "wiring"))
    protocol = Protocol(**settings, rates=rates, warm_ups=warm_ups, seeds=seeds)
    runs = [
        {"settings": {**training.run.settings(), "wiring": end["name"]}, "recorded": training.recorded, **end}
        for training, end in zip(trainings, ends, strict=True)
    ]
    names = tuple(end["name"] for end in ends)
    return [finding.claim for finding in find_verdict(Results(names, protocol, runs, [], text.describe()))]
