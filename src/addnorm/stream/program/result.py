"""A residual program: its sites, each with the matrices of its stage, and the read at the end; and how it is printed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from addnorm._util.blocks import Block, Column, Paragraph, Table
from addnorm._util.numbers import format_count, format_number
from addnorm._util.site_tables import Cells, build_site_table, build_title, group_sites
from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.dataflow.replay import relative_error
from addnorm.stream.find.equation_errors import get_tolerance
from addnorm.stream.find.labels import format_norm
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.reasons import format_source
from addnorm.stream.find.unknown import Unknown
from addnorm.stream.program.carried import Carrier
from addnorm.stream.program.cuts import find_leaves
from addnorm.stream.program.maps import Map, Matrix, apply_map, assemble, measure_map, to_streams
from addnorm.stream.program.spine import Spine, Write
from addnorm.wirings.equation import wrap_equation
from addnorm.wirings.spec import Wiring

NAME = "streams"  # name of a program among the streams of a recording
NARROW, ENTRIES = 76, 4  # columns of an equation, and entries of a matrix, that are shown in 80 columns
COLUMNS = {name: Column(name) for name in ("layer", "sublayer", "module", "streams", "C", "A", "B", "norms", "error")}
COLUMNS |= {"module": Column("module", fold=True), "error": Column("error", "right")}


@dataclass(eq=False, repr=False)
class ProgramSite:
    """One sublayer of a residual program: R = N_in(C X), W = N_branch(f(R)), X' = N_out(A X + B W).

    Attributes:
        id: unique name: the module's path, with a number if several sublayers have this path.
        path, kind, layer: as in a `Site`.
        collapse, mix, inject: the matrices C, A and B.
        norm_in, norm_branch: the norms, or None; `norms_out` has one for each new stream.
        closure: the largest relative error of the equations, computed in float64 with the values of the run.
        deviation: the largest difference of an entry from the wiring's formula, relative to the largest entry; None without
            a wiring.
        parameters: the names of the model's parameters by the names of those of the wiring's module.
    """

    id: str
    path: str
    kind: str
    layer: int
    collapse: Matrix
    mix: Matrix
    inject: Matrix
    norm_in: Norm | None
    norm_branch: Norm | None
    norms_out: tuple[Norm | None, ...]
    closure: float
    write: Write  # in the captured run
    state: list[Value]
    reads: list[Map]
    sums: list[Map]
    deviation: float | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    stream: str = NAME
    notes: tuple[str, ...] = ()
    closes: bool = True  # set by the program
    index: int = 0  # set by the inspection, as is `owner`, a weak reference to the model
    owner: Any = None

    @property
    def model(self) -> Any:
        """The inspected model; None if it no longer exists."""
        return self.owner and self.owner()

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        """The matrices C, A and B."""
        return self.collapse, self.mix, self.inject

    def list_norms(self) -> list[Norm]:
        """Return the norms in the order in which they are applied."""
        return [*dict.fromkeys(filter(None, (self.norm_in, self.norm_branch, *self.norms_out)))]

    @property
    def location(self) -> str:
        """The path, or "the model" if it is empty."""
        return self.path or "the model"

    def to_dict(self) -> dict[str, Any]:
        """Return the sublayer as JSON types."""
        norms = {"norm_in": self.norm_in, "norm_branch": self.norm_branch}
        return {
            "id": self.id, "path": self.path, "kind": self.kind, "layer": self.layer,
            "streams": self.mix.values.shape[2], "streams_after": self.mix.values.shape[1],
            "C": self.collapse.to_dict(), "A": self.mix.to_dict(), "B": self.inject.to_dict(),
            "norms": {name: norm.to_dict() for name, norm in norms.items() if norm is not None}
            | {"norm_out": [norm and norm.to_dict() for norm in self.norms_out]},
            "closure": self.closure, "deviation": self.deviation, "parameters": dict(self.parameters),
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"<{self.id}: {self.mix.values.shape[2]} streams>"


@dataclass(eq=False, repr=False)
class Program:
    """The residual program of a model with several streams, or with computed coefficients.

    Attributes:
        sites: the sublayers in the order of depth.
        final_norm: the norm of the last read, or None.
        closure: the largest relative error of an equation, computed in float64 with the values of the run.
        expansion: the relative error of the end, computed from the embedding and all writes with these matrices; None if some
            tokens leave the streams on the way.
        wiring: the wiring of the catalog whose matrices these are; None if there is none.
        deviation: the largest `deviation` of a site or of the last read; None without a wiring.
        sizes: the number of streams before each sublayer, and at the end.

    Example:
        >>> model = addnorm.nn.Encoder(2, 16, nhead=2, wiring="mhc").eval()
        >>> program = addnorm.inspect(model, torch.randn(2, 5, 16)).program
        >>> program, program.sites[0].mix.source
        (<Program: 4 sublayers, up to 4 streams, mhc>, 'computed')
    """

    spine: Spine  # the carried values in the captured run
    sites: list[ProgramSite]
    head: Map
    wiring: Wiring | None = None
    deviation: float | None = None
    frozen: dict[Map, Map] = field(default_factory=dict)
    fits: dict[Any, Any] = field(default_factory=dict)  # of stages of the catalog's wirings (naming.py)
    outside: list[Op] = field(default_factory=list)  # residual sums of the run that are no part of the program
    name: str = NAME
    embedding_norm: Norm | None = None  # always None: such a norm is a part of the embedding

    def __post_init__(self) -> None:
        for site in self.sites:
            site.closes = site.closure <= self.tolerance

    @property
    def carrier(self) -> Carrier:
        """The carried values of the run."""
        return self.spine.carrier

    @property
    def width(self) -> int:
        """The number of features of each stream."""
        return self.carrier.width

    @property
    def dtype(self) -> str:
        """The dtype of the streams before the first sublayer."""
        return str(self.spine.states[0][0].tensor.dtype).removeprefix("torch.")

    @cached_property
    def sizes(self) -> list[int]:
        """The number of streams before each sublayer, and at the end."""
        return self.spine.sizes

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return max(site.layer for site in self.sites) + 1

    @property
    def final_norm(self) -> Norm | None:
        """The norm of the last read."""
        return self.head.norm

    @property
    def closure(self) -> float:
        """The largest relative error of an equation."""
        return max(self.head.error, *(site.closure for site in self.sites))

    @cached_property
    def tolerance(self) -> float:
        """The tolerance of the coarsest dtype in which a value of the streams is computed."""
        values = (value for value in self.spine.relevant if value.tensor.is_floating_point())
        return get_tolerance(*{value.tensor.dtype for value in values})

    @property
    def closes(self) -> bool:
        """Whether every equation is within the tolerance."""
        return self.closure <= self.tolerance

    @cached_property
    def expansion(self) -> float | None:
        """The relative error of the end, computed from the embedding and all writes with the matrices of all sublayers."""
        streams = {value: to_streams(self.carrier, value) for value in self.spine.states[0]}
        for site in self.sites:
            streams[site.write.value] = to_streams(self.carrier, site.write.value)
            after = {part.target: apply_map(self.carrier, part, streams) for part in site.sums}
            streams = {value: tensor for value, tensor in after.items() if tensor is not None}
            if len(streams) < len(after):
                return None
        end = apply_map(self.carrier, self.head, streams)
        return None if end is None else relative_error(to_streams(self.carrier, self.spine.end), end)

    @property
    def expansion_closes(self) -> bool:
        """Whether `expansion` is within the tolerance; False if it is not computed."""
        return self.expansion is not None and self.expansion <= self.tolerance

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices of all sites."""
        return [matrix for site in self.sites for matrix in site.matrices]

    @property
    def has_constant_coefficients(self) -> bool:
        """Whether coefficients are computed from the streams, and are the same for all tokens."""
        sizes = [len(matrix.values) for matrix in self.matrices if matrix.source == "computed"]
        return bool(sizes) and max(sizes) == 1 < self.count_tokens(0)

    @property
    def equation(self) -> str:
        """The equation of the wiring with its constants; without a wiring the general form of all programs."""
        if self.wiring is None:
            return "R = N_in(C X), W = N_branch(f(R)), X' = N_out(A X + B W)"
        return "\n".join(wrap_equation(self.wiring, NARROW, self.num_layers))

    @property
    def remarks(self) -> list[str]:
        """Remarks on the whole program: how many streams there are."""
        return [self.count_streams()]

    def norms(self) -> Iterator[Norm]:
        """Yield each norm of the program once: those of the sites in order of depth, then the final norm."""
        of_sites = (norm for site in self.sites for norm in site.list_norms())
        yield from dict.fromkeys(filter(None, (*of_sites, self.final_norm)))

    def list_reads(self, k: int) -> list[Map]:
        """Return the equations of the inputs of site k; of the last read if k is the number of sites."""
        return self.sites[k].reads if k < len(self.sites) else [self.head]

    def collapse(self, k: int, normed: bool = False) -> Matrix:
        """Return C of site k or of the last read: of the streams, or with `normed` of the norms of the streams."""
        return assemble(self.carrier, self.list_reads(k), self.spine.states[k], normed)

    def find_leaves(self, matrices: Iterable[Matrix]) -> tuple[list[Value], list[Op]]:
        """Return the parameters and buffers from which matrices are computed, and the operators that compute the matrices."""
        return find_leaves(self.spine, [value for matrix in matrices for value in matrix.operands])

    def count_tokens(self, k: int) -> int:
        """Return the number of tokens of the streams before site k."""
        value = self.spine.states[k][0]
        return math.prod(value.shape) // (self.carrier.count_streams(value) * self.width)

    def bias(self, k: int) -> Tensor:
        """Return the bias of X' = A X + B W + bias at site k, `(tokens, n, d)`."""
        parts = [(part.bias, self.carrier.count_streams(part.target)) for part in self.sites[k].sums]
        zero = torch.zeros(1, 1, 1, dtype=torch.float64)
        return torch.cat([zero.expand(1, n, self.width) if bias is None else bias[:1].cpu() for bias, n in parts], 1)

    def freeze(self, part: Map, sources: Sequence[Value]) -> Map:
        """Return a map measured anew with the norms of its sources as factors; the map itself if it has no such norms."""
        if all(column.norm is None for column in part.columns):
            return part
        if part not in self.frozen:
            self.frozen[part] = measure_map(self.carrier, part.target, sources, freeze=True)
        return self.frozen[part]

    def to_dict(self) -> dict[str, Any]:
        """Return the program as JSON types."""
        return {
            "wiring": self.wiring and self.wiring.name, "options": dict(self.wiring.options) if self.wiring else {},
            "width": self.width, "dtype": self.dtype, "layers": self.num_layers, "streams": self.sizes,
            "final_norm": self.final_norm and self.final_norm.to_dict(), "C": self.collapse(len(self.sites)).to_dict(),
            "closure": self.closure, "expansion": self.expansion, "deviation": self.deviation, "closes": self.closes,
            "sites": [site.to_dict() for site in self.sites],
        }  # fmt: skip

    def explain_outside(self) -> Unknown:
        """Return a part that is not understood: the residual sums that the program does not contain."""
        name = f" of {self.wiring.name}" if self.wiring is not None else ""
        count, sums = format_count(len(self.sites), "sublayer"), format_count(len(self.outside), "residual sum")
        return Unknown(
            self.sites[0].path or "the model",
            f"the equations of {count}{name} close, but {sums} of the model {'is' if len(self.outside) == 1 else 'are'} "
            "elsewhere: inspect each part of the model by itself",
            format_source(self.outside[0]),
        )

    def count_streams(self) -> str:
        """Return how many streams there are: "4 streams", or "1 to 7 streams"."""
        low, high = min(self.sizes), max(self.sizes)
        return f"{low} to {high} streams" if low < high else format_count(high, "stream")

    def describe(self) -> tuple[list[str], list[str]]:
        """Return the lines of the equation, and sentences on the wiring, final norm, proof and comparison."""
        return self.equation.split("\n"), [*_summarize(self)]

    def build_blocks(self) -> Iterator[Block]:
        """Yield the paragraphs and the table of the program."""
        yield build_title(self, self.count_streams())
        norms = {_format_norms(site) for site in self.sites}
        texts = [f"norms: {norms.pop()}"] if len(norms) == 1 and norms != {""} else []
        equation, sentences = self.describe()
        yield from (Paragraph(line, indent=2) for line in (*equation, *sentences, *texts))
        yield self.build_table()

    def build_table(self, caption: str = "") -> Table:
        """Return the table of the sublayers; equal layers share a line."""
        lines = []
        for sites, cells in group_sites(self.sites, self._describe_site):
            rows, columns = sites[0].mix.values.shape[1:3]
            lines.append(cells | {"streams": str(rows) if rows == columns else f"{columns} to {rows}"})
        return build_site_table(COLUMNS, lines, ("streams", "norms"), caption)

    def _describe_site(self, site: ProgramSite) -> Cells:
        """Return the cells by which sublayers are grouped into one table line."""
        return {
            "C": self._describe_matrix(site, site.collapse, site.reads),
            "A": self._describe_matrix(site, site.mix, site.sums), "B": describe_matrix(site.inject),
            "norms": _format_norms(site),
        }  # fmt: skip

    def _describe_matrix(self, site: ProgramSite, matrix: Matrix, maps: Sequence[Map]) -> str:
        """Return a matrix in words, with that of the streams' norms if there is one: "1 0 + (0 1) N"."""
        text = describe_matrix(matrix)
        if not any(column.norm is not None and column.source in site.state for part in maps for column in part.columns):
            return text
        return f"{text} + ({describe_matrix(assemble(self.carrier, maps, site.state, normed=True))}) N"

    def __repr__(self) -> str:
        wiring = self.wiring.name if self.wiring else "no known wiring"
        return f"<Program: {len(self.sites)} sublayers, up to {max(self.sizes)} streams, {wiring}>"


def _summarize(program: Program) -> Iterator[str]:
    """Yield a sentence each for the call that makes the wiring, the final norm, the proof and the comparison."""
    if program.wiring is not None:
        yield f"addnorm.wirings.{program.wiring!r}"
    if program.final_norm is not None:
        yield f"final norm: {format_norm(program.final_norm)}, {program.final_norm.path or 'in the model itself'}"
    yield (
        "proved on these inputs: the equation of each sublayer with the measured C, A and B, computed in float64: relative "
        f"error {format_number(program.closure, 2)}"
    )
    if program.expansion is not None:
        error = format_number(program.expansion, 2)
        yield f"the end, from the embedding and all writes: relative error {error}"
    if any(site.parameters for site in program.sites):
        yield (
            "coefficients by the formula from the model's parameters: difference "
            f"{format_number(program.deviation or 0.0, 2)}"
        )
        if program.has_constant_coefficients:
            yield (
                "all tokens have the same coefficients here, as before training, so another formula may give them: "
                "addnorm.verify moves their parameters"
            )


def describe_matrix(matrix: Matrix) -> str:
    """Return what a matrix is, in a few characters: its entries if they are few numbers, otherwise where they come from."""
    if matrix.source != "constant":
        return matrix.source
    rows = matrix.mean.tolist()
    if len(rows) == len(rows[0]) > 1 and all(
        value == (k == j) for k, row in enumerate(rows) for j, value in enumerate(row)
    ):
        return "identity"
    numbers = [[format_number(value, 4, trim=True) for value in row] for row in rows]
    if sum(map(len, numbers)) > ENTRIES:
        return "constant"
    return "; ".join(" ".join(row) for row in numbers)


def _format_norms(site: ProgramSite) -> str:
    named = [("N_in", site.norm_in), ("N_branch", site.norm_branch)]
    named += [("N_out", norm) for norm in dict.fromkeys(site.norms_out)]
    factors = {"N_in": site.reads[0].describe_factors(), "N_out": site.sums[0].describe_factors()}
    return ", ".join(
        f"{name} = {format_norm(norm)}" + f", its output times {factors.get(name)}" * bool(factors.get(name))
        for name, norm in named
        if norm is not None
    )
