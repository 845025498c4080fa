"""The race: two wirings trained side by side by the lab, a step of the one and a step of the other, told as they happen.

    for event in race(asked({"left": "post_ln", "right": "pre_ln", "steps": 100})):
        ...                                     {"event": "start"}, then {"event": "step"} of both in turn, then {"event": "end"}

What it guarantees: each racer is a `Run` of `addnorm.lab` with the same text, batches and seed, and its losses are to the bit
those of `addnorm.lab.train(run, topics())`. Closing the events ends both trainings, and nothing listens to a model any more.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from functools import cache
from itertools import chain
from typing import Any

from addnorm import wirings
from addnorm._util.jsonio import to_jsonable
from addnorm.explorer.params import Choice, Field, Number, described, read
from addnorm.lab.data import Text, topics
from addnorm.lab.measure import BY_DEPTH, Numbers
from addnorm.lab.run import Run
from addnorm.lab.train import Training, one_thread

__all__ = ["FIELDS", "Events", "asked", "meta", "race"]

Events = Generator[Numbers, None, None]

HEADS = 4
WIRINGS = tuple(name for name in wirings.CONSTRUCTORS if name not in wirings.EXAMPLES)  # those that need no options

FIELDS: dict[str, Field] = {
    "left": Choice("post_ln", WIRINGS),
    "right": Choice("pre_ln", WIRINGS),
    "layers": Number(6, 1, 12, step=1),
    "d_model": Number(64, 16, 128, step=16),
    "tokens": Number(32, 8, 64, step=1),
    "batch": Number(8, 1, 32, step=1),
    "steps": Number(120, 1, 500, step=1),
    "lr": Number(3e-3, 1e-5, 1.0),
    "warm_up": Number(0, 0, 500, step=1),
    "seed": Number(0, 0, 2**31 - 1, step=1),
}

text = cache(topics)


def meta() -> dict[str, Any]:
    """What the page must know beforehand: the fields, each wiring in symbols, in words and drawn, the heads of the attention."""
    made = {name: wirings.get(name) for name in WIRINGS}
    return {
        "fields": described(FIELDS),
        "wirings": {
            name: {"equation": one.equation(), "words": one.describe(), "drawing": one.draw()}
            for name, one in made.items()
        },
        "heads": HEADS,
    }


def asked(given: Any) -> list[Run]:
    """What a request asks for: the left run and the right one, alike in all but the wiring.

    Raises:
        ValueError: something in it fits no field, or the lab refuses it.

    Example:
        >>> from addnorm.explorer.race import asked
        >>> asked({"steps": 10, "warm_up": 20})
        Traceback (most recent call last):
        ...
        ValueError: warm_up is 20, expected at most steps = 10: the rate would never be reached.
    """
    found = read(FIELDS, given)
    found["num_layers"] = found.pop("layers")
    names = found.pop("left"), found.pop("right")
    return [Run(name, nhead=HEADS, every=1, **found) for name in names]


def race(both: Sequence[Run], on: Text | None = None) -> Events:
    """Trains both, and tells each step: events of JSON types, NaN and inf as the words "NaN", "Infinity", "-Infinity".

    - start: `settings`, `text` (name, characters, uniform, entropy: the losses of knowing nothing, and of knowing how often each
      character occurs), `racers` (two: name, wiring, equation, parameters, places: id, kind and layer by depth, and trouble: why
      nothing is recorded, "" where it is)
    - step: `racer` 0 or 1, `step` from 0, its `loss`, and `moved`, how far it moved the logits; and by depth, before the weights
      change, the numbers of `addnorm.lab.measure.BY_DEPTH`: stream, ratio, similarity, gradient, parameters (None where
      there is none, as that of a write at x_0). A racer whose loss is no number stops there.
    - end: `racers` (two: name, steps, loss, validation, test, diverged, seconds) and `verdict`, sentences

    The training begins with the first event that is asked for. Any thread may ask for the next one.

    Args:
        both: what `asked` returns.
        on: the text; `addnorm.lab.topics()` by default.

    Raises:
        ValueError: the text is too short for the tokens.

    Example:
        >>> from addnorm.explorer.race import asked, race
        >>> events = race(asked({"layers": 1, "steps": 2, "d_model": 16, "tokens": 8, "batch": 2}))
        >>> [event["event"] for event in events]
        ['start', 'step', 'step', 'step', 'step', 'end']
    """
    on = on or text()
    on.fits(both[0].tokens)
    return _events(both, on)


def _events(both: Sequence[Run], on: Text) -> Events:
    with one_thread():
        trainings = [Training(run, on) for run in both]
    names = [run.name for run in both]
    if names[0] == names[1]:
        names = [f"{name} ({side})" for name, side in zip(names, ("left", "right"), strict=True)]
    with closing(_turns(trainings)) as turns:
        first = [next(turns), next(turns)]  # once a step is recorded, the places are known
        yield to_jsonable({"event": "start", **_start(names, trainings)})
        for k in chain(first, turns):
            yield to_jsonable({"event": "step", "racer": k, **_step(trainings[k])})
    with one_thread():
        ended = [{"name": name, **_end(training)} for name, training in zip(names, trainings, strict=True)]
    yield to_jsonable({"event": "end", "racers": ended, "verdict": verdict(ended, on)})


def _turns(trainings: list[Training]) -> Generator[int, None, None]:
    """A step of each in turn, until its own are over: whose step was taken."""
    with ExitStack() as stack:
        left = {k: stack.enter_context(closing(training.each_step())) for k, training in enumerate(trainings)}
        while left:
            for k in [*left]:
                with (
                    one_thread()
                ):  # not over a yield: others compute meanwhile, and another thread may ask for the next
                    taken = next(left[k], None) is not None
                if taken:
                    yield k
                else:
                    del left[k]


def _start(names: list[str], trainings: list[Training]) -> Numbers:
    run, on = trainings[0].run, trainings[0].text
    racers = [
        {
            "name": name,
            "wiring": training.run.wiring.name,
            "equation": training.run.wiring.equation(run.num_layers),
            "parameters": sum(p.numel() for p in training.model.parameters()),
            "places": training.places,
            "trouble": training.trouble,
        }
        for name, training in zip(names, trainings, strict=True)
    ]
    settings = {name: value for name, value in run.settings().items() if name != "wiring"}
    read = {"name": on.name, "characters": len(on.text), "uniform": on.uniform, "entropy": on.entropy}
    return {"settings": settings, "text": read, "racers": racers}


def _step(training: Training) -> Numbers:
    """The last one that was taken."""
    step, found = training.step - 1, training.recorded
    heard = bool(found["steps"]) and found["steps"][-1] == step
    kept = {name: found[name][-1] if heard else None for name in ("moved", *BY_DEPTH)}
    return {"step": step, "loss": training.losses[-1], **kept}


def _end(training: Training) -> Numbers:
    return {
        "steps": training.step,
        "loss": training.losses[-1],
        **training.judged(),
        "seconds": training.seconds,
    }


def verdict(ended: list[Numbers], on: Text) -> list[str]:
    """What the numbers of the end say, a sentence each."""
    said = []
    for one in ended:
        name, loss = one["name"], one["validation"]
        if not math.isfinite(loss):
            said.append(
                f"{name} diverged: its loss at step {one['steps'] - 1} was {one['loss']:g}, and it stopped there."
            )
        elif one["diverged"]:
            said.append(
                f"{name} diverged: its loss on unseen text, {loss:.4g}, is above that of knowing nothing, {on.uniform:.4g}."
            )
        elif loss >= on.entropy:
            said.append(
                f"{name} has learned no more than how often each character occurs: its loss on unseen text is {loss:.4g}, and "
                f"{on.entropy:.4g} takes no more than that."
            )
    ahead, behind = sorted(ended, key=lambda one: one["validation"] if not one["diverged"] else math.inf)
    if not ahead["diverged"]:
        at = f"after {ahead['steps']} steps its loss on unseen text is {ahead['validation']:.4g} nats a character"
        less = behind["validation"] - ahead["validation"]
        if behind["diverged"]:
            said.append(f"{ahead['name']} is ahead: {at}.")
        elif f"{ahead['validation']:.4g}" == f"{behind['validation']:.4g}":
            said.append(f"They are level: {at.replace('its', 'the')} with both.")
        else:
            said.append(
                f"{ahead['name']} is ahead: {at}, that of {behind['name']} {behind['validation']:.4g}, {less:.2g} more."
            )
    said.append(
        "This is one seed at one learning rate: addnorm compare trains each wiring at its own best rate, over seeds."
    )
    return said
