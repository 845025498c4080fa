"""Add & Norm as a module. Its constructor has many parameters, since each option is a parameter, as in torch.nn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from addnorm import functional
from addnorm._util.arguments import check_choice, check_probability
from addnorm._util.norms import KINDS, Norm
from addnorm.nn.norm import Device, Dtype, as_leaf, norm_shape
from addnorm.ops.validation import to_dimensions


class AddNorm(nn.Module):
    r"""Add & Norm around a transformer sublayer: Norm(residual + Dropout(branch)).

        z = residual_scale * residual + layer_scale * dropout(branch)
        y = norm(z) * weight + bias

    In post-LN, call `x = add_norm(x, sublayer(x))`. In pre-LN, one call fuses the add after a sublayer with the norm before the
    next one: `read, residual = add_norm(residual, sublayer(read), return_residual=True)`.

    Args:
        normalized_shape: the number of features, or the last dimensions to normalize over.
        norm: "layer" or "rms".
        eps: epsilon of the norm; None means 1e-5 for LayerNorm and the machine epsilon for RMSNorm, as in torch.
        dropout: dropout probability of the branch in training.
        elementwise_affine: whether there is a weight, initialized to ones.
        bias: whether there is a bias, initialized to zeros; None means True for LayerNorm and False for RMSNorm.
        residual_scale: a constant factor of the residual (DeepNorm's alpha).
        layer_scale: the initial value of a learned factor of each feature of the branch (LayerScale); None means no factor.
        residual_dtype: dtype of the returned residual; None means the dtype of `residual`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        weight: gamma, of shape `normalized_shape`, or None.
        bias: beta, of shape `normalized_shape`, or None.
        layer_scale: the learned factor of the branch, of shape `normalized_shape`, or None.

    `load_state_dict` accepts the state of a `torch.nn.LayerNorm` or `torch.nn.RMSNorm`.

    Example:
        >>> add_norm = addnorm.AddNorm(3)
        >>> x, sublayer = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -1.0, 1.5])
        >>> add_norm(x, sublayer).detach()
        tensor([-0.5392, -0.8627,  1.4018])
        >>> read, stream = add_norm(x, sublayer, return_residual=True)
        >>> stream.detach()
        tensor([1.5000, 1.0000, 4.5000])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        norm: Norm = "layer",
        eps: float | None = None,
        dropout: float = 0.0,
        *,
        elementwise_affine: bool = True,
        bias: bool | None = None,
        residual_scale: float = 1.0,
        layer_scale: float | None = None,
        residual_dtype: Dtype = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        check_choice("norm", norm, KINDS)
        self.normalized_shape = to_dimensions(normalized_shape)
        self.norm: Norm = norm
        self.eps = KINDS[norm].eps if eps is None else eps
        self.dropout = check_probability("dropout", dropout)
        self.residual_scale = residual_scale
        self.residual_dtype = residual_dtype
        self.initial_layer_scale = layer_scale
        with_bias = elementwise_affine and (KINDS[norm].has_bias if bias is None else bias)

        def parameter(present: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype)) if present else None

        self.weight = parameter(elementwise_affine)
        self.bias = parameter(with_bias)
        self.layer_scale = parameter(layer_scale is not None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the weight to ones, the bias to zeros and the layer scale to its initial value."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.layer_scale is not None and self.initial_layer_scale is not None:
            nn.init.constant_(self.layer_scale, self.initial_layer_scale)

    @overload
    def forward(self, residual: Tensor, branch: Tensor, *, return_residual: Literal[False] = False) -> Tensor: ...

    @overload
    def forward(self, residual: Tensor, branch: Tensor, *, return_residual: Literal[True]) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(self, residual: Tensor, branch: Tensor, *, return_residual: bool) -> Tensor | tuple[Tensor, Tensor]: ...

    def forward(
        self, residual: Tensor, branch: Tensor, *, return_residual: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return y, or `(y, z)` with `return_residual=True`; all tensors have the shape `(*, normalized_shape)`."""
        if isinstance(residual, Proxy):
            return as_leaf(self, residual, branch, return_residual=return_residual)
        options: dict[str, Any] = {}  # without options the call takes the fast path
        if self.residual_scale != 1.0:
            options["residual_scale"] = self.residual_scale
        if self.layer_scale is not None:
            options["layer_scale"] = self.layer_scale
        if self.training and self.dropout:
            options["dropout_p"] = self.dropout
        if self.residual_dtype is not None:
            options["residual_dtype"] = self.residual_dtype
        shape = norm_shape(self.normalized_shape, self.weight)
        if shape is not None:
            options["normalized_shape"] = shape
        _, add_norm = functional.FUNCTIONS[self.norm]
        return add_norm(  # type: ignore[no-any-return]  # one name for functions of different eps
            residual, branch, self.weight, self.bias, self.eps, return_residual=return_residual, **options
        )

    def extra_repr(self) -> str:
        """Return the settings, as torch's modules do."""
        has_bias, is_affine = self.bias is not None, self.weight is not None
        shown = {
            f"{self.normalized_shape}, norm={self.norm!r}, eps={self.eps}": True,
            f"dropout={self.dropout}": self.dropout,
            "elementwise_affine=False": not is_affine,
            f"bias={has_bias}": is_affine and has_bias != KINDS[self.norm].has_bias,
            f"residual_scale={self.residual_scale}": self.residual_scale != 1.0,
            f"layer_scale={self.initial_layer_scale}": self.initial_layer_scale is not None,
            f"residual_dtype={self.residual_dtype}": self.residual_dtype is not None,
        }
        return ", ".join(text for text, is_shown in shown.items() if is_shown)
