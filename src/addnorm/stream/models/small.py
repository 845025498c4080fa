"""A transformers model type, built small with random weights: every size that its configuration names is cut down."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from addnorm.stream.models.hf import Refused, is_config, seeded

__all__ = ["LAYERS", "WAYS", "build", "model_class", "shrunk"]

LAYERS = 3
VOCAB = 256
MOST = 100_000_000  # parameters: a model with more is not small, whatever was cut down

# What a size becomes, under all names that it has; one that is smaller already stays as it is.
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
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "num_blocks"),
    *("encoder_layers", "num_encoder_layers", "encoder_num_hidden_layers"),
    *("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers"),
}
# For settings without a default, where a model of that type cannot be built without.
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
# Where sizes must fit one another in a way of that family's own.
FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 32, "attn_layer_indices": [1]},
    "esm": {"mask_token_id": 32, "pad_token_id": 1},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "reformer": {"axial_pos_embds_dim": [32, 32]},
    "xlnet": {"d_head": 16},
}
MROPE = "mrope_section"  # how a head's frequencies are shared out among time, height and width
# Tried one after the other: some types want as many heads of keys as of queries, some hang together in other ways.
WAYS: tuple[Mapping[str, int], ...] = (
    SIZES,
    SIZES | {"num_key_value_heads": 4, MROPE: 1},
    {"vocab_size": VOCAB, "num_hidden_layers": LAYERS},
)
SPECIAL_TOKEN = re.compile(r"token_(id|index)$")
LAYER_NUMBERS = re.compile(r"(index(es)?|indices|layer_ids|_layers|idx)$")
LEFT = {
    *("out_features", "out_indices", "stage_names"),  # follow from the layers
    *("transformers_version", "model_type", "dtype", "torch_dtype", "architectures", "id2label", "label2id"),
}


def shrunk(config: Any, layers: int | None = None, sizes: Mapping[str, int] = SIZES) -> dict[str, Any]:
    """The options that make a configuration of this class small, those of the configurations in it too.

    What the class derives from its other settings is left out, so that it is derived from the small ones.
    """
    common = {own: name for name, own in (config.attribute_map or {}).items()}
    plain = type(config)().to_dict()
    full = config.to_dict()
    takes = inspect.signature(type(config)).parameters
    if "depths" in full:  # layers by stage, and the width of every stage follows from that of the first
        sizes = {}
    deep = max((n for name, n in full.items() if _known(name, common) in LAYER_COUNTS and _whole(n)), default=0)
    options: dict[str, Any] = {}
    for name, value in full.items():
        inner = vars(config).get(name)
        if is_config(inner):
            options[name] = {"model_type": inner.model_type, **shrunk(inner, layers, sizes)}
        elif name not in LEFT:
            new = _new(_known(name, common), value, layers, deep, sizes)
            derived = isinstance(value, list | tuple) and name in takes and takes[name].default is None
            if plain.get(name) != value or (new != value and (not derived or isinstance(new[0], str))):
                options[name] = new
    if "qk_rope_head_dim" in full:
        options.pop("head_dim", None)
    return options | (FAMILIES.get(config.model_type, {}) if "hidden_size" in sizes else {})


def _known(name: str, common: Mapping[str, str]) -> str:
    """The name by which the tables know it: its own or the one that all families share."""
    return name if name in SIZES or name in LAYER_COUNTS or name in MISSING else common.get(name, name)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _new(name: str, value: Any, layers: int | None, deep: int, sizes: Mapping[str, int]) -> Any:
    """A size cut down; a list by layer cut to the layers that are left."""
    left = layers or LAYERS
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
    if isinstance(value, list | tuple) and deep > left and sizes:
        if len(value) == deep:
            return _cut(value, left)
        if LAYER_NUMBERS.search(name) and value and all(map(_whole, value)):
            return [n for n in value if n < left] or [left - 1]
    if not _whole(value) or not sizes:
        return value
    if name in LAYER_COUNTS:
        return layers or min(value, LAYERS)
    if SPECIAL_TOKEN.search(name) and value >= VOCAB:
        return VOCAB - 1 - value % 16
    return min(value, sizes.get(name, value))


def _cut(by_layer: Sequence[Any], layers: int) -> list[Any]:
    """The first layers, the last of them replaced such that every kind of layer is there."""
    kept = list(by_layer[:layers])
    if all(isinstance(kind, str) for kind in by_layer):
        others = list(dict.fromkeys(kind for kind in by_layer if kind not in kept))[: layers - 1]
        kept[layers - len(others) :] = others
    return kept


def model_class(config_class: type) -> Any:
    """The class without a head; None if transformers has none."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    try:
        found = MODEL_MAPPING[config_class]
    except (KeyError, ValueError):  # ValueError: its tables name a class that it does not have
        return None
    return found[0] if isinstance(found, tuple) else found


def build(model_type: str, seed: int, layers: int | None, sizes: Mapping[str, int] = SIZES) -> nn.Module:
    """The model in eval mode, its norms' weights away from one. Raises whatever transformers raises where it cannot be built."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    made = model_class(config_class)
    if made is None:
        raise Refused(f"transformers has no model without a head for the model type {model_type!r}")
    config = config_class(**shrunk(config_class(), layers, sizes))
    with torch.device("meta"):
        n = sum(parameter.numel() for parameter in made._from_config(config).parameters())
    if n > MOST:
        raise Refused(f"cut down it still has {n:,} parameters")
    with seeded(seed):
        model: nn.Module = made._from_config(config).eval()
        _shake(model)
    return model


def _shake(model: nn.Module) -> None:
    """Moves the weights and biases of norms away from ones and zeros, with which much goes unnoticed."""
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            for parameter in module.parameters(recurse=False):
                with torch.no_grad():
                    parameter.add_(torch.empty_like(parameter).uniform_(-0.4, 0.4))
