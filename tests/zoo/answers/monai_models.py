"""Transformers of MONAI."""

from zoo.answer import Package, group, ids, image, model, noise, stream, tokens

BLOCK = (
    "transformerblock.py: x = x + self.attn(self.norm1(x), attn_mask=attn_mask); if self.with_cross_attention: x = x +"
    " self.cross_attn(self.norm_cross_attn(x), context=context); x = x + self.mlp(self.norm2(x))."
)
STAGE = stream("pre_ln", final_norm=False)

decoder = group("monai.networks.nets:DecoderOnlyTransformer", tokens, args=(99, 16, 32, 2, 4))

MODELS = (
    model(
        "vit",
        "monai.networks.nets:ViT",
        image,
        stream("pre_ln"),
        BLOCK + " vit.py: x = self.norm(x)",
        args=(3, (16, 16), (8, 8)),
        hidden_size=32,
        mlp_dim=64,
        num_layers=2,
        num_heads=4,
        spatial_dims=2,
    ),
    decoder(
        "decoder",
        stream("pre_ln", final_norm=False),
        BLOCK + " transformer.py: logits = self.to_logits(x): no norm at the end",
    ),
    decoder(
        "decoder with context",
        stream("pre_ln", "acf" * 2, final_norm=False),
        BLOCK,
        inputs=lambda: (ids(), noise(2, 5, 32)),
        with_cross_attention=True,
    ),
    model(
        "swin",
        "monai.networks.nets.swin_unetr:SwinTransformer",
        lambda: (noise(1, 3, 32, 32),),
        STAGE,
        STAGE,
        STAGE,
        STAGE,
        "swin_unetr.py: shortcut = x; x = self.forward_part1(x, mask_matrix) [begins with norm1]; x = shortcut + self.drop_path(x); x = x +"
        " self.forward_part2(x) [mlp(norm2(x))]. PatchMerging: torch.cat of four tokens, norm [4 C wide], reduction. The outputs"
        " are F.layer_norm of what a stage begins with, which the stage does not read",
        args=(3, 16),
        window_size=(4, 4),
        patch_size=(2, 2),
        depths=(2, 2, 2, 2),
        num_heads=(2, 2, 2, 2),
        mlp_ratio=2.0,
        spatial_dims=2,
    ),
)

PACKAGE = Package(("monai==1.6.1", "einops==0.8.2"), MODELS)
