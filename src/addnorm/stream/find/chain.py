"""Streams as chains of residual adds: each add continues where the one before ended, perhaps after norms.

Adds inside a sublayer of a longer chain (the cube in a handwritten GELU, a skip in a convolution) belong to that sublayer. Every
add is in a chain, inside a sublayer, or left over and reported.

Norms between two adds belong to the first of the two (N_out). Norms after the last add belong to this add if norms also follow
the corresponding add of other layers. The remaining norms after the last add are final norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from addnorm.stream.dataflow.arithmetic import Factor, is_ancestor, strip_norm, strip_views, trace_constants
from addnorm.stream.dataflow.graph import Flow, Op, Value, find_ops_between, walk
from addnorm.stream.find.adds import Add, find_adds, has_mixing_branch
from addnorm.stream.find.next_norms import NextNorm, Regions, find_pooled_norm, list_next_norms, select_norm
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.paths import Path
from addnorm.stream.find.sublayers import Sublayer, assign_layers, find_sublayers


@dataclass(eq=False)
class Chain:
    """Stream in a captured run: its adds, their sublayers, and the norms between them.

    Attributes:
        adds: the residual adds.
        sublayers: the sublayers of each add.
        norms_out: the norms of the sum of each add (N_out), in the order in which they are applied.
        final_norms: the other norms after the last add.
        end_factors: the factors between the last add and the norm after it.
        dual_adds: the adds of a second stream that has the same writes (ResiDual), and the add that sums both streams.
        has_other_norms: whether several norms read the same tokens at the end of the stream and lead to the model's output.
        next_norm: the first final norm, with the tokens that it reads.
        pooled: if there is no final norm, the norm of a pooled end of the stream, such as the norm of the mean over tokens, and
            the operator that pools; None if there is no such norm.
        first_norm: the norm before the first add; None if this norm is the end of another stream.
    """

    adds: list[Add]
    sublayers: list[list[Sublayer]]
    norms_out: list[list[Norm]]
    final_norms: list[Norm]
    end_factors: list[Factor]
    dual_adds: list[Add]
    has_other_norms: bool
    next_norm: NextNorm | None
    pooled: tuple[Norm, Op] | None
    first_norm: Norm | None = None

    def states(self) -> list[Value]:
        """Return the states of the stream: x_0, and the stream after each add and its norms."""
        return [*(add.x for add in self.adds), self.find_end(-1)]

    def find_end(self, k: int) -> Value:
        """Return the stream after add `k` and its norms, before tokens are joined or removed."""
        norms = self.norms_out[k]
        return norms[-1].y if norms else self.adds[k].out

    def list_sublayers(self) -> list[Sublayer]:
        """Return all sublayers except biases."""
        return [sublayer for of_add in self.sublayers for sublayer in of_add if sublayer.role != "bias"]

    def sum_factors(self, k: int) -> list[Factor]:
        """Return the constant, learned and random factors in `list_factors_after(k)`: they multiply the whole sum."""
        return [factor for factor in self.list_factors_after(k) if factor.kind in ("constant", "learned", "noise")]

    def list_factors_after(self, k: int) -> list[Factor]:
        """Return the factors between add `k` and its norm; if it has no norm, those before the next sublayer."""
        if k + 1 == len(self.adds):
            return self.end_factors if self.norms_out[k] else []
        after = self.adds[k + 1]
        return after.early_factors if after.norms else after.late_factors


class Selection(NamedTuple):
    """Residual adds of a data flow: those in streams, and those outside of streams.

    Attributes:
        chains: the streams in the order in which they begin.
        left: the adds that are in no stream, in no sublayer, and not in `reads`.
        reads: the adds of a value, such as position embeddings, to a state, if only sublayers read the sum.
        regions: the operators of the sublayers and of the adds.
    """

    chains: list[Chain]
    left: list[Add]
    reads: list[Add]
    regions: Regions


def find_chains(flow: Flow, norms: list[Norm]) -> Selection:
    """Join the residual adds of a data flow into streams, and return the streams and the other adds."""
    results = flow.list_results()
    chosen, left, reads = _select_chains(find_adds(flow, norms), {strip_views(norm.x) for norm in norms}, results)
    _find_other_streams(chosen)
    joined = [
        (adds, [find_sublayers(add, k) for k, add in enumerate(adds)], dual, duals)
        for adds, dual, duals in _join_twins(chosen)
    ]
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
    return Selection(chains, left, reads, regions)


def _select_chains(
    adds: list[Add], normed: set[Value], results: set[Value]
) -> tuple[list[list[Add]], list[Add], list[Add]]:  # fmt: skip
    """Select the longest chain of adds, then the next longest ones that are in no sublayer of a selected one.

    Args:
        adds: all residual adds.
        normed: the values that norms read.
        results: the values that the model returns.

    Returns:
        The adds of each selected chain, and `left` and `reads` as in `Selection`.
    """
    chosen: list[list[Add]] = []
    owners: dict[Op, Add] = {}  # the add of each operator of a branch
    used: set[Add] = set()
    sums = _find_sums_of_states(adds)
    reads: list[Add] = []
    leaves = {*adds} - {add.previous for add in adds}
    for leaf in sorted(leaves, key=lambda add: (add in sums, -len([*add.lineage()]), -add.op.index)):
        chain = [add for add in leaf.lineage() if add not in used][::-1]
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
    known = {*used, *reads}
    left = [add for add in adds if add not in known and add.op not in owners and has_mixing_branch(add)]
    return sorted(chosen, key=lambda chain: chain[0].op.index), left, reads


def _find_sums_of_states(adds: Sequence[Add]) -> set[Add]:
    """Return the adds, alone in their chain, of the state of another stream to a value such as position embeddings."""
    states = {add.out for add in adds} | {add.x for add in adds}
    continued = {add.previous for add in adds}
    sums = set()
    for add in adds:
        source = add.writes[0].path.source
        is_of_state = source in states or strip_norm(source) in states
        if add.previous is None and add not in continued and len(add.writes) == 1 and is_of_state:
            sums.add(add)
    return sums


def _is_other_stream(chain: Sequence[Add], owners: dict[Op, Add], used: set[Add]) -> bool:
    """Return whether `chain`, whose adds are inside sublayers, is a second stream that these sublayers read (reversible layers).

    True if three conditions hold: the adds are in different sublayers; the start of the chain does not depend on the input of at
    least one of these sublayers; a branch of the chain can be computed without the adds in `used`, which are of other streams.
    """
    of_adds = {owners.get(add.op) for add in chain}
    if len(of_adds) == 1 or all(owner is None or is_ancestor(owner.read, chain[0].x) for owner in of_adds):
        return False
    passed = {add.op for add in used}
    return any(find_ops_between(add.read, write.path.source, passed) for add in chain for write in add.writes)


def _find_other_streams(chains: Sequence[Sequence[Add]]) -> None:
    """Set `Add.other_ops` of each add: the operators that add to other streams and on which its branches depend."""
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
    """Return the chain without elementwise adds at its ends, and without last sums that are used only in statistics.

    Examples are the adds in x + sin(x)^2 and mean((x - b)^2).
    """
    while len(chain) > 1 and chain[-1].writes[0].role == "injection" and _is_statistic(chain[-1].out, results):
        chain = chain[:-1]
    mixing = [
        k for k, add in enumerate(chain)
        if any(write.role != "branch" for write in add.writes) or has_mixing_branch(add)
    ]  # fmt: skip
    return chain[mixing[0] : mixing[-1] + 1] if mixing else chain


def _is_statistic(value: Value, results: set[Value]) -> bool:
    """Return whether a value is used only in statistics over its features, such as mean((x - b)^2).

    False if a value that the model returns (`results`) is computed without such a reduction.
    """
    reduced = False

    def follow(v: Value) -> list[Value]:
        nonlocal reduced
        ends = [user for user in v.users if "reduction" in user.traits and _lacks_features(user.out, v)]
        reduced |= bool(ends)
        return [out for user in v.users if user not in ends for out in user.outputs]

    for v in walk([value], follow):
        if v in results or any(user.norms or "mixing" in user.traits for user in v.users):
            return False
    return reduced


def _lacks_features(out: Value, value: Value) -> bool:
    """Return whether the shapes show that `out`, a reduction of `value`, is reduced over the last dimension."""
    *rest, width = value.shape
    return math.prod(out.shape) == 1 or out.shape == (*rest, 1) or (out.shape == (*rest,) and width not in rest)


def _is_stream(chain: list[Add], normed: set[Value], alone: bool) -> bool:
    """Return whether a chain is a stream: most branches combine tokens or features, and there are several adds or a norm.

    Args:
        chain: the adds.
        normed: the values that norms read.
        alone: whether no other stream was selected before. If so, several adds with elementwise branches are a stream too.
    """
    branches = [
        find_ops_between(add.read, write.path.source)
        for add in chain for write in add.writes if write.role == "branch"
    ]  # fmt: skip
    mixed = sum(any("mixing" in op.traits for op in ops) for ops in branches)
    if not mixed:
        return alone and len(chain) > 1 and all(branches)
    if 2 * mixed <= len(branches):  # the gates of a recurrent cell
        return False
    has_norm = any(value.norm is not None for ops in branches for op in ops for value in op.outputs)
    return len(chain) > 1 or has_norm or chain[0].out in normed


def _join_twins(chains: list[list[Add]]) -> list[tuple[list[Add], Norm | None, list[Add]]]:
    """Join two streams that have the same sublayers (ResiDual) into one.

    Returns:
        A tuple for each stream: its adds, and the final norm and the `Chain.dual_adds` from the second stream that is joined to
        it. If no stream is joined to it, these are None and [].
    """
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
            else:  # the sums of the second stream are reported as not understood
                joined.append((chain[:-1] if ends else chain, None, []))
        elif not any(add.norms for other in twins for add in other[1:]):
            joined.append((chain, None, []))
    return joined


def _is_plain_sum(other: list[Add], chain: list[Add]) -> bool:
    """Return whether `other` is x_0 plus the writes of `chain`, and the last add of `chain` sums both, all without factors."""
    writes = [write.path for add in chain[:-1] for write in add.writes]
    seconds = [write.path for add in other for write in add.writes]
    drawn = _find_shared_noise(writes, seconds)
    ends = (chain[-1].residual_path, *(write.path for write in chain[-1].writes))
    paths = (*ends, *seconds, *(add.residual_path for add in other))
    factors = [factor for path in paths for factor in path.factors if factor.op not in drawn]
    factors += [factor for add in other for factor in (*add.early_factors, *add.late_factors)]
    is_bare = all(path.number == 1.0 and not path.scales for path in paths)
    is_bare &= all(factor.kind == "constant" and factor.number == 1.0 for factor in factors)
    starts = [{*trace_constants(strip_views(adds[0].x), 1.0)} for adds in (chain, other)]
    return is_bare and bool(starts[0] & starts[1]) and [p.source for p in seconds] == [p.source for p in writes]


def _find_shared_noise(writes: Sequence[Path], seconds: Sequence[Path]) -> set[Op]:
    """Return the operators that multiply the writes of two streams by dropout masks, if both streams have the same masks."""
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
    found = _find_last_norms(adds[-1].out, regions)
    num_own = _count_own_norms(adds, sublayers, between) if found and not found[0].is_partial else 0
    last, final = [after.norm for after in found[:num_own]], [after.norm for after in found[num_own:]]
    final += [dual] if dual else []
    norms_out = [*between, last]
    end = last[-1].y if last else adds[-1].out
    return Chain(
        adds, sublayers, norms_out, final, found[0].factors if found else [], dual_adds,
        any(after.is_ambiguous for after in found),
        found[num_own] if len(found) > num_own else None, None if final else find_pooled_norm(end, regions),
    )  # fmt: skip


def _find_last_norms(value: Value, regions: Regions) -> list[NextNorm]:
    """Return the norms that follow the last sum, one after the other."""
    found: list[NextNorm] = []
    while candidates := [c for c in list_next_norms(value) if regions.is_used(c.norm.y)]:
        found.append(select_norm(candidates, regions))
        value = found[-1].norm.y
    return found


def _count_own_norms(adds: list[Add], sublayers: list[list[Sublayer]], between: list[list[Norm]]) -> int:
    """Return how many norms after the last add are its N_out, judged by the other layers. The rest are final norms."""
    signatures = [_signature(add, of_add) for add, of_add in zip(adds, sublayers, strict=True)]
    flat = [sublayer for of_add in sublayers for sublayer in of_add]
    layers = dict(zip((sublayer.add for sublayer in flat), assign_layers(flat), strict=True))
    *others, own = signatures
    # An add may run in the module that reads its sum. For the last sum this is another module than in the other layers, so the
    # path in the signature is ignored if no whole signature is equal.
    equal = [k for k, other in enumerate(others) if other == own] or [
        k for k, other in enumerate(others) if other[1:] == own[1:]
    ]
    ends_layer = [k for k in equal if layers[adds[k]] != layers[adds[k + 1]]]  # as the last add does
    same = _find_period(between, equal) or ends_layer or equal
    # If no other add is like the last one, a norm belongs to the last add if its sublayers read through no norm.
    has_branch = any(sublayer.role == "branch" for sublayer in sublayers[-1])
    return len(between[same[-1]]) if same else int(not own[1] if has_branch else any(between))


def _find_period(between: list[list[Norm]], equal: Sequence[int]) -> list[int]:
    """Return a list with the index of the add one period before the last one, if the norms repeat with a period; else [].

    Args:
        between: the norms after each add except the last one.
        equal: indices of the adds that are like the last one.
    """
    n = len(between) + 1
    placed = [[norm.kind for norm in norms] for norms in between]
    for period in range(1, n // 2 + 1):
        if n % period == 0 and placed[period:] == placed[:-period]:
            return [n - 1 - period] if period > 1 and n - 1 - period in equal else []
    return []


def _signature(add: Add, sublayers: Sequence[Sublayer]) -> tuple[Any, ...]:
    """Return a key that is equal for the same step of two layers: module path without numbers, norms, roles of sublayers."""
    path = tuple(part for part in add.op.frame.path.split(".") if not part.isdigit())
    has_norm_in = any(sublayer.reads.norms for sublayer in sublayers)
    return (
        path,
        has_norm_in,
        any(sublayer.norm is not None for sublayer in sublayers),
        [sublayer.role for sublayer in sublayers],
    )
