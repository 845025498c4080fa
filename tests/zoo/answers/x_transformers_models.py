"""Options of x-transformers."""

from zoo.answer import HALF, IN, NUMBER, VECTOR, Package, Row, group, ids, image, model, noise, stream, tokens

SIZES = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8}


def make_decoder(**options):
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(num_tokens=99, max_seq_len=16, attn_layers=Decoder(**SIZES, **options))


def image_encoder():
    from x_transformers import Encoder, ViTransformerWrapper

    return ViTransformerWrapper(image_size=16, patch_size=8, num_classes=10, attn_layers=Encoder(**SIZES))


def continuous():
    from x_transformers import ContinuousTransformerWrapper, Encoder

    return ContinuousTransformerWrapper(
        dim_in=6, dim_out=5, max_seq_len=16, attn_layers=Encoder(**SIZES, use_rmsnorm=True)
    )


def pair():
    from x_transformers import XTransformer

    sizes = {"num_tokens": 99, "max_seq_len": 16, "depth": 2, "heads": 4, "attn_dim_head": 8}
    return XTransformer(dim=32, **{f"{side}_{k}": v for side in ("enc", "dec") for k, v in sizes.items()})


LOOP = (
    "x_transformers.py, AttentionLayers.forward: x, inner_residual, _ = residual_fn.prepare(x); x = pre_norm(x); out = block(x, ...); out ="
    " post_branch_norm(out); x = residual_fn(out, inner_residual, ...); x = post_main_norm(x); at the end x = final_norm(x)."
)
PRE = LOOP + " pre_norm=True: pre_branch_norm and final_norm. Residual: return x + residual."

decoder = group(make_decoder, tokens)

MODELS = (
    decoder("decoder", stream("pre_ln"), PRE + " LayerNorm: self.ln(x) * gamma, self.ln without affine"),
    decoder(
        "rms norm",
        stream("pre_ln", "afaf", "rms|scale"),
        PRE + " RMSNorm: F.normalize(x, dim = -1) * self.scale * gamma",
        use_rmsnorm=True,
    ),
    decoder(
        "simple rms norm",
        stream("pre_ln", "afaf", "rms|scale"),
        PRE + " SimpleRMSNorm: F.normalize(x, dim = -1) * self.scale",
        use_simple_rmsnorm=True,
    ),
    decoder(
        "scale norm",
        stream("pre_ln", "afaf", "scale|rms"),
        PRE + " ScaleNorm: F.normalize(x, dim = -1) * self.scale * gamma, gamma of one element",
        use_scalenorm=True,
    ),
    decoder(
        "post norm",
        stream("post_ln", final_norm=False),
        LOOP + " pre_norm=False: post_main_norm alone, final_norm is Identity",
        pre_norm=False,
    ),
    decoder(
        "deepnorm",
        stream("deepnorm", final_norm=False),
        LOOP
        + " Residual: residual = residual * self.scale_residual_constant; return x + residual; alpha = (2 L)^(1/4) with L = 2",
        pre_norm=False,
        scale_residual_constant=4**0.25,
    ),
    decoder(
        "norms before and after the stream's adds",
        stream(None, final_norm=None, rows=(Row(norm_in=True, norm_out=True),)),
        LOOP + " pre_and_post_norm=True: pre_branch_norm and post_main_norm; pre_norm_has_final_norm = False",
        pre_and_post_norm=True,
    ),
    decoder(
        "sandwich norm",
        stream("sandwich"),
        LOOP + " sandwich_norm=True: post_branch_norm beside pre_branch_norm",
        sandwich_norm=True,
    ),
    decoder(
        "macaron",
        stream(None, "faf" * 2, rows=(HALF, IN, HALF)),
        PRE + " macaron: default_block = ('f',) + default_block; layer = Scale(0.5, layer) for 'f'",
        macaron=True,
    ),
    decoder(
        "layer scale",
        stream("layer_scale"),
        PRE + " LayerScale as post_branch_fn: return out * gamma",
        use_layerscale=True,
    ),
    decoder(
        "scaled residual",
        stream(None, rows=(Row(norm_in=True, a=VECTOR),)),
        PRE + " Residual: residual = residual * self.residual_scale, a vector",
        scale_residual=True,
    ),
    decoder(
        "scaled branches",
        stream("residual_multiplier|depth_mup|completep"),
        PRE
        + " residual_scale = float(depth_scale_residual); layer = Scale(residual_scale, layer): one number for all sublayers",
        depth_scale_residual=0.3,
    ),
    decoder(
        "dynamic tanh",
        stream("no_norm|none", "afaf", None, False, rows=(Row(c=NUMBER),)),
        PRE
        + " DynamicTanh: (x * pre_tanh_scale).tanh() * gamma + self.beta: no norm, so a part of the sublayer, whose input is the"
        " stream times a learned number",
        use_dynamic_tanh=True,
    ),
    decoder("attention alone", stream("pre_ln", "aa"), PRE + " only_attn: layer_types without 'f'", only_attn=True),
    decoder(
        "shared layers",
        stream("pre_ln"),
        PRE + " weight_tie_layers: layers_execute_order = tuple(range(len(default_block))) * depth",
        weight_tie_layers=True,
    ),
    decoder(
        "sandwiched order of layers",
        stream("pre_ln", "aaff"),
        PRE + " sandwich_coef: layer_types = ('a',) * coef + default_block * (depth - coef) + ('f',) * coef",
        sandwich_coef=1,
    ),
    model(
        "encoder and decoder",
        pair,
        lambda: (ids(), ids(6, seed=2)),
        stream("pre_ln"),
        stream("pre_ln", "acfacf"),
        PRE + " XTransformer: Encoder, and Decoder with cross_attend = True, default_block = ('a', 'c', 'f')",
    ),
    model(
        "image encoder",
        image_encoder,
        image,
        stream("pre_ln"),
        PRE + " ViTransformerWrapper: x = x + self.pos_embedding[:, :n]; x = self.post_emb_norm(x) [Identity]; embed ="
        " self.attn_layers(x); pooled = embed.mean(dim = -2)",
    ),
    model(
        "continuous inputs, rms norm", continuous, lambda: (noise(2, 7, 6),), stream("pre_ln", "afaf", "rms|scale"), PRE
    ),
    decoder(
        "gated by a gru",
        "GRUGating: gated_output = self.gru(rearrange(x, 'b n d -> (b n) d'), rearrange(residual, 'b n d -> (b n) d'))",
        why="a GRU cell mixes stream and write by gates that depend on both",
        gate_residual=True,
    ),
    decoder(
        "hyper-connections",
        "HyperConnection: wc_weight = normed @ self.dynamic_alpha_fn ...",
        why="several streams, mixed by weights that depend on the data",
        num_residual_streams=2,
    ),
    decoder(
        "orthogonal updates",
        "OrthogonalResidualUpdate: orthogonal = orthog_project(x, residual); return residual + orthogonal",
        why="what is added is the part of the sublayer's output that is orthogonal to the stream: a function of both",
        orthog_residual=True,
    ),
)

PACKAGE = Package(("x-transformers==2.31.10", "einops==0.8.2", "einx==0.4.3", "frozendict==2.5.1", "loguru==0.7.3", "torch-einops-utils==0.2.0",
     "x-mlps-pytorch==0.6.9"),
    MODELS,
)  # fmt: skip
