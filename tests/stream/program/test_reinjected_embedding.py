"""x = λ x + μ x0 before each layer, with the mix computed once: inspect names it, and verify finds planted errors in it."""

import pytest
import torch
from torch import nn

import addnorm

D, LAYERS = 16, 4


def _make_mlp():
    return nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))


class _Reinjected(nn.Module):
    """Pre-LN whose layers begin with λ x + μ x0; `fault` is one error in its third layer."""

    def __init__(self, fault="", size=(), backout=False, layers=LAYERS):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(11, D) for _ in range(2))
        self.embedding_norm, self.final_norm = nn.RMSNorm(D), nn.RMSNorm(D)
        self.layers = nn.ModuleList(nn.ModuleList([_make_mlp(), _make_mlp()]) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(D) for _ in range(2 * layers))
        self.scales = nn.ParameterList(torch.rand(size) + 0.5 for _ in range(layers))
        self.x0_scales = nn.ParameterList(torch.rand(size) + 0.1 for _ in range(layers))
        self.backout = nn.Parameter(torch.tensor(0.2)) if backout else None
        self.fault = fault

    def forward(self, ids):
        x = x0 = self.embedding_norm(self.tables[0](ids))
        if self.fault == "table":
            x0 = self.tables[1](ids)
        for k, (scale, x0_scale) in enumerate(zip(self.scales, self.x0_scales, strict=True)):
            if self.fault == "constant":  # no learned numbers
                scale, x0_scale = 1.1, 0.3  # noqa: PLW2901
            if self.fault == "pre_ln":
                x = scale * x
            elif self.fault != "after":
                read = keep = scale * x + x0_scale * x0
                if self.fault == "read" and k == 2:
                    read = x0_scale * x + scale * x0
                if self.fault == "keep" and k == 2:
                    keep = x0_scale * x + scale * x0
                x = keep + self.layers[k][0](self.norms[2 * k](read))
            if self.fault in ("pre_ln", "after"):
                x = x + self.layers[k][0](self.norms[2 * k](x))
            x = x + self.layers[k][1](self.norms[2 * k + 1](x))
            if self.fault == "after":
                x = scale * x + x0_scale * x0
            if k == len(self.scales) // 2:
                middle = x
        return self.final_norm(x if self.backout is None else x - self.backout * middle)


IDS = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("backout", [False, True])
def test_inspect_names_a_mix_that_is_computed_once(backout, layers):
    model = _Reinjected(backout=backout, layers=layers).eval()
    wiring = addnorm.wirings.x0_residual(backout=0.2 if backout else 0.0)
    found = addnorm.inspect(model, IDS)
    assert found.closes
    assert (found.wiring, dict(found.program.wiring.options)) == ("x0_residual", dict(wiring.options))
    assert addnorm.verify(model, IDS, wiring=wiring)
    other = addnorm.wirings.x0_residual(backout=0.0 if backout else 0.2)
    assert not addnorm.verify(model, IDS, wiring=other) or (layers == 2 and not backout)


@pytest.mark.parametrize("layers", [2, 3])
def test_inspect_names_x0_residual_without_backout(layers):
    wiring = addnorm.wirings.x0_residual(backout=0.0)
    model = addnorm.nn.Encoder(layers, D, nhead=2, wiring=wiring).eval()
    assert dict(addnorm.inspect(model, torch.randn(2, 5, D)).program.wiring.options) == dict(wiring.options)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("table", "A, the mixing matrix, is another one, expected the formula's: layers.0.0"),
        ("read", "a learned weight is another one in the stream than in the read"),
        ("keep", "a learned weight is another one in the stream than in the read"),
        ("after", "a learned weight is a constant, expected one number: layers.0.0"),
        ("constant", "a learned weight is a constant, expected one number: layers.0.0, layers.1.0, layers.2.0"),
        ("pre_ln", "a learned weight is a constant, expected one number: layers.0.0"),
    ],
)
def test_verify_finds_errors_in_a_reinjected_embedding(fault, text):
    model = _Reinjected(fault).eval()
    assert addnorm.inspect(model, IDS).wiring != "x0_residual"
    found = addnorm.verify(model, IDS, wiring=addnorm.wirings.x0_residual(backout=0.0))
    sentences = [*map(str, found.deviations)]
    assert not found
    assert sentences[0].startswith(text)
    if fault in ("read", "keep"):
        assert [deviation.sites for deviation in found.deviations] == [("layers.2.0",)]
    assert "opposite order" not in "".join(sentences)


def test_one_weight_for_each_feature_is_not_x0_residual():
    model = _Reinjected(size=(D,)).eval()
    assert addnorm.inspect(model, IDS).wiring == "pre_ln"
    found = addnorm.verify(model, IDS, wiring=addnorm.wirings.x0_residual(backout=0.0))
    assert "one for each feature, expected one number" in str(found.deviations[0])


def test_verify_names_the_skips_of_a_row_wiring():
    found = addnorm.verify(_Reinjected().eval(), IDS, wiring="pre_ln")
    assert [*map(str, found.deviations)] == [
        "an earlier state is added once more, expected no skip: other, other#2, other#3"
    ]
