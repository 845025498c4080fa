"""The dropout mask: Philox 4x32-10, the same bits on every device and under any chunking.

Element i of the branch, in contiguous order, takes word `i & 3` of a block. The block's 128-bit counter is `(i >> 2) + offset`,
its key the 64-bit seed. The element is kept iff `word >= floor(p * 2^32)`. No mask is stored for backward.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK = 0xFFFFFFFF


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of a * b for 32-bit values in int64, in which the product itself could overflow."""
    low = (b & 0xFFFF) * a
    high = (b >> 16) * a + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four 32-bit words (int64 tensors) for four 32-bit counter words and two 32-bit key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        hi0, lo0 = _multiply(MULTIPLIERS[0], c0)
        hi1, lo1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def keep_mask(shape: tuple[int, ...], p: float, seed: Tensor, offset: int = 0) -> Tensor:
    """Return the boolean mask, `shape`, of the elements that dropout with probability p keeps, on the seed's device."""
    count = math.prod(shape)
    blocks = torch.arange((count + 3) // 4, dtype=torch.int64, device=seed.device)
    bits = _words(blocks, seed, offset).reshape(-1)[:count]
    return (bits >= math.floor(p * 2**32)).reshape(shape)


def keep_rows(rows: Tensor, d: int, p: float, seed: Tensor, offset: int = 0) -> Tensor:
    """Return the rows `rows` of the dropout mask of a `(*, d)` tensor, `(*rows.shape, d)`.

    Args:
        rows: int64, the numbers of the rows in contiguous order.
        d: the number of features.
        p: as in `keep_mask`.
        seed: as in `keep_mask`.
        offset: as in `keep_mask`.
    """
    if d % 4 == 0:
        blocks = rows.unsqueeze(-1) * (d // 4) + torch.arange(d // 4, device=rows.device)
        bits = _words(blocks, seed, offset).flatten(-2)
    else:
        elements = rows.unsqueeze(-1) * d + torch.arange(d, device=rows.device)
        bits = _words(elements >> 2, seed, offset).gather(-1, (elements & 3).unsqueeze(-1)).squeeze(-1)
    return bits >= math.floor(p * 2**32)


def _words(blocks: Tensor, seed: Tensor, offset: int) -> Tensor:
    """Return the four words of each block, `(*, 4)`."""
    counter = blocks + offset
    zero = torch.zeros_like(counter)
    words = philox((counter & MASK, (counter >> 32) & MASK, zero, zero), (seed & MASK, (seed >> 32) & MASK))
    return torch.stack(words, dim=-1)


def keep_scale(shape: tuple[int, ...], p: float, seed: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
    """Return the mask divided by 1 - p, the factor of the branch; all zeros for p = 1."""
    return keep_mask(shape, p, seed, offset).to(dtype) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
