"""Tests that every planted fault applies to the source, and of the patterns that locate them."""

import pytest

from mutants.faults import AREAS
from mutants.run import FAULTS, find_problems
from mutants.structure import find_matches, replace

CALL = "def f(x):\n    return g(x,  # a comment\n        'b', k=(x - 1))\n"
BRANCH = "if a:\n    pass\nelif b:\n    c = d\n    e()\n"
LOOP = "for (int i = 0; i < n; ++i) s /* old */ = add(s, load(x + i));"


def test_each_fault_applies_to_one_place():
    assert find_problems() == []
    assert len(FAULTS) == sum(len(area.faults) for area in AREAS.values()) > 100  # no id twice


@pytest.mark.parametrize(
    ("text", "pattern", "replacement", "scope", "expected"),
    [
        (CALL, "$a - 1", "$a", "", CALL.replace("x - 1", "x")),
        (CALL, "$f($a, \"b\", k", "$f(\"b\", k", "f", 'def f(x):\n    return g("b", k=(x - 1))\n'),
        (CALL, "$a - $a", "$a", "", None),
        (BRANCH, "$a = $b; $f()", "$f(); $a = $b", "", BRANCH.replace("c = d\n    e()", "e(); c = d")),
        (LOOP, "$s = add($s, ...)", "$s = ...", "", LOOP.replace("s /* old */ = add(s, load(x + i))", "s = load(x + i)")),
        (LOOP, "$i < n; ++$i", "$i < n - 1; ++$i", "", LOOP.replace("i < n", "i < n - 1")),
    ],
)  # fmt: skip
def test_pattern_edits_the_place_of_its_form(text, pattern, replacement, scope, expected):
    edited = [replace(match, replacement) for match in find_matches(text, pattern, scope)]
    assert edited == ([] if expected is None else [expected])
