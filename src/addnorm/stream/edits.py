"""Edits of writes: at the add of a stream, or at the operator that computes the write to several streams.

`ablate` registers edits, `record` measures the edited writes, `decompose` refuses them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from addnorm.ops.options import ADD_OPTIONS
from addnorm.stream.dataflow.arithmetic import strip_views
from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.dataflow.observers import Editor, find_observable
from addnorm.stream.dataflow.operators import FAMILY, bind_arguments, find_written
from addnorm.stream.find.sites import Site
from addnorm.stream.find.sublayers import Sublayer, find_sublayers
from addnorm.stream.program.result import ProgramSite
from addnorm.stream.write_terms import find_write_term

# Arguments of this library's operators that make up the write, and options that are added to the branch.
WRITE_ARGUMENTS = {"branch", *(option.name for option in ADD_OPTIONS if option.gradient in ("branch", "z"))}
ADDITIVE_OPTIONS = tuple(option.name for option in ADD_OPTIONS if option.additive)
SAVED = (
    "_saved_result",
    "_saved_result0",
    "_saved_output",
)  # outputs that the node of an operator keeps for its backward

_edits: WeakKeyDictionary[nn.Module, list[WriteEdit]] = WeakKeyDictionary()


@dataclass(eq=False)
class WriteEdit(Editor):
    """Editor that multiplies a sublayer's write by a number, or replaces it. Subclasses change an argument or an output.

    Args:
        site: the sublayer.
        op: the operator that is changed.
        s: the factor of the write.
        dims: dimensions over which the write is replaced by its mean; None to multiply it by `s` instead.
    """

    site: Any
    op: Op
    s: float
    dims: list[int] | None

    def change_write(self, write: Tensor) -> Tensor:
        """Return what is added in place of a write."""
        if self.dims is None:
            return self.scale(write)
        return write.mean(self.dims, keepdim=True).expand_as(write).contiguous() if self.dims else write

    def scale(self, t: Tensor) -> Tensor:
        """Return `t` times the factor."""
        return t * self.s if self.s else torch.zeros_like(t)  # 0 * inf would be NaN

    def build_missed_error(self) -> RuntimeError:
        """Return the error for a forward that ran other operators than the inspected one."""
        return RuntimeError(
            f"the forward did not reach site {self.site.id!r}, expected the operators of the inspected run: inspect "
            "the model as it is called here (training or evaluation, with gradients, without, or in inference mode)."
        )


class AddEdit(WriteEdit):
    """Editor of the argument of a residual add that is the write.

    Args:
        site: the sublayer.
        sublayer: one of `list_writes(site)`.
        s: the factor of the write.
        takes_mean: replace the write by its mean over all tokens instead.
    """

    def __init__(self, site: Site, sublayer: Sublayer, s: float, takes_mean: bool) -> None:
        term = sublayer.write_path.terms[-1]
        assert term.op is not None
        super().__init__(site, term.op, s, _find_token_dims(site, sublayer) if takes_mean else None)
        self.key = _identify(sublayer)
        self.write: Value = term.value
        self.fused = self.op.origin != self.op.name  # the add is a step of a fused operator
        stacked = self.op.args[0].op if self.op.name in ("sum", "mean") and isinstance(self.op.args[0], Value) else None
        self.op = stacked or self.op  # the sum of a stack: the operator that stacks
        arguments = self.op.args[0] if stacked else self.op.args
        self.index = next((k for k, argument in enumerate(arguments) if argument is term.value), -1)
        self.stacked = stacked is not None
        self.in_place = False
        self._scaled: list[int] = []  # indices of the operator's tensors that make up the write
        self._factors: list[int] = []  # indices of tensors that multiply the averaged write
        self._shape: torch.Size | None = None  # of the write of which a mean is taken
        self._edge: tuple[Any, int] | None = (
            None  # of the write in the graph, if the add is inside a torch.autograd.Function
        )
        self.argument = ""  # the name of the write among the arguments of an operator of another library
        if (whole := self.op.whole) is not None and "::" in whole.name and not whole.name.startswith(FAMILY):
            given, source = bind_arguments(whole.func, whole.args, whole.kwargs), strip_views(self.write)
            own = [(n, v) for n, v in given.items() if isinstance(v, Value) and strip_views(v) is source]
            self.argument = next((n for n, v in own if sum(user.whole is whole for user in v.users) == 1), "")
            if not self.argument:
                raise RuntimeError(
                    f"{site.id!r} is no argument of {whole.name} that only its add reads, expected such an argument."
                )
        if not self.fused and self.index < 0:
            raise RuntimeError(
                f"{site.id!r} is not an operand of {self.op.name}, expected an operator whose operands are arguments."
            )

    def __call__(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the operator's arguments with the changed write."""
        names = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if self.argument:
            write = arguments[self.argument]
            with torch.no_grad():
                changed = self.change_write(write)
                if any(t is write for t in find_written(func, args, kwargs)):
                    write.copy_(changed)
                    changed = write
            return (), {**arguments, self.argument: changed}
        if "branch" in arguments:
            parts = WRITE_ARGUMENTS
        elif self.fused and self.dims is not None:
            raise RuntimeError(f"mode is 'mean', expected 'zero' here: {func} adds a product that is never stored.")
        else:
            parts = {*names[1:3]} if self.fused or self.op.name == "addcmul" else {names[self.index]}
        self.in_place = func._schema.is_mutable
        tensors = [name for name in names if isinstance(arguments.get(name), Tensor)]
        self._scaled = [self.index] if self.stacked else [k for k, name in enumerate(tensors) if name in parts]
        if self.dims is not None and not self.stacked:
            averaged = "branch" if "branch" in arguments else names[self.index]
            self._factors = [k for k in self._scaled if tensors[k] not in (averaged, *ADDITIVE_OPTIONS)]
            self._scaled = [k for k in self._scaled if tensors[k] == averaged]
            self._shape = getattr(arguments.get(averaged), "shape", None)
        # This library's own nodes are torch.autograd.Functions in wheels, with the tensors of the operator in its order.
        is_other = self.index >= 0 and not self.stacked and not self.fused
        write = arguments.get(names[self.index]) if is_other else None
        if isinstance(write, Tensor) and write.grad_fn is not None and not torch.is_grad_enabled():
            self._edge = write.grad_fn, write.output_nr
        with torch.no_grad():
            if not self.fused:
                return self._change_argument(args), kwargs
            if "branch" not in arguments:
                return args, {**kwargs, "alpha": self.s * arguments.get("alpha", 1)}
            for name in ADDITIVE_OPTIONS:  # a part of the write
                if arguments.get(name) is not None and self.dims is None:
                    arguments[name] = self.change_write(arguments[name])
            arguments["branch"] = self.change_write(arguments["branch"])
            return (), arguments

    def on_output(self, out: Tensor) -> None:
        """Change the gradient of the operator's node to that of the changed write."""
        if self.argument and out.grad_fn is not None:
            raise RuntimeError(
                f"{self.site.id!r} is written in {self.op.origin}, whose gradient is not that of the changed function."
            )
        if self._weight_is_differentiated(out):
            raise RuntimeError(
                f"{self.site.id!r} is written by lerp, expected a weight without gradient: write x + g * (f(x) - x), or run the "
                "model under torch.no_grad()."
            )
        base = out._base if self.in_place and out._is_view() else None
        is_moved = self.dims is not None and base is not None and not (base.is_contiguous() and out.is_contiguous())
        is_part = base is not None and base.numel() != out.numel()
        if base is not None and 0 in self._scaled and base.requires_grad and (is_part or is_moved):
            raise RuntimeError(
                f"{self.site.id!r} is added into a part or a view of a tensor, where its gradient is not a separate tensor."
            )
        node = (out if base is None else base).grad_fn  # in place through a view torch sets the node of the base
        edges, (own, self._edge) = () if node is None else node.next_functions, (self._edge, None)
        if own is not None and [k for k, edge in enumerate(edges) if edge == own] != self._scaled:
            raise RuntimeError(
                f"{self.site.id!r} is written inside a torch.autograd.Function, whose gradient is not that of the changed "
                "function: run the model under torch.no_grad()."
            )
        if node is None:
            return
        scaled, factors, shape = self._scaled, self._factors, self._shape  # the backward may follow later forwards

        def change_gradients(grads: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
            """Apply `change_write`, which is its own adjoint, to the gradients of the write (in place: of its base)."""
            if any(k in factors and grad is not None for k, grad in enumerate(grads)):
                raise RuntimeError(
                    f"mode is 'mean', expected 'zero' for a gradient of the factor of {self.site.id!r}: autograd holds the "
                    "unchanged write."
                )
            return tuple(
                self.change_write(grad.reshape(shape or grad.shape)).reshape(grad.shape)
                if k in scaled and grad is not None
                else grad
                for k, grad in enumerate(grads)
            )

        node.register_hook(change_gradients)

    def _weight_is_differentiated(self, out: Tensor) -> bool:
        """Return whether a weight of lerp has a gradient: it depends on the write, and autograd holds the unchanged write."""
        edges = out.grad_fn.next_functions if self.op.name == "lerp" and out.grad_fn is not None else ()
        return len(edges) > 2 and edges[2][0] is not None

    def _change_argument(self, args: Any) -> Any:
        """Return the arguments with the changed write, after a check that the operator is the inspected one."""
        operands = [*(args[0] if self.stacked else args)]
        write = operands[self.index] if self.index < len(operands) else None
        if not isinstance(write, Tensor) or write.dim() != len(self.write.shape):  # another one of the same name
            raise self.build_missed_error()
        operands[self.index] = self.change_write(write)
        if self.in_place and self.index == 0:  # the sum is written over the write
            write.copy_(operands[0])
            return args
        return (operands, *args[1:]) if self.stacked else tuple(operands)


def list_writes(site: Site) -> list[Sublayer]:
    """Return the sublayer of a site, and the same sublayer where it writes to the second stream of ResiDual."""
    own, chain = site.sublayer, site.parent.chain
    others = [sublayer for add in chain.dual_adds for sublayer in find_sublayers(add, own.place)]
    return [own, *(one for one in others if one.write_path.source is own.write_path.source)]


def _find_token_dims(site: Site, sublayer: Sublayer) -> list[int]:
    """Return the dimensions of a write over which its mean is that of all tokens of the batch."""
    layout = site.parent.layout.of_write(sublayer)
    if layout is None:
        raise RuntimeError(
            f"mode is 'mean', expected 'zero' for {site.id!r}: the dimension of the features of its write is not known."
        )
    if any(math.prod(scale.shape) not in (1, site.parent.width) for scale in find_write_term(sublayer).scales):
        raise RuntimeError(
            f"mode is 'mean', expected 'zero' for {site.id!r}: the add multiplies its write by another factor for each token."
        )
    return layout.others


class OutputEdit(WriteEdit):
    """Editor of the operator whose output is what a sublayer adds: after its norm, before it is multiplied by B.

    Args:
        site: the sublayer.
        s: the factor of the write.
        takes_mean: replace the write by its mean over all tokens instead.
    """

    def __init__(self, site: ProgramSite, s: float, takes_mean: bool) -> None:
        columns = [column for part in site.sums for column in part.columns if column.source is site.write.value]
        values = {strip_views(column.operand) for column in columns}
        value = next(iter(values), None)
        by_add = value is not None and value.part == "dropped"
        if (
            value is not None and value.op is not None and by_add
        ):  # the add draws the dropout: change the output before it
            value = strip_views(value.op.args[0])
        if len(values) != 1 or value is None or value.op is None or value.part not in (0, "y"):
            raise RuntimeError(
                f"{site.id!r} writes a value that no operator of its own computes, expected one: replace its module."
            )
        if takes_mean and (by_add or value.shape[-1:] != site.write.value.shape[-1:]):
            reason = (
                "its dropout is drawn by the add"
                if by_add
                else "the dimension of the features of its write is not known"
            )
            raise RuntimeError(f"mode is 'mean', expected 'zero' for {site.id!r}: {reason}.")
        value = find_observable(value)
        assert value.op is not None
        super().__init__(site, value.op, s, [*range(len(value.shape) - 1)] if takes_mean else None)

    def change_output(self, out: Tensor) -> None:
        """Change the write in place, so that all blocks and hooks have the same tensor."""
        with torch.no_grad():
            out.copy_(self.change_write(out))

    def on_output(self, out: Tensor) -> None:
        """Register `change_write` on the gradient of the write: this function is its own adjoint."""
        if not out.requires_grad:
            return
        is_exact = self.dims is None and (self.s == 0 or (self.s > 0 and self.op.name == "relu"))
        if not is_exact and any(hasattr(out.grad_fn, name) for name in SAVED):
            raise RuntimeError(
                f"{self.site.id!r} is written by {self.op.name}, whose gradient is computed from its output, expected "
                "ablate(site), or a run under torch.no_grad()."
            )
        out.register_hook(self.change_write)


# Edits in effect.


@contextmanager
def register_edit(model: nn.Module, edit: WriteEdit) -> Iterator[None]:
    """Register an edit of a sublayer's write while the block runs."""
    edits = _edits.setdefault(getattr(model, "_orig_mod", model), [])
    edits.append(edit)
    try:
        yield
    finally:
        edits.remove(edit)


def list_edits(model: nn.Module) -> list[WriteEdit]:
    """Return the edits of a model that are in effect now."""
    return [*_edits.get(getattr(model, "_orig_mod", model), ())]


def edit_write(model: nn.Module, sublayer: Sublayer, write: Tensor) -> Tensor:
    """Return the operand that a sublayer adds, after all edits of it."""
    for edit in list_edits(model):
        if isinstance(edit, AddEdit) and edit.key == _identify(sublayer):
            write = edit.change_write(write)
    return write


def _identify(sublayer: Sublayer) -> Hashable:
    """Return a key of the operand that a sublayer adds, equal in all inspections of one model."""
    term = sublayer.write_path.terms[-1]
    assert term.op is not None
    return term.op.address, term.value.op and term.value.op.address, term.value.part, term.value.name
