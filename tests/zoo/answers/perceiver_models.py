"""perceiver-pytorch."""

from zoo.answer import Package, model, noise, stream

SIZES = {
    "num_latents": 6,
    "latent_dim": 32,
    "cross_heads": 2,
    "latent_heads": 4,
    "cross_dim_head": 8,
    "latent_dim_head": 8,
}

BLOCK = (
    "perceiver_pytorch.py, PerceiverBlock: x = self.cross_attn(x, context = context, ...) + x; x = self.cross_ff(x) + x; x = self_attn(x) + x; x ="
    " self_ff(x) + x, each a PreNorm: x = self.norm(x); return self.fn(x). x begins as repeat(self.latents, 'n d -> b n d')."
)

MODELS = (
    model(
        "perceiver",
        "perceiver_pytorch:Perceiver",
        lambda: (noise(2, 4, 4, 3),),
        stream("pre_ln", "cfaf" * 2, final_norm=None),
        BLOCK + " to_logits: Reduce('b n d -> b d', 'mean'), LayerNorm, Linear",
        num_freq_bands=2,
        depth=2,
        max_freq=4.0,
        num_classes=10,
        **SIZES,
    ),
    model(
        "perceiver io",
        "perceiver_pytorch:PerceiverIO",
        lambda: {"data": noise(2, 7, 12), "queries": noise(2, 5, 16)},
        stream("pre_ln", "cf" + "af" * 2, final_norm=None),
        BLOCK
        + " perceiver_io.py: latents = self.decoder_cross_attn(queries, context = x): no residual, and norm_context is of x_L",
        depth=2,
        dim=12,
        queries_dim=16,
        logits_dim=5,
        **SIZES,
    ),
)

PACKAGE = Package(("perceiver-pytorch==0.11.0", "einops==0.8.2"), MODELS)
