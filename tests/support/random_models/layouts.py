"""Layouts of the residual stream: where the dimensions of batch, tokens and features are placed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

__all__ = ["LAYOUTS", "Layout", "Sizes", "make_layout"]

Name = Literal["batch", "sequence", "channels", "image", "image channels", "flat"]
LAYOUTS: dict[Name, str] = {
    "batch": "batch first (B, T, D)",
    "sequence": "sequence first (T, B, D)",
    "channels": "channels first (B, D, T)",
    "image": "image (B, H, W, D)",
    "image channels": "image, channels first (B, D, H, W)",
    "flat": "tokens of all samples (B T, D)",
}


@dataclass(frozen=True)
class Sizes:
    """Numbers of samples, of tokens as height times width, and of features."""

    batch: int
    height: int
    width: int
    features: int
    heads: int = 2

    @property
    def tokens(self) -> int:
        return self.height * self.width


@dataclass(frozen=True)
class Layout:
    """Layout of a stream whose canonical form is (B, T, D)."""

    name: Name
    sizes: Sizes
    permutes: bool = False  # written with permute instead of transpose

    @property
    def features_last(self) -> bool:
        return self.name not in ("channels", "image channels")

    @property
    def feature_dim(self) -> int:
        return -1 if self.features_last else 1

    def apply(self, x: Tensor) -> Tensor:
        """Return a canonical tensor in this layout."""
        shape = (self.sizes.height, self.sizes.width)
        match self.name:
            case "sequence":
                return x.permute(1, 0, 2) if self.permutes else x.transpose(0, 1)
            case "channels":
                return x.permute(0, 2, 1) if self.permutes else x.transpose(1, 2)
            case "image":
                return x.unflatten(1, shape)
            case "image channels":
                turned = x.unflatten(1, shape)
                return turned.permute(0, 3, 1, 2) if self.permutes else turned.movedim(-1, 1)
            case "flat":
                return x.flatten(0, 1)
        return x

    def undo(self, x: Tensor) -> Tensor:
        """Return a tensor of this layout in the canonical form."""
        match self.name:
            case "sequence":
                return x.permute(1, 0, 2) if self.permutes else x.transpose(0, 1)
            case "channels":
                return x.permute(0, 2, 1) if self.permutes else x.transpose(1, 2)
            case "image":
                return x.flatten(1, 2)
            case "image channels":
                return x.flatten(2).transpose(1, 2)
            case "flat":
                return x.unflatten(0, (self.sizes.batch, -1))
        return x

    def spread(self, vector: Tensor) -> Tensor:
        """Return a value for each feature in a shape that broadcasts in this layout."""
        return vector if self.features_last else vector.reshape(-1, *(1,) * (1 if self.name == "channels" else 2))

    def convert(self, x: Tensor, other: Layout) -> Tensor:
        """Return a tensor of this layout in another one."""
        return x if other == self else other.apply(self.undo(x))


def make_layout(name: Name, sizes: Sizes, permutes: bool = False) -> Layout:
    """Return a layout."""
    return Layout(name, sizes, permutes)
