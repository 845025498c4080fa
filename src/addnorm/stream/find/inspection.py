"""What was found in a model: its streams, their sublayers, and how well each equation closes."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from addnorm.stream.find.norm import Norm
from addnorm.wirings.spec import Learned, Row, Wiring

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["Inspection", "Site", "Stream", "Unknown"]


@dataclass(eq=False, repr=False)
class Site:
    """One sublayer and the add with which it writes to the stream.

    Attributes:
        id: its name in this inspection: the module's path, with what is needed to be the only one.
        path: the path of the smallest module that contains the sublayer.
        modules: where that module contains other sublayers as well, those of its children that are this one.
        kind: "attention", "cross-attention", "feed-forward" or "other".
        layer: counted from 0.
        row: the line x' = N_out(a x + b N_branch(f(c N_in(x)))). A learned factor has its mean as `init`.
        norm_in, norm_branch, norm_out: the norms, None where there is none.
        closure: the relative error of that equation, computed in float64 from what the model's sublayer returned.
        closes: whether the closure is within what the model's dtype allows.
        parallel: the number of sublayers that this add adds.
        shared: the number of sublayers of the stream that are this same module.
        notes: what the row does not say.
    """

    id: str
    path: str
    modules: tuple[str, ...]
    kind: str
    layer: int
    index: int
    stream: str
    row: Row
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
    role: str = "branch"
    found: Any = field(default=None, repr=False)  # what `record`, `decompose` and `ablate` need to find it again
    owner: Any = field(default=None, repr=False)  # a reference to the model

    @property
    def model(self) -> Any:
        """The model that was inspected; None if it is no more."""
        return self.owner() if self.owner is not None else None

    @property
    def equation(self) -> str:
        """The row in symbols, a learned factor as its letter."""
        return str(self.row) if self.role == "branch" else f"x' = x + {self.role}"

    @property
    def where(self) -> str:
        """Path and modules, as a reader wants them."""
        path = self.path or "the model"
        if self.modules:
            names = [m.removeprefix(f"{self.path}.") for m in self.modules]
            path += f": {', '.join(names)}"
        return path

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        row = self.row
        return {
            "id": self.id, "path": self.path, "modules": [*self.modules], "kind": self.kind, "layer": self.layer,
            "stream": self.stream, "equation": self.equation, "role": self.role,
            "row": {name: getattr(row, name) for name in ("norm_in", "norm_branch", "norm_out")}
            | {name: _factor_dict(getattr(row, name)) for name in ("a", "b", "c")},
            "norms": {name: norm.to_dict() for name in ("norm_in", "norm_branch", "norm_out")
                      if (norm := getattr(self, name)) is not None},
            "closure": _finite(self.closure), "closes": self.closes, "parallel": self.parallel, "shared": self.shared,
            "notes": [*self.notes],
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"<{self.id}: {self.equation}>"


@dataclass(frozen=True)
class Unknown:
    """Something that is not understood, and why."""

    path: str
    reason: str


@dataclass(eq=False, repr=False)
class Stream:
    """One residual stream.

    Attributes:
        name: "stream" where there is one; else the module's path, such as "encoder".
        width: d, its number of features.
        sites: its sublayers in the order of depth.
        wiring: the `addnorm.Wiring` that its rows are; None where they are none of `addnorm.wirings`.
        embedding_norm, final_norm: before the first sublayer, and after the last.
        closure: where the stream is a plain sum, the relative error of x_L == x_0 + all writes; else None.
        axis: that of the features, counted from the end: -1 but for convolutional nets.
    """

    name: str
    width: int
    dtype: str
    sites: tuple[Site, ...]
    num_layers: int
    wiring: Wiring | None
    embedding_norm: Norm | None
    final_norm: Norm | None
    closure: float | None
    closes: bool
    remarks: tuple[str, ...]
    found: Any = field(default=None, repr=False)
    axis: int = -1

    @property
    def norm(self) -> str | None:
        """The kind of its norms: "layer", "rms", "scale", or both where they differ."""
        kinds = {norm.kind for norm in self.norms()}
        return "/".join(sorted(kinds)) or None

    @property
    def eps(self) -> float | None:
        """That of its norms, if it is one."""
        found = {norm.eps for norm in self.norms()}
        return found.pop() if len(found) == 1 else None

    def norms(self) -> Iterator[Norm]:
        """All of them, in order."""
        places = [(s.norm_in, s.norm_branch, s.norm_out) for s in self.sites]
        yield from dict.fromkeys(n for n in (self.embedding_norm, *sum(places, ()), self.final_norm) if n is not None)

    @property
    def equation(self) -> str:
        """The wiring in symbols, with its constants; or each of the rows that occur."""
        if self.wiring is not None:
            return self._as_it_ends(self.wiring).equation(self.num_layers)
        return "\n".join(dict.fromkeys(site.equation for site in self.sites))

    def _as_it_ends(self, wiring: Wiring) -> Wiring:
        """With the final norm that the model has or has not."""
        return wiring if wiring.flow == "two_streams" else replace(wiring, final_norm=self.final_norm is not None)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        norms = {"embedding": self.embedding_norm, "final": self.final_norm}
        return {
            "name": self.name, "width": self.width, "axis": self.axis, "dtype": self.dtype, "layers": self.num_layers,
            "wiring": self.wiring and self.wiring.name, "options": dict(self.wiring.options) if self.wiring else {},
            "equation": self.equation, "norm": self.norm, "eps": self.eps,
            "norms": {name: norm.to_dict() for name, norm in norms.items() if norm is not None},
            "closure": _finite(self.closure), "closes": self.closes, "remarks": [*self.remarks],
            "sites": [site.to_dict() for site in self.sites],
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.sites)} sublayers, {self.wiring.name if self.wiring else 'no known wiring'}>"


@dataclass(eq=False, repr=False)
class Inspection:
    """What `addnorm.inspect` found.

    Attributes:
        model: the class of the model.
        streams: in the order in which they begin.
        unknown: what is not understood, each with the reason.
        mode: "training" or "evaluation".
        operators: how many ran.
        target: the model.
    """

    model: str
    streams: tuple[Stream, ...]
    unknown: tuple[Unknown, ...]
    mode: str
    operators: int
    target: Any = field(default=None, repr=False)  # the model

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sublayers of all streams."""
        return tuple(site for stream in self.streams for site in stream.sites)

    @property
    def wiring(self) -> str:
        """The name of the wiring; of each stream's, where they differ; "unknown" for what is none of `addnorm.wirings`."""
        names = [stream.wiring.name if stream.wiring else "unknown" for stream in self.streams]
        return " / ".join(dict.fromkeys(names)) if names else "none"

    @property
    def closure(self) -> float:
        """The largest relative error of any row, and of x_L == x_0 + all writes where a stream is a plain sum."""
        errors = [site.closure for site in self.sites] + [s.closure for s in self.streams if s.closure is not None]
        return max(errors, default=float("nan"))

    @property
    def closes(self) -> bool:
        """Whether every equation holds to what the dtype allows, and there is one."""
        return bool(self.sites) and all(site.closes for site in self.sites) and all(one.closes for one in self.streams)

    def site(self, name: str | int) -> Site:
        """The sublayer of that id, path or number."""
        if isinstance(name, int):
            return self.sites[name]
        for site in self.sites:
            if name in (site.id, site.path):
                return site
        ids = [site.id for site in self.sites]
        close = difflib.get_close_matches(name, ids, 1)
        expected = repr(close[0]) if close else f"one of {', '.join(ids[:4])}{', ...' * (len(ids) > 4)}"
        raise KeyError(f"site is {name!r}, expected {expected}: the sublayers that inspect found.")

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema": "addnorm.inspection", "schema_version": 1, "model": self.model, "mode": self.mode,
            "wiring": self.wiring, "closure": _finite(self.closure), "closes": self.closes,
            "streams": [stream.to_dict() for stream in self.streams],
            "unknown": [{"path": u.path, "reason": u.reason} for u in self.unknown],
        }  # fmt: skip

    def __repr__(self) -> str:
        closing = f"closure {self.closure:.1e}" if self.sites else "no residual add"
        return f"<Inspection of {self.model}: {self.wiring}, {len(self.sites)} sublayers, {closing}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from addnorm.stream.find.format import on_console  # that file knows what this one is

        yield from on_console(self)

    def _repr_html_(self) -> str:
        from addnorm.stream.find.format import as_html

        return as_html(self)


def _finite(error: float | None) -> float | None:
    """JSON has no infinity."""
    return error if error is not None and math.isfinite(error) else None


def _factor_dict(factor: float | Learned) -> Any:
    if isinstance(factor, Learned):
        return {"learned": True, "mean": factor.init, "per_feature": factor.per_feature}
    return factor
