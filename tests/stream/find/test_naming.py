"""Tests of `identify_wiring`: it names the rows of every wiring, with remarks on differences."""

import pytest
import torch
import torch.nn.functional as F

from addnorm import Learned, Row, wirings
from addnorm.stream.find.naming import SublayerSummary, find_contradiction, identify_wiring
from support.stacks import ALL
from support.stream_steps import D, inspect_steps, repeat

KINDS = ("attention", "feed-forward")


def summarize(rows, per_layer=2, num_parallel=1, kinds=KINDS, **more):
    return [
        SublayerSummary(
            k // per_layer, row, kinds[k % len(kinds)], "branch", num_parallel, frozenset({k}), (f"{k}",), **more
        )
        for k, row in enumerate(rows)
    ]


def name_rows(rows, final_norm=False, embedding_norm=False, other_layers=None, **more):
    wiring, remarks = identify_wiring(summarize(rows, **more), final_norm, embedding_norm, other_layers)
    return (wiring.name if wiring else None), remarks


BY_ROWS = [wiring for wiring in ALL if wiring.is_sequential and wiring.name not in ("mix_ln", "rezero")]


@pytest.mark.parametrize(("kind", "layers", "other"), [("encoder", 6, 3), ("decoder", 3, 6)])
def test_identify_wiring_names_deepnorm_of_stack(kind, layers, other):
    wiring = wirings.deepnorm(kind, other if kind == "encoder" else None)
    assert name_rows(wiring.rows(layers), other_layers=other) == ("deepnorm", [])


def test_identify_wiring_rejects_deepnorm_of_other_depth():
    assert name_rows(wirings.deepnorm().rows(6)[:8])[0] is None


PRE, POST = Row(norm_in=True), Row(norm_out=True)
DIFFERENCES = {
    "a final norm": ([POST] * 4, {"final_norm": True}, "post_ln", ["with a final norm, which this wiring does not have"]),
    "no last norm": ([POST] * 3 + [Row()], {"embedding_norm": True}, "post_ln",
                     ["without the norm of the last sublayer", "with a norm of the embedding"]),
    "no first norm": ([Row()] + [PRE] * 3, {"embedding_norm": True, "final_norm": True}, "pre_ln",
                      ["the first sublayer reads the embedding norm's output, without a norm of its own",
                       "with a norm of the embedding"]),
    "no first norm of all": ([Row()] + [PRE] * 3, {"final_norm": True}, None, []),
    "mixed at random": ([PRE, POST, POST, PRE], {}, None, []),
    "a constant of two rules": ([Row(norm_in=True, b=0.5)] * 8, {"final_norm": True}, "residual_multiplier",
                                ["with 4 layers the constant is also that of depth_mup(k=1)"]),
    "not understood": ([PRE] * 4, {"final_norm": True, "has_reasons": True}, None, []),
    "norms inside too": ([PRE] * 4, {"final_norm": True, "has_inner_norm": True}, "pre_ln", []),
    "some side by side": ([PRE] * 4, {"final_norm": True, "num_parallel": 2}, "parallel", []),
    "nothing": ([], {}, None, []),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENCES)
def test_identify_wiring_remarks_on_differences(case):
    rows, more, name, remarks = DIFFERENCES[case]
    assert name_rows(rows, **more) == (name, remarks)


def test_identify_wiring_allows_row_of_other_kind():
    rows = [Row(), *[PRE] * 4]
    summaries = summarize(rows, per_layer=5, kinds=("other", *KINDS, *KINDS))
    wiring, remarks = identify_wiring(summaries, True, False, None)
    assert wiring == wirings.pre_ln()
    assert remarks == ["other in layer 1 has a row of its own: x' = x + f(x)"]


@pytest.mark.parametrize(("start", "option"), [((0.1,) * 4, 0.1), ((0.1, 0.2, 0.1, 0.1), None), ((0.0,) * 4, None)])
def test_identify_wiring_finds_initial_scale(start, option):
    rows = [Row(norm_in=True, b=Learned(value, per_feature=True)) for value in start]
    wiring, _ = identify_wiring(summarize(rows), True, False, None)
    assert dict(wiring.options) == {"gamma": option}


def skip(layer, length, **row):
    return SublayerSummary(layer, Row(norm_out=True, **row), "other", "skip", 2, frozenset(), skip_length=length)


def test_identify_wiring_names_bottom_to_top():
    layers = [part for k in range(2) for part in (*summarize([POST] * 2), skip(k, 2))]
    layers = [s._replace(layer=k // 3) for k, s in enumerate(layers)]
    assert identify_wiring(layers, False, True, None) == (wirings.b2t(), ["with a norm of the embedding"])
    further = [s._replace(skip_length=4) if s.role == "skip" else s for s in layers]
    assert identify_wiring(further, False, False, None)[0] != wirings.b2t()


def test_identify_wiring_rejects_factor_between_sublayers():
    summaries = [
        *summarize([Row()] * 2),
        SublayerSummary(1, Row(a=Learned(1.0, per_feature=True)), "other", "injection", 1, frozenset()),
    ]
    assert identify_wiring(summaries, False, False, None)[0] is None


@pytest.mark.parametrize(("text", "wiring", "claim"), [
    ("PreNormBlock", wirings.post_ln(), "PreNorm"), ("PreNormBlock", wirings.pre_ln(), None),
    ("a post-LN layer", wirings.pre_ln(), "post-LN"), ("post-LN or pre-LN", wirings.pre_ln(), None),
    ("Block", wirings.post_ln(), None), ("pre_layer_norm", wirings.sandwich(), None),
])  # fmt: skip
def test_find_contradiction(text, wiring, claim):
    assert find_contradiction(text, wiring) == claim


UNNAMED = {
    "a fractional power": lambda x: x * (x.square().cumsum(-1) + 1) ** -0.5,
    "batch norm": lambda x: F.batch_norm(x.mT, torch.zeros(D), torch.ones(D)).mT,
    "quantile of a token": lambda x: x / x.abs().quantile(0.9, -1, keepdim=True),
    "batch norm in training": lambda x: F.batch_norm(x.mT, None, None, training=True).mT,
    "group norm": lambda x: F.group_norm(x.mT, 1).mT,
    "range of a token": lambda x: (x - x.amin(-1, keepdim=True)) / (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", [*UNNAMED, "no rescaling"])
def test_inspect_names_no_norm_only_without_rescaling(name):
    rescale = UNNAMED.get(name, torch.relu)  # no norm of the finder
    run = repeat(lambda m, k, x: x + torch.tanh(m.gates[k](rescale(x))))
    inspection = inspect_steps(run)
    wiring, remarks = inspection.streams[0].wiring, inspection.streams[0].remarks
    assert (wiring and wiring.name) == (None if name in UNNAMED else "no_norm")
    assert any("the norms are inside" in remark for remark in remarks) == (name in UNNAMED)


def test_inspect_takes_no_softmax_by_hand_for_a_norm():
    def step(m, k, x):
        weights = (m.gates[k](x) @ x.mT / 16).exp()
        return x + m.mlps[k](weights / weights.sum(-1, keepdim=True) @ x)

    (stream,) = inspect_steps(repeat(step)).streams
    assert (stream.wiring.name, stream.remarks) == ("no_norm", ())
