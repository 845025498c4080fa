"""g-mlp-pytorch."""

from zoo.answer import Package, image, make, model, stream, tokens

CODE = "g_mlp_pytorch.py: Residual(PreNorm(dim, gMLPBlock(...))): return self.fn(x) + x; one sublayer a layer; to_logits begins with LayerNorm"

MODELS = (
    model(
        "gmlp",
        make("g_mlp_pytorch:gMLP", num_tokens=99, dim=32, depth=3, seq_len=7, attn_dim=8),
        tokens,
        stream("pre_ln", "???"),
        code=CODE,
    ),
    model(
        "gmlp, images",
        make("g_mlp_pytorch:gMLPVision", image_size=16, patch_size=8, num_classes=10, dim=32, depth=3),
        image,
        stream("pre_ln", "???", final_norm=True),
        code=CODE + " of all tokens, then their mean",
    ),
)

PACKAGE = Package("g-mlp-pytorch", ("g-mlp-pytorch==0.1.5", "einops==0.8.2"), MODELS)
