"""Language models of litgpt, by its configuration."""

from functools import partial

from zoo.answer import Package, model, stream, tokens

SIZES = {
    "block_size": 16, "vocab_size": 99, "padded_vocab_size": 99, "n_layer": 2, "n_head": 4, "n_embd": 32, "rotary_percentage": 1.0,
}  # fmt: skip
LLAMA = {
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "bias": False,
    "intermediate_size": 64,
    "parallel_residual": False,
}


def gpt(**options):
    from litgpt import GPT, Config

    return GPT(Config(**{**SIZES, **options}))


BLOCK = (
    "model.py, Block: x_normed = self.norm_1(x); attention_output = self.attn(x_normed, ...); attention_output ="
    " self.post_attention_norm(attention_output); if parallel_residual: x_normed = self.norm_2(x) unless shared_attention_norm, x ="
    " attention_output + x; else x = attention_output + x; x_normed = self.norm_2(x); return self.post_mlp_norm(self.mlp(x_normed)) + x."
    " GPT: x = self.transformer.ln_f(x)."
)

MODELS = (
    model("pythia", partial(gpt, parallel_residual=True), tokens, stream("parallel"), code=BLOCK),
    model("falcon", partial(gpt, parallel_residual=True, shared_attention_norm=True, n_query_groups=1), tokens,
          stream("parallel"), code=BLOCK),
    model("gpt-neox, sequential", partial(gpt, parallel_residual=False), tokens, stream("pre_ln"), code=BLOCK),
    model("llama", partial(gpt, **LLAMA), tokens, stream("pre_ln", "afaf", "rms"), code=BLOCK),
    model("gemma 2", partial(gpt, **{**LLAMA, "mlp_class_name": "GemmaMLP"}, post_attention_norm=True, post_mlp_norm=True,
                             scale_embeddings=True, attention_logit_softcapping=50.0), tokens,
          stream("sandwich", "afaf", "rms"), code=BLOCK),
    model("olmo 2", partial(gpt, **LLAMA, norm_1=False, norm_2=False, post_attention_norm=True, post_mlp_norm=True, norm_qk=True), tokens,
          stream("reordered", "afaf", "rms"), code=BLOCK + " norm_1 and norm_2 are Identity"),
    model("mixture of experts", partial(gpt, **{**LLAMA, "mlp_class_name": "LLaMAMoE"}, n_expert=4, n_expert_per_token=2), tokens,
          stream("pre_ln", "afaf", "rms"), code=BLOCK),
)  # fmt: skip

PACKAGE = Package(
    "litgpt",
    ("litgpt==0.5.13", "lightning==2.6.6", "lightning-utilities==0.15.3", "pytorch-lightning==2.6.6", "torchmetrics==1.9.0",
     "jsonargparse==4.53.0"),
    MODELS,
)  # fmt: skip
