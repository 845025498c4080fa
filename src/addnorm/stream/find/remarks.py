"""Remarks on streams and sublayers that are understood: properties that their rows do not express."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from addnorm._util.numbers import format_count
from addnorm.stream.dataflow.arithmetic import Factor, get_noise_mean, is_ancestor, match_terms, strip_views
from addnorm.stream.dataflow.graph import NOISE, Flow, Op, Value, find_ops_between
from addnorm.stream.dataflow.replay import relative_error
from addnorm.stream.find.adds import Add, has_mixing_branch
from addnorm.stream.find.equation_errors import get_tolerance
from addnorm.stream.find.naming import find_contradiction
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.passages import PlacedChain, format_guard
from addnorm.stream.find.reasons import scales_tokens
from addnorm.stream.find.sites import Site, Stream
from addnorm.stream.find.sublayers import Sublayer, list_parameters
from addnorm.stream.find.unexplained import list_carried_values
from addnorm.wirings.spec import Wiring

ROLES = {
    "skip": "a skip: an earlier state of the stream",
    "injection": "an injection: does not read the state to which it is added",
}
FROM_START = "an injection: computed from the start of the stream"
SCALED_START = "the norm of the embedding is multiplied by a factor"
SCALED_END = "the end of the stream is multiplied by a factor before the final norm"
MISSING = "a residual connection may be missing"
SHIFTED = (
    "layers begin with the norm of the residual, z = N(x), x' = z + f(z): this norm is on the stream, as in post-LN, and belongs "
    "to the row of the sublayer before it"
)


def remark_on_sublayer(chain: PlacedChain, sublayer: Sublayer) -> list[str]:
    """Return remarks on a sublayer: properties that its row does not express."""
    k, add, reads = sublayer.place, sublayer.add, sublayer.reads
    late = chain.adds[k + 1].late_factors if k + 1 < len(chain.adds) else []
    after = [*chain.list_factors_after(k), *(factor for factor in late if factor.kind == "mask")]
    places = {"write": sublayer.write_path.factors, "residual": add.residual_path.factors, "stream": after}
    notes = [note for what, factors in places.items() for note in _describe_factors(f"the {what}", factors)]
    if chain.passages[k + 1].is_masked and "the stream is masked by token" not in notes:
        notes.append("the stream is masked by token")
    factors = (*places["write"], *places["residual"])
    noises = [factor.value for factor in factors if factor.kind == "noise" and factor.value is not None]
    if any(get_noise_mean(noise) is None for noise in noises):
        notes.append("the operators do not show the mean of the noise; 1 is assumed")
    inner = [other for other in add.inner_adds if has_mixing_branch(other) and other.branch_input is None]
    if inner:
        notes.append(f"{format_count(len(inner), 'residual add')} inside")
    if len(reads.norms) > 1 and not reads.direct:
        notes.append(f"reads through {len(reads.norms)} norms")
    if reads.norms:
        y = strip_views(reads.norms[0].y)
        if any(strip_views(norm.x) is y for op in sublayer.ops for norm in op.norms):
            notes.append("another norm follows the one through which it reads")
    if sublayer.role == "injection" and is_ancestor(chain.adds[0].x, sublayer.raw, without=add.other_ops):
        notes.append(FROM_START)
    elif sublayer.role in ROLES:
        notes.append(ROLES[sublayer.role])
    return notes


def _describe_factors(what: str, factors: Sequence[Factor]) -> Iterator[str]:
    """Yield remarks on random factors and on factors from the model's inputs. `what` names the tensor that they multiply."""
    noise = [factor for factor in factors if factor.kind == "noise"]
    if any(map(_is_dropout, noise)):
        yield "dropout" if what == "the write" else f"dropout of {what}"
    if not all(map(_is_dropout, noise)):
        yield f"{what} is multiplied by random numbers"
    masks = [factor for factor in factors if factor.kind == "mask" and factor.value is not None]
    if not all(map(scales_tokens, masks)):
        yield f"{what} is masked by token"
    if any(map(scales_tokens, masks)):
        yield f"{what} is multiplied by a number for each token"


def _is_dropout(factor: Factor) -> bool:
    """Return whether a random factor is dropout: its mean is known, or its values are 0 and one other number."""
    if factor.value is None or get_noise_mean(factor.value) is not None:
        return True
    numbers = factor.value.tensor.detach().unique()
    return len(numbers) == 2 and bool((numbers == 0).any())


def remark_on_stream(
    chain: PlacedChain, sites: Sequence[Site], model: nn.Module, wiring: Wiring | None, flow: Flow
) -> list[str]:
    """Return remarks on a stream, such as norms in the next layer, shared weights and misleading names."""
    pairs = zip(chain.norms_out, chain.adds, chain.adds[1:], strict=False)
    is_shifted = any(
        norms and _ran_inside(norms[0], after) and not _ran_inside(norms[0], add) for norms, add, after in pairs
    )
    remarks = [SHIFTED] * is_shifted
    factors = [] if chain.norms_out[-1] else chain.end_factors
    if any(f.kind == "learned" or scales_tokens(f) or f.number != 1.0 for f in factors):
        remarks.append(SCALED_END)
    after = chain.next_norm
    if after is not None and after.is_partial:
        others = "; other tokens are read by other norms" if after.num_others else ""
        tokens = f"{len(after.tokens or ()):,} of the {after.num_tokens:,} tokens"
        remarks.append(f"the final norm reads {tokens} at the end of the stream{others}")
    start = chain.adds[0]
    if start.norms and any(factor.kind in ("constant", "learned") for factor in start.late_factors):
        remarks.append(SCALED_START)
    if len(chain.final_norms) > 1 and not chain.dual_adds:
        remarks.append(f"{len(chain.final_norms)} final norms, one after the other")
    end = chain.adds[-1].out.tensor
    odd = end.numel() - int(end.isfinite().sum())
    if odd:
        effect = "the others prove its equations" if odd < end.numel() else "they prove nothing"
        remarks.append(f"{odd:,} of the {end.numel():,} numbers at its end are NaN or infinite; {effect}")
    if not model.training:
        remarks += _list_random(chain, sites, model, flow)
    remarks += _list_detached(chain, sites)
    remarks += _list_conditions(chain)
    shared = [*_list_shared(sites)]
    if shared:
        remarks.append(f"shared weights: {', '.join(shared)}")
    modules = dict(model.named_modules()) if wiring is not None else {}
    for path in dict.fromkeys(site.add_path for site in sites):
        if wiring is None or path not in modules:
            continue
        kind = type(modules[path])
        summary = (vars(kind).get("__doc__") or "").partition("\n")[0]
        claim = find_contradiction(f"{kind.__name__} {summary}", wiring)
        if claim:
            remarks.append(f"the name or docstring of {kind.__name__} says {claim!r}, but it is {wiring.name}")
    return remarks


def _list_random(chain: PlacedChain, sites: Sequence[Site], model: nn.Module, flow: Flow) -> Iterator[str]:
    """Yield remarks on random numbers that a model in evaluation mode draws, if these numbers change its output."""
    start = chain.adds[0].x
    drawn = {site: _list_drawn(chain, site) for site in sites}
    if not (start.kind & NOISE or any(drawn.values())):
        return
    inner = next((path for path, module in model.named_modules() if module.training), None)
    remedy = "if it is dropout, let it follow self.training"
    if inner is not None:
        remedy = f"call model.eval(), since {inner} is in training mode"
    again = _run_again(flow)
    results = flow.list_results()
    if results and not any(_differs(value, again) for value in results):
        return
    end = f"{'so two runs may differ' if again is None else 'and two runs differ'}: {remedy}"
    if start.kind & NOISE and _differs(start, again):
        yield f"its start depends on random numbers in evaluation mode, {end}"
    random = [site for site, values in drawn.items() if any(_differs(value, again) for value in values)]
    if random:
        count = f"{len(random)} of its {format_count(len(sites), 'sublayer')} {'draws' if len(random) == 1 else 'draw'}"
        yield f"{count} random numbers in evaluation mode, {random[0].id} first, {end}"


def _run_again(flow: Flow) -> Flow | None:
    """Return a run with other random numbers; None if the model cannot be called again."""
    try:
        return flow.redraw() if flow.redraw is not None else None
    except Exception:  # the model may raise anything
        return None


def _differs(value: Value, again: Flow | None) -> bool:
    """Return whether a value differs in the run `again` by more than round-off; True if there is no such run."""
    op = value.op
    if again is None or op is None:
        return again is None
    other = again.ops[op.index] if op.index < len(again.ops) else None
    if other is None or other.name != op.name or value.shape != (found := other.outputs[op.outputs.index(value)]).shape:
        return True
    return relative_error(found.exact, value.exact) > get_tolerance(value.tensor.dtype)


def _list_drawn(chain: PlacedChain, site: Site) -> list[Value]:
    """Return the random numbers that are drawn for a sublayer, its write, or the stream after it."""
    add, after = site.sublayer.add, chain.list_factors_after(site.sublayer.place)
    ops = [*site.sublayer.ops, *site.sublayer.write_path.ops, *add.residual_path.ops, *(factor.op for factor in after)]
    drawn = [op.outputs[-1] for op in ops if "random" in op.traits]
    return [*drawn, *(v for op in ops for v in op.inputs if v.kind & NOISE and not v.has_data)]


def _list_shared(sites: Sequence[Site]) -> Iterator[str]:
    """Yield a text for each group of sublayers that have the same parameters."""
    users: dict[tuple[str, ...], list[Site]] = {}
    for site in sites:
        users.setdefault(tuple(list_parameters(site.sublayer)), []).append(site)
    for parameters, same in users.items():
        places = [*dict.fromkeys(site.location for site in same)]
        if parameters and len(same) > 1:
            yield (
                f"{places[0]} is {len(same)} sublayers" if len(places) == 1 else f"{' and '.join(places)} are the same"
            )


def _list_conditions(chain: PlacedChain) -> Iterator[str]:
    """Yield remarks on clamps that did not bind in this run, and on tokens that are chosen by values of the stream."""
    for guard, count in Counter(format_guard(op) for passage in chain.passages for op in passage.idle).items():
        places = f", at {count} places," if count > 1 else ""
        yield f"{guard} on the stream{places} did not bind in this run: the equations hold only where it does not"
    names = dict.fromkeys(op.name for passage in chain.passages for op in passage.chosen)
    if names:
        yield f"its tokens are chosen or ordered by what is computed from the stream itself ({', '.join(names)})"


def _list_detached(chain: PlacedChain, sites: Sequence[Site]) -> list[str]:
    """Return remarks on residuals, parts of residuals, and writes through which no gradient passes."""
    detached: dict[str, list[Site]] = {"the residual": [], "a part of the residual": [], "the write": []}
    for site in sites:
        k, add = site.sublayer.place, site.sublayer.add
        inner = {op for part in chain.sublayers[k] for op in (*part.ops, *part.write_path.ops)}
        inner -= {*add.residual_path.ops}  # a view that both read
        start = chain.adds[k - 1].out if k else add.x
        cuts = {op for op in find_ops_between(start, add.out, inner) if op.name == "detach"}
        is_whole = bool(cuts) and not is_ancestor(start, add.out, inner | cuts)
        if cuts and (k or not is_whole):  # x_0 may be detached
            detached["the residual" if is_whole else "a part of the residual"].append(site)
        if any(op.name == "detach" for op in site.sublayer.write_path.ops):
            detached["the write"].append(site)
    return [
        f"{part} of {len(found)} of its {format_count(len(sites), 'sublayer')} is detached, {found[0].id} first: no gradient "
        "passes through it"
        for part, found in detached.items()
        if found
    ]


def _ran_inside(norm: Norm, add: Add) -> bool:
    """Return whether a norm ran in the module call that runs an add, or in a call inside this call."""
    assert norm.y.op is not None
    return bool(add.op.frame.path) and add.op.frame in norm.y.op.frame.chain()


def remark_on_start(
    chain: PlacedChain, sites: Sequence[Site], wiring: Wiring | None, before: Sequence[Stream]
) -> list[str]:  # fmt: skip
    """Return a remark if a residual connection may be missing before the first add of a stream.

    The stream then begins with a module's output, while similar modules add their output to the stream.
    """
    x_0 = chain.adds[0].x
    other = next((one for one in reversed(before) if is_ancestor(one.chain.find_end(-1), x_0)), None)
    if other is None or chain.layout.width != other.width or wiring is None or other.wiring is None:
        return []
    if wiring.name != other.wiring.name:
        return []
    end = other.chain.find_end(-1)
    like = {_without_numbers(site.path): site.path for site in (*other.sites, *sites) if site.path}
    modules: dict[str, set[Op]] = {}  # by path: the operators that lead from the end to x_0
    for op in reversed(find_ops_between(end, x_0)):
        for frame in op.frame.chain():
            modules.setdefault(frame.path, set()).add(op)
    for path, ops in modules.items():
        similar = like.get(_without_numbers(path))
        terms = (term for op in ops for term in match_terms(op) or ())  # of adds to the end, or to a function of it
        if similar is None or any(end in list_carried_values(term.value) for term in terms):
            continue
        if not is_ancestor(end, x_0, without=ops):
            what = f"what {path} computes from the end of {other.name}"
            return [f"it begins with {what} and does not add to it, as {similar} does: {MISSING}"]
    return []


def _without_numbers(path: str) -> str:
    return re.sub(r"\d+", "*", path)
