"""The loss and the main tensor of a model's output, and how far two outputs are apart."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor


def read_number(value: Any) -> float:
    """Return the value of a loss function as a number."""
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    returned = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise TypeError(f"loss returned {returned}, expected a number: reduce it, as in loss(y).mean().")


def find_loss(output: Any) -> Tensor | None:
    """Return the loss in a model's output: its `loss`, the number that a tuple begins with, or an output that is a number.

    Only a single floating-point number is a loss. For a tensor of several losses, or an integer such as a count, return None.
    """
    if isinstance(output, Tensor):
        return output if not output.dim() and output.is_floating_point() else None
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output and isinstance(output[0], Tensor) and not output[0].dim():
        loss = output[0]
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point() else None


def find_logits(output: Any) -> Tensor:
    """Return the main tensor of a model's output: its logits, its last hidden state, or its first floating point tensor.

    Raises:
        TypeError: there is no such tensor.
    """
    for name in ("logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    for part in parts:
        if isinstance(part, Tensor) and part.is_floating_point() and part.dim():  # not the loss
            return part
    raise TypeError(f"the model returned {type(output).__name__}, expected a tensor, or an output with logits.")


def measure_divergence(whole: Tensor, without: Tensor) -> float | None:
    """Return KL(whole || without) in nats, the mean over the tokens, for the softmax over the last dimension.

    None if this dimension has one element, whose softmax is always 1.
    """
    if not whole.dim() or whole.shape[-1] == 1:
        return None
    p, q = (torch.log_softmax(t.double(), -1) for t in (whole, without))
    terms = torch.where(p == float("-inf"), 0.0, p.exp() * (p - q))  # a class of probability 0 contributes 0
    return float(terms.sum(-1).mean().clamp_min(0.0))
