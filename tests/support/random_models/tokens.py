"""Constructs whose tokens join, leave or move, or are written in part."""

from dataclasses import replace

import torch
from torch import nn

from support.random_models.constructs import construct
from support.random_models.graphs import flatten, through

PART = "an add changes a part of the tokens only"


def _token_change(kit, change):
    """Build a chain whose tokens change between two layers."""
    layers, last = kit.layers(is_plain=False), kit.norm()
    cut = kit.rng.randint(1, len(layers) - 1)
    prompt = nn.Parameter(torch.zeros(1, 2, kit.d))
    layers[0][0].clones = True

    def between(model, n, x):
        return change(x, model.prompt.expand(len(x), -1, -1)) if n == cut else x

    inputs = [kit.input(max(kit.sizes.tokens, 4))]
    return kit.loop(layers, by_hand=True, change=between, inputs=inputs, last=last, prompt=prompt)


@construct("tokens join the stream")
def tokens_join(kit):
    before = kit.rng.random() < 0.5
    return _token_change(kit, lambda x, prompt: torch.cat((prompt, x) if before else (x, prompt), 1))


@construct("tokens leave the stream")
def tokens_leave(kit):
    cut = kit.rng.choice(
        (lambda x, _: x[:, 1:], lambda x, _: x[:, :3], lambda x, _: x.narrow(1, 1, 2), lambda x, _: x[:, ::2])
    )
    return _token_change(kit, cut)


@construct("tokens change places")
def tokens_permuted(kit):
    return _token_change(
        kit, kit.rng.choice((lambda x, _: x.flip(1), lambda x, _: x.roll(1, 1), lambda x, _: x[:, [1, 0, 2]]))
    )


@construct("tokens are replaced")
def tokens_replaced(kit):
    return _token_change(kit, lambda x, prompt: torch.cat((prompt, x[:, 2:]), 1))


@construct("tokens are merged")
def tokens_merged(kit):
    """Build two stages between which the means of two neighbours replace them: the second stream begins there."""
    one, two, last = kit.layers(num_layers=2), kit.layers(num_layers=2), kit.norm()

    def run(model, x):
        x = through(flatten(model.one), x)
        x = x.unflatten(1, (-1, 2)).mean(2)
        return model.last(through(flatten(model.two), x))

    inputs = [kit.input(2 * kit.sizes.tokens)]
    return kit.several(
        run, ("one", "pre_ln", ""), ("two", "pre_ln", "last"), inputs=inputs, one=one, two=two, last=last
    )


@construct("learned tokens that read the input")
def latents(kit):
    """Build a stream of learned tokens, expanded over the samples, that reads the input in every layer (Perceiver)."""
    layers, last, token = kit.layers("cf"), kit.norm(), nn.Parameter(torch.zeros(3, kit.d))
    expand = kit.rng.choice((
        lambda token, memory: token.expand(len(memory), -1, -1),
        lambda token, memory: token.unsqueeze(0).repeat(len(memory), 1, 1),
        lambda token, memory: token + torch.zeros(len(memory), 1, 1),
    ))  # fmt: skip

    def step(model, k, part, x, memory):
        return part.run(x) if k % 2 else part.run(x, memory)

    def by_hand(model, k, part, x, memory):
        return part.by_hand(x) if k % 2 else part.by_hand(x, memory)

    def begin(model, memory):
        return expand(model.token, memory), memory

    return kit.loop(layers, step, by_hand=by_hand, begin=begin, last=last, token=token)


@construct("parts joined again")
def parts_joined(kit):
    """Build y + cat(a, b), where a and b are the parts of x (Emformer)."""
    layers, last = kit.layers("ff"), kit.norm()
    flips = kit.rng.random() < 0.5

    def step(model, k, part, x):
        a, b = x[:, :2], x[:, 2:]
        y = part.f(part.norm_in(torch.cat((a, b), 1)))
        return y + torch.cat((a, b), 1) if flips else torch.cat((a, b), 1) + y

    return kit.loop(layers, step, by_hand=True, inputs=[kit.input(max(4, kit.sizes.tokens))], last=last)


@construct("writes to a part of the tokens")
def partial_writes(kit):
    """Build a chain in which some adds change a part of the tokens only (TNT)."""
    layers, last = kit.layers("fff"), kit.norm()
    how = kit.rng.choice(("cat", "slice in place", "clone and assign", "mask"))

    def step(model, k, part, x):
        if k % 3 != 1:
            return part.run(x)
        y = part.f(part.norm_in(x[:, 1:]))
        if how == "cat":
            return torch.cat((x[:, :1], x[:, 1:] + y), 1)
        x = x.clone()
        if how == "mask":
            rows = torch.arange(x.shape[1]) > 0
            x[:, rows] = x[:, rows] + y
        elif how == "slice in place":
            x[:, 1:] += y
        else:
            x[:, 1:] = x[:, 1:] + y
        return x

    return kit.loop(layers, step, facts={"limit": PART}, last=last)


@construct("class attention")
def class_attention(kit):
    """Build a class token that reads itself and the tokens through one norm: c + f(N(cat(c, x))) (CaiT)."""
    layers, last = kit.layers("af"), kit.norm()
    for layer in layers:
        layer[0].f = kit.sublayer("c")

    def step(model, k, part, c, x):
        if k % 2:
            return part.run(c)
        u = part.norm_in(torch.cat((c, x), 1))
        return c + part.f(u[:, :1], u)

    sites = [replace(site, kind="attention" if k % 2 == 0 else site.kind) for k, site in enumerate(kit.sites(layers))]
    return kit.loop(layers, step, inputs=[kit.input(1), kit.input()], stream=kit.stream(sites, final=last), last=last)
