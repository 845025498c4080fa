"""The plan of `record`, made from an inspection: the values to measure at every site, by their address, and metadata.

A plan holds no tensor of the inspected run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from addnorm._util.jsonio import to_jsonable
from addnorm.stream.dataflow.arithmetic import strip_views
from addnorm.stream.dataflow.graph import UNCOUNTED, Op, Value
from addnorm.stream.find.chain import Chain
from addnorm.stream.find.inspection import Inspection, Site, Stream
from addnorm.stream.find.labels import format_norm
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.paths import Path
from addnorm.stream.find.sublayers import Sublayer, list_parameters
from addnorm.stream.layout.dimensions import Part, find_axis
from addnorm.stream.layout.token_layout import TokenLayout
from addnorm.stream.record.schema import RecordedSite

__all__ = [
    "NormProbe", "Plan", "SiteProbe", "StateProbe", "WriteProbe", "find_observable", "find_use", "inspection_metadata",
    "write_probe",
]  # fmt: skip

COLLECTIVE, WAIT = "_c10d_functional::", "_c10d_functional::wait_tensor"
RSTD_OUTPUT = {"native_layer_norm": 2, "_fused_rms_norm": 1}  # the output of the operator that is rstd


@dataclass
class WriteProbe:
    """Operand of a residual add, with the numbers and tensors by which it is multiplied until it is added to the stream.

    Attributes:
        value: the operand, of the innermost sum: a in `x + g * (a + b)`.
        factor: the product of the numbers.
        scales: the tensors.
        is_overwritten: whether the operand is overwritten in place before the last tensor is computed.
        obstacle: why the product of these is not the term that is added; usually empty.
    """

    value: Value
    factor: float = 1.0
    scales: tuple[Value, ...] = ()
    is_overwritten: bool = False
    obstacle: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether the adds do not multiply the operand."""
        return not self.scales and self.factor == 1.0

    @property
    def last(self) -> int:
        """Index of the last of the operand and its scales."""
        return max(value.index for value in (self.value, *self.scales))

    @property
    def operands(self) -> list[Value]:
        """The operand and its scales, as far as operators compute them (the other scales are parameters)."""
        return [self.value, *(scale for scale in self.scales if scale.op is not None)]


@dataclass
class NormProbe:
    """Norm of a site: its rstd, or its input where no operator outputs rstd."""

    site: int
    role: str
    norm: Norm
    rstd: Value | None
    stream: str
    layout: TokenLayout | None  # of the norm's input


@dataclass
class StateProbe:
    """State of the stream: input of the sublayers of one add, output of those of the add before."""

    index: int
    value: Value
    entering: list[int] = field(default_factory=list)  # sites whose input it is
    leaving: list[int] = field(default_factory=list)  # sites whose output it is; x_0 is one
    writes: int = 0  # number of writes that are compared with it
    stream: str = ""
    layout: TokenLayout | None = None
    is_overwritten: bool = False  # in place, before the last of those writes is computed
    is_partial: bool = False  # a view of a state with other uses, which have no part in the view's gradient


@dataclass
class SiteProbe:
    """Values to measure at one sublayer."""

    index: int
    sublayer: Sublayer
    state: int  # index of the state it adds to
    read: Value | None
    raw: Value
    write: WriteProbe
    parameters: list[str]
    layouts: dict[str, TokenLayout | None]  # of read, raw and write
    writes_raw: bool  # the write is the output itself, with the same tokens in the same order


@dataclass
class Plan:
    """Values to measure in the streams of a model."""

    recorded: tuple[RecordedSite, ...]
    states: list[StateProbe]
    sites: list[SiteProbe]
    norms: list[NormProbe]
    streams: dict[str, Stream]
    shapes: tuple[Any, ...] = ()  # of the model's inputs in the inspected run

    @classmethod
    def from_inspection(cls, inspection: Inspection, layers: Iterable[int] | None = None) -> Plan:
        """Return the plan for an inspected model, for these layers only or for all."""
        plan = cls((), [], [], [], {})
        chosen = None if layers is None else {*layers}
        recorded: list[RecordedSite] = []
        ids = {site.id for site in inspection.sites}
        for stream in inspection.streams:
            is_named = len(inspection.streams) > 1 or "final" in ids
            plan._add_stream(stream, recorded, f"{stream.name}/" if is_named else "", chosen)
        plan.recorded = tuple(recorded)
        return plan

    def _add_stream(self, stream: Stream, recorded: list[RecordedSite], prefix: str, layers: set[int] | None) -> None:
        chain: Chain = stream.chain
        layout = stream.layout
        entering: list[StateProbe] = []  # the state before each add
        leaving: list[StateProbe] = []  # the state after each add
        for k, value in enumerate(chain.states()):
            entry = layout.find_entry(k) if k < len(chain.adds) else value
            end = chain.find_end(k - 1) if 0 < k < len(chain.adds) and chain.adds[k].changes_tokens else value
            for probes, probed in ((leaving, end if k else entry), (entering, entry)):
                if probes is entering and probed is leaving[-1].value:
                    probes.append(leaving[-1])
                    continue
                probe = StateProbe(len(self.states), probed, stream=stream.name, layout=layout.of(probed))
                probe.is_partial = not k and not _is_only_use(probed, value)
                self.states.append(probe)
                probes.append(probe)
        self.streams[stream.name] = stream
        leaving[0].leaving.append(len(recorded))
        recorded.append(RecordedSite(f"{prefix}x_0", "", "start", None, stream.name, ""))
        for site in stream.sites:
            k, sublayer = site.add_index, site.sublayer
            if layers is not None and site.layer not in layers:
                continue
            index = len(recorded)
            recorded.append(RecordedSite(site.id, site.path, site.kind, site.layer, stream.name, site.equation))
            entering[k].entering.append(index)
            entering[k].writes += 1
            entering[k].is_overwritten |= _is_overwritten(entering[k].value, write_probe(sublayer).last)
            leaving[k + 1].leaving.append(index)
            parameters = list_parameters(sublayer)
            write = write_probe(sublayer)
            raw, raw_layout = layout.find_raw(k, sublayer)
            read = entering[k].value if sublayer.reads.value is sublayer.add.x else sublayer.reads.value
            layouts = {
                "read": None if read is None else layout.of(read), "raw": raw_layout,
                "write": layout.of_write(k, sublayer),
            }  # fmt: skip
            writes_raw = write.is_plain and strip_views(write.value) is strip_views(raw)
            writes_raw = writes_raw and write.value.tensor.dtype == raw.tensor.dtype
            writes_raw = writes_raw and _list_parts(layouts["raw"]) == _list_parts(layouts["write"])
            state = entering[k].index
            self.sites.append(SiteProbe(index, sublayer, state, read, raw, write, parameters, layouts, writes_raw))
            for role, norms in (
                ("norm_in", sublayer.reads.norms),
                ("norm_branch", [sublayer.norm]),
                ("norm_out", chain.norms_out[k]),
            ):
                self.norms += [_norm_probe(norm, role, index, stream) for norm in norms[:1] if norm is not None]
        if stream.final_norm is not None:
            self.norms.append(_norm_probe(stream.final_norm, "norm_final", len(recorded), stream))
            recorded.append(RecordedSite(f"{prefix}final", stream.final_norm.path, "final", None, stream.name, ""))

    def depends_on_shape(self, masked: bool) -> bool:
        """Return whether the order of tokens is known only for inputs of the inspected shapes.

        Args:
            masked: whether only the tokens of a mask count.
        """
        layouts = [state.layout for state in self.states] + [site.layouts["write"] for site in self.sites]
        if masked:
            layouts += [layout for site in self.sites for layout in site.layouts.values()]
            layouts += [norm.layout for norm in self.norms]
        return any(layout.depends_on_shape for layout in layouts if layout is not None)

    def values(self) -> Iterator[Value]:
        """Yield all values to measure."""
        for state in self.states:
            yield state.value
        for site in self.sites:
            yield from (v for v in (site.read, site.raw, site.write.value, *site.write.scales) if v is not None)
        for norm in self.norms:
            yield norm.rstd if norm.rstd is not None else norm.norm.x


def _norm_probe(norm: Norm, role: str, site: int, stream: Stream) -> NormProbe:
    op = norm.y.op
    assert op is not None
    output = RSTD_OUTPUT.get(op.name)
    rstd = op.outputs[output] if output is not None and len(op.outputs) > output else None
    layout = stream.layout.of_norm(norm)
    return NormProbe(site, role, norm, rstd, stream.name, layout)


def _is_only_use(view: Value, state: Value) -> bool:
    """Return whether everything that reads a state reads it through a view."""
    while view is not state:
        assert view.op is not None
        view = view.op.inputs[0]
        if len({*view.users}) != 1:
            return False
    return True


def _is_overwritten(state: Value, last: int) -> bool:
    """Return whether the memory of a value is written before the value of that index is computed.

    As that of x before f(y) in `x *= alpha; x += f(y)`.
    """
    todo, seen = [state], {state}
    while todo:
        value = todo.pop()
        for op in value.users:
            if op.index > last or not op.outputs:
                continue
            schema = getattr(op.func, "_schema", None)
            if schema is not None and schema.is_mutable and op.args and op.args[0] is value:
                return True
            if "view" in op.traits and op.outputs[0] not in seen:
                seen.add(op.outputs[0])
                todo.append(op.outputs[0])
    return False


def _list_parts(layout: TokenLayout | None) -> list[Part] | None:
    """Return the parts of the tokens in the order in which they are stored."""
    return None if layout is None else [part for dim in layout.dims for part in dim]


def write_probe(sublayer: Sublayer) -> WriteProbe:
    """Return the term that a sublayer adds: the operand of the innermost sum that contains it, and its factors."""
    path: Path = sublayer.write_path
    terms = path.terms
    probe = WriteProbe(terms[-1].value, math.prod(term.factor for term in terms))
    scales = [term.scale for term in terms if term.scale is not None]
    inner = terms[-1].op
    later = [factor for factor in path.factors if inner is not None and factor.op.index > inner.index]
    for factor in later:  # of sums: x + g * (a + b)
        if factor.kind == "guard":
            probe.obstacle = "a sum of several writes is masked or clamped before it is added"
        elif factor.op.name == "native_dropout":
            scales.append(factor.op.outputs[1])
            p = float(factor.op.args[1]) if factor.op.args[2] is not False else 0.0
            probe.factor *= 1.0 / (1.0 - p) if p < 1.0 else 0.0
        elif factor.value is not None:
            scales.append(factor.value)
        else:
            probe.factor *= factor.number
    views = [op for op in path.ops if "view" in op.traits and inner is not None and op.index > inner.index]
    if any(_is_moved(scale, probe.value, views) for scale in scales):
        probe.obstacle = "a sum of several writes is multiplied in another layout than that of the writes"
    probe.scales = tuple(scales)
    probe.is_overwritten = _is_overwritten(probe.value, probe.last)
    return probe


def _is_moved(scale: Value, write: Value, views: list[Op]) -> bool:
    """Return whether a factor of a write has another place in it before those views."""
    if not views or math.prod(scale.shape) == 1:
        return False
    is_vector = scale.shape[-1:] == write.shape[-1:] and math.prod(scale.shape) == scale.shape[-1]
    return not is_vector or any(
        find_axis(op.outputs[0], op.inputs[0], len(op.outputs[0].shape) - 1) != len(op.inputs[0].shape) - 1
        for op in views
    )


def find_use(value: Value) -> Value | None:
    """Return the first output of an operator that reads a value and can be observed."""
    return next((op.outputs[0] for op in value.users if op.outputs and op.ordinal != UNCOUNTED), None)


def find_observable(value: Value) -> Value:
    """Return the value with the same numbers that an operator of the model computes completely.

    That is the input of a cast by FSDP, and the end of the wait for a collective.
    """
    while value.op is not None and value.op.ordinal == UNCOUNTED and value.op.inputs:
        value = value.op.inputs[0]
    if value.op is not None and value.op.name.startswith(COLLECTIVE) and value.op.name != WAIT:
        value = _find_wait(value) or value
    return value


def _find_wait(value: Value) -> Value | None:
    """Return the output of the wait for a collective, which views of its output may precede."""
    for op in value.users:
        if op.name == WAIT:
            return op.outputs[0]
        if "view" in op.traits and op.outputs and (found := _find_wait(op.outputs[0])) is not None:
            return found
    return None


def inspection_metadata(inspection: Inspection) -> dict[str, Any]:
    """Return the part of an inspection that a recording keeps, as JSON types.

    "streams" has the wiring of each stream and how well every equation closes, "unknown" the adds that were not understood.
    """
    dtypes = dict.fromkeys(stream.dtype for stream in inspection.streams)
    return {
        "mode": inspection.mode, "wiring": inspection.wiring, "closure": inspection.closure, "dtype": "/".join(dtypes),
        "streams": {stream.name: _stream_metadata(stream) for stream in inspection.streams},
        "unknown": [{"path": part.path, "reason": part.reason} for part in inspection.unknown],
    }  # fmt: skip


def _stream_metadata(stream: Stream) -> dict[str, Any]:
    """Return a stream's wiring (None: not a known one) and closure of x_L = x_0 + all writes (None: not a plain sum)."""
    metadata: dict[str, Any] = to_jsonable({
        "wiring": stream.wiring and stream.wiring.name, "equation": stream.equation, "width": stream.width,
        "layers": stream.num_layers, "dtype": stream.dtype, "norms": _norm_texts(stream.norms()),
        "embedding_norm": _norm_texts([stream.embedding_norm]), "final_norm": _norm_texts([stream.final_norm]),
        "closure": stream.closure, "closes": stream.sum_closes, "remarks": [*stream.remarks],
        "sites": {site.id: _site_metadata(site) for site in stream.sites},
    })  # fmt: skip
    return metadata  # infinity is already a word, so that a file preserves the metadata


def _site_metadata(site: Site) -> dict[str, Any]:
    norms = _norm_texts([site.norm_in, site.norm_branch, site.norm_out])
    return {"closure": site.closure, "closes": site.closes, "norms": norms, "notes": [*site.notes]}


def _norm_texts(norms: Any) -> str:
    """Return the norms with their eps, each kind once: "LayerNorm 1e-12"."""
    return ", ".join(dict.fromkeys(format_norm(norm) for norm in norms if norm is not None))
