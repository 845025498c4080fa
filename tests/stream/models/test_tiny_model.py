"""Tests of tiny models of transformers' types: small with every kind of layer, seeded random weights, fitting inputs."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from addnorm.stream.models.load import load, model_types
from addnorm.stream.models.tiny_model import LAYERS, reduce_config
from support.model_loading import run, sentence
from support.pairwise import some

# Post- and pre-norm, LayerNorm and RMSNorm, sandwich norms, experts, state spaces, two stacks, images, sound: one type for each
# by default, the others under `make test-all`.
TYPES = ["bart", "clip", "gemma2", "gpt_oss", "jamba", "mamba2", "swin", "t5", "wav2vec2"]
MORE_TYPES = [
    "albert",
    "bert",
    "bloom",
    "convnext",
    "deberta-v2",
    "deepseek_v3",
    "dinov2",
    "distilbert",
    "electra",
    "falcon",
    "gemma",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "gptj",
    "hubert",
    "llama",
    "llava",
    "mamba",
    "mistral",
    "mixtral",
    "modernbert",
    "mpt",
    "nemotron",
    "olmo2",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_vl",
    "qwen3",
    "qwen3_moe",
    "roberta",
    "siglip",
    "stablelm",
    "videomae",
    "vit",
    "whisper",
    "xlm-roberta",
    "xlnet",
    "qwen4_exp_text",
]


@pytest.mark.parametrize("name", some(TYPES + MORE_TYPES, TYPES))
def test_model_type_is_built_small_and_runs(name):
    loaded = load(name)
    assert not loaded.model.training
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) < 40_000_000
    run(loaded)
    assert "random" in loaded.source


@pytest.mark.parametrize(
    ("name", "options", "part", "settings"),
    [
        ("llama", {}, "", {"num_hidden_layers": LAYERS, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
        ("gpt2", {}, "", {"n_layer": LAYERS, "n_embd": 64, "n_head": 4, "vocab_size": 256}),  # other names of the settings
        ("gpt2", {"layers": 14}, "", {"n_layer": 14}),
        ("clip", {}, "text_config", {"hidden_size": 64, "num_hidden_layers": LAYERS}),
        ("gemma2", {"layers": 4}, "", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
        ("gemma3_text", {}, "", {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),  # every kind
    ],
)  # fmt: skip
def test_config_is_reduced(name, options, part, settings):
    config = load(name, **options).model.config
    config = getattr(config, part) if part else config
    assert {setting: getattr(config, setting) for setting in settings} == settings


def test_reduce_config_leaves_out_derived_settings():
    from transformers import DeepseekV3Config

    options = reduce_config(DeepseekV3Config())
    assert "head_dim" not in options
    assert DeepseekV3Config(**options).qk_head_dim == 24


def test_build_tiny_perturbs_norms():
    norms = [module for module in load("bert").model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 1 + 2 * LAYERS
    for norm in norms:
        assert (norm.weight - 1).abs().mean() > 0.1
        assert norm.bias.abs().mean() > 0.1


def test_seed_sets_weights_and_inputs_only():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, again, other = load("gpt2", seed=3), load("gpt2", seed=3), load("gpt2", seed=4)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(run(first)[0], run(again)[0])
    assert not torch.equal(first.model.wte.weight, other.model.wte.weight)
    assert not torch.equal(first.kwargs["input_ids"], other.kwargs["input_ids"])


def test_random_inputs_have_size_and_no_padding():
    ids = load("bert", tokens=40, batch=5).kwargs["input_ids"]
    assert ids.shape == (5, 40)
    assert ids.min() > 2
    assert load("bert").kwargs["input_ids"].shape == (2, 16)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("whisper", {"input_features", "decoder_input_ids"}),
        ("vit", {"pixel_values"}),
    ],
)
def test_random_inputs_by_model_type(name, kinds):
    assert load(name).kwargs.keys() == kinds


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtype_of_weights_and_inputs(dtype):
    loaded = load("vit", dtype=dtype)
    assert run(loaded).last_hidden_state.dtype == getattr(torch, dtype)
    assert load("bert", dtype=dtype).kwargs["input_ids"].dtype == torch.int64


def test_model_types_lists_transformers_types():
    assert {"bert", "gpt2", "llama", "t5"} <= {*model_types()}
    assert len(model_types()) > 100


@pytest.mark.parametrize("name", some(("timesfm", "lxmert"), ("lxmert",)))
def test_model_type_that_cannot_run_raises(name):
    text = sentence(name)
    assert text.startswith(f"MODEL '{name}' cannot be built small and run with random inputs (")
    assert text.endswith("build it in a factory of your own, module.path:factory, which returns (model, args, kwargs).")
