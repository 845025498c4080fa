"""Streams as chains of residual adds: each add continues where the one before ended, perhaps after norms.

Adds inside a sublayer of a longer chain (the cube in a handwritten GELU, a skip in a convolution) belong to that sublayer. Every
add is in a chain, inside a sublayer, or left over and reported.

A norm after an add belongs to the add (N_out) if the same step of other layers has one too. The remaining norms after the last
add are final norms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from addnorm.stream.dataflow.graph import Flow, Op, Value
from addnorm.stream.find.adds import Add, find_adds, has_mixing_branch
from addnorm.stream.find.next_norms import NextNorm, find_pooled_norm, list_next_norms, select_norm
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.operators import Factor, is_ancestor, is_mixing, strip_views, trace_constants
from addnorm.stream.find.paths import Path, find_ops_between
from addnorm.stream.find.regions import Regions
from addnorm.stream.find.sublayers import Sublayer, assign_layers, find_sublayers
from addnorm.stream.find.sums import is_statistic

__all__ = ["Chain", "Selection", "SublayerNames", "find_chains", "list_ids"]


@dataclass(eq=False)
class Chain:
    """Stream in a captured run: its adds, their sublayers, and the norms between them."""

    adds: list[Add]
    sublayers: list[list[Sublayer]]  # of each add
    norms_out: list[list[Norm]]  # after each add, in the order in which they are applied
    final_norms: list[Norm]
    last_factors: list[Factor]  # between the last add and its norm
    final_factors: list[Factor]  # between the last add and the final norm, if the add has no norm of its own
    dual_norm: Norm | None  # final norm of a second stream that has the same writes (ResiDual)
    dual_adds: list[Add] = field(default_factory=list)  # of that stream, and the add of both streams
    has_other_norms: bool = False  # several norms lead from the same tokens of the end to the model's output
    next_norm: NextNorm | None = None  # the first final norm, with the tokens that it reads
    pooled: tuple[Norm, Op] | None = None  # without a final norm: a norm of what an operator computes from the tokens
    first_norm: Norm | None = None  # before the first add, if it is the end of no other stream
    layout: Any = None  # the `StreamLayout`, which `build_inspection` sets
    passages: list[Any] = field(default_factory=list)  # a `Passage` to each add, and to the final norm; set likewise

    def states(self) -> list[Value]:
        """Return the states of the stream: x_0, and the stream after each add and its norms."""
        return [*(add.x for add in self.adds), self.find_end(-1)]

    def find_end(self, k: int) -> Value:
        """Return the stream after add k and its norms, before tokens are joined or removed."""
        norms = self.norms_out[k]
        return norms[-1].y if norms else self.adds[k].out

    def numbered(self) -> Iterator[tuple[int, Sublayer]]:
        """Return all sublayers except biases, each with the number of its add."""
        for k, sublayers in enumerate(self.sublayers):
            yield from ((k, sublayer) for sublayer in sublayers if sublayer.role != "bias")

    def sum_factors(self, k: int) -> list[Factor]:
        """Return the factors of the whole sum of add k, before its norm or, if there is none, before the next sublayer."""
        return [factor for factor in self.list_factors_after(k) if factor.kind in ("constant", "learned", "noise")]

    def list_factors_after(self, k: int) -> list[Factor]:
        """Return the factors between add k and its norm or, if there is none, the next sublayer."""
        if k + 1 == len(self.adds):
            return self.last_factors
        after = self.adds[k + 1]
        return after.early_factors if after.norms else after.late_factors


class SublayerNames:
    """Names of the sublayers of a chain, unique within the chain."""

    def __init__(self, chain: Chain) -> None:
        sublayers = [sublayer for _, sublayer in chain.numbered()]
        self._paths = Counter(sublayer.module for sublayer in sublayers)
        calls: dict[str, set[int]] = {}
        for sublayer in sublayers:
            calls.setdefault(sublayer.module, set()).add(sublayer.frame.call)
        self._calls = {path: len(numbers) for path, numbers in calls.items()}
        self._used: Counter[str] = Counter()

    def is_call(self, sublayer: Sublayer) -> bool:
        """Return whether each call of the sublayer's module is one sublayer."""
        return self._paths[sublayer.module] == self._calls[sublayer.module]

    def make_id(self, sublayer: Sublayer) -> str:
        """Return a name that no other sublayer of the chain has."""
        path = sublayer.module
        if self._paths[path] == 1:
            name = path or sublayer.kind
        elif self.is_call(sublayer):
            name = f"{path}#{sublayer.frame.call + 1}"
        else:
            name = f"{path}/{sublayer.kind}" if path else sublayer.kind
        self._used[name] += 1
        return f"{name}#{self._used[name]}" if self._used[name] > 1 else name

    def list_modules(self, sublayer: Sublayer) -> tuple[str, ...]:
        """Return the modules in which the sublayer ran, if its call contains several sublayers."""
        if self.is_call(sublayer):
            return ()
        paths: dict[str, None] = {}
        for op in sublayer.own_ops:
            frames = [*op.frame.chain()]
            if sublayer.frame in frames and op.frame is not sublayer.frame:
                paths[frames[frames.index(sublayer.frame) - 1].path] = None
        return tuple(paths)

    def count_shared(self, sublayer: Sublayer) -> int:
        """Return the number of sublayers that are the same module."""
        path = sublayer.module
        return self._paths[path] if self._calls[path] > 1 and self.is_call(sublayer) else 1


def list_ids(chains: Sequence[Chain], streams: Sequence[str]) -> list[list[str]]:
    """Return the ids of the sublayers of each chain, unique over all chains.

    Where two streams have sublayers in one module, the name of the stream precedes the module's: "blocks.0 (2)/blocks.0.attn".
    """
    ids = [[*map(SublayerNames(chain).make_id, (sublayer for _, sublayer in chain.numbered()))] for chain in chains]
    counts = Counter(["x_0", *(name for names in ids for name in names)])  # x_0 is the start of a stream
    return [
        [f"{stream}/{name}" if counts[name] > 1 else name for name in names]
        for stream, names in zip(streams, ids, strict=True)
    ]


class Selection(NamedTuple):
    """The adds of a data flow.

    Attributes:
        chains: the streams in the order in which they begin.
        left: the adds that are in no stream, in no sublayer, and not in `reads`.
        reads: the adds of positions and the like to a state, whose sum only sublayers read.
    """

    chains: list[Chain]
    left: list[Add]
    reads: list[Add]


def find_chains(flow: Flow, norms: list[Norm]) -> Selection:
    """Find the streams of a data flow."""
    results = {value for value in pytree.tree_leaves(flow.result) if isinstance(value, Value)}
    chosen, left, reads = _select_chains(find_adds(flow, norms), {strip_views(norm.x) for norm in norms}, results)
    _find_other_streams(chosen)
    joined = [(adds, [find_sublayers(add) for add in adds], dual, duals) for adds, dual, duals in _join_twins(chosen)]
    sublayers = [sublayer for _, of_adds, _, _ in joined for of_add in of_adds for sublayer in of_add]
    inner = {op for sublayer in sublayers for op in (*sublayer.ops, *sublayer.write_path.ops)}
    path = {add.op for adds, _, _, duals in joined for add in (*adds, *duals)}
    regions = Regions(inner, path, results)
    chains = [_build_chain(*parts, regions) for parts in joined]
    ends = {norm for chain in chains for norms in (*chain.norms_out, chain.final_norms) for norm in norms}
    for chain in chains:
        first = chain.adds[0]
        if first.norms and first.branch_input is None and first.norms[0] not in ends:
            chain.first_norm = first.norms[0]
    return Selection(chains, left, reads)


def _select_chains(
    adds: list[Add], normed: set[Value], results: set[Value]
) -> tuple[list[list[Add]], list[Add], list[Add]]:  # fmt: skip
    """Select the longest chain, then those that are in no sublayer of a longer one.

    `normed` has the values that norms read, `results` those that the model returns. The adds that are in neither, and the sums of
    states that sublayers read, are returned too.
    """
    chosen: list[list[Add]] = []
    owners: dict[Op, Add] = {}  # for each operator of a branch its add
    used: set[Add] = set()
    sums = _find_sums_of_states(adds)
    reads: list[Add] = []
    leaves = {*adds} - {add.previous for add in adds}
    for leaf in sorted(leaves, key=lambda add: (add in sums, -len([*add.states()]), -add.op.index)):
        chain = [add for add in leaf.states() if add not in used][::-1]
        if leaf in sums and Regions({*owners}, {add.op for add in used}, results).is_read_only([leaf.out]):
            reads.append(leaf)
            continue
        is_other = _is_other_stream(chain, owners, used)
        outside = _trim_activations([add for add in chain if is_other or add.op not in owners], results)
        for add in chain:
            if add.op in owners and add not in outside:
                owners[add.op].inner_adds.append(add)
        if not outside or not _is_stream(outside, normed, alone=not chosen):
            continue
        used.update(outside)
        chosen.append(outside)
        for add in outside:
            for write in add.writes:
                for op in find_ops_between(add.read, write.path.source):
                    owners.setdefault(op, add)
    left = [add for add in adds if add not in used and add.op not in owners and has_mixing_branch(add)]
    left = [add for add in left if add not in reads]
    return sorted(chosen, key=lambda chain: chain[0].op.index), left, reads


def _find_sums_of_states(adds: Sequence[Add]) -> set[Add]:
    """Return the adds that continue no stream: they add the state of another stream to a value, as positions to a memory."""
    states = {add.out for add in adds} | {add.x for add in adds}
    continued = {add.previous for add in adds}
    sums = set()
    for add in adds:
        source = add.writes[0].path.source
        values = {source} | ({strip_views(source.norm.x)} if source.norm is not None else set())
        if add.previous is None and add not in continued and len(add.writes) == 1 and values & states:
            sums.add(add)
    return sums


def _is_other_stream(chain: Sequence[Add], owners: dict[Op, Add], used: set[Add]) -> bool:
    """Return whether a chain of which adds are in sublayers is a stream that these sublayers read, as in two streams in turn.

    It is if it is in no single sublayer, began before one of them, and an add of it reads it directly, not through the others.
    """
    of_adds = {owners.get(add.op) for add in chain}
    if len(of_adds) == 1 or all(owner is None or is_ancestor(owner.read, chain[0].x) for owner in of_adds):
        return False
    passed = {add.op for add in used}
    return any(find_ops_between(add.read, write.path.source, passed) for add in chain for write in add.writes)


def _find_other_streams(chains: Sequence[Sequence[Add]]) -> None:
    """Set `Add.other_ops`: the adds on which the branches of an add depend, of streams that are not inside of these branches."""
    of_op = {add.op: chain for chain in chains for add in chain}
    for chain in chains:
        for add in chain:
            starts = {"branch": add.read, "injection": chain[0].x}
            writes = [(starts[write.role], write.path.source) for write in add.writes if write.role in starts]
            passed = {op for start, raw in writes for op in find_ops_between(start, raw) if op in of_op}
            passed -= {own.op for own in chain}
            inside = {
                op for op in passed
                if is_ancestor(add.read, of_op[op][0].x) and all(other.op in passed for other in of_op[op])
            }  # fmt: skip
            add.other_ops = passed - inside


def _trim_activations(chain: list[Add], results: set[Value]) -> list[Add]:
    """Remove elementwise functions at either end, such as x + sin(x)^2, and sums of statistics: mean((x - b)^2)."""
    while len(chain) > 1 and chain[-1].writes[0].role == "injection" and is_statistic(chain[-1].out, results):
        chain = chain[:-1]
    mixing = [
        k for k, add in enumerate(chain)
        if any(write.role != "branch" for write in add.writes) or has_mixing_branch(add)
    ]  # fmt: skip
    return chain[mixing[0] : mixing[-1] + 1] if mixing else chain


def _is_stream(chain: list[Add], normed: set[Value], alone: bool) -> bool:
    """Return whether adds are a stream: their branches are no elementwise functions, and a single add has a norm."""
    writes = [(add, write) for add in chain for write in add.writes if write.role == "branch"]
    branches = [find_ops_between(add.read, write.path.source) for add, write in writes]
    mixed = sum(any(is_mixing(op) for op in ops) for ops in branches)
    if not mixed:
        return alone and len(chain) > 1 and all(branches)
    if 2 * mixed <= len(branches):  # the gates of a recurrent cell
        return False
    has_norm = any(value.norm is not None for ops in branches for op in ops for value in op.outputs)
    return len(chain) > 1 or has_norm or chain[0].out in normed


def _join_twins(chains: list[list[Add]]) -> list[tuple[list[Add], Norm | None, list[Add]]]:
    """Join two streams with the same writes (ResiDual) into one, with the final norm and the adds of the second."""
    raws = [{write.path.source for add in chain for write in add.writes if write.role == "branch"} for chain in chains]
    joined: list[tuple[list[Add], Norm | None, list[Add]]] = []
    for k, chain in enumerate(chains):
        twins = [other for j, other in enumerate(chains) if j != k and raws[j] & raws[k]]
        if not twins:
            joined.append((chain, None, []))
        elif any(add.norms for add in chain[1:]):
            end = chain[-1].writes[0]
            norm = end.path.source.norm if end.role == "injection" else None
            ends = [other for other in twins if norm is not None and strip_views(norm.x) is other[-1].out]
            duals = [chain[-1], *(add for other in twins for add in other)]
            if any(_is_plain_sum(other, chain) for other in ends):
                joined.append((chain[:-1], norm, duals))
            else:  # the sums of the second stream are gaps
                joined.append((chain[:-1] if ends else chain, None, []))
        elif not any(add.norms for other in twins for add in other[1:]):
            joined.append((chain, None, []))
    return joined


def _is_plain_sum(other: list[Add], chain: list[Add]) -> bool:
    """Return whether a second stream is x_0 plus the writes of a chain, and is added to it in the end, without factors."""
    writes = [write.path for add in chain[:-1] for write in add.writes]
    seconds = [write.path for add in other for write in add.writes]
    drawn = _find_shared_noise(writes, seconds)
    ends = (chain[-1].residual_path, *(write.path for write in chain[-1].writes))
    paths = (*ends, *seconds, *(add.residual_path for add in other))
    factors = [factor for path in paths for factor in path.factors if factor.op not in drawn]
    factors += [factor for add in other for factor in (*add.early_factors, *add.late_factors)]
    is_bare = all(term.factor == 1.0 and term.scale is None for path in paths for term in path.terms)
    is_bare &= all(factor.kind == "constant" and factor.number == 1.0 for factor in factors)
    starts = [{*trace_constants(strip_views(adds[0].x), 1.0)} for adds in (chain, other)]
    return is_bare and bool(starts[0] & starts[1]) and [p.source for p in seconds] == [p.source for p in writes]


def _find_shared_noise(writes: Sequence[Path], seconds: Sequence[Path]) -> set[Op]:
    """Return the products with random masks in the writes of two streams whose masks are equal, write by write."""
    shared: set[Op] = set()
    for paths in zip(writes, seconds, strict=False):
        first, second = ([factor for factor in path.factors if factor.kind == "noise"] for path in paths)
        masks = [(a.value, b.value) for a, b in zip(first, second, strict=False)]
        if len(first) == len(second) and all(a and b and torch.equal(a.tensor, b.tensor) for a, b in masks):
            shared |= {factor.op for factor in (*first, *second)}
    return shared


def _build_chain(
    adds: list[Add], sublayers: list[list[Sublayer]], dual: Norm | None, dual_adds: list[Add], regions: Regions
) -> Chain:
    between = [[*reversed(after.norms)] for after in adds[1:]]
    found, is_ambiguous = _find_last_norms(adds[-1].out, regions)
    num_own = _count_own_norms(adds, sublayers, between) if found and not found[0].is_partial else 0
    last, final = [after.norm for after in found[:num_own]], [after.norm for after in found[num_own:]]
    factors = found[0].factors if found else []
    own, after = (factors, []) if last else ([], factors)
    chain = Chain(
        adds,
        sublayers,
        [*between, last],
        [*final, *([dual] if dual else [])],
        own,
        after,
        dual,
        dual_adds,
        is_ambiguous,
    )
    chain.next_norm = found[num_own] if final else None
    chain.pooled = None if chain.final_norms else find_pooled_norm(chain.find_end(-1), regions)
    return chain


def _find_last_norms(value: Value, regions: Regions) -> tuple[list[NextNorm], bool]:
    """Return the norms after the last add, one after the other, and whether there are several for the same tokens."""
    found: list[NextNorm] = []
    is_ambiguous = False
    while candidates := [c for c in list_next_norms(value) if regions.is_used(c.norm.y)]:
        after, is_one_of_several = select_norm(candidates, regions)
        is_ambiguous |= is_one_of_several
        found.append(after)
        value = after.norm.y
    return found, is_ambiguous


def _count_own_norms(adds: list[Add], sublayers: list[list[Sublayer]], between: list[list[Norm]]) -> int:
    """Return how many of the norms after the last add are the add's own, as in the layers before; the others are final norms."""
    signatures = [_signature(add, of_add) for add, of_add in zip(adds, sublayers, strict=True)]
    flat = [sublayer for of_add in sublayers for sublayer in of_add]
    layers = dict(zip((sublayer.add for sublayer in flat), assign_layers(flat), strict=True))
    equal = [k for k, signature in enumerate(signatures[:-1]) if signature == signatures[-1]]
    if (
        not equal
    ):  # the module that reads the stream next may do the add, and the reader of the last one is another module
        equal = [k for k, signature in enumerate(signatures[:-1]) if signature[1:] == signatures[-1][1:]]
    ends_layer = [k for k in equal if layers[adds[k]] != layers[adds[k + 1]]]  # as the last add does
    same = _find_period(between, equal) or ends_layer or equal
    # If no other add is like the last one, a norm belongs to it if its sublayers read through no norm.
    has_branch = any(sublayer.role == "branch" for sublayer in sublayers[-1])
    return len(between[same[-1]]) if same else int(not signatures[-1][1] if has_branch else any(between))


def _find_period(between: list[list[Norm]], equal: Sequence[int]) -> list[int]:
    """Return the add that is one period of norms before the last one, if it is among the equal ones and the norms alternate."""
    n = len(between) + 1
    placed = [[norm.kind for norm in norms] for norms in between]
    for period in range(1, n // 2 + 1):
        repeats = all(placed[k] == placed[k + period] for k in range(len(placed) - period))
        if n % period == 0 and repeats:
            return [n - 1 - period] if period > 1 and n - 1 - period in equal else []
    return []


def _signature(add: Add, sublayers: Sequence[Sublayer]) -> tuple[Any, ...]:
    """Return a key that is equal for the same step of two layers: the module without its number, the norms, the roles."""
    path = tuple(part for part in add.op.frame.path.split(".") if not part.isdigit())
    has_norm_in = any(sublayer.reads.norms for sublayer in sublayers)
    return (
        path,
        has_norm_in,
        any(sublayer.norm is not None for sublayer in sublayers),
        [sublayer.role for sublayer in sublayers],
    )
