"""`ablate` and `scale_write`: remove or scale a sublayer's write while a block runs.

    with addnorm.ablate(site):          x' = N_out(a x)
    with addnorm.scale_write(site, s):  x' = N_out(a x + s * write)

The model is not changed: one argument of the residual add is replaced as it runs, and its gradient with it. Blocks nest in any
order, and the model is as before when a block ends, also after an error.
"""

from __future__ import annotations

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
from addnorm._util.torch_internals import has_transform
from addnorm.stream.dataflow.frames import WithoutFastPath, force_eager
from addnorm.stream.dataflow.observers import ObserverMode, disable_checkpoints, observe_forwards
from addnorm.stream.dataflow.replay import relative_error
from addnorm.stream.dataflow.snapshot import preserve_state
from addnorm.stream.edits import AddEdit, OutputEdit, WriteEdit, list_writes, register_edit
from addnorm.stream.find.equation_errors import check_repeated
from addnorm.stream.find.sites import Site
from addnorm.stream.inspection import Inspection
from addnorm.stream.outputs import find_logits, find_loss, measure_divergence, read_number
from addnorm.stream.program.result import ProgramSite

if TYPE_CHECKING:
    from rich.console import Console

Mode = Literal["zero", "mean"]


@contextmanager
def ablate(site: Site | ProgramSite, mode: Mode = "zero") -> Iterator[None]:
    """Remove a sublayer's write while the block runs, or replace it by its mean.

    Args:
        site: one of the `sites` of `addnorm.inspect`, or of its `program`. It selects the model.
        mode: "zero", or "mean": the mean of the write over all tokens of the batch.

    `addnorm.record` in the block measures what is added: the write is zero, or the mean.

    Raises:
        RuntimeError: at the end of a forward that did not reach the site, because it ran other operators than the inspected one;
            in a forward inside a transform of `torch.func`, or with forward-mode derivatives.

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
    edits: list[WriteEdit] = (
        [OutputEdit(site, s, takes_mean)]
        if isinstance(site, ProgramSite)
        else [AddEdit(site, write, s, takes_mean) for write in list_writes(site)]
    )

    def begin(mode: ObserverMode, args: Any, kwargs: Any) -> bool:
        if has_transform():
            raise RuntimeError(
                f"the model with an edit of {site.id!r} runs inside torch.func or forward-mode AD, expected neither: "
                "compute gradients with torch.autograd.grad."
            )
        for edit in edits:
            mode.editors[edit.op.address].append(edit)
        return True

    def end(mode: ObserverMode) -> None:
        if mode.completed and any(mode.is_uncertain(edit.op) for edit in edits):
            raise edits[0].build_missed_error()

    with disable_checkpoints(), observe_forwards(model, begin, end), register_edit(model, edits[0]):
        yield


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
        inspection: result of `addnorm.inspect`. Its model runs twice unchanged, which must give equal outputs, and once
            for each site.
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
        ValueError: the model's output is empty, as that of an empty batch.
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

    shown: Iterable[Site] = inspection.list_sites() if sites is None else tuple(sites)
    if progress is not False:
        from rich.console import Console
        from rich.progress import track

        console = progress if isinstance(progress, Console) else Console(stderr=True)
        shown = track(shown, f"ablate {inspection.model}", console=console, transient=True)
    effects: list[Ablation] = []
    with torch.no_grad():
        whole_loss, whole = run()
        if not whole.numel():
            raise ValueError(
                "the model's output has no numbers, expected some: call ablate_each with inputs that hold a token."
            )
        check_repeated(run()[1], whole)
        for site in shown:
            with ablate(site, mode):
                value, output = run()
            change = None if value is None or whole_loss is None else value - whole_loss
            effects.append(
                Ablation(site, value, change, measure_divergence(whole, output), relative_error(output, whole))
            )
    return Ablations(effects)
