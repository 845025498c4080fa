"""The model behind a name: which one it is, how else is refused in a sentence, and that nothing around it changes."""

import contextlib
import inspect
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from addnorm.stream.models.load import Loaded, load, quiet, refused
from support.named_models import no_network, run, saved_in, sentence


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    no_network(monkeypatch)


@pytest.fixture
def saved(tmp_path):
    return saved_in(tmp_path / "saved")


# Names and arguments


def test_a_directory_with_a_config_goes_before_a_model_type_of_its_name(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    saved.rename("gpt2")
    assert type(load("gpt2").model).__name__ == "BertModel"
    (saved.parent / "llama").mkdir()  # without a config it is none
    assert "random" in load("llama").source


def test_a_name_on_the_hub_is_not_downloaded():
    text = sentence("openai-community/gpt2")
    assert "there is no such directory, and nothing is downloaded; near it are gpt2" in text


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gpt-2", {}, "a transformers model type as gpt2 or bert, or module.path:factory; near it are gpt2, "),
        ("minilmm", {}, "near it are minilm"),
        ("", {}, "MODEL is '', expected minilm, a directory"),
        ("a\0b", {}, "MODEL is 'a\\x00b', expected minilm"),
        ("x" * 5000, {}, "expected minilm"),
        (__file__, {}, "a file, expected the directory that it is in"),
        ("bert", {"layers": 0}, "--layers is 0, expected a whole number from 1"),
        ("bert", {"seed": -1}, "--seed is -1, expected a whole number from 0"),
        ("bert", {"tokens": 2.5}, "--tokens is 2.5, expected a whole number from 1"),
        ("bert", {"batch": True}, "--batch is True, expected a whole number from 1"),
        ("bert", {"dtype": "float8"}, "--dtype is 'float8', expected one of float32, float64, bfloat16, float16"),
        ("bert", {"texts": ["a"]}, "--text came with MODEL 'bert', a model type, which has no tokenizer"),
        ("minilm", {"layers": 3}, "--layers came with MODEL 'minilm'"),
        ("json:loads", {"tokens": 3}, "--tokens came with MODEL 'json:loads', a factory"),
        ("minilm", {"texts": []}, "texts is [], expected a list of at least one string"),
        ("minilm", {"texts": "a"}, "texts is 'a', expected a list"),
        ("minilm", {"texts": ["a"], "inputs": "b"}, "--text and --input came both"),
        ("bert", {"tokens": 3, "inputs": "b"}, "--tokens and --input came both"),
        ("bert", {"inputs": "b"}, "--input is 'b', which is no file"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(name, options, words):
    assert words in sentence(name, **options)


@pytest.mark.parametrize("package", ["transformers", "safetensors"])
def test_without_transformers_the_remedy_is_named(monkeypatch, package, saved):
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("minilm", saved, "bert", "nothing"):
        text = sentence(name)
        assert text.endswith(f"needs the package {package}, which is not installed: pip install 'addnorm[hf]'.")


def test_what_the_model_raises_becomes_a_sentence(tmp_path):
    torch.save({"input_ids": torch.full((2, 3), 999)}, tmp_path / "in.pt")
    loaded = load("bert", inputs=tmp_path / "in.pt")
    with pytest.raises(IndexError) as caught:
        run(loaded)
    assert str(refused(caught.value, loaded)) == (
        "MODEL 'bert' refuses its inputs, input_ids (2, 3) int64 (IndexError: index out of range in self): "
        "bring other inputs with --input FILE."
    )
    own = Loaded("a:b", loaded.model, (torch.ones(2), 3), {}, None, "")
    assert "argument 1 (2,) float32, argument 2 int (ValueError): correct what" in str(refused(ValueError(), own))


# Around it


def test_transformers_is_as_loud_afterwards_as_before():
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


def test_loading_prints_nothing(saved, capfd):
    load(str(saved))
    load("t5")
    assert capfd.readouterr() == ("", "")


def test_importing_it_does_not_import_transformers():
    code = "import sys; import addnorm.stream.models.load; print({'transformers', 'safetensors', 'tokenizers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_signature_is_what_the_commands_call():
    assert [*inspect.signature(load).parameters] == [
        "name",
        "texts",
        "inputs",
        "seed",
        "layers",
        "tokens",
        "batch",
        "dtype",
    ]
