"""The expansion of a hand-written mHC in float64, from its recorded coefficients and writes, without the library's code."""

import copy
from types import SimpleNamespace

import torch

from support.several_streams import make_mhc


def record_mhc(form, dtype=torch.float32):
    """Return a model, its input, and c, A, b and w of each sublayer of a run in float64, with the states before and the head's c."""
    model, x = make_mhc(form).to(dtype), torch.randn(2, 5, 16, dtype=dtype)
    twin, sites = copy.deepcopy(model).double(), []
    for site in twin.sites:
        own = SimpleNamespace()
        sites.append(own)

        def coefficients(streams, real=site.coefficients, own=own):
            own.c, own.a, own.b = real(streams)
            return own.c, own.a, own.b

        def branch(read, real=site.branch, own=own):
            own.w = real(read)
            return own.w

        site.coefficients, site.branch = coefficients, branch
    heads, read = [], twin.read
    twin.read = lambda X, c: heads.append(c) or read(X, c)
    with torch.no_grad():
        y = twin(x.double())
        states = [x.double().unsqueeze(-2).expand(2, 5, 4, 16)]
        for site in sites:
            states.append(site.a @ states[-1] + site.b[..., None] * site.w[..., None, :])
    return SimpleNamespace(model=model, twin=twin, x=x, y=y, sites=sites, states=states, head=heads[-1])


def expand(run, k):
    """Return the terms of the state before sublayer k, the embedding's first: products of the later A with b w of each sublayer."""
    terms = []
    for j in range(-1, k):
        term = run.states[0] if j < 0 else run.sites[j].b[..., None] * run.sites[j].w[..., None, :]
        for site in run.sites[j + 1 : k]:
            term = site.a @ term
        terms.append(term)
    return terms
