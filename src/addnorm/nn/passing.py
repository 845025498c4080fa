"""One pass through a stack: the four steps that every wiring is made of, and where their results may be put.

    read     c * N_in(x)                        what a sublayer reads
    branch   N_branch(f(read))                  what it returns, normalized where the row says so
    join     N_out(a * x + b * branch)          the add, and in the same call the norm that comes next: N_out, or that with
                                                which the next sublayer (or the end of the stack) reads
    add      a * x + b * branch                 the add alone

Where nothing is recorded for a backward, results go into memory that is free: y into that of the branch, the stream into
its own. Free is what nobody else holds: a branch that is also a parameter, what was read, an entry of a cache, or in the
hands of a hook is left alone, and the result gets memory of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from addnorm import functional
from addnorm.nn.norm import NormKind
from addnorm.ops import given, memory

if TYPE_CHECKING:
    from addnorm.nn.connection import SublayerConnection

__all__ = ["NOTHING", "Pass", "Reader"]

Scale = Tensor | float
WIDE = {torch.float64: torch.float64}  # of the products c * weight; float32 for all others
FUNCTIONS: dict[NormKind, tuple[Any, Any]] = {
    "layer": (functional.layer_norm, functional.add_layer_norm),
    "rms": (functional.rms_norm, functional.add_rms_norm),
}


class Reader(NamedTuple):
    """How the stream is read next: c * norm(x); `last`: and nobody needs the stream any more."""

    norm: nn.Module | None
    c: Scale = 1.0
    last: bool = False


NOTHING = Reader(None)  # x itself


def _alone() -> int:
    """The references to a tensor that is a local variable and nothing else, as `getrefcount` counts them."""
    raw = torch.empty(0)
    return getrefcount(raw)


ALONE = _alone()


class Pass:
    """The state of one call of a stack: its keyword arguments, its dtypes, the memory that may be written."""

    __slots__ = (
        "context",
        "dtype",
        "free",
        "fused",
        "layer",
        "name",
        "norm",
        "owned",
        "reuse",
        "stream_dtype",
        "writes",
    )

    def __init__(
        self,
        norm: NormKind,
        x: Tensor,
        stream_dtype: torch.dtype | None,
        context: Mapping[str, Any],
        keep: bool = False,
    ) -> None:
        """`keep`: every write is kept in `writes`."""
        if not isinstance(x, Tensor):
            raise TypeError(f"x is {type(x).__name__}, expected a tensor of shape (*, d).")
        self.norm, self.fused = FUNCTIONS[norm]
        self.layer = norm == "layer"
        self.context = context
        self.dtype = x.dtype
        self.stream_dtype = stream_dtype
        self.writes: list[Tensor] | None = [] if keep else None
        self.reuse = not keep and given.may_overwrite(x)
        self.free = False  # the memory of the branch may be written
        self.owned = False  # the stream's memory may be written: it is of this pass, and nobody has seen it

    def begin(self, x: Tensor) -> Tensor:
        """The stream."""
        return x if self.stream_dtype is None else x.to(self.stream_dtype)

    def finish(self, x: Tensor) -> Tensor:
        """What is returned: in the dtype of what came."""
        return x if self.stream_dtype is None else x.to(self.dtype)

    def read(self, x: Tensor, norm: nn.Module | None, c: Scale) -> Tensor:
        """c * N(x), in the dtype of what came."""
        if norm is None:
            return self.finish(_scaled(x, c))
        return self.normalize(x, norm, c, None if self.stream_dtype is None else self.dtype)

    def normalize(
        self, x: Tensor, norm: Any, c: Scale = 1.0, out_dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """c * N(x)."""
        weight, bias, rest = self._gains(norm, c)
        arguments = (x, weight, bias) if self.layer else (x, weight)
        y: Tensor = self.norm(*arguments, eps=norm.eps, out_dtype=out_dtype, out=out)
        return _scaled(y, rest)

    def branch(self, here: SublayerConnection, read: Tensor) -> Tensor:
        """N_branch(f(read))."""
        if self.context:
            takes = here.takes
            raw = here.sublayer(
                read, **{name: value for name, value in self.context.items() if takes is None or name in takes}
            )
        else:
            raw = here.sublayer(read)
        if not isinstance(raw, Tensor) or raw.shape != read.shape:
            refuse(here, raw, read)
        if self.reuse:
            self.free = (
                getrefcount(raw) == ALONE
                and raw.dtype is self.dtype
                and raw.__class__ is Tensor
                and raw.is_contiguous()
                and memory.unshared(raw)
            )
        if here.norm_branch is None:
            return raw
        normed = self.normalize(raw, here.norm_branch, out=raw if self.free else None)
        self.free = self.reuse  # it is this pass's own, if it was not so before
        return normed

    def join(
        self,
        here: SublayerConnection,
        x: Tensor,
        branch: Tensor,
        reader: Reader | None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x', and what comes next reads; `reader` None: nobody reads it now. `options`: those of `here`, drawn before."""
        if options is None:
            options = here.options(x)
        if self.writes is not None:
            options = self._kept(x, branch, options)
        norm, c, last = NOTHING if reader is None else reader
        if here.norm_out is not None:
            x = self._add_norm(x, branch, here.norm_out, options)
            self.owned = False
            return x, x if reader is None else self.read(x, norm, c)
        if norm is None:
            x = self.add(x, branch, options)
            self.owned = self.reuse and reader is None
            return x, x if reader is None else self.finish(_scaled(x, c))
        weight, bias, rest = self._gains(norm, c)
        if self.stream_dtype is not None:
            options = {**options, "out_dtype": self.dtype}
        if last and self.writes is None:
            out = branch if self.free else None
            return x, _scaled(self.fused(x, branch, weight, bias, norm.eps, out=out, **options), rest)
        into = (branch, x if self.owned else torch.empty_like(x)) if self.free else None
        read, x = self.fused(x, branch, weight, bias, norm.eps, return_residual=True, out=into, **options)
        self.owned = self.reuse
        return x, _scaled(read, rest)

    def add(self, x: Tensor, branch: Tensor, options: Mapping[str, Any]) -> Tensor:
        """a * x + b * branch."""
        out = branch if self.free and x.dtype is branch.dtype else None
        return functional.add_residual(x, branch, out=out, **options)

    def _add_norm(self, x: Tensor, branch: Tensor, norm: Any, options: Mapping[str, Any]) -> Tensor:
        """N_out: y is the stream."""
        weight, bias, _ = self._gains(norm, 1.0)
        out = branch if self.free and x.dtype is branch.dtype else None
        if self.stream_dtype is not None:
            options = {**options, "out_dtype": self.stream_dtype}
        y: Tensor = self.fused(x, branch, weight, bias, norm.eps, out=out, **options)
        return y

    def _gains(self, norm: Any, c: Scale) -> tuple[Tensor | None, Tensor | None, Scale]:
        """Weight and bias with c in them, and the factor that is left where there is no weight to hold it."""
        weight, bias = norm.weight, norm.bias if self.layer else None
        if c.__class__ is float and c == 1.0:
            return weight, bias, 1.0
        if weight is None:
            return weight, bias, c
        wide = WIDE.get(weight.dtype, torch.float32)  # c * weight is not rounded to bfloat16
        return weight.to(wide) * c, None if bias is None else bias.to(wide) * c, 1.0

    def _kept(self, x: Tensor, branch: Tensor, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keeps the write: the add to a stream of zeros, with the same random numbers, at least in float32."""
        options = seeded(options, x)
        alone = {name: value for name, value in options.items() if name not in ("residual_scale", "stream_dtype")}
        zeros = torch.zeros_like(x, dtype=WIDE.get(x.dtype, torch.float32))
        assert self.writes is not None
        self.writes.append(functional.add_residual(zeros, branch, **alone))
        return options


def seeded(options: Mapping[str, Any], x: Tensor) -> Mapping[str, Any]:
    """The options with a seed for the dropout mask, so that two adds can have the same one."""
    if "dropout_p" not in options:
        return options
    return {**options, "seed": torch.randint(-(2**63), 2**63 - 1, (), device=x.device)}


def _scaled(x: Tensor, c: Scale) -> Tensor:
    return x if c.__class__ is float and c == 1.0 else x * c


def refuse(here: SublayerConnection, raw: Any, read: Tensor) -> None:
    """The sentence about a sublayer that did not return a tensor of the shape it read."""
    at, who = here.place, type(here.sublayer).__name__
    name = getattr(here.sublayer, "__name__", who)
    path = f"sublayers[{at.layer * at.sublayers_per_layer + at.sublayer}] ({name})"
    if isinstance(raw, Tensor):
        raise ValueError(
            f"{path} returned shape {tuple(raw.shape)}, expected {tuple(read.shape)}, the shape it read: its output is added "
            "to the stream element by element; let its last projection end in the stream's width."
        )
    if isinstance(raw, Sequence) and raw and isinstance(raw[0], Tensor):
        raise TypeError(
            f"{path} returned a {type(raw).__name__} of {len(raw)}, expected one tensor: wrap it so that it returns "
            "the one that is added, as in lambda x, **kw: module(x, **kw)[0]."
        )
    raise TypeError(f"{path} returned {type(raw).__name__}, expected a tensor of shape {tuple(read.shape)}.")
