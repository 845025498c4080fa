"""Image models of timm."""

from functools import partial

from addnorm import Row
from zoo.answer import ANY, IN, VECTOR, Package, image, make, model, stream

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 10}
SWIN = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "window_size": 4,
    "num_classes": 10,
}
LAYER_SCALE = Row(norm_in=True, b=VECTOR)
SCALED = Row(b=VECTOR)  # a layer scale, and no norm of the stream before the sublayer


def vit(block="Block", **options):
    from timm.models import vision_transformer

    return vision_transformer.VisionTransformer(**VIT, **options, block_fn=getattr(vision_transformer, block))


def mixer(block, **options):
    from timm.models import mlp_mixer

    options = {k: getattr(mlp_mixer, v) if isinstance(v, str) else v for k, v in options.items()}
    sizes = {"img_size": 16, "patch_size": 8, "num_blocks": 2, "embed_dim": 32, "num_classes": 10}
    return mlp_mixer.MlpMixer(**sizes, block_layer=getattr(mlp_mixer, block), **options)


def caformer():
    from timm.models import metaformer

    mixers = (metaformer.SepConv, metaformer.Attention)
    return metaformer.MetaFormer(
        depths=(2, 2), dims=(16, 32), token_mixers=mixers, norm_layers=(metaformer.LayerNorm2dNoBias, metaformer.LayerNormNoBias), num_classes=10,
        layer_scale_init_values=None, res_scale_init_values=(None, 1.0),
    )  # fmt: skip


def poolformer():
    from timm.models import metaformer

    return metaformer.MetaFormer(
        depths=(2, 2), dims=(16, 32), token_mixers=metaformer.Pooling, norm_layers=metaformer.GroupNorm1, num_classes=10,
        layer_scale_init_values=1e-5, res_scale_init_values=None,
    )  # fmt: skip


image32, image64 = partial(image, 32), partial(image, 64)
VIT_CODE = (
    "vision_transformer.py, Block: x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), ...))); x = x +"
    " self.drop_path2(self.ls2(self.mlp(self.norm2(x)))). forward_features: x = self.norm_pre(x) [Identity]; x = self.blocks(x);"
    " x = self.norm(x); the head pools, then self.fc_norm."
)

MODELS = (
    model("vit", vit, image, stream("pre_ln"), code=VIT_CODE),
    model("vit, layer scale", partial(vit, init_values=1e-5), image, stream("layer_scale"),
          code=VIT_CODE + " LayerScale: return x * self.gamma."),
    model("vit, mean of tokens", partial(vit, global_pool="avg"), image, stream("pre_ln", final_norm=None),
          code=VIT_CODE + " With global_pool='avg' self.norm is Identity, and fc_norm is of the pooled mean."),
    model("vit, norm of the embedding", partial(vit, pre_norm=True), image, stream("pre_ln", embedding_norm=True),
          code=VIT_CODE + " With pre_norm=True norm_pre is a LayerNorm."),
    model("vit, norms after the branches", partial(vit, "ResPostBlock"), image, stream("reordered"),
          code="ResPostBlock: x = x + self.drop_path1(self.norm1(self.attn(x, ...))); x = x + self.drop_path2(self.norm2(self.mlp(x)))"),
    model("vit, parallel", partial(vit, "ParallelScalingBlock"), image, stream("parallel"),
          code="ParallelScalingBlock: y = self.in_norm(x); y = self.in_proj(y) ... y = self.attn_out_proj(x_attn) + self.mlp_out_proj(x_mlp)"
               " ... x = x + self.drop_path(self.ls(y)); the projections in are one matrix",
          also=(stream("pre_ln", "??"),)),
    model("vit, two attentions in parallel", partial(vit, "ParallelThingsBlock"), image, stream("parallel|none", "aaffaaff", rows=(IN,)),
          code="ParallelThingsBlock: x = x + torch.stack([attn(x) for attn in self.attns]).sum(dim=0); x = x + torch.stack([ffn(x) for ffn"
               " in self.ffns]).sum(dim=0); each attn and ffn begins with its own norm: parallel, but not attention beside feed-forward"),
    model("swin", make("timm.models.swin_transformer:SwinTransformer", **SWIN), image32,
          stream("pre_ln", final_norm=False, embedding_norm=True), stream("pre_ln"),
          code="swin_transformer.py: x = x + self.drop_path1(self._attn(self.norm1(x))); x = x.reshape(B, -1, C); x = x +"
               " self.drop_path2(self.mlp(self.norm2(x))); x = x.reshape(B, H, W, C). PatchMerging: x = self.norm(x) [of four tokens in a"
               " row, 4 C wide]; x = self.reduction(x). PatchEmbed ends in a norm; forward_features: x = self.norm(x)"),
    model("swin v2", make("timm.models.swin_transformer_v2:SwinTransformerV2", **SWIN), image32,
          stream("reordered", final_norm=False, embedding_norm=True), stream("reordered", embedding_norm=True),
          code="swin_transformer_v2.py: x = x + self.drop_path1(self.norm1(self._attn(x))); x = x + self.drop_path2(self.norm2(self.mlp(x)))."
               " PatchMerging: x = self.reduction(x); x = self.norm(x). PatchEmbed ends in a norm; forward_features: x = self.norm(x)"),
    model("cait", make("timm.models.cait:Cait", **VIT, depth_token_only=2), image,
          stream("layer_scale"), stream("layer_scale", "?f?f"),
          code="cait.py, LayerScaleBlock: x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x))); x = x + self.drop_path(self.gamma_2"
               " * self.mlp(self.norm2(x))), attention with talking heads. LayerScaleBlockClassAttn: u = torch.cat((x_cls, x), dim=1); x_cls ="
               " x_cls + self.drop_path(self.gamma_1 * self.attn(self.norm1(u))); x_cls = x_cls + ... self.mlp(self.norm2(x_cls))."
               " forward_features: torch.cat((cls_tokens, x), dim=1), then self.norm(x): a norm of both streams"),
    model("convnext", make("timm.models.convnext:ConvNeXt", depths=(2, 2, 2, 2), dims=(8, 16, 24, 32), ls_init_value=1e-6, num_classes=10),
          image64, stream(None, "??", ANY, None, True, rows=(SCALED,)), stream(None, "??", ANY, None, rows=(SCALED,)),
          stream(None, "??", ANY, None, rows=(SCALED,)), stream(None, "??", ANY, None, rows=(SCALED,)),
          code="convnext.py, ConvNeXtBlock: shortcut = x; x = self.conv_dw(x) ... x = self.norm(x); x = self.mlp(x) ... x ="
               " x.mul(self.gamma.reshape(1, -1, 1, 1)); x = self.drop_path(x) + self.shortcut(shortcut): the norm is of the convolution's"
               " output, inside the sublayer. The stem ends in a norm; each later stage begins with (norm, conv), which reads x_L"),
    model("mlp mixer", partial(mixer, "MixerBlock"), image, stream("pre_ln", "ofof"),
          code="mlp_mixer.py, MixerBlock: x = x + self.drop_path(self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)); x = x +"
               " self.drop_path(self.mlp_channels(self.norm2(x))). forward_features: x = self.norm(x)"),
    model("resmlp", partial(mixer, "ResBlock", norm_layer="Affine", mlp_ratio=4), image, stream(None, "????", None, False, rows=(SCALED, SCALED)),
          code="mlp_mixer.py, ResBlock: x = x + self.drop_path(self.ls1 * self.linear_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2));"
               " x = x + self.drop_path(self.ls2 * self.mlp_channels(self.norm2(x))). Affine: torch.addcmul(self.beta, self.alpha, x): no norm"),
    model("beit", make("timm.models.beit:Beit", **VIT, init_values=0.1, use_abs_pos_emb=True), image,
          stream("layer_scale", final_norm=None),
          code="beit.py, Block: x = x + self.drop_path1(self.gamma_1 * self.attn(self.norm1(x), ...)); x = x + self.drop_path2(self.gamma_2 *"
               " self.mlp(self.norm2(x))). With global_pool='avg' self.norm is Identity and fc_norm is of the pooled mean"),
    model("eva, norms after the branches", make("timm.models.eva:Eva", **VIT, use_post_norm=True, global_pool="token"), image,
          stream("reordered"),
          code="eva.py, EvaBlockPostNorm: x = x + self.drop_path1(self.norm1(self.attn(x, ...))); x = x +"
               " self.drop_path2(self.norm2(self.mlp(x))). forward_features: x = self.norm(x)"),
    model("eva, swiglu", make("timm.models.eva:Eva", **VIT, swiglu_mlp=True, use_rot_pos_emb=True, global_pool="token"), image,
          stream("pre_ln"),
          code="eva.py, EvaBlock: x_attn = self.attn(self.norm1(x), rope=rope, ...); x = x + self.drop_path1(x_attn); x_mlp ="
               " self.mlp(self.norm2(x)); x = x + self.drop_path2(x_mlp). forward_features: x = self.norm(x)"),
    model("caformer", caformer, image64,
          stream("pre_ln", "?f?f", final_norm=None, embedding_norm=True), stream(None, final_norm=None, rows=(Row(norm_in=True, a=VECTOR),)),
          code="metaformer.py, MetaFormerBlock: x = self.res_scale1(x) + self.layer_scale1(self.drop_path1(self.token_mixer(self.norm1(x))))"
               " and the same with self.mlp(self.norm2(x)). Scale: x * self.scale.view(self.shape), of shape (dim, 1, 1) or (dim,); in the"
               " first stage Identity. Stem: x = self.conv(x); x = self.norm(x). Downsampling: norm, conv; the head pools, then norms"),
    model("poolformer", poolformer, image64,
          stream(None, "????", ANY, None, None, rows=(SCALED,)), stream(None, "????", ANY, None, None, rows=(SCALED,)),
          code="metaformer.py, MetaFormerBlock with res_scale Identity and layer_scale 1e-5. GroupNorm1: one group over channels and"
               " positions, so no LayerNorm or RMSNorm of a token; Pooling: y = self.pool(x); return y - x"),
    model("xcit", make("timm.models.xcit:Xcit", **VIT, cls_attn_layers=2, eta=1.0, tokens_norm=True), image,
          stream(None, "?of?of?f?f", rows=(*[LAYER_SCALE] * 6, *[Row(norm_in=True, norm_out=True, b=VECTOR), Row()] * 2)),
          code="xcit.py, XCABlock: x = x + self.drop_path1(self.gamma1 * self.attn(self.norm1(x))), then gamma3, local_mp, norm3 and gamma2,"
               " mlp, norm2. ClassAttentionBlock: x = x + self.drop_path1(self.gamma1 * x_attn) with x_attn = torch.cat([self.attn(x_norm1),"
               " x_norm1[:, 1:]], dim=1); x = self.norm2(x); x_res = x; cls_token = self.gamma2 * self.mlp(x[:, 0:1]); x ="
               " torch.cat([cls_token, x[:, 1:]], dim=1); x = x_res + self.drop_path2(x). forward_features: x = torch.cat((cls_token, x),"
               " dim=1) between them; at the end x = self.norm(x)"),
)  # fmt: skip

PACKAGE = Package("timm", ("timm==1.0.31", "torchvision==0.29.1"), MODELS)
