"""Removal of a sublayer's write in a model with several streams: the operator that computes it returns zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm.stream.dataflow.arithmetic import strip_views
from addnorm.stream.dataflow.graph import Op
from addnorm.stream.program.result import ProgramSite


class ZeroWrite:
    """Editor of the operator whose output is what a sublayer adds: after its norm, before the numbers of B."""

    def __init__(self, site: ProgramSite) -> None:
        columns = [column for part in site.sums for column in part.columns if column.source is site.write.value]
        values = {strip_views(column.operand) for column in columns}
        value = next(iter(values), None)
        if len(values) != 1 or value is None or value.op is None or value.op.origin != value.op.name or value.part != 0:
            raise RuntimeError(
                f"{site.id!r} writes a value that no operator of its own computes, expected one: replace its module by zeros."
            )
        self.site = site
        self.op: Op = value.op

    def __call__(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments, which do not change."""
        return args, kwargs

    def change_output(self, func: Any, out: Any) -> Any:
        """Return zeros in place of the operator's first output."""
        first = out if isinstance(out, Tensor) else out[0]
        with torch.no_grad():
            if func._schema.is_mutable:
                first.zero_()
                return out
            zeros = torch.zeros_like(first)
        return zeros if first is out else (zeros, *out[1:])

    def on_output(self, out: Tensor) -> None:
        """Make the gradient of the write zero."""
        if out.requires_grad:
            out.register_hook(torch.zeros_like)

    def build_missed_error(self) -> RuntimeError:
        """Return the error for a forward that ran other operators than the inspected one."""
        return RuntimeError(
            f"the forward did not reach site {self.site.id!r}, expected the operators of the inspected run: inspect "
            "the model as it is called here (training or evaluation, with gradients, without, or in inference mode)."
        )
