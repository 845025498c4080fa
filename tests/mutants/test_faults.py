"""Tests that every planted fault applies to the source, and of the patterns that locate them."""

import pytest

from mutants.faults import AREAS
from mutants.run import FAULTS, find_problems
from mutants.structure import find_edits

CALL = "def f(x):\n    return g(x,  # a comment\n        'b', k=(x - 1))\n"
BRANCH = "if a:\n    pass\nelif b:\n    c = d\n    e()\n"
LOOP = "for (int i = 0; i < n; ++i) s /* old */ = add(s, load(x + i));"


def test_each_fault_applies_to_one_place():
    assert find_problems() == []
    assert len(FAULTS) == sum(len(area.faults) for area in AREAS.values()) > 100  # no id twice


@pytest.mark.parametrize(
    ("text", "pattern", "replacement", "scope", "expected"),
    [
        (CALL, "$a - 1", "$a", "", CALL.replace("x - 1", "(x)")),
        (CALL, "$f($a, ...)", "$a", "", CALL.replace(CALL[21:-1], "(x)")),
        (CALL, "$f(..., k=$k)", "$f($k, ...)", "", CALL.replace(CALL[21:-1], "(g(x - 1, x, 'b'))")),
        (CALL, 'return $f($a, "b", ...)', "pass", "f", "def f(x):\n    pass\n"),
        (CALL, "$a - 1", "$a", "g", None),
        (CALL, "$a - $a", "$a", "", None),
        (CALL, "'c'", "'d'", "", None),
        (BRANCH, "$a = $b; $f()", "$f(); $a = $b", "", BRANCH.replace("c = d\n    e()", "e()\n    c = d")),
        (BRANCH, "if b: ...", "if not b: ...", "", BRANCH.replace("elif b", "elif not b")),
        (LOOP, "$s = add($s, ...)", "$s = ...", None, LOOP.replace("s /* old */ = add(s, load(x + i))", "s = load(x + i)")),
        (LOOP, "$i < n; ++$i", "$i < n - 1; ++$i", None, LOOP.replace("i < n", "i < n - 1")),
        (LOOP, "load(...) + 1;", "0", None, None),
    ],
)  # fmt: skip
def test_pattern_edits_the_place_of_its_form(text, pattern, replacement, scope, expected):
    edited = [
        text[: edit.start] + edit.new + text[edit.end :] for edit in find_edits(text, pattern, replacement, scope)
    ]
    assert edited == ([] if expected is None else [expected])
