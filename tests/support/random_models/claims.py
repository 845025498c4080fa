"""Constructs about which false claims are easy: norms of other formulas, and sums beside the stream."""

from dataclasses import replace

import torch
from torch import nn

from support.answers import Norm
from support.random_models.constructs import construct
from support.random_models.graphs import Graph, flatten, through
from support.random_models.norms import mean

OWN_FORMULAS = {
    "a power": lambda x: x * (mean(x.square()) + 1e-5) ** -0.45,
    "mean magnitude": lambda x: x / (mean(x.abs()) + 1e-5),
    "largest magnitude": lambda x: x / (x.abs().amax(-1, keepdim=True) + 1e-5),
    "some features": lambda x: x * torch.rsqrt(mean(x[..., :4].square()) + 1e-5),
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
