"""The streams that `inspect` finds, their sites, the relative error of each equation (its closure), and how they are rendered.

In a rendered table, equal layers share one line. Values that all lines have in common are printed above the table.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from addnorm._util.blocks import Block, Column, Paragraph
from addnorm._util.numbers import format_count, format_number
from addnorm._util.site_tables import Cells, build_site_table, build_title, group_sites
from addnorm.stream.find.labels import describe_learned, format_norm, format_norms
from addnorm.stream.find.naming import EMBEDDING
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.passages import PlacedChain
from addnorm.stream.find.stream_layout import StreamLayout
from addnorm.stream.find.sublayers import Sublayer
from addnorm.stream.find.unknown import Unknown
from addnorm.wirings import spec
from addnorm.wirings.equation import format_equation
from addnorm.wirings.factors import FACTORS
from addnorm.wirings.stage_text import GAP, equation

NORMS = ("norm_in", "norm_branch", "norm_out")  # fields of a row and of a site
COLUMNS = {name: Column(name) for name in ("layer", "sublayer", "module", "x'", "norms", "error")}
COLUMNS |= {"module": Column("module", fold=True), "error": Column("error", "right")}


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
    index: int = field(init=False)  # set by the inspection, like `owner`, which refers to the user's model
    owner: weakref.ref[nn.Module] = field(init=False)

    @property
    def model(self) -> Any:
        """The inspected model; None if it no longer exists."""
        return self.owner()

    @property
    def equation(self) -> str:
        """The row's equation as text, with a letter for each learned factor, followed by the means of these factors."""
        return GAP.join([self.formula, *describe_learned([self.row])])

    @property
    def formula(self) -> str:
        """The row's equation as text, without the means of learned factors."""
        if self.role == "branch":
            return equation(self.row, defines=False)
        plain = replace(self.row, norm_in=False, norm_branch=False, c=1.0)
        return equation(plain, defines=False).replace("f(x)", self.role)

    def list_norms(self) -> list[Norm]:
        """Return the norms in the order in which they are applied."""
        return [norm for norm in (self.norm_in, self.norm_branch, self.norm_out) if norm is not None]

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
            "closure": finite_or_none(self.closure), "closes": self.closes, "parallel": self.parallel, "shared": self.shared,
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
        """The kind of the norms: "layer", "rms", "scale", or "own" for another formula; None without norms.

        Different kinds are joined: "layer/rms".
        """
        return "/".join(sorted({norm.kind for norm in self.norms()})) or None

    @property
    def eps(self) -> float | None:
        """The eps of the norms; None if norms have different eps, or if there is no norm."""
        values = {norm.eps for norm in self.norms()}
        return values.pop() if len(values) == 1 else None

    def norms(self) -> Iterator[Norm]:
        """Return all norms in the order of depth."""
        of_sites = (norm for site in self.sites for norm in site.list_norms())
        yield from dict.fromkeys(filter(None, (self.embedding_norm, *of_sites, self.final_norm)))

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
            "closure": finite_or_none(self.closure), "sum_closes": self.sum_closes, "closes": self.closes,
            "remarks": [*self.remarks], "sites": [site.to_dict() for site in self.sites],
        }  # fmt: skip

    @property
    def expansion(self) -> float | None:
        """The relative error of x_L == x_0 + all writes, as `closure`."""
        return self.closure

    @property
    def expansion_closes(self) -> bool:
        """Whether `expansion` is within the tolerance of the dtype, as `sum_closes`."""
        return self.sum_closes

    def build_blocks(self) -> Iterator[Block]:
        """Yield the paragraphs and the table that show the stream."""
        lines = _build_lines(self)
        yield build_title(self, self.name)
        yield from (Paragraph(text, indent=2) for text in _summarize(self, lines))
        yield build_site_table(COLUMNS, lines, ("x'", "norms"))

    def __repr__(self) -> str:
        wiring = self.wiring.name if self.wiring else "no known wiring"
        return f"<{self.name}: {format_count(len(self.sites), 'sublayer')}, {wiring}>"


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
        lines.append(cells | {"module": cells["module"] + f" ({calls})" * (first.shared > 1)})
    return lines


def _describe_site(site: Site) -> Cells:
    """Return the cells by which sublayers are grouped into one table line."""
    return {
        "sublayer": f"{site.kind} (parallel)" if site.parallel > 1 else site.kind,
        "x'": site.formula.removeprefix("x' = "),
        "norms": format_norms(site.list_norms()),
    }


def finite_or_none(error: float | None) -> float | None:
    """Return `error`; None for NaN and infinity, which JSON cannot represent."""
    return error if error is not None and math.isfinite(error) else None


def _factor_to_dict(factor: spec.Factor) -> Any:
    if isinstance(factor, spec.Learned):
        return {"learned": True, "mean": factor.init, "per_feature": factor.per_feature}
    return factor
