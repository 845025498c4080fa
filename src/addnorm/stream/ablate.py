"""`ablate` and `scale_write`: remove or scale a sublayer's write while a block runs.

    with addnorm.ablate(site):          x' = N_out(a x)
    with addnorm.scale_write(site, s):  x' = N_out(a x + s * write)

The model is not changed: one argument of the residual add is replaced as it runs, and its gradient with it. Blocks nest in any
order, and the model is as before when a block ends, also after an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from addnorm._util.arguments import check_choice, check_float
from addnorm._util.blocks import Block, Column, Table
from addnorm._util.numbers import format_number
from addnorm._util.render import Rendered
from addnorm.ops.options import ADD_OPTIONS
from addnorm.stream.dataflow.arithmetic import strip_views
from addnorm.stream.dataflow.frames import Frames, WithoutFastPath, force_eager
from addnorm.stream.dataflow.graph import Value
from addnorm.stream.dataflow.observers import ObserverMode, disable_checkpoints, observe_forwards
from addnorm.stream.dataflow.operators import FAMILY, bind_arguments
from addnorm.stream.dataflow.replay import relative_error
from addnorm.stream.dataflow.snapshot import preserve_state
from addnorm.stream.dataflow.writes import find_written
from addnorm.stream.edits import WriteEdit, register_edit
from addnorm.stream.find.equation_errors import check_repeated
from addnorm.stream.find.inspection import Inspection, Site
from addnorm.stream.find.sublayers import Sublayer
from addnorm.stream.outputs import find_logits, find_loss, measure_divergence, read_number
from addnorm.stream.program.edits import ProgramWriteEdit
from addnorm.stream.program.result import ProgramSite
from addnorm.stream.write_terms import find_write_term

if TYPE_CHECKING:
    from rich.console import Console

# Arguments of this library's operators that make up the write, and options that are added to the branch.
WRITE_ARGUMENTS = {"branch", *(option.name for option in ADD_OPTIONS if option.gradient in ("branch", "z"))}
ADDITIVE_OPTIONS = tuple(option.name for option in ADD_OPTIONS if option.additive)

Mode = Literal["zero", "mean"]


@contextmanager
def ablate(site: Site | ProgramSite, mode: Mode = "zero") -> Iterator[None]:
    """Remove a sublayer's write while the block runs, or replace it by its mean.

    Args:
        site: one of the `sites` of `addnorm.inspect`, or of its `program`. It selects the model.
        mode: "zero", or "mean": the mean of the write over all tokens of the batch.

    `addnorm.record` in the block measures what is added: the write is zero, or the mean.

    Raises:
        RuntimeError: at the end of a forward that did not reach the site, because it ran other operators than the inspected one.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model, x = torch.nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 16)
        >>> inspection = addnorm.inspect(model, x)
        >>> before = model(x)
        >>> with addnorm.ablate(inspection.site("layers.1.self_attn")):
        ...     without = model(x)
        >>> bool((without - before).abs().max() > 0.01), torch.equal(model(x), before)
        (True, True)
    """
    check_choice("mode", mode, ("zero", "mean"))
    with _edit_write(site, 0.0, takes_mean=mode == "mean"):
        yield


@contextmanager
def scale_write(site: Site | ProgramSite, s: float) -> Iterator[None]:
    """Multiply a sublayer's write by s while the block runs. Gradients are those of the changed function.

    Args:
        site: one of the `sites` of `addnorm.inspect`, or of its `program`. It selects the model.
        s: the factor; 1 changes nothing, 0 is `ablate(site)`.

    Raises:
        RuntimeError: as `ablate`.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model, x = torch.nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 16)
        >>> with addnorm.scale_write(addnorm.inspect(model, x).sites[0], 0.5):
        ...     model(x).shape
        torch.Size([2, 5, 16])
    """
    with _edit_write(site, check_float("s", s)):
        yield


@contextmanager
def _edit_write(site: Site | ProgramSite, s: float, takes_mean: bool = False) -> Iterator[None]:
    if not isinstance(site, Site | ProgramSite):
        raise TypeError(f"site is {type(site).__name__}, expected one of the sites of addnorm.inspect.")
    model = site.model
    if model is None:
        raise RuntimeError(f"the model of site {site.id!r} was deleted, expected it to live as long as the block.")
    edit: WriteEdit
    if isinstance(site, ProgramSite):
        edit = ProgramWriteEdit(site, s, takes_mean)
    else:
        edit = _WriteEdit(site, s, _find_token_dims(site) if takes_mean else None)

    def begin(frames: Frames, args: Any, kwargs: Any) -> ObserverMode:
        return ObserverMode(frames, {}, {edit.op.address: edit})

    def end(mode: ObserverMode) -> None:
        if mode.completed and mode.is_uncertain(edit.op):
            raise edit.build_missed_error()

    with (
        disable_checkpoints(),
        observe_forwards(model, begin, end),
        register_edit(model, getattr(site, "sublayer", None), edit.change_write),
    ):
        yield


class _WriteEdit(WriteEdit):
    """Replacement of the write at the operator that adds it."""

    def __init__(self, site: Site, s: float, dims: list[int] | None) -> None:
        sublayer: Sublayer = site.sublayer
        term = sublayer.write_path.terms[-1]
        assert term.op is not None
        super().__init__(site, term.op, s, dims)
        self.write: Value = term.value
        self.fused = self.op.origin != self.op.name  # the add is a step of a fused operator
        stacked = self.op.args[0].op if self.op.name in ("sum", "mean") and isinstance(self.op.args[0], Value) else None
        self.op = stacked or self.op  # the sum of a stack: the operator that stacks
        arguments = self.op.args[0] if stacked else self.op.args
        self.index = next((k for k, argument in enumerate(arguments) if argument is term.value), -1)
        self.stacked = stacked is not None
        self.in_place = False
        self._scaled: list[int] = []  # indices of the operator's tensors that make up the write
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
        parts = self._write_arguments(func, names, arguments)
        self.in_place = func._schema.is_mutable
        tensors = [name for name in names if isinstance(arguments.get(name), Tensor)]
        self._scaled = [self.index] if self.stacked else [k for k, name in enumerate(tensors) if name in parts]
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
        """Change the gradient of the operator's node to that of s * write."""
        if self.argument and out.grad_fn is not None:
            raise RuntimeError(
                f"{self.site.id!r} is written in {self.op.origin}, whose gradient is not that of the changed function."
            )
        base = out._base if self.in_place and out._is_view() else None
        if base is not None and 0 in self._scaled and base.numel() != out.numel() and base.requires_grad:
            raise RuntimeError(
                f"{self.site.id!r} is added into a part of a tensor, where its gradient is not a separate tensor."
            )
        node = (out if base is None else base).grad_fn  # in place through a view torch sets the node of the base
        if node is not None:
            node.register_hook(self._change_gradients)

    def _write_arguments(self, func: Any, names: list[str], arguments: dict[str, Any]) -> set[str]:
        """Return the names of the arguments that make up the write."""
        if "branch" in arguments:
            return WRITE_ARGUMENTS
        if self.fused and self.dims is not None:
            raise RuntimeError(f"mode is 'mean', expected 'zero' here: {func} adds a product that is never stored.")
        return {*names[1:3]} if self.fused or self.op.name == "addcmul" else {names[self.index]}

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

    def _change_gradients(self, grads: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        return tuple(
            self.scale(grad) if k in self._scaled and grad is not None else grad for k, grad in enumerate(grads)
        )


def _find_token_dims(site: Site) -> list[int]:
    """Return the dimensions of a write over which its mean is that of all tokens of the batch."""
    layout = site.parent.layout.of_write(site.sublayer)
    if layout is None:
        raise RuntimeError(
            f"mode is 'mean', expected 'zero' for {site.id!r}: the dimension of the features of its write is not known."
        )
    if any(math.prod(scale.shape) not in (1, site.parent.width) for scale in find_write_term(site.sublayer).scales):
        raise RuntimeError(
            f"mode is 'mean', expected 'zero' for {site.id!r}: the add multiplies its write by another factor for each token."
        )
    return layout.others


@dataclass(frozen=True)
class Ablation:
    """Effect of removing one sublayer.

    Attributes:
        site: the sublayer, a `Site` or a `ProgramSite`.
        loss: loss of the model without it; None if there is no loss.
        loss_change: that loss minus the loss of the whole model.
        kl: mean over the tokens of KL(whole || without) in nats, of the softmax over the last dimension of the output;
            None if that dimension has one element.
        output_change: |without - whole| / |whole| of the output.
    """

    site: Any
    loss: float | None
    loss_change: float | None
    kl: float | None
    output_change: float


class Ablations(Rendered, tuple[Ablation, ...]):
    """Effect of removing each sublayer, in order of depth. It prints as a table."""

    __slots__ = ()

    def _blocks(self) -> Iterator[Block]:
        shown = [name for name in EFFECTS if name == "output_change" or any(getattr(a, name) is not None for a in self)]
        headings = [Column(EFFECTS[name], "right") for name in shown]
        rows = [
            [ablation.site.id, ablation.site.kind, *(_format_effect(name, getattr(ablation, name)) for name in shown)]
            for ablation in self
        ]
        yield Table([Column("site", fold=True), Column("sublayer"), *headings], rows)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return one dict for each sublayer, as JSON types."""
        return [
            {"site": a.site.id, "kind": a.site.kind, "layer": a.site.layer, "loss": a.loss}
            | {name: getattr(a, name) for name in EFFECTS}
            for a in self
        ]


EFFECTS = {
    "loss_change": "loss change",
    "kl": "KL",
    "output_change": "output change",
}  # attributes, with their headings


def _format_effect(name: str, value: float | None) -> str:
    sign = "+" if name == "loss_change" and value is not None and value > 0 else ""
    return sign + format_number(value)


def ablate_each(
    inspection: Inspection,
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    mode: Mode = "zero",
    sites: Sequence[Site] | None = None,
    progress: bool | Console = False,
    **kwargs: Any,
) -> Ablations:
    """Ablate each sublayer in turn and measure the change of the loss and of the output.

    Args:
        inspection: result of `addnorm.inspect`. Its model runs twice whole, which must give the same, and once for each site.
        args: positional arguments of the model's forward.
        loss: function from the model's output to a number. By default the output's own `loss`, the number that it begins
            with, or the output if that is a number; without any of these there is no loss.
        mode: as in `ablate`.
        sites: only these sites; all by default.
        progress: show a progress bar on stderr, or on that console.
        kwargs: keyword arguments of the model's forward.

    Returns:
        `Ablations`, in order of depth: a tuple that prints as a table.

    Raises:
        RuntimeError: the model was deleted, or returns another output when it is called again, or as `ablate`.
        TypeError: `inspection` or `loss` is another object, `loss` returns no number, or the model's output has no tensor.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model, x = torch.nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 16)
        >>> effects = addnorm.ablate_each(addnorm.inspect(model, x), x, loss=lambda y: y.abs().mean())
        >>> [one.site.kind for one in effects]
        ['attention', 'feed-forward', 'attention', 'feed-forward']
    """
    if not isinstance(inspection, Inspection):
        raise TypeError(
            f"inspection is {type(inspection).__name__}, expected the result of addnorm.inspect: "
            "addnorm.ablate_each(addnorm.inspect(model, x), x)."
        )
    if loss is not None and not callable(loss):
        raise TypeError(f"loss is {type(loss).__name__}, expected a function from the model's output to a number.")
    model: nn.Module | None = inspection.target
    if model is None:
        raise RuntimeError(
            "the model of this inspection was deleted, expected it to live as long as the inspection is used."
        )
    chosen = inspection.list_sites() if sites is None else tuple(sites)
    inner = getattr(model, "_orig_mod", model)

    def run() -> tuple[float | None, Tensor]:
        with (
            preserve_state(inner, (args, kwargs)) as before,
            force_eager(),
            WithoutFastPath(),
        ):  # as before, dropout too
            output = inner(*args, **kwargs)
            value = read_number(loss(output)) if loss is not None else find_loss(output)
            return (None if value is None else float(value)), before.copy_aliases(find_logits(output))

    effects: list[Ablation] = []
    with torch.no_grad():
        whole_loss, whole = run()
        check_repeated(run()[1], whole)
        for site in _track(chosen, f"ablate {inspection.model}", progress):
            with ablate(site, mode):
                value, output = run()
            change = None if value is None or whole_loss is None else value - whole_loss
            effects.append(
                Ablation(site, value, change, measure_divergence(whole, output), relative_error(output, whole))
            )
    return Ablations(effects)


def _track(sites: Sequence[Site], description: str, progress: bool | Console) -> Iterable[Site]:
    """Return the sites, whose loop shows a progress bar on stderr or a console unless `progress` is False."""
    if progress is False:
        return sites
    from rich.console import Console
    from rich.progress import track

    console = progress if isinstance(progress, Console) else Console(stderr=True)
    return track(sites, description, console=console, transient=True)
