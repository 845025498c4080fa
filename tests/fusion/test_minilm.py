"""MiniLM, a real model: every boundary of its stream is fused, proven in both modes and dtypes, and it trains as before."""

import pytest
import torch

import addnorm
from addnorm.stream.models.hf import quiet
from addnorm.stream.models.load import load

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
pytest.importorskip("transformers")
TEXTS = ("Add the residual, and normalize.", "The stream is the sum of what was written to it.")


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("dtype", "training"),
    [
        pytest.param("float32", True, id="float32-training"),
        pytest.param("bfloat16", False, id="bfloat16-evaluation"),
        pytest.param("float32", False, id="float32-evaluation", marks=pytest.mark.slow),
        pytest.param("bfloat16", True, id="bfloat16-training", marks=pytest.mark.slow),
    ],
)
def test_its_twelve_boundaries_are_fused_and_proven(dtype, training):
    loaded = load("minilm", texts=TEXTS, dtype=dtype)
    loaded.model.train(training)
    with quiet():
        done = addnorm.fuse(loaded.model, **loaded.kwargs)
    assert len(done.fused) == 12
    assert [(one.norm, one.reason) for one in done.unfused] == [("embeddings.LayerNorm", "its add broadcasts")]
    assert {(one.kind, one.eps, one.returns_residual) for one in done.fused} == {("layer", 1e-12, False)}
    assert done.proof.holds
    assert done.proof.oracle == "float64"
    assert len(done.proof.gradients) == 103
    addnorm.unfuse(loaded.model)


def test_it_embeds_texts_of_other_lengths_as_before():
    loaded = load("minilm", texts=TEXTS)
    loaded.model.requires_grad_(False)  # inference is what is asked here
    longer = load("minilm", texts=[" ".join(TEXTS * 5), *TEXTS * 2]).kwargs
    with torch.no_grad(), quiet():
        before = loaded.model(**longer).last_hidden_state
        addnorm.fuse(loaded.model, **loaded.kwargs)
        after = loaded.model(**longer).last_hidden_state
        assert (before - after).abs().max() < 1e-5 * before.abs().max()
        assert addnorm.unfuse(loaded.model)(**longer).last_hidden_state.equal(before)
