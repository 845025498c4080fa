"""Change of a sublayer's write in a model with several streams, at the operator that computes the write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm.stream.dataflow.arithmetic import strip_views
from addnorm.stream.edits import WriteEdit
from addnorm.stream.program.result import ProgramSite


class ProgramWriteEdit(WriteEdit):
    """Editor of the operator whose output is what a sublayer adds: after its norm, before the numbers of B.

    Args:
        site: the sublayer.
        s: the factor of the write.
        takes_mean: replace the write by its mean over all tokens instead.
    """

    def __init__(self, site: ProgramSite, s: float, takes_mean: bool) -> None:
        columns = [column for part in site.sums for column in part.columns if column.source is site.write.value]
        values = {strip_views(column.operand) for column in columns}
        value = next(iter(values), None)
        if len(values) != 1 or value is None or value.op is None or value.part != 0:
            raise RuntimeError(
                f"{site.id!r} writes a value that no operator of its own computes, expected one: replace its module."
            )
        if takes_mean and value.shape[-1:] != site.write.value.shape[-1:]:
            raise RuntimeError(
                f"mode is 'mean', expected 'zero' for {site.id!r}: the dimension of the features of its write is not known."
            )
        super().__init__(site, value.op, s, [*range(len(value.shape) - 1)] if takes_mean else None)

    def change_output(self, func: Any, out: Any) -> Any:
        """Return the changed write in place of the operator's first output."""
        first = out if isinstance(out, Tensor) else out[0]
        with torch.no_grad():
            changed = self.change_write(first)
            if func._schema.is_mutable:
                first.copy_(changed)
                return out
        return changed if first is out else (changed, *out[1:])

    def on_output(self, out: Tensor) -> None:
        """Change the gradient of the write: the function is its own adjoint."""
        if out.requires_grad:
            out.register_hook(self.change_write)
