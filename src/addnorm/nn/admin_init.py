"""Admin's profiled initialization: the learned factors of the stream, measured in one forward pass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from addnorm.nn.executor import NOTHING, Pass

if TYPE_CHECKING:
    from addnorm.nn.stack import ResidualStack

__all__ = ["profile_"]


def profile_(stack: ResidualStack, x: Tensor, **context: Any) -> None:
    """Sets omega of each sublayer: 1 for the first, then sqrt(omega^2 var(x) + var f(x)) of the one before it.

    Variances are over all elements. Dropout is off; the stack's mode is what it was afterwards.

    Source: Liu et al. 2020, arXiv 2004.08249.
    """
    connections: Any = stack.connections
    modes = {module: module.training for module in stack.modules()}
    stack.eval()
    omegas, omega = [], 1.0
    try:
        with torch.no_grad():
            run = Pass(stack.norm, x, stack.residual_dtype, context)
            stream = run.begin(x)
            if stack.norm_embedding is not None:
                stream = run.normalize(stream, stack.norm_embedding, 1.0, stack.residual_dtype)
            for here in connections:
                omegas.append(omega)
                branch = run.branch(here, run.finish(stream))
                variance = omega**2 * _variance(stream) + _variance(branch)
                # omega is not the parameter's yet: nothing is set until everything is measured.
                stream, _ = run.join(here, stream, branch, NOTHING, {"residual_scale": omega})
                omega = math.sqrt(variance)
                if not math.isfinite(omega):
                    raise ValueError(
                        f"x gives the sublayer {len(omegas) - 1} an output that is not finite: admin cannot measure its "
                        "variance; check x and the sublayer's weights."
                    )
            for here, value in zip(connections, omegas, strict=True):
                here.a.fill_(value)
    finally:
        for module, mode in modes.items():
            module.training = mode


def _variance(t: Tensor) -> float:
    return float(t.double().var(correction=0))
