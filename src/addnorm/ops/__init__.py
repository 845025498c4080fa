"""The operators behind `addnorm.functional`.

`options.py` declares the options and `schema.py` the operators. Each backend registers its kernels with torch's dispatcher:
`eager.py` the reference for every device, `cpu.py` the C++ library, `triton/` the CUDA kernels. `dispatch.py` and `out.py`
call the operators; `autograd.py` has their gradients, `formulas.py` the same operation in torch's own operators, and
`autocast.py` the dtypes. `compile_mode.py` chooses between operator and formula under torch.compile. `validation.py` and
`aliasing.py` check arguments; `philox.py` makes the dropout mask. `attend.py` has the operators of attention over sources.
`sharding.py` and `streams/sharding.py` have the rules for DTensors, which `dtensor.py` registers at the first call with a
DTensor.
"""

from __future__ import annotations

from typing import NamedTuple

from addnorm.ops import schema, eager, cpu, triton, autocast, autograd, dtensor, streams  # isort: skip  # schemas before the kernels

__all__ = ["Backend", "autocast", "autograd", "backends", "cpu", "eager", "schema", "streams", "triton"]

dtensor.register_rules()  # where torch.distributed.tensor is imported already


class Backend(NamedTuple):
    """Implementation of Add & Norm: its name, whether this process can use it, and details or the reason why not.

    Example:
        >>> [backend.name for backend in addnorm.backends()]
        ['reference', 'cpu', 'triton']
    """

    name: str
    available: bool
    detail: str


def backends() -> list[Backend]:
    """Return the backends, whether each is available in this process, and the reason if not.

    Example:
        >>> [backend.name for backend in addnorm.backends()]
        ['reference', 'cpu', 'triton']
    """
    return [
        Backend("reference", True, "eager torch, every device, every option"),
        Backend("cpu", cpu.ISA is not None, cpu.DETAIL),
        Backend("triton", *triton.status()),
    ]
