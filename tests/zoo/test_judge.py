"""The judge on our own models by answers in letters: each verdict occurs, and only where it should; the form of all answers."""

import json
from dataclasses import replace

import pytest

import addnorm
from addnorm import Row
from support.answers import Answer
from support.judge import judge
from support.stream_steps import D, make_steps, noise, normalize, repeat
from zoo import page
from zoo.answer import IN, stream
from zoo.packages import load
from zoo.use import attempt, check_ablate, check_decompose, check_record

PRE_LN = {"wiring": "pre_ln", "letters": "ff"}


def highway(m, k, x):
    gate = m.gates[0](x).sigmoid()
    return gate * m.mlps[k](x) + (1 - gate) * x


RUNS = {
    "pre": repeat(lambda m, k, x: x + m.branch(k, x), 2, normalize),
    "post": repeat(lambda m, k, x: m.norms[k](x + m.mlps[k](x)), 2),
    "highway": repeat(highway, 2, normalize),
}


def inspect(how):
    return addnorm.inspect(make_steps(RUNS[how]), noise(2, 5, D))


@pytest.mark.parametrize(
    ("how", "facts", "status"),
    [
        ("pre", {}, "right"),
        ("pre", {"wiring": "post_ln|pre_ln"}, "right"),
        ("pre", {"final_norm": None}, "right"),
        ("pre", {"letters": "??"}, "right"),
        ("post", {"wiring": "post_ln", "final_norm": False}, "right"),
        ("pre", {"wiring": "post_ln"}, "wrong"),
        ("pre", {"wiring": None, "rows": (IN,)}, "wrong"),
        ("pre", {"rows": {1: Row(norm_in=True, b=0.5)}}, "wrong"),
        ("pre", {"norm": "rms"}, "wrong"),
        ("pre", {"shared": 1}, "wrong"),
        ("pre", {"options": {"k": 1}}, "wrong"),
        ("post", {}, "wrong"),
        ("highway", {}, "refused"),
    ],
)
def test_judge_tells_right_refused_and_wrong(how, facts, status):
    assert judge(inspect(how), Answer((stream(**PRE_LN | facts),))).status == status


def test_judge_accepts_a_second_answer():
    other = stream("post_ln", "ff")
    assert judge(inspect("pre"), Answer((other,), also=(stream(**PRE_LN),))).status == "right"
    assert judge(inspect("pre"), Answer((other,), also=(other,))).status == "wrong"


def test_judge_demands_a_refusal_where_no_rows_exist():
    answer = Answer((), "a gate", has_adds=False)
    assert judge(inspect("highway"), answer).status == "refused"
    verdict = judge(inspect("pre"), answer)
    assert verdict.status == "wrong"
    assert "pre_ln" in verdict.wrong[0]


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        ({"wiring": None, "rows": (IN,)}, "right"),
        ({"wiring": None, "rows": (Row(norm_in=True, b=0.5),)}, "wrong"),
        ({}, "partly"),  # every row is right, and the name is missing
        ({"wiring": "sandwich"}, "wrong"),
    ],
)
def test_judge_compares_rows_of_unnamed_streams(facts, status):
    result = inspect("pre")
    result = replace(result, streams=(replace(result.streams[0], wiring=None),))
    assert judge(result, Answer((stream(**PRE_LN | facts),))).status == status


def test_uses_pass_on_our_own_model():
    model, x = make_steps(RUNS["pre"]), noise(2, 5, D)
    found, arguments = addnorm.inspect(model, x), ((x,), {})
    assert attempt(check_record, model, arguments) == "ok"
    assert attempt(check_decompose, model, arguments, found) == "ok"
    assert attempt(check_ablate, model, arguments, found) == "ok"


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


def test_answers_state_code_and_streams():
    names = {row.name for row in addnorm.wirings.list_all()} | {None}
    for package in load().values():
        assert all("==" in requirement for requirement in package.requirements), package.name
        assert len({model.name for model in package.models}) == len(package.models) > 0, package.name
        for model in package.models:
            answer = model.answer
            assert len(model.code) > 40, model.name
            assert bool(answer.streams) != bool(answer.reason), model.name
            for part in (*answer.streams, *answer.also):
                assert part.sites, model.name
                assert part.names <= names, model.name
                has_rows = any(site.row is not ... for site in part.sites)
                assert has_rows or part.names != {None} or package.installed, model.name
