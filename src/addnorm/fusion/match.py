"""An Add & Norm of a model: `Boundary` as reported to the user, `Match` as the nodes of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from addnorm._util.jsonio import Document
from addnorm.fusion.graph import shape_of
from addnorm.stream.dataflow.arithmetic import match_terms, strip_views
from addnorm.stream.dataflow.graph import Value
from addnorm.stream.dataflow.operators import FAMILY
from addnorm.stream.find.norm import Norm

SUM = "the sum"


@dataclass(frozen=True)
class Boundary(Document):
    """Add & Norm of a model, fused or not.

    Attributes:
        add: path of the module that adds.
        norm: path of the module that normalizes the sum.
        kind: "layer", "rms" or "scale"; "none" for a write of several streams without a norm.
        eps: of the norm.
        returns_residual: whether other operators read the sum too, as in pre-LN.
        shape: of the sum.
        dtype: of the sum.
        casting: where an RMSNorm in low precision rounds, as in `addnorm.add_rms_norm`.
        reason: why it is not fused; None if it is.
        weight: name of the norm's weight in the graph.
        streams: number of residual streams that the call mixes, or reads as a weighted sum; None for an Add & Norm of one.
        remark: why the write, or the read with its norm, is not part of the call; empty if both are.
    """

    add: str
    norm: str
    kind: str
    eps: float | None
    returns_residual: bool
    shape: tuple[int, ...]
    dtype: str
    casting: str = "float32"
    reason: str | None = None
    weight: str | None = field(default=None, repr=False)
    streams: int | None = None
    remark: str = ""

    PROPERTIES = ("is_fused",)

    @property
    def writes_streams(self) -> bool:
        """Whether the Add & Norm contains the write of several streams."""
        return self.streams is not None and (self.kind == "none" or not self.remark)

    @property
    def is_fused(self) -> bool:
        """Whether the Add & Norm is one call now."""
        return self.reason is None


@dataclass(eq=False)
class Match:
    """Add & Norm in a graph, as nodes. `pattern` sets them one after the other, until it finds a reason not to fuse.

    Attributes:
        norm: the norm in the data flow.
        sum: the value that it reads.
        add: node of the add.
        operands: nodes of the two tensors that are added.
        z: nodes that return the sum.
        y: nodes that return the normalized sum.
        views: nodes through which the norm reads the sum, in order.
        weight: node of the norm's weight.
        bias: node of the norm's bias.
        casting: where the fused call rounds.
        reason: why it cannot be fused; None if it can.
        inner: nodes that compute y from the sum, in order.
    """

    norm: Norm
    sum: Value
    add: fx.Node = field(init=False)
    operands: tuple[fx.Node, ...] = ()
    z: tuple[fx.Node, ...] = ()
    y: tuple[fx.Node, ...] = ()
    views: tuple[fx.Node, ...] = ()
    weight: fx.Node | None = None
    bias: fx.Node | None = None
    casting: str = "float32"
    reason: str | None = None
    inner: tuple[fx.Node, ...] = ()

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes that the call replaces."""
        return (*self.inner, *self.z, *self.y)

    @property
    def parameters(self) -> dict[str, fx.Node]:
        """The nodes of the norm's weight and bias, if it has them."""
        return {name: node for name, node in (("weight", self.weight), ("bias", self.bias)) if node is not None}

    @property
    def returns_residual(self) -> bool:
        """Whether other operators read the sum too."""
        if not self.z:
            return any(op not in self.norm.ops for op in self.sum.users)
        inside = {*self.inner, *self.z, *self.views}
        return any(user not in inside for node in self.z for user in node.users)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the sum in the call for which the graph was captured."""
        return shape_of(self.z[0])

    @property
    def streams_dim(self) -> int | None:
        """Dimension of the streams in the tensor that holds several; None for an Add & Norm of one stream."""
        return None

    @property
    def results(self) -> dict[str, tuple[fx.Node, ...]]:
        """The nodes that return each result."""
        return {"y": self.y} | ({SUM: self.z} if self.returns_residual else {})

    @property
    def tensors(self) -> dict[str, fx.Node]:
        """The nodes that the call reads, by argument."""
        return dict(zip(("residual", "branch"), self.operands, strict=True)) | self.parameters

    def to_boundary(self) -> Boundary:
        """Return the `Boundary` that is reported to the user."""
        assert self.sum.op is not None
        weight = None if self.weight is None else self.weight.name
        return Boundary(
            self.sum.op.frame.path, self.norm.path, self.norm.kind, self.norm.eps, self.returns_residual, self.sum.shape,
            dtype_name(self.sum.tensor.dtype), self.casting, self.reason, weight,
        )  # fmt: skip


class NotFusableError(Exception):
    """Reason why an Add & Norm cannot be fused."""


def match_sum(norm: Norm) -> Match | None:
    """Return the `Match` of a norm and the sum that it reads; None if it reads no sum, or if addnorm computes both."""
    value = strip_views(norm.x)
    if value.op is None or match_terms(value.op) is None or not value.tensor.is_floating_point():
        return None
    if value.op.origin.startswith(FAMILY) and any(op.origin.startswith(FAMILY) for op in norm.ops):
        return None
    return Match(norm, value)


def surplus(
    boundaries: Iterable[Boundary], known: Iterable[Boundary], key: Callable[[Boundary], Any]
) -> list[Boundary]:
    """Return the boundaries beyond the known ones: for each value of `key`, those that outnumber the known ones."""
    count, rest = Counter(map(key, known)), []
    for boundary in boundaries:
        count[key(boundary)] -= 1
        if count[key(boundary)] < 0:
            rest.append(boundary)
    return rest


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")
