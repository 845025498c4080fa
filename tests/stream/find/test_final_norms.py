"""Tests of the final norm where tokens are cut, joined, reordered or pooled between the end of the stream and the norm."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import addnorm
from addnorm import inspect

D, T = 8, 5


class PreLN(nn.Module):
    """Three pre-LN sublayers; `end` computes the output from the stream."""

    def __init__(self, end):
        super().__init__()
        self.norms, self.fs = (
            nn.ModuleList(make(D) for _ in range(3)) for make in (nn.LayerNorm, lambda d: nn.Linear(d, d))
        )
        self.norm, self.other, self.head = nn.LayerNorm(D), nn.LayerNorm(D), nn.Linear(D, 3)
        self.end = end

    def forward(self, x):
        for norm, f in zip(self.norms, self.fs, strict=True):
            x = x + f(norm(x))
        return self.end(self, x)


MASK = torch.tensor([True, False, True, True, False]).expand(2, T)
MISSING = ("without the final norm of this wiring",)


def some(n):
    return (f"the final norm reads {n} of the 10 tokens at the end of the stream",)


ENDS = {
    # name: output, whether there is a final norm, remarks
    "all": (lambda m, x: m.head(m.norm(x)), True, ()),
    "none": (lambda m, x: m.head(x), False, MISSING),
    "registers dropped": (lambda m, x: m.head(m.norm(x[:, 2:])), True, some(6)),
    "last token": (lambda m, x: m.head(m.norm(x[:, -1])), True, some(2)),
    "tokens of a mask": (lambda m, x: m.head(m.norm(x[MASK])), True, some(6)),
    "tokens of an index": (lambda m, x: m.head(m.norm(x[torch.arange(2), torch.tensor([1, 3])])), True, some(2)),
    "reordered": (lambda m, x: m.head(m.norm(torch.cat((x[:, 2:], x[:, :2]), 1))), True, ()),
    "other tokens joined": (lambda m, x: m.head(m.norm(torch.cat((x.new_ones(2, 1, D), x), 1))), True, ()),
    "windows without their last token": (
        lambda m, x: m.head(m.norm(F.pad(x, (0, 0, 0, 1)).view(2, 2, 3, D).flatten(0, 1)[:, :2].contiguous().view(2, 2, 2, D).clone()
                                   .flatten(1, 2)[:, :3])), True, some(6),
    ),
    "dropout": (lambda m, x: m.head(m.norm(F.dropout(x, 0.1, m.training))), True, ()),
    "also returned": (lambda m, x: (m.head(m.norm(x)), x), True, ()),
    "norm before the cut": (lambda m, x: m.head(m.norm(x)[:, 0]), True, ()),
    "each kind of token by its norm": (
        lambda m, x: torch.cat((m.norm(x[:, 1:]), m.other(x[:, :1])), 1), True,
        (f"{some(8)[0]}; other tokens are read by other norms",),
    ),
    "mean": (
        lambda m, x: m.head(m.norm(x.mean(1))), False,
        ("no norm reads the tokens at the end of the stream: the norm in norm reads what mean and later operators compute from them",),
    ),
    "norm of a head": (lambda m, x: m.norm(nn.functional.linear(x, m.fs[0].weight)), False, MISSING),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_inspect_says_what_the_final_norm_reads(name):
    end, has_norm, remarks = ENDS[name]
    inspection = inspect(PreLN(end).eval(), torch.randn(2, T, D))
    (stream,) = inspection.streams
    assert (inspection.wiring, inspection.closes) == ("pre_ln", True)
    assert (stream.final_norm is not None, stream.remarks) == (has_norm, remarks)


def test_inspect_names_no_final_norm_of_two_for_the_same_tokens():
    inspection = inspect(PreLN(lambda m, x: (m.norm(x[:, 1:]), m.other(x[:, :2]))), torch.randn(2, T, D))
    assert "which one is the final norm is not clear" in inspection.unknown[0].reason


def test_tools_pass_a_final_norm_of_some_tokens():
    model, x = PreLN(ENDS["last token"][0]).eval(), torch.randn(2, T, D)
    parts = addnorm.decompose(model, x)
    assert torch.allclose(parts.lens(norm="recompute")[-1][:, -1], model.norm(parts.state()[:, -1].float()), atol=1e-5)
    with addnorm.record(model) as rec:
        model(x)
    rstd = (parts.state()[:, -1].var(-1, correction=0) + 1e-5).rsqrt()
    ((_, recorded),) = rec.series("norm_final", "rstd")
    assert recorded == pytest.approx(float(rstd.mean()), rel=1e-5)
