"""Image encoder and mask decoder of Segment Anything."""

from zoo.answer import Package, Row, model, noise, stream

POST = Row(norm_out=True)


def points():
    return noise(2, 32, 4, 4), noise(2, 32, 4, 4, seed=2), noise(2, 5, 32, seed=3)


KEYS = stream("post_ln", "cc", final_norm=False)

MODELS = (
    model(
        "image encoder",
        "segment_anything.modeling:ImageEncoderViT",
        lambda: (noise(2, 3, 32, 32),),
        stream("pre_ln", final_norm=False),
        "image_encoder.py, Block: shortcut = x; x = self.norm1(x); x, pad_hw = window_partition(x, ...); x = self.attn(x); x ="
        " window_unpartition(x, ...); x = shortcut + x; x = x + self.mlp(self.norm2(x)). The neck begins with a convolution",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=4,
        mlp_ratio=2.0,
        out_chans=8,
        use_rel_pos=True,
        window_size=3,
        global_attn_indexes=(1,),
    ),
    model(
        "mask decoder",
        "segment_anything.modeling:TwoWayTransformer",
        points,
        stream(None, "acfacfc", final_norm=False, rows=(Row(norm_out=True, a=0.0), *[POST] * 6)),
        KEYS,
        "transformer.py, TwoWayAttentionBlock: the first layer has no residual: queries = self.self_attn(q=queries, k=queries, v=queries);"
        " queries = self.norm1(queries); then queries = queries + attn_out; queries = self.norm2(queries); queries = queries + mlp_out;"
        " queries = self.norm3(queries); keys = keys + attn_out; keys = self.norm4(keys). At the end queries + attn_out, norm_final_attn."
        " What the sublayers read is queries + query_pe, keys + key_pe",
        also=(stream("post_ln", "cfacfc", final_norm=False, embedding_norm=True), KEYS),
        depth=2,
        embedding_dim=32,
        num_heads=4,
        mlp_dim=64,
    ),
)

PACKAGE = Package(("segment-anything==1.0", "torchvision==0.29.1"), MODELS)
