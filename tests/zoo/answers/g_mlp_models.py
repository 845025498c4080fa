"""g-mlp-pytorch."""

from zoo.answer import Package, image, model, stream, tokens

CODE = "g_mlp_pytorch.py: Residual(PreNorm(dim, gMLPBlock(...))): return self.fn(x) + x; one sublayer a layer; to_logits begins with LayerNorm"

MODELS = (
    model(
        "gmlp",
        "g_mlp_pytorch:gMLP",
        tokens,
        stream("pre_ln", "???"),
        CODE,
        num_tokens=99,
        dim=32,
        depth=3,
        seq_len=7,
        attn_dim=8,
    ),
    model(
        "gmlp, images",
        "g_mlp_pytorch:gMLPVision",
        image,
        stream("pre_ln", "???", final_norm=True),
        CODE + " of all tokens, then their mean",
        image_size=16,
        patch_size=8,
        num_classes=10,
        dim=32,
        depth=3,
    ),
)

PACKAGE = Package(("g-mlp-pytorch==0.1.5", "einops==0.8.2"), MODELS)
