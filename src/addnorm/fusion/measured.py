"""What a fused model takes, beside the model as it was: seconds, memory kept for backward, and the share of Add & Norm in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from addnorm.fusion import measure
from addnorm.fusion.measure import Times
from addnorm.fusion.rng_replay import exchanged
from addnorm.fusion.share import share

__all__ = ["Measured", "measured"]


@dataclass(frozen=True)
class Measured:
    """What a model takes before and after.

    Attributes:
        share: of Add & Norm in the time of the forward pass as it was, from 0 to 1: all that could be gained there.
        inference: the seconds of a call without gradients.
        training: of a call and the gradients of all parameters; None where none requires one.
        saved: the bytes that are kept for backward, before and after.
    """

    share: float
    inference: Times
    training: Times | None = None
    saved: tuple[int, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "share": self.share, "inference": self.inference.to_dict(),
            "training": self.training and self.training.to_dict(),
            "saved": self.saved and {"before": self.saved[0], "after": self.saved[1]},
        }  # fmt: skip


def measured(
    model: nn.Module, before: Callable[..., Any], after: Callable[..., Any], compile: Callable[..., Callable[..., Any]],
    args: Sequence[Any], kwargs: Mapping[str, Any], learns: bool,
) -> Measured:  # fmt: skip
    """Measures two callables that compute the same with the parameters of a model; `compile` compiles it with a backend."""
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad and learns}
    given = (args, kwargs)

    def timed(wanted: Mapping[str, Any]) -> Times:
        calls = (measure.step(call, args, kwargs, wanted) for call in (before, after))
        return measure.times(*calls, model=model, given=given)

    def called(call: Callable[..., Any]) -> Any:
        """With what no call before has filled, if it is a cache."""
        positional, named = exchanged((tuple(args), dict(kwargs)), lambda tensor: tensor)
        return call(*positional, **named)

    def kept(call: Callable[..., Any]) -> int:
        return measure.saved_bytes(lambda: called(call), model, given)

    contents = measure.Contents(model, given)
    with contents.again():
        part = share(compile, called)
    inference = timed({})
    if not learned:
        return Measured(part, inference)
    return Measured(part, inference, timed(learned), (kept(before), kept(after)))
