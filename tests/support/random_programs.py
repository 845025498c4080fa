"""Random models with several streams, in any layout, that keep the matrices with which they ran.

random_program(seed)    -> a model; after a run its `answer` has C, A, B of each sublayer and C of the end
"""

import random

import torch
from torch import nn

from support.families import shake
from support.handwritten_models import make_attention
from support.several_streams import FORMS, HandMhc, sinkhorn
from support.stacks import Mlp

D = 16
NORMS = (nn.Identity, nn.LayerNorm, nn.RMSNorm)
READS = ("weights", "sigmoid", "softmax", "signs", "first", "mean")
MIXES = ("matrix", "sinkhorn", "softmax", "tanh", "diagonal", "identity", "turned", "scaled")
WRITES = ("weights", "sigmoid", "twice", "ones")


class Coefficients(nn.Module):
    """Numbers `(B, T, *shape)` of streams `(B, T, n, d)`: constants, parameters, or computed from the streams."""

    def __init__(self, rng, kind, n, *shape):
        super().__init__()
        self.kind, self.shape = kind, shape
        self.own = rng.choice(("all", "mean"))  # computed from the concatenation or from the mean of the streams
        size = n * D if self.own == "all" else D
        self.norm = rng.choice(NORMS)(size)
        self.linear = nn.Linear(size, torch.Size(shape).numel(), bias=rng.random() < 0.7)
        self.scale, self.weight = nn.Parameter(torch.ones(())), nn.Parameter(torch.randn(shape))

    def forward(self, x):
        n, lead = x.shape[-2], x.shape[:2]
        eye = torch.eye(n)
        constants = {  # of every token
            "weights": self.weight, "matrix": self.weight, "first": eye[0], "mean": torch.full((n,), 1 / n),
            "ones": torch.ones(n), "identity": eye, "turned": eye.roll(1, 0), "scaled": 0.5 * eye,
        }  # fmt: skip
        if self.kind in constants:
            return constants[self.kind].expand(*lead, *self.shape)
        z = (
            self.linear(self.norm(x.flatten(-2) if self.own == "all" else x.mean(-2))).view(*lead, *self.shape)
            * self.scale
        )
        match self.kind:
            case "sinkhorn":
                return sinkhorn(z, 3, 1e-6)
            case "softmax":
                return z.softmax(-1)
            case "diagonal":
                return torch.diag_embed(z.sigmoid().diagonal(dim1=-2, dim2=-1))
            case "tanh":
                return self.weight + 0.1 * z.tanh()
            case "twice":
                return 2 * z.sigmoid()
            case "signs":
                return z.tanh()
            case _:
                return z.sigmoid()


class RandomProgram(nn.Module):
    """A stack X' = N_out(A X + B f(N(C X))), whose streams lie as `form` says."""

    keeps_answer = True
    start, stack, read, write = HandMhc.start, HandMhc.stack, HandMhc.read, HandMhc.write

    def __init__(self, seed):
        super().__init__()
        rng = random.Random(seed)
        self.n, self.d, self.form = rng.randint(2, 4), D, rng.choice(FORMS)
        kinds = [rng.choice(names) for names in (READS, MIXES, WRITES)]
        self.names = (self.form, self.n, *kinds)
        n, layers = self.n, rng.randint(2, 3)
        self.sites = nn.ModuleList()
        for k in range(2 * layers):
            shapes = ((n,), (n, n), (n,))
            parts = [Coefficients(rng, kind, n, *shape) for kind, shape in zip(kinds, shapes, strict=True)]
            norms = [rng.choice((nn.LayerNorm, nn.RMSNorm))(D), rng.choice(NORMS)(D)]
            self.sites.append(nn.ModuleList([*parts, *norms, make_attention() if k % 2 == 0 else Mlp()]))
        self.offset = nn.Parameter(torch.randn(n, D)) if self.form == "stacked" else None
        self.end, self.norm = Coefficients(rng, rng.choice(READS[:4]), n, n), rng.choice(NORMS[1:])(D)
        self.answer = []

    def forward(self, x):
        if self.keeps_answer:
            self.answer = []
        X = self.start(x) if self.offset is None else x.unsqueeze(-2) + self.offset
        for collapse, mix, inject, norm, norm_branch, f in self.sites:
            own = self.stack(X)
            c, a, b = collapse(own), mix(own), inject(own)
            X = self.write(X, a, b, norm_branch(f(norm(self.read(X, c)))))
            if self.keeps_answer:
                self.answer.append((c, a, b))
        c = self.end(self.stack(X))
        if self.keeps_answer:
            self.answer.append((c,))
        return self.norm(self.read(X, c))


def random_program(seed):
    """Return the model of a seed with random parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = RandomProgram(seed).eval()
        shake(model, seed)
    return model


def judge(program, answer):
    """Return the first difference between a program and the matrices of the run; an empty string if there is none."""
    if len(program.sites) != len(answer) - 1:
        return f"{len(program.sites)} sites of {len(answer) - 1}"
    terms = [*zip(program.sites, answer, strict=False)]
    pairs = [(f"site {k}: C", site.collapse, true[0].unsqueeze(-2)) for k, (site, true) in enumerate(terms)]
    pairs += [(f"site {k}: A", site.mix, true[1]) for k, (site, true) in enumerate(terms)]
    pairs += [(f"site {k}: B", site.inject, true[2].unsqueeze(-1)) for k, (site, true) in enumerate(terms)]
    for name, found, true in (*pairs, ("end", program.collapse(len(program.sites)), answer[-1][0].unsqueeze(-2))):
        is_one = program.sizes[0] == 1 and name in ("site 0: C", "site 0: A")  # all streams are still one value
        expected = (true.sum(-1, keepdim=True) if is_one else true).flatten(0, 1).unsqueeze(-1).double()
        is_same = found.values.shape[1:3] == expected.shape[1:3]
        if not is_same or not torch.allclose(*torch.broadcast_tensors(found.values, expected), atol=1e-5):
            return name
    return ""
