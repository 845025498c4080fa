"""`inspect`: which residual wiring a model has, found by the data flow of one run and proven by computing it again.

Nothing is judged by the names of modules or classes. The model runs once on the inputs given; every operator is seen (flow.py);
norms are recognized by their formula (norms.py), residual adds by what depends on what (adds.py), and each row that comes of
it (sites.py) is computed in float64 from what the sublayer returned and compared with the stream the model has (closure.py).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from addnorm.nn.wiring import Row
from addnorm.stream import naming
from addnorm.stream.adds import Add, find_streams
from addnorm.stream.closure import closure_of, operand, relative, tolerance
from addnorm.stream.flow import Capture, Flow, Value
from addnorm.stream.inspection import Inspection, Site, Stream, Unknown
from addnorm.stream.norms import Norm, find_norms
from addnorm.stream.ops import factor_of, up
from addnorm.stream.sites import Branch, branches, layers_of, row_of

__all__ = ["Found", "inspect"]

PARTS = ("slice", "select", "index", "narrow", "gather", "index_select", "mean")  # a norm of some tokens is still the final norm
UNUSUAL = "addnorm.inspect(model, *args, **kwargs)"


@dataclass(eq=False)
class Found:
    """A stream as values of the run: what `record`, `decompose` and `ablate` work with."""

    adds: list[Add]
    branches: list[list[Branch]]
    norms_out: list[list[Norm]]  # after each add, in the order in which they are applied
    final: list[Norm]


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
        runs, args, kwargs = _double(runs, args, kwargs)
    with torch.no_grad():
        flow = capture(runs, args, kwargs)
    return understand(runs, flow, target=model)


def capture(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
    """The data flow of one call."""
    return Capture(model).run(args, kwargs)


def understand(model: nn.Module, flow: Flow, target: nn.Module | None = None) -> Inspection:
    """What a data flow says."""
    norms = find_norms(flow)
    chains = find_streams(flow, norms)
    unknown: list[Unknown] = []
    found = [_found(chain) for chain in chains]
    names = _names(found)
    depths = [max(layers_of([b for step in one.branches for b in step]), default=0) + 1 for one in found]
    streams = []
    index = 0
    for k, one in enumerate(found):
        other = next((depth for j, depth in enumerate(depths) if j != k), None)
        stream = _stream(one, names[k], index, other if len(found) == 2 else None, model, unknown)
        index += len(stream.sites)
        streams.append(stream)
    if not streams:
        reason = "no residual add was found: no operator adds to a value something that a sublayer computed from it"
        unknown.append(Unknown("", f"{reason} ({len(flow.ops)} operators ran, {len(norms)} norms among them)"))
    mode = "training" if model.training else "evaluation"
    return Inspection(type(model).__name__, tuple(streams), tuple(unknown), mode, len(flow.ops), target or model)


def _found(chain: list[Add]) -> Found:
    parts = [branches(add) for add in chain]
    between = [[*reversed(after.norms)] for after in chain[1:]]
    after, final = _after(chain, between)
    return Found(chain, parts, [*between, after], final)


def _after(chain: list[Add], between: list[list[Norm]]) -> tuple[list[Norm], list[Norm]]:
    """The norms after the last add: those that are its row's, as with the sublayers before it, and the final ones."""
    norms: list[Norm] = []
    value = chain[-1].out
    while (norm := _next_norm(value)) is not None:
        norms.append(norm)
        value = norm.y
    if len(chain) > 1:
        frames = [add.op.frame.path.rstrip("0123456789") for add in chain]
        alike = [len(found) for found, add in zip(between, chain, strict=False) if _same_place(add, chain[-1])]
        usual = alike[-1] if alike else len(between[-1])
        del frames
    else:
        reads = branches(chain[0])
        usual = 0 if any(b.reads.norms and not b.reads.direct for b in reads) else 1
    return norms[:usual], norms[usual:]


def _same_place(add: Add, last: Add) -> bool:
    """Whether two adds are the same step of two layers."""
    strip = lambda path: [part for part in path.split(".") if not part.isdigit()]  # noqa: E731 - used twice, here
    same_module = strip(add.op.frame.path) == strip(last.op.frame.path)
    return same_module and [b.kind for b in branches(add)] == [b.kind for b in branches(last)]


def _next_norm(value: Value, depth: int = 0) -> Norm | None:
    """The first norm that a value goes through as it is."""
    for op in dict.fromkeys(value.users):
        if not op.outputs or depth > 8:
            continue
        out = op.outputs[0]
        for norm in {v.norm for o in [op] for v in _results(o) if v.norm is not None and o in v.norm.ops}:
            return norm
        passed = factor_of(op)
        if up(out) is not out or op.name in PARTS or (passed is not None and passed[0] is value and passed[1].kind != "learned"):
            found = _next_norm(out, depth + 1)
            if found is not None:
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
    flat = [(k, branch) for k, parts in enumerate(found.branches) for branch in parts]
    layers = layers_of([branch for _, branch in flat])
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
            row = row_of(branch, norms[0] if norms else None)
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
        seen.append(naming.Seen(layer, row, branch.kind, branch.role, len(found.branches[k]), reads, learned))
        if not closes:
            unknown.append(Unknown(id_, f"{site.equation} does not close: relative error {closures[k]:.1e}, allowed {limit:.0e}"))
        unknown += [Unknown(id_, reason) for reason in _reasons(found, k, branch)]
    embedding = found.adds[0].norms[0] if found.adds[0].norms else None
    wiring, remarks = naming.named(seen, bool(found.final), embedding is not None, other_layers)
    remarks += _remarks(found, seen, sites, model, wiring)
    total = _total(found, seen)
    first = found.adds[0].x.tensor
    closed = total is None or total <= tolerance(first) * max(1.0, len(found.adds) ** 0.5)
    return Stream(
        name, first.shape[-1], str(first.dtype).removeprefix("torch."), tuple(sites), layers[-1] + 1, wiring, embedding,
        found.final[-1] if found.final else None, total, closed, tuple(dict.fromkeys(remarks)), found,
    )  # fmt: skip


def _first(norms: Sequence[Norm]) -> Norm | None:
    return norms[0] if norms else None


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


def _reasons(found: Found, k: int, branch: Branch) -> list[str]:
    """What is not understood of a sublayer."""
    reasons = []
    if branch.reads.norms and branch.reads.direct:
        reasons.append("reads the stream both through a norm and as it is")
    if k + 1 < len(found.adds):
        scaled = [f for f in found.adds[k + 1].scaled if f.kind in ("constant", "learned")]
        if scaled:
            reasons.append("the stream is multiplied by a factor after the add, which no row has")
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
        which = "the residual" if len(shifted) == len(found.adds) - 1 else f"in {len(shifted)} of {len(found.adds)} sublayers the residual"
        remarks.append(
            f"{which} is taken from the normed input, z = N(x), x' = z + f(z): each of these norms is on the stream, as in "
            "post-LN, and is counted to the sublayer before it"
        )
    shared = {site.path: site.shared for site in sites if site.shared > 1}
    if shared:
        remarks.append(f"shared weights: {', '.join(f'{path} is {n} sublayers' for path, n in shared.items())}")
    if wiring is not None:
        modules = dict(model.named_modules())
        for path in dict.fromkeys(site.add_path for site in sites):
            module = modules.get(path)
            words = "" if module is None else f"{type(module).__name__} {type(module).__dict__.get('__doc__') or ''}"
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
    if not all(s.row.is_sum for s in seen) or any(add.scaled for add in found.adds[1:]):
        return None
    with torch.no_grad():
        first = found.adds[0]
        total = operand(first.kept, first.x.tensor.detach().double())
        for parts, add in zip(found.branches, found.adds, strict=True):
            total = total.reshape(add.out.shape)
            for branch in parts:
                total = total + operand(branch.path, branch.path.source.tensor.detach().double())
        return relative(found.adds[-1].out.tensor.detach(), total)


def _double(model: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module, Any, Any]:
    """A copy in float64."""
    try:
        twin = copy.deepcopy(model).double()
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"model cannot be copied, which float64=True needs: {str(error).splitlines()[0]}") from None
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, (args, kwargs))
    return twin, args, kwargs
