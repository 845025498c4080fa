"""Models with several streams: small ones of transformers, and mHC by hand in five layouts, with errors of implementations."""

import importlib

import torch
from torch import nn

from addnorm import wirings

D, N, LAYERS = 16, 4, 2
MHC = wirings.mhc(iterations=6)  # that of `HandMhc`; the operators of 20 iterations would take most of a test's time
FORMS = ("stacked", "first", "flat", "batch", "tuple")


def sinkhorn(logits, iterations, eps, rows_first=False):
    first, second = (-1, -2) if rows_first else (-2, -1)
    a = torch.softmax(logits, first) + eps
    a = a / (a.sum(second, keepdim=True) + eps)
    for _ in range(iterations - 1):
        a = a / (a.sum(first, keepdim=True) + eps)
        a = a / (a.sum(second, keepdim=True) + eps)
    return a


class Site(nn.Module):
    """One sublayer with its coefficients; `fault` names an error."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.phi = nn.Parameter(torch.randn(N * N + 2 * N, N * D) * (N * D) ** -0.5)
        self.alpha, self.beta = nn.Parameter(torch.rand(3) + 0.5), nn.Parameter(torch.randn(N * N + 2 * N))
        self.norm = nn.Identity() if fault == "no norm" else nn.RMSNorm(D, eps=1e-5 if fault == "eps" else 1e-6)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def coefficients(self, x):
        """Return c, A and b of streams `(*, n, d)`."""
        n, fault = N, self.fault
        eps = 1e-4 if fault == "norm eps" else 1e-6
        axes = -1 if fault == "own rms" else (-2, -1)
        x = x * torch.rsqrt(x.square().mean(axes, keepdim=True) + eps)
        z = x.flatten(-2) @ self.phi.mT
        z_c, z_b, z_a = z.split([n, n, n * n], -1)
        beta_c, beta_b, beta_a = self.beta.split([n, n, n * n])
        c = torch.sigmoid(self.alpha[0] * z_c + beta_c) + 1e-6
        b = (1.0 if fault == "half gate" else 2.0) * torch.sigmoid(self.alpha[1] * z_b + beta_b)
        logits = (self.alpha[2] * z_a + beta_a).unflatten(-1, (n, n))
        a = sinkhorn(logits, 3 if fault == "iterations" else 6, 1e-6, rows_first=fault == "rows first")
        match fault:
            case "transposed":
                a = a.mT
            case "not applied":
                a = torch.eye(n, dtype=a.dtype).expand_as(a)
            case "scaled":
                a = 0.5 * a
            case "tanh":
                c = torch.tanh(self.alpha[0] * z_c + beta_c)
            case "turned write":
                b = b.flip(-1)
            case "turned read":
                c = c.flip(-1)
        return c, a, b

    def branch(self, r):
        return self.down(torch.nn.functional.gelu(self.up(self.norm(r))))


class HandMhc(nn.Module):
    """mHC whose streams are one tensor `(B, T, n, d)`, or lie in another way (`form`).

    `faults` has the error of each sublayer by its number; a name alone is the error of all of them.
    """

    def __init__(self, form="stacked", faults="", layers=LAYERS):
        super().__init__()
        self.form, self.n, self.d = form, N, D
        faults = dict.fromkeys(range(2 * layers), faults) if isinstance(faults, str) else faults
        self.kind = next(iter(faults.values()), "")
        self.layers = nn.ModuleList(
            nn.ModuleList(Site(faults.get(2 * k + j, "")) for j in range(2)) for k in range(layers)
        )
        self.phi, self.beta = nn.Parameter(torch.randn(N, N * D) * (N * D) ** -0.5), nn.Parameter(torch.randn(N))
        self.alpha = nn.Parameter(torch.ones(1))
        self.norm = nn.Identity() if self.kind == "no final norm" else nn.RMSNorm(D, eps=1e-6)

    def forward(self, x):
        n, X = self.n, self.start(x)
        before, used = self.stack(X), None
        for site in self.sites:
            own = self.stack(X)
            c, a, b = site.coefficients(before if site.fault == "stale" else own)
            before, read = own, used if site.fault == "single pass" else c
            if read is None:
                read = torch.eye(n, dtype=x.dtype)[0].expand_as(c)
            w = site.branch(self.read(X, read))
            if site.fault == "late":  # the order of the computation is no error
                _, a, b = site.coefficients(own)
            X, used = self.write(X, a, b, w), c
        own = self.stack(X)
        z = (
            own.flatten(-2)
            * torch.rsqrt(own.square().mean((-2, -1)) + (1e-4 if self.kind == "norm eps" else 1e-6)).unsqueeze(-1)
            @ self.phi.mT
        )
        head = torch.sigmoid(self.alpha * z + self.beta) + 1e-6
        if self.kind == "mean head":
            head = torch.full_like(head, 1 / n)
        return self.norm(self.read(X, used if self.kind == "single pass" else head))

    @property
    def sites(self):
        """Return the sublayers with their coefficients."""
        return [site for layer in self.layers for site in layer]

    def start(self, x):
        """Return n copies of the embedding."""
        n = self.n
        match self.form:
            case "stacked":
                return x.unsqueeze(-2).repeat(1, 1, n, 1)
            case "first":
                return x.expand(n, *x.shape)
            case "flat":
                return x.repeat(1, 1, n)
            case "batch":
                return x.repeat_interleave(n, 0)
            case "tuple":
                return (x,) * n

    def stack(self, X):
        """Return the streams as `(B, T, n, d)`."""
        n, d = self.n, self.d
        match self.form:
            case "stacked":
                return X
            case "first":
                return X.movedim(0, -2)
            case "flat":
                return X.unflatten(-1, (n, d))
            case "batch":
                return X.unflatten(0, (-1, n)).movedim(1, -2)
            case _:
                return torch.stack(X, -2)

    def read(self, X, c):
        match self.form:
            case "stacked":
                return (c.unsqueeze(-1) * X).sum(-2)
            case "first":
                return torch.einsum("btn,nbtd->btd", c, X)
            case "tuple":
                return sum(c[..., j, None] * X[j] for j in range(self.n))
            case _:
                return (c.unsqueeze(-2) @ self.stack(X)).squeeze(-2)

    def write(self, X, a, b, w):
        if self.form == "tuple":
            mixed = (sum(a[..., k, j, None] * X[j] for j in range(self.n)) for k in range(self.n))
            return tuple(m + b[..., k, None] * w for k, m in enumerate(mixed))
        if self.form == "first":
            return torch.einsum("btkj,jbtd->kbtd", a, X) + torch.einsum("btk,btd->kbtd", b, w)
        write = b.unsqueeze(-1) * w.unsqueeze(-2)
        if self.form == "stacked":
            return torch.einsum("btkj,btjd->btkd", a, X) + write
        new = a @ self.stack(X) + write
        return new.flatten(-2) if self.form == "flat" else new.movedim(-2, 1).flatten(0, 1)


def make_mhc(form="stacked", faults="", layers=LAYERS):
    """Return mHC by hand in evaluation mode, always the same for the same arguments."""
    torch.manual_seed(1)
    return HandMhc(form, faults, layers).eval()


# Small models of transformers with several streams, or with computed coefficients; real_models.py has their wirings.
_BASE = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2}
_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 16, "index_topk": 16, "index_head_dim": 16, "index_n_heads": 2,
}  # fmt: skip
_KV = {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8}
CONFIGS = {
    "deepseek_v4:DeepseekV4": {
        **_MOE, "num_hidden_layers": 3, "head_dim": 16, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "index_topk": 4,
        "layer_types": ["sliding_attention"] * 3, "mlp_layer_types": ["moe"] * 3, "sliding_window": 8, "index_n_heads": 2,
        "index_head_dim": 8, "partial_rotary_factor": 0.5, "max_position_embeddings": 128,
    },
    "glm5_next:Glm5NextText": {
        **_MOE, **_MLA, "num_hidden_layers": 3, "intermediate_size": 32, "num_key_value_heads": 2, "qk_nope_head_dim": 16,
        "linear_head_dim": 16, "linear_num_heads": 2, "pad_token_id": 0, "mlp_layer_types": ["dense"] * 3,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    },
    "hy_v4:HYV4": {
        **_MOE, **_MLA, "num_hidden_layers": 3, "intermediate_size": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "mlp_layer_types": ["dense"] * 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen4_exp:Qwen4ExpText": {
        "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16, "linear_key_head_dim": 16, "num_experts": 4,
        "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "hc_lowrank": 8, "indexer_n_heads": 2,
        "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4,
        "layer_types": ["linear_attention", "indexed_attention"],
    },
    "inkling2:Inkling2Text": {
        **_MOE, "num_hidden_layers": 6, "num_key_value_heads": 1, "head_dim": 16, "unpadded_vocab_size": 64,
        "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 16, "sliding_window_size": 8, "d_rel": 4,
        "rel_extent": 8, "n_layers_per_attn_res_block": 2, "eos_token_id": 1,
        "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"] * 2,
    },
    "zaya:Zaya": {
        "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 16, "num_experts": 4,
        "router_hidden_size": 8, "eos_token_id": 3,
    },
    "beam:Beam": {
        **_KV, "num_hidden_layers": 3, "intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense"] * 3,
    },
    "muse_spark:MuseSparkText": {
        **_KV, "num_hidden_layers": 2, "intermediate_size": 32, "moe_intermediate_size": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2, "moe_hidden_size": 16, "mlp_layer_types": ["dense"] * 2, "bos_token_id": 0, "eos_token_id": 1,
    },
    "neomme:NeoMME": {
        **_KV, "num_hidden_layers": 2, "intermediate_size": 32, "embedding_rank": 16, "embedding_dim": 8, "patch_size": 4,
    },
}  # fmt: skip


def build_transformers(name, **options):
    """Return a small model of transformers with random weights; `options` change its configuration."""
    module, prefix = name.split(":")
    library = importlib.import_module(f"transformers.models.{module}")
    config = getattr(library, f"{prefix}Config")(**_BASE | CONFIGS[name] | options)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return getattr(library, f"{prefix}Model")(config).eval()
