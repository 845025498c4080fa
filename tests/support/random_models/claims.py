"""Constructs about which false claims are easy: state, moved features, norms of other formulas, masks, guards, ends, and sums beside
the stream."""

import functools
from dataclasses import replace

import torch
from torch import nn

from support.answers import Norm
from support.random_models.changes import GUARDS, MASKS, MOVES
from support.random_models.constructs import construct
from support.random_models.graphs import POST, Graph, flatten, through

# --- state ----------------------------------------------------------------------------------------------------------------


def scale_tokens(tokens, d):
    """Return a table that scales what sublayers read, one number for each token and feature."""
    return 1 + 0.1 * torch.sin(torch.arange(tokens)[:, None] + torch.arange(d) / d)


class Table(nn.Module):
    """Cache of a table, filled when it is first used: in a buffer, an attribute, a container, or a functools cache."""

    def __init__(self, how, d):
        super().__init__()
        self.how, self.d, self.length = how, d, 0
        self.register_buffer("rows", torch.zeros(64, d), persistent=False)
        self.known = {}
        self.cached = functools.cache(lambda tokens: scale_tokens(tokens, d))

    def forward(self, tokens):
        if self.how == "functools":
            return self.cached(tokens)
        if self.how == "dict":
            if tokens not in self.known:
                self.known[tokens] = scale_tokens(tokens, self.d)
            return self.known[tokens]
        if self.how == "attribute":
            if not hasattr(self, "new"):
                self.new = scale_tokens(64, self.d)
            return self.new[:tokens]
        if tokens > self.length:
            self.rows[:tokens] = scale_tokens(tokens, self.d).to(self.rows)
            self.length = tokens
        return self.rows[:tokens]


@construct("state: a table filled in the first call")
def filled_table(kit):
    """Build pre-LN whose sublayers scale what they read by a cached table, as rotary embeddings do."""
    layers, last = kit.parts()
    tables = nn.ModuleList(
        Table(kit.rng.choice(("buffer", "attribute", "dict", "functools")), kit.d) for _ in flatten(layers)
    )

    def step(model, k, part, x):
        return x + part.f(part.norm_in(x) * model.tables[k](x.shape[1]))

    def by_hand(model, k, part, x):
        site = part.by_hand(x)
        site.raw = site.write = part.f.by_hand(site.read * scale_tokens(x.shape[1], kit.d).double())
        return site

    stream = kit.stream(kit.sites(layers, path=""), final=last)
    return kit.loop(layers, step, by_hand=by_hand, stream=stream, tables=tables, last=last)


# --- between the layers ---------------------------------------------------------------------------------------------------


def _between(kit, change, *inputs, reason="", is_traced=True):
    """Build pre-LN whose stream is changed once, between two layers: a part of the row before."""
    layers, last = kit.parts()

    def between(model, n, x, *inputs):
        return change(x, *inputs) if n == 1 else x

    facts = {"reason": reason} if reason else {}
    by_hand = is_traced and not reason
    return kit.loop(
        layers, lambda m, k, part, x, *_: part.run(x), by_hand=by_hand, change=between, inputs=[kit.input(), *inputs],
        facts=facts, last=last,
    )  # fmt: skip


@construct("features change places")
def moved_features(kit):
    """Build pre-LN whose features are moved between two layers, which no row expresses."""
    return _between(kit, kit.rng.choice([*MOVES.values()]), reason="features are moved between two layers")


@construct("stream masked by its data")
def masked_by_data(kit):
    return _between(kit, kit.rng.choice([*MASKS.values()]), reason="a mask of the stream's own values multiplies it")


@construct("stream masked by token")
def masked_by_token(kit):
    """Build pre-LN whose padded tokens become zero between two layers, as in text-to-speech models."""
    mask = (torch.arange(kit.sizes.tokens) < kit.sizes.tokens - 1)[None, :, None].repeat(kit.sizes.batch, 1, 1)
    mask[0] = True
    is_first = kit.rng.random() < 0.5  # the features, as in models of speech
    change = kit.rng.choice((
        lambda x, mask: x * mask,
        lambda x, mask: x * mask.to(x),
        lambda x, mask: x.masked_fill(~mask, 0.0),
        lambda x, mask: torch.where(mask, x, torch.zeros((), dtype=x.dtype)),
    ))  # fmt: skip
    # A recording has the state before some of these masks, and skips tokens of zeros.
    return _between(kit, (lambda x, mask: change(x.mT, mask.mT).mT) if is_first else change, mask, is_traced=False)


@construct("guard that does not bind")
def unreached_guard(kit):
    """Build pre-LN with a bound that no value of the stream reaches."""
    guard = kit.rng.choice([*GUARDS.values()])
    changes = (
        lambda x: guard(x, 1e4),
        torch.nan_to_num,
        lambda x: torch.where(x.isfinite(), x, torch.zeros_like(x)),
        lambda x: x.masked_fill(x.isnan(), 0.0),
    )
    return _between(kit, kit.rng.choice(changes))


# --- norms ----------------------------------------------------------------------------------------------------------------

OWN_FORMULAS = {
    "a power": lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-5) ** -0.45,
    "mean magnitude": lambda x: x / (x.abs().mean(-1, keepdim=True) + 1e-5),
    "largest magnitude": lambda x: x / (x.abs().amax(-1, keepdim=True) + 1e-5),
    "some features": lambda x: x * torch.rsqrt(x[..., :4].square().mean(-1, keepdim=True) + 1e-5),
    "uncentred variance": lambda x: x * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5),
}


class OwnNorm(nn.Module):
    """Norm of another formula."""

    def __init__(self, formula, d):
        super().__init__()
        self.formula, self.weight = formula, nn.Parameter(torch.ones(d))

    def forward(self, x):
        return OWN_FORMULAS[self.formula](x) * self.weight


@construct("norm of another formula")
def own_norm(kit):
    """Build pre-LN whose norms divide by another statistic of the token than its root mean square."""
    layers, last, how = kit.layers(), kit.norm(), kit.rng.choice([*OWN_FORMULAS])
    norms = nn.ModuleList(OwnNorm(how, kit.d) for _ in flatten(layers))

    def step(model, k, part, x):
        return x + part.f(model.norms[k](x))

    def by_hand(model, k, part, x):
        site = part.by_hand(x)
        site.read = model.norms[k](x)
        site.raw = site.write = part.f.by_hand(site.read)
        return site

    sites = [replace(s, norm_in=Norm(f"norms.{k}", "own", None)) for k, s in enumerate(kit.sites(layers))]
    return kit.loop(layers, step, by_hand=by_hand, stream=kit.stream(sites, final=last), norms=norms, last=last)


@construct("batch norm after the add")
def batch_norm_after(kit):
    """Build N(x + f(x)) with a batch norm, which no row has."""
    layers = kit.layers(plan=POST)
    norms = nn.ModuleList(nn.BatchNorm1d(kit.d) for _ in flatten(layers))

    def step(model, k, part, x):
        return model.norms[k]((x + part.f(x)).mT).mT

    return kit.loop(layers, step, facts={"reason": "a batch norm follows each add"}, norms=norms)


# --- the end, and beside the stream -----------------------------------------------------------------------------------------


@construct("final norm of cut, reordered or joined tokens")
def final_norm_of_tokens(kit):
    layers, last = kit.parts()
    change = kit.rng.choice((
        lambda x: x[:, 1:],
        lambda x: x[:, -1],
        lambda x: x.flip(1),
        lambda x: x.roll(1, 1),
        lambda x: x[:, torch.arange(x.shape[1]).flip(0)],
        lambda x: torch.cat((x[:, 1:], x[:, :1]), 1),
    ))  # fmt: skip

    return kit.loop(layers, by_hand=True, end=change, last=last)


@construct("sums beside the stream")
def sums_beside(kit):
    """Build pre-LN whose outputs are refined outside of the stream: boxes, forecasts, two towers' scores."""
    layers, last = kit.parts()
    heads = nn.ModuleList(nn.Linear(kit.d, 4) for _ in layers)
    how = kit.rng.choice(("boxes", "residual of the input", "forecasts"))

    def run(model, x):
        out, begin = torch.zeros(*x.shape[:2], 4), x[..., :4]
        for layer, head in zip(model.layers, model.heads, strict=True):
            x = through(layer, x)
            if how == "boxes":
                out = torch.sigmoid(head(x) + torch.logit(out, eps=1e-3))
            else:
                out = head(x) + (out if how == "forecasts" else begin)
        return model.last(x), out

    stream = kit.stream(kit.sites(layers), final=last)
    return kit.build(Graph(run, layers=layers, heads=heads, last=last), [kit.input()], stream)
