"""Tests of descriptions of wirings."""

import pytest

from addnorm import Row, Wiring, wirings

SUM = "So the stream is a plain sum: x_0 and every write."
NO_SUM = "So the stream is no plain sum of writes"
CASES = [
    (wirings.post_ln(), "reads the stream;", "and the sum is normalized", NO_SUM, "There is no final norm"),
    (wirings.pre_ln(), "reads the norm of the stream;", "passed on as it is", SUM, "A final norm follows"),
    (wirings.peri_ln(), "The embedding is normalized before the first sublayer.", SUM),
    (wirings.deepnorm(), "α times the stream", "α = (2L)^(1/4): 2.213 in 12 layers, 3.761 in 100.", NO_SUM),
    (
        wirings.layernorm_scaling(),
        "the norm of the stream, times c;",
        "c = 1/√l: from 1 to 0.2887 in 12 layers, from 1 to 0.1 in 100.", SUM,
    ),
    (
        wirings.rezero(),
        "times α, is added",
        "a number for all the sublayers of a layer, and starts at 0, so that nothing",
        "There is no norm.", SUM, "nothing is added",
    ),
    (wirings.admin(), "ω is learned, a vector for each sublayer, and starts as one forward pass on data measures", NO_SUM),
    (wirings.layer_scale(), "and starts at 1e-4, 1e-5 or 1e-6.", SUM),
    (wirings.no_residual(), "is normalized and takes the place of the stream: there is no residual"),
    (wirings.no_residual(norm=False), "There is no norm."),
    (
        wirings.mix_ln(),
        "In layers 1 to 3 of 12 each sublayer reads the stream;",
        "In layers 4 to 12 each",
        "a plain sum of writes in layers 4 to 12 alone",
    ),
    (wirings.parallel(), "each reads the same norm of the stream", SUM),
    (wirings.parallel(2), "each reads its own norm of the stream", SUM),
    (
        wirings.resi_dual(),
        "is added to u and v; u is then normalized. So v stays a plain sum: x_0 and every write.",
        "The output is u plus the norm of v.",
    ),
    (
        wirings.b2t(),
        "Sublayer 2 of each layer reads h; x becomes the norm of h plus x plus what it returns.",
        "So no stream is a plain sum of writes.",
        "the last sublayer ends in one.",
    ),
    (wirings.siamese_norm(), "reads u plus the norm of v; what it returns is added to v and, times s, to u;"),
    (
        wirings.reversible(),
        "Sublayer 1 of each layer reads the norm of v; what it returns is added to u.",
        "So u and v stay a plain sum",
    ),
    (
        wirings.mhc(),
        "Four streams begin as copies of the embedding.",
        "reads the norm of a sum of the streams with weights c;",
        "added to each stream, times its entry of b, after the matrix A has mixed the streams.",
        "The output is the norm of a sum of the streams with weights h.",
        "φ starts at 0 and α at 0.01.",
    ),
    (wirings.mhc(2, "mean"), "Two streams begin", "the norm of the mean of the streams.", "mixed the streams"),
    (
        wirings.mhc(single_pass=True),
        "with the weights c that the sublayer before computed;",
        "the sum of the streams with the weights c of the last sublayer.", "mixed the streams",
    ),
    (wirings.independent_hc(), "So each stream is a plain sum: x_0 and every write, times its weight."),
    (wirings.gated_residual(), "reads a sum of the norms of the streams with weights G;"),
    (
        wirings.attention_residuals(),
        "sublayer 1 reads the norm of the newest state; what it returns is appended",
        "Elsewhere each sublayer reads the norm of a sum of all states so far with weights p;",
    ),
    (
        wirings.attention_residuals(2, True, 3),
        "has 3 inputs, each the norm of a sum of the norms of all states so far with its own weights p; what it returns is added to the newest state.",
    ),
    (
        wirings.denseformer(),
        "is added to a sum of all states so far with weights α, and the result is appended as the newest",
        "α_n is learned and starts at 1, the other α_i at 0.",
    ),
    (
        wirings.x0_residual(),
        "The embedding is normalized first. Two streams, x and x_0, begin as copies",
        "x becomes λ x plus μ x_0 plus what it returns.",
        "x and x_mid become x plus",
    ),
    (wirings.residual_scaling(), "b ⊙ (what it returns + w) is added to a ⊙ (the stream + v).", "a and b start at 1", NO_SUM),
    (wirings.keel(), "In layer 1, sublayer 2 reads", "α = S: 24 in 12 layers, 200 in 100."),
    (wirings.depth_scaled(), "from 0.7071 to 0.9798 in 12 layers", "from 0.7071 to 0.2 in 12 layers", NO_SUM),
    (Wiring("own", Row(a=0.5)), "added to 0.5 times the stream.", f"{NO_SUM}: each factor rescales"),
    (Wiring("own", lambda at: Row(b=1 / at.number)), "b_l is from 1 to 0.08333 in 12 layers, from 1 to 0.01 in 100.", SUM),
    (Wiring("own", Row(), embedding_norm=True), "There is no other norm.", SUM),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case[0]))
def test_description_follows_the_rows(case):
    wiring, *said = case
    described = wiring.describe()
    assert [sentence for sentence in said if sentence not in described] == []
    for sentence in (SUM, NO_SUM, "nothing is added", "mixed"):
        assert (sentence in described) == any(sentence in each for each in said), sentence
