"""Selective state spaces of mambapy."""

from zoo.answer import Package, model, stream, tokens, vectors


def language_model(mup):
    from mambapy.lm import LM
    from mambapy.mamba import MambaConfig

    return LM(MambaConfig(d_model=32, n_layers=3, d_state=4, mup=mup), vocab_size=99)


def mamba():
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=32, n_layers=3, d_state=4))


def jamba():
    from mambapy.jamba import JambaLM, JambaLMConfig

    return JambaLM(JambaLMConfig(
        d_model=32, n_layers=2, mlp_size=64, d_state=4, num_attention_heads=4, num_key_value_heads=2, num_experts=4, attn_layer_offset=1,
        attn_layer_period=2, vocab_size=99,
    ))  # fmt: skip


CODE = "mamba.py, ResidualBlock: output = self.mixer(self.norm(x)) + x; RMSNorm: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)."

MODELS = (
    model("mamba", mamba, vectors, stream("pre_ln", "???", "rms", False), CODE + " Mamba has no norm at the end"),
    model(
        "mamba, language model",
        language_model,
        tokens,
        stream("pre_ln", "???", "rms"),
        CODE + " lm.py: x = self.norm_f(x)",
        mup=False,
    ),
    model(
        "mamba, language model in mup",
        language_model,
        tokens,
        stream("pre_ln", "???", "rms"),
        CODE + " lm.py: x = self.norm_f(x); if self.config.mup: x = x / self.config.mup_width_mult",
        mup=True,
    ),
    model(
        "jamba",
        jamba,
        tokens,
        stream("pre_ln", "?faf", "rms"),
        "jamba.py, MambaLayer and AttentionLayer: residual = x; x = self.input_layernorm(x); ... x = residual + x; residual = x; x ="
        " self.pre_moe_layernorm(x); x, router_logits = self.moe(x); x = residual + x. JambaLM: x = self.final_layernorm(x)",
    ),
)

TRITON = (
    "mamba_ssm",
    "mamba_ssm.ops",
    "mamba_ssm.ops.triton",
    "mamba_ssm.ops.triton.ssd_combined",
)  # Mamba 2 alone calls it

PACKAGE = Package(("mambapy==1.2.0", "einops==0.8.2"), MODELS, stubs=TRITON)
