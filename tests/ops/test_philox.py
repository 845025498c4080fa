"""Tests of dropout's random numbers: published values, the right positions, the right rate."""

import pytest
import torch

import addnorm
from addnorm.ops.philox import keep_mask, philox
from support.cases import bf16, f16, f32, f64
from support.oracle import keep_mask as keep_mask_in_integers
from support.oracle import philox4x32
from support.pairwise import product

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


@pytest.mark.parametrize(
    ("seeds", "shape", "dtype"),
    product(
        [(0, 0), (-1, 2**32 - 2), (2**63 - 1, 2**40 + 7), (-(2**63), 2**61)],
        [(3, 1), (5, 2), (4, 3), (9, 7), (3, 64), (2, 65), (7, 127), (2, 1001)],
        [f32, bf16, f16, f64],
    ),
    ids=str,
)
def test_dropout_mask_equals_reference(seeds, shape, dtype):
    """Of the kernels, forward and backward."""
    seed, offset = torch.tensor(seeds[0]), seeds[1]
    branch = torch.ones(shape, dtype=dtype, requires_grad=True)
    for p in (0.1, 0.5, 1 - 2**-20):
        z = addnorm.add_residual(torch.zeros_like(branch), branch, dropout_p=p, seed=seed, offset=offset)
        (grad,) = torch.autograd.grad(z.sum(), branch)
        mask = keep_mask(shape, p, seed, offset)
        assert (z != 0).equal(mask), p
        assert (grad != 0).equal(mask), p


def test_dropout_keeps_a_word_equal_to_the_threshold():
    """The comparison is `>=`. With p = word / 2^32 for the word of the first element, the threshold is exactly that word."""
    word = philox4x32(0, 77)[0]
    for p, kept in [(word / 2**32, True), ((word + 1) / 2**32, False)]:
        z = addnorm.add_residual(torch.zeros(1, 4), torch.ones(1, 4), dropout_p=p, seed=torch.tensor(77))
        assert bool(z[0, 0] != 0) == kept
