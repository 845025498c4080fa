"""The form of a planted fault."""

from typing import NamedTuple


class Fault(NamedTuple):
    """One planted fault."""

    id: str
    area: str
    file: str
    old: str
    new: str
