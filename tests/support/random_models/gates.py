"""Constructs with gates and conditions, with several states, and with mistakes: rows describe few of them."""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from addnorm import Row
from support.random_models.constructs import construct
from support.random_models.graphs import POST, PRE, Graph, flatten, through
from support.random_models.rows import Plan

SANDWICH = Plan(norm_in=True, norm_branch=True)


def _undescribed(kit, step, reason, plan=PRE, **modules):
    """Build a model whose sublayers run `step(model, k, part, x)`; no row expresses them."""
    return kit.loop(kit.layers(plan=plan), step, facts={"reason": reason}, last=kit.norm(), **modules)


# --- gates ----------------------------------------------------------------------------------------------------------------


@construct("highway gate")
def highway(kit):
    how = kit.rng.choice(("t y + (1 - t) x", "x + t (y - x)", "lerp", "(1 - t) x + t y, two gates"))

    def step(model, k, part, x):
        y = part.branch(x)
        t = torch.sigmoid(model.gates[k](x if k % 2 else part.norm_in(x)))
        match how:
            case "x + t (y - x)":
                return x + t * (y - x)
            case "lerp":
                return torch.lerp(x, y, t)
            case "t y + (1 - t) x":
                return t * y + (1 - t) * x
        return torch.sigmoid(model.others[k](x)) * x + t * y

    gates, others = kit.linears(), kit.linears()
    return _undescribed(kit, step, "the stream is multiplied by a gate of the data", gates=gates, others=others)


@construct("gate of the stream on the write")
def write_gate(kit):
    """Build x + sigmoid(W x) f(N(x)): the write depends on the stream both with and without its norm."""

    def step(model, k, part, x):
        return x + torch.sigmoid(model.gates[k](x)) * part.branch(x)

    return _undescribed(kit, step, "the sublayer reads the stream with and without its norm", gates=kit.linears())


@construct("condition: shift, scale and gate")
def adaptive_norm(kit):
    """Build adaLN: a condition changes what sublayers read, and what they write; both are parts of the sublayer."""
    layers, last = kit.parts()
    maps = nn.ModuleList(nn.Linear(5, 3 * kit.d) for _ in flatten(layers))

    def step(model, k, part, x, c):
        shift, scale, gate = F.silu(model.maps[k](c))[:, None].chunk(3, -1)
        return x + gate * part.f(part.norm_in(x) * (1 + scale) + shift)

    stream = kit.stream(kit.sites(layers, path=""), final=last)
    inputs = [kit.input(), kit.noise(kit.sizes.batch, 5)]
    return kit.loop(layers, step, inputs=inputs, stream=stream, last=last, maps=maps)


@construct("condition: gate of a sandwich")
def gated_sandwich(kit):
    """Build x + tanh(g(c)) N(f(N(x))) (Lumina): the second norm is no part of the sublayer."""

    def step(model, k, part, x, c):
        return x + torch.tanh(model.maps[k](c)).unsqueeze(1) * part.branch(x)

    maps, condition = kit.linears(inputs=5), kit.noise(kit.sizes.batch, 5)
    layers, last = kit.layers(plan=SANDWICH), kit.norm()
    facts = {"reason": "a gate of a condition multiplies the normed write", "words": ("gate", "condition")}
    stream = kit.stream(kit.sites(layers, row=None), "sandwich")
    return kit.loop(layers, step, inputs=[kit.input(), condition], stream=stream, facts=facts, last=last, maps=maps)


# --- several states -------------------------------------------------------------------------------------------------------


@construct("reversible pair")
def reversible(kit):
    layers, last = kit.parts()
    how = kit.rng.choice(("two inputs", "sum", "cat"))

    def run(model, x, *other):
        a, b = x, other[0] if other else x
        joined = torch.cat((a, b), -1)
        for f, g in model.layers:
            a, b = joined.chunk(2, -1) if how == "cat" else (a, b)
            a = a + f.branch(b)
            b = b + g.branch(a)
            joined = torch.cat((a, b), -1) if how == "cat" else joined
        return model.last((a + b) / 2)

    inputs = [kit.input(), kit.input()] if how == "two inputs" else [kit.input()]
    return kit.build(Graph(run, layers=layers, last=last), inputs, reason="two streams write to each other in turn")


# --- skips ----------------------------------------------------------------------------------------------------------------


@construct("skip by concatenation")
def concatenated_skip(kit):
    """Build x = W cat(x, earlier state) in the middle (U-ViT): a new stream begins there."""
    one, two, last, join = kit.layers(num_layers=2), kit.layers(num_layers=2), kit.norm(), nn.Linear(2 * kit.d, kit.d)

    def run(model, x):
        first = through(model.one[0], x)
        x = model.join(torch.cat((through(model.one[1], first), first), -1))
        return model.last(through(flatten(model.two), x))

    parts = ("one", "pre_ln", ""), ("two", "pre_ln", "last")
    return kit.several(run, *parts, inputs=[kit.input()], one=one, two=two, join=join, last=last)


@construct("function of the stream between layers")
def activation_between(kit):
    how = kit.rng.choice((torch.relu, torch.tanh, lambda t: t.clamp(-1, 1), lambda t: t.square(), lambda t: t + 0.5))

    def step(model, k, part, x):
        x = part.run(x)
        return how(x) if k == 1 else x

    return _undescribed(kit, step, "a function changes the stream between two layers")


# --- mistakes and models without a stream ---------------------------------------------------------------------------------


@construct("residual counted twice")
def counted_twice(kit):
    return _undescribed(
        kit, lambda m, k, part, x: x + part.norm_out(x + part.f(x)), "the branch contains the stream", POST
    )


@construct("residual of the norm, raw read")
def beside_the_norm(kit):
    return _undescribed(kit, lambda m, k, part, x: part.norm_in(x) + part.f(x), "the norm is on the residual only")


@construct("residual of the norm")
def from_the_norm(kit):
    """Build z = N(x), x' = z + f(z): post-LN from z_0 on, whose last norm is the final one."""
    layers, last = kit.parts()

    def step(model, k, part, x):
        z = part.norm_in(x)
        return z + part.f(z)

    first, *norms = [site.norm_in for site in kit.sites(layers)] + [last.answer("last")]
    sites = [
        replace(site, row=Row(norm_out=True), norm_in=None, norm_out=norm)
        for site, norm in zip(kit.sites(layers), norms, strict=True)
    ]
    return kit.loop(layers, step, stream=kit.stream(sites, "post_ln", embedding_norm=first), last=last)


@construct("no residual connection")
def no_residual(kit):
    is_normed = kit.rng.random() < 0.5

    def step(model, k, part, x):
        return part.branch(x) if is_normed else part.f(x)

    return kit.loop(kit.layers(), step, facts={"reason": "nothing is added", "has_adds": False}, last=kit.norm())


@construct("norm inside the sublayer")
def inner_norm(kit):
    """Build pre-LN whose feed-forward has a norm before its last product (NormFormer)."""
    layers, last = kit.parts()
    for layer in layers:
        f = layer[1].f
        if hasattr(f, "down"):
            f.down = nn.Sequential(nn.LayerNorm(f.down.in_features), f.down)
    return kit.loop(layers, by_hand=True, last=last)
