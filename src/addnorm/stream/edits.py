"""Edits of writes that are in effect: `ablate` registers them, `record` measures the edited writes, `decompose` refuses them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from addnorm.stream.dataflow.graph import Op
from addnorm.stream.find.sublayers import Sublayer

Edit = Callable[[Tensor], Tensor]

_edits: WeakKeyDictionary[nn.Module, list[tuple[Hashable, Edit]]] = WeakKeyDictionary()


class WriteEdit:
    """Editor that multiplies a sublayer's write by a number, or replaces it. Subclasses change an argument or an output.

    Args:
        site: the sublayer.
        op: the operator that is changed.
        s: the factor of the write.
        dims: dimensions over whose mean the write is replaced instead; None for the product.
    """

    def __init__(self, site: Any, op: Op, s: float, dims: list[int] | None) -> None:
        self.site, self.op, self.s, self.dims = site, op, s, dims

    def __call__(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with which the operator runs."""
        return args, kwargs

    def change_output(self, func: Any, out: Any) -> Any:
        """Return what the operator returns."""
        return out

    def on_output(self, out: Tensor) -> None:
        """Change the gradient of the operator's output or node."""
        raise NotImplementedError

    def change_write(self, write: Tensor) -> Tensor:
        """Return what is added in place of a write."""
        if self.dims is None:
            return self.scale(write)
        return write.mean(self.dims, keepdim=True).expand_as(write).contiguous() if self.dims else write

    def scale(self, t: Tensor) -> Tensor:
        """Return the product with the factor."""
        return t * self.s if self.s else torch.zeros_like(t)  # 0 * inf would be NaN

    def build_missed_error(self) -> RuntimeError:
        """Return the error for a forward that ran other operators than the inspected one."""
        return RuntimeError(
            f"the forward did not reach site {self.site.id!r}, expected the operators of the inspected run: inspect "
            "the model as it is called here (training or evaluation, with gradients, without, or in inference mode)."
        )


@contextmanager
def register_edit(model: nn.Module, sublayer: Sublayer | None, edit: Edit) -> Iterator[None]:
    """Register an edit of a sublayer's write while the block runs; of a model with several streams without its sublayer."""
    entries = _edits.setdefault(_unwrap(model), [])
    entry = (None if sublayer is None else _identify(sublayer), edit)
    entries.append(entry)
    try:
        yield
    finally:
        entries.remove(entry)


def is_edited(model: nn.Module) -> bool:
    """Return whether some write of a model is edited now."""
    return bool(_edits.get(_unwrap(model)))


def edit_write(model: nn.Module, sublayer: Sublayer, write: Tensor) -> Tensor:
    """Return the operand that a sublayer adds, after all edits of it."""
    for key, edit in _edits.get(_unwrap(model), ()):
        if key == _identify(sublayer):
            write = edit(write)
    return write


def _unwrap(model: nn.Module) -> nn.Module:
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def _identify(sublayer: Sublayer) -> Hashable:
    """Return a key of the operand that a sublayer adds, equal in all inspections of one model."""
    term = sublayer.write_path.terms[-1]
    assert term.op is not None
    return term.op.address, term.value.op and term.value.op.address, term.value.part, term.value.name
