"""Tile sizes and numbers of programs. They depend only on the shape, so the bits are the same on every GPU.

This holds from compute capability 8.0 on: for older devices Triton distributes the elements of some rows differently.

No compile-time constant depends on the number of rows, so another batch size compiles no new kernel. The rows of a program of the
backward depend on it, and are an ordinary argument.

The numbers follow from the machine code for sm_90, which `tests/ops/triton/test_compiled.py` examines. With THREAD elements per
thread the forward takes up to 60 registers and the backward, with its sums in float32, 128. So four of its programs of 128
threads share a multiprocessor, and the programs that BACKWARD_ELEMENTS allows fill about 130 of them once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

FORWARD_WHOLE = 16384  # elements of a row that one program of the forward keeps in registers
FORWARD_TILE = 8192  # elements of a longer row that are read at a time
# The backward has its sums in registers too. Bytes of a row of dy and of z that fit beside them; and bytes that stay in the cache
# between a first reading, for the two means in the row's gradient, and a second. Several programs compute a longer row.
BACKWARD_ONCE = 16 * 1024
BACKWARD_TWICE = 32 * 1024
READINGS = 4  # steps of the first reading
BACKWARD_TILE = 2048
FEW_SUMS = 2  # weight and bias; with more sums, rows are half as long
THREAD = 16  # elements of a tile per thread: two loads of 16 bytes in 16-bit dtypes
LEAST = 2048  # minimum elements of a program at a time: enough loads in flight
MOST_WARPS = 16
# Maximum elements of all programs of a backward together: each writes a row of sums, which is read again.
BACKWARD_ELEMENTS = 2**20
FEWEST = 128  # minimum programs, if there are enough rows: the longest rows take a multiprocessor each
LONGEST = 256  # maximum additions in one float32 chain of these sums
LONGEST_ROW = 65535 * BACKWARD_TILE  # the limit of a grid along its second axis
SHARED = 96 * 1024  # bytes of shared memory that every GPU since 2020 has for a program


class Tile(NamedTuple):
    """Elements that one program holds at a time, and its warps."""

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
    """Return the tile of the forward: whole rows, several if they are short, or a part of a long row."""
    return _tile(d, FORWARD_WHOLE, FORWARD_TILE)


class Cut(NamedTuple):
    """Distribution of a backward over programs."""

    tile: Tile
    step: int  # elements of a row at a time for its means: all of the tile if it is read once
    chunk: int  # rows of a program: whole tiles
    parts: int  # parts of a row
    programs: int  # programs along the rows


@functools.lru_cache(maxsize=1024)
def backward(rows: int, d: int, sums: int, itemsize: int) -> Cut:
    """Return the distribution of a backward, with bounds on the number of programs and on the chains of additions.

    Args:
        rows: rows of all programs together.
        d: elements of a row.
        sums: number of requested sums over the rows.
        itemsize: bytes of an element of dy or z, whichever is larger.
    """
    size = _power(d) * itemsize * (1 if sums <= FEW_SUMS else 2)
    tile = _tile(d, d if size <= BACKWARD_TWICE else 0, BACKWARD_TILE)
    parts = -(-d // tile.d)
    twice = parts == 1 and size > BACKWARD_ONCE
    programs = max(-(-FEWEST // parts), BACKWARD_ELEMENTS // (tile.rows * tile.d * parts))
    chunk = min(-(-rows // (programs * tile.rows)), LONGEST) * tile.rows
    return Cut(tile, tile.d // READINGS if twice else tile.d, chunk, parts, -(-rows // chunk))


def stages(tile: Tile, fetched: int, exchanged: int) -> int:
    """Return 2 if the next rows can be prefetched while the current ones are computed, else 1.

    Args:
        tile: the tile of a program.
        fetched: bytes read per element of the tile.
        exchanged: bytes per element that threads exchange through shared memory.
    """
    return 2 if tile.rows * tile.d * (2 * fetched + exchanged) <= SHARED else 1
