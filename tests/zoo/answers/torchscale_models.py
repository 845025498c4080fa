"""Encoders and decoders of TorchScale."""

from functools import partial

from torch import nn

from support.families import ids
from zoo.answer import Package, model, stream, tokens


def encoder(**options):
    from torchscale.architecture.config import EncoderConfig
    from torchscale.architecture.encoder import Encoder

    sizes = {
        "encoder_embed_dim": 32,
        "encoder_attention_heads": 4,
        "encoder_ffn_embed_dim": 64,
        "encoder_layers": 2,
        "vocab_size": 99,
    }
    return Encoder(EncoderConfig(**sizes, no_output_layer=True, **options), embed_tokens=nn.Embedding(99, 32))


def decoder(**options):
    from torchscale.architecture.config import DecoderConfig
    from torchscale.architecture.decoder import Decoder

    sizes = {
        "decoder_embed_dim": 32,
        "decoder_attention_heads": 4,
        "decoder_ffn_embed_dim": 64,
        "decoder_layers": 2,
        "vocab_size": 99,
    }
    return Decoder(DecoderConfig(**sizes, no_output_layer=True, **options), embed_tokens=nn.Embedding(99, 32))


def retnet():
    from torchscale.architecture.config import RetNetConfig
    from torchscale.architecture.retnet import RetNetDecoder

    sizes = {
        "decoder_embed_dim": 32,
        "decoder_value_embed_dim": 32,
        "decoder_retention_heads": 4,
        "decoder_ffn_embed_dim": 64,
    }
    config = RetNetConfig(**sizes, decoder_layers=2, vocab_size=99, no_output_layer=True)
    return RetNetDecoder(config, embed_tokens=nn.Embedding(99, 32))


def previous():
    return {"prev_output_tokens": ids(), "features_only": True}


LAYER = (
    "architecture/encoder.py, EncoderLayer: residual = x; if self.normalize_before: x = self.self_attn_layer_norm(x); x, _ = self.self_attn(...);"
    " x = self.residual_connection(x, residual) [residual * self.alpha + x]; if not self.normalize_before: x = self.self_attn_layer_norm(x); the"
    " same with ffn and final_layer_norm. Encoder: if self.layer_norm is not None: x = self.layer_norm(x);"
    " it is None unless normalize_before and normalize_output."
)

MODELS = (
    model("encoder, sub-LN", encoder, tokens, stream("pre_ln"), code=LAYER + " subln: norms inside attention and ffn"),
    model("encoder, pre-LN", partial(encoder, subln=False, layernorm_embedding=True), tokens, stream("pre_ln", embedding_norm=True),
          code=LAYER + " forward_embedding: x = self.layernorm_embedding(x); then x * (1 - padding mask)"),
    model("encoder, post-LN", partial(encoder, subln=False, encoder_normalize_before=False), tokens,
          stream("post_ln", final_norm=False), code=LAYER),
    model("encoder, deepnorm", partial(encoder, deepnorm=True, subln=False), tokens, stream("deepnorm", final_norm=False),
          code=LAYER + " deepnorm: normalize_before = False; self.alpha = math.pow(2.0 * args.encoder_layers, 0.25)"),
    model("decoder, sub-LN", decoder, previous, stream("pre_ln"), code="architecture/decoder.py, DecoderLayer: as the encoder's"),
    model("decoder, deepnorm", partial(decoder, deepnorm=True, subln=False), previous, stream("deepnorm", final_norm=False),
          code="architecture/decoder.py: deepnorm: self.alpha = math.pow(2.0 * args.decoder_layers, 0.25)"),
    model("retnet", retnet, previous, stream("pre_ln", "?f?f", "rms"),
          code="architecture/retnet.py: x = self.retention_layer_norm(x); x = self.retention(...); x = self.residual_connection(x, residual);"
               " the same with ffn; x = self.layer_norm(x), all of them RMSNorm"),
)  # fmt: skip

PACKAGE = Package(
    "torchscale", ("torchscale==0.3.0", "fairscale==0.4.13", "timm==1.0.31", "torchvision==0.29.1"), MODELS
)
