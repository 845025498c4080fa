"""Random calls for the fuzz target; each call is a function of its seed."""

import math
import random
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from support.cases import Call, bf16, cotangents, f16, f32, f64

FLOATS = (f32, bf16, f16, f64)
LAYOUTS = ("transposed", "every second", "a slice", "unaligned", "expanded")
VALUES = ("large mean", "tiny", "huge", "constant rows", "zeros", "special")


@dataclass
class Case:
    """A call with a random memory layout, the tensors that require gradients, and the output gradients."""

    seed: int
    call: Call
    wants: tuple[str, ...]  # the tensors that require gradients
    grad_outputs: dict[str, Tensor]  # the gradients of the outputs that are used
    rng: random.Random = field(repr=False)

    def __str__(self):
        numbers = {name: f"tensor({t.item()})" for name, t in self.call.options.items() if isinstance(t, Tensor)}
        call = replace(self.call, options=self.call.options | numbers)
        return f"{call!r}, wants {self.wants}, used {tuple(self.grad_outputs)}"


def take(call):
    """Return the case of a call in which every tensor requires a gradient, and every output has one."""
    return Case(0, call, tuple(call.tensors), cotangents(call()), random.Random(0))


def make(seed):
    """Return the case of this seed."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    norm = rng.choice(["layer", "layer", "rms", "rms", "none"])
    rows, d = _shape(rng)
    values = rng.choice(VALUES) if rng.random() < 0.4 else "ordinary"
    dtypes = [rng.choice(FLOATS)] if rng.random() < 0.5 else FLOATS

    def tensor(shape, mean=0.0):
        values = torch.randn(shape, generator=generator, dtype=f64) + mean
        return lay_out(values.to(rng.choice(dtypes)), rng)

    both = [_values(values, (*rows, d), rng, generator).to(rng.choice(dtypes)) for _ in range(2)]
    tensors = dict(zip(("residual", "branch"), (lay_out(t, rng) for t in both), strict=True))
    if norm != "none" and rng.random() < 0.7:
        tensors["weight"] = tensor((d,), 1.0)
    if norm != "none" and rng.random() < 0.5:
        tensors["bias"] = tensor((d,))
    if values == "special" and "weight" in tensors and d and rng.random() < 0.2:
        tensors["weight"] = tensors["weight"].clone()
        tensors["weight"][rng.randrange(d)] = math.nan
    options = {}
    if rng.random() < 0.6:
        _options(norm, rows, d, rng, tensors, options, tensor)
    call = Call(norm, rng.choice([1e-5, 1e-5, 1e-6, 1e-12, 1.0, 0.0]), tensors, options)
    wants = tuple(name for name in tensors if rng.random() < 0.7) if rng.random() < 0.8 else ()
    outputs = [("z", call.residual_dtype)] + ([("y", call.out_dtype)] if norm != "none" else [])
    used = [rng.choice(outputs)] if rng.random() < 0.4 else outputs
    grad_outputs = {}
    for name, dtype in used:
        t = torch.randn((*rows, d), generator=generator, dtype=f64) + 0.2
        if values == "special" and rng.random() < 0.2:
            t = torch.where(torch.rand(t.shape, generator=generator) < 0.1 / max(d, 1), math.nan, t)
        grad_outputs[name] = lay_out(t.to(dtype), rng)
    return Case(seed, call, wants, grad_outputs, rng)


def _shape(rng):
    """Return leading dimensions and features, near the widths of vectors, the chunks of rows and the grain size of threads."""
    kind = rng.random()
    if kind < 0.06:
        return (rng.choice([31, 32, 33, 63, 65, 129, 260, 600, 1100]),), rng.randint(1, 40)
    if kind < 0.12:
        return (rng.randint(1, 8),), rng.choice([rng.randint(70, 5000), 1024, 2048, 2049, 4096])
    rows = tuple(rng.choice([1, 1, 2, 3, 5, 7, 9]) for _ in range(rng.randint(0, 4)))
    if rows and rng.random() < 0.04:
        rows = (*rows[:-1], 0)
    while math.prod(rows) > 400:
        rows = rows[1:]
    return rows, rng.randint(0 if rng.random() < 0.1 else 1, 70)


def _values(kind, shape, rng, generator):
    """Return elements of residual or branch, in float64."""
    t = torch.randn(shape, generator=generator, dtype=f64)
    match kind:
        case "large mean":
            return t + rng.choice([30.0, 1e3, 1e4])
        case "tiny":
            return t * rng.choice([1e-4, 1e-20, 1e-38])
        case "huge":
            return t * rng.choice([1e4, 1e15, 1e22, 1e30])
        case "constant rows":
            return torch.where(torch.rand((*shape[:-1], 1), generator=generator) < 0.5, rng.choice([0.1, -3.3]), t)
        case "zeros":
            return t * (torch.rand((*shape[:-1], 1), generator=generator) < 0.5)
        case "special":
            value = rng.choice([math.nan, math.inf, -math.inf])
            # About one row in three contains the value.
            return torch.where(torch.rand(shape, generator=generator) < 0.3 / max(shape[-1], 1), value, t)
    return t


def _options(norm, rows, d, rng, tensors, options, tensor):
    """Draw some options. Tensor options are added to `tensors`, the others to `options`."""
    for name in ("residual_scale", "layer_scale"):
        kind = rng.choice([None, None, 1.7, -0.3, 0.0, 2, (), (d,)])
        if isinstance(kind, tuple):
            tensors[name] = tensor(kind, 1.0)
        elif kind is not None:
            options[name] = kind
    if rng.random() < 0.3:
        tensors["branch_bias"] = tensor((d,))
    if rng.random() < 0.4:
        # Every shape that broadcasts to the rows: without leading dimensions, or with some of size one.
        shape = tuple(
            1 if rng.random() < 0.3 else n for n in rows[rng.randint(0, len(rows)) if rng.random() < 0.4 else 0 :]
        )
        tensors["row_scale"] = tensor(shape, 1.0)
    if rng.random() < 0.4 and math.prod(rows) * d <= 8000:
        options["dropout_p"] = rng.choice([0.0, 1.0, 0.5, rng.random(), 1e-12, 1.0 - 1e-12])
        options["seed"] = torch.tensor(rng.randint(-(2**63), 2**63 - 1))
        options["offset"] = rng.choice([0, 5, 2**32 - 1, 2**61])
    if rng.random() < 0.2:
        options["residual_dtype"] = rng.choice(FLOATS)
    if norm == "none":
        return
    if "weight" in tensors and rng.random() < 0.3:
        options["weight_offset"] = rng.choice([1.0, -0.5])
    if rng.random() < 0.2:
        options["out_dtype"] = rng.choice(FLOATS)
    if norm == "rms" and rng.random() < 0.3:
        options["casting"] = rng.choice(["llama", "t5"])


def lay_out(t, rng):
    """Return the same elements (except for `expanded`) with another memory layout."""
    if t.dim() == 0 or rng.random() < 0.6:
        return t
    dim = rng.randrange(t.dim())
    match rng.choice(LAYOUTS):
        case "transposed":
            return t.transpose(dim, -1).contiguous().transpose(dim, -1)
        case "every second":
            return torch.stack([t, t.new_full((), math.nan).expand_as(t)], dim + 1).flatten(dim, dim + 1)[
                (slice(None),) * dim + (slice(None, None, 2),)
            ]
        case "a slice":
            beside = torch.full_like(t, math.nan)
            return torch.cat([beside, t, beside], dim).narrow(dim, t.shape[dim], t.shape[dim])
        case "unaligned":
            n = rng.randint(1, 9)
            return torch.cat([t.new_full((n,), math.nan), t.flatten()])[n:].view(t.shape)
    return t.narrow(dim, 0, min(1, t.shape[dim])).expand(t.shape)
