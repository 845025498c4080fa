"""How the work is cut: by the shape alone, never by the device, so that the bits are the same on every GPU.

Every one from compute capability 8.0 on: for older ones Triton deals out the elements of some rows differently.

Nothing a kernel is compiled for depends on the number of rows: another batch size compiles nothing anew. Of what a program of the
backward takes, the number of rows does, and is an ordinary argument.

The numbers follow from the machine code for sm_90, which `tests/test_ops_triton_compiled.py` looks at: with THREAD elements a
thread the forward takes up to 60 registers and the backward, with its sums in float32, 128, so that four of its programs of 128
threads share a multiprocessor, and those that BACKWARD_ELEMENTS allow fill some 130 of them once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

FORWARD_WHOLE = 16384  # elements of a row that one program of the forward keeps in registers
FORWARD_TILE = 8192  # of a longer row at a time
# The backward has its sums beside the row. Bytes of a row of dy, and of z, that fit there too; and those that the cache keeps
# from a first reading, for the two means that the row's gradient wants, to a second. A longer one is several programs'.
BACKWARD_ONCE = 16 * 1024
BACKWARD_TWICE = 32 * 1024
READINGS = 4  # steps of the first reading
BACKWARD_TILE = 2048
FEW_SUMS = 2  # weight and bias; where there are more, rows are half as long
THREAD = 16  # elements of a tile for each thread: two loads of 16 bytes in 16-bit dtypes
LEAST = 2048  # elements a program has at a time, at least: enough loads in flight
MOST_WARPS = 16
# Elements of all programs of a backward together, at most: each leaves a row of sums, which is written and read once more.
BACKWARD_ELEMENTS = 2**20
FEWEST = 128  # programs, where there are rows for them: the longest rows take a multiprocessor each
LONGEST = 256  # additions of one float32 chain of those sums, at most
LONGEST_ROW = 65535 * BACKWARD_TILE  # a grid has no more programs along its second axis
SHARED = 96 * 1024  # bytes that a program may have: what every GPU since 2020 has


class Tile(NamedTuple):
    """What one program holds at a time."""

    rows: int
    d: int
    warps: int


def _power(d: int) -> int:
    return max(16, 1 << (d - 1).bit_length())


def _tile(d: int, whole: int, part: int) -> Tile:
    block = _power(d) if d <= whole else part
    rows = max(1, LEAST // block)
    return Tile(rows, block, min(MOST_WARPS, rows * block // (32 * THREAD)))


@functools.cache
def forward(d: int) -> Tile:
    """Whole rows, several where they are short, or a part of a long one at a time."""
    return _tile(d, FORWARD_WHOLE, FORWARD_TILE)


class Cut(NamedTuple):
    """How a backward is cut."""

    tile: Tile
    step: int  # elements of a row at a time while its means are found: all of the tile where it is read once
    chunk: int  # rows that a program takes: whole tiles of them
    parts: int  # of a row
    programs: int  # along the rows


@functools.lru_cache(maxsize=1024)
def backward(rows: int, d: int, sums: int, itemsize: int) -> Cut:
    """Programs of as many rows as leave few enough of them, and no chain of additions too long.

    Args:
        rows: of all programs together.
        d: of a row.
        sums: over the rows that are wanted.
        itemsize: bytes of an element of dy or z, the larger.
    """
    size = _power(d) * itemsize * (1 if sums <= FEW_SUMS else 2)
    tile = _tile(d, d if size <= BACKWARD_TWICE else 0, BACKWARD_TILE)
    parts = -(-d // tile.d)
    twice = parts == 1 and size > BACKWARD_ONCE
    programs = max(-(-FEWEST // parts), BACKWARD_ELEMENTS // (tile.rows * tile.d * parts))
    chunk = min(-(-rows // (programs * tile.rows)), LONGEST) * tile.rows
    return Cut(tile, tile.d // READINGS if twice else tile.d, chunk, parts, -(-rows // chunk))


def stages(tile: Tile, fetched: int, exchanged: int) -> int:
    """2 where the next rows can be fetched while these are computed, else 1.

    Args:
        tile: what a program holds at a time.
        fetched: bytes for each element of the tile.
        exchanged: bytes for each element that go from thread to thread, through the same memory.
    """
    return 2 if tile.rows * tile.d * (2 * fetched + exchanged) <= SHARED else 1
