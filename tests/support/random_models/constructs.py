"""Constructs besides chains: one function for each, from a kit to a random model with its answer."""

from dataclasses import replace

import torch
from torch import nn

from support.random_models.graphs import POST, PRE, Graph, Kit, flatten, through
from support.random_models.model import Trace, TracedSite
from support.random_models.sublayers import Mlp

CONSTRUCTS = {}


def construct(name):
    """Register a function under the name of its construct."""

    def register(make):
        CONSTRUCTS[name] = make
        return make

    return register


# --- several sublayers of an add ------------------------------------------------------------------------------------------


@construct("parallel sublayers")
def parallel(kit):
    norms = kit.rng.choice((1, 2))
    add = kit.rng.choice((
        lambda x, a, f: x + a + f,
        lambda x, a, f: x + (a + f),
        lambda x, a, f: a + f + x,
        lambda x, a, f: x + f.add_(a),
        lambda x, a, f: x + torch.stack((a, f)).sum(0),
    ))  # fmt: skip
    layers, last = kit.parts()

    def run(model, x):
        for one, two in model.layers:
            first = one.norm_in(x)
            x = add(x, one.f(first), two.f(two.norm_in(x) if norms == 2 else first))
        return model.last(x)

    def trace(model, x, without=None):
        start, sites = x, []
        for one, two in model.layers:
            first = one.norm_in.by_hand(x)
            reads = (first, two.norm_in.by_hand(x) if norms == 2 else first)
            raws = [step.f.by_hand(read) for step, read in zip((one, two), reads, strict=True)]
            kept = [raw for k, raw in enumerate(raws, len(sites)) if k != without]
            out = x + sum(kept)
            sites += [TracedSite(x, read, raw, raw, out) for read, raw in zip(reads, raws, strict=True)]
            x = out
        return Trace(start, sites, model.last.by_hand(x))

    answers = kit.sites(layers, parallel=2)
    if norms == 1:
        answers = [replace(site, norm_in=answers[k - k % 2].norm_in) for k, site in enumerate(answers)]
        for _, two in layers:
            two.norm_in = None
    model = Graph(run, layers=layers, last=last)
    return kit.build(model, [kit.input()], kit.stream(answers, "parallel", final=last), trace=trace)


@construct("addmm")
def fused_product(kit):
    """Build adds inside the last product of a feed-forward: x + h W as torch.addmm(x, h, W)."""
    layers, last = kit.layers("ff"), kit.norm()
    for step in flatten(layers):
        step.f = Mlp(kit.layout)
        step.f.down = nn.Linear(2 * kit.d, kit.d, bias=False)

    def step(model, k, part, x):
        h = part.f.act(part.f.up(part.norm_in(x))).flatten(0, 1)
        return torch.addmm(x.flatten(0, 1), h, part.f.down.weight.T).view_as(x)

    return kit.loop(layers, step, by_hand=True, stream=kit.stream(kit.sites(layers, path=""), final=last), last=last)


# --- several streams ------------------------------------------------------------------------------------------------------


@construct("two towers")
def towers(kit):
    plans = kit.rng.choices((PRE, POST), k=2)
    one, two = ("pre_ln" if plan is PRE else "post_ln" for plan in plans)
    left, right = (kit.layers(plan=plan) for plan in plans)

    def run(model, x, y):
        x, y = through(flatten(model.left), x), through(flatten(model.right), y)
        return x.mean(1) @ y.mean(1).mT

    return kit.several(run, ("left", one, ""), ("right", two, ""), left=left, right=right)


def _two_streams(kit, layer, letters="cf"):
    """Build two pre-LN streams whose layers `layer(left, right, x, y)` runs."""
    left, right, last, end = kit.layers(letters), kit.layers(letters), kit.norm(), kit.norm()

    def run(model, x, y):
        for one, two in zip(model.left, model.right, strict=True):
            x, y = layer(one, two, x, y)
        return model.last(x), model.end(y)

    ends = {"left": "last", "right": "end"}
    parts = [(path, "pre_ln", end) for path, end in ends.items()]
    return kit.several(run, *parts, left=left, right=right, last=last, end=end)


@construct("two streams that read each other")
def crossing(kit):
    def layer(one, two, x, y):
        x, y = one[0].run(x, y), two[0].run(y, x)
        return one[1].run(x), two[1].run(y)

    return _two_streams(kit, layer)


@construct("joint attention of two streams")
def joint(kit):
    def layer(one, two, x, y):
        both = one[0].f(torch.cat((one[0].norm_in(x), two[0].norm_in(y)), 1))
        return one[1].run(x + both[:, : x.shape[1]]), two[1].run(y + both[:, x.shape[1] :])

    result = _two_streams(kit, layer, "af")
    model, (left, right) = result.model, result.answer.streams
    for part in model.right:  # the attention is the other stream's
        part[0].f = None
    sites = [
        replace(site, path=site.path.replace("right", "left")) if k % 2 == 0 else site
        for k, site in enumerate(right.sites)
    ]
    result.answer = replace(result.answer, streams=(left, replace(right, sites=tuple(sites))))
    return result


@construct("x_L read by another stream")
def read_by_another(kit):
    """Build a stream whose end is read by its final norm, and before that by a sublayer of another stream through a norm."""
    layers, other, last, context, end = kit.layers(), kit.layers("cf", num_layers=2), kit.norm(), kit.norm(), kit.norm()

    def run(model, x, y):
        x = through(flatten(model.layers), x)
        memory = model.context(x)
        for c, f in model.other:
            y = f.run(c.run(y, memory))
        return model.last(x), model.end(y)

    modules = {"layers": layers, "other": other, "last": last, "context": context, "end": end}
    return kit.several(run, ("layers", "pre_ln", "last"), ("other", "pre_ln", "end"), **modules)


@construct("stages of different width")
def stages(kit):
    one = kit.layers()
    wide = Kit(kit.rng, kit.seed, kit.name)
    wide.sizes = replace(kit.sizes, features=kit.d + 4)
    wide.layout = replace(kit.layout, sizes=wide.sizes)
    two, between, last = wide.layers(), nn.Linear(kit.d, kit.d + 4), wide.norm()

    def run(model, x):
        x = model.between(through(flatten(model.one), x))
        return model.last(through(flatten(model.two), x))

    streams = kit.stream(kit.sites(one, "one")), wide.stream(wide.sites(two, "two"), final=last)
    return kit.build(Graph(run, one=one, between=between, two=two, last=last), [kit.input()], *streams)
