"""Long files of tests come first; no file is split, and none is forgotten."""

from dataclasses import dataclass
from pathlib import Path

from order import LONG, long_first

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Item:
    path: Path
    name: str


def test_each_name_is_a_file_and_stands_once():
    assert len({*LONG}) == len(LONG)
    assert [name for name in LONG if not (HERE / f"{name}.py").is_file()] == []


def test_long_files_come_first_and_all_else_stays_in_order():
    given = [Item(HERE / f"{stem}.py", name) for stem in ("test_abi", LONG[1], "test_zoo", LONG[0]) for name in "ab"]
    sorted_ = [*given]
    long_first(sorted_)
    assert sorted_ == [*given[6:], *given[2:4], *given[:2], *given[4:6]]


def test_it_is_the_order_of_this_run(request):
    found = [item.path.stem for item in request.session.items]
    again = [*request.session.items]
    long_first(again)
    assert found == [item.path.stem for item in again]
