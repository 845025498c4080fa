"""Projections whose output features are sharded: each process computes its part of them with ordinary tensors."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def to_dtensor(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return x as a DTensor. An ordinary tensor must be the same in every process, and becomes replicated."""
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def enter_region(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the whole x as an ordinary tensor in each process. Backward sums the gradients of all processes."""
    whole = to_dtensor(x, mesh)
    if not all(p.is_replicate() for p in whole.placements):
        whole = whole.redistribute(mesh, [Replicate()])
    return whole.to_local(grad_placements=[Partial()])


class ColumnLinear(nn.Module):
    """Linear layer of which each process computes some output features. Its input must be the result of `enter_region`.

    Attributes:
        weight: DTensor `(out_features, in_features)`, sharded on the first dimension.
        bias: DTensor `(out_features,)`, sharded, or None.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        mesh: DeviceMesh,
        src_data_rank: int | None = 0,
        rows: slice = slice(None),
    ) -> None:
        super().__init__()

        def distribute(t: Tensor | None) -> nn.Parameter | None:
            if t is None:
                return None
            sharded = distribute_tensor(t.detach()[rows], mesh, [Shard(0)], src_data_rank=src_data_rank)
            return nn.Parameter(sharded, requires_grad=t.requires_grad)

        self.weight = distribute(weight)
        self.bias = distribute(bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return this process's features, `(*, out_features / processes)`."""
        weight: Any = self.weight
        bias: Any = self.bias
        return F.linear(x, weight.to_local(), None if bias is None else bias.to_local())

    def extra_repr(self) -> str:
        """Return the sizes, as torch's modules do."""
        weight: Any = self.weight
        return f"in_features={weight.shape[1]}, out_features={weight.shape[0]}, bias={self.bias is not None}"


class PackedColumnLinear(nn.Module):
    """Several projections of one input, each a `ColumnLinear`, whose outputs are concatenated.

    It replaces a `Linear` whose output is packed, such as queries, keys and values, since a shard of the packed weight would not
    contain whole heads. The parts are submodules. `load_state_dict` accepts the packed weight and bias too.
    """

    def __init__(
        self, linear: nn.Linear, names: tuple[str, ...], mesh: DeviceMesh, src_data_rank: int | None = 0
    ) -> None:
        super().__init__()
        self.names = names
        size = linear.out_features // len(names)
        for i, name in enumerate(names):
            rows = slice(i * size, (i + 1) * size)
            self.add_module(name, ColumnLinear(linear.weight, linear.bias, mesh, src_data_rank, rows))
        self.register_load_state_dict_pre_hook(_split_packed)  # type: ignore[no-untyped-call]  # torch's

    def forward(self, x: Tensor) -> Tensor:
        """Return this process's features of every part, `(*, parts * part features / processes)`."""
        return torch.cat([getattr(self, name)(x) for name in self.names], dim=-1)

    def parts(self) -> tuple[Tensor, ...]:
        """Return the detached weights of the parts."""
        return tuple(getattr(self, name).weight.detach() for name in self.names)


def _split_packed(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Replace the packed weight and bias in a state dict by the weights and biases of the parts."""
    assert isinstance(module, PackedColumnLinear)
    for kind in ("weight", "bias"):
        packed = state.pop(f"{prefix}{kind}", None)
        if packed is None:
            continue
        for name, part in zip(module.names, packed.chunk(len(module.names)), strict=True):
            own: Any = getattr(getattr(module, name), kind)
            if not isinstance(part, DTensor) and own is not None:
                part = distribute_tensor(part, own.device_mesh, own.placements, src_data_rank=None)  # noqa: PLW2901
            state[f"{prefix}{name}.{kind}"] = part
