"""Layouts of the residual stream: where the dimensions of batch, tokens and features are placed."""

from dataclasses import dataclass

SWAPPED = {"sequence": (1, 0, 2), "channels": (0, 2, 1)}  # layouts that swap two dimensions


@dataclass(frozen=True)
class Sizes:
    """Numbers of samples, of tokens as height times width, and of features."""

    batch: int
    height: int
    width: int
    features: int
    heads: int = 2

    @property
    def tokens(self):
        return self.height * self.width


@dataclass(frozen=True)
class Layout:
    """Layout of a stream whose canonical form is (B, T, D).

    Its name is "batch" (B, T, D), "sequence" (T, B, D), "channels" (B, D, T), "image" (B, H, W, D), "image channels" (B, D, H, W) or
    "flat" (B T, D).
    """

    name: str
    sizes: Sizes
    permutes: bool = False  # written with permute instead of transpose

    @property
    def features_last(self):
        return self.name not in ("channels", "image channels")

    def apply(self, x):
        """Return a canonical tensor in this layout."""
        if self.name in SWAPPED:
            return self._swap(x)
        x = x.unflatten(1, (self.sizes.height, self.sizes.width)) if self.name.startswith("image") else x
        if self.name == "image channels":
            return x.permute(0, 3, 1, 2) if self.permutes else x.movedim(-1, 1)
        return x.flatten(0, 1) if self.name == "flat" else x

    def undo(self, x):
        """Return a tensor of this layout in the canonical form."""
        match self.name:
            case "image":
                return x.flatten(1, 2)
            case "image channels":
                return x.flatten(2).transpose(1, 2)
            case "flat":
                return x.unflatten(0, (self.sizes.batch, -1))
        return self._swap(x) if self.name in SWAPPED else x

    def _swap(self, x):
        order = SWAPPED[self.name]
        return x.permute(order) if self.permutes else x.transpose(*(k for k in range(3) if order[k] != k))

    def spread(self, vector):
        """Return a value for each feature in a shape that broadcasts in this layout."""
        return vector if self.features_last else vector.reshape(-1, *(1,) * (1 if self.name == "channels" else 2))

    def convert(self, x, other):
        """Return a tensor of this layout in another one."""
        return x if other == self else other.apply(self.undo(x))
