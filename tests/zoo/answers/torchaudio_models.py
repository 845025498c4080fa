"""Speech models of torchaudio; all but wav2vec2 work on (time, batch, d)."""

import torch

from zoo.answer import BARE, CONFORMER_ROWS, IN, Package, Row, group, model, noise, stream


def make_wav2vec2(first=False, wavlm=False):
    from torchaudio import models

    sizes = {
        "extractor_mode": "layer_norm" if first else "group_norm",
        "extractor_conv_layer_config": [(16, 4, 2), (16, 4, 2)],
        "extractor_conv_bias": False,
        "encoder_embed_dim": 32,
        "encoder_projection_dropout": 0.0,
        "encoder_pos_conv_kernel": 4,
        "encoder_pos_conv_groups": 2,
        "encoder_num_layers": 2,
        "encoder_num_heads": 4,
        "encoder_attention_dropout": 0.0,
        "encoder_ff_interm_features": 64,
        "encoder_ff_interm_dropout": 0.0,
        "encoder_dropout": 0.0,
        "encoder_layer_norm_first": first,
        "encoder_layer_drop": 0.0,
        "aux_num_out": None,
    }
    if wavlm:
        return models.wavlm_model(**sizes, encoder_num_buckets=8, encoder_max_distance=16)
    return models.wav2vec2_model(**sizes)


def frames():
    return noise(2, 9, 32), torch.tensor([9, 6])


def sound():
    return (noise(2, 120),)


CONFORMER = (
    "conformer.py, ConformerLayer: x = self.ffn1(input); x = x * 0.5 + residual; x = self.self_attn_layer_norm(x); x, _ = self.self_attn(...);"
    " x = x + residual; x = self._apply_convolution(x) [residual + conv_module]; x = self.ffn2(x); x = x * 0.5 + residual; x ="
    " self.final_layer_norm(x). ffn and convolution begin with a LayerNorm. Conformer: x = input.transpose(0, 1)"
)
WAV2VEC2 = (
    "wav2vec2/components.py, Transformer._preprocess: x = x + self.pos_conv_embed(x); if self.layer_norm_first: x = self.layer_norm(x)"
    " [_get_encoder passes not layer_norm_first]. EncoderLayer: if self.layer_norm_first: x = self.layer_norm(x); x = residual +"
    " attention; x = x + self.feed_forward(self.final_layer_norm(x)); else x = self.layer_norm(x); x = self.final_layer_norm(x +"
    " self.feed_forward(x))."
)
POST = stream("post_ln", "oafaf", final_norm=False)

conformer = group("torchaudio.models:Conformer", frames, args=(32, 4, 64, 2, 3))
wav2vec2 = group(make_wav2vec2, sound)

MODELS = (
    conformer("conformer", stream(None, "faof" * 2, final_norm=False, rows=CONFORMER_ROWS), CONFORMER),
    conformer(
        "conformer, convolution first",
        stream(None, "foaf" * 2, final_norm=False, rows=CONFORMER_ROWS),
        CONFORMER + " convolution_first: before the attention",
        convolution_first=True,
    ),
    model(
        "emformer",
        "torchaudio.models:Emformer",
        frames,
        stream(None, final_norm=False, rows=(IN, Row(norm_in=True, norm_out=True))),
        "emformer.py, _EmformerLayer: layer_norm_input = self.layer_norm_input(torch.cat([right_context, utterance])); result ="
        " self.dropout(rc_output) + torch.cat([right_context, utterance]); result = self.pos_ff(result) + result [pos_ff begins with a"
        " LayerNorm]; result = self.layer_norm_output(result); return result[right_context.size(0):], result[:right_context.size(0)]",
        args=(32, 4, 64, 2),
        segment_length=4,
        right_context_length=1,
    ),
    wav2vec2("wav2vec2, post-LN", POST, WAV2VEC2),
    wav2vec2(
        "wav2vec2, pre-LN",
        stream("pre_ln", "oafaf", rows=(BARE, IN, IN, IN, IN)),
        WAV2VEC2 + " At the end: if not self.layer_norm_first: x = self.layer_norm(x)",
        first=True,
    ),
    wav2vec2("wavlm", POST, WAV2VEC2 + " WavLMSelfAttention in place of SelfAttention", wavlm=True),
)

PACKAGE = Package(("torchaudio==2.11.0",), MODELS, remove=("torchaudio/lib",))
