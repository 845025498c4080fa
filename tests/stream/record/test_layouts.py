"""Tests of `record`, `decompose` and `ablate` in every layout: each number against its formula on the values by hand."""

import statistics

import pytest
import torch
from torch import Tensor

import addnorm
from support.instrumented_model import REFERENCE, assert_same_numbers, column, compute_loss, step
from support.random_models.chains import make_chain
from support.random_models.layouts import Sizes
from support.random_models.numbers import compare_ablations, compare_components, compare_recording
from support.random_models.sublayers import Attention, Mixer, Multihead
from support.recordings import values
from support.torch_transformers import D, make_transformer

EXACT = 1e-9  # relative tolerance in float64


class Windows(Attention):
    """Attention in windows of 2 x 2 of an image, shifted in the second layer (Swin)."""

    shift = 0

    def forward(self, x):
        batch, height, width, d = x.shape
        x = x.roll((-self.shift, -self.shift), (1, 2))
        tokens = x.view(batch, height // 2, 2, width // 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, d)
        y = self.core(tokens).view(batch, height // 2, width // 2, 2, 2, d).permute(0, 1, 3, 2, 4, 5)
        return y.reshape(x.shape).roll((self.shift, self.shift), (1, 2))


# Sizes that could be confused are equal.
MODELS = {
    "sequence first": {"layouts": ["sequence"]},
    "sequence first, as many tokens as sequences": {"layouts": ["sequence"], "sizes": Sizes(4, 2, 2, 8)},
    "torch, sequence first": {"layouts": ["sequence"], "first": Multihead},
    "mixer, sequence first": {"layouts": ["sequence"], "first": Mixer},
    "embedding, sequence first": {"layouts": ["sequence"], "begin": "embedding"},
    "no mixing, sequence first": {"layouts": ["sequence"], "letters": "f"},
    "windows": {"layouts": ["image"], "first": Windows, "sizes": Sizes(2, 4, 6, 8)},
    "flat tokens": {"layouts": ["flat"]},
    "two layouts": {"layouts": ["batch", "image channels"], "letters": "ao"},
}


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    case = make_chain(**MODELS[request.param])
    for k, layer in enumerate(case.model.layers):
        layer.steps[0].f.shift = k
    return case


@pytest.fixture(scope="module")
def inspection(case):
    return addnorm.inspect(case.model, *case.inputs)


@pytest.mark.parametrize("compare", [compare_recording, compare_components, compare_ablations])
def test_numbers_equal_those_by_hand(compare, case, inspection):
    assert [*compare(case, inspection, EXACT)] == []


def top(t):
    magnitudes = t.detach().abs().flatten().tolist()
    return max(magnitudes) / statistics.median(magnitudes)


def test_gradients_and_norms_equal_those_by_hand(case):
    model, (x,) = case.model, case.inputs
    rec = step(model, x)
    trace = model.trace(x)
    states = [trace.start, *(site.out for site in trace.sites)]
    for state in states:
        state.retain_grad()
    compute_loss(trace.end).backward()
    assert values(rec, "out", "top") == pytest.approx([*map(top, states)], rel=EXACT)
    for name, formula in REFERENCE.items():
        assert values(rec, "grad", name) == pytest.approx([formula(state.grad) for state in states], rel=EXACT), name
    rstds = [(site.x.detach().var(-1, correction=0) + 1e-5).rsqrt() for site in trace.sites]
    for name, reduce in (("rstd", Tensor.mean), ("rstd_min", Tensor.min), ("rstd_max", Tensor.max)):
        expected = [float(reduce(rstd)) for rstd in rstds]
        assert column(rec, "norm_in", name) == pytest.approx(expected, rel=EXACT), name
    assert rec.metadata.keys().isdisjoint({"omitted", "note"})


def run_averaged(model, x, number):
    """Return the output of a chain by hand, where the write of one sublayer is replaced by its mean over all tokens."""
    x = model.start(x)
    for k, part in enumerate(part for layer in model.layers for part in layer.steps):
        site = part.by_hand(x)
        x = x + site.write.mean((0, 1)) if k == number else site.out
    return model.finish(x, by_hand=True)


def test_mean_over_all_tokens(case, inspection):
    for number in (0, len(inspection.sites) - 1):
        with torch.no_grad(), addnorm.ablate(inspection.sites[number], mode="mean"):
            output = case.model(*case.inputs)
        torch.testing.assert_close(output, run_averaged(case.model, *case.inputs, number))


def test_streams_of_a_transformer_have_the_numbers_of_any_order():
    recordings = []
    for batch_first in (True, False):
        torch.manual_seed(0)
        model = make_transformer(batch_first=batch_first, dtype=torch.float64)
        inputs = [torch.randn(3, tokens, D, dtype=torch.float64) for tokens in (6, 4)]
        with addnorm.record(model) as rec:
            y = model(*(x if batch_first else x.transpose(0, 1) for x in inputs))
            compute_loss(y if batch_first else y.transpose(0, 1)).backward()
        recordings.append(rec)
    assert_same_numbers(*recordings, rtol=EXACT)
    assert len(rec.streams) == 2
