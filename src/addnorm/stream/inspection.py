"""The result of `inspect`: streams, or the residual program of several, what is not understood, and how it is rendered."""

from __future__ import annotations

import difflib
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from addnorm._util.blocks import Block, Paragraph
from addnorm._util.numbers import format_count, format_number
from addnorm._util.render import Rendered
from addnorm.stream.dataflow.graph import Value
from addnorm.stream.find.sites import Site, Stream, finite_or_none
from addnorm.stream.find.unknown import Unknown, group_unknown
from addnorm.stream.program.result import Program

MAX_IDS = 4  # ids named in an error message
Part = Stream | Program  # a stream, or the residual program of several


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
        unnamed: a program of several streams whose matrices no wiring of `addnorm.wirings` has; `unknown` stays as it is.
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
    program: Program | None = None
    unnamed: Program | None = None

    def __post_init__(self) -> None:
        for k, site in enumerate(self.list_sites()):
            site.index, site.owner = k, weakref.ref(self.target)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of all streams."""
        return tuple(site for stream in self.streams for site in stream.sites)

    @property
    def _described(self) -> Program | None:  # by `program`, or where there are no streams by `unnamed`
        return self.program or (None if self.streams else self.unnamed)

    @property
    def parts(self) -> Sequence[Part]:
        """The streams, or the program that describes the model, which may be the unnamed one."""
        return self.streams if self._described is None else (self._described,)

    def with_program(self) -> Inspection:
        """Return the inspection with the unnamed program as its program, if no streams were found."""
        program = self._described
        return self if program is self.program else replace(self, program=program, unnamed=None, unknown=())

    def list_sites(self) -> Sequence[Any]:
        """Return the sites of all streams, or those of the program, which may be the unnamed one."""
        return [site for part in self.parts for site in part.sites]

    @property
    def wiring(self) -> str:
        """The name of each wiring, as "post_ln / pre_ln": "unknown" if it has none; "none" if there is no stream."""
        return name_wirings(self.parts)

    @property
    def closure(self) -> float:
        """The largest relative error of the sites' equations, and of x_L == x_0 + all writes where a stream is a plain sum."""
        return measure_closure(self.parts)

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
            "wiring": self.wiring, "closure": finite_or_none(self.closure), "closes": self.closes,
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
        parts: list[Part] = [*self.streams]
        parts += [program for program in (self.program, self.unnamed) if program is not None]
        for part in parts:
            yield from part.build_blocks()
        for text in group_unknown(self.unknown):
            yield Paragraph(("not understood ", "bad"), text)
        for text in group_unknown(self.outside):
            yield Paragraph("outside of the streams: ", text)


def name_wirings(parts: Iterable[Part]) -> str:
    """Return the name of each part's wiring, as "post_ln / pre_ln": "unknown" if it has none; "none" without parts."""
    return " / ".join(dict.fromkeys(part.wiring.name if part.wiring else "unknown" for part in parts)) or "none"


def measure_closure(parts: Sequence[Part]) -> float:
    """Return the largest relative error among the equations of all parts; NaN if there are none."""
    errors = [site.closure for part in parts for site in part.sites] + [part.closure for part in parts]
    return max((error for error in errors if error is not None), default=math.nan)
