"""Numbers of record, decompose and ablate compared with those of the grammar's own forward in float64.

Tolerances are relative and those of float32 round-off through at most nine sublayers.
"""

import copy
from dataclasses import replace

import torch

import addnorm
from addnorm import Learned
from support.instrumented_model import REFERENCE, compare_write, record, similarity
from support.random_models.chains import Chain

TOLERANCE = 1e-4
LEARNED = "multiplies the stream by more than a constant"  # a learned factor of the stream has no balance sheet
ROLES = {"in": "x", "read": "read", "raw": "raw", "write": "write", "out": "out"}  # role -> attribute of `TracedSite`


def trace_by_hand(case, without=None):
    """Return the values of a model by hand, in float64."""
    with torch.no_grad():
        inputs = (x.double() if x.is_floating_point() else x for x in case.inputs)
        return case.trace(copy.deepcopy(case.model).double(), *inputs, without=without)


def list_branches(inspection):
    """Return the sites of sublayers."""
    return [site for site in inspection.sites if site.role == "branch"]


def compare_recording(case, inspection, tolerance=TOLERANCE):
    """Yield the differences of a recording from the numbers by hand."""
    trace = trace_by_hand(case)
    rec = record(case.model, *case.inputs)
    constructs = case.answer.constructs
    mixes = any(site.kind != "feed-forward" for site in inspection.sites)
    # A flat tensor, or one whose tokens come first and are mixed by no sublayer, does not show which tokens are of one sample.
    hides_samples = not constructs.isdisjoint({"layout: flat", "addmm"}) or (
        not constructs.isdisjoint({"start: transposed", "layout: sequence"}) and not mixes
    )
    numbers = {(row.site, row.role, row.statistic): row.value for row in rec.table()}
    has_biases = any(site.role == "injection" for site in inspection.sites)  # a bias after an add is a site of its own
    for site, values in zip(list_branches(inspection), trace.sites, strict=True):
        for role, name, expected in _statistics_by_hand(values):
            if (name == "similarity" and hides_samples) or (role == "out" and has_biases):
                continue
            actual = numbers.get((site.id, role, name))
            if actual is None or not (
                actual == expected or abs(actual - expected) <= tolerance * max(1.0, abs(expected))
            ):
                yield f"{site.id}: {role} {name} {actual}, by hand {expected:.6g}"
    if trace.components:
        yield from _compare_balance(rec, inspection, trace, tolerance)


def _statistics_by_hand(site):
    """Yield role, name and value of the statistics by their definition."""
    for role, attribute in ROLES.items():
        for name, formula in REFERENCE.items():
            yield role, name, formula(getattr(site, attribute))
    for name, value in compare_write(site.x, site.write.expand_as(site.x)).items():
        yield "write", name, value
    tokens = site.out.flatten(1, -2)
    if tokens.shape[1] > 1:
        yield "out", "similarity", similarity(tokens)


def _compare_balance(rec, inspection, trace, tolerance):
    """Yield the differences of the balance sheet: for each source the mean of <c, x> / |x|."""
    sheet = rec.balances[inspection.streams[0].name]
    if sheet.reason:
        is_learned = any(isinstance(site.row.a, Learned) for site in inspection.sites)
        if not (is_learned and LEARNED in sheet.reason):
            yield f"balance: {sheet.reason}"
        return
    end = torch.stack([part.expand_as(trace.sites[-1].out) for part in trace.components]).sum(0)
    amounts = dict(zip(sheet.sources, sheet.amounts, strict=True))
    for source, part in _name_components(inspection, trace):
        expected = float(((part * end).sum(-1) / end.norm(dim=-1)).mean().detach())
        others = [site.id for site in inspection.sites if site.role == "injection"] if source == "norm biases" else []
        actual = sum(amounts.get(name, 0.0) for name in (source, *others))
        if not abs(actual - expected) <= tolerance * max(1.0, abs(expected)):
            yield f"balance of {source}: {actual}, by hand {expected:.6g}"


def _name_components(inspection, trace):
    """Return the components by hand with the names of their sources; bias sites are parts of the biases."""
    ids = [site.id for site in list_branches(inspection)]
    return list(zip(("x_0", *ids, "norm biases"), trace.components, strict=True))


def compare_components(case, inspection, tolerance=TOLERANCE):
    """Yield the differences of `decompose` from the components by hand."""
    trace = trace_by_hand(case)
    parts = addnorm.decompose(case.model, *case.inputs)
    canonical = _make_canonical(case)
    actual = {name: canonical(part) for name, part in parts.components().items()}
    extra = {site.id for site in inspection.sites if site.role == "injection"}
    biases = [part for name, part in actual.items() if name == "norm biases" or name in extra]
    for source, component in _name_components(inspection, trace):
        part = actual.get(source) if source != "norm biases" else sum(biases) if biases else None
        expected = component.expand_as(trace.sites[-1].out)
        size = float(trace.sites[-1].out.norm())
        if part is None:
            if float(expected.norm()) > tolerance * size:
                yield f"component {source} is missing"
        elif part.shape != expected.shape or not float((part - expected).norm()) <= tolerance * size:
            yield f"component {source} {tuple(part.shape)} differs from that by hand {tuple(expected.shape)}"


def _make_canonical(case):
    """Return a function from a tensor with its features last to (B, T, D)."""
    if not isinstance(case.model, Chain):
        return lambda t: t
    layout = case.model.options.layouts[-1]
    return replace(layout, name=layout.name.removesuffix("channels").strip() or "batch").undo


def compare_ablations(case, inspection, tolerance=TOLERANCE):
    """Yield the differences of `ablate`, at every second site, from the forward by hand without that write."""
    for k, site in [*enumerate(list_branches(inspection))][::2]:
        with addnorm.ablate(site), torch.no_grad():
            actual = case.model(*case.inputs)
        expected = trace_by_hand(case, without=k).end
        error = float((actual - expected).norm() / expected.norm())
        if not error <= tolerance:
            yield f"ablate {site.id}: relative error {error:.1e}"
