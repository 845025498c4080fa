"""Tests of tests/support/order.py: slow files run first, no file is split, and none is missing."""

from dataclasses import dataclass
from pathlib import Path

from support import TESTS
from support.order import SLOWEST, sort_slowest_first


@dataclass(frozen=True)
class Item:
    path: Path
    name: str


def test_each_slow_file_exists_and_is_listed_once():
    assert len({*SLOWEST}) == len(SLOWEST)
    assert [name for name in SLOWEST if not (TESTS / f"{name}.py").is_file()] == []


def test_slow_files_come_first_and_others_keep_order():
    stems = ("house/test_abi", SLOWEST[1], "house/test_zoo", SLOWEST[0])
    items = [Item(TESTS / f"{stem}.py", name) for stem in stems for name in "ab"]
    in_order = [*items]
    sort_slowest_first(in_order)
    assert in_order == [*items[6:], *items[2:4], *items[:2], *items[4:6]]


def test_this_run_has_the_order(request):
    order = [item.path for item in request.session.items]
    again = [*request.session.items]
    sort_slowest_first(again)
    assert order == [item.path for item in again]
