"""TransformerLens' own implementations."""

from zoo.answer import Package, group, stream, tokens


def make_hooked(kind="HookedTransformer", **options):
    import transformer_lens

    config = transformer_lens.HookedTransformerConfig(**options, init_weights=True)
    return getattr(transformer_lens, kind)(config)


BLOCK = (
    "components/transformer_block.py: attn_out = self.attn(query_input=self.ln1(query_input), key_input=self.ln1(key_input),"
    " value_input=self.ln1(value_input)): one norm, computed three times; resid_mid = resid_pre + attn_out; normalized_resid_mid ="
    " self.ln2(mlp_in); resid_post = resid_mid + mlp_out. HookedTransformer: residual = self.ln_final(residual)."
)

hooked = group(
    make_hooked,
    tokens,
    n_layers=2,
    d_model=32,
    n_heads=4,
    d_head=8,
    d_mlp=64,
    n_ctx=16,
    d_vocab=99,
    act_fn="gelu",
    device="cpu",
)

MODELS = (
    hooked("layer norm", stream("pre_ln"), BLOCK, normalization_type="LN"),
    hooked(
        "rms norm",
        stream("pre_ln", "afaf", "rms"),
        BLOCK,
        normalization_type="RMS",
        gated_mlp=True,
        positional_embedding_type="rotary",
        rotary_dim=8,
    ),
    hooked(
        "layer norm without weights",
        stream("pre_ln"),
        BLOCK + " LayerNormPre: x = x - x.mean(-1, keepdim=True); x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()",
        normalization_type="LNPre",
    ),
    hooked(
        "no norm",
        stream("no_norm", "afaf", None, False),
        BLOCK + " normalization_type=None: ln1, ln2 and ln_final are Identity",
        normalization_type=None,
    ),
    hooked(
        "norms before and after",
        stream("sandwich", "afaf", "rms"),
        BLOCK + " attn_out = self.ln1_post(attn_out); mlp_out = self.ln2_post(mlp_out)",
        normalization_type="RMS",
        use_normalization_before_and_after=True,
    ),
    hooked(
        "parallel",
        stream("parallel"),
        BLOCK
        + " parallel_attn_mlp: normalized_resid_pre_2 = self.ln2(resid_pre); resid_post = resid_pre + attn_out + mlp_out",
        normalization_type="LN",
        parallel_attn_mlp=True,
    ),
    hooked(
        "attention alone",
        stream("pre_ln", "aa"),
        BLOCK + " attn_only: resid_post = resid_pre + attn_out",
        normalization_type="LN",
        attn_only=True,
    ),
    hooked(
        "bert",
        stream("post_ln", final_norm=False, embedding_norm=True),
        "components/bert_block.py: resid_mid = resid_pre + attn_out; normalized_resid_mid = self.ln1(mlp_in); resid_post ="
        " normalized_resid_mid + mlp_out; normalized_resid_post = self.ln2(resid_post). bert_embed.py: self.ln(embeddings_out)",
        kind="HookedEncoder",
        normalization_type="LN",
    ),
)

# 2.16 is the last version line with its own implementations; later ones wrap the models of transformers.
PACKAGE = Package(("transformer-lens==2.16.1", "einops==0.8.2", "jaxtyping==0.3.11", "beartype==0.23.1", "fancy_einsum==0.0.3", "better_abc==0.0.3",
     "wadler_lindig==0.1.8", "accelerate==1.15.0", "datasets==5.2.0", "transformers-stream-generator==0.0.5", "sentencepiece==0.2.3",
     "multiprocess==0.70.19", "dill==0.4.1", "xxhash==4.1.0", "typeguard==4.4.4", "platformdirs==4.14.7"),
    MODELS,
    stubs=("wandb",),
)  # fmt: skip
