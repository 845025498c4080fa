"""The operators behind `addnorm.functional`: schema, backends, gradients."""

from __future__ import annotations

from typing import NamedTuple

from addnorm.ops import schema, eager, cpu, triton, autocast, autograd  # isort: skip  # schemas before what implements them

__all__ = ["Backend", "autocast", "autograd", "backends", "cpu", "eager", "schema", "triton"]


class Backend(NamedTuple):
    """One implementation of the operation."""

    name: str
    available: bool
    detail: str


def backends() -> list[Backend]:
    """What computes the operation in this process, and why what is missing is.

    Example:
        >>> [backend.name for backend in addnorm.backends()]
        ['reference', 'cpu', 'triton']
    """
    return [
        Backend("reference", True, "eager torch, every device, every option"),
        Backend("cpu", cpu.ISA is not None, cpu.DETAIL),
        Backend("triton", *triton.status()),
    ]
