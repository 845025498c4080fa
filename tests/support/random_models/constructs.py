"""Constructs besides chains: one function for each, from a kit to a random model with its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import addnorm
from addnorm import Row, wirings
from support.random_models.answers import NormAnswer, RandomModel, SiteAnswer, Trace, TracedSite
from support.random_models.graphs import POST, PRE, Graph, Kit, flatten
from support.random_models.rows import Plan
from support.random_models.steps import Step
from support.random_models.sublayers import Mlp

__all__ = ["CONSTRUCTS"]

CONSTRUCTS: dict[str, Callable[[Kit], RandomModel]] = {}


def construct(name: str) -> Callable[[Callable[[Kit], RandomModel]], Callable[[Kit], RandomModel]]:
    """Register a function under the name of its construct."""

    def register(make: Callable[[Kit], RandomModel]) -> Callable[[Kit], RandomModel]:
        CONSTRUCTS[name] = make
        return make

    return register


def through(steps: list[Step], x: Tensor, *context: Tensor) -> Tensor:
    """Return the stream after steps."""
    for step in steps:
        x = step.run(x, *context)
    return x


def trace_steps(
    steps: list[Step], x: Tensor, without: int | None = None, first: int = 0
) -> tuple[list[TracedSite], Tensor]:
    """Return the values of steps by hand, and the stream after them."""
    sites = []
    for k, step in enumerate(steps, first):
        sites.append(step.by_hand(x, without=k == without))
        x = sites[-1].out
    return sites, x


# --- several sublayers of an add ------------------------------------------------------------------------------------------


@construct("parallel sublayers")
def parallel(kit: Kit) -> RandomModel:
    norms = kit.rng.choice((1, 2))
    order = kit.rng.choice(("(x + a) + f", "x + (a + f)", "(a + f) + x", "in place", "stack and sum"))
    layers, last = kit.layers(), kit.norm()

    def add(x: Tensor, a: Tensor, f: Tensor) -> Tensor:
        match order:
            case "(x + a) + f":
                return x + a + f
            case "x + (a + f)":
                return x + (a + f)
            case "in place":
                return x + f.add_(a)
            case "stack and sum":
                return x + torch.stack((a, f)).sum(0)
        return a + f + x

    def run(model: Any, x: Tensor) -> Tensor:
        for one, two in model.layers:
            first = one.norm_in(x)
            x = add(x, one.f(first), two.f(two.norm_in(x) if norms == 2 else first))
        return model.last(x)

    def trace(model: Any, x: Tensor, without: int | None = None) -> Trace:
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

    if norms == 1:
        for _, two in layers:
            two.norm_in = None
    answers = kit.sites(layers, parallel=2)
    if norms == 1:
        answers = [
            replace(site, row=Row(norm_in=True), norm_in=answers[k - k % 2].norm_in) for k, site in enumerate(answers)
        ]
    model = Graph(run, layers=layers, last=last)
    return kit.build(model, [kit.input()], kit.stream(answers, "parallel", final=last), trace=trace)


@construct("residual added twice")
def doubled(kit: Kit) -> RandomModel:
    """Build 2 x + f(N(x)) as a sum of three terms."""
    order = kit.rng.choice(("(x + f) + x", "x + (x + f)", "x + x + f", "2 x + f", "in place"))
    layers, last = kit.layers(plan=Plan(norm_in=True, a=2.0)), kit.norm()

    def run(model: Any, x: Tensor) -> Tensor:
        for step in flatten(model.layers):
            f = step.branch(x)
            match order:
                case "(x + f) + x":
                    x = (x + f) + x
                case "x + (x + f)":
                    x = x + (x + f)
                case "2 x + f":
                    x = 2 * x + f
                case "in place":
                    x = f.add_(x).add_(x)
                case _:
                    x = x + x + f
        return model.last(x)

    def trace(model: Any, x: Tensor, without: int | None = None) -> Trace:
        sites, end = trace_steps(flatten(model.layers), x, without)
        return Trace(x, sites, model.last.by_hand(end))

    stream = kit.stream(kit.sites(layers), None, "no published wiring doubles the stream", final=last)
    return kit.build(Graph(run, layers=layers, last=last), [kit.input()], stream, trace=trace)


@construct("B2T")
def bottom_to_top(kit: Kit) -> RandomModel:
    layers = kit.layers(plan=POST)

    def run(model: Any, x: Tensor) -> Tensor:
        for one, two in model.layers:
            h = one.norm_out(x + one.f(x))
            x = two.norm_out(h + two.f(h) + x)
        return x

    sites = []
    for n, layer in enumerate(layers):
        one, two = (step.answer(f"layers.{n}.{k}") for k, step in enumerate(layer))
        two = replace(two, row=Row(), norm_out=None)  # the norm follows the skip
        sites += [one, two, SiteAnswer("", "", None, role="skip")]
    return kit.build(
        Graph(run, layers=layers), [kit.input()], replace(kit.stream(sites, "b2t"), num_layers=len(layers))
    )


@construct("ResiDual")
def resi_dual(kit: Kit) -> RandomModel:
    layers, last = kit.layers(plan=POST), kit.norm()

    def run(model: Any, x: Tensor) -> Tensor:
        u = v = x
        for step in flatten(model.layers):
            f = step.f(u)
            u, v = step.norm_out(u + f), v + f
        return u + model.last(v)

    stream = kit.stream(kit.sites(layers), "resi_dual", final=last)
    return kit.build(Graph(run, layers=layers, last=last), [kit.input()], stream)


@construct("addmm")
def fused_product(kit: Kit) -> RandomModel:
    """Build adds inside the last product of a feed-forward: x + h W as torch.addmm(x, h, W)."""
    layers, last = kit.layers("ff"), kit.norm()
    for step in flatten(layers):
        step.f = Mlp(kit.layout)
        step.f.down = nn.Linear(2 * kit.d, kit.d, bias=False)

    def run(model: Any, x: Tensor) -> Tensor:
        for step in flatten(model.layers):
            h = step.f.act(step.f.up(step.norm_in(x))).flatten(0, 1)
            x = torch.addmm(x.flatten(0, 1), h, step.f.down.weight.T).view_as(x)
        return model.last(x)

    def trace(model: Any, x: Tensor, without: int | None = None) -> Trace:
        sites, end = trace_steps(flatten(model.layers), x, without)
        return Trace(x, sites, model.last.by_hand(end))

    stream = kit.stream([replace(site, path="") for site in kit.sites(layers)], "pre_ln", final=last)
    return kit.build(Graph(run, layers=layers, last=last), [kit.input()], stream, trace=trace)


@construct("addnorm.ResidualStack")
def library_stack(kit: Kit) -> RandomModel:
    """Build a stack of this library, with its fused operators, for any of its wirings."""
    wiring = kit.rng.choice(
        [w for w in wirings.list_all() if w.is_sequential and w.name not in ("no_residual", "mix_ln")]
    )
    norm, eps = kit.rng.choice(("layer", "rms")), 1e-5
    sublayers = [kit.sublayer(letter) for _ in range(kit.num_layers) for letter in "af"]
    stack = addnorm.ResidualStack(sublayers, kit.d, wiring, norm=norm, eps=eps)
    any_norm = NormAnswer("", norm, eps)
    sites = [
        SiteAnswer(
            "", f.kind, row, *(any_norm if has else None for has in (row.norm_in, row.norm_branch, row.norm_out))
        )
        for f, row in zip(sublayers, wiring.rows(kit.num_layers), strict=True)
    ]
    final = any_norm if wiring.ends_in_norm(kit.num_layers) else None
    stream = kit.stream(sites, wiring.name, embedding_norm=any_norm if wiring.embedding_norm else None)
    return kit.build(stack, [kit.input()], replace(stream, final_norm=final))


# --- several streams ------------------------------------------------------------------------------------------------------


@construct("encoder and decoder")
def encoder_decoder(kit: Kit) -> RandomModel:
    plans = kit.rng.choices((PRE, POST), k=2)
    encoder, decoder = kit.layers(plan=plans[0]), kit.layers("acf", plans[1])
    ends = {name: kit.norm() for name, plan in zip(("end", "last"), plans, strict=True) if plan is PRE}

    def run(model: Any, source: Tensor, x: Tensor) -> Tensor:
        memory = through(flatten(model.encoder), source)
        memory = model.end(memory) if "end" in ends else memory
        for a, c, f in model.decoder:
            x = f.run(c.run(a.run(x), memory))
        return model.last(x) if "last" in ends else x

    names = ["pre_ln" if plan is PRE else "post_ln" for plan in plans]
    streams = (
        kit.stream(kit.sites(encoder, "encoder"), names[0], final=ends.get("end"), path="end"),
        kit.stream(kit.sites(decoder, "decoder"), names[1], final=ends.get("last"), per_layer=3),
    )
    model = Graph(run, encoder=encoder, decoder=decoder, **ends)
    return kit.build(model, [kit.input(), kit.input(kit.sizes.tokens + 1)], *streams)


@construct("two towers")
def towers(kit: Kit) -> RandomModel:
    plans = kit.rng.choices((PRE, POST), k=2)
    left, right = (kit.layers(plan=plan) for plan in plans)

    def run(model: Any, x: Tensor, y: Tensor) -> Tensor:
        x, y = through(flatten(model.left), x), through(flatten(model.right), y)
        return x.mean(1) @ y.mean(1).mT

    names = ["pre_ln" if plan is PRE else "post_ln" for plan in plans]
    streams = [kit.stream(kit.sites(layers, path), name)
               for layers, path, name in zip((left, right), ("left", "right"), names, strict=True)]  # fmt: skip
    model = Graph(run, left=left, right=right)
    return kit.build(model, [kit.input(), kit.input(kit.sizes.tokens + 1)], *streams)


@construct("two streams that read each other")
def crossing(kit: Kit) -> RandomModel:
    left, right, last, end = kit.layers("cf"), kit.layers("cf"), kit.norm(), kit.norm()

    def run(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for (c1, f1), (c2, f2) in zip(model.left, model.right, strict=True):
            x, y = c1.run(x, y), c2.run(y, x)
            x, y = f1.run(x), f2.run(y)
        return model.last(x), model.end(y)

    streams = (
        kit.stream(kit.sites(left, "left"), "pre_ln", final=last),
        kit.stream(kit.sites(right, "right"), "pre_ln", final=end, path="end"),
    )
    model = Graph(run, left=left, right=right, last=last, end=end)
    return kit.build(model, [kit.input(), kit.input(kit.sizes.tokens + 1)], *streams)


@construct("two streams in turn")
def in_turn(kit: Kit) -> RandomModel:
    left, right, last, end = kit.layers("cf"), kit.layers("cf"), kit.norm(), kit.norm()

    def run(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for (c1, f1), (c2, f2) in zip(model.left, model.right, strict=True):
            x = f1.run(c1.run(x, y))
            y = f2.run(c2.run(y, x))
        return model.last(x), model.end(y)

    streams = (
        kit.stream(kit.sites(left, "left"), "pre_ln", final=last),
        kit.stream(kit.sites(right, "right"), "pre_ln", final=end, path="end"),
    )
    model = Graph(run, left=left, right=right, last=last, end=end)
    return kit.build(model, [kit.input(), kit.input(kit.sizes.tokens + 1)], *streams)


@construct("joint attention of two streams")
def joint(kit: Kit) -> RandomModel:
    left, right, last, end = kit.layers("af"), kit.layers("af"), kit.norm(), kit.norm()

    def run(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for (a1, f1), (a2, f2) in zip(model.left, model.right, strict=True):
            both = a1.f(torch.cat((a1.norm_in(x), a2.norm_in(y)), 1))
            x, y = x + both[:, : x.shape[1]], y + both[:, x.shape[1] :]
            x, y = f1.run(x), f2.run(y)
        return model.last(x), model.end(y)

    of_right = kit.sites(right, "right")
    of_right = [
        replace(site, path=site.path.replace("right", "left")) if k % 2 == 0 else site
        for k, site in enumerate(of_right)
    ]
    for layer in right:
        layer[0].f = None  # the attention is the other stream's
    streams = (
        kit.stream(kit.sites(left, "left"), "pre_ln", final=last),
        kit.stream(of_right, "pre_ln", final=end, path="end"),
    )
    model = Graph(run, left=left, right=right, last=last, end=end)
    return kit.build(model, [kit.input(), kit.input(kit.sizes.tokens + 1)], *streams)


@construct("x_L read by another stream")
def read_by_another(kit: Kit) -> RandomModel:
    """Build a stream whose end is read by its final norm, and before that by a sublayer of another stream through a norm."""
    layers, other, last, context, end = kit.layers(), kit.layers("cf", num_layers=2), kit.norm(), kit.norm(), kit.norm()

    def run(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = through(flatten(model.layers), x)
        memory = model.context(x)
        for c, f in model.other:
            y = f.run(c.run(y, memory))
        return model.last(x), model.end(y)

    streams = (
        kit.stream(kit.sites(layers), "pre_ln", final=last),
        kit.stream(kit.sites(other, "other"), "pre_ln", final=end, path="end"),
    )
    model = Graph(run, layers=layers, other=other, last=last, context=context, end=end)
    return kit.build(model, [kit.input(), kit.input(kit.sizes.tokens + 1)], *streams)


@construct("stages of different width")
def stages(kit: Kit) -> RandomModel:
    one = kit.layers()
    wide = Kit(kit.rng, kit.seed, kit.name)
    wide.sizes = replace(kit.sizes, features=kit.d + 4)
    wide.layout = replace(kit.layout, sizes=wide.sizes)
    two, between, last = wide.layers(), nn.Linear(kit.d, kit.d + 4), wide.norm()

    def run(model: Any, x: Tensor) -> Tensor:
        x = model.between(through(flatten(model.one), x))
        return model.last(through(flatten(model.two), x))

    streams = (
        kit.stream(kit.sites(one, "one"), "pre_ln"),
        wide.stream(wide.sites(two, "two"), "pre_ln", final=last),
    )
    return kit.build(Graph(run, one=one, between=between, two=two, last=last), [kit.input()], *streams)
