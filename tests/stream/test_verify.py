"""Tests of `verify`: planted errors are named by term and sublayer, and right models are right."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import addnorm
from addnorm import Learned, Row, Wiring, wirings
from support.families import shake
from support.refusals import assert_raises
from support.several_streams import MHC, make_mhc
from support.stacks import encoder
from support.stream_steps import X, make_steps, normalize, repeat, run_layers

LAYERS, D = 3, 16
MOVED = "the norm is after the add, expected before the sublayer"
ROWS = [wiring for wiring in wirings.list_all() if wiring.has_rows]


def make_model(wiring, **options):
    return shake(encoder(wiring, LAYERS, **options))


def change(base, **fields):
    """Return a wiring with other fields in every row; a value may be a function of the row and its place."""

    def rule(place):
        row = base.row(place.layer, place.sublayer, place.num_layers)
        values = {name: value(row, place) if callable(value) else value for name, value in fields.items()}
        return replace(row, **values)

    return Wiring("changed", rule, final_norm=base.final_norm, embedding_norm=base.embedding_norm)


def all_but(layer, sublayer):
    return lambda row, place: (place.layer, place.sublayer) != (layer, sublayer)


def plant(fields, name="pre_ln", count=6):
    return name, fields, count


# The words of the deviation: the fields of the model's rows that differ, the expected wiring if it is not pre-LN, and the
# number of sublayers that have it if it is not six.
PLANTED = {
    MOVED: plant({"norm_in": False, "norm_out": True}),
    "the norm is missing, expected before the sublayer": plant({"norm_in": all_but(1, 1)}, count=1),
    "before the sublayer and on the sublayer's output, expected before the sublayer": plant({"norm_branch": True}),
    "on the sublayer's output, expected before the sublayer": plant({"norm_in": False, "norm_branch": True}),
    "the factor of the branch is 2, expected 1": plant({"b": lambda row, place: 2.0 if place.layer == 2 else 1.0}, count=2),
    "the factor of the residual is 0.9, expected 1": plant({"a": 0.9}),
    "learned, a number for each feature, expected 1": plant({"b": Learned(0.7, per_feature=True)}),
    "in parallel, expected one after the other": plant({"shares": lambda row, place: "state" if place.sublayer else ""}),
    "one after the other, expected in parallel": plant({"shares": "", "norm_in": True}, "parallel"),
    "the norm is missing, expected after the add": plant({"norm_out": all_but(0, 0)}, "post_ln", count=1),
    "the factor 1.565 is on the branch, expected on the residual": plant({"a": 1.0, "b": lambda row, place: row.a}, "deepnorm"),
    "the factor of what the sublayer reads is 1, expected 0.7071": plant({"c": 1.0}, "layernorm_scaling", count=2),
    "the branch is 0.1, expected learned, a number for each feature": plant({"b": 0.1}, "layer_scale"),
    "is learned, one number, expected learned, a number for each feature": plant({"b": Learned(0.1)}, "layer_scale"),
    "the norm is before the sublayer, expected before the sublayer and on": plant({"norm_branch": False}, "sandwich"),
    "the factor of the residual is 1, expected 0": plant({"a": 1.0}, "no_residual"),
}  # fmt: skip


@pytest.mark.parametrize("words", PLANTED)
def test_planted_error_is_named_with_its_sublayers(words):
    name, fields, count = PLANTED[words]
    wiring = wirings.get(name)
    found = addnorm.verify(make_model(change(wiring, **fields)), X, wiring=wiring)
    assert not found.agrees
    (deviation,) = [one for one in found.deviations if words in str(one)]
    assert len(deviation.sites) == count
    assert {*deviation.sites} <= {site.id for site in found.inspection.sites}
    assert words in " ".join(str(found).split())
    assert words in found.to_dict()["deviations"][found.deviations.index(deviation)]["sentence"]


def test_other_wirings_differ_unless_their_rows_are_equal():
    equal = []
    for wiring in ROWS:
        inspection = addnorm.inspect(make_model(wiring), X)
        equal += [(wiring.name, other.name) for other in ROWS if addnorm.verify(inspection, wiring=other).agrees]
    # Three layers of mix_ln are pre-LN; a norm of the embedding is no difference.
    same = {("pre_ln", "mix_ln"), ("mix_ln", "pre_ln"), ("peri_ln", "sandwich")}
    assert {*equal} == same | {(wiring.name, wiring.name) for wiring in ROWS}
    for name in ("resi_dual", "b2t"):
        found = addnorm.verify(make_model(name), X, wiring="post_ln")
        assert f"the rule of the stream is {name}, expected post_ln" in [str(one) for one in found.deviations]


def test_ends_eps_kind_and_dtype_are_compared():
    peri = wirings.peri_ln()
    bare = replace(peri, final_norm=False, embedding_norm=False)
    texts = [str(one) for one in addnorm.verify(make_model(bare), X, wiring=peri).deviations]
    assert texts == [
        "the norm of the embedding is missing, expected before the first sublayer",
        "the final norm is missing, expected after the last sublayer",
    ]
    model = make_model("pre_ln", eps=1e-5, norm="rms")
    assert addnorm.verify(model, X, wiring="pre_ln", eps=1e-5, norm="rms", dtype=torch.float32).agrees
    found = addnorm.verify(model, X, wiring="pre_ln", eps=1e-6, norm="layer", dtype=torch.float64)
    assert sorted(str(one) for one in found.deviations) == [
        "eps is 1e-5, expected 1e-6: in all 7",
        "the dtype of the sum is float32, expected float64: in all 6",
        "the kind of the norm is rms, expected layer: in all 7",
    ]


def test_unproven_model_does_not_agree():
    gated = addnorm.verify(
        make_steps(lambda m, x: m.last(m.gates[0](x).sigmoid() * x + m.branch(0, x))),
        X,
        wiring="pre_ln",
    )
    assert not gated.agrees
    assert gated.unproven
    alone = addnorm.verify(torch.nn.Linear(D, D), torch.randn(2, D), wiring="pre_ln")
    assert not alone.agrees
    assert "not proven" in str(alone)


def test_unproven_sublayers_are_no_deviations():
    """A norm of 2 x is neither that of x nor missing, a vector of constants is not learned, and ReLU ends no stream."""
    vector = torch.linspace(0.5, 1.5, D)
    for step, words in (
        (lambda m, k, x: x + m.mlps[k](m.norms[k](2 * x)), "a norm reads the stream after other steps"),
        (lambda m, k, x: x + vector * m.branch(k, x), "a vector of constants"),
        (lambda m, k, x: torch.relu(x + m.branch(k, x)), "a function of the end of another stream"),
    ):
        found = addnorm.verify(make_steps(repeat(step, end=normalize)), X, wiring="pre_ln")
        assert (found.agrees, found.deviations) == (False, ())
        assert words in " ".join(str(found).split())


def test_factor_for_each_token_is_a_deviation():
    half = torch.full((5, 1), 0.5)
    for model, inputs in (
        (make_steps(repeat(lambda m, k, x: x + half * m.branch(k, x), end=normalize)), (X,)),
        (make_steps(repeat(lambda m, k, x, t: x + t * m.branch(k, x), end=normalize)), (X, half)),
    ):
        (deviation,) = addnorm.verify(model, *inputs, wiring="pre_ln").deviations
        assert str(deviation) == "the factor of the branch is a number for each token, expected one for all: in all 4"


def test_last_norm_of_post_ln_is_not_optional():
    def run(m, x):
        x = m.context(x)
        for k in range(4):
            x = x + m.mlps[k](x)
            x = m.norms[k](x) if k < 3 else x
        return x

    (deviation,) = addnorm.verify(make_steps(run), X, wiring="post_ln").deviations
    assert str(deviation) == "the norm is missing, expected after the add: mlps.3"


def test_missing_residual_does_not_agree():
    def run(m, x):
        for k in range(4):
            x = m.branch(k, x) + (0 if k == 2 else x)
        return m.last(x)

    found = addnorm.verify(make_steps(run), X, wiring="pre_ln")
    assert not found
    assert "mlps.2 computes from the end" in str(found)


REFUSED = {
    "ValueError: norm is 'batch', expected 'layer' or 'rms', or None": {"norm": "batch"},
    "ValueError: eps is 'small', expected": {"eps": "small"},
    "TypeError: dtype is 'float32', expected a torch.dtype as torch.float32, or None": {"dtype": "float32"},
}


def test_wrong_arguments_are_refused():
    model = make_model("pre_ln")
    for sentence, options in REFUSED.items():
        assert_raises(sentence, partial(addnorm.verify, model, X, wiring="pre_ln", **options))
    with pytest.raises(TypeError, match="model is an Inspection, whose run has the inputs already"):
        addnorm.verify(addnorm.inspect(model, X), X, wiring="pre_ln")


HUGE = (lambda x: 1e20 * x, "the squares of a state overflow, so a norm gives zeros")
WITH_NAN = (
    lambda x: torch.where(torch.arange(5)[:, None] == 3, torch.nan, x),
    "numbers of a state are NaN or infinite",
)


@pytest.mark.parametrize(("change", "words"), [HUGE, WITH_NAN], ids=["huge", "NaN in one token"])
@pytest.mark.parametrize("streams", [1, 4])
def test_numbers_that_prove_nothing_are_no_deviation(streams, change, words):
    model, wiring = make_mhc(), MHC
    if streams == 1:
        model, wiring = encoder("pre_ln"), Row(norm_out=True)
    found = addnorm.verify(model, change(X), wiring=wiring)
    assert (found.agrees, found.deviations) == (False, ())
    assert words in " ".join(str(found).split())
    assert addnorm.verify(model, X, wiring=wiring).agrees == (streams == 4)


@pytest.mark.parametrize("norms", [1, 2])
def test_verify_counts_the_norms_of_parallel_sublayers(norms):
    model = make_model(wirings.parallel(norms))
    assert addnorm.verify(model, X, wiring=wirings.parallel(norms)).agrees
    (deviation,) = addnorm.verify(model, X, wiring=wirings.parallel(3 - norms)).deviations
    assert (deviation.found, deviation.expected, len(deviation.sites)) == (str(norms), str(3 - norms), LAYERS)


def test_norm_of_pooled_tokens_is_no_final_norm():
    model = make_steps(lambda m, x: m.last(run_layers(m, x, last=3).mean(1)))
    found = addnorm.verify(model, X, wiring="pre_ln")
    assert [*map(str, found.deviations)] == [
        "the final norm is that in last, of what mean and later operators compute from the tokens, "
        "expected after the last sublayer"
    ]


def test_towers_that_do_not_read_each_other_are_no_pair():
    towers = nn.ModuleList(addnorm.nn.Encoder(2, 16, nhead=2, wiring="deepnorm") for _ in range(2)).eval()
    towers.forward = lambda x, y: [tower(z).mean(1) for tower, z in zip(towers, (x, y), strict=True)]
    assert addnorm.verify(towers, X, X.flip(1), wiring="deepnorm").agrees
    pair = addnorm.nn.Transformer(2, 2, 16, 2, wiring="deepnorm").eval()
    assert addnorm.verify(pair, X, X.flip(1), wiring="deepnorm").agrees


def test_inputs_of_a_reference_are_in_the_order_of_the_model():
    class ByPosition(addnorm.nn.Encoder):
        def forward(self, x, y):
            return super().forward(x + 0.1 * y)

    class Other(ByPosition):
        def forward(self, hidden, positions):
            return super().forward(hidden, positions)

    class ByName(ByPosition):
        def forward(self, *, x, y):
            return super().forward(x, y)

    model = ByPosition(2, D, nhead=2).eval()
    other, by_name = copy.deepcopy(model), copy.deepcopy(model)
    other.__class__, by_name.__class__ = Other, ByName
    inputs = {name: torch.randn(2, 5, D) for name in ("positions", "hidden")}
    assert addnorm.verify(other, **inputs, like=model).agrees
    with pytest.raises(
        TypeError, match="like is ByName, expected a model that takes these inputs by name or by position"
    ):
        addnorm.verify(other, **inputs, like=by_name)
