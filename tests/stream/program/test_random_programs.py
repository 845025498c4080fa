"""Tests of `inspect` and `decompose` on random models with several streams, against the matrices with which they ran."""

import pytest
import torch
from torch import nn

import addnorm
from support.pairwise import some
from support.random_models.graphs import Graph
from support.random_programs import D, judge, random_program
from support.stream_steps import X, noise

SEEDS = some(range(300), range(14))


def check_program(model, program, x=X):
    """Compare the inspected program of a model with the matrices of the next run of `program`, and return the inspection."""
    found = addnorm.inspect(model, x)
    with torch.no_grad():
        model(x)
    inspected = found.program or found.unnamed
    assert judge(inspected, program.answer) == "", program.names
    assert inspected.closes
    # Roundings of float32 that later matrices multiply; seed 189 has 6e-15 in float64.
    assert inspected.expansion < 3e-5
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_matrices_are_those_of_the_run(seed):
    model = random_program(seed)
    x = noise(2, 5, D, seed=seed)
    found = check_program(model, model, x)
    assert not any(stream.wiring for stream in found.streams)
    if seed < 5:
        assert addnorm.decompose(model, x).closure < 1e-5


def attend(m, x):
    """Run torch's attention as it is by default, `(tokens, batch, d)` inside."""
    y = x.transpose(0, 1)
    return m.attention(y, y, y, need_weights=False)[0].transpose(0, 1)


@pytest.mark.parametrize("seed", [3, 4, 7, 10, 21])  # streams in five layouts
def test_sequence_first_sublayers_are_understood(seed):
    model = random_program(seed)
    for site in model.sites[::2]:
        site[-1] = Graph(attend, attention=nn.MultiheadAttention(D, 2)).eval()
    check_program(model, model)


def turn(program):
    """Return a program whose streams are (tokens, batch), and (batch, tokens) again before the last norm."""
    norm, program.norm = program.norm, nn.Identity()
    return Graph(lambda m, x: m.norm(m.program(x.transpose(0, 1)).transpose(0, 1)), program=program, norm=norm)


@pytest.mark.parametrize("seed", [3, 4, 7, 10, 21])  # streams in five layouts
def test_sequence_first_streams_are_understood(seed):
    model = turn(random_program(seed))
    check_program(model, model.program)


def test_judge_finds_transposed_matrices():
    model = random_program(7)
    found = check_program(model, model)
    model.answer[1] = (model.answer[1][0], model.answer[1][1].mT, model.answer[1][2])
    assert judge(found.program or found.unnamed, model.answer) == "site 1: A"
