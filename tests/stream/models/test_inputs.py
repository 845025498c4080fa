"""Tests of inputs and texts from files. tests/cli/bad_inputs.txt has the errors."""

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import save_file

from addnorm.stream.models.inputs import read_inputs, read_texts
from addnorm.stream.models.load import load
from support.model_loading import run, sentence


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
