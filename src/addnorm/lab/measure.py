"""Measurements of a character model during and after training: losses, statistics by depth, memory map, ablation.

The statistics by depth are those of `addnorm.record`. Forward passes in this file call `model.forward`, so a running recorder,
which counts calls of the module, does not see them.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from addnorm.lab.data import Part, Text
from addnorm.lab.models import CharLM
from addnorm.lab.streams import Numbers, StreamsRecorder, list_sites
from addnorm.stream.record.recorder import record
from addnorm.stream.record.recording import Recording

PROBE = 16  # sequences of the test part on which trained models are recorded and ablated
EVALUATED = 256  # sequences over which the loss of a part is averaged
EVALUATION_BATCH = 64

BY_DEPTH = {
    "stream": ("out", "rms"),
    "ratio": ("write", "ratio"),
    "similarity": ("out", "similarity"),
    "gradient": ("grad", "l2"),
    "parameters": ("params", "grad_l2"),
}
"""Statistics in a result, one number per site: their name in the result, and their role and name in `addnorm.record`."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of `logits`, `(batch, tokens, characters)`, in nats a character."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def logits(model: CharLM, text: Tensor) -> Tensor:
    """Return the model's logits for `text`, without gradients and without calling the hooks of a recorder."""
    with torch.no_grad():
        return model.forward(text)


def held_out_loss(model: CharLM, text: Text, part: Part, tokens: int) -> float:
    """Return the mean loss on `EVALUATED` sequences of a held-out part, in nats a character."""
    inputs, targets = text.held_out(part, EVALUATED, tokens)
    total = math.fsum(
        float(cross_entropy(logits(model, batch), next_characters)) * len(batch)
        for batch, next_characters in zip(inputs.split(EVALUATION_BATCH), targets.split(EVALUATION_BATCH), strict=True)
    )
    return total / len(inputs)


def relative_change(before: Tensor, after: Tensor) -> float:
    """Return |after - before| / |before| in float64."""
    return float((after.double() - before.double()).norm() / before.double().norm())


def statistics_by_depth(recording: Recording, step: int) -> Numbers:
    """Return the statistics of `BY_DEPTH` at one recorded step: for each name a list with a number, or None, per site."""
    ids = [site.id for site in recording.sites if site.kind != "final"]
    by_site = {name: {site.id: x for site, x in recording.series(*of, step)} for name, of in BY_DEPTH.items()}
    return {name: [values.get(id) for id in ids] for name, values in by_site.items()}


def memory_map(recording: Recording) -> Numbers | None:
    """Return the memory map of the last recorded step, the share of each source in each state, or None without a map.

    Sublayers have the names of `list_sites`. If the model has diverged, some sublayers are not recorded.
    """
    names = {site.id: f"{site.kind} {site.layer + 1}" for site in recording.sites if site.layer is not None}
    for sources, shares in recording.memory_maps.values():
        return {"sources": [names.get(source, source) for source in sources], "shares": shares}
    return None


def measure_probe(model: CharLM, text: Text, tokens: int) -> Numbers:
    """Return the statistics by depth, forward and backward, on `PROBE` sequences of the test text. The model does not change.

    `map` is the memory map. With several streams it is None, and `streams` has what `StreamsRecorder.to_dict` returns.
    """
    inputs, targets = text.held_out("test", PROBE, tokens)
    clone = copy.deepcopy(model)
    if model.decoder.stack.has_streams:
        with StreamsRecorder(clone.decoder.stack) as recorder:
            cross_entropy(clone(inputs), targets).backward()
        measured = recorder.to_dict()
        return {**streams_by_depth(measured), "map": None, "streams": measured}
    with record(clone) as recording:
        cross_entropy(clone(inputs), targets).backward()
        shares = memory_map(recording)
    return {**statistics_by_depth(recording, 0), "map": shares}


def streams_by_depth(measured: Numbers) -> Numbers:
    """Return the statistics of `BY_DEPTH` from `measured`, the statistics of several streams. `parameters` has only None.

    Each number is for all streams of a token together.
    """
    statistics = {name: measured[name] for name in ("stream", "ratio", "similarity", "gradient")}
    return {**statistics, "parameters": [None] * len(measured["stream"])}


def measure_ablation(model: CharLM, text: Text, tokens: int, sequences: int = PROBE) -> list[Numbers]:
    """Return how much the loss on the test part rises without the write of each sublayer (`ResidualStack.without`)."""
    inputs, targets = text.held_out("test", sequences, tokens)
    stack, rises = model.decoder.stack, []
    whole = float(cross_entropy(logits(model, inputs), targets))
    try:
        for i, site in enumerate(list_sites(len(stack.connections))[1:]):
            model.decoder.stack = stack.without(i)
            rise = float(cross_entropy(logits(model, inputs), targets)) - whole
            rises.append({"site": site["id"], "kind": site["kind"], "rise": rise})
    finally:
        model.decoder.stack = stack
    return rises
