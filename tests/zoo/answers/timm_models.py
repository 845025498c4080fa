"""Image models of timm."""

from functools import partial

from zoo.answer import ANY, IN, VECTOR, Package, Row, group, image, model, stream

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 10}
LAYER_SCALE = Row(norm_in=True, b=VECTOR)
SCALED = Row(b=VECTOR)  # a layer scale, and no norm of the stream before the sublayer


def make_vit(block="Block", **options):
    from timm.models import vision_transformer

    return vision_transformer.VisionTransformer(**VIT, **options, block_fn=getattr(vision_transformer, block))


def mixer(block, **options):
    from timm.models import mlp_mixer

    options = {k: getattr(mlp_mixer, v) if isinstance(v, str) else v for k, v in options.items()}
    sizes = {"img_size": 16, "patch_size": 8, "num_blocks": 2, "embed_dim": 32, "num_classes": 10}
    return mlp_mixer.MlpMixer(**sizes, block_layer=getattr(mlp_mixer, block), **options)


def metaformer(token_mixers, norm_layers, **options):
    from timm.models import metaformer

    mixers, norms = (tuple(getattr(metaformer, name) for name in names) for names in (token_mixers, norm_layers))
    sizes = {"depths": (2, 2), "dims": (16, 32), "num_classes": 10}
    return metaformer.MetaFormer(**sizes, token_mixers=mixers, norm_layers=norms, **options)


image32, image64 = (partial(image, size) for size in (32, 64))
VIT_CODE = (
    "vision_transformer.py, Block: x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), ...))); x = x +"
    " self.drop_path2(self.ls2(self.mlp(self.norm2(x)))). forward_features: x = self.norm_pre(x) [Identity]; x = self.blocks(x);"
    " x = self.norm(x); the head pools, then self.fc_norm."
)

vit = group(make_vit, image)
timm = group("timm.models.", image, **VIT)
swin = group(
    "timm.models.",
    image32,
    img_size=32,
    patch_size=4,
    embed_dim=16,
    depths=(2, 2),
    num_heads=(2, 4),
    window_size=4,
    num_classes=10,
)

MODELS = (
    vit("vit", stream("pre_ln"), VIT_CODE),
    vit("vit, layer scale", stream("layer_scale"), VIT_CODE + " LayerScale: return x * self.gamma.", init_values=1e-5),
    vit(
        "vit, mean of tokens",
        stream("pre_ln", final_norm=None),
        VIT_CODE + " With global_pool='avg' self.norm is Identity, and fc_norm is of the pooled mean.",
        global_pool="avg",
    ),
    vit(
        "vit, norm of the embedding",
        stream("pre_ln", embedding_norm=True),
        VIT_CODE + " With pre_norm=True norm_pre is a LayerNorm.",
        pre_norm=True,
    ),
    vit(
        "vit, norms after the branches",
        stream("reordered"),
        "ResPostBlock: x = x + self.drop_path1(self.norm1(self.attn(x, ...))); x = x + self.drop_path2(self.norm2(self.mlp(x)))",
        block="ResPostBlock",
    ),
    vit(
        "vit, parallel",
        stream("parallel"),
        "ParallelScalingBlock: y = self.in_norm(x); y = self.in_proj(y) ... y = self.attn_out_proj(x_attn) + self.mlp_out_proj(x_mlp)"
        " ... x = x + self.drop_path(self.ls(y)); the projections in are one matrix",
        also=(stream("pre_ln", "??"),),
        block="ParallelScalingBlock",
    ),
    vit(
        "vit, two attentions in parallel",
        stream("parallel|none", "aaffaaff", rows=(IN,)),
        "ParallelThingsBlock: x = x + torch.stack([attn(x) for attn in self.attns]).sum(dim=0); x = x + torch.stack([ffn(x) for ffn"
        " in self.ffns]).sum(dim=0); each attn and ffn begins with its own norm: parallel, but not attention beside feed-forward",
        block="ParallelThingsBlock",
    ),
    swin(
        "swin",
        stream("pre_ln", final_norm=False, embedding_norm=True),
        stream("pre_ln"),
        "swin_transformer.py: x = x + self.drop_path1(self._attn(self.norm1(x))); x = x.reshape(B, -1, C); x = x +"
        " self.drop_path2(self.mlp(self.norm2(x))); x = x.reshape(B, H, W, C). PatchMerging: x = self.norm(x) [of four tokens in a"
        " row, 4 C wide]; x = self.reduction(x). PatchEmbed ends in a norm; forward_features: x = self.norm(x)",
        of="swin_transformer:SwinTransformer",
    ),
    swin(
        "swin v2",
        stream("reordered", final_norm=False, embedding_norm=True),
        stream("reordered", embedding_norm=True),
        "swin_transformer_v2.py: x = x + self.drop_path1(self.norm1(self._attn(x))); x = x + self.drop_path2(self.norm2(self.mlp(x)))."
        " PatchMerging: x = self.reduction(x); x = self.norm(x). PatchEmbed ends in a norm; forward_features: x = self.norm(x)",
        of="swin_transformer_v2:SwinTransformerV2",
    ),
    timm(
        "cait",
        stream("layer_scale"),
        stream("layer_scale", "?f?f"),
        "cait.py, LayerScaleBlock: x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x))); x = x + self.drop_path(self.gamma_2"
        " * self.mlp(self.norm2(x))), attention with talking heads. LayerScaleBlockClassAttn: u = torch.cat((x_cls, x), dim=1); x_cls ="
        " x_cls + self.drop_path(self.gamma_1 * self.attn(self.norm1(u))); x_cls = x_cls + ... self.mlp(self.norm2(x_cls))."
        " forward_features: torch.cat((cls_tokens, x), dim=1), then self.norm(x): a norm of both streams",
        of="cait:Cait",
        depth_token_only=2,
    ),
    model(
        "convnext",
        "timm.models.convnext:ConvNeXt",
        image64,
        stream(None, "??", ANY, None, True, rows=(SCALED,)),
        stream(None, "??", ANY, None, rows=(SCALED,)),
        stream(None, "??", ANY, None, rows=(SCALED,)),
        stream(None, "??", ANY, None, rows=(SCALED,)),
        "convnext.py, ConvNeXtBlock: shortcut = x; x = self.conv_dw(x) ... x = self.norm(x); x = self.mlp(x) ... x ="
        " x.mul(self.gamma.reshape(1, -1, 1, 1)); x = self.drop_path(x) + self.shortcut(shortcut): the norm is of the convolution's"
        " output, inside the sublayer. The stem ends in a norm; each later stage begins with (norm, conv), which reads x_L",
        depths=(2, 2, 2, 2),
        dims=(8, 16, 24, 32),
        ls_init_value=1e-6,
        num_classes=10,
    ),
    model(
        "mlp mixer",
        mixer,
        image,
        stream("pre_ln", "ofof"),
        "mlp_mixer.py, MixerBlock: x = x + self.drop_path(self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)); x = x +"
        " self.drop_path(self.mlp_channels(self.norm2(x))). forward_features: x = self.norm(x)",
        block="MixerBlock",
    ),
    model(
        "resmlp",
        mixer,
        image,
        stream(None, "????", None, False, rows=(SCALED, SCALED)),
        "mlp_mixer.py, ResBlock: x = x + self.drop_path(self.ls1 * self.linear_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2));"
        " x = x + self.drop_path(self.ls2 * self.mlp_channels(self.norm2(x))). Affine: torch.addcmul(self.beta, self.alpha, x): no norm",
        block="ResBlock",
        norm_layer="Affine",
        mlp_ratio=4,
    ),
    timm(
        "beit",
        stream("layer_scale", final_norm=None),
        "beit.py, Block: x = x + self.drop_path1(self.gamma_1 * self.attn(self.norm1(x), ...)); x = x + self.drop_path2(self.gamma_2 *"
        " self.mlp(self.norm2(x))). With global_pool='avg' self.norm is Identity and fc_norm is of the pooled mean",
        of="beit:Beit",
        init_values=0.1,
        use_abs_pos_emb=True,
    ),
    timm(
        "eva, norms after the branches",
        stream("reordered"),
        "eva.py, EvaBlockPostNorm: x = x + self.drop_path1(self.norm1(self.attn(x, ...))); x = x +"
        " self.drop_path2(self.norm2(self.mlp(x))). forward_features: x = self.norm(x)",
        of="eva:Eva",
        use_post_norm=True,
        global_pool="token",
    ),
    timm(
        "eva, swiglu",
        stream("pre_ln"),
        "eva.py, EvaBlock: x_attn = self.attn(self.norm1(x), rope=rope, ...); x = x + self.drop_path1(x_attn); x_mlp ="
        " self.mlp(self.norm2(x)); x = x + self.drop_path2(x_mlp). forward_features: x = self.norm(x)",
        of="eva:Eva",
        swiglu_mlp=True,
        use_rot_pos_emb=True,
        global_pool="token",
    ),
    model(
        "caformer",
        metaformer,
        image64,
        stream("pre_ln", "?f?f", final_norm=None, embedding_norm=True),
        stream(None, final_norm=None, rows=(Row(norm_in=True, a=VECTOR),)),
        "metaformer.py, MetaFormerBlock: x = self.res_scale1(x) + self.layer_scale1(self.drop_path1(self.token_mixer(self.norm1(x))))"
        " and the same with self.mlp(self.norm2(x)). Scale: x * self.scale.view(self.shape), of shape (dim, 1, 1) or (dim,); in the"
        " first stage Identity. Stem: x = self.conv(x); x = self.norm(x). Downsampling: norm, conv; the head pools, then norms",
        token_mixers=("SepConv", "Attention"),
        norm_layers=("LayerNorm2dNoBias", "LayerNormNoBias"),
        layer_scale_init_values=None,
        res_scale_init_values=(None, 1.0),
    ),
    model(
        "poolformer",
        metaformer,
        image64,
        stream(None, "????", ANY, None, None, rows=(SCALED,)),
        stream(None, "????", ANY, None, None, rows=(SCALED,)),
        "metaformer.py, MetaFormerBlock with res_scale Identity and layer_scale 1e-5. GroupNorm1: one group over channels and"
        " positions, so no LayerNorm or RMSNorm of a token; Pooling: y = self.pool(x); return y - x",
        token_mixers=("Pooling", "Pooling"),
        norm_layers=("GroupNorm1", "GroupNorm1"),
        layer_scale_init_values=1e-5,
        res_scale_init_values=None,
    ),
    timm(
        "xcit",
        stream(None, "?of?of?f?f", rows=(*[LAYER_SCALE] * 6, *[Row(norm_in=True, norm_out=True, b=VECTOR), Row()] * 2)),
        "xcit.py, XCABlock: x = x + self.drop_path1(self.gamma1 * self.attn(self.norm1(x))), then gamma3, local_mp, norm3 and gamma2,"
        " mlp, norm2. ClassAttentionBlock: x = x + self.drop_path1(self.gamma1 * x_attn) with x_attn = torch.cat([self.attn(x_norm1),"
        " x_norm1[:, 1:]], dim=1); x = self.norm2(x); x_res = x; cls_token = self.gamma2 * self.mlp(x[:, 0:1]); x ="
        " torch.cat([cls_token, x[:, 1:]], dim=1); x = x_res + self.drop_path2(x). forward_features: x = torch.cat((cls_token, x),"
        " dim=1) between them; at the end x = self.norm(x)",
        of="xcit:Xcit",
        cls_attn_layers=2,
        eta=1.0,
        tokens_norm=True,
    ),
)

PACKAGE = Package(("timm==1.0.31", "torchvision==0.29.1"), MODELS)
