"""Encoders and decoders of TorchScale."""

from torch import nn

from zoo.answer import Package, create, group, ids, model, stream, tokens


def make(path, config, side, **options):
    """Return an architecture by its class, the class of its options, and the word with which the names of its sizes begin."""
    sizes = {
        f"{side}_embed_dim": 32,
        f"{side}_ffn_embed_dim": 64,
        f"{side}_layers": 2,
        "vocab_size": 99,
        "no_output_layer": True,
    }
    config = create(f"torchscale.architecture.config:{config}", **sizes, **options)
    return create(f"torchscale.architecture.{path}", config, embed_tokens=nn.Embedding(99, 32))


def previous():
    return {"prev_output_tokens": ids(), "features_only": True}


LAYER = (
    "architecture/encoder.py, EncoderLayer: residual = x; if self.normalize_before: x = self.self_attn_layer_norm(x); x, _ = self.self_attn(...);"
    " x = self.residual_connection(x, residual) [residual * self.alpha + x]; if not self.normalize_before: x = self.self_attn_layer_norm(x); the"
    " same with ffn and final_layer_norm. Encoder: if self.layer_norm is not None: x = self.layer_norm(x);"
    " it is None unless normalize_before and normalize_output."
)

encoder = group(make, tokens, path="encoder:Encoder", config="EncoderConfig", side="encoder", encoder_attention_heads=4)
decoder = group(
    make, previous, path="decoder:Decoder", config="DecoderConfig", side="decoder", decoder_attention_heads=4
)

MODELS = (
    encoder("encoder, sub-LN", stream("pre_ln"), LAYER + " subln: norms inside attention and ffn"),
    encoder(
        "encoder, pre-LN",
        stream("pre_ln", embedding_norm=True),
        LAYER + " forward_embedding: x = self.layernorm_embedding(x); then x * (1 - padding mask)",
        subln=False,
        layernorm_embedding=True,
    ),
    encoder(
        "encoder, post-LN", stream("post_ln", final_norm=False), LAYER, subln=False, encoder_normalize_before=False
    ),
    encoder(
        "encoder, deepnorm",
        stream("deepnorm", final_norm=False),
        LAYER + " deepnorm: normalize_before = False; self.alpha = math.pow(2.0 * args.encoder_layers, 0.25)",
        deepnorm=True,
        subln=False,
    ),
    decoder("decoder, sub-LN", stream("pre_ln"), "architecture/decoder.py, DecoderLayer: as the encoder's"),
    decoder(
        "decoder, deepnorm",
        stream("deepnorm", final_norm=False),
        "architecture/decoder.py: deepnorm: self.alpha = math.pow(2.0 * args.decoder_layers, 0.25)",
        deepnorm=True,
        subln=False,
    ),
    model(
        "retnet",
        make,
        previous,
        stream("pre_ln", "?f?f", "rms"),
        "architecture/retnet.py: x = self.retention_layer_norm(x); x = self.retention(...); x = self.residual_connection(x, residual);"
        " the same with ffn; x = self.layer_norm(x), all of them RMSNorm",
        path="retnet:RetNetDecoder",
        config="RetNetConfig",
        side="decoder",
        decoder_value_embed_dim=32,
        decoder_retention_heads=4,
    ),
)

PACKAGE = Package(("torchscale==0.3.0", "fairscale==0.4.13", "timm==1.0.31", "torchvision==0.29.1"), MODELS)
