"""Tests of descriptions of wirings."""

import pytest

from addnorm import Row, Wiring, wirings
from addnorm.wirings import Stage

SUM = "So the stream is a plain sum: x_0 and every write."
NO_SUM = "no plain sum of writes"
CASES = [
    (wirings.post_ln(), "reads the stream; what it returns is added to the stream, and the sum is normalized.", NO_SUM,
     "There is no final norm: the last sublayer ends in one."),
    (wirings.no_norm(), "The output is the stream, without a final norm.", SUM),
    (wirings.pre_ln(), "reads the norm of the stream; what it returns is added to the stream. ", SUM, "The output is the norm of the stream."),
    (wirings.deepnorm(), "α times the stream", "α = (2L)^(1/4): 2.213 in 12 layers, 3.761 in 100.", NO_SUM),
    (wirings.layernorm_scaling(), "reads c times the norm of the stream;",
     "c = 1/√l: from 1 to 0.2887 in 12 layers, from 1 to 0.1 in 100.", SUM),
    (wirings.rezero(), "α times what it returns is added", "α is a learned number that starts at 0, one a layer.", SUM),
    (wirings.admin(), "ω is a learned vector that starts as one forward pass on data measures it.", NO_SUM),
    (wirings.no_residual(), "the norm of what it returns becomes the stream: there is no residual"),
    (wirings.mix_ln(), "In layers 1 to 3 of 12 each sublayer reads the stream;", "In layers 4 to 12 each",
     "The stream is a plain sum of writes in layers 4 to 12 alone."),
    (wirings.parallel(), "Each sublayer, in parallel with the others of its layer, reads the norm of the stream;", SUM),
    (wirings.parallel(2), "reads its own norm of the stream;", SUM),
    (wirings.resi_dual(), "The 2 streams u and v begin as copies of the embedding.",
     "is added to u, and the sum is normalized; what it returns is added to v.", "So v is a plain sum: x_0 and every write.",
     f"So u is {NO_SUM}", "The output is u plus the norm of v."),
    (wirings.b2t(), "Sublayer 2 of each layer reads h; what it returns is added to h plus x, and the sum is normalized, which gives x.",
     NO_SUM),
    (wirings.siamese_norm(), "reads u plus the norm of v; s times what it returns is added to u, and the sum is normalized;", NO_SUM),
    (wirings.reversible(), "Sublayer 1 of each layer reads the norm of v; what it returns is added to u.", "So u is a plain sum",
     "So v is a plain sum", "The output is the norm of 0.5 times u plus 0.5 times v."),
    (wirings.mhc(), "The 4 streams X begin as copies", "reads the norm of a sum of the streams with weights c;",
     "b times what it returns is added to a sum of the streams with weights A.", NO_SUM,
     "The output is the norm of a sum of the streams with weights h.", "φ starts at 0 and α at 0.01."),
    (wirings.mhc(2, "mean"), "The 2 streams", "the norm of the mean of the streams.", NO_SUM),
    (wirings.mhc(single_pass=True), "with weights c⁻ that the sublayer before computed;", NO_SUM),
    (wirings.independent_hc(), "b times what it returns is added to the streams.", "So each stream is a plain sum"),
    (wirings.gated_residual(), "reads a sum of the norms of the streams with weights G;"),
    (wirings.attention_residuals(), "sublayer 1 reads the norm of the newest state; what it returns becomes a new state.",
     "Elsewhere each sublayer reads the norm of a sum of all states so far with weights p;"),
    (wirings.attention_residuals(2, True, 3), "what it returns is added to the newest state.",
     "has 3 inputs, each the norm of a sum of the norms of all states so far with its own weights p;"),
    (wirings.denseformer(), "is added to a sum of all states so far with weights α, which gives a new state.",
     "α_i is a learned number that starts at 1 for the newest state, 0 for the others."),
    (wirings.x0_residual(), "The embedding is normalized first. The 2 streams x and x_0 begin as copies", NO_SUM,
     "what it returns is added to λ times x plus μ times x_0, which gives x.", "is added to x, which gives x and x_mid."),
    (wirings.residual_scaling(), "b ⊙ (what it returns + w) is added to a ⊙ (the stream + v).", "a and b start at 1", NO_SUM),
    (wirings.keel(), "In layer 1, sublayer 2 reads", "α = S: 24 in 12 layers, 200 in 100."),
    (wirings.depth_scaled(), "from 0.7071 to 0.9798 in 12 layers", "from 0.7071 to 0.2 in 12 layers", NO_SUM),
    (Wiring("own", lambda at: Row(b=1 / at.number)), "b_l: from 1 to 0.08333 in 12 layers, from 1 to 0.01 in 100.", SUM),
    (Wiring("own", Stage(2, (1, 0), ((0, 1), (1, 0)), (1, 0)), embedding=(1.0, 0.5)), "begin as multiples", "; u becomes v.", NO_SUM),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case[0]))
def test_description_follows_the_stages(case):
    wiring, *facts = case
    described = wiring.describe()
    assert [fact for fact in facts if fact not in described] == []
    for sentence in (SUM, NO_SUM):
        assert (sentence in described) == any(sentence in fact for fact in facts), sentence
