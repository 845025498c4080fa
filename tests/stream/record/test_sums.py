"""Tests of `record` on sums of writes that are multiplied before they are added: x + g * (a + b)."""

import pytest
import torch
from torch.nn import functional as F

import addnorm
from support.instrumented_model import REFERENCE, column, compare_write, record, step
from support.stream_steps import D, make_steps

BATCH, TOKENS = 3, 5


def learned(model, x, a, b):
    return x + model.gammas[0] * (a - b), model.gammas[0] * a, -model.gammas[0] * b


def transposed(model, x, a, b):
    a, b = a.transpose(0, 1), b.transpose(0, 1)
    return (
        x + model.gammas[0] * (a + b).transpose(0, 1),
        (model.gammas[0] * a).transpose(0, 1),
        (model.gammas[0] * b).transpose(0, 1),
    )


def divided(model, x, a, b):
    return x + (a + b / 4).mul(3.0), 3 * a, 0.75 * b


def masked(model, x, a, b, mask):
    return x + mask * (a + b), mask * a, mask * b


def dropout(model, x, a, b):
    total = a + b
    dropped = F.dropout(total, 0.4, True)
    kept = (dropped / total).detach()
    return x + dropped, kept * a, kept * b


def native_dropout(model, x, a, b):
    total, kept = torch.native_dropout(a + b, 0.4, True)
    kept = kept.double() / 0.6
    return x + total, kept * a, kept * b


def in_place(model, x, a, b):
    writes = a.detach().clone(), b.detach().clone()
    a += b
    torch.manual_seed(4)
    kept = F.dropout(torch.ones_like(a), 0.4, True)
    return x + kept * a, kept * writes[0], kept * writes[1]


def statistics(x, write):
    """Return the statistics of a write by their formulas."""
    return {name: formula(write) for name, formula in REFERENCE.items()} | compare_write(x, write)


def make(combine):
    """Return a model and its input: two sublayers read one norm; `combine` adds both and returns the sum with each one's write."""

    def run(m, x, *more):
        m.seen = []
        for k in range(2):
            read = m.norms[k](x)
            before, (x, *writes) = x, combine(m, x, m.mlps[k](read), m.mlps[k + 2](read), *more)
            m.seen += [(before, write) for write in writes]
        return x

    return make_steps(run).double(), torch.randn(BATCH, TOKENS, D, dtype=torch.float64)


@pytest.mark.parametrize("combine", [learned, transposed, divided, dropout, native_dropout, in_place])
def test_record_multiplies_write_of_sum(combine):
    model, x = make(combine)
    rec = step(model, x)
    expected = [statistics(*pair) for pair in model.seen]
    for name in expected[0]:
        assert column(rec, "write", name) == pytest.approx([numbers[name] for numbers in expected], rel=1e-9)
    if combine in (learned, transposed, divided):  # the others are random
        parts, sheet = addnorm.decompose(model, x), rec.balances["stream"]
        unit = parts.state() / parts.state().norm(dim=-1, keepdim=True)
        amounts = {name: float((part * unit).sum(-1).mean()) for name, part in parts.components().items()}
        assert dict(zip(sheet.sources, sheet.amounts, strict=True)) == pytest.approx(amounts, rel=1e-9)
        assert rec.memory_maps["stream"][1][-1] == pytest.approx([*parts.mean_shares().values()], rel=1e-9)


def test_record_uses_mask_of_each_step():
    model, x = make(masked)
    masks = [(torch.rand(BATCH, TOKENS, 1) > 0.4).double() for _ in range(2)]
    expected = []
    with addnorm.record(model) as rec:
        for mask in masks:
            model(x, mask).square().mean().backward()
            expected.append([statistics(*pair)["l2"] for pair in model.seen])
    assert [column(rec, "write", "l2", step) for step in range(2)] == [
        pytest.approx(numbers, rel=1e-9) for numbers in expected
    ]
    assert expected[0] != pytest.approx(expected[1], rel=1e-2)


def test_record_omits_write_of_clamped_sum():
    model, x = make(lambda model, x, a, b: (x + (a + b).clamp(-0.1, 0.1), a, b))
    rec = record(model, x)
    assert column(rec, "write", "l2") == []
    reasons = {reason for what, reason in rec.metadata["omitted"].items() if "write" in what}
    assert reasons
    assert all("masked or clamped" in reason for reason in reasons)
    assert "masked or clamped" in rec.balances["stream"].reason
