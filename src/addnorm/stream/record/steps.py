"""Which step a forward of a recorded model belongs to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["StepCounter"]


class StepCounter:
    """Count the forwards of a model and group them into steps.

    If the first forward trains (training mode, gradients on), forwards that evaluate are no part of a step.

    Args:
        model: the recorded model.
        accumulate: number of forwards in a step; None means that a step ends when an optimizer of the model's parameters steps.

    Attributes:
        forwards: number of forwards so far, without skipped evaluations.
    """

    def __init__(self, model: nn.Module, accumulate: int | None) -> None:
        self.model, self.accumulate = model, accumulate
        self.forwards = 0
        self._trains = False  # the first forward
        self._optimizer_steps = 0
        self._ran_since_step = False
        self._hook = None if accumulate else register_optimizer_step_post_hook(self._end_step)

    def is_skipped_evaluation(self) -> bool:
        """Return whether the forward that begins evaluates between forwards that train."""
        trains = self.model.training and torch.is_grad_enabled()
        self._trains = self._trains if self.forwards else trains
        return self._trains and not trains

    def next(self) -> int:
        """Count a forward and return its step."""
        number = self.forwards
        self.forwards += 1
        self._ran_since_step = True
        return number // self.accumulate if self.accumulate else self._optimizer_steps

    def close(self) -> None:
        """Stop watching optimizers."""
        if self._hook is not None:
            self._hook.remove()

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count a step if the model ran since the last one, so that several optimizers of one model make one step."""
        own = {*map(id, self.model.parameters())}
        if self._ran_since_step and any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._optimizer_steps += 1
            self._ran_since_step = False
