"""What a recorder listens to: of each stream its states, of each sublayer what it reads, returns and adds, found by address.

A plan holds no tensor of the run that was inspected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from addnorm.stream.dataflow.capture import PARAMETER, Value
from addnorm.stream.find.adds import Path
from addnorm.stream.find.inspect import Found
from addnorm.stream.find.inspection import Inspection, Stream
from addnorm.stream.find.norms import Norm
from addnorm.stream.find.sites import Branch
from addnorm.stream.record.schema import RecordedSite

__all__ = ["Heard", "Plan", "PlannedNorm", "PlannedSite", "PlannedState", "parameters_of", "write_of"]

RSTD = {"native_layer_norm": 2, "_fused_rms_norm": 1}  # which result of the operator is 1 / the denominator


@dataclass
class Heard:
    """A value to listen to: an operator's result, or what was there before (`leaf`: an input's number, a parameter's name)."""

    value: Value
    factor: float = 1.0
    scales: tuple[Value, ...] = ()  # tensors by which the adds multiply it

    @property
    def leaf(self) -> bool:
        """Whether no operator makes it."""
        return self.value.op is None


@dataclass
class PlannedNorm:
    """A norm at a site: where its rstd is found, or the x of which it is computed."""

    sites: list[int]
    role: str
    norm: Norm
    rstd: Value | None
    stream: str


@dataclass
class PlannedState:
    """A state of the stream: what enters the sublayers of one add and leaves those of the one before."""

    index: int
    value: Value
    entering: list[int] = field(default_factory=list)  # the sites that it enters
    leaving: list[int] = field(default_factory=list)  # the sites that it leaves; x_0 is one
    wanted: int = 0  # how many writes are compared with it
    stream: str = ""
    width: int = 0
    axis: int = -1  # which dimension has the features


@dataclass
class PlannedSite:
    """A sublayer."""

    index: int
    state: int  # which state it adds to
    read: Value | None
    raw: Value
    write: Heard
    parameters: list[str]


@dataclass
class Plan:
    """All of it, for the streams of a model."""

    recorded: tuple[RecordedSite, ...]
    states: list[PlannedState]
    sites: list[PlannedSite]
    norms: list[PlannedNorm]
    streams: dict[str, tuple[Stream, list[int]]]  # with the numbers of its states

    @classmethod
    def of(cls, inspection: Inspection, layers: Iterable[int] | None = None) -> Plan:
        """What there is to hear of what was found, in these layers."""
        plan = cls((), [], [], [], {})
        wanted = None if layers is None else {*layers}
        recorded: list[RecordedSite] = []
        several = len(inspection.streams) > 1
        for stream in inspection.streams:
            plan._add(stream, recorded, f"{stream.name}/" if several else "", wanted)
        plan.recorded = tuple(recorded)
        return plan

    def _add(self, stream: Stream, recorded: list[RecordedSite], prefix: str, wanted: set[int] | None) -> None:
        found: Found = stream.found
        first = len(self.states)
        values = [add.x for add in found.adds] + [_end(found)]
        self.states += [
            PlannedState(first + k, value, stream=stream.name, width=stream.width, axis=stream.axis)
            for k, value in enumerate(values)
        ]
        self.streams[stream.name] = stream, [*range(first, len(self.states))]
        at = len(recorded)
        recorded.append(RecordedSite(f"{prefix}x_0", "", "start", None, stream.name, ""))
        self.states[first].leaving.append(at)
        for site in stream.sites:
            k, branch = site.found[1], site.found[2]
            if wanted is not None and site.layer not in wanted:
                continue
            at = len(recorded)
            recorded.append(RecordedSite(site.id, site.path, site.kind, site.layer, stream.name, site.equation))
            self.states[first + k].entering.append(at)
            self.states[first + k].wanted += 1
            self.states[first + k + 1].leaving.append(at)
            self.sites.append(
                PlannedSite(at, first + k, branch.reads.value, branch.raw, write_of(branch), parameters_of(branch))
            )
            for role, norms in (
                ("norm_in", branch.reads.norms),
                ("norm_branch", [branch.norm]),
                ("norm_out", found.norms_out[k]),
            ):
                self.norms += [_planned(norm, role, at, stream.name) for norm in norms[:1] if norm is not None]
        if stream.final_norm is not None:
            recorded.append(RecordedSite(f"{prefix}final", stream.final_norm.path, "final", None, stream.name, ""))
            self.norms.append(_planned(stream.final_norm, "norm_final", len(recorded) - 1, stream.name))

    def values(self) -> Iterator[Value]:
        """Everything that is heard."""
        for state in self.states:
            yield state.value
        for site in self.sites:
            yield from (v for v in (site.read, site.raw, site.write.value, *site.write.scales) if v is not None)
        for norm in self.norms:
            yield norm.rstd if norm.rstd is not None else norm.norm.x


def _end(found: Found) -> Value:
    """The last state: after the last add and its norm."""
    norms = found.norms_out[-1]
    return norms[-1].y if norms else found.adds[-1].out


def _planned(norm: Norm, role: str, site: int, stream: str) -> PlannedNorm:
    op = norm.y.op
    assert op is not None
    part = RSTD.get(op.name)
    rstd = op.outputs[part] if part is not None and len(op.outputs) > part else None
    return PlannedNorm([site], role, norm, rstd, stream)


def write_of(branch: Branch) -> Heard:
    """What a sublayer adds: the operand of the add in which it enters, and the numbers by which adds multiply it."""
    path: Path = branch.path
    terms = [path.term, *path.sums]
    factor = 1.0
    for term in terms:
        factor *= term.factor
    return Heard(terms[-1].value, factor, tuple(term.scale for term in terms if term.scale is not None))


def parameters_of(branch: Branch) -> list[str]:
    """The names of the parameters with which a sublayer computes; those of the norm that it reads through are not."""
    norms = {op for norm in branch.reads.norms for op in norm.ops}
    names: dict[str, None] = {}
    todo = [value for op in branch.ops if op not in norms for value in op.inputs]
    seen: set[Value] = set()
    while todo:
        value = todo.pop()
        if value in seen or value.kind != PARAMETER:
            continue
        seen.add(value)
        if value.op is None:
            names[value.name] = None
        else:
            todo.extend(value.op.inputs)
    return sorted(name for name in names if name)
