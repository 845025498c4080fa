"""Small models of any transformers model type with random weights: every size in the configuration is reduced."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from addnorm.stream.models.hf import ModelLoadError, is_config, seeded

LAYERS = 3
VOCAB = 256
MAX_PARAMETERS = 100_000_000

# The reduced size for each name of a setting. A smaller setting keeps its value.
SIZES: dict[str, int] = {
    name: size
    for size, names in {
        64: "hidden_size d_model n_embd embed_dim dim encoder_hidden_size decoder_hidden_size out_hidden_size hidden_dim "
        "text_hidden_size output_hidden_size vision_hidden_size cross_attention_hidden_size embedding_size feature_size "
        "encoder_hidden_dim decoder_hidden_dim attention_hidden_size projector_hidden_size text_embed_dim lru_width "
        "input_dim output_dim true_hidden_size intra_bottleneck_size fpn_hidden_size mask_feature_size audio_hidden_size "
        "hidden_size_per_layer_input hidden_channels",
        128: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner mlp_dim moe_intermediate_size "
        "shared_expert_intermediate_size ffn_hidden_size dim_feedforward encoder_intermediate_size "
        "decoder_intermediate_size shared_intermediate_size intermediate_size_mlp",
        4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "encoder_num_attention_heads decoder_num_attention_heads num_local_experts n_routed_experts num_experts "
        "moe_num_experts linear_num_value_heads index_n_heads mamba_n_heads",
        2: "num_key_value_heads n_kv_heads kv_n_heads encoder_num_key_value_heads decoder_num_key_value_heads "
        "num_experts_per_tok n_shared_experts linear_num_key_heads",
        16: "head_dim d_kv qk_nope_head_dim v_head_dim kv_channels attention_head_dim global_head_dim index_head_dim "
        "linear_key_head_dim linear_value_head_dim swa_head_dim",
        8: "qk_rope_head_dim rotary_dim",
        32: "kv_lora_rank q_lora_rank projection_dim codebook_dim index_topk sliding_window",
        VOCAB: "vocab_size vocab_size_per_layer_input encoder_vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size "
        "entity_vocab_size codebook_size max_position_embeddings n_positions max_source_positions max_target_positions "
        "n_ctx block_size max_seq_len max_sequence_length",
        112: "image_size",
        1: "n_group topk_group",
        0: "num_kv_shared_layers",
    }.items()
    for name in names.split()
}
LAYER_COUNTS = {
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "num_blocks",
    "encoder_layers", "num_encoder_layers", "encoder_num_hidden_layers",
    "decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers",
}  # fmt: skip
# Values for settings without a default that some model types need.
MISSING = {
    "head_dim": 16,
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "prediction_length": 8,
}
# Settings that must fit each other in one family.
FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 32, "attn_layer_indices": [1]},
    "esm": {"mask_token_id": 32, "pad_token_id": 1},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "num_key_value_heads": 1,
    },
    "reformer": {"axial_pos_embds_dim": [32, 32]},
    "xlnet": {"d_head": 16},
}
MROPE = "mrope_section"  # split of a head's frequencies into time, height and width
# Tried in this order: some types need as many heads of keys as of queries, others have further constraints.
SIZE_VARIANTS: tuple[Mapping[str, int], ...] = (
    SIZES,
    SIZES | {"num_key_value_heads": 4, MROPE: 1},
    {"vocab_size": VOCAB, "num_hidden_layers": LAYERS},
)
SPECIAL_TOKEN = re.compile(r"token_(id|index)$")
LAYER_NUMBERS = re.compile(r"(index(es)?|indices|layer_ids|_layers|idx)$")
UNCHANGED = {
    "out_features", "out_indices", "stage_names",  # derived from the layers
    "transformers_version", "model_type", "dtype", "torch_dtype", "architectures", "id2label", "label2id",
}  # fmt: skip


def reduce_config(config: Any, layers: int | None = None, sizes: Mapping[str, int] = SIZES) -> dict[str, Any]:
    """Return keyword arguments with which `type(config)` builds a small configuration, and small ones inside it.

    Settings that the class derives from others are left out: they are derived from the reduced ones.

    Args:
        config: the default configuration of a model type.
        layers: number of layers; at most `LAYERS` by default.
        sizes: reduced size for each name of a setting.
    """
    common = {own: name for name, own in (config.attribute_map or {}).items()}
    plain = type(config)().to_dict()
    full = config.to_dict()
    parameters = inspect.signature(type(config)).parameters
    if "depths" in full:  # layers by stage; the widths follow from that of the first stage
        sizes = {}
    depth = max((n for name, n in full.items() if _table_name(name, common) in LAYER_COUNTS and _is_int(n)), default=0)
    options: dict[str, Any] = {}
    for name, value in full.items():
        inner = vars(config).get(name)
        if is_config(inner):
            options[name] = {"model_type": inner.model_type, **reduce_config(inner, layers, sizes)}
        elif name not in UNCHANGED:
            new = _reduce(_table_name(name, common), value, layers, depth, sizes)
            derived = isinstance(value, list | tuple) and name in parameters and parameters[name].default is None
            if plain.get(name) != value or (new != value and (not derived or isinstance(new[0], str))):
                options[name] = new
    if "qk_rope_head_dim" in full:
        options.pop("head_dim", None)
    return options | (FAMILIES.get(config.model_type, {}) if "hidden_size" in sizes else {})


def _table_name(name: str, common: Mapping[str, str]) -> str:
    """Return the name of a setting in the tables above: its own, or the one that all families share."""
    return name if name in SIZES or name in LAYER_COUNTS or name in MISSING else common.get(name, name)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _reduce(name: str, value: Any, layers: int | None, depth: int, sizes: Mapping[str, int]) -> Any:
    """Return a small value for a setting of a model with `depth` layers, of which `layers` remain.

    A list with one entry for each layer gets the entries of the remaining layers.
    """
    remaining = layers or LAYERS
    if value is None:
        return MISSING.get(name)
    if name == "depths" and isinstance(value, list | tuple):
        return [min(n, 2) for n in value]
    if (
        isinstance(value, dict)
        and "head_dim" in sizes
        and (MROPE in value or (MROPE in sizes and "rope_type" in value))
    ):
        return value | {MROPE: [4, 2, 2]}
    if isinstance(value, list | tuple) and depth > remaining and sizes:
        if len(value) == depth:
            return _truncate(value, remaining)
        if LAYER_NUMBERS.search(name) and value and all(map(_is_int, value)):
            return [n for n in value if n < remaining] or [remaining - 1]
    if not _is_int(value) or not sizes:
        return value
    if name in LAYER_COUNTS:
        return layers or min(value, LAYERS)
    if SPECIAL_TOKEN.search(name) and value >= VOCAB:
        return VOCAB - 1 - value % 16
    return min(value, sizes.get(name, value))


def _truncate(by_layer: Sequence[Any], layers: int) -> list[Any]:
    """Return the first layers, the last of them replaced so that every kind of layer occurs."""
    first = list(by_layer[:layers])
    if all(isinstance(kind, str) for kind in by_layer):
        others = list(dict.fromkeys(kind for kind in by_layer if kind not in first))[: layers - 1]
        first[layers - len(others) :] = others
    return first


def model_class(config_class: type) -> Any:
    """Return the model class without a head for a configuration class; None if transformers has none."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    try:
        classes = MODEL_MAPPING[config_class]
    except (KeyError, ValueError):  # ValueError: the mapping names a class that does not exist
        return None
    return classes[0] if isinstance(classes, tuple) else classes


def build_tiny(model_type: str, seed: int, layers: int | None, sizes: Mapping[str, int]) -> nn.Module:
    """Return a small model in eval mode with random weights, also in its norms.

    Args:
        model_type: a model type of transformers.
        seed: seed of the weights.
        layers: number of layers; at most `LAYERS` by default.
        sizes: one of `SIZE_VARIANTS`.

    Raises:
        Exception: any error of transformers where such a model cannot be built.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    hf_class = model_class(config_class)
    if hf_class is None:
        raise ModelLoadError(f"transformers has no model without a head for the model type {model_type!r}")
    config = config_class(**reduce_config(config_class(), layers, sizes))
    with torch.device("meta"):
        n = sum(parameter.numel() for parameter in hf_class._from_config(config).parameters())
    if n > MAX_PARAMETERS:
        raise ModelLoadError(f"reduced it still has {n:,} parameters")
    with seeded(seed):
        model: nn.Module = hf_class._from_config(config).eval()
        _perturb_norms(model)
    return model


def _perturb_norms(model: nn.Module) -> None:
    """Add noise to the weights and biases of norms: ones and zeros would hide errors."""
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            for parameter in module.parameters(recurse=False):
                with torch.no_grad():
                    parameter.add_(torch.empty_like(parameter).uniform_(-0.4, 0.4))
