"""The data of the streams view: a path from one residual stream to n streams, which `addnorm.lab.StreamsProbe` measures."""

from itertools import pairwise
from typing import Any, NamedTuple

from addnorm.explorer.params import Choice, Field, Number, describe_fields, read_params
from addnorm.lab.streams_probe import PROBED, StreamsProbe
from addnorm.nn import Wiring
from addnorm.wirings import Learned, Row

FIELDS: dict[str, Field] = {
    "wiring": Choice("pre_ln", PROBED),
    "sublayers": Number(12, 4, 24, step=2),
    "d_model": Number(32, 8, 64, step=8),
    "n": Number(4, 2, 4, step=1),
    "perturbation": Number(0.25, 0.0, 1.0),
    "seed": Number(0, 0, 9999, step=1),
}


class Step(NamedTuple):
    """One step of the lesson on several streams: its wiring and title, what it changes, and what to look at."""

    wiring: str
    title: str
    change: str
    look: str


STEPS = (
    Step(
        "pre_ln", "One stream: pre-LN",
        "There is one stream x. Every sublayer reads its norm and adds its write to it, so A, B and C are all 1.",
        "The direct path of every write is 1: nothing on its way to the output scales it.",
    ),
    Step(
        "reversible", "Two streams, constant coefficients",
        "New: a second stream; the equation calls them u and v. C is (0, 1) or (1, 0), in turn: which stream the "
        "sublayer reads. B is the other way round: the write goes to the stream that is not read. A is the identity: "
        "the streams do not mix.",
        "Half of every write reaches the output, as the output is the mean of the streams.",
    ),
    Step(
        "hyper_connections", "Hyper-connections",
        "New: A, B and C are learned, for any number of streams, and the streams of each token move them. Now A mixes "
        "the streams.",
        "Nothing bounds A. Raise the perturbation: the gain of the product of all A grows with depth, and streams and "
        "gradients with it.",
    ),
    Step(
        "mhc", "mHC",
        "New: A is made nearly doubly stochastic. Its entries are positive, its rows sum to 1 and its columns nearly. B "
        "and C are gates between bounds.",
        "A row of A is an average of the streams, and so is a row of a product of many A: the forward gain stays 1 at "
        "any depth. The backward gain, of the columns, is at most n.",
    ),
    Step(
        "attention_residuals", "Attention residuals",
        "New: nothing is mixed or summed on the way. A keeps every state and appends one, B puts the write there, and C "
        "is a softmax over x_0 and all earlier writes.",
        "Each column of the map is what one sublayer reads. With equal weights it is pre-LN's direction; the "
        "perturbation moves the queries.",
    ),
)  # fmt: skip


def parse(params: Any) -> StreamsProbe:
    """Return the stack that a request describes.

    Raises:
        ValueError: a parameter is wrong.
    """
    return StreamsProbe(**read_params(FIELDS, params))


def compute(probe: StreamsProbe) -> dict[str, Any]:
    """Return the measurements and the wiring's equation. Numbers may be NaN or infinite.

    Where every layer appends a state (`keeps_states`), A is left out: it has a row and a column for each state.
    """
    measured = probe.measure()
    coefficients = measured["coefficients"]
    numbers = [len(streams) for streams in measured["streams"]]
    keeps_states = sum(after > before for before, after in pairwise(numbers)) > 1
    if keeps_states:
        coefficients["sites"] = [{"collapse": site["collapse"]} for site in coefficients["sites"]]
    return {
        **measured,
        "keeps_states": keeps_states,
        "sources": _name_sources(measured["labels"], numbers),
        "equation": probe.make_wiring().equation(),
    }


def _name_sources(labels: list[str], numbers: list[int]) -> list[str]:
    """Return a name for each state at the end: x_0, then the sublayer that appended it."""
    names = ["x_0"] if numbers[0] == 1 else [f"stream {j + 1}" for j in range(numbers[0])]
    for label, before, after in zip(labels[1:], numbers, numbers[1:], strict=False):
        names += [label] * (after - before)
    return names


def describe() -> dict[str, Any]:
    """Return the parameters, the steps of the path, and every wiring with its equation, source and use, for the page."""
    wirings = {}
    for name in PROBED:
        wiring = StreamsProbe(name).make_wiring()
        wirings[name] = {
            "equation": wiring.equation(),
            "has_n": "n" in dict(wiring.options),
            "is_learned": is_learned(wiring),
            "source": wiring.source,
            "use": wiring.use,
        }
    return {"fields": describe_fields(FIELDS), "steps": [step._asdict() for step in STEPS], "wirings": wirings}


def is_learned(wiring: Wiring) -> bool:
    """Return whether a coefficient of the wiring is learned or computed."""
    stages = [stage for stage in wiring.stages(4) if not isinstance(stage, Row)]
    return any(
        stage.coefficients is not None or any(isinstance(entry, Learned) for entry in stage.learned.values())
        for stage in stages
    )
