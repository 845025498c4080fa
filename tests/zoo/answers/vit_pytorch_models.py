"""Image models of vit-pytorch."""

from zoo.answer import IN, VECTOR, Package, Row, group, image, model, noise, stream

RMS = "rms|scale"

PRE = "Transformer: x = attn(x) + x; x = ff(x) + x; attn and ff begin with their own nn.LayerNorm(dim)"
NORMED = PRE + "; return self.norm(x)"

vit = group(
    "vit_pytorch.", image, image_size=16, patch_size=8, num_classes=10, dim=32, depth=2, heads=4, dim_head=8, mlp_dim=64
)

MODELS = (
    vit(
        "vit",
        stream("pre_ln"),
        "vit.py, " + NORMED + ". ViT: x = torch.cat((cls_tokens, x), dim = 1); x = x + self.pos_embedding[:seq]",
        of="vit:ViT",
    ),
    vit(
        "simple vit",
        stream("pre_ln"),
        "simple_vit.py, " + NORMED + ". SimpleViT: x += self.pos_embedding",
        of="simple_vit:SimpleViT",
    ),
    vit(
        "simple vit, register tokens",
        stream("pre_ln"),
        "simple_vit_with_register_tokens.py, " + NORMED,
        of="simple_vit_with_register_tokens:SimpleViT",
    ),
    vit(
        "simple vit, value residual",
        stream("pre_ln"),
        "simple_vit_with_value_residual.py: attn_out, values = attn(x, value_residual = value_residual); x = attn_out + x; x = ff(x) + x;"
        " return self.norm(x)",
        of="simple_vit_with_value_residual:SimpleViT",
    ),
    vit(
        "deepvit",
        stream("pre_ln", final_norm=None),
        "deepvit.py, " + PRE + "; the head (LayerNorm, Linear) reads x[:, 0]; attention mixes its heads",
        of="deepvit:DeepViT",
    ),
    vit(
        "parallel vit",
        stream("parallel|none", "aaffaaff", final_norm=None, rows=(IN,)),
        "parallel_vit.py: Parallel: return sum([fn(x) for fn in self.fns]); x = attns(x) + x; x = ffs(x) + x; each fn has its own norm;"
        " the head (LayerNorm, Linear) reads x[:, 0]",
        of="parallel_vit:ViT",
        num_parallel_branches=2,
    ),
    vit(
        "cait",
        stream("layer_scale", final_norm=False),
        stream("layer_scale", "?f?f", final_norm=None),
        "cait.py: LayerScale: return self.fn(x, **kwargs) * self.scale; Transformer: x = attn(x, context = context) + x; x = ff(x) + x;"
        " Attention: x = self.norm(x); context = x if not exists(context) else torch.cat((x, context), dim = 1). The class token's stream"
        " begins with repeat(self.cls_token); the head (LayerNorm, Linear) reads x[:, 0] of it, its only token",
        of="cait:CaiT",
        cls_depth=2,
    ),
    vit(
        "vit 5",
        stream("layer_scale", "afaf", RMS),
        "vit_5.py: x = attn(x, pos_emb=pos_emb) * ls1 + x; x = ff(x) * ls2 + x; return self.norm(x); RMSNorm: F.normalize(x, dim=-1) *"
        " self.scale * self.g",
        of="vit_5:ViT",
    ),
    vit(
        "xcit",
        stream("layer_scale", "?of?of"),
        stream("layer_scale", "?f?f", final_norm=None),
        "xcit.py, XCATransformer: x = cross_covariance_attn(x) + x; x = local_patch_interaction(x) + x; x = ff(x) + x, each a LayerScale of"
        " a module that begins with a LayerNorm; XCiT: x = self.final_norm(x) before the class token's cls_transformer, whose head"
        " (LayerNorm, Linear) reads x[:, 0]",
        of="xcit:XCiT",
        cls_depth=2,
    ),
    model(
        "nest",
        "vit_pytorch.nest:NesT",
        image,
        stream("pre_ln", final_norm=False),
        stream("pre_ln"),
        "nest.py, Transformer: x = x + pos_emb; x = attn(x) + x; x = ff(x) + x on (b, c, h, w); LayerNorm: (x - mean) / (var +"
        " eps).sqrt() * g + b over dim 1. Aggregate: conv, LayerNorm, max-pool. mlp_head begins with LayerNorm of the whole x",
        image_size=16,
        patch_size=4,
        num_classes=10,
        dim=16,
        heads=2,
        num_hierarchies=2,
        block_repeats=(2, 2),
    ),
    model(
        "vivit",
        "vit_pytorch.vivit:ViViT",
        lambda: (noise(2, 3, 4, 16, 16),),
        stream("pre_ln"),
        stream("pre_ln"),
        "vivit.py, "
        + NORMED
        + ". x = self.spatial_transformer(x); x = x[:, :, 0]; x = cat((temporal_cls_tokens, x), dim = 1); x ="
        " self.temporal_transformer(x)",
        also=(stream(None, "afaf" * 2, rows=(IN, IN, IN, Row(norm_in=True, norm_out=True), IN, IN, IN, IN)),),
        image_size=16,
        image_patch_size=8,
        frames=4,
        frame_patch_size=2,
        num_classes=10,
        dim=32,
        heads=4,
        spatial_depth=2,
        temporal_depth=2,
        mlp_dim=64,
        dim_head=8,
        use_flash_attn=False,
    ),
    vit(
        "keel, post-LN",
        stream(None, final_norm=False, rows=(IN, *[Row(norm_in=True, norm_out=True, a=4.0)] * 3)),
        "vit_with_keel_post_ln.py: out = layer(x), which begins with its own norm; the first: x = out + residual; then x ="
        " post_norm(out + residual * residual_scale), residual_scale = 2 depth = 4",
        of="vit_with_keel_post_ln:ViT",
    ),
    vit(
        "normalized vit",
        stream(None, "afaf", RMS, False, True, rows=(Row(norm_branch=True, norm_out=True, a=VECTOR, b=VECTOR),)),
        "normalized_vit.py: attn_out = l2norm(attn(tokens)); tokens = l2norm(tokens.lerp(attn_out, attn_alpha * self.scale)) and the same"
        " with ff: a = 1 - alpha, b = alpha, learned vectors; tokens = l2norm(tokens + pos_emb) before them",
        of="normalized_vit:nViT",
    ),
    vit(
        "hyper-connections",
        "simple_vit_with_hyper_connections.py: x, attn_res, beta = attn_hyper_conn.width_connection(x) ... x = attn_hyper_conn.depth_connection(x, attn_res, beta)",
        of="simple_vit_with_hyper_connections:SimpleViT",
        why="several streams, mixed by weights that depend on the data",
        num_residual_streams=2,
    ),
    vit(
        "orthogonal updates",
        "simple_vit_orthog_residual_update.py: x = attn(x); x = ff(x), each an OrthogonalResidualUpdate: unit = F.normalize(residual, dim = -1); parallel = (block_out * unit).sum(dim = -1, keepdim = True) * unit; orthogonal = block_out - parallel",
        of="simple_vit_orthog_residual_update:SimpleViT",
        why="what is added is the part of the sublayer's output that is orthogonal to the stream: a function of both",
    ),
)

PACKAGE = Package(("vit-pytorch==1.26.11", "torchvision==0.29.1", "einops==0.8.2", "einx==0.4.3", "frozendict==2.5.1", "torch-einops-utils==0.2.0",
     "x-mlps-pytorch==0.6.9"),
    MODELS,
)  # fmt: skip
