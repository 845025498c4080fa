"""The probes of `record`, made from an inspection: the values to measure at every site, how to read them, and metadata.

No probe holds a tensor of the inspected run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from addnorm._util.jsonio import to_jsonable
from addnorm.stream.dataflow.arithmetic import strip_views
from addnorm.stream.dataflow.graph import UNCOUNTED, Value
from addnorm.stream.dataflow.memory import is_in_memory
from addnorm.stream.dataflow.wrappers import find_parameter
from addnorm.stream.find.chain import Chain
from addnorm.stream.find.inspection import Inspection, Site, Stream
from addnorm.stream.find.labels import format_norm
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.sublayers import Sublayer, list_parameters
from addnorm.stream.layout.token_layout import TokenLayout
from addnorm.stream.record.schema import RecordedSite
from addnorm.stream.tokens import TokenMask, Tokens
from addnorm.stream.write_terms import WriteTerm, find_write_term, is_overwritten

COLLECTIVE, WAIT = "_c10d_functional::", "_c10d_functional::wait_tensor"
RSTD_OUTPUT = {"native_layer_norm": 2, "_fused_rms_norm": 1}  # the output of the operator that is rstd


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
        """Return the tensor of an input or a parameter."""
        if isinstance(value.part, int) and 0 <= value.part < len(self.arguments):
            leaf = self.arguments[value.part]
            return leaf if isinstance(leaf, Tensor) else None
        leaf = self.parameters.get(value.name) if value.name else None
        return leaf if leaf is not None and is_in_memory(leaf, tuple(leaf.shape)) else None

    def find_use(self, value: Value) -> Value | None:
        """Return the first output of an operator that reads a parameter which FSDP frees; None for other values."""
        if not self.are_freed or value.op is not None:
            return None
        return next((op.outputs[0] for op in value.users if op.outputs and op.ordinal != UNCOUNTED), None)

    def read_used(self, value: Value) -> Tensor | None:
        """Return a parameter as the running module uses it."""
        return find_parameter(self.model, value.name) if value.name else None


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

    value: Value
    stream: str
    layout: TokenLayout | None
    is_partial: bool = False  # a view of a state with other uses, which have no part in the view's gradient
    entering: list[int] = field(default_factory=list)  # sites whose input it is; their writes are compared with it
    leaving: list[int] = field(default_factory=list)  # sites whose output it is; x_0 is one
    is_overwritten: bool = False  # in place, before the last of those writes is computed

    def measure_gradient(self, grad: Tensor, tokens: TokenMask) -> Iterable[tuple[str, float]]:
        """Return the statistics of the gradient of the loss at the state."""
        return Tokens.arrange(grad, self.layout, tokens).norms.statistics()


@dataclass(eq=False)
class SiteProbe:
    """Values to measure at one sublayer."""

    index: int
    id: str
    sublayer: Sublayer
    state: StateProbe  # the state it adds to
    values: dict[str, tuple[Value, TokenLayout | None]]  # of the roles "read", if it has one input, and "raw"
    write: WriteTerm
    write_layout: TokenLayout | None
    parameters: list[str]

    @property
    def writes_raw(self) -> bool:
        """Whether the add takes the sublayer's output as it is: no factor or cast, and no other order of tokens."""
        (raw, layout), write = self.values["raw"], self.write
        is_same = write.is_plain and strip_views(write.value) is strip_views(raw)
        return is_same and write.value.tensor.dtype == raw.tensor.dtype and _parts(layout) == _parts(self.write_layout)


class Probes:
    """Values to measure in the streams of an inspected model.

    Args:
        inspection: the inspection.
        layers: measure the sublayers of these layers only; None: of all.

    Attributes:
        recorded: the sites of the recording.
        shapes: shapes of the model's inputs in the inspected run.
    """

    def __init__(self, inspection: Inspection, layers: Iterable[int] | None, shapes: Any) -> None:
        self.recorded: list[RecordedSite] = []
        self.states: list[StateProbe] = []
        self.sites: list[SiteProbe] = []
        self.norms: list[NormProbe] = []
        self.streams = {stream.name: stream for stream in inspection.streams}
        self.shapes = shapes
        is_named = len(self.streams) > 1 or "final" in {site.id for site in inspection.sites}
        chosen = None if layers is None else {*layers}
        for stream in inspection.streams:
            prefix = f"{stream.name}/" if is_named else ""
            entering, leaving = self._add_states(stream)
            leaving[0].leaving.append(self._add_site(f"{prefix}x_0", "", "start", stream))
            for site in stream.sites:
                if chosen is None or site.layer in chosen:
                    self._add_sublayer(stream, site, entering[site.sublayer.place], leaving[site.sublayer.place + 1])
            if (norm := stream.final_norm) is not None:
                self._add_norm("norm_final", self._add_site(f"{prefix}final", norm.path, "final", stream), norm, stream)

    def _add_site(self, name: str, path: str, kind: str, stream: Stream) -> int:
        """Add an end of a stream to the recorded sites, and return its index."""
        self.recorded.append(RecordedSite(name, path, kind, None, stream.name))
        return len(self.recorded) - 1

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

    def _add_sublayer(self, stream: Stream, site: Site, before: StateProbe, after: StateProbe) -> None:
        sublayer: Sublayer = site.sublayer
        chain: Chain = stream.chain
        layout, k, index = stream.layout, sublayer.place, len(self.recorded)
        self.recorded.append(RecordedSite(site.id, site.path, site.kind, site.layer, stream.name, site.equation))
        write = find_write_term(sublayer)
        before.entering.append(index)
        before.is_overwritten |= is_overwritten(before.value, write.last)
        after.leaving.append(index)
        read = before.value if sublayer.reads.value is sublayer.add.x else sublayer.reads.value
        values = {} if read is None else {"read": (read, layout.of(read))}
        values["raw"] = layout.find_raw(sublayer)
        parameters = list_parameters(sublayer)
        self.sites.append(
            SiteProbe(index, site.id, sublayer, before, values, write, layout.of_write(sublayer), parameters)
        )
        norms: dict[str, Sequence[Norm | None]] = {"norm_in": sublayer.reads.norms, "norm_branch": [sublayer.norm]}
        for role, found in (norms | {"norm_out": chain.norms_out[k]}).items():
            if found and found[0] is not None:
                self._add_norm(role, index, found[0], stream)

    def _add_norm(self, role: str, site: int, norm: Norm, stream: Stream) -> None:
        op = norm.y.op
        assert op is not None
        output = RSTD_OUTPUT.get(op.name)
        rstd = op.outputs[output] if output is not None and len(op.outputs) > output else None
        self.norms.append(NormProbe(site, role, norm, rstd, stream.name, stream.layout.of_norm(norm)))

    @property
    def num_layers(self) -> int:
        """The largest number of layers of a stream."""
        return max(stream.num_layers for stream in self.streams.values())

    def is_stale(self, shapes: Any, masked: bool) -> bool:
        """Return whether a forward with inputs of other shapes must be inspected again, to know the order of its tokens.

        Args:
            shapes: the shapes of the model's inputs.
            masked: whether only the tokens of a mask count.
        """
        if shapes == self.shapes:
            return False
        layouts = [state.layout for state in self.states] + [site.write_layout for site in self.sites]
        if masked:
            layouts += [layout for site in self.sites for _, layout in site.values.values()]
            layouts += [norm.layout for norm in self.norms]
        return any(layout.depends_on_shape for layout in layouts if layout is not None)


def _is_only_use(view: Value, state: Value) -> bool:
    """Return whether everything that reads a state reads it through a view."""
    while view is not state:
        assert view.op is not None
        view = view.op.inputs[0]
        if len({*view.users}) != 1:
            return False
    return True


def _parts(layout: TokenLayout | None) -> Any:
    """Return the axis parts of a layout's non-feature dimensions, in the order of the dimensions; None without a layout."""
    return None if layout is None else [part for dim in layout.dims for part in dim]


def find_observable(value: Value) -> Value:
    """Return the value to observe in place of a cast by FSDP (its input), or of a running collective (the end of the wait)."""
    while value.op is not None and value.op.ordinal == UNCOUNTED and value.op.inputs:
        value = value.op.inputs[0]
    if value.op is not None and value.op.name.startswith(COLLECTIVE) and value.op.name != WAIT:
        value = _find_wait(value) or value
    return value


def _find_wait(value: Value) -> Value | None:
    """Return the output of the operator that waits for collective `value`; None if there is none.

    It is found directly or through views of the value.
    """
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
