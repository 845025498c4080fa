"""Properties that rows cannot express: notes and remarks about streams, reasons why a sublayer or a model is not understood."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from addnorm._util.numbers import format_count
from addnorm.stream.dataflow.graph import DATA, PARAMETER, Flow, Op, Value
from addnorm.stream.find.adds import Add, has_mixing_branch
from addnorm.stream.find.chain import Chain
from addnorm.stream.find.inspection import Site, Unknown
from addnorm.stream.find.naming import find_contradiction
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.operators import PRODUCTS, get_noise_mean, is_ancestor, match_factor, match_terms, strip_views
from addnorm.stream.find.sublayers import Sublayer
from addnorm.wirings.spec import Wiring

__all__ = ["explain_leftovers", "explain_no_stream", "list_notes", "list_reasons", "list_remarks"]

LONE_ADD = "a single add x + f(x): no other add continues its sum, and no norm over the features belongs to it"
NO_ADD = "no residual add was found: no operator adds to a value the output of a sublayer that reads the value"
GATED = "x' = g * x + ... with a gate g computed from the data, which no row expresses (a highway network, a recurrent cell)"
MIXED = "x' = A x + ... with a matrix A that mixes states, which no row expresses (hyper-connections)"
SEVERAL = "a sum of three or more values, some of which are computed from others, which no row expresses"

ROLES = {
    "skip": "a skip: an earlier state of the stream",
    "injection": "an injection: does not read this stream",
}
TWICE = "the branch itself contains x + ...: the stream is added twice"
SECOND = "the sublayer adds to a second stream and reads that one: two streams in turn, as in reversible layers"
BESIDE = "x' = N(x) + f(x): the sublayer reads the stream before the norm of the residual"
BOTH = "the sublayer reads the stream both with and without a norm"
SCALED = "the stream is multiplied by a factor after its norm, which no row expresses"
SHIFTED = (
    "layers begin with the norm of the residual, z = N(x), x' = z + f(z): this norm is on the stream, as in post-LN, and belongs "
    "to the row of the sublayer before it"
)


def explain_leftovers(
    flow: Flow, norms: Sequence[Norm], adds: Sequence[Add], chains: Sequence[Chain] = ()
) -> list[Unknown]:
    """Explain the adds and sums that continue a value and are in no stream, one reason each."""
    known = _find_inner_ops(flow, chains) | {op for norm in norms for op in norm.ops}
    reasons: dict[str, list[Op]] = {}
    for add in adds:
        if add.op not in known:
            reasons.setdefault(LONE_ADD, []).append(add.op)
    for op in flow.ops:
        reason = None if op in known else _explain_sum(op)
        if reason is not None:
            reasons.setdefault(reason, []).append(op)
    return [
        Unknown(ops[0].frame.path, f"{reason}; there are {len(ops)}" if len(ops) > 1 else reason)
        for reason, ops in reasons.items()
    ]


def explain_no_stream(flow: Flow, norms: Sequence[Norm], adds: Sequence[Add]) -> list[Unknown]:
    """Explain why a model has no stream."""
    text = f"{NO_ADD} ({len(flow.ops)} operators ran, {len(norms)} norms among them)"
    return explain_leftovers(flow, norms, adds) or [Unknown("", text)]


def _find_inner_ops(flow: Flow, chains: Sequence[Chain]) -> set[Op]:
    """Return the operators of streams and sublayers, and those that use intermediate values of sublayers (a cache, say)."""
    parts = [(chain.adds[k], sublayer) for chain in chains for k, sublayer in chain.numbered()]
    inner = {op for add, sublayer in parts for op in (add.op, *sublayer.ops, *sublayer.write_path.ops)}
    ends = {value for add, sublayer in parts for value in (sublayer.raw, sublayer.write_path.source, add.out)}
    intermediate = (
        {out for _, sublayer in parts for op in sublayer.ops for out in op.outputs}
        - {strip_views(end) for end in ends}
        - ends
    )
    for op in flow.ops:
        if op not in inner and any(value in intermediate for value in op.inputs):
            inner.add(op)
            intermediate.update(op.outputs)
    return inner


def _explain_sum(op: Op) -> str | None:
    """Explain why a sum that continues a value is not a residual add; None for other operators."""
    if op.name == "sum" and op.inputs and op.inputs[0].op is not None and op.inputs[0].op.name == "stack":
        parts = op.inputs[0].op.inputs
        return SEVERAL if len(parts) > 2 and any(is_ancestor(parts[0], part) for part in parts[1:]) else None
    terms = match_terms(op)
    for p, q in (terms, terms[::-1]) if terms is not None else ():
        product = strip_views(p.value).op
        if product is None or len(product.inputs) < 2:
            continue
        for x, factor in (product.inputs[:2], product.inputs[1::-1]):
            if math.prod(x.shape) != math.prod(op.outputs[0].shape) or not is_ancestor(x, q.value):
                continue
            if product.name == "mul" and _is_activation(factor):
                return GATED
            if product.name in PRODUCTS:
                return MIXED
    return None


def _is_activation(value: Value) -> bool:
    return value.kind & (PARAMETER | DATA) == PARAMETER | DATA


def list_notes(chain: Chain, k: int, sublayer: Sublayer) -> list[str]:
    """Return the valid properties of a sublayer of add k that its row does not express."""
    add, reads = chain.adds[k], sublayer.reads
    factors = (*sublayer.write_path.factors, *add.residual_path.factors)
    kinds = {factor.kind for factor in factors}
    notes = ["dropout"] * ("noise" in kinds) + ["the write is masked by token"] * ("mask" in kinds)
    noises = [factor.value for factor in factors if factor.kind == "noise" and factor.value is not None]
    if any(get_noise_mean(noise) is None for noise in noises):
        notes.append("the operators do not show the mean of the noise; 1 is assumed")
    if add.inner_adds:
        notes.append(f"{format_count(len(add.inner_adds), 'residual add')} inside")
    if len(reads.norms) > 1 and not reads.direct:
        notes.append(f"reads through {len(reads.norms)} norms")
    if reads.norms:
        y = strip_views(reads.norms[0].y)
        if any(strip_views(norm.x) is y for op in sublayer.ops for norm in op.norms):
            notes.append("another norm follows the one through which it reads")
    if sublayer.role in ROLES:
        notes.append(ROLES[sublayer.role])
    return notes


def list_reasons(chain: Chain, k: int, sublayer: Sublayer) -> list[str]:
    """Return the reasons why a sublayer of add k is not understood."""
    add = chain.adds[k]
    inner = [other for other in add.inner_adds if has_mixing_branch(other)]
    is_last = k + 1 == len(chain.adds)
    num_norms = 0 if is_last else len(chain.norms_out[k])
    late = [] if is_last else chain.adds[k + 1].late_factors
    reasons = {
        TWICE: _adds_twice(add, sublayer, inner),
        SECOND: _reads_other_stream(add, sublayer, inner),
        BESIDE: add.branch_input is not None,
        BOTH: sublayer.reads.norms and sublayer.reads.direct,
        SCALED: num_norms and any(factor.kind in ("constant", "learned") for factor in late),
        f"{num_norms} norms follow the add, one after the other": num_norms > 1,
    }
    return [reason for reason, applies in reasons.items() if applies]


def _adds_twice(add: Add, sublayer: Sublayer, inner: Sequence[Add]) -> bool:
    """Return whether the write is, up to norms and factors, a sum of x and another term."""
    sums = {other.out: other for other in inner}
    value = strip_views(sublayer.write_path.source)
    while value is not add.x:
        product = match_factor(value.op) if value.op is not None else None
        if value in sums:
            value = sums[value].x
        elif value.norm is not None:
            value = value.norm.x
        elif product is not None:
            value = product[0]
        else:
            return False
        value = strip_views(value) if value is not add.x else value
    return True


def _reads_other_stream(add: Add, sublayer: Sublayer, inner: Sequence[Add]) -> bool:
    """Return whether the sublayer reads the stream only through another stream, to which it adds first."""
    others = {other.op for other in inner if other.previous is not None and not is_ancestor(add.read, other.x)}
    return bool(others) and not is_ancestor(add.read, sublayer.raw, without=others)


def list_remarks(chain: Chain, sites: Sequence[Site], model: nn.Module, wiring: Wiring | None) -> list[str]:
    """Return what readers of the model's code would not expect: norms in the next layer, shared weights, wrong names."""
    pairs = zip(chain.norms_out, chain.adds, chain.adds[1:], strict=False)
    is_shifted = any(
        norms and _ran_inside(norms[0], after) and not _ran_inside(norms[0], add) for norms, add, after in pairs
    )
    remarks = [SHIFTED] * is_shifted
    shared = {site.path: site.shared for site in sites if site.shared > 1}
    if shared:
        remarks.append(f"shared weights: {', '.join(f'{path} is {n} sublayers' for path, n in shared.items())}")
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


def _ran_inside(norm: Norm, add: Add) -> bool:
    """Return whether a norm ran in the call of an add, or in a call made from there."""
    assert norm.y.op is not None
    return bool(add.op.frame.path) and add.op.frame in norm.y.op.frame.chain()
