"""Operators with the schemas of other libraries, in float32 inside, and pre-LN models that call them as these libraries do."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.random_models.graphs import Graph
from support.stream_steps import make_mlp

D, EPS = 16, 1e-5
faults = {}  # what the operators do wrong: "eps", "sign", "swap"


def compute(x, residual, weight, eps, offset=0.0):
    """Return the norm and the sum; the norm is that of the sum before its rounding."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    z = x.to(wide)
    if residual is not None:
        z = residual.to(wide) + faults.get("sign", 1) * z
    y = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps * faults.get("eps", 1.0)) * (weight.to(wide) + offset)
    return y.to(x.dtype), z.to(x.dtype)


def norm_alone(x, weight, eps):
    return compute(x, None, weight, eps)[0]


def into(offset=0.0):
    """Return an operator that writes the norm, with weight + offset, into its first argument."""

    def run(out, x, weight, eps, *rest):
        out.copy_(compute(x, None, weight, eps, offset)[0])

    return run


def in_place(offset=0.0):
    """Return an operator that writes the norm, with weight + offset, and the sum into its arguments."""

    def run(x, residual, weight, eps, *rest):
        y, z = compute(x, residual, weight, eps, offset)
        first, second = (residual, x) if faults.get("swap") else (x, residual)
        first.copy_(y)
        second.copy_(z)

    return run


def quack(x, weight, out, bias, rstd, mean, residual, residual_out, eps=1e-6, is_layernorm=False):
    y, z = compute(x, residual, weight, eps)
    out.copy_(y)
    if residual_out is not None:
        residual_out.copy_(z)


def rstd(x):
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)


def hub(x, weight, *options):
    return [compute(x, None, weight, options[6])[0], x.new_empty(len(x))]


NORM, PAIR = (
    "(Tensor{} {}, Tensor input, Tensor weight, float {}",
    "(Tensor! input, Tensor! residual, Tensor weight, float {}",
)
PDL = ", bool enable_pdl) -> ()"
# schema, implementation, and how a model calls it: (operator, x, residual, weight) -> (norm, sum)


def call_into(*rest):
    def call(op, x, residual, weight):
        z = residual + x
        out = torch.empty_like(z)
        op(out, z, weight, EPS, *rest)
        return out, z

    return call


def call_in_place(*rest):
    def call(op, x, residual, weight):
        op(x, residual, weight, EPS, *rest)
        return x, residual

    return call


def call_norm(op, x, residual, weight):
    z = residual + x
    out = op(z, weight, EPS)
    return (out if isinstance(out, Tensor) else out[0]), z


def call_pair(op, x, residual, weight):
    y, *_, z = op(x, residual, weight, EPS)
    return y, z


def call_quack(op, x, residual, weight):
    out, z = torch.empty_like(x), torch.empty_like(residual)
    op(x, weight, out, None, None, None, residual, z, EPS, False)
    return out, z


def call_hub(op, x, residual, weight):
    z = residual + x
    options = None, None, None, None, None, 0.0, EPS, 1.0, 5, None, False, True
    return op(z.view(-1, D), weight, *options)[0].view(z.shape), z


HUB = (
    "(Tensor input, Tensor gamma, Tensor? beta, Tensor? rowscale, Tensor? colscale, Tensor? x0_subset, Tensor? z_subset, "
    "float dropout_p, float epsilon, float rowscale_const, int z_numrows, Generator? gen, bool residual_in_fp32, bool is_rms_norm) "
    "-> Tensor[]"
)
QUACK = (
    "(Tensor x, Tensor? weight, Tensor(a2!) out, Tensor? bias, Tensor(a4!)? rstd, Tensor(a5!)? mean, Tensor? residual, "
    "Tensor(a7!)? residual_out, float eps=1e-6, bool is_layernorm=False) -> ()"
)
OPERATORS = {
    "_C::rms_norm": ("(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()", into(), call_into()),
    "_C::fused_add_rms_norm": (
        "(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()", in_place(), call_in_place(),
    ),
    "sgl_kernel::rmsnorm": (f"{NORM.format('!', 'output', 'eps')}{PDL}", into(), call_into(True)),
    "sgl_kernel::gemma_rmsnorm": (f"{NORM.format('!', 'output', 'eps')}{PDL}", into(1.0), call_into(True)),
    "sgl_kernel::fused_add_rmsnorm": (f"{PAIR.format('eps')}{PDL}", in_place(), call_in_place(False)),
    "sgl_kernel::gemma_fused_add_rmsnorm": (f"{PAIR.format('eps')}{PDL}", in_place(1.0), call_in_place(False)),
    "sgl_kernel::rmsnorm_cpu": (
        "(Tensor input, Tensor weight, float eps) -> Tensor", norm_alone, call_norm,
    ),
    "vllm_ir::fused_add_rms_norm": (
        "(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, int? variance_size=None) -> (Tensor, Tensor)",
        lambda *a: compute(*a[:4]), call_pair,
    ),
    "npu::npu_rms_norm": (
        "(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
        lambda x, *a: (compute(x, None, *a)[0], rstd(x)), call_norm,
    ),
    "npu::npu_add_rms_norm": (
        "(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
        lambda *a: (compute(*a)[0], rstd(a[0] + a[1]), compute(*a)[1]), call_pair,
    ),
    "quack::_rmsnorm_fwd": (QUACK, quack, call_quack),
    "_rmsnorm_0a1b2c3::apply_rms_norm": (
        "(Tensor hidden_states, Tensor weight, float variance_epsilon) -> Tensor",
        norm_alone, call_norm,
    ),
    "_layer_norm_0a1b2c3::dropout_add_ln_fwd": (HUB, hub, call_hub),
    "ownlib::add_rms_norm": (  # not built in
        "(Tensor! branch, Tensor! stream, Tensor gain, float eps) -> ()", in_place(), call_in_place(),
    ),
    "ownlib::rms_norm": (
        "(Tensor x, Tensor gain, float eps) -> Tensor", norm_alone, call_norm,
    ),
    "ownlib::add": (
        "(Tensor x, Tensor y) -> Tensor", lambda x, y: x + y,
        lambda op, x, residual, weight: (F.rms_norm(z := op(residual, x), (D,), weight, EPS), z),
    ),
    "ownlib::post_norm": (
        "(Tensor x, Tensor residual, Tensor gain, float eps) -> Tensor", lambda *a: compute(*a)[0],
        lambda *a: (a[0](*a[1:], EPS),) * 2,
    ),
}  # fmt: skip
LIBRARIES = []
for name, (schema, function, _) in OPERATORS.items():
    namespace, _, bare = name.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(bare + schema)
    library.impl(bare, function, "CPU")
    LIBRARIES.append(library)  # a library that is collected takes its operators along


class AddNorm(nn.Module):
    """Add and norm of (hidden, residual) by an operator; in plain torch without a name."""

    def __init__(self, name=""):
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(0.5 + torch.rand(D))

    def forward(self, hidden, residual):
        if not self.name:
            z = residual + hidden
            return F.rms_norm(z, (D,), self.weight, EPS), z
        namespace, _, bare = self.name.partition("::")
        op = getattr(getattr(torch.ops, namespace), bare)
        return OPERATORS[self.name][2](op, hidden, residual, self.weight)


def run_layer(m, hidden, residual, norm):
    hidden, residual = m.norm(m.mlp(hidden), residual)
    return norm(m.gate(hidden), residual)


def run_model(m, ids):
    """Pass the pair (hidden, residual) through the layers; the norm of the next layer adds."""
    residual = m.embed(ids)
    hidden = m.first(residual)
    for layer, norm in zip(m.layers, m.norms, strict=True):
        hidden, residual = layer(hidden, residual, norm)
    return hidden


def make_model(name=""):
    layers = [Graph(run_layer, mlp=make_mlp(), norm=AddNorm(name), gate=make_mlp()) for _ in range(2)]
    norms = nn.ModuleList(AddNorm(name) for _ in layers)
    return Graph(
        run_model, embed=nn.Embedding(20, D), first=nn.RMSNorm(D, EPS), layers=nn.ModuleList(layers), norms=norms
    )


def make_pair(name, dtype=torch.float32):
    """Return a model that calls an operator, the same model in plain torch, and tokens."""
    torch.manual_seed(0)
    model, plain = make_model(name), make_model()
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(0, 20, (2, 5))
    return model.to(dtype).eval().requires_grad_(False), plain.to(dtype).eval().requires_grad_(False), ids
