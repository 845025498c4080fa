"""Constructs whose tokens join, leave or move, or are written in part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from support.random_models.answers import RandomModel, Trace
from support.random_models.constructs import construct, through, trace_steps
from support.random_models.graphs import Graph, Kit, flatten
from support.random_models.steps import Step

PART = "an add changes a part of the tokens only"


def _token_change(kit: Kit, change: Callable[[Tensor, Tensor], Tensor]) -> RandomModel:
    """Build a chain whose tokens change between two layers."""
    layers, last = kit.layers(is_plain=False), kit.norm()
    cut = kit.rng.randint(1, len(layers) - 1)
    prompt = nn.Parameter(torch.zeros(1, 2, kit.d))
    inputs = [kit.input(max(kit.sizes.tokens, 4))]
    layers[0][0].clones = True

    def run(model: Any, x: Tensor) -> Tensor:
        for k, layer in enumerate(model.layers):
            x = change(x, model.prompt.expand(len(x), -1, -1)) if k == cut else x
            x = through([*layer], x)
        return model.last(x)

    def trace(model: Any, x: Tensor, without: int | None = None) -> Trace:
        start, sites = x, []
        for k, layer in enumerate(model.layers):
            x = change(x, model.prompt.expand(len(x), -1, -1)) if k == cut else x
            more, x = trace_steps([*layer], x, without, len(sites))
            sites += more
        return Trace(start, sites, model.last.by_hand(x))

    return kit.build(
        Graph(run, layers=layers, last=last, prompt=prompt), inputs, kit.stream(kit.sites(layers), "pre_ln", final=last),
        trace=trace,
    )  # fmt: skip


@construct("tokens join the stream")
def tokens_join(kit: Kit) -> RandomModel:
    before = kit.rng.random() < 0.5
    return _token_change(kit, lambda x, prompt: torch.cat((prompt, x) if before else (x, prompt), 1))


@construct("tokens leave the stream")
def tokens_leave(kit: Kit) -> RandomModel:
    cut = kit.rng.choice(
        (lambda x, _: x[:, 1:], lambda x, _: x[:, :3], lambda x, _: x.narrow(1, 1, 2), lambda x, _: x[:, ::2])
    )
    return _token_change(kit, cut)


@construct("tokens change places")
def tokens_permuted(kit: Kit) -> RandomModel:
    return _token_change(
        kit, kit.rng.choice((lambda x, _: x.flip(1), lambda x, _: x.roll(1, 1), lambda x, _: x[:, [1, 0, 2]]))
    )


@construct("tokens are replaced")
def tokens_replaced(kit: Kit) -> RandomModel:
    return _token_change(kit, lambda x, prompt: torch.cat((prompt, x[:, 2:]), 1))


@construct("tokens are merged")
def tokens_merged(kit: Kit) -> RandomModel:
    """Build two stages between which the means of two neighbours replace them: the second stream begins there."""
    one, two, last = kit.layers(num_layers=2), kit.layers(num_layers=2), kit.norm()

    def run(model: Any, x: Tensor) -> Tensor:
        x = through(flatten(model.one), x)
        x = x.unflatten(1, (-1, 2)).mean(2)
        return model.last(through(flatten(model.two), x))

    streams = (kit.stream(kit.sites(one, "one"), "pre_ln"), kit.stream(kit.sites(two, "two"), "pre_ln", final=last))
    return kit.build(Graph(run, one=one, two=two, last=last), [kit.input(2 * kit.sizes.tokens)], *streams)


@construct("learned tokens that read the input")
def latents(kit: Kit) -> RandomModel:
    """Build a stream of learned tokens, expanded over the samples, that reads the input in every layer (Perceiver)."""
    layers, last, token = kit.layers("cf"), kit.norm(), nn.Parameter(torch.zeros(3, kit.d))
    how = kit.rng.choice(("expand", "repeat", "broadcast"))

    def begin(token: Tensor, memory: Tensor) -> Tensor:
        if how == "expand":
            return token.expand(len(memory), -1, -1)
        return (
            token.unsqueeze(0).repeat(len(memory), 1, 1) if how == "repeat" else token + torch.zeros(len(memory), 1, 1)
        )

    def run(model: Any, memory: Tensor) -> Tensor:
        x = begin(model.token, memory)
        for c, f in model.layers:
            x = f.run(c.run(x, memory))
        return model.last(x)

    def trace(model: Any, memory: Tensor, without: int | None = None) -> Trace:
        start = x = begin(model.token, memory)
        sites = []
        for k, step in enumerate(flatten(model.layers)):
            sites.append(step.by_hand(x, *([memory] if k % 2 == 0 else []), without=k == without))
            x = sites[-1].out
        return Trace(start, sites, model.last.by_hand(x))

    stream = kit.stream(kit.sites(layers), "pre_ln", final=last)
    return kit.build(Graph(run, layers=layers, last=last, token=token), [kit.input()], stream, trace=trace)


@construct("parts joined again")
def parts_joined(kit: Kit) -> RandomModel:
    """Build y + cat(a, b), where a and b are the parts of x (Emformer)."""
    layers, last = kit.layers("ff"), kit.norm()
    flips = kit.rng.random() < 0.5

    def run(model: Any, x: Tensor) -> Tensor:
        for step in flatten(model.layers):
            a, b = x[:, :2], x[:, 2:]
            y = step.f(step.norm_in(torch.cat((a, b), 1)))
            x = y + torch.cat((a, b), 1) if flips else torch.cat((a, b), 1) + y
        return model.last(x)

    def trace(model: Any, x: Tensor, without: int | None = None) -> Trace:
        sites, end = trace_steps(flatten(model.layers), x, without)
        return Trace(x, sites, model.last.by_hand(end))

    stream = kit.stream(kit.sites(layers), "pre_ln", final=last)
    return kit.build(Graph(run, layers=layers, last=last), [kit.input(max(4, kit.sizes.tokens))], stream, trace=trace)


@construct("writes to a part of the tokens")
def partial_writes(kit: Kit) -> RandomModel:
    """Build a chain in which some adds change a part of the tokens only (TNT)."""
    layers, last = kit.layers("fff"), kit.norm()
    how = kit.rng.choice(("cat", "slice in place", "clone and assign", "mask"))

    def write(step: Step, x: Tensor) -> Tensor:
        y = step.f(step.norm_in(x[:, 1:]))
        if how == "cat":
            return torch.cat((x[:, :1], x[:, 1:] + y), 1)
        if how == "mask":
            rows = torch.arange(x.shape[1]) > 0
            x = x.clone()
            x[:, rows] = x[:, rows] + y
            return x
        x = x.clone()
        if how == "slice in place":
            x[:, 1:] += y
        else:
            x[:, 1:] = x[:, 1:] + y
        return x

    def run(model: Any, x: Tensor) -> Tensor:
        for step, middle, after in model.layers:
            x = after.run(write(middle, step.run(x)))
        return model.last(x)

    stream = kit.stream(kit.sites(layers), "pre_ln", final=last, per_layer=3)
    return kit.build(Graph(run, layers=layers, last=last), [kit.input()], stream, limit=PART)


@construct("class attention")
def class_attention(kit: Kit) -> RandomModel:
    """Build a class token that reads itself and the tokens through one norm: c + f(N(cat(c, x))) (CaiT)."""
    layers, last = kit.layers("af"), kit.norm()

    def run(model: Any, c: Tensor, x: Tensor) -> Tensor:
        for a, f in model.layers:
            u = a.norm_in(torch.cat((c, x), 1))
            c = c + a.f(u[:, :1], u)
            c = f.run(c)
        return model.last(c)

    for layer in layers:
        layer[0].f = kit.sublayer("c")
    sites = [replace(site, kind="attention" if k % 2 == 0 else site.kind) for k, site in enumerate(kit.sites(layers))]
    model = Graph(run, layers=layers, last=last)
    return kit.build(model, [kit.input(1), kit.input()], kit.stream(sites, "pre_ln", final=last))


@construct("update from one token of a joined read")
def cross_fusion(kit: Kit) -> RandomModel:
    """Build t[:, :1] + f(N(t)), of which the first token alone goes on (CrossViT)."""
    layers, middle, last = kit.layers("ff"), kit.layers("f"), kit.norm()

    def run(model: Any, x: Tensor, y: Tensor) -> Tensor:
        for layer, (m,) in zip(model.layers, model.middle, strict=True):
            x = through([*layer], x)
            t = torch.cat((x[:, :1], y), 1)
            c = t[:, :1] + m.f(m.norm_in(t)).mean(1, keepdim=True)
            x = torch.cat((c, x[:, 1:]), 1)
        return model.last(x)

    own = kit.sites(layers)
    of_middle = [replace(site, kind="other") for site in kit.sites(middle, "middle")]  # they average tokens
    sites = [site for k, more in enumerate(of_middle) for site in (*own[2 * k : 2 * k + 2], more)]
    model = Graph(run, layers=layers, middle=middle, last=last)
    stream = kit.stream(sites, "pre_ln", final=last, per_layer=3)
    return kit.build(model, [kit.input(), kit.input(3)], stream, limit=PART)


@construct("token mask")
def token_mask(kit: Kit) -> RandomModel:
    layers, last = kit.layers(), kit.norm()

    def run(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        for step in flatten(model.layers):
            x = x + step.branch(x) * mask
        return model.last(x)

    def trace(model: Any, x: Tensor, mask: Tensor, without: int | None = None) -> Trace:
        start, sites = x, []
        for k, step in enumerate(flatten(model.layers)):
            site = step.by_hand(x)
            site.write = site.write * mask
            site.out = x + (0.0 if k == without else site.write)
            sites.append(site)
            x = site.out
        return Trace(start, sites, model.last.by_hand(x))

    mask = (torch.arange(kit.sizes.tokens) < kit.sizes.tokens - 1).float()[None, :, None]
    mask = mask.repeat(kit.sizes.batch, 1, 1)
    mask[0] = 1.0
    stream = kit.stream(kit.sites(layers), "pre_ln", final=last)
    return kit.build(Graph(run, layers=layers, last=last), [kit.input(), mask], stream, trace=trace)
