"""Transformer families that `test_families.py` of the finder adds to those of families.py: variants, and less common ones."""

from functools import partial

from addnorm import Learned, Row
from support.families import (
    AAFF,
    ACF,
    AF,
    CONV,
    GROUPED,
    HEADED,
    NOTHING,
    PAIR,
    SMALL,
    SOUND,
    SWIN,
    T5,
    VISION,
    bert,
    bloom,
    hf,
    ids,
    image,
    layer_scale,
    ln,
    noise,
    padded,
    parallel,
    post,
    pre,
    reordered,
    rms,
    sandwich,
    sound,
    stream,
    table,
    text,
    translation,
)  # fmt: skip

OFOF, ALPHA = "of" * 2, 4 ** (1 / 4)
MULTIPLIED = "the stream is multiplied by the attention mask, in place, after its embedding norm and after each layer"
MERGED = "the patch merging ends in a projection: (gather, norm, project)"
SCALED = Row(norm_in=True, a=Learned(1.0, per_feature=True))
MACARON = {"f": Row(norm_in=True, b=0.5), "a": Row(norm_in=True), "o": Row(norm_in=True)}
CONFORMER = MACARON | {"F": Row(norm_in=True, norm_out=True, b=0.5)}  # the layer's last sublayer


def plain():
    return {"input_ids": ids()}


def frames():
    return {"input_features": noise(2, 24, 8), "decoder_input_ids": ids(5, seed=2)}


def pair():
    """Return a text and an image."""
    return plain() | image()


def video():
    return {"pixel_values": noise(2, 2, 3, 16, 16)}


def rows(letters, by_letter):
    return {i: by_letter[letter] for i, letter in enumerate(letters)}


def both(wiring, eps, kind=ln):
    """Return an encoder and a decoder of one wiring."""
    return wiring(kind, eps, AAFF), wiring(kind, eps, ACF)


MOE = GROUPED | {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32}
PROPHETNET = {name: value for name, value in SMALL.items() if name != "num_hidden_layers"}  # it refuses that name
DBRX = {
    "vocab_size": 99, "d_model": 32, "n_layers": 2, "n_heads": 4, "pad_token_id": 0,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CHAMELEON = GROUPED | {
    "vocabulary_map": {"<image>": 98},
    "vq_config": {
        "base_channels": 32,
        "channel_multiplier": [1],
        "num_res_blocks": 1,
        "embed_dim": 8,
        "latent_channels": 8,
    },
}

ENCODERS = (
    hf("electra", "Electra", SMALL, padded, post(ln, 1e-12, AAFF), embedding_size=16,
       remark="the embeddings' norm is 16 wide and a projection follows it"),
    hf("electra, wide embedding", "Electra", SMALL, padded, bert(ln, 1e-12, AAFF), embedding_size=32),
    hf("deberta-v2 with convolution", "DebertaV2", SMALL, padded,
       bert(ln, 1e-7, "afoaf", remark="sublayer 2 reads the first layer's input, not the stream: x' = N(x + conv(x_0)), masked"),
       conv_kernel_size=3, conv_act="gelu"),
    hf("roberta-prelayernorm", "RobertaPreLayerNorm", SMALL, padded, bloom(ln, 1e-12, AAFF)),
    hf("xlm-roberta-xl", "XLMRobertaXL", SMALL, padded, pre(ln, 1e-5, AAFF)),
    hf("xlm-roberta", "XLMRoberta", SMALL, padded, bert(ln, 1e-12, AAFF)),
    hf("camembert", "Camembert", SMALL, padded, bert(ln, 1e-12, AAFF)),
    hf("data2vec text", "Data2VecText", SMALL, padded, bert(ln, 1e-12, AAFF)),
    hf("nomic-bert", "NomicBert", SMALL, padded, bert(ln, 1e-12, AAFF)),
    hf("esm", "Esm", SMALL, padded, pre(ln, 1e-12, AAFF, remark="the embedding is multiplied by the mask"), mask_token_id=4),
    hf("esm, embedding norm", "Esm", SMALL, padded, bloom(ln, 1e-12, AAFF, remark="and then multiplied by the mask"),
       mask_token_id=4, emb_layer_norm_before=True),
    hf("xlm", "XLM", SMALL, padded, bert(ln, 1e-12, AAFF, remark=MULTIPLIED)),
    hf("flaubert", "Flaubert", SMALL, padded, bert(ln, 1e-12, AAFF, remark=MULTIPLIED)),
    hf("longformer", "Longformer", SMALL, padded, bert(ln, 1e-12, AAFF), attention_window=4),
    hf("big_bird", "BigBird", SMALL, padded, bert(ln, 1e-12, AAFF), attention_type="original_full"),
    hf("fnet", "FNet", SMALL, plain, post(ln, 1e-12, OFOF, remark="a projection follows the embedding norm")),
    hf("mpnet", "MPNet", SMALL, padded, bert(ln, 1e-12, AAFF)),
    hf("splinter", "Splinter", SMALL, padded, bert(ln, 1e-12, AAFF), question_token_id=4),
    hf("megatron-bert", "MegatronBert", SMALL, padded, pre(ln, 1e-12, AAFF)),
    hf("convbert", "ConvBert", SMALL, padded, bert(ln, 1e-12, AAFF, remark="each attention has a convolution in it"),
       embedding_size=32, head_ratio=2, conv_kernel_size=3),
    hf("squeezebert", "SqueezeBert", SMALL, padded, bert(ln, 1e-12, AAFF, remark="the layers work on (batch, d, length)"),
       embedding_size=32),
    hf("layoutlm", "LayoutLM", SMALL, padded, bert(ln, 1e-12, AAFF)),
    hf("roformer", "RoFormer", SMALL, padded, bert(ln, 1e-12, AAFF), embedding_size=32),
    hf("rembert", "RemBert", SMALL, padded, post(ln, 1e-12, AAFF, remark="a projection follows the embeddings' norm"),
       input_embedding_size=16, output_embedding_size=16),
)  # fmt: skip

DECODERS = (
    hf("bloom, residual from the norm", "Bloom", SMALL, text,
       post(ln, 1e-5, AAFF, embedding_norm=True, remark="z = N(x), x' = z + f(z): post-LN, from the second norm on"),
       apply_residual_connection_post_layernorm=True, remark="two norms in a row before the first sublayer"),
    hf("gpt_neo", "GPTNeo", SMALL, text, pre(ln, 1e-5, AAFF), num_heads=4, attention_types=[[["global", "local"], 1]]),
    hf("gpt_bigcode", "GPTBigCode", SMALL, text, pre(ln, 1e-5, AAFF)),
    hf("codegen", "CodeGen", SMALL, text, parallel(ln, 1e-5, AAFF), rotary_dim=4),
    hf("stablelm", "StableLm", GROUPED, text, pre(ln, 1e-5, AAFF)),
    hf("stablelm parallel", "StableLm", GROUPED, text, parallel(ln, 1e-5, AAFF), use_parallel_residual=True),
    hf("falcon 11B", "Falcon", SMALL, text, parallel(ln, 1e-5, AAFF),
       new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    hf("starcoder2", "Starcoder2", GROUPED, text, pre(ln, 1e-5, AAFF)),
    hf("persimmon", "Persimmon", SMALL, text, pre(ln, 1e-5, AAFF, remark="norms of queries and keys")),
    hf("phi3", "Phi3", GROUPED, text, pre(rms, 1e-5, AAFF)),
    hf("qwen2", "Qwen2", GROUPED, text, pre(rms, 1e-6, AAFF)),
    hf("qwen2_moe", "Qwen2Moe", MOE, text, pre(rms, 1e-6, AAFF, remark="a shared expert is added in the feed-forward"),
       shared_expert_intermediate_size=32),
    hf("qwen3_moe", "Qwen3Moe", MOE, text, pre(rms, 1e-6, AAFF), head_dim=8),
    hf("mixtral", "Mixtral", MOE, text, pre(rms, 1e-5, AAFF)),
    hf("granitemoe", "GraniteMoe", MOE, text,
       stream("residual_multiplier", rms, 1e-6, AAFF, {"multiplier": 0.22}, final_norm=True), residual_multiplier=0.22),
    hf("gpt_oss", "GptOss", MOE, text, pre(rms, 1e-5, AAFF, remark="learned sinks"), head_dim=8, rope_parameters=ROPE),
    hf("olmoe", "Olmoe", MOE, text, pre(rms, 1e-5, AAFF, remark="norms of queries as wide as the stream")),
    hf("afmoe", "Afmoe", MOE, text, sandwich(rms, 1e-5, AAFF), head_dim=8, num_dense_layers=1),
    hf("deepseek_v3", "DeepseekV3", SMALL, text, pre(rms, 1e-6, AAFF, remark="a dense layer, then experts and a shared one"),
       num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
       n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1),
    hf("olmo", "Olmo", GROUPED, text, pre(ln, 1e-5, AAFF, remark="the norms have no weights")),
    hf("olmo3", "Olmo3", GROUPED, text, reordered(rms, 1e-5, AAFF, remark="norms of queries as wide as the stream")),
    hf("exaone4", "Exaone4", GROUPED, text, reordered(rms, 1e-5, AAFF)),
    hf("nemotron", "Nemotron", GROUPED, text, pre(ln, 1e-5, AAFF, remark="weights as 1 + w")),
    hf("minicpm3", "MiniCPM3", SMALL, text,
       stream("depth_mup", rms, 1e-5, AAFF, {"k": 1.4}, final_norm=True), num_key_value_heads=4, scale_depth=1.4, scale_emb=12,
       q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, head_dim=8),
    hf("minimax", "MiniMax", MOE, text,
       stream("deepnorm", rms, 1e-5, AAFF, embedding_norm=True, remark="z = N(x), x' = alpha z + f(z), and a final norm"),
       layer_types=["full_attention"] * 2, full_attn_alpha_factor=ALPHA, mlp_alpha_factor=ALPHA, head_dim=8),
    hf("minimax, factors 1", "MiniMax", MOE, text, post(rms, 1e-5, AAFF, embedding_norm=True),
       layer_types=["full_attention"] * 2, head_dim=8),
    hf("smollm3", "SmolLM3", GROUPED, text, pre(rms, 1e-6, AAFF)),
    hf("cohere2", "Cohere2", GROUPED, text, parallel(ln, 1e-5, AAFF, remark="added as (x + a) + f; no biases"), head_dim=8),
    hf("helium", "Helium", HEADED, text, pre(rms, 1e-8, AAFF)),
    hf("glm", "Glm", HEADED, text, pre(rms, 1.5625e-7, AAFF)),
    hf("gemma", "Gemma", HEADED, text, pre(rms, 1e-6, AAFF, remark="weights as 1 + w")),
    hf("vaultgemma", "VaultGemma", HEADED, text, pre(rms, 1e-6, AAFF, remark="weights as 1 + w"), query_pre_attn_scalar=8),
    hf("nanochat", "NanoChat", SMALL, text, bloom(rms, 1e-6, AAFF, remark="no weights; one module is embedding and final norm"),
       num_key_value_heads=4),
    hf("doge", "Doge", GROUPED, text,
       stream(None, rms, 1e-6, AAFF, final_norm=True, rows=rows(AAFF, dict.fromkeys(AF, SCALED)),
              remark="the stream is scaled by a learned vector before each add")),
    hf("bitnet", "BitNet", GROUPED, text, pre(rms, 1e-5, AAFF, remark="a norm in each sublayer, before its last projection")),
    hf("apertus", "Apertus", GROUPED, text, pre(rms, 1e-5, AAFF), rope_parameters=ROPE),
    hf("ctrl", "CTRL", SMALL, text, pre(ln, 1e-6, AAFF), dff=64),
    hf("imagegpt", "ImageGPT", SMALL, plain, pre(rms, 1e-5, AAFF, remark="its class is named LayerNorm and has no mean")),
    hf("biogpt", "BioGpt", SMALL, text, pre(ln, 1e-5, AAFF)),
    hf("xglm", "XGLM", SMALL, text, pre(ln, 1e-5, AAFF), ffn_dim=64),
    hf("chameleon", "Chameleon", CHAMELEON, plain, pre(rms, 1e-5, AAFF), swin_norm=False),
    hf("chameleon, Swin's norms", "Chameleon", CHAMELEON, plain, reordered(rms, 1e-5, AAFF), swin_norm=True),
    hf("dbrx", "Dbrx", DBRX, text, pre(ln, 1e-5, AAFF, remark="no biases; a module holds norm, attention and the next norm")),
    hf("mamba", "Mamba", SMALL, plain, pre(rms, 1e-5, "oo"), state_size=4, time_step_rank=2),
    hf("jamba", "Jamba", MOE, text, pre(rms, 1e-6, "ofaf"), attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
       expert_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4),
    hf("lfm2", "Lfm2", GROUPED, text, pre(rms, 1e-5, "ofaf", remark="the final norm is named embedding_norm"),
       layer_types=["conv", "full_attention"], block_multiple_of=8),
    hf("recurrent_gemma", "RecurrentGemma", GROUPED, plain, pre(rms, 1e-6, "ofaf", remark="weights as 1 + w"),
       block_types=["recurrent", "attention"], lru_width=32),
    hf("rwkv", "Rwkv", SMALL, plain,
       bloom(ln, 1e-5, "oooo", remark="the first layer's own norm is the embedding's; deep ones halve the stream every 6 layers;"
             " both sublayers mix each token with the one before"),
       attention_hidden_size=32, remark="its state is written in place: no backward"),
)  # fmt: skip

PAIRS = (
    hf("umt5", "UMT5", T5, translation, *both(pre, 1e-6, rms)),
    hf("mt5", "MT5", T5, translation, *both(pre, 1e-6, rms)),
    hf("longt5", "LongT5", T5, translation, *both(pre, 1e-6, rms), local_radius=3),
    hf("switch", "SwitchTransformers", T5, translation, *both(pre, 1e-6, rms), num_sparse_encoder_layers=1,
       num_sparse_decoder_layers=1, num_experts=4),
    hf("marian", "Marian", PAIR, translation, *both(post, 1e-5)),
    hf("mbart", "MBart", PAIR, translation, *both(bloom, 1e-5)),
    hf("m2m_100", "M2M100", PAIR, translation, *both(pre, 1e-5)),
    hf("pegasus", "Pegasus", PAIR, translation, *both(pre, 1e-5)),
    hf("blenderbot", "Blenderbot", PAIR, translation, *both(pre, 1e-5)),
    hf("blenderbot-small", "BlenderbotSmall", PAIR, translation, bert(ln, 1e-5, AAFF),
       post(ln, 1e-5, ACF, remark="x_0 = N(tokens) + positions: its norm is before the positions' add")),
    hf("plbart", "PLBart", PAIR, translation, *both(bert, 1e-5)),
    hf("led", "LED", PAIR, translation, *both(bert, 1e-5), attention_window=4, max_encoder_position_embeddings=64,
       max_decoder_position_embeddings=64),
    hf("prophetnet", "ProphetNet", PROPHETNET, translation, *both(bert, 1e-5), num_encoder_layers=2, num_decoder_layers=2,
       num_encoder_attention_heads=4, num_decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
       remark="the decoder's stream is longer than its input: (1 + ngram) predictions a token, one after the other"),
    hf("speech_to_text", "Speech2Text", PAIR, frames, *both(pre, 1e-5), input_feat_per_channel=8, conv_channels=16,
       max_source_positions=64, max_target_positions=32),
)  # fmt: skip

IMAGES = (
    hf("clip text", "CLIP", SMALL, text, pre(ln, 1e-5, AAFF), model="TextModel", config="TextConfig"),
    hf("clip vision", "CLIP", VISION, image,
       stream("pre_ln", ln, 1e-5, AAFF, embedding_norm=True, final_norm=True,
              remark="the norm after the layers is of the class token alone"),
       model="VisionModel", config="VisionConfig"),
    hf("clip", "CLIP", {"text_config": SMALL, "vision_config": VISION, "projection_dim": 16}, pair,
       stream("pre_ln", ln, 1e-5, AAFF, embedding_norm=True, final_norm=True), pre(ln, 1e-5, AAFF)),
    hf("siglip text", "Siglip", SMALL, text, pre(ln, 1e-6, AAFF), model="TextModel", config="TextConfig"),
    hf("siglip vision", "Siglip", VISION, image,
       pre(ln, 1e-6, AAFF, remark="built without its pooling head, which has an x + f(N(x)) of one token"),
       model="VisionModel", config="VisionConfig", vision_use_head=False),
    hf("deit", "DeiT", VISION, image, pre(ln, 1e-12, AAFF)),
    hf("vit_msn", "ViTMSN", VISION, image, pre(ln, 1e-6, AAFF)),
    hf("ijepa", "IJepa", VISION, image, pre(ln, 1e-12, AAFF)),
    hf("vivit", "Vivit", VISION, video, pre(ln, 1e-6, AAFF), num_frames=2, tubelet_size=[2, 8, 8]),
    hf("beit", "Beit", VISION, image, stream("layer_scale", ln, 1e-12, AAFF, remark="only the pooled mean is normalized")),
    hf("beit, final norm", "Beit", VISION, image, layer_scale(ln, 1e-12, AAFF), use_mean_pooling=False),
    hf("beit without scale", "Beit", VISION, image, pre(ln, 1e-12, AAFF), use_mean_pooling=False, layer_scale_init_value=0.0),
    hf("dinov3_vit", "DINOv3ViT", VISION, image, layer_scale(ln, 1e-5, AAFF)),
    hf("swin", "Swin", SWIN, partial(image, 32),
       stream("pre_ln", ln, 1e-5, AAFF, embedding_norm=True, width=16, remark="nothing normalizes its end"),
       pre(ln, 1e-5, AAFF, remark=MERGED)),
)  # fmt: skip

SOUNDS = (
    hf("hubert post", "Hubert", SOUND, sound, post(ln, 1e-5, "oafaf", remark=CONV)),
    hf("hubert stable", "Hubert", SOUND, sound, pre(ln, 1e-5, "oafaf", rows=NOTHING, remark=CONV + ", without norm"),
       do_stable_layer_norm=True, feat_extract_norm="layer"),
    hf("data2vec audio", "Data2VecAudio", SOUND, sound,
       post(ln, 1e-5, "oafaf", remark=CONV + "; conv has norms of its own, without weights")),
    hf("wav2vec2-conformer", "Wav2Vec2Conformer", SOUND, sound,
       stream(None, ln, 1e-5, "faof" * 2, final_norm=True, rows=rows("faoF" * 2, CONFORMER),
              remark="halves of the feed-forwards; a norm of the stream ends each layer, one more all of them")),
)  # fmt: skip


def families():
    return table(ENCODERS + DECODERS + PAIRS + IMAGES + SOUNDS)
