"""Models of torchtune, by its builders."""

from zoo.answer import Package, group, model, noise, stream, tokens

LAYER = (
    "modules/transformer.py, TransformerSelfAttentionLayer: h = self.sa_norm(x); attn_out = self.attn(h, h, ...); h = self.sa_scale(attn_out) +"
    " x; mlp_out = self.mlp(self.mlp_norm(h)); out = h + self.mlp_scale(mlp_out). TransformerDecoder: h = self.norm(h)."
)
CLIP = {"embed_dim": 32, "num_layers": 2, "num_heads": 4}

torchtune = group(
    "torchtune.models.",
    tokens,
    vocab_size=99,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    embed_dim=32,
    intermediate_dim=64,
    max_seq_len=16,
)

MODELS = (
    torchtune(
        "llama 3",
        stream("pre_ln", "afaf", "rms"),
        LAYER + " sa_scale and mlp_scale are Identity",
        of="llama3._component_builders:llama3",
    ),
    torchtune(
        "qwen 2",
        stream("pre_ln", "afaf", "rms"),
        LAYER + " sa_scale and mlp_scale are Identity",
        of="qwen2._component_builders:qwen2",
    ),
    torchtune(
        "gemma 2",
        stream("sandwich", "afaf", "rms"),
        LAYER + " gemma2: sa_scale=GemmaRMSNorm(...), mlp_scale=GemmaRMSNorm(...)",
        of="gemma2._component_builders:gemma2",
        head_dim=8,
        query_pre_attn_scalar=8,
    ),
    model(
        "t5 encoder",
        "torchtune.models.t5._component_builders:t5_encoder",
        tokens,
        stream("pre_ln", "afaf", "rms"),
        "models/t5/_encoder.py: x = x + self.attn(self.sa_norm(x), rel_pos_bias); x = x + self.mlp(self.mlp_norm(x)); return"
        " self.final_norm(x)",
        embed_dim=32,
        mlp_dim=64,
        num_heads=4,
        head_dim=8,
        num_layers=2,
        rel_pos_num_buckets=8,
        rel_pos_max_dist=16,
        vocab_size=99,
        norm_eps=1e-6,
        max_seq_len=7,
    ),
    model(
        "clip text",
        "torchtune.models.clip._component_builders:clip_text_encoder",
        tokens,
        stream("pre_ln"),
        LAYER + " models/clip/_text_encoder.py: x = self.final_norm(x)",
        **CLIP,
        vocab_size=99,
        max_seq_len=7,
    ),
    model(
        "clip vision",
        "torchtune.models.clip._component_builders:clip_vision_encoder",
        lambda: (noise(1, 1, 1, 3, 16, 16),),
        stream("pre_ln", embedding_norm=True),
        LAYER + " modules/vision_transformer.py: x = self.ln_pre(x); the layers; x = self.ln_post(x)",
        **CLIP,
        tile_size=16,
        patch_size=8,
        use_tile_pos_embed=False,
    ),
)

PACKAGE = Package(("torchtune==0.6.1", "torchao==0.10.0", "omegaconf==2.4.0", "antlr4-python3-runtime==4.13.2", "datasets==5.2.0", "multiprocess==0.70.19",
     "dill==0.4.1", "xxhash==4.1.0", "requests==2.34.2", "urllib3==2.8.0", "certifi==2026.10.18", "charset-normalizer==3.5.2",
     "tiktoken==0.14.0", "sentencepiece==0.2.3", "torchvision==0.29.1"),
    MODELS,
)  # fmt: skip
