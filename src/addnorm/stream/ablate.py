"""`ablate` and `scale_write`: a sublayer's write taken away, or made larger or smaller, while a block runs.

    with addnorm.ablate(site):          x' = N_out(a x)
    with addnorm.scale_write(site, s):  x' = N_out(a x + s * write)

Nothing in the model is changed: the argument of the one add is, as it runs, and its gradient with it. So blocks nest in any
order, and when one ends, by whatever way, the model is as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from addnorm.nn import checks
from addnorm.stream.flow import Address, Frames
from addnorm.stream.inspection import Inspection, Site
from addnorm.stream.sites import Branch
from addnorm.stream.watch import Watch, watched

if TYPE_CHECKING:  # rich is imported where something is printed
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["Ablation", "Ablations", "ablate", "ablate_each", "scale_write"]

Mode = Literal["zero", "mean"]
Change = Callable[[Tensor], Tensor]


@contextmanager
def ablate(site: Site, mode: Mode = "zero") -> Iterator[None]:
    """While the block runs the sublayer writes nothing, or always the same.

    Args:
        site: one of the `sites` that `addnorm.inspect` found; its model is the one that changes.
        mode: "zero", or "mean": of what it would have written, over all tokens of the batch.

    Raises:
        RuntimeError: at the end of a forward that did not come by the site: it ran otherwise than when it was inspected.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model, x = torch.nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 16)
        >>> found = addnorm.inspect(model, x)
        >>> before = model(x)
        >>> with addnorm.ablate(found.site("layers.1.self_attn")):
        ...     without = model(x)
        >>> bool((without - before).abs().max() > 0.01), torch.equal(model(x), before)
        (True, True)
    """
    checks.one_of("mode", mode, ("zero", "mean"))
    with _changed(site, 0.0, _mean if mode == "mean" else None):
        yield


@contextmanager
def scale_write(site: Site, s: float) -> Iterator[None]:
    """While the block runs, s times what the sublayer writes is added; gradients are those of that function.

    Args:
        site: one of the `sites` that `addnorm.inspect` found.
        s: 1 changes nothing, 0 is `ablate(site)`.
    """
    with _changed(site, checks.number("s", s), None):
        yield


@contextmanager
def _changed(site: Site, s: float, replace: Change | None) -> Iterator[None]:
    if not isinstance(site, Site):
        raise TypeError(f"site is {type(site).__name__}, expected one of the sites that addnorm.inspect found.")
    model = site.model
    if model is None:
        raise RuntimeError(f"the model of site {site.id!r} is gone, expected it to live as long as the block.")
    address, edit = _edit(site, s, replace)

    def begin(frames: Frames, args: Any, kwargs: Any) -> Watch:
        return Watch(frames, {}, {address: edit})

    def end(watch: Watch) -> None:
        if watch.completed and address not in watch.hit:
            raise RuntimeError(
                f"the forward did not come by site {site.id!r}, expected the operators of the run that was inspected: inspect the "
                "model as it is called here (training or evaluation, with gradients or without)."
            )

    with watched(model, begin, end):
        yield


def _edit(site: Site, s: float, replace: Change | None) -> tuple[Address, Any]:
    """At which operator what is exchanged."""
    branch: Branch = site.found[2]
    term = [branch.path.term, *branch.path.sums][-1]
    op = term.op
    assert op is not None
    if op.origin != op.name:  # a step of a fused operator
        return op.address, partial(_edit_fused, s, replace)
    at = next((k for k, argument in enumerate(op.args) if argument is term.value), None)
    if at is None:
        raise RuntimeError(
            f"{site.id!r} is added by {op.name} of a list, expected an operator whose operands are arguments."
        )
    return op.address, partial(_edit_plain, s, replace, at)


def _edit_plain(s: float, replace: Change | None, at: int, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The operand of an add."""
    return (*args[:at], _scaled(args[at], s, replace), *args[at + 1 :]), kwargs


def _edit_fused(s: float, replace: Change | None, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The branch of one of this library's operators, or a factor of the product that torch's addmm adds."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if "branch" not in given:
        if replace is not None:
            raise RuntimeError(
                f"mode is 'mean', expected 'zero' here: {func} adds a product that is nowhere by itself."
            )
        return args, {**kwargs, "alpha": s * given.get("alpha", 1)}
    bias = given.get("branch_bias")
    if bias is None:
        given["branch"] = _scaled(given["branch"], s, replace)
    else:  # which belongs to what is written
        given["branch"] = _scaled(given["branch"] + bias, s, replace) - bias
    return (), given


def _scaled(write: Tensor, s: float, replace: Change | None) -> Tensor:
    if write.requires_grad:
        write.register_hook(
            lambda grad: grad * s
        )  # torch's node adds the write itself; its gradient is that of s * write
    with torch.no_grad():
        return write * s if replace is None else replace(write)


def _mean(write: Tensor) -> Tensor:
    tokens = [*range(write.dim() - 1)]
    return write.mean(tokens, keepdim=True).expand_as(write).contiguous()


@dataclass(frozen=True)
class Ablation:
    """What the model loses without one sublayer.

    Attributes:
        site: the sublayer.
        loss: of the model without it; None where there is no loss.
        loss_change: that loss less the whole model's.
        kl: the mean over the tokens of KL(whole || without), in nats, of the softmax over the last dimension of the output.
        output_change: |without - whole| / |whole| of the output.
    """

    site: Site
    loss: float | None
    loss_change: float | None
    kl: float
    output_change: float


class Ablations(tuple[Ablation, ...]):
    """One for each site; prints as a table."""

    __slots__ = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("site", "sublayer", "loss change", "KL", "output change"):
            table.add_column(name, justify="left" if name in ("site", "sublayer") else "right", overflow="fold")
        for one in self:
            change = "" if one.loss_change is None else f"{one.loss_change:+.4f}"
            table.add_row(one.site.id, one.site.kind, change, f"{one.kl:.4f}", f"{one.output_change:.3f}")
        yield table

    def to_dict(self) -> list[dict[str, Any]]:
        """For JSON."""
        return [
            {"site": a.site.id, "kind": a.site.kind, "layer": a.site.layer, "loss": a.loss, "loss_change": a.loss_change,
             "kl": a.kl, "output_change": a.output_change} for a in self
        ]  # fmt: skip


def ablate_each(
    found: Inspection,
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    mode: Mode = "zero",
    sites: Sequence[Site] | None = None,
    progress: bool | Console = False,
    **kwargs: Any,
) -> Ablations:
    """Ablates every sublayer in turn, and says what that does to the loss and to the output.

    Args:
        found: what `addnorm.inspect` found; its model is run once for each site and once whole.
        args: what the model is called with.
        loss: from the model's output to a number; the output's own `loss` by default, if it has one.
        mode: as in `ablate`.
        sites: only these.
        progress: a progress bar on stderr, or on that console.
        kwargs: the keyword arguments of the call.

    Returns:
        `Ablations`, in the order of depth: a tuple that prints as a table.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model, x = torch.nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 16)
        >>> found = addnorm.ablate_each(addnorm.inspect(model, x), x, loss=lambda y: y.square().mean())
        >>> [one.site.kind for one in found]
        ['attention', 'feed-forward', 'attention', 'feed-forward']
    """
    model: nn.Module | None = found.target
    if model is None:
        raise RuntimeError("the model of this inspection is gone, expected it to live as long as what is done with it.")
    chosen = found.sites if sites is None else tuple(sites)
    bar = _bar(progress)
    rng = torch.get_rng_state()

    def run() -> tuple[float | None, Tensor]:
        torch.set_rng_state(rng)  # the same dropout each time
        output = model(*args, **kwargs)
        value = loss(output) if loss is not None else getattr(output, "loss", None)
        return (None if value is None else float(value)), logits_of(output)

    done: list[Ablation] = []
    with torch.no_grad(), bar:
        whole_loss, whole = run()
        for site in bar.track(chosen, description=f"ablate {found.model}"):
            with ablate(site, mode):
                value, output = run()
            change = None if value is None or whole_loss is None else value - whole_loss
            done.append(Ablation(site, value, change, _kl(whole, output), _relative(output, whole)))
    return Ablations(done)


def _bar(progress: bool | Console) -> Any:
    """A bar that goes when it is full; on stderr, unless a console was given."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = progress if isinstance(progress, Console) else Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=progress is False)


def logits_of(output: Any) -> Tensor:
    """The tensor that a model's output is about: its logits, its last hidden state, or its first tensor."""
    for name in ("logits", "last_hidden_state"):
        found = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    for part in parts:
        if isinstance(part, Tensor) and part.is_floating_point():
            return part
    raise TypeError(f"the model returned {type(output).__name__}, expected a tensor, or an output with logits.")


def _kl(whole: Tensor, without: Tensor) -> float:
    p, q = (torch.log_softmax(t.double(), -1) for t in (whole, without))
    return float((p.exp() * (p - q)).sum(-1).mean().clamp_min(0.0))


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).double().norm() / exact.double().norm().clamp_min(1e-30))
