"""Diffusion transformers of diffusers."""

import torch
from torch import nn

from zoo.answer import BARE, IN, Package, Row, group, model, noise, stream

SMALL = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
TIMES = torch.tensor([3, 7])
BLOCK = (
    "attention.py, BasicTransformerBlock: norm_hidden_states = self.norm1(hidden_states, ...); attn_output = self.attn1(norm_hidden_states,"
    " ...); hidden_states = attn_output + hidden_states; attn2 and ff likewise."
)


class Lumina2Blocks(nn.Module):
    """Blocks of Lumina 2, called as its transformer calls them."""

    def __init__(self, modulation):
        from diffusers.models.transformers.transformer_lumina2 import Lumina2TransformerBlock

        super().__init__()
        self.layers = nn.ModuleList(
            Lumina2TransformerBlock(32, 4, 2, 8, None, 1e-5, modulation=modulation) for _ in range(2)
        )

    def forward(self, x, temb):
        angles = torch.arange(7)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
        rotary = torch.polar(torch.ones(7, 4), angles)[None]
        for layer in self.layers:
            x = layer(x, None, rotary, temb)
        return x


LUMINA = (
    "transformer_lumina2.py, Lumina2TransformerBlock: hidden_states = hidden_states + gate_msa.unsqueeze(1).tanh() * self.norm2(attn_output);"
    " mlp_output = self.feed_forward(self.ffn_norm1(hidden_states) * (1 + scale_mlp.unsqueeze(1))); hidden_states = hidden_states +"
    " gate_mlp.unsqueeze(1).tanh() * self.ffn_norm2(mlp_output); without modulation the same without gates and scales"
)
WITH_NORM = Row(norm_in=True, norm_branch=True)

lumina = group(Lumina2Blocks, lambda: (noise(2, 7, 32), noise(2, 32, seed=2)))

MODELS = (
    model(
        "dit",
        "diffusers:DiTTransformer2DModel",
        lambda: {"hidden_states": noise(2, 3, 8, 8), "timestep": TIMES, "class_labels": torch.tensor([1, 2])},
        stream("pre_ln|none", rows=(IN,)),
        BLOCK
        + " ada_norm_zero: attn_output = gate_msa.unsqueeze(1) * attn_output; ff_output = gate_mlp.unsqueeze(1) * ff_output: gates"
        " from the condition, no constant. hidden_states = self.norm_out(hidden_states) * (1 + scale[:, None]) + shift[:, None]",
        **SMALL,
        in_channels=3,
        sample_size=8,
        patch_size=4,
        num_embeds_ada_norm=10,
        norm_num_groups=1,
    ),
    model(
        "prior",
        "diffusers:PriorTransformer",
        lambda: {
            "hidden_states": noise(2, 32),
            "timestep": 3,
            "proj_embedding": noise(2, 32, seed=2),
            "encoder_hidden_states": noise(2, 4, 32, seed=3),
        },
        stream("pre_ln"),
        BLOCK + " prior_transformer.py: hidden_states = self.norm_out(hidden_states); hidden_states[:, -1]",
        **SMALL,
        embedding_dim=32,
        num_embeddings=4,
        additional_embeddings=4,
    ),
    model(
        "pixart",
        "diffusers:PixArtTransformer2DModel",
        lambda: {"hidden_states": noise(2, 3, 8, 8), "encoder_hidden_states": noise(2, 5, 16), "timestep": TIMES},
        stream(None, "acf" * 2, rows=(IN, BARE, IN)),
        BLOCK
        + " ada_norm_single: 'For PixArt norm2 isn't applied here': the cross-attention reads the stream without a norm; gates"
        " gate_msa and gate_mlp. hidden_states = self.norm_out(hidden_states)",
        **SMALL,
        in_channels=3,
        out_channels=3,
        cross_attention_dim=32,
        sample_size=8,
        patch_size=4,
        caption_channels=16,
        use_additional_conditions=False,
        norm_num_groups=1,
    ),
    model(
        "stable audio",
        "diffusers:StableAudioDiTModel",
        lambda: {
            "hidden_states": noise(2, 8, 6),
            "timestep": TIMES,
            "encoder_hidden_states": noise(2, 5, 8),
            "global_hidden_states": noise(2, 1, 8, seed=2),
            "rotary_embedding": (noise(7, 4, seed=3), noise(7, 4, seed=4)),
        },
        stream("no_norm|none", "?", None, False),
        stream("pre_ln", "acf" * 2, final_norm=False),
        stream("no_norm|none", "?", None, False),
        "stable_audio_transformer.py, StableAudioDiTBlock: hidden_states = attn_output + hidden_states after norm1, attn1; norm2, attn2;"
        " norm3, ff. StableAudioDiTModel: hidden_states = self.preprocess_conv(hidden_states) + hidden_states before, and"
        " self.postprocess_conv(hidden_states) + hidden_states after the blocks, both on other features",
        **SMALL,
        sample_size=6,
        in_channels=8,
        out_channels=8,
        num_key_value_attention_heads=2,
        cross_attention_dim=16,
        time_proj_dim=8,
        global_states_input_dim=8,
        cross_attention_input_dim=8,
    ),
    model(
        "t5 film decoder",
        "diffusers:T5FilmDecoder",
        lambda: ([(noise(2, 5, 32, seed=2), torch.ones(2, 5))], noise(2, 6, 8), torch.tensor([0.2, 0.7])),
        stream("pre_ln|none", "acf" * 2, "rms", rows=(IN,)),
        "t5_film_transformer.py, T5LayerSelfAttentionCond: normed_hidden_states = self.layer_norm(hidden_states);"
        " normed_hidden_states = self.FiLMLayer(normed_hidden_states, conditioning_emb); hidden_states = hidden_states +"
        " self.dropout(attention_output); likewise T5LayerCrossAttention and T5LayerFFCond. y = self.decoder_norm(y)",
        input_dims=8,
        targets_length=6,
        d_model=32,
        num_layers=2,
        num_heads=4,
        d_kv=8,
        d_ff=64,
    ),
    lumina("lumina 2, blocks", stream("sandwich", "afaf", "rms", False), LUMINA, modulation=False),
    lumina(
        "lumina 2, modulated blocks",
        stream("sandwich|none", "afaf", "rms", False, rows=(WITH_NORM,)),
        LUMINA,
        modulation=True,
    ),
)

PACKAGE = Package(
    (
        "diffusers==0.42.1",
        "requests==2.34.2",
        "urllib3==2.8.0",
        "certifi==2026.10.18",
        "charset-normalizer==3.5.2",
        "idna==3.20",
    ),
    MODELS,
)
