"""Calls of `add_norm_streams` for tests: unequal streams, random coefficients, and their exact results and gradients."""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

import addnorm
from addnorm.ops.options import NORMS
from addnorm.ops.streams import formula
from addnorm.ops.streams.autograd import Inputs
from addnorm.ops.streams.kinds import GATE_KINDS, sizes_of
from support.oracle import UNIT

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
# Tensors with a value for each token, except those of "shared".
BY_TOKEN = ("streams", "branch", "mix", "inject", "collapse")
MODES = ("write", "shared", "given", "features", "identity", "read")


@dataclass(frozen=True)
class StreamCall:
    """The tensors of a call by name, and its other arguments."""

    tensors: dict[str, Tensor]
    kind: str = "given"
    norm: str = "layer"
    iterations: int = 20
    options: dict = field(default_factory=dict)

    def __call__(self, tensors=None):
        """Return the outputs by name, of `tensors` if they are given."""
        t = dict(self.tensors if tensors is None else tensors)
        gates = None
        if self.kind != "given":
            gates = addnorm.StreamGates(self.kind, t.pop("project"), t.pop("scale"), t.pop("base"), self.iterations)
        step = addnorm.add_norm_streams(t.pop("streams"), **t, gates=gates, norm=self.norm, **self.options)
        return {name: value for name, value in step._asdict().items() if value is not None}

    def formula(self, tensors, new=None):
        """Return the outputs in torch's own operators; `new` replaces the value of X', but not its gradient."""
        t = {
            name: tensors.get(name)
            for name in ("branch", "mix", "inject", "collapse", "project", "scale", "base", "weight", "bias")
        }
        x = tensors["streams"]
        dtypes = {"streams_dtype": None, "out_dtype": x.dtype, **self.options}
        if t["branch"] is not None:
            x = formula.write(
                x,
                t["branch"],
                t["mix"],
                t["inject"],
                f64
                if x.dtype == f64
                else dtypes["streams_dtype"] or x.dtype,  # X' and its gradient are not rounded in float64
                f64 if f64 in (x.dtype, *dtypes.values()) else f32,
            )
        if new is not None:
            x = x + (new.to(x.dtype) - x).detach()
        t |= {"branch": None, "mix": None, "inject": None}
        a = Inputs(
            x, **t, eps=self.options.get("eps", 1e-5), norm=NORMS[self.norm], kind=GATE_KINDS[self.kind], iterations=self.iterations,
            gate_eps=1e-6, project_eps=1e-6, magnitude=2.0,
            **{name: None if x.dtype == f64 else dtypes[name] for name in ("streams_dtype", "out_dtype")},
        )  # fmt: skip
        out = formula.boundary(a)
        results = dict(zip(("read", "collapse", "mix", "inject"), out[1:5], strict=True))
        return {"streams": x, **{name: value for name, value in results.items() if value is not None}}

    def leaves(self, dtype=None):
        """Return copies of the tensors that require gradients, in a dtype."""
        return tree_map(lambda t: t.detach().to(dtype or t.dtype).clone().requires_grad_(), self.tensors)


def make_call(
    n, d, rows, kind = "given", *, dtype = f32, mode = "write", norm = "layer",
    **options,
):  # fmt: skip
    """Return a call with streams of different means and sizes and matrices that are not symmetric.

    Modes: "write" has A, b and w for each token; "shared" one A, b and c for all; "given" reads with a given c; "features" with one
    for each feature; "identity" has no A; "read" writes nothing.
    """
    tokens = () if mode == "shared" else rows
    t = {
        "streams": (
            torch.randn(*rows, n, d) * torch.linspace(0.5, 3, n)[:, None] + torch.linspace(-1, 2, n)[:, None]
        ).to(dtype),
        "weight": torch.randn(d) if norm != "none" else None,
        "bias": torch.randn(d) if norm == "layer" else None,
    }
    if mode != "read":
        t |= {"branch": torch.randn(*rows, d).to(dtype), "inject": torch.randn(*tokens, n)}
        t["mix"] = None if mode == "identity" else torch.randn(*tokens, n, n)
    if mode == "features":
        t["collapse"] = torch.randn(*rows, n, d)
    elif mode in ("given", "shared") or kind == "given":
        t["collapse"] = torch.randn(*tokens, n)
    if kind != "given":
        sizes = sizes_of(GATE_KINDS[kind], n)
        shape = (n + 2, d) if kind == "hyper" else (sizes.logits, n * d)
        t |= {
            "project": torch.randn(shape) / d**0.5,
            "scale": torch.rand(sizes.scales) + 0.5,
            "base": torch.randn(sizes.base) / 2,
        }
    return StreamCall(
        {name: value for name, value in t.items() if value is not None}, kind, norm, options=dict(options)
    )


def make_varied_call(kind, mode, dtype, sizes):
    """Return a call whose tokens, norm and size, one of `sizes` (n and d_model), vary with its kind and mode."""
    i = list(GATE_KINDS).index(kind) * 7 + MODES.index(mode)
    n, d = sizes[i % len(sizes)]
    return make_call(n, d, ((), (1,), (2, 9), (37,))[i % 4], kind, dtype=dtype, mode=mode, norm=[*NORMS][i % 3])


def run(function, tensors, cotangents):
    """Return outputs and gradients by name; a gradient's name starts with d."""
    outputs = function(tensors)
    used = [name for name in cotangents if outputs[name].requires_grad]
    torch.autograd.backward(
        [outputs[name] for name in used], [cotangents[name].to(outputs[name].dtype) for name in used]
    )
    grads = {f"d{name}": torch.zeros_like(t) if t.grad is None else t.grad for name, t in tensors.items()}
    return tree_map(Tensor.detach, outputs) | grads


def assert_accurate(call, roundings=16):
    """Check outputs and gradients of a call against float64.

    The largest error is at most twice that of torch's own operators in float32 on the same inputs, each against the exact result at
    its own X', plus some roundings of float32 of the largest value (an order of summation) and one of the dtype. A gradient may be
    a sum whose terms cancel: as many roundings of the call's largest gradient are added, and four of the terms of c's gradient,
    which cancel in a norm: one of each factor, one of the product. So may a coefficient of "hyper", β + α tanh(z): it has the
    roundings of β and α.
    """
    ours = run(call, call.leaves(), cotangents := make_cotangents(call))
    theirs = run(call.formula, call.leaves(), cotangents)
    exact = run(lambda t: call.formula(t, ours["streams"]), call.leaves(f64), cotangents)
    exact_theirs = run(lambda t: call.formula(t, theirs["streams"]), call.leaves(f64), cotangents)
    with torch.no_grad():  # X' itself is not compared with its own value
        exact["streams"] = exact_theirs["streams"] = call.formula(call.leaves(f64))["streams"]
    terms = terms_of_coefficients(call, ours["streams"], cotangents)
    for name, value in ours.items():
        if not value.numel():
            continue
        error, reference = worst(value, exact[name]), worst(theirs[name], exact_theirs[name])
        size = worst(exact[name])
        if call.kind == "hyper" and name in ("collapse", "mix", "inject"):
            size = max(size, sum(worst(call.tensors[part]) for part in ("base", "scale")))
        bound = (
            2 * reference
            + roundings * UNIT[f32] * size
            + (1.01 * UNIT[value.dtype] * size if value.dtype != f32 else 0.0)
        )
        if name.startswith("d"):
            bound += (
                roundings * UNIT[f32] * max(worst(t) for key, t in exact.items() if key.startswith("d") and t.numel())
            ) + 4 * UNIT[f32] * terms.get(name, 0.0)
        assert value.dtype == theirs[name].dtype, name
        assert error <= bound, f"{name}: error {error:.3g}, bound {bound:.3g}, torch {reference:.3g}"


def terms_of_coefficients(call, streams, cotangents):
    """Return the largest gradient, by name, that flows through c if the terms of its gradient have one sign: c X' before a norm.

    With one stream N(c X') hardly depends on c: terms of several hundred have a sum near zero.
    """
    tensors = call.leaves(f64)
    outputs = call.formula(tensors, streams)
    if call.norm == "none" or "collapse" not in outputs:
        return {}
    x, c = outputs["streams"].detach(), outputs["collapse"]
    r = formula.read(x, c.detach(), f64).requires_grad_()
    eps = call.options.get("eps", 1e-5)
    if call.norm == "rms":
        normed = F.rms_norm(r, r.shape[-1:], tensors["weight"], eps)
    else:
        normed = F.layer_norm(r, r.shape[-1:], tensors["weight"], None, eps)
    (gradient,) = torch.autograd.grad(normed, r, cotangents["read"].to(f64))
    c.backward((gradient.unsqueeze(-2) * x).abs().sum(-1))
    return {f"d{name}": worst(t.grad) for name, t in tensors.items() if t.grad is not None and t.numel()}


def make_cotangents(call):
    """Return random cotangents of all outputs."""
    with torch.no_grad():
        return tree_map(lambda t: torch.randn(t.shape, dtype=f32).to(t), call())


def worst(t, exact=0.0):
    """Return the largest error, or without exact values the largest magnitude."""
    return (t.to(f64) - exact).abs().max().item()


def in_float64(call, **changes):
    """Return the call with tensors of float64, and other fields."""
    return replace(call, tensors=tree_map(Tensor.double, call.tensors), **changes)
