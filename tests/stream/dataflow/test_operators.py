"""Tests of the table of torch's operators: each name is one of torch's and has one row, and each queried trait is in the table."""

import re
from pathlib import Path

import torch

import addnorm
from addnorm.stream.dataflow.operators import OPAQUE, TABLE, TRAITS, find_traits

OWN = {"write_into", "flex_attention"}  # of the capture; a higher-order operator


def test_each_operator_of_torch_has_one_row():
    names = [name for names in TABLE for name in names.split()]
    assert len(names) == len({*names}) > 150
    plain = [name for name in names if "::" not in name and name not in OWN]
    assert [n for n in plain if not (hasattr(torch.ops.aten, n) or hasattr(torch.ops.aten, f"{n}_"))] == []


def test_each_queried_trait_is_in_the_table():
    known = OPAQUE.union(*TRAITS.values())
    source = "\n".join(path.read_text() for path in Path(addnorm.__file__).parent.rglob("*.py"))
    queried = {*re.findall(r'"(\w+)" (?:not )?in [\w.]*traits', source)}
    assert len(queried) > 20
    assert queried <= known


def test_operators_of_other_libraries_are_opaque():
    assert find_traits("other::linear") == OPAQUE
    assert find_traits("addnorm::add_norm") == find_traits("gelu") == frozenset()
