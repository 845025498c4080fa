"""x = λ x + μ x0 before each layer, with the mix computed once: inspect names it, and verify finds planted errors in it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import addnorm
from support.instrumented_model import assert_same_numbers
from support.random_models.graphs import Graph
from support.stacks import encoder
from support.stream_steps import D, X, make_mlp

LAYERS = 4
WITHOUT_BACKOUT = addnorm.wirings.x0_residual(backout=0.0)
WIRINGS = {False: WITHOUT_BACKOUT, True: addnorm.wirings.x0_residual(backout=0.2)}


def reinject(fault="", size=(), backout=False, layers=LAYERS, sublayers=2, order="btd"):
    """Return pre-LN whose layers begin with λ x + μ x0; `fault` is one error in its third layer.

    The stream is (tokens, batch, d) with `order="tbd"`, and (batch, d, tokens) with "bdt", or with "conv" where convolutions are
    the products; the final norm reads (batch, tokens, d).
    """

    def branch(m, k, j, x):
        norm, mlp = m.norms[2 * k + j], m.layers[k][j]
        if m.order == "conv":
            up, activation, down = mlp
            h = activation(F.conv1d(norm(x.mT).mT, up.weight[..., None], up.bias))
            return F.conv1d(h, down.weight[..., None], down.bias)
        return mlp(norm(x.mT)).mT if m.order == "bdt" else mlp(norm(x))

    def run(m, ids):
        dims = {"btd": (0, 0), "tbd": (0, 1), "bdt": (1, 2), "conv": (1, 2)}[m.order]
        x = x0 = m.embedding_norm(m.tables[0](ids)).transpose(*dims)
        if fault == "table":
            x0 = m.tables[1](ids)
        for k, (scale, x0_scale) in enumerate(zip(m.scales, m.x0_scales, strict=True)):
            if fault == "constant":  # no learned numbers
                scale, x0_scale = 1.1, 0.3  # noqa: PLW2901
            before = x
            if fault == "pre_ln":
                x = scale * x
            elif fault != "after":
                x = scale * x + x0_scale * x0
            x = x + branch(m, k, 0, x0_scale * before + scale * x0 if fault == "read" and k == 2 else x)
            if sublayers == 2:
                x = branch(m, k, 1, x) + x
            if fault == "after":
                x = scale * x + x0_scale * x0
            if k == layers // 2:
                middle = x
        x = x - m.backout * middle if backout else x
        return m.final_norm(x.transpose(*dims))

    return Graph(
        run,
        order=order,
        tables=nn.ModuleList(nn.Embedding(11, D) for _ in range(2)),
        embedding_norm=nn.RMSNorm(D),
        final_norm=nn.RMSNorm(D),
        layers=nn.ModuleList(nn.ModuleList([make_mlp(), make_mlp()]) for _ in range(layers)),
        norms=nn.ModuleList(nn.RMSNorm(D) for _ in range(2 * layers)),
        scales=nn.ParameterList(torch.rand(size) + 0.5 for _ in range(layers)),
        x0_scales=nn.ParameterList(torch.rand(size) + 0.1 for _ in range(layers)),
        backout=nn.Parameter(torch.tensor(0.2)),
    ).eval()


IDS = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("backout", [False, True])
def test_inspect_names_a_mix_that_is_computed_once(backout, layers):
    model = reinject(backout=backout, layers=layers)
    found = addnorm.inspect(model, IDS)
    assert found.closes
    assert found.program.wiring == WIRINGS[backout]
    assert addnorm.verify(model, IDS, wiring=WIRINGS[backout])
    assert not addnorm.verify(model, IDS, wiring=WIRINGS[not backout]) or (layers == 2 and not backout)


@pytest.mark.parametrize("layers", [2, 3])
def test_verify_agrees_with_one_sublayer_in_each_layer(layers):
    model = reinject(layers=layers, sublayers=1)
    assert addnorm.inspect(model, IDS).wiring == "x0_residual"
    assert addnorm.verify(model, IDS, wiring=WITHOUT_BACKOUT)


@pytest.mark.parametrize(("order", "backout"), [("tbd", False), ("tbd", True), ("bdt", False)])
def test_order_of_the_dimensions_does_not_change_the_wiring(order, backout):
    model, mask = reinject(backout=backout, order=order), torch.rand(2, 5) < 0.6
    program = addnorm.inspect(model, IDS).program
    assert program.wiring == WIRINGS[backout]
    assert program.expansion < 1e-5
    assert addnorm.verify(model, IDS, wiring=program.wiring)
    plain = copy.deepcopy(model)
    plain.order = "btd"
    assert addnorm.verify(model, IDS, like=plain)
    assert addnorm.verify(plain, IDS, like=model)
    recordings = []
    for one in (model, plain):
        with addnorm.record(one, tokens=mask) as rec:
            # Of a normed output the sum of squares has no gradient but round-off.
            (one(IDS) * X).sum().backward()
        recordings.append(rec)
    assert_same_numbers(*recordings, rtol=1e-4, atol=1e-6)


def test_mix_without_matrices_has_no_name():
    model = reinject(order="conv")
    found = addnorm.inspect(model, IDS)
    assert found.closes
    assert (found.wiring, found.program) == ("unknown", None)
    assert "it may be a wiring of several streams, such as x0_residual" in found.streams[0].remarks[-1]
    verified = addnorm.verify(model, IDS, wiring="x0_residual")
    assert not verified.deviations
    assert verified.unproven


def test_mix_beside_another_stack_has_no_name():
    parts = nn.ModuleList([reinject(), encoder()])
    parts.forward = lambda ids, x: [parts[0](ids), parts[1](x)]
    found = addnorm.inspect(parts, IDS, X)
    assert [stream.wiring and stream.wiring.name for stream in found.streams] == [None, "pre_ln"]
    assert "it may be a wiring of several streams" in found.streams[0].remarks[-1]


@pytest.mark.parametrize("layers", [2, 3])
def test_inspect_names_x0_residual_without_backout(layers):
    model = encoder(WITHOUT_BACKOUT, layers)
    assert addnorm.inspect(model, X).program.wiring == WITHOUT_BACKOUT


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("table", "A, the mixing matrix, is another one, expected the formula's: layers.0.0"),
        ("read", "a learned weight is another one in the stream than in the read"),
        ("after", "a learned weight is a constant, expected one number: layers.0.0"),
        ("constant", "a learned weight is a constant, expected one number: layers.0.0, layers.1.0, layers.2.0"),
        ("pre_ln", "a learned weight is a constant, expected one number: layers.0.0"),
    ],
)
def test_verify_finds_errors_in_a_reinjected_embedding(fault, text):
    model = reinject(fault)
    assert addnorm.inspect(model, IDS).wiring != "x0_residual"
    found = addnorm.verify(model, IDS, wiring=WITHOUT_BACKOUT)
    sentences = [*map(str, found.deviations)]
    assert not found
    assert sentences[0].startswith(text)
    if fault == "read":
        assert [deviation.sites for deviation in found.deviations] == [("layers.2.0",)]
    assert "opposite order" not in "".join(sentences)


def test_one_weight_for_each_feature_is_not_x0_residual():
    model = reinject(size=(D,))
    assert addnorm.inspect(model, IDS).wiring == "pre_ln"
    found = addnorm.verify(model, IDS, wiring=WITHOUT_BACKOUT)
    assert "one for each feature, expected one number" in str(found.deviations[0])


def test_verify_names_the_skips_of_a_row_wiring():
    found = addnorm.verify(reinject(), IDS, wiring="pre_ln")
    assert [*map(str, found.deviations)] == [
        "an earlier state is added once more, expected no skip: other, other#2, other#3"
    ]


def test_verify_names_the_rule_of_a_program_once():
    found = addnorm.verify(addnorm.inspect(reinject(), IDS), wiring="pre_ln", eps=1e-6)
    rule, *others = map(str, found.deviations)
    assert rule == "the rule of the stream is x0_residual, expected pre_ln"
    assert [text.partition(" is ")[0] for text in others] == ["eps"]
