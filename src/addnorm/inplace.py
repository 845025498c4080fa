r"""Add & Norm in place, for inference: a step of a stack that allocates no memory.

    residual <- z = residual_scale * residual + row_scale * layer_scale * dropout(branch + branch_bias)
    branch   <- y = norm(z) * (weight + weight_offset) + bias

The results are those of `addnorm.functional`, bit for bit. To write to other tensors use `out=` there. The functions have many
parameters: one for each option of the operation, as in torch.
"""

from __future__ import annotations

from torch import Tensor

from addnorm.functional import Scale, Shape, add_norm
from addnorm.ops import dispatch
from addnorm.ops.out import in_place
from addnorm.reference import Casting

__all__ = ["add_layer_norm_", "add_residual_", "add_rms_norm_"]


def add_layer_norm_(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: Shape | None = None,
    residual_scale: Scale | None = None,
    row_scale: Tensor | None = None,
    layer_scale: Scale | None = None,
    branch_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
    offset: int = 0,
    weight_offset: float = 0.0,
) -> Tensor:
    r"""Compute `add_layer_norm` in place: residual becomes z, and branch becomes y, which is returned.

        residual <- z = residual_scale * residual + row_scale * layer_scale * dropout(branch + branch_bias)
        branch   <- y = (z - mean) / sqrt(var + eps) * (weight + weight_offset) + bias

    Arguments, shapes and results are those of `add_layer_norm`, bit for bit. z has the dtype of residual and y that of branch,
    under autocast too; the two may differ (float32 residual, bfloat16 branch).

    Contiguous tensors are overwritten as they are read. Other tensors, and all tensors inside `vmap` and forward-mode
    derivatives, are computed out of place and copied. The version counters are incremented, so a backward that saved one of
    the tensors raises torch's error.

    Returns:
        branch, which now holds y.

    Raises:
        RuntimeError: an argument requires a gradient. Nothing is saved for a backward: call it under `torch.no_grad()`.
        ValueError: residual or branch shares memory with the other, with itself (an expanded tensor), or with another
            argument; or as in `add_layer_norm`.
        TypeError: as in `add_layer_norm`.

    Example:
        >>> x, sublayer = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -1.0, 1.5])
        >>> y = addnorm.add_layer_norm_(x, sublayer)
        >>> x
        tensor([1.5000, 1.0000, 4.5000])
        >>> sublayer
        tensor([-0.5392, -0.8627,  1.4018])
        >>> y is sublayer
        True
    """
    return add_norm(  # type: ignore[no-any-return]
        "layer", residual, branch, weight, bias, eps, "float32", normalized_shape, residual_scale, row_scale, layer_scale,
        branch_bias, dropout_p, training, seed, offset, weight_offset, None, None, False, in_place(branch, residual),
    )  # fmt: skip


def add_rms_norm_(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    casting: Casting = "float32",
    normalized_shape: Shape | None = None,
    residual_scale: Scale | None = None,
    row_scale: Tensor | None = None,
    layer_scale: Scale | None = None,
    branch_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
    offset: int = 0,
    weight_offset: float = 0.0,
) -> Tensor:
    r"""Compute `add_rms_norm` in place: residual becomes z, and branch becomes y, which is returned.

        residual <- z = residual_scale * residual + row_scale * layer_scale * dropout(branch + branch_bias)
        branch   <- y = z / sqrt(mean(z^2) + eps) * (weight + weight_offset) + bias

    Arguments are those of `add_rms_norm`; dtypes and errors are those of `add_layer_norm_`.

    Example:
        >>> x, sublayer = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -1.0, 1.5])
        >>> addnorm.add_rms_norm_(x, sublayer)
        tensor([0.5359, 0.3573, 1.6078])
        >>> x
        tensor([1.5000, 1.0000, 4.5000])
    """
    if eps is None:
        eps = dispatch.default_rms_eps(residual, branch)
    return add_norm(  # type: ignore[no-any-return]
        "rms", residual, branch, weight, bias, eps, casting, normalized_shape, residual_scale, row_scale, layer_scale,
        branch_bias, dropout_p, training, seed, offset, weight_offset, None, None, False, in_place(branch, residual),
    )  # fmt: skip


def add_residual_(
    residual: Tensor,
    branch: Tensor,
    *,
    residual_scale: Scale | None = None,
    row_scale: Tensor | None = None,
    layer_scale: Scale | None = None,
    branch_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    r"""Compute `add_residual` in place: residual becomes z, which is returned; branch does not change.

        residual <- z = residual_scale * residual + row_scale * layer_scale * dropout(branch + branch_bias)

    Arguments are those of `add_residual`; dtype and errors are those of `add_layer_norm_`, except that branch may be residual
    itself, since it is only read.

    Example:
        >>> x, sublayer = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -1.0, 1.5])
        >>> addnorm.add_residual_(x, sublayer, layer_scale=0.1)
        tensor([1.0500, 1.9000, 3.1500])
        >>> x
        tensor([1.0500, 1.9000, 3.1500])
    """
    return add_norm(  # type: ignore[no-any-return]
        "none", residual, branch, None, None, 0.0, "float32", None, residual_scale, row_scale, layer_scale, branch_bias,
        dropout_p, training, seed, offset, 0.0, None, None, True, in_place(None, residual),
    )  # fmt: skip
