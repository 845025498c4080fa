"""The form of planted faults."""

from typing import NamedTuple


class Fault(NamedTuple):
    """One small, realistic error on supported input, as a pattern of structure.py and its replacement.

    Args:
        id: what is wrong.
        place: file or folder, under src/addnorm or csrc/, in which exactly one place matches; "file.py:name" looks only in
            the functions and classes of that name.
        old, new: the pattern and its replacement.
    """

    id: str
    place: str
    old: str
    new: str


class Area(NamedTuple):
    """Faults that the same tests find: runs of pytest, the fastest first, each a few patterns of files or folders."""

    tests: tuple[str, ...]
    faults: tuple[Fault, ...]
