"""The result of `inspect`: streams, their sites, the relative error of each equation (its closure), and how they are rendered.

In a rendered table, equal layers share one line. Values that all lines have in common are printed above the table.
"""

from __future__ import annotations

import difflib
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from addnorm._util.blocks import Block, Column, Paragraph
from addnorm._util.numbers import format_count, format_number
from addnorm._util.render import Rendered
from addnorm.stream.dataflow.graph import Value
from addnorm.stream.find.labels import (
    Cells,
    build_site_table,
    describe_learned,
    format_norm,
    group_sites,
    mask_numbers,
    merge_paths,
)
from addnorm.stream.find.naming import EMBEDDING
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.passages import PlacedChain
from addnorm.stream.find.residual_program import ResidualProgram
from addnorm.stream.find.stream_layout import StreamLayout
from addnorm.stream.find.sublayers import Sublayer
from addnorm.stream.find.unknown import Unknown, group_unknown
from addnorm.wirings import spec
from addnorm.wirings.equation import format_equation
from addnorm.wirings.factors import FACTORS
from addnorm.wirings.stage_text import GAP, equation

NORMS = ("norm_in", "norm_branch", "norm_out")  # fields of a row and of a site
MAX_IDS = 4  # ids named in an error message
COLUMNS = {name: Column(name) for name in ("layer", "sublayer", "module", "x'", "norms", "closure")}
COLUMNS |= {"module": Column("module", fold=True), "closure": Column("error", "right")}


@dataclass(eq=False, repr=False)
class Site:
    """One sublayer and the add with which it writes to the stream.

    Attributes:
        id: unique name: the module's path, with a suffix if several sublayers have this path. If two streams have this name, the
            stream's name precedes it.
        path: path of the smallest module that contains the sublayer.
        modules: paths of the child modules that are this sublayer, if the module contains other sublayers too; otherwise empty.
        kind: "attention", "cross-attention", "feed-forward" or "other".
        layer: index of the layer, from 0.
        stream: name of the stream.
        row: the equation x' = N_out(a x + b N_branch(f(c N_in(x)))). A learned factor has its mean as `init`.
        norm_in, norm_branch, norm_out: the norms, or None.
        closure: relative error of the row's equation, computed in float64 from the sublayer's output in the model.
        closes: whether `closure` is within the tolerance of the model's dtype.
        parallel: number of sublayers whose writes the same add contains.
        shared: number of sublayers of the stream that are calls of this same module.
        call: index of this call of the module, counted from 0.
        add_path: path of the module that executes the add.
        notes: properties that the row does not express.
        role: "branch" (reads this stream), "skip" (an earlier state) or "injection" (does not read the state that it adds to).
        index: index of the site among the sites of all streams.
    """

    id: str
    path: str
    modules: tuple[str, ...]
    kind: str
    layer: int
    stream: str
    row: spec.Row
    norm_in: Norm | None
    norm_branch: Norm | None
    norm_out: Norm | None
    closure: float
    closes: bool
    parallel: int
    shared: int
    call: int
    add_path: str
    notes: tuple[str, ...]
    role: str
    sublayer: Sublayer  # in the captured run
    parent: Stream = field(init=False)  # set by the stream
    index: int = field(init=False)  # set by the inspection, as the user's model
    owner: weakref.ref[nn.Module] = field(init=False)

    @property
    def model(self) -> Any:
        """The inspected model; None if it no longer exists."""
        return self.owner()

    @property
    def equation(self) -> str:
        """The row's equation as text, with a letter for each learned factor, followed by their means."""
        return GAP.join([self.formula, *describe_learned([self.row])])

    @property
    def formula(self) -> str:
        """The row's equation as text, without the means of learned factors."""
        if self.role == "branch":
            return equation(self.row, defines=False)
        plain = replace(self.row, norm_in=False, norm_branch=False, c=1.0)
        return equation(plain, defines=False).replace("f(x)", self.role)

    @property
    def location(self) -> str:
        """The path, followed by `modules` if there are any."""
        names = ", ".join(name.removeprefix(f"{self.path}.") for name in self.modules)
        return ": ".join(filter(None, (self.path or "the model", names)))

    def to_dict(self) -> dict[str, Any]:
        """Return the site as JSON types."""
        row = self.row
        return {
            "id": self.id, "path": self.path, "modules": [*self.modules], "kind": self.kind, "layer": self.layer,
            "stream": self.stream, "equation": self.equation, "role": self.role,
            "row": {name: getattr(row, name) for name in NORMS}
            | {name: _factor_to_dict(getattr(row, name)) for name in FACTORS},
            "norms": {name: norm.to_dict() for name in NORMS if (norm := getattr(self, name)) is not None},
            "closure": _finite_or_none(self.closure), "closes": self.closes, "parallel": self.parallel, "shared": self.shared,
            "notes": [*self.notes],
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"<{self.id}: {self.equation}>"


@dataclass(eq=False, repr=False)
class Stream:
    """One residual stream.

    Attributes:
        name: "stream" if the model has one stream; otherwise the module's path, such as "encoder".
        width: number of features, d.
        dtype: dtype of the stream at its start.
        sites: the sublayers in the order of depth.
        num_layers: number of layers.
        wiring: the `addnorm.Wiring` whose rows the sites have; None if no wiring in `addnorm.wirings` has them.
        embedding_norm, final_norm: norm before the first sublayer, norm after the last one, or None.
        closure: relative error of x_L == x_0 + all writes if the stream is a plain sum; otherwise None.
        sum_closes: whether `closure` is within the tolerance of the dtype; True if `closure` is None.
        unknown: parts of the stream that no `Row` describes.
        remarks: differences from the wiring, and other properties of the whole stream.
        axis: dimension of the features, counted from the end: -1 except in convolutional nets.
    """

    name: str
    width: int
    dtype: str
    sites: tuple[Site, ...]
    num_layers: int
    wiring: spec.Wiring | None
    embedding_norm: Norm | None
    final_norm: Norm | None
    closure: float | None
    sum_closes: bool
    unknown: tuple[Unknown, ...]
    remarks: tuple[str, ...]
    chain: PlacedChain  # the stream in the captured run
    layout: StreamLayout  # the dimensions of its values
    axis: int

    def __post_init__(self) -> None:
        for site in self.sites:
            site.parent = self

    @property
    def closes(self) -> bool:
        """Whether all equations of the stream are within the tolerance of their dtype, and `unknown` is empty."""
        return self.sum_closes and not self.unknown and all(site.closes for site in self.sites)

    @property
    def norm(self) -> str | None:
        """The kind of the norms, "layer", "rms", "scale" or "own" (another formula); if kinds differ, all: "layer/rms"."""
        return "/".join(sorted({norm.kind for norm in self.norms()})) or None

    @property
    def eps(self) -> float | None:
        """The eps of the norms; None if norms have different eps, or if there is no norm."""
        values = {norm.eps for norm in self.norms()}
        return values.pop() if len(values) == 1 else None

    def norms(self) -> Iterator[Norm]:
        """Return all norms in the order of depth."""
        of_sites = [(s.norm_in, s.norm_branch, s.norm_out) for s in self.sites]
        yield from dict.fromkeys(filter(None, (self.embedding_norm, *sum(of_sites, ()), self.final_norm)))

    @property
    def equation(self) -> str:
        """The equation of the wiring with its constants; without a wiring, the different equations of the sites, one a line."""
        if (wiring := self.wiring) is None:
            return "\n".join(dict.fromkeys(site.equation for site in self.sites))
        if not any(getattr(wiring.last_read(spec.Place(self.num_layers, 0, self.num_layers, 2)), "norm_streams", ())):
            wiring = replace(wiring, final_norm=self.final_norm is not None)
        text = format_equation(wiring, self.num_layers, defines=False)
        learned = describe_learned([site.row for site in self.sites if site.role == "branch"], dict(wiring.symbols))
        return ("\n" if "\n" in text else GAP).join([text, *learned])

    def to_dict(self) -> dict[str, Any]:
        """Return the stream as JSON types."""
        norms = {"embedding": self.embedding_norm, "final": self.final_norm}
        return {
            "name": self.name, "width": self.width, "axis": self.axis, "dtype": self.dtype, "layers": self.num_layers,
            "wiring": self.wiring and self.wiring.name, "options": dict(self.wiring.options) if self.wiring else {},
            "equation": self.equation, "norm": self.norm, "eps": self.eps,
            "norms": {name: norm.to_dict() for name, norm in norms.items() if norm is not None},
            "closure": _finite_or_none(self.closure), "sum_closes": self.sum_closes, "closes": self.closes,
            "remarks": [*self.remarks], "sites": [site.to_dict() for site in self.sites],
        }  # fmt: skip

    def __repr__(self) -> str:
        wiring = self.wiring.name if self.wiring else "no known wiring"
        return f"<{self.name}: {format_count(len(self.sites), 'sublayer')}, {wiring}>"


@dataclass(eq=False, repr=False)
class Inspection(Rendered):
    """Result of `addnorm.inspect`. The result prints as a table.

    Attributes:
        model: name of the model's class.
        streams: the residual streams in the order in which they begin.
        unknown: parts of the model that no `Row` describes, each with the reason.
        mode: "training" or "evaluation".
        operators: number of operators that ran.
        target: the inspected model.
        outside: sums that change no stream, such as those of a classification head. Nothing is proven about these sums.
        program: the matrices of the sublayers if no `Row` describes them. Then `streams` and `unknown` are empty.
        unnamed: a program of several streams that no wiring of `addnorm.wirings` has, beside what is not understood.
        results: what the model returned, by place, such as "hidden_states[2]".

    Example:
        >>> addnorm.inspect(addnorm.nn.Encoder(2, 16, nhead=2), torch.randn(2, 5, 16)).wiring
        'pre_ln'
    """

    model: str
    streams: tuple[Stream, ...]
    unknown: tuple[Unknown, ...]
    mode: str
    operators: int
    target: Any
    outside: tuple[Unknown, ...]
    results: Mapping[str, Value] = field(default_factory=dict)
    program: ResidualProgram | None = None
    unnamed: ResidualProgram | None = None

    def __post_init__(self) -> None:
        for k, site in enumerate(self.list_sites()):
            site.index, site.owner = k, weakref.ref(self.target)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of all streams."""
        return tuple(site for stream in self.streams for site in stream.sites)

    @property
    def _described(self) -> ResidualProgram | None:  # by `program`, or where there are no streams by `unnamed`
        return self.program or (None if self.streams else self.unnamed)

    @property
    def _parts(self) -> Sequence[Stream | ResidualProgram]:  # the streams, or the program that describes the model
        return self.streams if self._described is None else (self._described,)

    def with_program(self) -> Inspection:
        """Return the inspection with the unnamed program as its program, if no streams were found."""
        program = self._described
        return self if program is self.program else replace(self, program=program, unnamed=None, unknown=())

    def list_sites(self) -> Sequence[Any]:
        """Return the sites of all streams, or those of the program, which may be the unnamed one."""
        return [site for part in self._parts for site in part.sites]

    @property
    def wiring(self) -> str:
        """The name of the wiring, or all names, as "post_ln / pre_ln"; "unknown" if it has none, "none" without a stream."""
        return (
            " / ".join(dict.fromkeys(part.wiring.name if part.wiring else "unknown" for part in self._parts)) or "none"
        )

    @property
    def closure(self) -> float:
        """The largest relative error of the sites' equations, and of x_L == x_0 + all writes where a stream is a plain sum."""
        errors = [site.closure for site in self.list_sites()] + [part.closure for part in self._parts]
        return max((error for error in errors if error is not None), default=math.nan)

    @property
    def closes(self) -> bool:
        """Whether all equations of all streams are within tolerance and `unknown` is empty; False without a stream."""
        if self.program is not None:
            return self.program.closes
        return bool(self.streams) and not self.unknown and all(stream.closes for stream in self.streams)

    def site(self, name: str | int) -> Any:
        """Return the site whose id, path or index is `name`.

        Raises:
            KeyError: no site has that id or path, or several sites have the path.
        """
        known = self.list_sites()
        if isinstance(name, int):
            return known[name]
        sites = [site for site in known if site.id == name] or [site for site in known if site.path == name]
        if len(sites) == 1:
            return sites[0]
        ids = [site.id for site in sites or known]
        if sites:
            shown = ", ".join(map(repr, ids[:MAX_IDS]))
            raise KeyError(f"site is {name!r}, the path of {len(sites)} sublayers, expected an id: {shown}.")
        close = difflib.get_close_matches(name, ids, 1)
        expected = repr(close[0]) if close else f"one of {', '.join(ids[:MAX_IDS])}{', ...' * (len(ids) > MAX_IDS)}"
        raise KeyError(f"site is {name!r}, expected {expected}: the sublayers that inspect found.")

    def to_dict(self) -> dict[str, Any]:
        """Return the inspection as JSON types."""
        return {
            "schema": "addnorm.inspection", "schema_version": 1, "model": self.model, "mode": self.mode,
            "wiring": self.wiring, "closure": _finite_or_none(self.closure), "closes": self.closes,
            "streams": [stream.to_dict() for stream in self.streams],
            "program": self.program and self.program.to_dict(), "unnamed": self.unnamed and self.unnamed.to_dict(),
            "unknown": [vars(part).copy() for part in self.unknown], "outside": [vars(part).copy() for part in self.outside],
        }  # fmt: skip

    def __repr__(self) -> str:
        sites = self.list_sites()
        closing = f"closure {format_number(self.closure, 2)}" if sites else "no residual add"
        return f"<Inspection of {self.model}: {self.wiring}, {format_count(len(sites), 'sublayer')}, {closing}>"

    def _blocks(self) -> Iterator[Block]:
        yield Paragraph((self.model, "strong"), f", {self.mode}: ", (self.wiring, "accent"))
        for stream in self.streams:
            lines = _build_lines(stream)
            wiring = stream.wiring.name if stream.wiring else "none of the known wirings"
            sizes = f"{format_count(stream.num_layers, 'layer')}, {format_count(len(stream.sites), 'sublayer')}"
            yield Paragraph(f"{stream.name}: {wiring}, d = {stream.width}, {sizes}, {stream.dtype}", space=True)
            yield from (Paragraph(text, indent=2) for text in _summarize(stream, lines))
            yield build_site_table(COLUMNS, lines, ("x'", "norms"))
        for program in filter(None, (self.program, self.unnamed)):
            yield from program.build_blocks()
        for text in group_unknown(self.unknown):
            yield Paragraph(("not understood ", "bad"), text)
        for text in group_unknown(self.outside):
            yield Paragraph("outside of the streams: ", text)


def _summarize(stream: Stream, lines: Sequence[Cells]) -> list[str]:
    """Return the lines of text above the table of a stream."""
    texts = stream.equation.split("\n")
    norms = {cells["norms"] for cells in lines}
    if len(norms) == 1 and norms != {""}:
        texts.append(f"norms: {norms.pop()}")
    for name, norm in (("embedding norm", stream.embedding_norm), ("final norm", stream.final_norm)):
        if norm is not None:
            texts.append(f"{name}: {format_norm(norm)}, {norm.path or 'in the model itself'}")
    if stream.closes:
        worst = format_number(max(site.closure for site in stream.sites), 2)
        texts.append(
            "proved on these inputs: every sublayer's x' and norms, computed again in float64 from their inputs, "
            f"equal the model's up to a relative error of {worst}"
        )
    if stream.closure is not None:
        texts.append(f"x_L = x_0 + all writes: relative error {format_number(stream.closure, 2)}")
    return [*texts, *(remark for remark in stream.remarks if remark != EMBEDDING)]  # the norm is named above


def _build_lines(stream: Stream) -> list[Cells]:
    """Return the table lines of a stream."""
    lines = []
    for sites, cells in group_sites(stream.sites, _describe_site):
        first, last = sites[0], sites[-1]
        calls = f"call {first.call + 1}" if len(sites) == 1 else f"calls {first.call + 1} to {last.call + 1}"
        module = merge_paths([site.location for site in sites]) + f" ({calls})" * (first.shared > 1)
        lines.append(cells | {"module": module, "closure": format_number(max(site.closure for site in sites), 1)})
    return lines


def _describe_site(site: Site) -> Cells:
    """Return the cells by which sublayers are grouped into one table line."""
    norms = (format_norm(norm) for name in NORMS if (norm := getattr(site, name)) is not None)
    return {
        "sublayer": f"{site.kind} (parallel)" if site.parallel > 1 else site.kind,
        "module": mask_numbers(site.location),
        "x'": site.formula.removeprefix("x' = "),
        "norms": ", ".join(dict.fromkeys(norms)),
        "style": "" if site.closes else "bad",
    }


def _finite_or_none(error: float | None) -> float | None:
    """Return `error`; None for NaN and infinity, which JSON cannot represent."""
    return error if error is not None and math.isfinite(error) else None


def _factor_to_dict(factor: spec.Factor) -> Any:
    if isinstance(factor, spec.Learned):
        return {"learned": True, "mean": factor.init, "per_feature": factor.per_feature}
    return factor
