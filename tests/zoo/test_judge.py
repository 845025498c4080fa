"""The judge on our own models: each verdict occurs, and only where it should."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import addnorm
from addnorm import Row
from support.families import shake
from zoo import page
from zoo.answer import IN, Model, Stream
from zoo.judge import judge
from zoo.packages import load
from zoo.use import attempt, check_ablate, check_decompose, check_record

ANSWER = Stream("pre_ln", "ff")


class Blocks(nn.Module):
    """Feed-forward layers in a wiring that `how` spells."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.norms = nn.ModuleList([nn.LayerNorm(16) for _ in range(3)])
        self.fs = nn.ModuleList([nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(2)])
        self.gate = nn.Linear(16, 16)

    def forward(self, x):
        for norm, f in zip(self.norms, self.fs, strict=False):
            if self.how == "highway":
                g = self.gate(x).sigmoid()
                x = g * f(x) + (1 - g) * x
            else:
                x = norm(x + f(x)) if self.how == "post" else x + f(norm(x))
        return x if self.how == "post" else self.norms[2](x)


def examine(how, *streams, refuse="", also=()):
    model = shake(Blocks(how).eval())
    result = addnorm.inspect(model, torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)))
    return judge(result, Model("", lambda: model, tuple, streams, "", refuse=refuse, also=also))


@pytest.mark.parametrize(
    ("how", "answer", "word"),
    [
        ("pre", ANSWER, "right"),
        ("pre", replace(ANSWER, wiring="post_ln|pre_ln"), "right"),
        ("pre", replace(ANSWER, final_norm=None), "right"),
        ("post", replace(ANSWER, wiring="post_ln", final_norm=False), "right"),
        ("pre", replace(ANSWER, letters="fa"), "partly"),
        ("pre", replace(ANSWER, letters="fff"), "wrong"),
        ("pre", replace(ANSWER, wiring="post_ln"), "wrong"),
        ("pre", replace(ANSWER, wiring=None, rows=(IN,)), "wrong"),
        ("pre", replace(ANSWER, final_norm=False), "wrong"),
        ("pre", replace(ANSWER, embedding_norm=True), "wrong"),
        ("pre", replace(ANSWER, norm="rms"), "wrong"),
        ("post", ANSWER, "wrong"),
        ("highway", ANSWER, "refused"),
    ],
)
def test_judge_tells_right_partly_refused_and_wrong(how, answer, word):
    assert examine(how, answer).word == word


def test_judge_accepts_a_second_answer():
    assert examine("pre", replace(ANSWER, wiring="post_ln"), also=(ANSWER,)).word == "right"


def test_judge_demands_a_refusal_where_no_rows_exist():
    assert examine("highway", refuse="a gate").word == "right"
    verdict = examine("pre", refuse="no such model")
    assert verdict.word == "wrong"
    assert "pre_ln" in verdict.detail


def test_judge_compares_rows_of_unnamed_streams():
    model = shake(Blocks("pre").eval())
    result = addnorm.inspect(model, torch.randn(2, 5, 16))
    stream = replace(result.streams[0], wiring=None)
    result = replace(result, streams=(stream,))

    def verdict(*streams):
        return judge(result, Model("", lambda: model, tuple, streams, "")).word

    assert verdict(replace(ANSWER, wiring=None, rows=(IN,))) == "right"
    assert verdict(replace(ANSWER, wiring=None, rows=(Row(norm_in=True, b=0.5),))) == "wrong"
    assert verdict(ANSWER) == "partly"  # every row is right, and the name is missing
    assert verdict(replace(ANSWER, wiring="sandwich")) == "wrong"


def test_uses_pass_on_our_own_model():
    model, x = shake(Blocks("pre").eval()), torch.randn(2, 5, 16)
    found = addnorm.inspect(model, x)
    assert attempt(check_record, model, (x,)) == "ok"
    assert attempt(check_decompose, model, (x,), found) == "ok"
    assert attempt(check_ablate, model, (x,), found) == "ok"


def test_uses_tell_refusals_from_crashes():
    def refuse():
        return addnorm.wirings.get("no such wiring")

    def crash():
        return {}["name"]

    assert attempt(refuse).startswith("refused: ")
    assert attempt(crash).startswith("crash: KeyError")


def test_page_agrees_with_the_results():
    rows = json.loads(page.RESULTS.read_text())
    assert page.PAGE.read_text() == page.render(rows), "run make zoo"
    answers = {(name, model.name) for name, package in load().items() for model in package.models}
    assert {(row["package"], row["model"]) for row in rows} == answers
