"""Tests of descriptions of wirings."""

import pytest

from addnorm import Learned, Row, Wiring, wirings
from addnorm.wirings.catalog import CONSTRUCTORS, EXAMPLES

SUM = "So the stream is a plain sum: x_0 and every write."
NO_SUM = "So the stream is no plain sum of writes"


@pytest.mark.parametrize(
    ("wiring", "said", "not_said"),
    [
        (wirings.post_ln(), ["reads the stream;", "and the sum is normalized", NO_SUM, "There is no final norm"], [SUM]),
        (wirings.pre_ln(), ["reads the norm of the stream;", "passed on as it is", SUM, "A final norm follows"], [NO_SUM]),
        (wirings.reordered(), ["reads the stream; the norm of what it returns is added", SUM], [NO_SUM]),
        (wirings.peri_ln(), ["The embedding is normalized before the first sublayer.", SUM], []),
        (wirings.deepnorm(), ["α times the stream", "α = (2L)^(1/4): 2.213 in 12 layers, 3.761 in 100."], [SUM]),
        (wirings.layernorm_scaling(),
         ["the norm of the stream, times c;", "c = 1/√l: from 1 to 0.2887 in 12 layers, from 1 to 0.1 in 100."], []),
        (wirings.rezero(), ["times α, is added", "a number for all the sublayers of a layer, and starts at 0, so that nothing",
                            "There is no norm."], []),
        (wirings.admin(), ["ω is learned, a vector for each sublayer, and starts as one forward pass on data measures"], []),
        (wirings.layer_scale(), ["and starts at 1e-4, 1e-5 or 1e-6."], ["nothing is added"]),
        (wirings.no_residual(), ["is normalized and takes the place of the stream: there is no residual"], [SUM, NO_SUM]),
        (wirings.no_residual(norm=False), ["There is no norm."], [SUM, NO_SUM]),
        (wirings.mix_ln(), ["In layers 1 to 3 of 12 each sublayer reads the stream;", "In layers 4 to 12 each",
                            "a plain sum of writes in layers 4 to 12 alone"], [SUM, NO_SUM]),
        (wirings.parallel(), ["each reads the same norm of the stream", SUM], []),
        (wirings.parallel(2), ["each reads its own norm of the stream", SUM], []),
        (wirings.resi_dual(), ["v never is, and stays a plain sum", "the sum of u and the norm of v."], [NO_SUM]),
        (wirings.b2t(), ["What entered the layer is added once more before the layer's last norm", NO_SUM], [SUM]),
        (Wiring("own", Row(a=0.5)), ["added to 0.5 times the stream.", f"{NO_SUM}: each factor rescales"], [SUM]),
        (Wiring("own", Row(a=Learned(1.0))), ["a is learned, a number for each sublayer, and starts at 1."], [SUM]),
        (Wiring("own", lambda at: Row(b=1 / at.number)), ["b_l is from 1 to 0.08333 in 12 layers, from 1 to 0.01 in 100."], []),
        (Wiring("own", Row(), embedding_norm=True), ["There is no other norm."], []),
    ],
    ids=lambda value: repr(value) if isinstance(value, Wiring) else "",
)  # fmt: skip
def test_description_follows_the_rows(wiring, said, not_said):
    described = wiring.describe()
    assert [sentence for sentence in said if sentence not in described] == []
    assert [sentence for sentence in not_said if sentence in described] == []


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_description_is_a_few_sentences(name):
    described = wirings.get(name, **EXAMPLES.get(name, {})).describe()
    sentences = described.split(". ")
    assert 2 <= len(sentences) <= 5
    assert described.endswith(".")
    assert all(sentence[0].isupper() or sentence[0] in "uαγωbc" for sentence in sentences)
    assert "  " not in described
    assert ",," not in described


def test_description_does_not_use_the_name():
    assert Wiring("post_ln", Row(norm_in=True), final_norm=True).describe() == wirings.pre_ln().describe()
