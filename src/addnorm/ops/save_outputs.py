"""Saving y instead of z for backward: it takes less memory, and the error of the gradients has a bound.

z is kept for backward alone, while y is often kept anyway: the linear layer that reads y saves it too. The normalized value
x_hat, from which backward computes the gradients, follows from either: x_hat = (z - mean) * rstd = (y - bias) / weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from addnorm import reference
from addnorm._util.torch_internals import FakeTensor, is_tracing
from addnorm.ops.dtensor import is_dtensor

SMALLEST_WEIGHT = 2.0**-10  # below, y may be subnormal in float16
LARGEST_BIAS = 16.0  # times |weight|: above, y keeps less than a sixteenth of x_hat's precision

active: ContextVar[bool] = ContextVar("save_outputs", default=False)


@contextmanager
def save_outputs() -> Iterator[None]:
    r"""Make every Add & Norm that is called in this context keep y instead of z for backward.

    By default backward needs z, the sum, which nothing else keeps. In this context it computes z from the output y, which the
    next linear layer keeps as well: of a 12-layer encoder's training step that is a tenth of the memory (docs/performance.md).
    It works for the functions, modules and stacks, with all options.

    The normalized value x_hat = (y - bias) / weight that the gradients are made of then has an error, since y was rounded:

        |x_hat' - x_hat| <= 2 u (|x_hat| + |bias / weight|) + 8 u_32 (|x_hat| + |mean| * rstd)

    with u = 2^-24 for y in float32, 2^-11 in float16, 2^-8 in bfloat16, and u_32 = 2^-24. In float64 both are 2^-53; a float64 y
    of a z in another dtype has u = 2^-24. A float16 y may be subnormal: add 2^-24 / |weight + weight_offset|. `casting="llama"`
    and "t5" add 2 u_c |x_hat|, with u_c the rounding of the dtype that they round to. y and z do not change.

    Limits: no second derivatives; y must be finite and must not be changed in place; the norm without an add keeps its input as
    usual; the streams of `add_norm_streams` are kept as usual; compiled and traced graphs keep what the compiler chooses. Enter
    the context outside of compiled code. With torch.utils.checkpoint, enter it inside the function that is recomputed: torch
    raises a CheckpointError otherwise. `ResidualStack(checkpoint=True)` recomputes in the context of its forward. Each call
    checks its weight and bias; on a GPU, a weight that is too small is reported later, by an assertion of the device.

    Raises:
        ValueError: in a call in this context: an element of |weight + weight_offset| is below 2^-10, or |bias| is more than 16
            times as large: then y does not determine x_hat well enough.

    Source: apex's option `memory_efficient` (apex/normalization/fused_layer_norm.py), which clamps such a weight instead.

    Example:
        >>> x, branch = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
        >>> with addnorm.save_outputs():
        ...     y = addnorm.add_layer_norm(x, branch)
        >>> y.sum().backward()
    """
    with _Setting(True):
        yield


class _Setting(AbstractContextManager[None]):
    """Context in which calls keep y for backward if `active`, else z.

    It can be entered again: each backward of a graph that is kept (`retain_graph`, `create_graph`) recomputes its checkpoints.
    """

    def __init__(self, active: bool) -> None:
        self.active = active
        self.before: list[bool] = []

    def __enter__(self) -> None:
        self.before.append(active.get())
        active.set(self.active)

    def __exit__(self, *_: object) -> None:
        active.set(self.before.pop())  # a token could not be reset by a generator that is finished in another context


def is_active() -> bool:
    """Return whether a call keeps y: in the context, and not in a graph that is being compiled or traced."""
    return active.get() and not torch.compiler.is_compiling() and not is_tracing()


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a checkpoint's forward and of its recomputation, which must keep the same tensors."""
    return nullcontext(), _Setting(active.get())


def mark_statistics(stats: Tensor) -> Tensor:
    """Add a dimension to statistics that are saved with y, which tells them from statistics that are saved with z.

    A checkpoint that recomputes outside of the context would replace y by z. torch compares the shapes of saved tensors, and this
    dimension makes it raise an error then.
    """
    return stats.unsqueeze(0)


def check_weight(weight: Tensor | None, bias: Tensor | None, weight_offset: float = 0.0) -> None:
    """Raise ValueError if y does not determine the normalized value well enough.

    On devices other than the CPU an assertion of the device reports it later.
    """
    # Whole tensors, so that all processes come to the same result. In most models they are replicated, and nothing is sent.
    parameters: list[Any] = [t.detach() for t in (weight, bias) if t is not None]
    tensors = [(t.full_tensor() if is_dtensor(t) else t).float() for t in parameters]
    if not tensors or any(isinstance(t, FakeTensor) or t.is_meta for t in parameters):
        return
    size = torch.ones_like(tensors[0]) if weight is None else (tensors[0] + weight_offset).abs()
    fits = size >= SMALLEST_WEIGHT
    if bias is not None:
        fits &= tensors[-1].abs() <= LARGEST_BIAS * size
    if not fits.is_cpu:
        torch._assert_async(fits.all(), "save_outputs: a weight is too small to compute the normalized value from y.")
        return
    if fits.all():
        return
    place = int((~fits).flatten().nonzero()[0, 0])
    small, shift = float(size.flatten()[place]), 0.0 if bias is None else float(tensors[-1].flatten()[place])
    raise ValueError(
        f"weight has |weight + weight_offset| = {small:.3g} and bias {shift:.3g} at feature {place}, expected at "
        f"least {SMALLEST_WEIGHT:.3g} and a bias of at most {LARGEST_BIAS:.0f} times that: backward divides by it; "
        "call this Add & Norm outside of the context."
    )


def rebuild(
    y: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z_dtype: torch.dtype,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return z and the statistics: z = mean + x_hat / rstd with x_hat = (y - bias) / (weight + weight_offset).

    In a row with rstd = 0, z is the mean.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("Second derivatives need z, which was not kept; call the forward outside of save_outputs().")
    if stats.dim() == y.dim():
        return y, stats  # a checkpoint without a check of shapes recomputed z, outside of the context
    stats = stats.squeeze(0)
    acc = reference.compute_dtype(y, dtype=z_dtype)
    mean, rstd = stats.to(acc).split(1, dim=-1)
    x_hat = y.to(acc) if bias is None else y.to(acc) - bias.to(acc)
    if weight is not None:
        x_hat = x_hat / (weight.to(acc) + weight_offset)
    sigma = torch.where(rstd == 0, rstd, 1 / rstd)
    z: Tensor = mean + x_hat * sigma
    if z_dtype == torch.float16:  # by its error z may exceed the largest number, but not by a sixteenth
        limit = torch.finfo(z_dtype).max
        z = torch.where(z.abs() < 1.0625 * limit, z.clamp(-limit, limit), z)
    return z.to(z_dtype), stats
