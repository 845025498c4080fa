"""Tests of dropout's random numbers: published values, the right positions, the right rate."""

import pytest
import torch

import addnorm
from addnorm.ops.philox import keep_mask, keep_scale, philox
from support.cases import make
from support.oracle import keep_mask as keep_mask_in_integers
from support.oracle import philox4x32

# Random123's kat_vectors for philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(counter, key, answer):
    words = philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(int(word) for word in words) == answer
    as_integer = [sum(word << 32 * i for i, word in enumerate(words)) for words in (counter, key)]
    assert tuple(philox4x32(*as_integer)) == answer  # the tests' own implementation, in Python's integers


@pytest.mark.parametrize("offset", [0, 1, 2**32 - 3, 2**40 + 7])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
def test_keep_mask_equals_integer_philox(seed, offset):
    for shape in [(1,), (4, 5), (3, 1, 7)]:
        assert keep_mask(shape, 0.4, torch.tensor(seed), offset).equal(keep_mask_in_integers(shape, 0.4, seed, offset))


def test_offset_selects_the_mask_of_a_chunk():
    seed = torch.tensor(9)
    mask = keep_mask((12, 10), 0.5, seed)
    for first in range(0, 12, 2):  # two rows of ten are five blocks of four
        assert keep_mask((2, 10), 0.5, seed, first * 10 // 4).equal(mask[first : first + 2])
    branch, residual = torch.randn(12, 10), torch.randn(12, 10)
    z = addnorm.add_residual(residual, branch, dropout_p=0.5, seed=seed)
    parts = [
        addnorm.add_residual(residual[i : i + 4], branch[i : i + 4], dropout_p=0.5, seed=seed, offset=i * 10 // 4)
        for i in (0, 4, 8)
    ]
    assert torch.cat(parts).equal(z)


def test_dropout_p_0_keeps_all_and_p_1_drops_all():
    seed = torch.tensor(1)
    assert keep_mask((100,), 0.0, seed).all()
    assert keep_scale((100,), 1.0, seed, 0, torch.float32).tolist() == [0.0] * 100
    residual, branch = torch.randn(4, 25), torch.randn(4, 25)
    assert addnorm.add_residual(residual, branch, dropout_p=0.0, seed=seed).equal(residual + branch)
    assert addnorm.add_residual(residual, branch, dropout_p=1.0, seed=seed).equal(residual)


def test_dropout_mask_is_the_same_for_every_dtype_and_norm():
    expected = keep_mask_in_integers((9, 33), 0.3, -1234567890123456789, 5)
    for variant in ("everything, LayerNorm", "everything, RMSNorm", "everything, the add alone"):
        for dtypes in ("float32", "bfloat16", "float64"):
            call = make(variant, dtypes, (9, 33))
            call.tensors["residual"].zero_()
            call.tensors["branch"].fill_(9.0)
            assert (call()["z"] != 0).equal(expected)
