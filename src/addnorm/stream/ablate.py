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
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from addnorm._util.arguments import check_choice, check_float
from addnorm.stream.dataflow.capture import Frames, Op, Value
from addnorm.stream.dataflow.observers import Watch, watched, without_checkpoints
from addnorm.stream.find.closure import relative
from addnorm.stream.find.inspection import Inspection, Site
from addnorm.stream.find.sites import Branch
from addnorm.stream.record.call_key import copied

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
    check_choice("mode", mode, ("zero", "mean"))
    with _changed(site, 0.0, _mean if mode == "mean" else None):
        yield


@contextmanager
def scale_write(site: Site, s: float) -> Iterator[None]:
    """While the block runs, s times what the sublayer writes is added; gradients are those of that function.

    Args:
        site: one of the `sites` that `addnorm.inspect` found.
        s: 1 changes nothing, 0 is `ablate(site)`.
    """
    with _changed(site, check_float("s", s), None):
        yield


@contextmanager
def _changed(site: Site, s: float, replace: Change | None) -> Iterator[None]:
    if not isinstance(site, Site):
        raise TypeError(f"site is {type(site).__name__}, expected one of the sites that addnorm.inspect found.")
    model = site.model
    if model is None:
        raise RuntimeError(f"the model of site {site.id!r} is gone, expected it to live as long as the block.")
    edit = _Edit(site, s, replace)

    def begin(frames: Frames, args: Any, kwargs: Any) -> Watch:
        return Watch(frames, {}, {edit.op.address: edit})

    def end(watch: Watch) -> None:
        if watch.completed and watch.otherwise(edit.op):
            raise edit.elsewhere()

    with without_checkpoints(), watched(model, begin, end):
        yield


class _Edit:
    """Exchanges what is written at the one operator that adds it."""

    def __init__(self, site: Site, s: float, replace: Change | None) -> None:
        branch: Branch = site.found[2]
        term = [branch.path.term, *branch.path.sums][-1]
        assert term.op is not None
        self.site, self.s, self.replace = site, s, replace
        self.op: Op = term.op
        self.write: Value = term.value
        self.fused = self.op.origin != self.op.name  # a step of a fused operator
        self.at = next((k for k, argument in enumerate(self.op.args) if argument is term.value), -1)
        self.written = False  # in place
        self._scaled: list[int] = []  # which of the operator's tensors make the write
        if not self.fused and self.at < 0:
            raise RuntimeError(
                f"{site.id!r} is added by {self.op.name} of a list, expected an operator whose operands are arguments."
            )

    def __call__(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The operator's arguments, with another write."""
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        parts = self._parts(func, names, given)
        self.written = func._schema.is_mutable
        tensors = [name for name in names if isinstance(given.get(name), Tensor)]
        self._scaled = [k for k, name in enumerate(tensors) if name in parts]
        with torch.no_grad():
            if not self.fused:
                self._check(args)
                return self._plain(args), kwargs
            if "branch" not in given:
                return args, {**kwargs, "alpha": self.s * given.get("alpha", 1)}
            bias = given.get("branch_bias")  # which belongs to what is written
            if bias is not None and self.replace is None:
                given["branch_bias"] = self._other(bias)
            given["branch"] = self._other(given["branch"])
            return (), given

    def made(self, out: Tensor) -> None:
        """torch's node adds the write itself: its gradient is made that of s * write."""
        base = out._base if self.written and out._is_view() else None
        if base is not None and 0 in self._scaled and base.numel() != out.numel() and base.requires_grad:
            raise RuntimeError(
                f"{self.site.id!r} is added into a part of a tensor, where its gradient is nowhere by itself."
            )
        node = (out if base is None else base).grad_fn  # in place through a view torch sets the node of the whole
        if node is not None:
            node.register_hook(self._gradients)

    def elsewhere(self) -> RuntimeError:
        """What to say of a forward that ran otherwise."""
        return RuntimeError(
            f"the forward did not come by site {self.site.id!r}, expected the operators of the run that was inspected: inspect "
            "the model as it is called here (training or evaluation, with gradients or without)."
        )

    def _parts(self, func: Any, names: list[str], given: dict[str, Any]) -> set[str]:
        """By which arguments a gradient goes to the write."""
        if "branch" in given:
            return {"branch", "branch_bias", "layer_scale", "row_scale"}
        if self.fused:
            if self.replace is not None:
                raise RuntimeError(
                    f"mode is 'mean', expected 'zero' here: {func} adds a product that is nowhere by itself."
                )
            return {*names[1:3]}
        return {*names[1:3]} if self.op.name == "addcmul" else {names[self.at]}

    def _plain(self, args: Any) -> Any:
        write = self._other(args[self.at])
        if self.written and self.at == 0:  # the sum is made in the memory of the write
            args[0].copy_(write)
            return args
        return (*args[: self.at], write, *args[self.at + 1 :])

    def _check(self, args: Any) -> None:
        """An operator of the same name may be another one."""
        found = args[self.at] if self.at < len(args) else None
        if not isinstance(found, Tensor) or found.dim() != len(self.write.shape):
            raise self.elsewhere()

    def _other(self, write: Tensor) -> Tensor:
        if self.replace is not None:
            return self.replace(write)
        return write * self.s if self.s else torch.zeros_like(write)  # 0 * inf is no zero

    def _gradients(self, given: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        return tuple(
            self._times(grad) if k in self._scaled and grad is not None else grad for k, grad in enumerate(given)
        )

    def _times(self, grad: Tensor) -> Tensor:
        return grad * self.s if self.s else torch.zeros_like(grad)


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
        loss: from the model's output to a number; the output's own `loss` by default, or the number that it begins with, if it
            has one.
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
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def run() -> tuple[float | None, Tensor]:
        given, named = copied(args, kwargs)  # each time the same: a cache without what the run before appended
        try:
            with torch.random.fork_rng([*devices]):  # the same dropout
                output = model(*given, **named)
        finally:
            for buffer, before in buffers:  # running statistics
                buffer.copy_(before)
        value = loss(output) if loss is not None else loss_of(output)
        return (None if value is None else float(value)), logits_of(output)

    done: list[Ablation] = []
    with torch.no_grad(), bar:
        whole_loss, whole = run()
        for site in bar.track(chosen, description=f"ablate {found.model}"):
            with ablate(site, mode):
                value, output = run()
            change = None if value is None or whole_loss is None else value - whole_loss
            done.append(Ablation(site, value, change, _kl(whole, output), relative(output, whole)))
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


def loss_of(output: Any) -> Tensor | None:
    """The loss that a model's output has: by its name, or a number that a tuple begins with."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if found is None and isinstance(output, tuple) and output and isinstance(output[0], Tensor) and not output[0].dim():
        found = output[0]
    return found if isinstance(found, Tensor) else None


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
        if isinstance(part, Tensor) and part.is_floating_point() and part.dim():  # no loss
            return part
    raise TypeError(f"the model returned {type(output).__name__}, expected a tensor, or an output with logits.")


def _kl(whole: Tensor, without: Tensor) -> float:
    p, q = (torch.log_softmax(t.double(), -1) for t in (whole, without))
    each = torch.where(p == float("-inf"), 0.0, p.exp() * (p - q))  # what cannot be chosen adds nothing
    return float(each.sum(-1).mean().clamp_min(0.0))
