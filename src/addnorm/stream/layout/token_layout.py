"""The dimensions of one value of a stream: features, tokens and sequences, and the order of its tokens.

All layouts of one stream have the same canonical order of tokens: sequence by sequence, tokens in the order of the first state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from torch import Tensor

from addnorm.stream.layout.dimensions import Dims, Part


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Part of a dimension that holds only tokens, or only sequences.

    Attributes:
        part: a part of an axis of the stream.
        is_token: whether the places of the part are tokens of one sequence; otherwise they are sequences.
        order: number of the axis in the canonical order.
    """

    part: Part
    is_token: bool
    order: int

    @property
    def key(self) -> tuple[bool, int, int]:
        """Key that sorts pieces in the canonical order."""
        return self.is_token, self.order, -self.part.stride


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Which dimensions of a tensor of the stream hold features, sequences and tokens, and the order of the tokens.

    Attributes:
        shape: the shape in the inspected run.
        features: the dimensions of the features.
        pieces: the pieces of each other dimension, the slowest first.
        proven: whether a sublayer that combines tokens proves which dimensions hold tokens; otherwise the batch dimension is a
            guess.
    """

    shape: tuple[int, ...]
    features: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    proven: bool = True

    @property
    def others(self) -> list[int]:
        """The dimensions of sequences and tokens."""
        return [k for k in range(len(self.shape)) if k not in self.features]

    @property
    def dims(self) -> Dims:
        """The parts of each dimension in `others`."""
        return tuple(tuple(piece.part for piece in pieces) for pieces in self.pieces)

    @property
    def depends_on_shape(self) -> bool:
        """Whether the tokens can be sorted only in tensors of the inspected shape."""
        return any(len(runs) > 1 for runs in self._runs)

    def fits(self, t: Tensor) -> bool:
        """Return whether a tensor has as many dimensions and features as the inspected one."""
        return t.dim() == len(self.shape) and all(t.shape[k] == self.shape[k] for k in self.features)

    def move_features_last(self, t: Tensor) -> Tensor:
        """Return a tensor as `(*, d)`, the other dimensions in their order."""
        moved = t if self.features == (t.dim() - 1,) else t.permute(*self.others, *self.features)
        return moved if len(self.features) == 1 else moved.flatten(-len(self.features))

    def exchange(self) -> TokenLayout:
        """Return the layout with sequences and tokens exchanged."""
        pieces = tuple(tuple(replace(p, is_token=not p.is_token) for p in of_dim) for of_dim in self.pieces)
        return replace(self, pieces=pieces)

    def measure(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the number of sequences and the number of tokens in a sequence; None if this shape does not determine them.

        Args:
            shape: the sizes of the dimensions that are no features.
        """
        sizes = self._measure_runs(shape)
        if sizes is None:
            return None
        counts = [1, 1]
        for run, size in zip((run for of_dim in self._runs for run in of_dim), sizes, strict=True):
            counts[bool(run and run[0].is_token)] *= size
        return counts[0], counts[1]

    def sort_tokens(self, t: Tensor) -> Tensor | None:
        """Return a tensor whose dimensions other than the last are in canonical order: first sequences, then tokens.

        Args:
            t: the tensor with its features last.

        Returns:
            The tensor; None if the order of the tokens is not known for a tensor of this shape.
        """
        sizes = self._measure_runs(t.shape[:-1])
        if sizes is None:
            return None
        runs = [run for of_dim in self._runs for run in of_dim]
        order = sorted(range(len(runs)), key=lambda k: runs[k][0].key if runs[k] else (False, -1, 0))
        return t.reshape(*sizes, t.shape[-1]).permute(*order, len(order))

    def _measure_runs(self, shape: Sequence[int]) -> list[int] | None:
        """Return the size of every run in `_runs` for dimensions of the sizes `shape`; None if that is not known."""
        sizes: list[int] = []
        for size, runs, pieces in zip(shape, self._runs, self.pieces, strict=True):
            if len(runs) == 1:
                sizes.append(size)
            elif size == math.prod(piece.part.size for piece in pieces):
                sizes += [math.prod(piece.part.size for piece in run) for run in runs]
            else:
                return None
        return sizes

    @cached_property
    def _runs(self) -> list[list[tuple[Piece, ...]]]:
        """The runs of each dimension: groups of pieces that are adjacent in the canonical order too."""
        ordered = sorted((piece for pieces in self.pieces for piece in pieces), key=lambda piece: piece.key)
        place = {piece: k for k, piece in enumerate(ordered)}
        runs: list[list[tuple[Piece, ...]]] = []
        for pieces in self.pieces:  # in a run, the place and the index of a piece grow alike
            groups = groupby(enumerate(pieces), key=lambda item: (place[item[1]] - item[0], item[1].is_token))
            runs.append([tuple(piece for _, piece in group) for _, group in groups] or [()])
        return runs
