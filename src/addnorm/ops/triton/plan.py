"""Tile sizes and numbers of programs. They depend only on the shape, so the bits are the same on every GPU.

This holds from compute capability 8.0 on: for older devices Triton distributes the elements of some rows differently.

No compile-time constant depends on the number of rows, so another batch size compiles no new kernel. Only `Cut.chunk`, the rows
of one program of the backward, depends on it; it is an ordinary argument.

The numbers were measured on an H100 (docs/gpu.md), whose 132 multiprocessors the programs of a backward fill once: its sums in
float32 take most registers of a thread, and each program writes a row of them. `tests/ops/triton/test_compiled.py` examines the
machine code for sm_90.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

FORWARD_ROW = 32768  # elements of a row that one program of the forward keeps in registers
FORWARD_TILE = 8192  # elements of a longer row that are read at a time
# Bytes of a row of the backward. Up to the first number, dy and z fit in registers beside the sums. Up to the second, they are
# read for the two means in the row's gradient and again, from the cache, for the gradient. Several programs compute a longer row.
READ_ONCE_BYTES = 16 * 1024
READ_TWICE_BYTES = 32 * 1024
READ_STEPS = 8  # steps in which the first of two readings reads a row
BACKWARD_TILE = 2048
FEW_SUMS = 2  # weight and bias; with more sums, the two limits in bytes above are halved
THREAD_ELEMENTS = 16  # elements of a tile per thread: two loads of 16 bytes in 16-bit dtypes
SUM_ELEMENTS = 32  # the same in a backward of whole rows with few sums: fewer threads, so more programs at a time
FEW_ROWS_BLOCK = 512  # smallest tile width for SUM_ELEMENTS: the statistics of many short rows take registers too
MIN_TILE = 2048  # minimum elements of a program of the forward at a time: enough loads in flight
SUM_TILE = 1024  # the same for a program of the backward, which fetches the next rows while it computes
MAX_WARPS = 16  # 32 for the longest rows that stay in registers
MULTIPROCESSORS = 132
# Maximum elements of all programs of a backward together: each writes a row of sums, which is read again.
BACKWARD_ELEMENTS = MULTIPROCESSORS * 8192
MIN_PROGRAMS = (
    MULTIPROCESSORS  # minimum programs, if there are enough rows: the longest rows take a multiprocessor each
)
MAX_CHAIN = 256  # maximum additions in one float32 chain of these sums
MAX_ROW = 65535 * BACKWARD_TILE  # the limit of a grid along its second axis
SHARED_BYTES = 96 * 1024  # bytes of shared memory that every GPU since 2020 has for a program


class Tile(NamedTuple):
    """Elements that one program holds at a time, and its warps."""

    rows: int
    d: int
    warps: int


def _power(d: int) -> int:
    """Return the smallest power of two of at least d and 16."""
    return max(16, 1 << (d - 1).bit_length())


def _tile(d: int, longest: int, part: int, least: int = MIN_TILE, elements: int = THREAD_ELEMENTS) -> Tile:
    """Return the tile for rows of d elements, `elements` for each thread: whole rows up to `longest`, else parts of a row."""
    is_whole = d <= longest
    block = _power(d) if is_whole else part
    rows = max(1, least // block)
    most = 2 * MAX_WARPS if block > MAX_WARPS * 1024 else MAX_WARPS
    each = elements if is_whole and block >= FEW_ROWS_BLOCK else THREAD_ELEMENTS
    return Tile(rows, block, min(most, rows * block // (32 * each)))


@functools.cache
def forward(d: int) -> Tile:
    """Return the tile of the forward: whole rows, several if they are short, or a part of a long row."""
    return _tile(d, FORWARD_ROW, FORWARD_TILE)


class Cut(NamedTuple):
    """Division of the rows and features of a backward among Triton programs."""

    tile: Tile
    step: int  # elements of a row at a time for its means: all of the tile if it is read once
    chunk: int  # rows of a program: whole tiles
    parts: int  # parts of a row
    programs: int  # programs along the rows


@functools.lru_cache(maxsize=1024)
def backward(rows: int, d: int, sums: int, itemsize: int) -> Cut:
    """Return how a backward is divided among programs, within bounds on their number and on the chains of additions.

    Args:
        rows: rows of all programs together.
        d: elements of a row.
        sums: number of requested sums over the rows.
        itemsize: bytes of an element of dy or z, whichever is larger.
    """
    has_few = sums <= FEW_SUMS
    size = _power(d) * itemsize * (1 if has_few else 2)
    elements, longest = SUM_ELEMENTS if has_few else THREAD_ELEMENTS, d if size <= READ_TWICE_BYTES else 0
    tile = _tile(d, longest, BACKWARD_TILE, SUM_TILE, elements)
    parts = -(-d // tile.d)
    is_read_twice = parts == 1 and size > READ_ONCE_BYTES
    programs = max(-(-MIN_PROGRAMS // parts), BACKWARD_ELEMENTS // (tile.rows * tile.d * parts))
    chunk = min(-(-rows // (programs * tile.rows)), MAX_CHAIN) * tile.rows
    return Cut(tile, tile.d // READ_STEPS if is_read_twice else tile.d, chunk, parts, -(-rows // chunk))


def stages(tile: Tile, fetched: int, exchanged: int) -> int:
    """Return 2 if the next rows can be prefetched while the current ones are computed, else 1.

    Args:
        tile: the tile of a program.
        fetched: bytes read per element of the tile.
        exchanged: bytes per element that threads exchange through shared memory.
    """
    return 2 if tile.rows * tile.d * (2 * fetched + exchanged) <= SHARED_BYTES else 1
