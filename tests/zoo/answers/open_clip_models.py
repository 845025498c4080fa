"""Text and image encoders of open_clip."""

from torch import nn

from zoo.answer import IN, Package, Row, ids, model, noise, stream, vectors

VISION = {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 16, "mlp_ratio": 2.0}
TEXT = {"context_length": 7, "vocab_size": 99, "width": 32, "heads": 4, "layers": 2, "mlp_ratio": 2.0}


def clip(**options):
    from open_clip.model import CLIP

    return CLIP(embed_dim=16, vision_cfg={**VISION, **options}, text_cfg={**TEXT, **options})


def multimodal():
    from open_clip.transformer import MultimodalTransformer

    return MultimodalTransformer(width=32, layers=2, heads=4, context_length=7, mlp_ratio=2.0, output_dim=16)


def custom():
    from open_clip.transformer import CustomResidualAttentionBlock

    return nn.Sequential(*(CustomResidualAttentionBlock(32, 4, 2.0, scale_attn=True, scale_fc=True) for _ in range(2)))


def pair():
    return noise(2, 3, 16, 16), ids()


CLIP = (
    "transformer.py, ResidualAttentionBlock: x = q_x + self.ls_1(self.attention(q_x=self.ln_1(q_x), ...)); x = x +"
    " self.ls_2(self.mlp(self.ln_2(x))). VisionTransformer: x = self.ln_pre(x) before the blocks, _pool: x = self.ln_post(x); pooled,"
    " tokens = self._global_pool(x). model.py, encode_text: x = self.ln_final(x)."
)

MODELS = (
    model("clip", clip, pair, stream("pre_ln", embedding_norm=True), stream("pre_ln"), CLIP),
    model(
        "clip, layer scale",
        clip,
        pair,
        stream("layer_scale", embedding_norm=True),
        stream("layer_scale"),
        CLIP + " LayerScale: x * self.gamma",
        ls_init_value=0.1,
    ),
    model(
        "coca's multimodal decoder",
        multimodal,
        lambda: (noise(2, 5, 32, seed=2), noise(2, 7, 32)),
        stream("pre_ln", "afcf" * 2),
        "transformer.py, MultimodalTransformer: text_embs = resblock(text_embs, attn_mask=...); text_embs = cross_attn(text_embs,"
        " k_x=image_embs, v_x=image_embs); out = self.ln_final(text_embs). Both are ResidualAttentionBlocks",
    ),
    model(
        "blocks with a norm of the attention",
        custom,
        vectors,
        stream(None, final_norm=False, rows=(Row(norm_in=True, norm_branch=True), IN)),
        "transformer.py, CustomResidualAttentionBlock: x = x + self.ls_1(self.ln_attn(self.attn(self.ln_1(x), ...))); x = x +"
        " self.ls_2(self.mlp(self.ln_2(x))); ls_1, ls_2 are Identity",
    ),
)

PACKAGE = Package(
    ("open_clip_torch==3.3.0", "timm==1.0.31", "torchvision==0.29.1", "ftfy==6.3.1", "wcwidth==0.9.4"),
    MODELS,
)
