"""Edits of writes that are in effect: `ablate` registers them, `record` measures the edited writes, `decompose` refuses them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from addnorm.stream.find.sublayers import Sublayer

Edit = Callable[[Tensor], Tensor]

_edits: WeakKeyDictionary[nn.Module, list[tuple[Hashable, Edit]]] = WeakKeyDictionary()


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
