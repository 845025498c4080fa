"""The feed-forward sublayer."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from addnorm._util.arguments import check_int, check_probability
from addnorm.nn.norm import Device, Dtype

Activation = str | Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "swiglu": F.silu}


class FeedForward(nn.Module):
    r"""Feed-forward sublayer: down(act(up(x))), or with "swiglu" down(silu(gate(x)) * up(x)); shape `(*, d_model)`.

    Args:
        d_model: the number of features.
        dim_feedforward: the hidden width; None means 4 d_model, for "swiglu" 8/3 d_model rounded up to a multiple of 8.
        activation: "relu", "gelu", "swiglu", or a function.
        bias: whether the projections have biases.
        dropout: dropout probability of the input of the last projection.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Source: Vaswani et al. 2017, arXiv 1706.03762; SwiGLU: Shazeer 2020, arXiv 2002.05202.

    Example:
        >>> addnorm.nn.FeedForward(48, activation="swiglu")
        FeedForward(
          activation=swiglu
          (up): Linear(in_features=48, out_features=128, bias=True)
          (gate): Linear(in_features=48, out_features=128, bias=True)
          (down): Linear(in_features=128, out_features=48, bias=True)
        )
    """

    def __init__(
        self,
        d_model: int,
        dim_feedforward: int | None = None,
        activation: Activation = "relu",
        *,
        bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        if not callable(activation) and activation not in ACTIVATIONS:
            raise ValueError(
                f"activation is {activation!r}, expected one of {', '.join(map(repr, ACTIVATIONS))}, or a function."
            )
        gated = activation == "swiglu"
        check_int("d_model", d_model, 1)
        if dim_feedforward is None:
            dim_feedforward = -(-8 * d_model // 24) * 8 if gated else 4 * d_model
        check_int("dim_feedforward", dim_feedforward, 1)
        self.activation_name = activation if isinstance(activation, str) else None
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.dropout = check_probability("dropout", dropout)
        self.up = nn.Linear(d_model, dim_feedforward, bias=bias, device=device, dtype=dtype)
        self.gate = nn.Linear(d_model, dim_feedforward, bias=bias, device=device, dtype=dtype) if gated else None
        self.down = nn.Linear(dim_feedforward, d_model, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, `(*, d_model)`."""
        hidden = self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x)
        if self.training and self.dropout:
            hidden = F.dropout(hidden, self.dropout)
        return self.down(hidden)  # type: ignore[no-any-return]  # torch does not type a module's call

    def weight_roles(self) -> list[tuple[str, Tensor]]:
        """Return the weights with their roles for `addnorm.wirings.init`."""
        gate = [] if self.gate is None else [("gate", self.gate.weight)]
        return [("up", self.up.weight), *gate, ("down", self.down.weight)]

    def extra_repr(self) -> str:
        """Return the settings, as torch's modules do."""
        name = self.activation_name or getattr(self.activation, "__name__", type(self.activation).__name__)
        return f"activation={name}" + (f", dropout={self.dropout}" if self.dropout else "")
