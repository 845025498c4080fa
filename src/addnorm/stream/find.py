"""`inspect`: which residual wiring a model has, found by the data flow of one run and proven by computing it again.

Nothing is judged by the names of modules or classes. The model runs once on the inputs given; every operator is seen (flow.py);
norms are recognized by their formula (norms.py), residual adds by what depends on what (adds.py), and each row that comes of
it (sites.py) is computed in float64 from what the sublayer returned and compared with the stream the model has (closure.py).
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from addnorm.nn import wirings
from addnorm.nn.wiring import Row
from addnorm.stream import naming
from addnorm.stream.adds import Add, find_streams, mixes
from addnorm.stream.closure import closure_of, operand, relative, replay, tolerance, views
from addnorm.stream.flow import Capture, Flow, Value
from addnorm.stream.inspection import Inspection, Site, Stream, Unknown
from addnorm.stream.norms import Norm, find_norms
from addnorm.stream.ops import CHANNELS, NORMALIZING, Factor, axis_of, factor_of, reaches, up
from addnorm.stream.sites import Branch, branches, layers_of, row_of

__all__ = ["Found", "capture", "doubled", "inspect", "understand"]

PARTS = ("slice", "select", "index", "narrow", "gather", "index_select", "mean")  # what takes some tokens, or pools them
OUTSIDE = "an add x + f(x) stands alone: what follows is computed from the sum, which no other add continues"
UNUSUAL = "addnorm.inspect(model, *args, **kwargs)"


@dataclass(eq=False)
class Found:
    """A stream as values of the run: what `record`, `decompose` and `ablate` work with."""

    adds: list[Add]
    branches: list[list[Branch]]
    norms_out: list[list[Norm]]  # after each add, in the order in which they are applied
    final: list[Norm]
    last: list[Factor]  # factors between the last add and the norm after it
    dual: Norm | None  # of a second stream that has the same writes


def inspect(model: nn.Module, *args: Any, float64: bool = False, **kwargs: Any) -> Inspection:
    r"""Finds the residual streams of any model, the Row of every sublayer, and proves each by computing it again.

    The model runs once, as it is (in training or evaluation mode), on `args` and `kwargs`. Its parameters and buffers, the
    inputs and the state of the random generators are left as they were.

    Args:
        model: any `torch.nn.Module`, compiled or not.
        args: what the model is called with, shapes and values that mean something to it: the closures are of these values.
        float64: run a copy of the model in float64, where the equations close to 1e-10.
        kwargs: the keyword arguments of that call.

    Returns:
        An `Inspection`: `streams` and their `sites`, the name of the `wiring`, `closure`, and `unknown`: what is not
        understood, with the reason. It prints as a table, in a notebook too; `to_dict()` for JSON.

    Raises:
        TypeError: `model` is no module.
        Whatever the model raises on these inputs.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> found = addnorm.inspect(torch.nn.TransformerEncoder(layer, 3).eval(), torch.randn(2, 5, 16))
        >>> found.wiring, len(found.sites), found.closes
        ('post_ln', 6, True)
        >>> found.sites[0].path, found.sites[0].kind, str(found.sites[0].row)
        ('layers.0.self_attn', 'attention', "x' = N(x + f(x))")
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module: {UNUSUAL}.")
    runs = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if float64:
        runs, args, kwargs = doubled(runs, args, kwargs)
    with torch.no_grad():
        flow = capture(runs, args, kwargs)
    return understand(runs, flow, target=model)


def capture(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
    """The data flow of one call."""
    return Capture(model).run(args, kwargs)


def understand(model: nn.Module, flow: Flow, target: nn.Module | None = None) -> Inspection:
    """What a data flow says."""
    norms = find_norms(flow)
    chains, single = find_streams(flow, norms)
    unknown: list[Unknown] = []
    found = [_found(chain, dual) for chain, dual in _single(chains)]
    names = _names(found)
    depths = [max(_layers([b for step in one.branches for b in step if b.role != "bias"]), default=0) + 1 for one in found]
    streams = []
    index = 0
    for k, one in enumerate(found):
        other = next((depth for j, depth in enumerate(depths) if j != k), None)
        stream = _stream(one, names[k], index, other if len(found) == 2 else None, model, unknown)
        index += len(stream.sites)
        streams.append(stream)
    if not streams:
        unknown.append(Unknown("", f"{_nothing(single)} ({len(flow.ops)} operators ran, {len(norms)} norms among them)"))
    else:
        unknown += [Unknown(add.op.frame.path, OUTSIDE) for add in single]
    owner = weakref.ref(target if target is not None else model)
    for stream in streams:
        for site in stream.sites:
            site.owner = owner
    mode = "training" if model.training else "evaluation"
    return Inspection(type(model).__name__, tuple(streams), tuple(unknown), mode, len(flow.ops), model if target is None else target)


def _nothing(single: Sequence[Add]) -> str:
    """Why there is no stream."""
    if not single:
        return "no residual add was found: no operator adds to a value something that a sublayer computed from it"
    paths = ", ".join(dict.fromkeys(add.op.frame.path or "the model" for add in single[:3]))
    return (
        f"{len(single)} residual add{'s were' if len(single) > 1 else ' was'} found ({paths}{', ...' * (len(single) > 3)}), but what "
        "follows each is computed from the sum: nothing is passed on from one to the next as it is"
    )


def _found(chain: list[Add], dual: Norm | None) -> Found:
    parts = [branches(add) for add in chain]
    between = [[*reversed(after.norms)] for after in chain[1:]]
    after, final, factors = _after(chain, between)
    return Found(chain, parts, [*between, after], [*final, dual] if dual else final, factors if after else [], dual)


def _single(chains: list[list[Add]]) -> list[tuple[list[Add], Norm | None]]:
    """Each stream; and where the writes of one are also added to a second (ResiDual), the norm of the second at the end."""
    raws = [{write.path.source for add in chain for write in add.writes if write.role == "branch"} for chain in chains]
    found: list[tuple[list[Add], Norm | None]] = []
    for k, chain in enumerate(chains):
        twins = [other for j, other in enumerate(chains) if j != k and raws[j] & raws[k]]
        if not twins:
            found.append((chain, None))
        elif any(add.norms for add in chain[1:]):
            end = chain[-1].writes[0]
            norm = end.path.source.norm if end.role == "injection" else None
            joined = norm is not None and any(up(norm.x) is other[-1].out for other in twins)
            found.append((chain[:-1], norm) if joined else (chain, None))
        elif not any(add.norms for other in twins for add in other[1:]):
            found.append((chain, None))
    return found


def _after(chain: list[Add], between: list[list[Norm]]) -> tuple[list[Norm], list[Norm], list[Factor]]:
    """The norms after the last add: those that are its row's, as with the sublayers before it, and the final ones."""
    norms: list[Norm] = []
    factors: list[Factor] = []
    value = chain[-1].out
    while (norm := _next_norm(value, factors if not norms else [])) is not None:
        norms.append(norm)
        value = norm.y
    reads = [_signature(add) for add in chain]
    flat = [part for add in chain for part in branches(add)]
    layers = dict(zip((part.add for part in flat), _layers(flat), strict=True))
    alike = [k for k, signature in enumerate(reads[:-1]) if signature == reads[-1]]
    ends = [k for k in alike if layers[chain[k]] != layers[chain[k + 1]]]  # those that end a layer too
    same = ends or alike
    usual = len(between[same[-1]]) if same else int(not reads[-1][1])  # alone: after one that reads no norm it is its own
    return norms[:usual], norms[usual:], factors


def _signature(add: Add) -> tuple[Any, ...]:
    """What two adds have in common that are the same step of two layers: the module without its number, and the norms."""
    parts = branches(add)
    path = tuple(part for part in add.op.frame.path.split(".") if not part.isdigit())
    return path, any(b.reads.norms for b in parts), any(b.norm is not None for b in parts), [b.role for b in parts]


def _next_norm(value: Value, factors: list[Factor], depth: int = 0) -> Norm | None:
    """The first norm that a value goes through as it is; `factors` takes what it is multiplied by before."""
    for op in dict.fromkeys(value.users):
        if not op.outputs or depth > 8:
            continue
        for norm in {v.norm for v in _results(op) if v.norm is not None and op in v.norm.ops}:
            return norm
        out = op.outputs[0]
        passed = factor_of(op)
        if up(out) is not out or (passed is not None and passed[0] is value):
            found = _next_norm(out, factors, depth + 1)
            if found is not None:
                factors += [passed[1]] if passed is not None else []
                return found
    return None


def _results(op: Any) -> list[Value]:
    """The values made from an operator's, a few steps on."""
    seen, todo, values = set(), [op], []
    while todo and len(seen) < 40:
        here = todo.pop()
        if here in seen:
            continue
        seen.add(here)
        for out in here.outputs:
            values.append(out)
            if out.norm is None:
                todo.extend(out.users)
    return values


def _layers(parts: list[Branch]) -> list[int]:
    """The layer of each; a skip or an injection belongs to the sublayer after it, but for one within a layer."""
    usual = [part for part in parts if part.role == "branch"] or parts
    known = dict(zip(usual, layers_of(usual), strict=True))
    layers = []
    for k, part in enumerate(parts):
        before = next((known[p] for p in reversed(parts[:k]) if p in known), None)
        after = next((known[p] for p in parts[k:] if p in known), before)
        entered = next((known[p] for p in parts if p in known and p.add.x is part.raw), None)
        within = part.role == "skip" and entered is not None and entered == before  # from where its own layer began
        layers.append((before if within else after) or 0)
    return layers


def _names(found: Sequence[Found]) -> list[str]:
    """A stream is called by the module that contains it, where there are several."""
    if len(found) == 1:
        return ["stream"]
    names = []
    for one in found:
        frames = [add.op.frame for add in one.adds]
        shared = [*frames[0].chain()]
        for frame in frames[1:]:
            chain = {*frame.chain()}
            shared = [f for f in shared if f in chain]
        names.append(shared[0].path or "stream")
    counts = Counter(names)
    seen: Counter[str] = Counter()
    for k, name in enumerate(names):
        if counts[name] > 1:
            seen[name] += 1
            names[k] = f"{name} ({seen[name]})"
    return names


def _stream(
    found: Found, name: str, start: int, other_layers: int | None, model: nn.Module, unknown: list[Unknown]
) -> Stream:
    flat = [(k, branch) for k, parts in enumerate(found.branches) for branch in parts if branch.role != "bias"]
    layers = _layers([branch for _, branch in flat])
    paths = Counter(branch.module for _, branch in flat)
    calls = {branch.module: {(b.frame.call) for _, b in flat if b.module == branch.module} for _, branch in flat}
    sites, seen = [], []
    closures = [
        closure_of(add, parts, norms[0] if norms else None)
        for add, parts, norms in zip(found.adds, found.branches, found.norms_out, strict=True)
    ]
    used: Counter[str] = Counter()
    for at, ((k, branch), layer) in enumerate(zip(flat, layers, strict=True)):
        add, norms = found.adds[k], found.norms_out[k]
        try:
            row = row_of(branch, _first(norms), _scaled(found, k))
        except ValueError:
            unknown.append(Unknown(branch.module, "what the sublayer returns is multiplied by 0 before it is added"))
            row = Row(norm_out=bool(norms))
        limit = tolerance(add.x.tensor, add.out.tensor, branch.raw.tensor)
        closes = closures[k] <= limit
        notes = _notes(found, k, branch)
        path = branch.module
        many = len(calls[path]) > 1  # one module, called for several sublayers
        distinct = paths[path] == len(calls[path])
        modules = () if distinct else _children(branch)
        id_ = path if paths[path] == 1 else f"{path}#{branch.frame.call + 1}" if distinct else f"{path}/{branch.kind}"
        used[id_] += 1
        id_ = id_ or branch.kind
        if used[id_] > 1:
            id_ = f"{id_}#{used[id_]}"
        site = Site(
            id_, path, modules, branch.kind, layer, start + at, name, row, _first(branch.reads.norms if not branch.reads.direct else []),
            branch.norm, _first(norms), closures[k], closes, len(found.branches[k]), paths[path] if many and distinct else 1,
            branch.frame.call, add.op.frame.path, tuple(notes), branch.role, (found, k, branch),
        )  # fmt: skip
        sites.append(site)
        learned = tuple(_learned_names(branch))
        reads = frozenset(id(norm) for part in found.branches[k] for norm in part.reads.norms)
        reasons = _reasons(found, k, branch)
        together = sum(part.role == "branch" for part in found.branches[k])
        seen.append(naming.Seen(layer, row, branch.kind, branch.role, together, reads, learned, bool(reasons), _back(found, k, branch), _norms_inside(branch)))
        if not closes:
            unknown.append(Unknown(id_, f"{site.equation} does not close: relative error {closures[k]:.1e}, allowed {limit:.0e}"))
        unknown += [Unknown(id_, reason) for reason in reasons]
    first_add = found.adds[0]
    embedding = first_add.norms[0] if first_add.norms and first_add.source is None else None
    wiring, remarks = naming.named(seen, bool(found.final), embedding is not None, other_layers)
    if found.dual is not None and wiring is not None and wiring.name == "post_ln":
        wiring, remarks = wirings.resi_dual(), ["a second stream has the same writes and no norms; the output is the sum of both"]
    remarks += _remarks(found, seen, sites, model, wiring)
    total = _total(found, seen)
    first = found.adds[0].x.tensor
    closed = total is None or total <= tolerance(first) * max(1.0, len(found.adds) ** 0.5)
    if not closed:
        unknown.append(Unknown(name, f"x_L = x_0 + all writes does not close: relative error {total:.1e}"))
    axis, width = _axis(found)
    return Stream(
        name, width, str(first.dtype).removeprefix("torch."), tuple(sites), layers[-1] + 1, wiring, embedding,
        found.final[-1] if found.final else None, total, closed, tuple(dict.fromkeys(remarks)), found, axis,
    )  # fmt: skip


def _axis(found: Found) -> tuple[int, int]:
    """Where the features of a stream stand, counted from the end, and how many they are: as its norms or convolutions have it."""
    out = found.adds[0].out.shape
    flat = [branch for parts in found.branches for branch in parts]
    norms = [norm for branch in flat for norm in (*branch.reads.norms, branch.norm) if norm is not None]
    norms += [norm for after in found.norms_out for norm in after]
    if norms:
        width = norms[0].x.shape[-1]
        at = [k for k, n in enumerate(out) if n == width]
        return (at[-1] - len(out) if at else -1), width
    for branch in flat:
        x = branch.add.read
        for op in branch.ops:
            axis = axis_of(op.inputs[0], x, 1) if op.name in CHANNELS and op.inputs and up(op.inputs[0]) is up(x) else None
            if axis is not None and len(x.shape) == len(out):
                return axis - len(out), out[axis]
    return -1, out[-1]


def _first(norms: Sequence[Norm]) -> Norm | None:
    return norms[0] if norms else None


def _scaled(found: Found, k: int) -> list[Any]:
    """The factors of the whole sum, before its norm or, where it has none, before the next sublayer."""
    if k + 1 == len(found.adds):
        return [f for f in found.last if f.kind in ("constant", "learned")]
    after = found.adds[k + 1]
    return [f for f in (after.early if after.norms else after.late) if f.kind in ("constant", "learned")]


def _children(branch: Branch) -> tuple[str, ...]:
    """The modules in a call in which the sublayer ran."""
    found: dict[str, None] = {}
    for op in branch.ops:
        if any(op in norm.ops for norm in branch.reads.norms):
            continue
        chain = [*op.frame.chain()]
        if branch.frame in chain and op.frame is not branch.frame:
            found[chain[chain.index(branch.frame) - 1].path] = None
    return tuple(found)


def _learned_names(branch: Branch) -> list[str]:
    values = [f.value for f in branch.path.factors if f.kind == "learned" and f.value is not None]
    values += [t.scale for t in (branch.path.term, *branch.path.sums) if t.scale is not None]
    return [_name(value) for value in values]


def _name(value: Value) -> str:
    """The parameter a value was made from."""
    while value.op is not None and value.op.inputs:
        value = value.op.inputs[0]
    return value.name


def _notes(found: Found, k: int, branch: Branch) -> list[str]:
    """What the row does not say, and is in order."""
    add = found.adds[k]
    notes = []
    kinds = {factor.kind for factor in (*branch.path.factors, *add.kept.factors)}
    if "noise" in kinds:
        notes.append("dropout")
    if "mask" in kinds:
        notes.append("what is added is masked by token")
    if add.inside:
        notes.append(f"{len(add.inside)} residual add{'s' * (len(add.inside) > 1)} of its own inside")
    if len(branch.reads.norms) > 1 and not branch.reads.direct:
        notes.append(f"reads through {len(branch.reads.norms)} norms")
    if branch.role != "branch":
        notes.append(f"an {branch.role}: " + ("an earlier state of the stream" if branch.role == "skip" else "does not read this stream"))
    return notes


def _norms_inside(branch: Branch) -> bool:
    """Whether a sublayer has norms besides those of its row."""
    norms = [norm for norm in (*branch.reads.norms, branch.norm) if norm is not None]
    known = {op for norm in norms for op in norm.ops}
    return any(op.name in NORMALIZING for op in branch.ops if op not in known)


def _back(found: Found, k: int, branch: Branch) -> int:
    """For a skip: how many sublayers before the end of this add its state entered."""
    earlier = branch.raw
    for j in range(k, -1, -1):
        if found.adds[j].x is earlier:
            return sum(part.role == "branch" for parts in found.branches[j : k + 1] for part in parts)
    return 0


def _reasons(found: Found, k: int, branch: Branch) -> list[str]:
    """What is not understood of a sublayer."""
    reasons = []
    inside = [inner for inner in found.adds[k].inside if mixes(inner)]
    if any(inner.x is found.adds[k].x for inner in inside):
        reasons.append("the branch contains x + ... itself: the stream is added twice")
    if any(not reaches(found.adds[k].read, inner.x) for inner in inside if inner.before is not None):
        reasons.append("the sublayer adds to a second stream and reads it: two streams in turn, as in reversible layers")
    if found.adds[k].source is not None:
        reasons.append("x' = N(x) + f(x): the sublayer reads the stream before the norm that the residual is taken from")
    if branch.reads.norms and branch.reads.direct:
        reasons.append("reads the stream both through a norm and as it is")
    if k + 1 < len(found.adds):
        after = found.adds[k + 1]
        if found.norms_out[k] and any(f.kind in ("constant", "learned") for f in after.late):
            reasons.append("the stream is multiplied by a factor after its norm, which no row has")
        if len(found.norms_out[k]) > 1:
            reasons.append(f"{len(found.norms_out[k])} norms follow the add, one after the other")
    return reasons


def _remarks(found: Found, seen: Sequence[naming.Seen], sites: Sequence[Site], model: nn.Module, wiring: Any) -> list[str]:
    """What a reader of the model's code would not expect."""
    remarks = []
    shifted = [
        k for k, norms in enumerate(found.norms_out[:-1])
        if norms and _inside(norms[0], found.adds[k + 1]) and not _inside(norms[0], found.adds[k])
    ]  # fmt: skip
    if shifted:
        remarks.append(
            "layers begin with the norm that the residual is taken from, z = N(x), x' = z + f(z): that norm is on the stream, as in "
            "post-LN, and is counted to the sublayer before it"
        )
    shared = {site.path: site.shared for site in sites if site.shared > 1}
    if shared:
        remarks.append(f"shared weights: {', '.join(f'{path} is {n} sublayers' for path, n in shared.items())}")
    if wiring is not None:
        modules = dict(model.named_modules())
        for path in dict.fromkeys(site.add_path for site in sites):
            module = modules.get(path)
            words = "" if module is None else f"{type(module).__name__} {(type(module).__dict__.get('__doc__') or '').partition(chr(10))[0]}"
            claim = naming.says_otherwise(words, wiring)
            if claim:
                remarks.append(f"{type(module).__name__} calls itself {claim!r}, and is {wiring.name}")
    return remarks


def _inside(norm: Norm, add: Add) -> bool:
    """Whether a norm ran in the call in which an add ran, or in one made from there."""
    assert norm.y.op is not None
    return bool(add.op.frame.path) and add.op.frame in norm.y.op.frame.chain()


def _total(found: Found, seen: Sequence[naming.Seen]) -> float | None:
    """The relative error of x_L == x_0 + all writes; None where the stream is no plain sum."""
    if not all(s.row.is_sum for s in seen) or any(add.early or add.late or add.retokened for add in found.adds[1:]):
        return None
    with torch.no_grad():
        total = found.adds[0].x.tensor.detach().double()
        for k, (parts, add) in enumerate(zip(found.branches, found.adds, strict=True)):
            way = views(add.x, found.adds[k - 1].out) if k else []
            if way is None:
                return None
            for op in way:
                total = replay(op, total)
            total = operand(add.kept, total)
            for branch in parts:
                total = total + operand(branch.path, branch.path.source.tensor.detach().double())
            total = total.reshape(add.out.shape)
        return relative(found.adds[-1].out.tensor.detach(), total)


def doubled(model: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module, Any, Any]:
    """A copy in float64."""
    try:
        twin = copy.deepcopy(model).double()
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"model cannot be copied, which float64=True needs: {str(error).splitlines()[0]}") from None
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, (args, kwargs))
    return twin, args, kwargs
