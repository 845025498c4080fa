"""Tests of inputs and texts from files: contents, and one-sentence errors."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import save_file

from addnorm.stream.models.hf import ModelLoadError
from addnorm.stream.models.inputs import read_inputs, read_texts
from addnorm.stream.models.load import load
from support.model_loading import run, sentence

# Inputs


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_read_inputs_by_keyword(tmp_path, suffix):
    path = tmp_path / f"in{suffix}"
    tensors = {"input_ids": torch.arange(12).view(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.int64)}
    (save_file if suffix == ".safetensors" else torch.save)(tensors, path)
    loaded = load("bert", inputs=path)
    assert loaded.kwargs.keys() == tensors.keys()
    assert run(loaded).last_hidden_state.shape == (2, 6, 64)


def test_read_inputs_rejects_wrong_files(tmp_path):
    def written(name, content):
        path = tmp_path / name
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        return sentence("bert", inputs=path)

    assert "which is no file, expected" in sentence("bert", inputs=tmp_path / "none.pt")
    assert "which is a directory, expected" in sentence("bert", inputs=tmp_path)
    assert "which cannot be read (" in written("a.safetensors", b"123")
    assert "which cannot be read (" in written("a.pt", b"")
    assert "expected a file that ends in .safetensors or .pt" in written("a.npz", b"123")
    assert "expected a file of named tensors" in written("b.pt", torch.ones(2))
    assert "expected a file of named tensors" in written("c.pt", {})
    assert "in which input_ids is list, expected a tensor" in written("d.pt", {"input_ids": [1]})
    text = written("e.pt", {"input_id": torch.ones(2)})
    assert "whose input_id is no argument of the model, expected one of input_ids, " in text
    assert text.endswith("; a similar name is input_ids.")
    # BERT accepts any keyword and ignores unknown ones.
    tensors = {"input_ids": torch.ones(1, 2, dtype=torch.int64), "attention_masks": torch.ones(1, 2)}
    assert "whose attention_masks is no argument of the model" in written("f.pt", tensors)


def test_read_inputs_for_any_keyword(tmp_path):
    def any_keyword(**inputs): ...

    torch.save({"one": torch.ones(1)}, tmp_path / "in.pt")
    assert read_inputs(tmp_path / "in.pt", any_keyword).keys() == {"one"}


# Texts


def test_read_texts_by_line(tmp_path):
    path = tmp_path / "texts"
    path.write_bytes("\ufeffOne.\r\n\n  \n  Zwei Wörter. \nthree".encode())
    assert read_texts(path) == ("One.", "Zwei Wörter.", "three")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "the file does not exist"),
        (..., "a directory, expected a text file"),
        (b"", "which has no text"),
        (b" \n\n", "which has no text"),
        (b"good\nb\xe4d", "expected UTF-8, byte 6 is not"),
    ],
)
def test_read_texts_rejects_wrong_files(tmp_path, content, words):
    path = tmp_path / "texts"
    if isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        read_texts(tmp_path if content is ... else path)
    assert words in str(caught.value)
    assert str(caught.value).startswith("--text is ")
