"""What is measured of a model while it trains, and after: by depth, forward and backward, as plain numbers.

The numbers by depth are those of `addnorm.record`; what is evaluated here besides is not seen by a recorder that listens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from addnorm.lab.data import Part, Text
from addnorm.lab.models import CharLM
from addnorm.stream.ablate import ablate_each
from addnorm.stream.find.inspect import inspect
from addnorm.stream.record.recorder import record
from addnorm.stream.record.recording import Recording

__all__ = [
    "BY_DEPTH",
    "PROBE",
    "Numbers",
    "ablation",
    "by_depth",
    "judge",
    "logits",
    "loss_on",
    "map_of",
    "moved",
    "probed",
]

Numbers = dict[str, Any]  # of JSON types

PROBE = 16  # sequences of the test part, the same for all models: what is measured after training is measured on these
JUDGED = 256  # sequences of a part that make a loss
AT_ONCE = 64

BY_DEPTH = {
    "stream": ("out", "rms"),
    "ratio": ("write", "ratio"),
    "similarity": ("out", "similarity"),
    "gradient": ("grad", "l2"),
    "parameters": ("params", "grad_l2"),
}
"""What is kept of a recording: its name here, and the role and statistic there. One number for each site."""


def judge(logits: Tensor, following: Tensor) -> Tensor:
    """The loss, in nats a character."""
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def logits(model: CharLM, text: Tensor) -> Tensor:
    """The model's logits without gradients, and unheard: a recorder counts calls, and this is none."""
    with torch.no_grad():
        return model.forward(text)


def loss_on(model: CharLM, text: Text, part: Part, tokens: int) -> float:
    """The mean loss on a part that was held out."""
    read, following = text.held_out(part, JUDGED, tokens)
    total = math.fsum(
        float(judge(logits(model, some), after)) * len(some)
        for some, after in zip(read.split(AT_ONCE), following.split(AT_ONCE), strict=True)
    )
    return total / len(read)


def moved(before: Tensor, after: Tensor) -> float:
    """How far a step moved the logits: |after - before| / |before|."""
    return float((after.double() - before.double()).norm() / before.double().norm())


def name_of(kind: str, layer: int | None) -> str:
    """What a sublayer is called here: "attention 3" is that of the third layer."""
    return kind if layer is None else f"{kind} {layer + 1}"


def sites_of(recording: Recording) -> list[Numbers]:
    """The places by depth: x_0, then the sublayers."""
    found: list[Numbers] = []
    for site in recording.sites:
        if site.kind != "final":
            name = "x_0" if site.kind == "start" else name_of(site.kind, site.layer)
            again = sum(one["id"].partition("#")[0] == name for one in found)
            found.append({"id": f"{name}#{again + 1}" if again else name, "kind": site.kind, "layer": site.layer})
    return found


def by_depth(recording: Recording, step: int) -> Numbers:
    """The numbers of one recorded step, each a list with an entry for each place; None where there is none."""
    places = {site.id: k for k, site in enumerate(site for site in recording.sites if site.kind != "final")}
    found: Numbers = {}
    for name, (role, statistic) in BY_DEPTH.items():
        values: list[float | None] = [None] * len(places)
        for site, value in recording.series(role, statistic, step):
            if site.id in places:
                values[places[site.id]] = value
        found[name] = values
    return found


def map_of(recording: Recording) -> Numbers | None:
    """The memory map of the last recorded step, where there is one: of what each state of the stream is made."""
    names = {site.id: name_of(site.kind, site.layer) for site in recording.sites if site.kind not in ("start", "final")}
    for sources, shares in recording.memory_maps.values():
        return {"sources": [names.get(source, source) for source in sources], "shares": shares}
    return None


def probed(model: CharLM, text: Text, tokens: int) -> Numbers:
    """By depth on the probe, forward and backward; the model is left as it was."""
    read, following = text.held_out("test", PROBE, tokens)
    apart = copy.deepcopy(model)
    with record(apart) as found:
        judge(apart(read), following).backward()
        made_of = map_of(found)
    return {**by_depth(found, 0), "map": made_of}


def ablation(model: CharLM, text: Text, tokens: int, told: Callable[[], None] | None = None) -> list[Numbers]:
    """The loss on the probe without each sublayer, less that of the whole."""
    read, following = text.held_out("test", PROBE, tokens)
    with torch.no_grad():
        sites = inspect(model, read)
    found = []
    for one in ablate_each(sites, read, loss=lambda y: judge(y, following)):
        found.append({"site": name_of(one.site.kind, one.site.layer), "kind": one.site.kind, "rise": one.loss_change})
        if told is not None:
            told()
    return found
