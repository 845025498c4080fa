"""Tests of directories with a model: weights and tokenizer are read, no code runs, and faults raise one sentence."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from addnorm.stream.models.hf import quiet
from addnorm.stream.models.inputs import SENTENCES
from addnorm.stream.models.load import load
from support.equality import assert_same
from support.model_loading import run, saved_in, sentence


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return saved_in(tmp_path_factory.mktemp("original") / "saved")


@pytest.fixture
def saved(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "saved"))


def rewrite(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def add_tokenizer(folder, **settings):
    words = {"[PAD]": 0, "[UNK]": 1, "the": 2, "cat": 3, "sat": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_padding(length=99)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


# Valid directories


def test_directory_weights_are_loaded(saved):
    loaded = load(str(saved))
    assert not loaded.model.training
    assert loaded.source == f"The weights are those of model.safetensors in {saved}."
    original = load("bert").model.state_dict()
    assert_same(loaded.model.state_dict(), original)
    assert run(loaded).last_hidden_state.shape == (2, 16, 64)


def test_weights_may_be_sharded_pickled_or_have_a_head(saved):
    weights = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    headed = {f"bert.{name}": value for name, value in weights.items()} | {"cls.predictions.bias": torch.ones(256)}
    torch.save(headed, saved / "pytorch_model.bin")
    pickled = load(str(saved))
    assert "pytorch_model.bin" in pickled.source
    names = sorted(weights)
    for k, some in enumerate((names[:9], names[9:])):
        save_file({name: weights[name] for name in some}, saved / f"part-{k}.safetensors")
    index = {"weight_map": {name: f"part-{int(k >= 9)}.safetensors" for k, name in enumerate(names)}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    parts = load(str(saved))
    assert "index.json" in parts.source
    for name, value in weights.items():
        assert torch.equal(pickled.model.state_dict()[name], value)
        assert torch.equal(parts.model.state_dict()[name], value)


def test_pooler_weights_are_optional(saved):
    weights = {k: v for k, v in load_file(saved / "model.safetensors").items() if not k.startswith("pooler")}
    save_file(weights, saved / "model.safetensors")
    run(load(str(saved)))


def test_texts_are_tokenized_with_the_directory_tokenizer(saved):
    add_tokenizer(saved, model_max_length=6)
    loaded = load(str(saved), texts=["the cat sat", "the dog"])
    assert loaded.kwargs["input_ids"].tolist() == [[2, 3, 4], [2, 1, 0]]
    assert loaded.kwargs["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert loaded.texts == ("the cat sat", "the dog")
    assert load(str(saved), texts=["the cat " * 50]).kwargs["input_ids"].shape == (1, 6)
    assert load(str(saved)).texts == SENTENCES
    assert sentence(saved, texts=[" "]).startswith("the text ' ' has no tokens")


def test_encoder_decoder_gets_shifted_texts(tmp_path):
    with quiet():
        load("t5").model.save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    loaded = load(str(tmp_path), texts=["the cat sat"])
    assert loaded.kwargs["decoder_input_ids"].tolist() == [[0, 2, 3]]
    run(loaded)


# Faulty directories; tests/cli/bad_inputs.txt has more


def write(name, content):
    """Return a fault: a file of the directory has another content."""
    return lambda folder: (folder / name).write_bytes(content.encode())


def with_index(content):
    """Return a fault: an index of parts takes the place of the weights."""

    def fault(folder):
        (folder / "model.safetensors").unlink()
        write("model.safetensors.index.json", content)(folder)

    return fault


def pickle_a_list(folder):
    (folder / "model.safetensors").unlink()
    torch.save([1, 2], folder / "pytorch_model.bin")


def add_wrong_tokenizer(folder):
    add_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"[UNK]":1', '"[UNK]":999').replace('"[UNK]": 1', '"[UNK]": 999'))


FAULTS = {
    "config.json' cannot be read as JSON (RecursionError": write("config.json", "[" * 100_000),
    "32 weights are missing (encoder.layer.3.": lambda folder: rewrite(folder, num_hidden_layers=5),
    "16 weights are of layers that it does not have (": lambda folder: rewrite(folder, num_hidden_layers=2),
    "weights have another shape (embeddings.LayerNorm.bias, ": lambda folder: rewrite(folder, hidden_size=128),
    "made into a bert model: KeyError: 'so-so'": lambda folder: rewrite(folder, hidden_act="so-so"),
    "holds quantized weights": lambda folder: rewrite(folder, quantization_config={"load_in_8bit": True}),
    "names the file '../../etc/passwd', expected files in": with_index('{"weight_map": {"a": "../../etc/passwd"}}'),
    "'model-1.safetensors', which does not exist": with_index('{"weight_map": {"a": "model-1.safetensors"}}'),
    "cannot be read as an index of weights (KeyError: 'weight_map')": with_index("{}"),
    "holds no named tensors": pickle_a_list,
    "tokenizer.json' cannot be read as a tokenizer": write("tokenizer.json", "{}"),
    "gives token 999, the model's vocabulary ends at 255": add_wrong_tokenizer,
}


@pytest.mark.parametrize("words", FAULTS)
def test_faulty_directory_raises_one_sentence(saved, words):
    FAULTS[words](saved)
    assert words in sentence(saved)


def test_texts_need_a_tokenizer(saved):
    assert "has no tokenizer.json" in sentence(saved, texts=["a"])


# No code of the directory runs


class Malice:
    def __reduce__(self):
        return (open, ("ran", "w"))


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_code_is_not_run(saved, zipped, monkeypatch):
    monkeypatch.chdir(saved)
    (saved / "model.safetensors").unlink()
    content = {"a": torch.ones(2), "b": Malice()}
    torch.save(content, saved / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert "holds more than tensors; its code was not run" in sentence(saved)
    assert not (saved / "ran").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.load(saved / "pytorch_model.bin", weights_only=False)
    assert (saved / "ran").exists()  # the file would run it


def test_code_in_the_directory_is_ignored(saved):
    rewrite(
        saved, auto_map={"AutoConfig": "code.Config", "AutoModel": "code.Model"}, attn_implementation="somebody/kernel"
    )
    (saved / "code.py").write_text("raise AssertionError('this was run')")
    model = load(str(saved)).model
    assert type(model).__module__.startswith("transformers.")
    assert model.config._attn_implementation in ("sdpa", "eager")
