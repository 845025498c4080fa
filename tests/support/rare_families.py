"""Transformer families that `test_families.py` of the finder adds to those of families.py: variants, and less common ones."""

from functools import partial

from addnorm import Learned, Row
from support.answers import CONFORMER_ROWS, Answer
from support.families import (
    ACF,
    CONV,
    GROUPED,
    NOTHING,
    PAIR,
    SMALL,
    SWIN,
    VISION,
    Model,
    alike,
    bert,
    bloom,
    both,
    decoder,
    encoder,
    granite,
    grouped,
    headed,
    hf,
    ids,
    image,
    layer_scale,
    ln,
    noise,
    parallel,
    post,
    pre,
    reordered,
    rms,
    sandwich,
    speech,
    stream,
    t5,
    table,
    text,
    translation,
    translator,
    vision,
)  # fmt: skip

OFOF, ALPHA = "of" * 2, 4 ** (1 / 4)
MULTIPLIED = "the stream is multiplied by the attention mask, in place, after its embedding norm and after each layer"
MERGED = "the patch merging ends in a projection: (gather, norm, project)"
SCALED = Row(norm_in=True, a=Learned(1.0, per_feature=True))


def make_siglip_text():
    from transformers import SiglipTextConfig, SiglipTextModel

    return SiglipTextModel(SiglipTextConfig(**SMALL))


def plain():
    return {"input_ids": ids()}


def frames():
    return {"input_features": noise(2, 24, 8), "decoder_input_ids": ids(5, seed=2)}


def pair():
    """Return a text and an image."""
    return plain() | image()


def video():
    return {"pixel_values": noise(2, 2, 3, 16, 16)}


MOE = GROUPED | {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32}
experts, unmasked = partial(hf, MOE, text), partial(hf, SMALL, plain)
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
    encoder("electra", post(ln, 1e-12), embedding_size=16,
       remark="the embeddings' norm is 16 wide and a projection follows it"),
    encoder("electra, wide embedding", bert(ln, 1e-12), embedding_size=32),
    encoder("deberta-v2 with convolution",
       bert(ln, 1e-7, "afoaf", remark="sublayer 2 reads the first layer's input, not the stream: x' = N(x + conv(x_0)), masked"),
       conv_kernel_size=3, conv_act="gelu"),
    encoder("roberta-prelayernorm", bloom(ln, 1e-12)),
    encoder("xlm-roberta-xl", pre(ln, 1e-5)),
    *alike(encoder, ("xlm-roberta", "camembert", "mpnet", "layoutlm"), bert(ln, 1e-12)),
    encoder("data2vec text", bert(ln, 1e-12), kind="data2vec-text"),
    encoder("nomic-bert", bert(ln, 1e-12), kind="nomic_bert"),
    encoder("esm", pre(ln, 1e-12, remark="the embedding is multiplied by the mask"), mask_token_id=4),
    encoder("esm, embedding norm", bloom(ln, 1e-12, remark="and then multiplied by the mask"),
       mask_token_id=4, emb_layer_norm_before=True),
    *alike(encoder, ("xlm", "flaubert"), bert(ln, 1e-12, remark=MULTIPLIED)),
    encoder("longformer", bert(ln, 1e-12), attention_window=4),
    encoder("big_bird", bert(ln, 1e-12), attention_type="original_full"),
    unmasked("fnet", post(ln, 1e-12, OFOF, remark="a projection follows the embedding norm")),
    encoder("splinter", bert(ln, 1e-12), question_token_id=4),
    encoder("megatron-bert", pre(ln, 1e-12)),
    encoder("convbert", bert(ln, 1e-12, remark="each attention has a convolution in it"),
       embedding_size=32, head_ratio=2, conv_kernel_size=3),
    encoder("squeezebert", bert(ln, 1e-12, remark="the layers work on (batch, d, length)"),
       embedding_size=32),
    encoder("roformer", bert(ln, 1e-12), embedding_size=32),
    encoder("rembert", post(ln, 1e-12, remark="a projection follows the embeddings' norm"),
       input_embedding_size=16, output_embedding_size=16),
)  # fmt: skip

DECODERS = (
    decoder("bloom, residual from the norm",
       post(ln, 1e-5, embedding_norm=True, remark="z = N(x), x' = z + f(z): post-LN, from the second norm on"),
       apply_residual_connection_post_layernorm=True, remark="two norms in a row before the first sublayer"),
    decoder("gpt_neo", pre(ln, 1e-5), num_heads=4, attention_types=[[["global", "local"], 1]]),
    *alike(decoder, ("gpt_bigcode", "biogpt"), pre(ln, 1e-5)),
    decoder("codegen", parallel(ln, 1e-5), rotary_dim=4),
    *alike(grouped, ("stablelm", "starcoder2"), pre(ln, 1e-5)),
    grouped("stablelm parallel", parallel(ln, 1e-5), use_parallel_residual=True),
    decoder("falcon 11B", parallel(ln, 1e-5),
       new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    decoder("persimmon", pre(ln, 1e-5, remark="norms of queries and keys")),
    grouped("phi3", pre(rms, 1e-5)),
    *alike(grouped, ("qwen2", "smollm3"), pre(rms, 1e-6)),
    experts("qwen2_moe", pre(rms, 1e-6, remark="a shared expert is added in the feed-forward"),
       shared_expert_intermediate_size=32),
    experts("qwen3_moe", pre(rms, 1e-6), head_dim=8),
    experts("mixtral", pre(rms, 1e-5)),
    experts("granitemoe", granite, residual_multiplier=0.22),
    experts("gpt_oss", pre(rms, 1e-5, remark="learned sinks"), head_dim=8, rope_parameters=ROPE),
    experts("olmoe", pre(rms, 1e-5, remark="norms of queries as wide as the stream")),
    experts("afmoe", sandwich(rms, 1e-5), head_dim=8, num_dense_layers=1),
    decoder("deepseek_v3", pre(rms, 1e-6, remark="a dense layer, then experts and a shared one"),
       num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
       n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1),
    grouped("olmo", pre(ln, 1e-5, remark="the norms have no weights")),
    grouped("olmo3", reordered(rms, 1e-5, remark="norms of queries as wide as the stream")),
    grouped("exaone4", reordered(rms, 1e-5)),
    grouped("nemotron", pre(ln, 1e-5, remark="weights as 1 + w")),
    decoder("minicpm3",
       stream("depth_mup", rms, 1e-5, options={"k": 1.4}, final_norm=True), num_key_value_heads=4, scale_depth=1.4, scale_emb=12,
       q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, head_dim=8),
    experts("minimax",
       stream("deepnorm", rms, 1e-5, embedding_norm=True, remark="z = N(x), x' = alpha z + f(z), and a final norm"),
       layer_types=["full_attention"] * 2, full_attn_alpha_factor=ALPHA, mlp_alpha_factor=ALPHA, head_dim=8),
    experts("minimax, factors 1", post(rms, 1e-5, embedding_norm=True),
       layer_types=["full_attention"] * 2, head_dim=8),
    grouped("cohere2", parallel(ln, 1e-5, remark="added as (x + a) + f; no biases"), head_dim=8),
    headed("helium", pre(rms, 1e-8)),
    headed("glm", pre(rms, 1.5625e-7)),
    headed("gemma", pre(rms, 1e-6, remark="weights as 1 + w")),
    headed("vaultgemma", pre(rms, 1e-6, remark="weights as 1 + w"), query_pre_attn_scalar=8),
    decoder("nanochat", bloom(rms, 1e-6, remark="no weights; one module is embedding and final norm"),
       num_key_value_heads=4),
    grouped("doge",
       stream(None, rms, 1e-6, final_norm=True, rows=[SCALED],
              remark="the stream is scaled by a learned vector before each add")),
    grouped("bitnet", pre(rms, 1e-5, remark="a norm in each sublayer, before its last projection")),
    grouped("apertus", pre(rms, 1e-5), rope_parameters=ROPE),
    decoder("ctrl", pre(ln, 1e-6), dff=64),
    unmasked("imagegpt", pre(rms, 1e-5, remark="its class is named LayerNorm and has no mean")),
    decoder("xglm", pre(ln, 1e-5), ffn_dim=64),
    hf(CHAMELEON, plain, "chameleon", pre(rms, 1e-5), swin_norm=False),
    hf(CHAMELEON, plain, "chameleon, Swin's norms", reordered(rms, 1e-5), swin_norm=True),
    hf(DBRX, text, "dbrx", pre(ln, 1e-5, remark="no biases; a module holds norm, attention and the next norm")),
    unmasked("mamba", pre(rms, 1e-5, "oo"), state_size=4, time_step_rank=2),
    experts("jamba", pre(rms, 1e-6, "ofaf"), attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
       expert_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4),
    grouped("lfm2", pre(rms, 1e-5, "ofaf", remark="the final norm is named embedding_norm"),
       layer_types=["conv", "full_attention"], block_multiple_of=8),
    hf(GROUPED, plain, "recurrent_gemma", pre(rms, 1e-6, "ofaf", remark="weights as 1 + w"),
       block_types=["recurrent", "attention"], lru_width=32),
    unmasked("rwkv",
       bloom(ln, 1e-5, "oooo", remark="the first layer's own norm is the embedding's; deep ones halve the stream every 6 layers;"
             " both sublayers mix each token with the one before"),
       attention_hidden_size=32, remark="its state is written in place: no backward"),
)  # fmt: skip

PAIRS = (
    *alike(t5, ("umt5", "mt5"), *both(pre, 1e-6, rms)),
    t5("longt5", *both(pre, 1e-6, rms), local_radius=3),
    t5("switch", *both(pre, 1e-6, rms), kind="switch_transformers", num_sparse_encoder_layers=1,
       num_sparse_decoder_layers=1, num_experts=4),
    translator("marian", *both(post, 1e-5)),
    translator("mbart", *both(bloom, 1e-5)),
    *alike(translator, ("m2m_100", "pegasus", "blenderbot"), *both(pre, 1e-5)),
    translator("blenderbot-small", bert(ln, 1e-5),
       post(ln, 1e-5, ACF, remark="x_0 = N(tokens) + positions: its norm is before the positions' add")),
    translator("plbart", *both(bert, 1e-5)),
    translator("led", *both(bert, 1e-5), attention_window=4, max_encoder_position_embeddings=64,
       max_decoder_position_embeddings=64),
    hf(PROPHETNET, translation, "prophetnet", *both(bert, 1e-5), num_encoder_layers=2, num_decoder_layers=2,
       num_encoder_attention_heads=4, num_decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
       remark="the decoder's stream is longer than its input: (1 + ngram) predictions a token, one after the other"),
    hf(PAIR, frames, "speech_to_text", *both(pre, 1e-5), input_feat_per_channel=8, conv_channels=16,
       max_source_positions=64, max_target_positions=32),
)  # fmt: skip

IMAGES = (
    decoder("clip text", pre(ln, 1e-5), kind="clip_text_model"),
    vision("clip vision",
       bloom(ln, 1e-5,
              remark="the norm after the layers is of the class token alone"),
       kind="clip_vision_model"),
    hf({"text_config": SMALL, "vision_config": VISION, "projection_dim": 16}, pair, "clip",
       bloom(ln, 1e-5), pre(ln, 1e-5)),
    Model("siglip text", make_siglip_text, text, Answer((pre(ln, 1e-6),))),  # no model type has this class
    vision("siglip vision",
       pre(ln, 1e-6, remark="built without its pooling head, which has an x + f(N(x)) of one token"),
       kind="siglip_vision_model", vision_use_head=False),
    *alike(vision, ("deit", "ijepa"), pre(ln, 1e-12)),
    vision("vit_msn", pre(ln, 1e-6)),
    hf(VISION, video, "vivit", pre(ln, 1e-6), num_frames=2, tubelet_size=[2, 8, 8]),
    vision("beit", stream("layer_scale", ln, 1e-12, remark="only the pooled mean is normalized")),
    vision("beit, final norm", layer_scale(ln, 1e-12), use_mean_pooling=False),
    vision("beit without scale", pre(ln, 1e-12), use_mean_pooling=False, layer_scale_init_value=0.0),
    vision("dinov3_vit", layer_scale(ln, 1e-5)),
    hf(SWIN, partial(image, 32), "swin",
       stream("pre_ln", ln, 1e-5, embedding_norm=True, width=16, remark="nothing normalizes its end"),
       pre(ln, 1e-5, remark=MERGED)),
)  # fmt: skip

SOUNDS = (
    speech("hubert post", post(ln, 1e-5, "oafaf", remark=CONV)),
    speech("hubert stable", pre(ln, 1e-5, "oafaf", rows=NOTHING, remark=CONV + ", without norm"),
       do_stable_layer_norm=True, feat_extract_norm="layer"),
    speech("data2vec audio",
       post(ln, 1e-5, "oafaf", remark=CONV + "; conv has norms of its own, without weights"), kind="data2vec-audio"),
    speech("wav2vec2-conformer",
       stream(None, ln, 1e-5, "faof" * 2, final_norm=True, rows=CONFORMER_ROWS,
              remark="halves of the feed-forwards; a norm of the stream ends each layer, one more all of them")),
)  # fmt: skip


def families():
    return table(ENCODERS + DECODERS + PAIRS + IMAGES + SOUNDS)
