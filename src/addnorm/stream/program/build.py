"""Search of a captured run for its residual program: the streams, the sublayers and their measured matrices."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

from addnorm.stream.dataflow.arithmetic import strip_moves
from addnorm.stream.dataflow.graph import DATA, Flow, Op, Value, walk
from addnorm.stream.find.adds import Add
from addnorm.stream.find.kinds import classify_sublayer
from addnorm.stream.find.sublayers import find_common_frame, number_periods
from addnorm.stream.program.carried import Carrier
from addnorm.stream.program.cuts import find_coefficient_ops, find_spine
from addnorm.stream.program.maps import TOKENS, assemble, measure_map
from addnorm.stream.program.result import Program, ProgramSite
from addnorm.stream.program.spine import Spine

MIN_SITES = 2
WIDTHS = 6  # number of candidate widths of a stream that are tried


def find_program(flow: Flow, widths: Container[int] | None = None) -> Program | None:
    """Return the residual program with the most sublayers whose equations close; None if there is none.

    `find_norms` must have run on `flow`. The number of features of a stream must be in `widths`; None allows any number.
    """
    carriers, spines = _find_spines(flow)
    programs = (_build_program(spine) for spine in spines if widths is None or spine.carrier.width in widths)
    program = next((program for program in programs if program is not None and program.closes), None)
    if program is not None:
        program.outside = _find_outside(flow, carriers, program.spine)
    return program


def are_parts(streams: Sequence[Sequence[Add]], program: Program) -> bool:
    """Return whether any of `streams`, each a list of adds, begins with a sum of states of the streams before it.

    Such a sum is a step of the program, so the streams are parts of a model of several streams.
    """
    carrier = program.spine.carrier
    states = {add.out for adds in streams for add in adds}
    writes: set[Value] = set()
    for adds in streams:
        start = strip_moves(adds[0].x)
        if start.norm is None and start not in states and not writes.isdisjoint(carrier.find_sources(start)):
            return True
        writes.update(source for add in adds for source in carrier.find_sources(add.out))
        writes.difference_update(program.spine.starts)
    return False


def count_streams(flow: Flow) -> int:
    """Return the largest number of streams at any depth of a run. Only structure is read, so tensors may be fake."""
    return max((size for spine in _find_spines(flow)[1] for size in spine.sizes), default=1)


def _find_spines(flow: Flow) -> tuple[list[Carrier], list[Spine]]:
    """Return a `Carrier` for each candidate width, and the `Spine`s found in them, the most sublayers first."""
    carriers = [Carrier(flow, width) for width in _list_widths(flow)]
    found = [
        spine for spine in map(find_spine, carriers[:WIDTHS]) if spine is not None and len(spine.writes) >= MIN_SITES
    ]
    spines = [spine for spine in found if all(value.tensor.numel() for state in spine.states for value in state)]
    return carriers, sorted(spines, key=lambda spine: -len(spine.writes))


def _build_program(spine: Spine) -> Program | None:
    """Return the program of a spine with its measured matrices; None if a sublayer or the last read has no equation."""
    own = [[op for op in write.ops if not op.norms] or write.ops for write in spine.writes]
    paths = [find_common_frame(ops, ops[0].frame).path for ops in own]
    kinds = [classify_sublayer(write.reads[0], ops) for write, ops in zip(spine.writes, own, strict=True)]
    layers = _number_layers(paths, kinds)
    sites = []
    for k, write in enumerate(spine.writes):
        before, after = spine.states[k : k + 2]
        reads = [measure_map(spine.carrier, value, before) for value in write.reads]
        sums = [measure_map(spine.carrier, value, [*before, write.value]) for value in after]
        if any(part.reason for part in (*reads, *sums)):
            return None
        count = f" ({paths[: k + 1].count(paths[k])})" if paths.count(paths[k]) > 1 else ""
        columns = (column for part in sums for column in part.columns if column.source is write.value)
        norm = next((column.norm for column in columns), None)
        sites.append(
            ProgramSite(
                (paths[k] or "the model") + count, paths[k], kinds[k], layers[k],
                assemble(spine.carrier, reads, before), assemble(spine.carrier, sums, before),
                assemble(spine.carrier, sums, [write.value], normed=norm is not None),
                reads[0].norm, write.norm if norm is None else norm,
                tuple(part.norm for part in sums for _ in range(spine.carrier.count_streams(part.target))),
                max(part.error for part in (*reads, *sums)), write, before, reads, sums,
            )
        )  # fmt: skip
    head = measure_map(spine.carrier, spine.end, spine.states[-1])
    return Program(spine, sites, head) if head.reason in ("", TOKENS) else None


def _find_outside(flow: Flow, carriers: Sequence[Carrier], spine: Spine) -> list[Op]:
    """Return the residual sums, such as x + f(x), that lead to the model's results and are outside a program.

    They are in none of the streams, sublayers and coefficients of the program with the spine `spine`.
    """
    inside = {value.op for value in spine.relevant} | {op for write in spine.writes for op in write.ops}
    inside.update(find_coefficient_ops(spine))
    results = {*walk(flow.list_results(), lambda value: value.inputs)}
    sums = {op for carrier in carriers for op in carrier.find_residual_sums(flow)} - inside
    return sorted((op for op in sums if not results.isdisjoint(op.outputs)), key=lambda op: op.index)


def _list_widths(flow: Flow) -> list[int]:
    """Return the candidate widths of a stream: sizes of the last dimension of activations, the most frequent first.

    Sizes over which a norm of the run normalizes come before all other sizes, since most streams are normalized.
    """
    counts: dict[int, int] = {}
    normed = {value.norm.x.shape[-1] for op in flow.ops for value in op.outputs if value.norm is not None}
    for op in flow.ops:
        for value in op.outputs:
            if value.kind & DATA and len(value.shape) > 1 and value.tensor.is_floating_point():
                counts[value.shape[-1]] = counts.get(value.shape[-1], 0) + 1
    sizes = [size for size in counts if size > 1]
    return sorted(sizes, key=lambda size: (size not in normed, -counts[size]))


def _number_layers(paths: Sequence[str], kinds: Sequence[str]) -> list[int]:
    """Return the index of each sublayer's layer, from the first number in the modules' paths that changes.

    If there is no such number, or all sublayers have different ones, the period in which the kinds repeat is a layer. If the
    kinds have no period, each different number is a layer, or without numbers each pair of sublayers.
    """
    numbers = [re.findall(r"(?:^|\.)(\d+)(?=\.|$)", path) for path in paths]
    for depth in range(min(map(len, numbers), default=0)):
        keys = [of_one[depth] for of_one in numbers]
        if len({*keys}) > 1:
            order = [*dict.fromkeys(keys)]
            by_kind = number_periods(kinds) if len(order) == len(keys) else None
            return by_kind or [order.index(key) for key in keys]
    return number_periods(kinds) or [k // 2 for k in range(len(paths))]
