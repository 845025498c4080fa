"""Tests of tiny models of transformers' types: small with every kind of layer, seeded random weights, fitting inputs."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from addnorm.stream.models.load import load, model_types
from addnorm.stream.models.tiny_model import LAYERS, reduce_config
from support.model_loading import no_network, run, sentence


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    no_network(monkeypatch)


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
]


@pytest.mark.parametrize("name", [*TYPES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_TYPES)])
def test_model_type_is_built_small_and_runs(name):
    loaded = load(name)
    assert not loaded.model.training
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) < 40_000_000
    run(loaded)
    assert "random" in loaded.source


def test_build_tiny_sizes():
    config = load("llama").model.config
    sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
    assert sizes == (LAYERS, 64, 4, 2)
    config = load("gpt2").model.config  # other names of the settings
    assert (config.n_layer, config.n_embd, config.n_head, config.vocab_size) == (LAYERS, 64, 4, 256)


def test_reduce_config_includes_inner_configs():
    model = load("clip").model
    for config in (model.config.text_config, model.config.vision_config):
        assert (config.hidden_size, config.num_hidden_layers) == (64, LAYERS)


def test_build_tiny_layers():
    assert len(load("bert", layers=5).model.encoder.layer) == 5
    assert len(load("gpt2", layers=14).model.h) == 14
    assert load("gemma2", layers=4).model.config.layer_types == ["sliding_attention", "full_attention"] * 2


def test_reduced_layers_include_every_kind():
    assert set(load("gemma3_text").model.config.layer_types) == {"sliding_attention", "full_attention"}
    assert load("jamba").model.config.layer_types.count("full_attention") == 1


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
        ("t5", {"input_ids", "decoder_input_ids"}),
        ("whisper", {"input_features", "decoder_input_ids"}),
        ("vit", {"pixel_values"}),
        ("clip", {"input_ids", "pixel_values"}),
        ("wav2vec2", {"input_values"}),
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


@pytest.mark.parametrize("name", [pytest.param("timesfm", marks=pytest.mark.slow), "lxmert"])
def test_model_type_that_cannot_run_raises(name):
    text = sentence(name)
    assert text.startswith(f"MODEL '{name}' cannot be built small and run with random inputs (")
    assert text.endswith("build it in a factory of your own, module.path:factory, which returns (model, args, kwargs).")
