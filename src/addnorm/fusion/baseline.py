"""The model as it was: what it computes, and what it is off from a copy of itself in float64.

What it is off at one element may by luck be little. So it can be run with its parameters rounded otherwise, or moved a little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.fusion.measure import Contents, Ran, run
from addnorm.fusion.rng_replay import same_noise, widened
from addnorm.fusion.tolerance import errors_of, unlike

__all__ = ["Eager", "Errors"]

Errors = tuple[dict[str, float], dict[str, float]]  # of outputs, and of gradients
MOVED = 1e-2


class Eager:
    """A model with its inputs.

    Attributes:
        modes: of which parameters gradients are taken: of none in the first run, of those that learn in the second.
        without: why there is no second run, where the model raises.
        eps: the distance of two numbers next to 1 in which it computes.
    """

    def __init__(
        self, model: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any, gradients: bool | None
    ) -> None:
        self.model, self.call, self.args, self.kwargs = model, call, args, kwargs
        self.contents = Contents(model, (args, kwargs))
        self.dtype, self.eps = _precision(model)
        self.modes: list[Mapping[str, Tensor]] = [{}]
        self.without: str | None = None
        self.ran = [self._run(call, {})]
        learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if learned and gradients is not False:
            try:
                self.ran.append(self._run(call, learned))
                self.modes.append(learned)
            except Exception as error:  # some models have gradients in training mode only
                if gradients:
                    raise
                self.without = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"

    def runs(self, call: Callable[..., Any] | None = None, contents: Contents | None = None) -> list[Ran]:
        """What the model computes in each mode, or another callable."""
        return [self._run(call or self.call, wanted, contents) for wanted in self.modes]

    def _run(self, call: Callable[..., Any], wanted: Mapping[str, Tensor], contents: Contents | None = None) -> Ran:
        contents = contents or self.contents
        with contents.again():
            outputs, found = run(call, self.args, self.kwargs, wanted)
            return Ran(contents.apart(outputs), found)

    def errors(self, ran: Sequence[Ran], contents: Contents | None = None) -> tuple[list[Errors], str]:
        """What these runs are off, and from what, or why nobody knows."""
        truth, oracle = self._in_float64(contents or self.contents)
        wide = truth or Ran({}, {})
        found = [(errors_of(one.outputs, wide.outputs), errors_of(one.gradients, wide.gradients)) for one in ran]
        if unlike(ran[-1].outputs, found[-1][0], self.eps):
            return [({}, {}) for _ in ran], "the float64 run computes something else: other random numbers?"
        return found, oracle

    def moved(self, seed: int) -> list[Errors]:
        """What it is off with its parameters moved, and other elements dropped."""
        with self.contents.again():
            torch.manual_seed(seed)
            self._change(MOVED, None)
            contents = Contents(self.model, (self.args, self.kwargs))
            return self.errors(self.runs(contents=contents), contents)[0]

    def sways(self, seeds: int) -> list[Errors]:
        """What it is off from itself with its parameters rounded otherwise.

        A gradient through a saturated softmax has few digits left, or none. By float64 alone that looks like another expert.
        """
        found: list[Errors] = [({}, {}) for _ in self.modes]
        for seed in range(seeds):
            with self.contents.again():
                self._change(self.eps, torch.Generator().manual_seed(seed))
                others = self.runs(contents=Contents(self.model, (self.args, self.kwargs)))
            for kept, one, other in zip(found, self.ran, others, strict=True):
                for errors, before, after in zip(kept, one, other, strict=True):
                    new = errors_of(before, after)
                    errors.update({name: max(value, errors.get(name, 0.0)) for name, value in new.items()})
        return found

    def _change(self, share: float, generator: torch.Generator | None) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                if p.is_floating_point():
                    p.mul_(1 + share * torch.randn(p.shape, generator=generator).to(p.device, p.dtype))

    def _in_float64(self, contents: Contents) -> tuple[Ran | None, str]:
        """What a copy of the model computes in float64 and what that is called, or why there is none."""
        reason = "the model itself is in float64"
        for wide in (torch.float64, torch.float32):
            if torch.finfo(wide).eps >= torch.finfo(self.dtype).eps:
                break
            try:
                with contents.again(), ExitStack() as stack:
                    for device in {"cpu", *(t.device.type for t in contents.tensors)}:
                        stack.enter_context(torch.autocast(device, enabled=False))
                    twin, (args64, kwargs64) = widened(self.model, (self.args, self.kwargs), contents.tensors, wide)
                    wanted = {name: p for name, p in twin.named_parameters() if p.requires_grad and len(self.modes) > 1}
                    with same_noise(self.dtype, wide):
                        return run(twin, args64, kwargs64, wanted), str(wide).removeprefix("torch.")
            except Exception as error:  # what cannot be copied, or has no float64, fails in its own way
                first = next(iter(str(error).splitlines()), "")
                reason = f"no float64 run: {type(error).__name__}: {first}" if wide == torch.float64 else reason
        return None, reason


def _precision(model: nn.Module) -> tuple[torch.dtype, float]:
    """The dtype in which most of a model is, and the distance of two numbers next to 1 in which it computes."""
    count: Counter[torch.dtype] = Counter()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            count[tensor.dtype] += tensor.numel()
    dtype = count.most_common(1)[0][0] if count else torch.get_default_dtype()
    devices = {p.device.type for p in model.parameters()} or {"cpu"}
    casts = [torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)]
    return dtype, max(torch.finfo(one).eps for one in (dtype, *casts))
