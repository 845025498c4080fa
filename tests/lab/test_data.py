"""Tests of `addnorm.lab.data`: the parts of a text, and the batches of a seed."""

import math
import pickle

import pytest
import torch

from addnorm.lab import Text, python_docs, read_text
from addnorm.lab.data import PARTS
from support.lab_runs import TEXT


def test_batch_depends_on_seed_and_step():
    first, *others = (TEXT.batch(*at, 4, 8)[0] for at in ((3, 7), (3, 8), (4, 7), (7, 3)))
    assert torch.equal(first, Text("other name", TEXT.text).batch(3, 7, 4, 8)[0])
    assert not any(torch.equal(first, other) for other in others)


def test_batch_targets_are_the_next_training_characters():
    read_, following = TEXT.batch(0, 0, 64, 8)
    assert torch.equal(read_[:, 1:], following[:, :-1])
    train = "".join(TEXT.characters[k] for k in TEXT.ids["train"])
    for row, last in zip(read_.tolist(), following[:, -1].tolist(), strict=True):
        assert "".join(TEXT.characters[k] for k in [*row, last]) in train


@pytest.mark.parametrize("length", [100, 101, 999, 1234])
def test_parts_are_disjoint_and_cover_the_text(length):
    text = Text("all different", "".join(map(chr, range(1000, 1000 + length))))
    parts = [set(text.ids[part].tolist()) for part in PARTS]
    assert sum(map(len, parts)) == length
    assert set.union(*parts) == set(range(length))
    assert [len(part) / length for part in parts] == pytest.approx([0.8, 0.1, 0.1], abs=0.03)


def test_held_out_positions_are_evenly_spaced():
    text = Text("counting", "".join(map(chr, range(1000, 2000))))
    read_, following = text.held_out("test", 16, 8)
    starts = read_[:, 0].tolist()
    assert starts == sorted(set(starts))
    assert starts[0] == text.ids["test"][0]
    assert following[-1, -1] == text.ids["test"][-1]
    assert len(text.held_out("test", 10_000, 8)[0]) == len(text.ids["test"]) - 8


def test_text_pickles_only_its_characters():
    _ = TEXT.ids, TEXT.digest
    sent = pickle.dumps(TEXT)
    assert len(sent) < len(TEXT.text) + 200
    assert pickle.loads(sent) == TEXT


def test_uniform_and_entropy():
    text = Text("halves", "aab" * 100)
    assert text.uniform == pytest.approx(math.log(2))
    assert text.entropy == pytest.approx(-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)))


@pytest.mark.parametrize("tokens", [1, 8, 65, 257])
def test_require_length_accepts_the_length_it_asks_for(tokens):
    with pytest.raises(
        ValueError, match=rf"text 'short' has 9 characters.* use a text of {(tokens + 3) * 10} characters"
    ):
        Text("short", "abcabcabc").require_length(tokens)
    text = Text("long", ("ab" * 2000)[: (tokens + 3) * 10]).require_length(tokens)
    assert text.batch(0, 0, 2, tokens)[0].shape == (2, tokens)
    assert text.held_out("test", 4, tokens)[1].shape[1] == tokens


def test_require_length_refuses_trivial_texts():
    with pytest.raises(ValueError, match="only one distinct character"):
        Text("nothing", "a" * 5000).require_length(8)


def test_read_text_keeps_all_characters(tmp_path):
    file = tmp_path / "odd.txt"
    file.write_bytes("\ufeffα\r\nb\0c\N{GRINNING FACE}".encode())
    assert read_text(file) == Text("odd.txt", "α\r\nb\0c\N{GRINNING FACE}")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"ab\xff\xfe", "expected UTF-8, byte 2 is not: iconv"),
        ("directory", "Is a directory"),
    ],
)
def test_read_text_refuses_what_is_no_text(content, says, tmp_path):
    file = tmp_path / "text"
    if content == "directory":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        read_text(file)
    with pytest.raises(ValueError, match="cannot be read"):
        read_text("a\0b")


def test_text_with_half_a_surrogate_pair_has_a_digest():
    assert Text("a", "\ud800").digest


def test_python_docs_is_long_enough():
    text = python_docs().require_length(64)
    assert len(text.text) > 300_000
    assert 1.0 < text.entropy < text.uniform
