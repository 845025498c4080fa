"""The probes of `record`, made from an inspection: the values to measure at every site, how to read them, and metadata.

No probe holds a tensor of the inspected run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from addnorm._util.jsonio import to_jsonable
from addnorm.stream.dataflow.graph import UNCOUNTED, Value
from addnorm.stream.dataflow.memory import is_in_memory
from addnorm.stream.dataflow.observers import Observer
from addnorm.stream.dataflow.wrappers import find_parameter
from addnorm.stream.find.labels import format_norms
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.sites import Site, Stream
from addnorm.stream.find.sublayers import Sublayer, list_parameters
from addnorm.stream.find.unknown import Unknown
from addnorm.stream.inspection import Inspection, Part, measure_closure, name_wirings
from addnorm.stream.layout.token_layout import TokenLayout
from addnorm.stream.record.schema import RecordedSite
from addnorm.stream.write_terms import WriteTerm, find_write_term, is_overwritten

Observed = Iterator[tuple[Value, Observer]]  # values of a forward, each with the function that gets its tensor


@dataclass
class Leaves:
    """Inputs and parameters of a forward: the values that no operator computes.

    Attributes:
        model: the model.
        arguments: its arguments, flattened.
        parameters: its parameters as the forward begins.
        are_freed: whether FSDP frees parameters after their use.
    """

    model: nn.Module
    arguments: Sequence[Any]
    parameters: Mapping[str, nn.Parameter]
    are_freed: bool

    def read(self, value: Value) -> Tensor | None:
        """Return the tensor of an input or a parameter; None if it has no readable memory in this forward."""
        if isinstance(value.part, int) and 0 <= value.part < len(self.arguments):
            leaf = self.arguments[value.part]
            return leaf if isinstance(leaf, Tensor) else None
        leaf = self.parameters.get(value.name) if value.name else None
        return leaf if leaf is not None and is_in_memory(leaf, tuple(leaf.shape)) else None

    def observe(self, value: Value, keep: Observer) -> Observed:
        """Pass a factor or a weight to `keep` as this forward uses it: a leaf at once, others by the yielded observer.

        A parameter that FSDP frees after its use is copied when an operator uses it.
        """
        uses = (op.outputs[0] for op in value.users if op.outputs and op.ordinal != UNCOUNTED)
        if value.op is not None:
            yield value, keep
        elif self.are_freed and (use := next(uses, None)) is not None:  # FSDP frees the parameter after its use
            yield use, lambda _: keep(self._copy_used(value))
        else:
            leaf = self.read(value)
            keep(value.tensor if leaf is None else leaf)

    def _copy_used(self, value: Value) -> Tensor:
        """Return a copy of a parameter as the running module uses it."""
        used = find_parameter(self.model, value.name) if value.name else None
        return (value.tensor if used is None else used).detach().clone()


@dataclass
class ValueProbe:
    """Value to measure at a site: what its sublayer reads or computes, or the input of a norm.

    If `norm` is set, the denominators of this norm are measured, not the value itself.
    """

    site: int
    role: str
    value: Value
    stream: str
    layout: TokenLayout | None
    norm: Norm | None = None


@dataclass
class StateProbe:
    """State of the stream: input of the sublayers of one add, output of those of the add before."""

    value: Value
    stream: str
    layout: TokenLayout | None
    is_partial: bool = False  # a view of a state with other uses, which have no part in the view's gradient
    entering: list[int] = field(default_factory=list)  # sites whose input it is; their writes are compared with it
    leaving: list[int] = field(default_factory=list)  # sites whose output it is; x_0 is one
    is_overwritten: bool = False  # in place, before the last write of `entering` is computed


@dataclass(eq=False)
class SiteProbe:
    """One sublayer that is recorded.

    Attributes:
        index: index of its recorded site.
        site: the site that `inspect` found.
        place: number of the state that the sublayer writes to.
        parameters: names of the sublayer's parameters.
    """

    index: int
    site: Any
    place: int
    parameters: list[str]


@dataclass(eq=False)
class WriteProbe:
    """The term that a sublayer, or a bias, adds to a state."""

    sublayer: Sublayer
    state: StateProbe
    term: WriteTerm
    layout: TokenLayout | None
    probe: SiteProbe | None  # None: the sublayer is not recorded


class Probes:
    """The sites of a recording of streams, or of a residual program, as found in an inspected run.

    Args:
        parts: the streams, or the program.
        shapes: shapes of the model's inputs in the inspected run.

    Attributes:
        recorded: the sites of the recording.
        sites: the sublayers among them.
        streams: `parts` by their names.
    """

    def __init__(self, parts: Iterable[Part], shapes: Any) -> None:
        self.recorded: list[RecordedSite] = []
        self.sites: list[SiteProbe] = []
        self.streams: Mapping[str, Part] = {part.name: part for part in parts}
        self.shapes = shapes

    def add_end(self, name: str, path: str, kind: str, stream: str) -> int:
        """Add an end of a stream to the recorded sites, and return its index."""
        self.recorded.append(RecordedSite(name, path, kind, None, stream))
        return len(self.recorded) - 1

    def add_sublayer(self, site: Any, equation: str, place: int, parameters: list[str]) -> int:
        """Add a site that `inspect` found to the recorded sites, and return its index; the rest is as in `SiteProbe`."""
        index = len(self.recorded)
        self.recorded.append(RecordedSite(site.id, site.path, site.kind, site.layer, site.stream, equation))
        self.sites.append(SiteProbe(index, site, place, parameters))
        return index

    def is_stale(self, shapes: Any, masked: bool) -> bool:
        """Return whether a forward must be inspected before it is recorded, though one of its kind was inspected before.

        Args:
            shapes: the shapes of the model's inputs.
            masked: whether a mask selects the tokens to measure.
        """
        raise NotImplementedError


class StreamProbes(Probes):
    """Values to measure in the streams of an inspected model.

    Args:
        inspection: the inspection.
        layers: measure the sublayers of these layers only; None: of all.
        shapes: shapes of the model's inputs in the inspected run.
    """

    streams: Mapping[str, Stream]

    def __init__(self, inspection: Inspection, layers: Collection[int] | None, shapes: Any) -> None:
        super().__init__(inspection.streams, shapes)
        self.states: list[StateProbe] = []
        self.writes: list[WriteProbe] = []  # also of sublayers that are not recorded
        self.values: list[ValueProbe] = []
        is_named = len(self.streams) > 1 or "final" in {site.id for site in inspection.sites}
        for stream in inspection.streams:
            prefix = f"{stream.name}/" if is_named else ""
            entering, leaving = self._add_states(stream)
            leaving[0].leaving.append(self.add_end(f"{prefix}x_0", "", "start", stream.name))
            recorded = {
                site.sublayer: self._add_sublayer(
                    stream, site, entering[site.sublayer.place], leaving[site.sublayer.place + 1]
                )
                for site in stream.sites
                if layers is None or site.layer in layers
            }
            for sublayer in (sublayer for of_add in stream.chain.sublayers for sublayer in of_add):
                state, term = entering[sublayer.place], find_write_term(sublayer)
                state.is_overwritten |= is_overwritten(state.value, term.last)
                layout = stream.layout.of_write(sublayer)
                self.writes.append(WriteProbe(sublayer, state, term, layout, recorded.get(sublayer)))
            if (norm := stream.final_norm) is not None:
                end = self.add_end(f"{prefix}final", norm.path, "final", stream.name)
                self._add_norm("norm_final", end, norm, stream)

    def _add_states(self, stream: Stream) -> tuple[list[StateProbe], list[StateProbe]]:
        """Add the states of a stream; return those before each add and at the end, and those after each add from x_0 on."""
        chain, layout, adds = stream.chain, stream.layout, stream.chain.adds
        entering: list[StateProbe] = []
        leaving: list[StateProbe] = []

        def add(value: Value, is_partial: bool) -> StateProbe:
            self.states.append(StateProbe(value, stream.name, layout.of(value), is_partial))
            return self.states[-1]

        for k, value in enumerate(chain.states()):
            entry = layout.find_entry(k) if k < len(adds) else value
            end = chain.find_end(k - 1) if 0 < k < len(adds) and adds[k].changes_tokens else value
            end = end if k else entry
            leaving.append(add(end, not k and not _is_only_use(end, value)))
            entering.append(leaving[-1] if entry is end else add(entry, False))
        return entering, leaving

    def _add_sublayer(self, stream: Stream, site: Site, before: StateProbe, after: StateProbe) -> SiteProbe:
        sublayer: Sublayer = site.sublayer
        layout = stream.layout
        index = self.add_sublayer(site, site.equation, sublayer.place, list_parameters(sublayer))
        before.entering.append(index)
        after.leaving.append(index)
        read = before.value if sublayer.reads.value is sublayer.add.x else sublayer.reads.value
        found = {} if read is None else {"read": (read, layout.of(read))}  # if the sublayer has one input
        found["raw"] = layout.find_raw(sublayer)
        self.values += (ValueProbe(index, role, value, stream.name, own) for role, (value, own) in found.items())
        norms: dict[str, Sequence[Norm | None]] = {
            "norm_in": sublayer.reads.norms, "norm_branch": [sublayer.norm], "norm_out": stream.chain.norms_out[sublayer.place],
        }  # fmt: skip
        for role, of_role in norms.items():
            if of_role and of_role[0] is not None:
                self._add_norm(role, index, of_role[0], stream)
        return self.sites[-1]

    def _add_norm(self, role: str, site: int, norm: Norm, stream: Stream) -> None:
        self.values.append(ValueProbe(site, role, norm.x, stream.name, stream.layout.of_norm(norm), norm))

    def is_stale(self, shapes: Any, masked: bool) -> bool:
        """Return whether a forward has inputs of other shapes, in which the order of the tokens is not known."""
        if shapes == self.shapes:
            return False
        layouts = [state.layout for state in self.states] + [write.layout for write in self.writes]
        layouts += [probe.layout for probe in self.values if masked]
        return any(layout.depends_on_shape for layout in layouts if layout is not None)


def _is_only_use(view: Value, state: Value) -> bool:
    """Return whether all operators that read `state` read it through its view `view`."""
    while view is not state:
        assert view.op is not None
        view = view.op.inputs[0]
        if len(view.users) != 1:
            return False
    return True


def describe_parts(parts: Sequence[Part], unknown: Iterable[Unknown], mode: str) -> dict[str, Any]:
    """Return the description of streams, or of a residual program, for a recording, as JSON types: infinity is a word.

    "streams" has the wiring of each stream (None: not a known one), how well every equation closes, and the closure of the end
    (None: it is not computed); "unknown" has the adds that were not understood.
    """
    streams: dict[str, Any] = {}
    for part in parts:
        sites = {
            site.id: {"closure": site.closure, "closes": site.closes, "norms": format_norms(site.list_norms()),
                      "notes": [*site.notes]}
            for site in part.sites
        }  # fmt: skip
        streams[part.name] = {
            "wiring": part.wiring and part.wiring.name, "equation": part.equation, "width": part.width,
            "layers": part.num_layers, "dtype": part.dtype, "norms": format_norms(part.norms()),
            "embedding_norm": format_norms([part.embedding_norm]), "final_norm": format_norms([part.final_norm]),
            "closure": part.expansion, "closes": part.expansion_closes, "remarks": [*part.remarks], "sites": sites,
        }  # fmt: skip
    metadata: dict[str, Any] = to_jsonable({
        "mode": mode, "wiring": name_wirings(parts), "closure": measure_closure(parts),
        "dtype": "/".join(dict.fromkeys(part.dtype for part in parts)), "streams": streams,
        "unknown": [{"path": part.path, "reason": part.reason} for part in unknown],
    })  # fmt: skip
    return metadata
