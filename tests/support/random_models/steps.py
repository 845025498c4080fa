"""One sublayer with its residual add, in the spellings of real code, and its formula by hand."""

import torch
from torch import Tensor, nn

from support.answers import Site
from support.random_models.model import TracedSite

NORMS = ("norm_in", "norm_branch", "norm_out")


def draw_add(rng, plan, layout, is_plain):
    """Return a spelling of the add that can express a plan's factors."""
    if plan.convex:
        return rng.choice(("lerp", "difference", "two products"))
    if is_plain:
        return "x + f"
    fits = ["x + f", "f + x", "x - (-f)", "x += f", "f += x", "stack and sum", "in float64"]
    if isinstance(plan.b, float):
        fits.append("torch.add, alpha")
    if plan.b == "vector" and not plan.squash:
        fits.append("addcmul")
    if plan.a == 1.0 and layout.features_last:
        fits += ["residual bias", "residual bias after"]
    return rng.choice(fits)


class Step(nn.Module):
    """x' = N_out(a x + b N_branch(f(c N_in(x)))) for a plan, in one spelling of the add.

    `run` and `forward` are the same: models call either, so that the add runs in the module around it or in this one.
    """

    def __init__(
        self,
        plan,
        f,
        make_norm,
        add,
        scale=None,
    ):
        super().__init__()
        self.plan, self.layout, self.add, self.f = plan, f.layout, add, f
        for name in NORMS:
            setattr(self, name, make_norm(f.layout) if getattr(plan, name) else None)
        self.scale_a = _make_factor(plan.a, f.layout)
        self.scale_b = _make_factor(plan.b, f.layout) if scale is None else scale
        self.shift = nn.Parameter(torch.zeros(f.layout.sizes.features)) if add.startswith("residual bias") else None
        self.clones = False  # x may be an input of the model, which an add in place must not change

    def factor(self, name):
        """Return the value of a factor in canonical shape; b after its squashing function."""
        plan = getattr(self.plan, name)
        if name == "a" and self.plan.convex:
            return 1.0 - self.factor("b")
        if isinstance(plan, float):
            return plan
        squash = self.plan.squash if name == "b" else ""
        value = getattr(self, f"scale_{name}")
        value = getattr(torch, squash)(value) if squash else value
        return value.reshape(-1) if plan == "vector" else value

    def read(self, x):
        """Return what the sublayer reads."""
        y = x if self.norm_in is None else self.norm_in(x)
        return y if self.plan.c == 1.0 else y * self.plan.c

    def branch(self, x, *context):
        """Return the term before its factor."""
        y = self.f(self.read(x), *context)
        return y if self.norm_branch is None else self.norm_branch(y)

    def run(self, x, *context):
        """Return the next state."""
        total = self.sum(x, self.branch(x, *context))
        return total if self.norm_out is None else self.norm_out(total)

    forward = run

    def sum(self, x, y):
        """Return a x + b y."""
        b = self.factor("b")
        b = self.layout.spread(b) if isinstance(b, Tensor) and b.dim() else b
        match self.add:
            case "lerp":
                return torch.lerp(x, y, b)
            case "difference":
                return x + b * (y - x)
            case "two products":
                return (1 - b) * x + b * y
            case "addcmul":
                return torch.addcmul(self.scaled(x), b, y)
            case "torch.add, alpha":
                return torch.add(self.scaled(x), y, alpha=b)
        x, y = self.scaled(x), y if isinstance(b, float) and b == 1.0 else b * y
        match self.add:
            case "f + x":
                return y + x
            case "x - (-f)":
                return x - y.neg()
            case "x += f":
                x = x.clone() if self.clones else x
                x += y
                return x
            case "f += x":
                y = y.clone()
                return y.add_(x)
            case "stack and sum":
                return torch.stack((x, y)).sum(0)
            case "in float64":
                return (x.double() + y.double()).to(x.dtype)
            case "residual bias":
                return (x + self.shift) + y
            case "residual bias after":
                return x + y + self.shift
        return x + y

    def scaled(self, x):
        """Return a x."""
        a = self.factor("a")
        if isinstance(a, float):
            return x if a == 1.0 else a * x
        return x * (self.layout.spread(a) if a.dim() else a)

    # --- by hand ---------------------------------------------------------------------------------------------------------

    def by_hand(self, x, *context, without=False):
        """Return the values of the site from the canonical stream."""
        read = (x if self.norm_in is None else self.norm_in.by_hand(x)) * self.plan.c
        raw = self.f.by_hand(read, *context)
        write = (raw if self.norm_branch is None else self.norm_branch.by_hand(raw)) * self.factor("b")
        total = x * self.factor("a") + (0.0 if without else write)
        total = total if self.shift is None else total + self.shift
        return TracedSite(x, read, raw, write, total if self.norm_out is None else self.norm_out.by_hand(total))

    def answer(self, path):
        """Return the answer of the site, whose step has a path."""
        norms = {name: norm and norm.answer(f"{path}.{name}") for name in NORMS for norm in [getattr(self, name)]}
        return Site(f"{path}.f", self.f.kind, self.plan.row(), **norms, has_bias=self.shift is not None)


def _make_factor(factor, layout):
    if isinstance(factor, float):
        return None
    return nn.Parameter(torch.ones(()) if factor == "scalar" else torch.ones(layout.sizes.features))


def propagate(step, parts, site):
    """Return the components of the next state: of x_0, of each write, and of the biases, the last one.

    LayerNorm with the denominator of the whole sum is linear apart from its bias.
    """
    *parts, biases = [part * step.factor("a") for part in parts]
    parts = [*parts, site.write]
    biases = biases if step.shift is None else biases + step.shift
    if step.norm_out is None:
        return [*parts, biases]
    denominator = step.norm_out.denominator_by_hand(torch.stack([*parts, biases]).sum(0))
    *parts, biases = [step.norm_out.linear_by_hand(part, denominator) for part in (*parts, biases)]
    return [*parts, biases + step.norm_out.shift_by_hand(biases)]
