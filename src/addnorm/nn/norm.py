"""The norms alone: `torch.nn.LayerNorm` and `torch.nn.RMSNorm` by this library's kernels, with the same parameters.

They are subclasses, so `isinstance`, state dicts and initialization are torch's own; what changes is the arithmetic of
`forward` and `backward`, which keep the contract of `addnorm.functional` (bfloat16 parameter gradients that are right, rows
that do not depend on the batch).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from addnorm import functional

NormKind = Literal["layer", "rms"]


class LayerNorm(torch.nn.LayerNorm):
    r"""`torch.nn.LayerNorm`: y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimensions, `(*, d)`.

    Example:
        >>> norm = addnorm.LayerNorm(3)
        >>> norm.load_state_dict(torch.nn.LayerNorm(3).state_dict())
        <All keys matched successfully>
        >>> norm(torch.tensor([1.5, 1.0, 4.5])).detach()
        tensor([-0.5392, -0.8627,  1.4018])
    """

    def forward(self, input: Tensor) -> Tensor:
        """y, in the dtype of `input`."""
        return functional.layer_norm(
            input,
            self.weight,
            self.bias,
            self.eps,
            normalized_shape=told_shape(self.normalized_shape, self.weight),
        )


class RMSNorm(torch.nn.RMSNorm):
    r"""`torch.nn.RMSNorm`: y = x / sqrt(mean(x^2) + eps) * weight over the last dimensions, `(*, d)`.

    Example:
        >>> addnorm.RMSNorm(3)(torch.tensor([1.5, 1.0, 4.5])).detach()
        tensor([0.5359, 0.3573, 1.6078])
    """

    def forward(self, x: Tensor) -> Tensor:
        """y, in the dtype of `x`."""
        return functional.rms_norm(
            x, self.weight, eps=self.eps, normalized_shape=told_shape(self.normalized_shape, self.weight)
        )


def told_shape(normalized_shape: tuple[int, ...], weight: Tensor | None) -> tuple[int, ...] | None:
    """What the functions need to be told: nothing (which costs nothing) where a weight of one dimension tells the width."""
    return None if len(normalized_shape) == 1 and weight is not None else normalized_shape
