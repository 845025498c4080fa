"""Report of one model: its wiring with the proof, recorded statistics of its stream, and ablations.

All sentences and numbers are computed from the arguments. Sections without numbers are left out.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping, Sequence

import torch

from addnorm._util.blocks import Finding, Table, TableRow
from addnorm._util.numbers import format_count, format_number
from addnorm._util.site_tables import mask_numbers, merge_paths
from addnorm.report.model_charts import ablation_chart, depth_charts, memory_charts, program_charts
from addnorm.report.model_findings import ablation_findings, inspection_findings, recording_findings
from addnorm.report.page import Block, Facts, Findings, Formula, Page, Section, figure_of
from addnorm.stream.ablate import Ablation
from addnorm.stream.find.labels import NORM_NAMES, format_norm, format_norms
from addnorm.stream.find.naming import EMBEDDING
from addnorm.stream.find.sites import Stream
from addnorm.stream.inspection import Inspection, Part, name_wirings
from addnorm.stream.program.result import Program
from addnorm.stream.record.recording import Recording
from addnorm.wirings.factors import format_factor
from addnorm.wirings.stage_text import GAP

LONG = 48  # rows: longer tables are collapsed
TOP = ("model", "inputs", "date", "loss")  # facts at the top of the page
DEPTH = "Depth counts sublayers; x_0 is the stream before the first sublayer."
FINAL = "The output is the norm of the stream."  # part of a wiring's description
# Texts about a residual program.
CAPTION = "The sublayers with their matrices, and the relative error of the equations"
SYMBOLS = (
    "f is the sublayer, N a norm, R its normalization without weight, X the streams before it, X' the streams after it."
)


def build_model_page(
    inspection: Inspection,
    recording: Recording | None = None,
    ablations: Sequence[Ablation] | None = None,
    facts: Mapping[str, str] | None = None,
    *,
    title: str | None = None,
    footer: Sequence[str] = (),
) -> Page:
    """Return the report of an inspected model.

    Args:
        inspection: the result of `addnorm.inspect`.
        recording: the result of `addnorm.record`.
        ablations: the results of `addnorm.ablate_each`.
        facts: further facts by name. Model, inputs, date and loss replace those of the recording at the top of the page.
        title: title of the page; the class of the model by default.
        footer: the last lines of the page. Equal arguments give equal pages.

    Example:
        >>> from addnorm import report
        >>> stack = addnorm.ResidualStack([torch.nn.Linear(8, 8) for _ in range(2)], 8, "pre_ln", sublayers_per_layer=1)
        >>> page = report.build_model_page(addnorm.inspect(stack, torch.randn(2, 3, 8)))
        >>> [section.title for section in page.sections]
        ['The wiring', 'Settings']
    """
    others = dict(facts or {})
    top = {"model": inspection.model, **(recording.describe() if recording is not None else {})}
    top |= {name: others.pop(name) for name in TOP if name in others}
    recordings = [recording] if recording is not None else []
    remarkable = [*(one for rec in recordings for one in recording_findings(rec)), *ablation_findings(ablations or ())]
    programs = [program for program in (inspection.program, inspection.unnamed) if program is not None]
    sections = [
        Section("Findings", "", [Findings(remarkable)] if remarkable else []),
        *(_wiring_section(stream, len(inspection.streams) > 1) for stream in inspection.streams),
        *(section for program in programs for section in _build_program_sections(program)),
        Section(
            "Forward and backward by depth",
            DEPTH,
            [figure_of(chart) for rec in recordings for chart in depth_charts(rec)],
        ),
        Section("Sources of the stream", "", [figure_of(chart) for rec in recordings for chart in memory_charts(rec)]),
        Section("Ablations", "", [figure_of(ablation_chart(ablations))] if ablations else []),
        Section(
            "Not understood",
            "The places that the inspection does not understand, each with the reason.",
            _unknown(inspection),
        ),
        Section("Settings", "", [Facts({**others, **_settings(inspection, recording), **versions()})]),
    ]
    return Page(
        title or inspection.model, _subtitle(inspection), _verdict(inspection),
        [section for section in sections if section.blocks], _tiles(inspection),
        footer, {name: top[name] for name in TOP if name in top},
    )  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of addnorm, torch and Python.

    Example:
        >>> from addnorm.report import versions
        >>> sorted(versions())
        ['Python', 'addnorm', 'torch']
    """
    addnorm = sys.modules["addnorm"]  # importing it here would be a cycle
    return {"addnorm": str(addnorm.__version__), "torch": str(torch.__version__), "Python": platform.python_version()}


def _subtitle(inspection: Inspection) -> str:
    layers = sum(part.num_layers for part in inspection.parts)
    streams = f" in {len(inspection.streams)} streams" if len(inspection.streams) > 1 else ""
    sites = format_count(len(inspection.list_sites()), "sublayer")
    are_several = any(isinstance(part, Program) for part in inspection.parts)
    return (
        f"The residual stream{'s' * are_several} of {inspection.model}, in {inspection.mode} mode: "
        f"{sites} in {format_count(layers, 'layer')}{streams}, found by data flow."
    )


def _tiles(inspection: Inspection) -> dict[str, str]:
    widths = dict.fromkeys(str(part.width) for part in inspection.parts)
    norms = dict.fromkeys(
        NORM_NAMES.get(kind, kind) for s in inspection.streams if s.norm for kind in s.norm.split("/")
    )
    tiles = {"Wiring": inspection.wiring, "Sublayers": str(len(inspection.list_sites())), "Width d": " / ".join(widths)}
    counts = [part.count_streams().removesuffix(" streams") for part in inspection.parts if isinstance(part, Program)]
    tiles |= {"Streams": counts[0]} if counts else {"Norm": " / ".join(norms) or "none"}
    return tiles | {"Largest error": format_number(inspection.closure, 2)} if inspection.list_sites() else tiles


def _verdict(inspection: Inspection) -> list[Finding]:
    findings = [*inspection_findings(inspection)]
    by_wiring: dict[tuple[str, str], list[Part]] = {}
    for part in inspection.parts:
        words = part.wiring.describe() if part.wiring else ""
        if part.final_norm is None:  # the wiring has a final norm, the model has none
            words = words.replace(FINAL, "").rstrip()
        by_wiring.setdefault((name_wirings([part]), words), []).append(part)
    for (name, words), parts in by_wiring.items():
        subject = "The wiring"
        if len(inspection.parts) > 1:
            subject += f" of {' and '.join(f'the {part.name}' for part in parts)}"
        below = "rows" if inspection.streams else "matrices"
        text = f"{name}. {words}" if words else f"not in the catalog; its {below} are below."
        findings.append(Finding(f"{subject} is {text}"))
    return findings


def _wiring_section(stream: Stream, several: bool) -> Section:
    lines = [line.strip() for line in stream.equation.replace(GAP, "\n").split("\n")]
    text = "N is a norm, f the sublayer, x the stream before it, and x' the stream after it."
    ends = {
        "An embedding norm is placed before the first": stream.embedding_norm,
        "A final norm is placed after the last": stream.final_norm,
    }
    notes = [
        Finding(f"{where} sublayer: {format_norm(norm)}, {norm.path or 'in the model itself'}.")
        for where, norm in ends.items()
        if norm is not None
    ]
    notes += [
        Finding(remark[0].upper() + remark[1:].rstrip(".") + ".") for remark in stream.remarks if remark != EMBEDDING
    ]
    if stream.wiring is not None:
        notes.append(Finding(f"Source: {stream.wiring.source}. When to use {stream.wiring.name}: {stream.wiring.use}"))
    rows = [
        TableRow(
            [
                site.location, site.layer + 1, site.kind, site.equation, format_norms(site.list_norms()),
                format_number(site.closure, 1),
            ],
            "" if site.closes else "bad",
        )
        for site in stream.sites
    ]  # fmt: skip
    caption = f"The sublayers of the {stream.name} ({len(rows)}), each with the relative error of its equation"
    table = Table(["module", "layer", "kind", "equation", "norm, eps", "error"], rows, caption, len(rows) > LONG)
    similar: dict[tuple[str, str], list[str]] = {}
    for site in stream.sites:
        for note in site.notes:
            similar.setdefault((note, mask_numbers(site.id)), []).append(site.id)
    site_notes = [Finding(f"{merge_paths(ids)}: {note}.") for (note, _), ids in similar.items()]
    blocks: list[Block] = [Formula(lines, text), table]
    if notes:
        blocks.insert(1, Findings(notes))
    if site_notes:
        blocks.append(Findings(site_notes))
    return Section(f"The wiring of the {stream.name}" if several else "The wiring", "", blocks)


def _unknown(inspection: Inspection) -> list[Block]:
    if not inspection.unknown:
        return []
    rows = [[part.path or "the model", part.reason] for part in inspection.unknown]
    return [Table(["where", "why"], rows, "", len(rows) > LONG)]


def _settings(inspection: Inspection, rec: Recording | None) -> dict[str, str]:
    """Return the settings of the inspection and the recording."""
    dtypes = dict.fromkeys(part.dtype for part in inspection.parts)
    eps = dict.fromkeys(format_factor(stream.eps) for stream in inspection.streams if stream.eps is not None)
    settings = {"class": inspection.model, "mode": inspection.mode, "dtype": ", ".join(dtypes), "eps": ", ".join(eps)}
    settings |= {"operators observed": str(inspection.operators)}
    if rec is not None:
        settings["steps recorded"] = str(len(rec.steps))
        settings |= {"note": str(rec.metadata["note"])} if rec.metadata.get("note") else {}
    return {name: text for name, text in settings.items() if text}


# Several streams.


def _build_program_sections(program: Program) -> Iterator[Section]:
    """Yield the sections of a residual program. All numbers are those of the inspected run, which the program holds."""
    equation, sentences = program.describe()
    source = [f"Source: {program.wiring.source}. {program.wiring.use}"] if program.wiring is not None else []
    texts = [text if not text.startswith("addnorm.") else f"in code: {text}" for text in (*sentences, *source)]
    findings = Findings([Finding(f"{text[:1].upper()}{text[1:].rstrip('.')}.") for text in texts])
    yield Section("The wiring", "", [Formula(equation, SYMBOLS), findings, program.build_table(CAPTION)])
    yield Section("The streams by depth", "", [figure_of(chart) for chart in program_charts(program)])
