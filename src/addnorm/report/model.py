"""The report of one model: its wiring and the proof, what was recorded of its stream, and what it is without each sublayer.

Every sentence and every number is computed from what it is given; what was not measured has no section.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence

import torch

from addnorm.report import drawings, findings
from addnorm.report.blocks import Block, Cell, Facts, Figure, Finding, Findings, Formula, Page, Section, Table
from addnorm.stream.ablate import Ablation
from addnorm.stream.find.inspection import NORM_NAMES, Inspection, Site, Stream, format_norm, mask_numbers, merge_paths
from addnorm.stream.record.recording import Recording
from addnorm.wirings.row import GAP
from addnorm.wirings.row import format_factor as constant

__all__ = ["of_model", "versions"]

LONG = 48  # rows of a table that are seen at once
EMBEDDING = "with a norm of the embedding"  # a remark that the wiring's section makes itself
FINAL = "A final norm follows the last sublayer."  # of a wiring's description
SAID = {  # how to read each figure
    "depth": "Above, the size of the stream's elements after each sublayer; below, how much the loss depends on the stream "
    "there, and on the parameters of each sublayer.",
    "writes": "How long each write is beside the stream that it is added to, and whether it points along the stream (1), across "
    "it (0) or against it (-1).",
    "similarity": "The mean cosine of two tokens, which is 1 where all tokens have become one vector; and the root that each "
    "norm divides by.",
    "map": "Each row is a source, each column the stream at a depth; a column sums to one. A source is followed through the "
    "norms after it, exactly, with their recorded denominators.",
    "ablation": "Each sublayer's write was left out in turn. Bars show how much the output changes, relative to its length",
}


def of_model(
    found: Inspection,
    recording: Recording | None = None,
    ablations: Sequence[Ablation] | None = None,
    facts: Mapping[str, str] | None = None,
    *,
    title: str | None = None,
    foot: Sequence[str] = (),
) -> Page:
    """The report of a model that was inspected.

    Args:
        found: of `addnorm.inspect`.
        recording: of `addnorm.record`.
        ablations: of `addnorm.ablate_each`.
        facts: how all this was made, by name: inputs, seed, loss, command.
        title: the class of the model by default.
        foot: the last lines, a date for example: without one the same model has the same page.

    Raises:
        ImportError: matplotlib is not installed, and there is something to draw.
    """
    remarkable = [
        *(findings.of_recording(recording) if recording is not None else ()),
        *(findings.of_ablations(ablations) if ablations is not None else ()),
    ]
    sections = [
        Section("What stands out", "", [Findings(remarkable)] if remarkable else []),
        *_wirings(found),
        Section("Forward and backward by depth", _depth_lead(recording), _by_depth(recording)),
        Section("What the stream is made of", "", _made_of(recording)),
        Section("The model without a sublayer", "", _without(ablations)),
        Section(
            "What is not understood",
            "Nothing is guessed: here are the places, and the reason at each.",
            _unknown(found),
        ),
        Section("How this was made", "", [Facts({**(facts or {}), **_settings(found, recording), **versions()})]),
    ]
    return Page(
        title or found.model, _subtitle(found), _verdict(found), [one for one in sections if one.blocks], _tiles(found),
        foot,
    )  # fmt: skip


def versions() -> dict[str, str]:
    """Of what computed a report."""
    addnorm = sys.modules["addnorm"]  # whose names stand above this room
    return {"addnorm": str(addnorm.__version__), "torch": str(torch.__version__), "Python": platform.python_version()}


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _name(stream: Stream) -> str:
    return stream.wiring.name if stream.wiring else "unknown"


def _subtitle(found: Inspection) -> str:
    layers = sum(stream.num_layers for stream in found.streams)
    streams = f" in {len(found.streams)} streams" if len(found.streams) > 1 else ""
    return (
        f"The residual stream of {found.model}, in {found.mode} mode: {_count(len(found.sites), 'sublayer')} in "
        f"{_count(layers, 'layer')}{streams}, found by data flow."
    )


def _tiles(found: Inspection) -> dict[str, str]:
    widths = dict.fromkeys(str(stream.width) for stream in found.streams)
    norms = dict.fromkeys(NORM_NAMES.get(kind, kind) for s in found.streams if s.norm for kind in s.norm.split("/"))
    tiles = {"Wiring": found.wiring, "Sublayers": str(len(found.sites)), "Width d": " / ".join(widths)}
    tiles |= {"Norm": " / ".join(norms)} if norms else {"Norm": "none"}
    return tiles | {"Largest error": f"{found.closure:.1e}".replace("e-0", "e-")} if found.sites else tiles


def _verdict(found: Inspection) -> list[Finding]:
    said = findings.of_inspection(found)
    alike: dict[tuple[str, str], list[Stream]] = {}
    for stream in found.streams:
        words = stream.wiring.describe().replace("x_0", "x₀") if stream.wiring else ""  # as the figures have it
        if stream.final_norm is None:  # the wiring has one, this model has not
            words = words.replace(FINAL, "").rstrip()
        alike.setdefault((_name(stream), words), []).append(stream)
    for (name, words), streams in alike.items():
        of = (
            "The wiring"
            if len(found.streams) == 1
            else f"The wiring of {' and '.join(f'the {s.name}' for s in streams)}"
        )
        said.append(
            Finding(f"{of} is {name}. {words}" if words else f"{of} is none of those known: the rows are below.")
        )
    return said


def _wirings(found: Inspection) -> list[Section]:
    several = len(found.streams) > 1
    return [
        Section(f"The wiring of the {one.name}" if several else "The wiring", "", _wiring(one)) for one in found.streams
    ]


def _wiring(stream: Stream) -> list[Block]:
    lines = [line.strip() for line in stream.equation.replace(GAP, "\n").split("\n")]
    text = "N is a norm, f the sublayer, x the stream before it and x' the stream after it."
    ends = [("An embedding norm", stream.embedding_norm), ("A final norm", stream.final_norm)]
    said = [Finding(f"{what} stands {'before the first' if 'emb' in what else 'after the last'} sublayer: {format_norm(norm)}, "
                    f"{norm.path or 'in the model itself'}.") for what, norm in ends if norm is not None]  # fmt: skip
    said += [
        Finding(remark[0].upper() + remark[1:].rstrip(".") + ".") for remark in stream.remarks if remark != EMBEDDING
    ]
    if stream.wiring is not None:
        said.append(Finding(f"Source: {stream.wiring.source}. When to use {stream.wiring.name}: {stream.wiring.use}"))
    rows: list[list[Cell]] = [
        [site.location, site.layer + 1, site.kind, site.equation, _norms(site), f"{site.closure:.0e}".replace("e-0", "e-")]
        for site in stream.sites
    ]
    wrong = [place for place, site in enumerate(stream.sites) if not site.closes]
    caption = f"The {_count(len(rows), 'sublayer')} of the {stream.name}, each with the relative error of its equation"
    table = Table(["module", "layer", "kind", "equation", "norm, eps", "error"], rows, caption, len(rows) > LONG, wrong)
    alike: dict[tuple[str, str], list[str]] = {}
    for site in stream.sites:
        for note in site.notes:
            alike.setdefault((note, mask_numbers(site.id)), []).append(site.id)
    notes = [Finding(f"{merge_paths(ids)}: {note}.") for (note, _), ids in alike.items()]
    return [Formula(lines, text), *([Findings(said)] if said else []), table, *([Findings(notes)] if notes else [])]


def _norms(site: Site) -> str:
    found = [norm for norm in (site.norm_in, site.norm_branch, site.norm_out) if norm is not None]
    return ", ".join(dict.fromkeys(map(format_norm, found)))


def _depth_lead(rec: Recording | None) -> str:
    return (
        ""
        if rec is None
        else "Depth is counted in sublayers, from left to right; x₀ is the stream before the first one."
    )


def _by_depth(rec: Recording | None) -> list[Block]:
    if rec is None:
        return []
    made = {"depth": drawings.forward_and_backward, "writes": drawings.writes, "similarity": drawings.similarity}
    return _there([draw(rec, SAID[name]) for name, draw in made.items()])


def _made_of(rec: Recording | None) -> list[Block]:
    if rec is None:
        return []
    return _there([drawings.made_of(rec, name, f"map-{k}", SAID["map"]) for k, name in enumerate(rec.memory_maps, 1)])


def _without(done: Sequence[Ablation] | None) -> list[Block]:
    if not done:
        return []
    loss = all(one.loss_change is not None for one in done)
    more = (
        "; and by how much the loss changes."
        if loss
        else "; and the KL divergence of the softmax over its last dimension."
    )
    return _there([drawings.ablation(done, SAID["ablation"] + more)])


def _there(figures: Sequence[Figure | None]) -> list[Block]:
    return [figure for figure in figures if figure is not None]


def _unknown(found: Inspection) -> list[Block]:
    if not found.unknown:
        return []
    rows = [[one.path or "the model", one.reason] for one in found.unknown]
    return [Table(["where", "why"], rows, "", len(rows) > LONG)]


def _settings(found: Inspection, rec: Recording | None) -> dict[str, str]:
    """What the inspection and the recording tell of themselves."""
    dtypes = dict.fromkeys(stream.dtype for stream in found.streams)
    eps = dict.fromkeys(constant(stream.eps) for stream in found.streams if stream.eps is not None)
    told = {"class": found.model, "mode": found.mode, "dtype": ", ".join(dtypes), "eps": ", ".join(eps)}
    told |= {"operators watched": str(found.operators)}
    if rec is not None:
        told["steps recorded"] = str(len(rec.steps))
        told |= {"note": str(rec.metadata["note"])} if rec.metadata.get("note") else {}
    return {name: text for name, text in told.items() if text}
