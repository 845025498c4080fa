"""Tests of the final norm where tokens are cut, joined, reordered or pooled between the end of the stream and the norm."""

import pytest
import torch
from torch.nn import functional as F

import addnorm
from addnorm import inspect
from support.instrumented_model import record
from support.stream_steps import D, make_steps, run_layers

T = 5


def pre_ln(end):
    """Return a model of three pre-LN sublayers; `end` computes the output from the stream."""
    return make_steps(lambda m, x: end(m, run_layers(m, x, last=3)))


MASK = torch.tensor([True, False, True, True, False]).expand(2, T)
MISSING = ("without the final norm of this wiring",)


def some(n):
    return (f"the final norm reads {n} of the 10 tokens at the end of the stream",)


# What the final norm reads, and the remarks.
READS = {
    "all": (lambda x: x, ()),
    "registers dropped": (lambda x: x[:, 2:], some(6)),
    "last token": (lambda x: x[:, -1], some(2)),
    "tokens of a mask": (lambda x: x[MASK], some(6)),
    "reordered": (lambda x: torch.cat((x[:, 2:], x[:, :2]), 1), ()),
    "other tokens joined": (lambda x: torch.cat((x.new_ones(2, 1, D), x), 1), ()),
    "dropout": (lambda x: F.dropout(x, 0.1, False), ()),
}  # fmt: skip
ENDS = {
    # name: output, whether there is a final norm, remarks
    **{name: (lambda m, x, read=read: m.gates[0](m.last(read(x))), True, text) for name, (read, text) in READS.items()},
    "none": (lambda m, x: m.gates[0](x), False, MISSING),
    "also returned": (lambda m, x: (m.gates[0](m.last(x)), x), True, ()),
    "norm before the cut": (lambda m, x: m.gates[0](m.last(x)[:, 0]), True, ()),
    "each kind of token by its norm": (
        lambda m, x: torch.cat((m.last(x[:, 1:]), m.context(x[:, :1])), 1), True,
        (f"{some(8)[0]}; other tokens are read by other norms",),
    ),
    "mean": (
        lambda m, x: m.gates[0](m.last(x.mean(1))), False,
        ("no norm reads the tokens at the end of the stream: the norm in last reads what mean and later operators compute from them",),
    ),
    "tokens as one": (lambda m, x: F.layer_norm(x.flatten(1), (T * D,)), False, MISSING),
    "tokens joined along the features": (
        lambda m, x: F.layer_norm(torch.cat(x.unbind(1), -1), (T * D,)), False,
        ("no norm reads the tokens at the end of the stream: the norm in the model reads what cat and later operators compute from them",),
    ),
    "norm of a head": (lambda m, x: m.last(m.gates[1](x)), False, MISSING),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_inspect_says_what_the_final_norm_reads(name):
    end, has_norm, remarks = ENDS[name]
    inspection = inspect(pre_ln(end), torch.randn(2, T, D))
    (stream,) = inspection.streams
    assert (inspection.wiring, inspection.closes) == ("pre_ln", True)
    assert (stream.final_norm is not None, stream.remarks) == (has_norm, remarks)


def test_inspect_names_no_final_norm_of_two_for_the_same_tokens():
    inspection = inspect(pre_ln(lambda m, x: (m.last(x[:, 1:]), m.context(x[:, :2]))), torch.randn(2, T, D))
    assert "which one is the final norm is not clear" in inspection.unknown[0].reason


def test_tools_pass_a_final_norm_of_some_tokens():
    model, x = pre_ln(ENDS["last token"][0]), torch.randn(2, T, D)
    parts = addnorm.decompose(model, x)
    assert torch.allclose(parts.lens(norm="recompute")[-1][:, -1], model.last(parts.state()[:, -1].float()), atol=1e-5)
    rec = record(model, x)
    rstd = (parts.state()[:, -1].var(-1, correction=0) + 1e-5).rsqrt()
    ((_, recorded),) = rec.series("norm_final", "rstd")
    assert recorded == pytest.approx(float(rstd.mean()), rel=1e-5)
