"""Tests of the arguments of `record`: steps, layers, token masks, gradients, and errors."""

import pytest
import torch
from torch import nn

import addnorm
from addnorm.stream.record.schema import STATISTICS
from support.instrumented_model import REFERENCE, D, Model, column, compare_write, record, similarity, step
from support.random_models.chains import SMALL, make_chain
from support.refusals import assert_raises
from support.stacks import torch_encoder


def test_every_counts_steps_of_several_forwards(ids):
    model = Model()
    with torch.no_grad(), addnorm.record(model, every=2, accumulate=2) as rec:
        for _ in range(6):
            model(ids)
    assert rec.steps == (0, 2)


def test_layers(ids):
    rec = step(Model(layers=3), ids, layers=[1])
    assert {site.layer for site in rec.sites} == {None, 1}
    assert column(rec, "write", "rms") == pytest.approx(column(step(Model(layers=3), ids), "write", "rms")[2:4])


def test_tokens_mask():
    """Record only the tokens of the mask."""
    case, mask = make_chain(["batch"]), torch.ones(SMALL.batch, SMALL.tokens, dtype=torch.bool)
    mask[:, 4:] = False
    rec = record(case.model, *case.inputs, tokens=mask)
    sites = case.model.trace(*case.inputs).sites
    writes = [site.write[mask] for site in sites]
    assert column(rec, "write", "rms") == pytest.approx([*map(REFERENCE["rms"], writes)])
    ratios = [compare_write(site.x[mask], write)["ratio"] for site, write in zip(sites, writes, strict=True)]
    assert column(rec, "write", "ratio") == pytest.approx(ratios)
    assert column(rec, "out", "similarity") == pytest.approx([similarity(site.out[:, :4]) for site in sites])


REFUSED = {
    "ValueError: layers is [5], expected numbers from 0 to 1": {"layers": [5]},
    "TypeError: layers is 1, expected a list of numbers": {"layers": 1},
    "ValueError: every is 0": {"every": 0},
    "ValueError: accumulate is 0": {"accumulate": 0},
    "ValueError: tokens has shape (2, 2), expected (3, 6)": {"tokens": torch.ones(2, 2)},
    "TypeError: tokens is list, expected a tensor (batch, tokens)": {"tokens": [[True] * 6] * 3},
    "scores is 0 there, so pass tokens=(mask == 0)": {"tokens": torch.full((3, 6), -1e9)},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_wrong_options_are_refused(ids, sentence):
    assert_raises(sentence, lambda: step(Model(), ids, **REFUSED[sentence]))


def test_grads_false(ids):
    rec = step(Model(), ids, grads=False)
    assert {e.role for e in rec.table()}.isdisjoint({"grad", "params"})


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (torch.relu, TypeError, r"expected a torch\.nn\.Module"),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), ValueError, "no residual stream to record"),
    ],
)
def test_other_models_are_refused(model, error, message):
    with pytest.raises(error, match=message), addnorm.record(model):
        model(torch.randn(2, 4))


def test_every_recorded_statistic_is_declared(ids):
    declared = {(s.role, s.name) for s in STATISTICS if not s.reciprocal_of}
    rows = [*step(Model(), ids).table(), *step(Model(post=True), ids).table()]
    never = {("norm_branch", name) for name in ("rstd", "rstd_min", "rstd_max")}  # these models have no such norm
    of_streams = {(role, name) for role, name in declared if role in ("matrices", "grad_frozen")} | {("write", "share")}
    assert {(row.role, row.statistic) for row in rows} == declared - never - of_streams


def test_padding_is_neither_massive_nor_unchanged(ids):
    model = Model()
    model.embed = nn.Identity()
    x = torch.randn(2, 5, D)
    x[:, -1] = 1e9
    mask = torch.ones(2, 5)
    mask[:, -1] = 0
    rec = step(model, x, tokens=mask)
    assert max(column(rec, "out", "massive")) == 0.0
    assert max(column(rec, "write", "unchanged")) == 0.0  # padding would be unchanged
    alone = step(model, x[:, :-1])
    assert rec.series("out", "top")[0][1] == pytest.approx(alone.series("out", "top")[0][1])


def test_batch_second():
    """Find the batch dimension by the mask."""
    models = [torch_encoder(dropout=0.0, batch_first=is_first).train() for is_first in (False, True)]
    x, mask = torch.randn(3, 5, D), torch.ones(3, 5)
    transposed, plain = step(models[0], x.transpose(0, 1), tokens=mask), step(models[1], x, tokens=mask)
    assert column(transposed, "out", "similarity") == pytest.approx(column(plain, "out", "similarity"), rel=1e-4)


def test_mask_of_one_stream():
    model = nn.Transformer(D, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    source, target, mask = torch.randn(2, 6, D), torch.randn(2, 4, D), torch.ones(2, 6)
    mask[1, 4:] = 0
    rec = record(model, source, target, tokens={"encoder.layers.0": mask})
    second = record(model, source, target)
    (start, rms), *_ = rec.series("out", "rms", stream="encoder.layers.0")
    assert (start.id, rms) == ("encoder.layers.0/x_0", pytest.approx(REFERENCE["rms"](source[mask.bool()])))
    of_decoder = rec.series("out", "rms", stream="decoder.layers.0")
    assert of_decoder == second.series("out", "rms", stream="decoder.layers.0")
    assert len(of_decoder) == 4
    with pytest.raises(ValueError, match=r"tokens has the stream 'encoder', expected some of 'encoder\.layers\.0'"):
        record(model, source, target, tokens={"encoder": mask})
