"""Language models of litgpt, by its configuration."""

from zoo.answer import Package, group, stream, tokens

LLAMA = {
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "bias": False,
    "intermediate_size": 64,
    "parallel_residual": False,
}


def gpt(**options):
    from litgpt import GPT, Config

    return GPT(Config(**options))


BLOCK = (
    "model.py, Block: x_normed = self.norm_1(x); attention_output = self.attn(x_normed, ...); attention_output ="
    " self.post_attention_norm(attention_output); if parallel_residual: x_normed = self.norm_2(x) unless shared_attention_norm, x ="
    " attention_output + x; else x = attention_output + x; x_normed = self.norm_2(x); return self.post_mlp_norm(self.mlp(x_normed)) + x."
    " GPT: x = self.transformer.ln_f(x)."
)

litgpt = group(
    gpt,
    tokens,
    block_size=16,
    vocab_size=99,
    padded_vocab_size=99,
    n_layer=2,
    n_head=4,
    n_embd=32,
    rotary_percentage=1.0,
)

MODELS = (
    litgpt("pythia", stream("parallel"), BLOCK, parallel_residual=True),
    litgpt("falcon", stream("parallel"), BLOCK, parallel_residual=True, shared_attention_norm=True, n_query_groups=1),
    litgpt("gpt-neox, sequential", stream("pre_ln"), BLOCK, parallel_residual=False),
    litgpt("llama", stream("pre_ln", "afaf", "rms"), BLOCK, **LLAMA),
    litgpt(
        "gemma 2",
        stream("sandwich", "afaf", "rms"),
        BLOCK,
        **{**LLAMA, "mlp_class_name": "GemmaMLP"},
        post_attention_norm=True,
        post_mlp_norm=True,
        scale_embeddings=True,
        attention_logit_softcapping=50.0,
    ),
    litgpt(
        "olmo 2",
        stream("reordered", "afaf", "rms"),
        BLOCK + " norm_1 and norm_2 are Identity",
        **LLAMA,
        norm_1=False,
        norm_2=False,
        post_attention_norm=True,
        post_mlp_norm=True,
        norm_qk=True,
    ),
    litgpt(
        "mixture of experts",
        stream("pre_ln", "afaf", "rms"),
        BLOCK,
        **{**LLAMA, "mlp_class_name": "LLaMAMoE"},
        n_expert=4,
        n_expert_per_token=2,
    ),
)

PACKAGE = Package(("litgpt==0.5.13", "lightning==2.6.6", "lightning-utilities==0.15.3", "pytorch-lightning==2.6.6", "torchmetrics==1.9.0",
     "jsonargparse==4.53.0"),
    MODELS,
)  # fmt: skip
