"""Tests of drawings of wirings: boxes, connected wires, size."""

import pytest

from addnorm import Learned, Row, Wiring, wirings
from addnorm.wirings import Head, Stage, append_zero, unit
from addnorm.wirings.drawing import WIDTH

SHARES = {"state": ("", "state"), "read": ("", "read")}


def uneven(at):
    return Row(norm_in=at.sublayer == 0, b=1.0 + at.sublayer, shares=SHARES["read"][at.sublayer])


def average(at):
    n = 2 * at.layer + at.sublayer + 1
    return Stage(n, (0.5,) * n, append_zero(n), unit(n + 1, -1), norm_in=True, names="x")


def average_head(at):
    return Head(2 * at.layer + 1, (0.5,) * (2 * at.layer + 1), names="x")


EVERY = [
    *wirings.list_all(), wirings.parallel(2), wirings.no_residual(False), wirings.admin(False),
    Wiring("all", Row(True, True, True, a=2.0, b=-0.1234, c=Learned(1.0)), final_norm=True, embedding_norm=True),
    Wiring("long", Row(a=0.0001234, b=-0.0001234), embedding_norm=True),
    Wiring("side", lambda at: Row(norm_branch=True, b=2.0, c=0.5 if at.sublayer else 1.0, shares=SHARES["state"][at.sublayer])),
    Wiring("uneven", uneven),
    Wiring("two", Stage(2, (2, 0.5), None, (0.25, 3), norm_streams=(True, True), norm_branch=True, norm_out=True),
           embedding=(1.0, 1.0), head=Head(2, (0.25, 3.0), norm_streams=(True, True)), final_norm=True),
    Wiring("second", Stage(2, (0, 0.5), None, (0, 3)), embedding=(1.0, 1.0), head=Head(2, (0.0, 1.0))),
    Wiring("lower", Stage(2, (3, 0.5), None, (0, 3)), embedding=(1.0, 1.0), head=Head(2, (1.0, 1.0))),
    Wiring("three", Stage(3, (1, 2, 0), ((1, 0, 0), (0, 1, 0.5), (0, 0, 1)), (0, 0.5, 1), norm_in=True), embedding=(1.0, 1.0, 0.0)),
    Wiring("normed", Stage(1, (1,), None, (1,), norm_streams=True, norm_out=True)),
    Wiring("average", average, head=average_head, final_norm=True),
    wirings.mhc(single_pass=True), wirings.mhc(head="mean"), wirings.hyper_connections(1), wirings.hyper_connections(3, False),
    wirings.attention_residuals(2, True, 3), wirings.denseformer(2, 2), wirings.muddformer(3), wirings.x0_residual(backout=0.0),
]  # fmt: skip


# Characters that have a wire on that side, thin or thick.
LEFT, RIGHT = "─┐┘┤┬┴┼⊕═╗╝╣╦╩╬╡╤╧╪", "─┌└├┬┴┼⊕═╔╚╠╦╩╬╞╤╧╪"
UP, DOWN = "│└┘├┤┴┼⊕║╚╝╠╣╩╬╡╞╧╪", "│┌┐├┤┬┼⊕║╔╗╠╣╦╬╡╞╤╪"


@pytest.mark.parametrize("wiring", EVERY, ids=lambda wiring: wiring.name)
def test_drawing_fits_a_page_and_connects_every_wire(wiring):
    lines = wiring.draw().splitlines()
    assert max(map(len, lines)) <= WIDTH == 78
    assert [line for line in lines if line != line.rstrip()] == []
    assert any(line[0] != " " for line in lines if line)
    cells = {(x, y): character for y, line in enumerate(lines) for x, character in enumerate(line)}

    def at(x, y):
        return cells.get((x, y), " ")

    loose = []
    for (x, y), character in cells.items():
        ends = (
            (RIGHT, at(x + 1, y) in LEFT + "►"),
            (LEFT, at(x - 1, y) in RIGHT or at(x - 2, y) in "xuvhLXn01)"),
            (DOWN, at(x, y + 1) in UP),
            (UP, at(x, y - 1) in DOWN),
        )
        if character != "⊕" and any(character in wires and not is_connected for wires, is_connected in ends):
            loose.append((x, y, character))
    assert loose == []


@pytest.mark.parametrize(
    ("inject", "lines"),
    [
        ((0.5, 0), ["    └──┤ f ├──┤ ×0.5 ├──┘", "v ─────────────────────────► v"]),
        ((1, 0.5), ["    └──┤ f ├──┴──┤ ×0.5 ├──┐", "v ─────────────────────────⊕──► v'"]),
        ((0.25, 3), ["         ╚══╡ u ├──┤ f ├──┤ b ╞══╝", "  b = (0.25, 3)"]),
    ],
)
def test_each_of_two_writes_has_its_own_factor(inject, lines):
    drawing = Wiring("two", Stage(2, (1, 0), None, inject), embedding=(1.0, 1.0)).draw().splitlines()
    assert [line for line in lines if line not in drawing] == []


def test_parallel_branches_end_at_one_add():
    wiring = Wiring("uneven", uneven)
    assert wiring.draw().splitlines()[2::3] == [
        "    └──┤ N ├─┬──┤ f_1 ├──────────┤",
        "             └──┤ f_2 ├──┤ ×2 ├──┘",
    ]


def test_norm_of_one_stream_is_no_final_norm():
    head = Head(2, (1.0, 1.0), norm_streams=(True, False))
    assert Wiring("two", Stage(2, (1, 0), None, (1, 1)), head=head).draw().count("┤ N ├") == 1
