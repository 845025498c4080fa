"""Options of x-transformers."""

from functools import partial

from addnorm import Row
from support.families import ids, noise
from zoo.answer import HALF, IN, NUMBER, VECTOR, Package, image, model, refuse, stream, tokens

SIZES = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8}


def decoder(**options):
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(num_tokens=99, max_seq_len=16, attn_layers=Decoder(**{**SIZES, **options}))


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

MODELS = (
    model("decoder", decoder, tokens, stream("pre_ln"), code=PRE + " LayerNorm: self.ln(x) * gamma, self.ln without affine"),
    model("rms norm", partial(decoder, use_rmsnorm=True), tokens, stream("pre_ln", "afaf", "rms|scale"),
          code=PRE + " RMSNorm: F.normalize(x, dim = -1) * self.scale * gamma"),
    model("simple rms norm", partial(decoder, use_simple_rmsnorm=True), tokens, stream("pre_ln", "afaf", "rms|scale"),
          code=PRE + " SimpleRMSNorm: F.normalize(x, dim = -1) * self.scale"),
    model("scale norm", partial(decoder, use_scalenorm=True), tokens, stream("pre_ln", "afaf", "scale|rms"),
          code=PRE + " ScaleNorm: F.normalize(x, dim = -1) * self.scale * gamma, gamma of one element"),
    model("post norm", partial(decoder, pre_norm=False), tokens, stream("post_ln", final_norm=False),
          code=LOOP + " pre_norm=False: post_main_norm alone, final_norm is Identity"),
    model("deepnorm", partial(decoder, pre_norm=False, scale_residual_constant=4 ** 0.25), tokens,
          stream("deepnorm", final_norm=False),
          code=LOOP + " Residual: residual = residual * self.scale_residual_constant; return x + residual; alpha = (2 L)^(1/4) with L = 2"),
    model("norms before and after the stream's adds", partial(decoder, pre_and_post_norm=True), tokens,
          stream(None, final_norm=None, rows=(Row(norm_in=True, norm_out=True),)),
          code=LOOP + " pre_and_post_norm=True: pre_branch_norm and post_main_norm; pre_norm_has_final_norm = False"),
    model("sandwich norm", partial(decoder, sandwich_norm=True), tokens, stream("sandwich"),
          code=LOOP + " sandwich_norm=True: post_branch_norm beside pre_branch_norm"),
    model("macaron", partial(decoder, macaron=True), tokens, stream(None, "faf" * 2, rows=(HALF, IN, HALF)),
          code=PRE + " macaron: default_block = ('f',) + default_block; layer = Scale(0.5, layer) for 'f'"),
    model("layer scale", partial(decoder, use_layerscale=True), tokens, stream("layer_scale"),
          code=PRE + " LayerScale as post_branch_fn: return out * gamma"),
    model("scaled residual", partial(decoder, scale_residual=True), tokens,
          stream(None, rows=(Row(norm_in=True, a=VECTOR),)),
          code=PRE + " Residual: residual = residual * self.residual_scale, a vector"),
    model("scaled branches", partial(decoder, depth_scale_residual=0.3), tokens,
          stream("residual_multiplier|depth_mup|completep"),
          code=PRE + " residual_scale = float(depth_scale_residual); layer = Scale(residual_scale, layer): one number for all sublayers"),
    model("dynamic tanh", partial(decoder, use_dynamic_tanh=True), tokens, stream("no_norm|none", "afaf", None, False, rows=(Row(c=NUMBER),)),
          code=PRE + " DynamicTanh: (x * pre_tanh_scale).tanh() * gamma + self.beta: no norm, so a part of the sublayer, whose input is the"
                     " stream times a learned number"),
    model("attention alone", partial(decoder, only_attn=True), tokens, stream("pre_ln", "aa"),
          code=PRE + " only_attn: layer_types without 'f'"),
    model("shared layers", partial(decoder, weight_tie_layers=True), tokens, stream("pre_ln"),
          code=PRE + " weight_tie_layers: layers_execute_order = tuple(range(len(default_block))) * depth"),
    model("sandwiched order of layers", partial(decoder, sandwich_coef=1), tokens, stream("pre_ln", "aaff"),
          code=PRE + " sandwich_coef: layer_types = ('a',) * coef + default_block * (depth - coef) + ('f',) * coef"),
    model("encoder and decoder", pair, lambda: (ids(), ids(6, seed=2)), stream("pre_ln"), stream("pre_ln", "acfacf"),
          code=PRE + " XTransformer: Encoder, and Decoder with cross_attend = True, default_block = ('a', 'c', 'f')"),
    model("image encoder", image_encoder, image, stream("pre_ln"),
          code=PRE + " ViTransformerWrapper: x = x + self.pos_embedding[:, :n]; x = self.post_emb_norm(x) [Identity]; embed ="
                     " self.attn_layers(x); pooled = embed.mean(dim = -2)"),
    model("continuous inputs, rms norm", continuous, lambda: (noise(2, 7, 6),), stream("pre_ln", "afaf", "rms|scale"), code=PRE),
    refuse("gated by a gru", partial(decoder, gate_residual=True), tokens, "a GRU cell mixes stream and write by gates that depend on both",
           "GRUGating: gated_output = self.gru(rearrange(x, 'b n d -> (b n) d'), rearrange(residual, 'b n d -> (b n) d'))"),
    refuse("hyper-connections", partial(decoder, num_residual_streams=2), tokens,
           "several streams, mixed by weights that depend on the data", "HyperConnection: wc_weight = normed @ self.dynamic_alpha_fn ..."),
    refuse("orthogonal updates", partial(decoder, orthog_residual=True), tokens,
           "what is added is the part of the sublayer's output that is orthogonal to the stream: a function of both",
           "OrthogonalResidualUpdate: orthogonal = orthog_project(x, residual); return residual + orthogonal"),
)  # fmt: skip

PACKAGE = Package(
    "x-transformers",
    ("x-transformers==2.31.10", "einops==0.8.2", "einx==0.4.3", "frozendict==2.5.1", "loguru==0.7.3", "torch-einops-utils==0.2.0",
     "x-mlps-pytorch==0.6.9"),
    MODELS,
)  # fmt: skip
