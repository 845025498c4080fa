"""Transformers of MONAI."""

from support.families import ids, noise
from zoo.answer import Package, image, make, model, stream, tokens

BLOCK = (
    "transformerblock.py: x = x + self.attn(self.norm1(x), attn_mask=attn_mask); if self.with_cross_attention: x = x +"
    " self.cross_attn(self.norm_cross_attn(x), context=context); x = x + self.mlp(self.norm2(x))."
)
DECODER = ("monai.networks.nets:DecoderOnlyTransformer", 99, 16, 32, 2, 4)
SWIN = {
    "window_size": (4, 4), "patch_size": (2, 2), "depths": (2, 2, 2, 2), "num_heads": (2, 2, 2, 2), "mlp_ratio": 2.0, "spatial_dims": 2,
}  # fmt: skip
STAGE = stream("pre_ln", final_norm=False)

MODELS = (
    model("vit", make("monai.networks.nets:ViT", 3, (16, 16), (8, 8), hidden_size=32, mlp_dim=64, num_layers=2, num_heads=4, spatial_dims=2), image, stream("pre_ln"), code=BLOCK + " vit.py: x = self.norm(x)"),
    model("decoder", make(*DECODER), tokens, stream("pre_ln", final_norm=False),
          code=BLOCK + " transformer.py: logits = self.to_logits(x): no norm at the end"),
    model("decoder with context", make(*DECODER, with_cross_attention=True), lambda: (ids(), noise(2, 5, 32)), stream("pre_ln", "acf" * 2, final_norm=False),
          code=BLOCK),
    model("swin", make("monai.networks.nets.swin_unetr:SwinTransformer", 3, 16, **SWIN), lambda: (noise(1, 3, 32, 32),), STAGE, STAGE, STAGE, STAGE,
          code="swin_unetr.py: shortcut = x; x = self.forward_part1(x, mask_matrix) [begins with norm1]; x = shortcut + self.drop_path(x); x = x +"
               " self.forward_part2(x) [mlp(norm2(x))]. PatchMerging: torch.cat of four tokens, norm [4 C wide], reduction. The outputs"
               " are F.layer_norm of what a stage begins with, which the stage does not read"),
)  # fmt: skip

PACKAGE = Package("monai", ("monai==1.6.1", "einops==0.8.2"), MODELS)
