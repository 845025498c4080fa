"""One pass through a stack: the steps that every wiring is made of, and where their results may be put.

    read     c * N_in(x)                        what a sublayer reads
    branch   N_branch(f(read))                  what it returns, normalized where the row says so
    join     N_out(a * x + b * branch)          the add, and in the same call the norm that comes next: N_out, or that with
                                                which the next sublayer (or the end of the stack) reads
    add      a * x + b * branch                 the add alone

Where nothing is recorded for a backward, results go into memory that is free: y into that of the branch, the stream into
its own. Free is what nobody else holds: a branch that is also a parameter, what was read, an entry of a cache, or in the
hands of a hook is left alone, and the result gets memory of its own.

A step of a small stack is a few microseconds, so the usual one (no factor, no dropout) goes straight to the operator, and
modules and parameters are taken from their tables (`nn.Module.__getattr__` costs a tenth of the operation each time).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from addnorm import functional
from addnorm.nn.norm import NormKind
from addnorm.ops import call, given, memory

if TYPE_CHECKING:
    from addnorm.nn.connection import SublayerConnection

__all__ = ["NOTHING", "End", "Pass", "seeded"]

Scale = Tensor | float
ONE = 1.0
WIDE = {torch.float64: torch.float64}  # of the products c * weight; float32 for all others
FUNCTIONS: dict[NormKind, tuple[Any, Any]] = {
    "layer": (functional.layer_norm, functional.add_layer_norm),
    "rms": (functional.rms_norm, functional.add_rms_norm),
}


class End:
    """What reads the stream after the last sublayer, in the form of a connection: the final norm."""

    c = 1.0

    def __init__(self, norm: nn.Module | None) -> None:
        self._modules = {"norm_in": norm}


NOTHING = End(None)  # reads x itself


class Pass:
    """The state of one call of a stack: its keyword arguments, its dtypes, the memory that may be written."""

    __slots__ = ("context", "dtype", "free", "kind", "owned", "reuse", "stream_dtype", "writes")

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
        self.kind = norm
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

    def read(self, x: Tensor, following: SublayerConnection | End) -> Tensor:
        """c * N_in(x), in the dtype of what came."""
        norm = following._modules["norm_in"]
        if norm is None:
            return self.finish(_scaled(x, following.c))
        return self.normalize(x, norm, following.c, None if self.stream_dtype is None else self.dtype)

    def normalize(
        self, x: Tensor, norm: Any, c: Scale = 1.0, out_dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """c * N(x)."""
        weight, bias, rest = _gains(norm, c)
        arguments = (x, weight, bias) if self.kind == "layer" else (x, weight)
        y: Tensor = FUNCTIONS[self.kind][0](*arguments, eps=norm.eps, out_dtype=out_dtype, out=out)
        return _scaled(y, rest)

    def branch(self, here: SublayerConnection, read: Tensor) -> Tensor:
        """N_branch(f(read))."""
        modules = here._modules
        sublayer: Any = modules.get("sublayer")
        if sublayer is None:  # a callable that is no module
            sublayer = here.sublayer
        raw: Tensor
        if self.context:
            takes = here.takes
            raw = sublayer(read, **{name: t for name, t in self.context.items() if takes is None or name in takes})
        else:
            raw = sublayer(read)
        if raw.__class__ is not Tensor and not isinstance(raw, Tensor):
            refuse(here, raw, read)
        if self.reuse:
            self.free = (
                raw.__class__ is Tensor
                and getrefcount(raw) == memory.ALONE
                and raw.dtype is self.dtype
                and raw.is_contiguous()
                and memory.unshared(raw)
            )
        norm = modules["norm_branch"]
        if norm is None:
            return raw
        if raw.shape != read.shape:
            refuse(here, raw, read)
        normed = self.normalize(raw, norm, out=raw if self.free else None)
        self.free = self.reuse  # it is this pass's own, if it was not so before
        return normed

    def join(
        self,
        here: SublayerConnection,
        x: Tensor,
        branch: Tensor,
        following: SublayerConnection | End | None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x', and what `following` reads (None: nobody reads x' now); `options`: those of `here`, drawn before."""
        try:
            if options is None:
                drops = here.training and (here.dropout or here.stochastic_depth)
                options = here.constants if here.steady and not drops else here.options(x)
            if self.writes is not None:
                options = self._kept(x, branch, options)
            norm_out = here._modules["norm_out"]
            if norm_out is not None:
                x = self._add_norm(x, branch, norm_out, 1.0, options, self.stream_dtype)
                self.owned = False
                return x, x if following is None else self.read(x, following)
            norm = None if following is None else following._modules["norm_in"]
            if following is None or norm is None:
                x = self.add(x, branch, options)
                self.owned = self.reuse and following is None
                return x, x if following is None else self.read(x, following)
            if following.__class__ is End and self.writes is None:  # nobody needs the stream any more
                return x, self._add_norm(x, branch, norm, following.c, options, self.dtype)
            return self._add_norm_stream(x, branch, norm, following.c, options)
        except (TypeError, ValueError, RuntimeError):
            if branch.shape != x.shape:
                refuse(here, branch, x)
            raise

    def add(self, x: Tensor, branch: Tensor, options: Mapping[str, Any]) -> Tensor:
        """a * x + b * branch."""
        out = branch if self.free and x.dtype is branch.dtype else None
        return functional.add_residual(x, branch, out=out, **options)

    def _add_norm(
        self, x: Tensor, branch: Tensor, norm: Any, c: Scale, options: Mapping[str, Any], dtype: torch.dtype | None
    ) -> Tensor:
        """The norm of the sum, which nobody needs; in `dtype` where the stream has one of its own."""
        weight, bias, rest = _gains(norm, c)
        eps = norm.eps
        if self.stream_dtype is not None:
            options = {**options, "out_dtype": dtype}
        into = branch if self.free and (self.stream_dtype is None or dtype is branch.dtype) else None
        if options or eps is None:
            y: Tensor = FUNCTIONS[self.kind][1](x, branch, weight, bias, eps, out=into, **options)
        elif into is None:
            y = call.plain(x, branch, weight, bias, eps, self.kind == "rms", False)  # type: ignore[assignment]  # y alone
        else:
            given.own(x, branch, weight, bias, eps, self.kind, into, None)
            y = into
        return y if rest is ONE else y * rest

    def _add_norm_stream(
        self, x: Tensor, branch: Tensor, norm: Any, c: Scale, options: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """The sum, and the norm of it."""
        weight, bias, rest = _gains(norm, c)
        eps, into = norm.eps, None
        if self.stream_dtype is not None:
            options = {**options, "out_dtype": self.dtype}
        if self.free:
            into = branch, (x if self.owned else torch.empty_like(x, memory_format=torch.contiguous_format))
        if options or eps is None:
            y, z = FUNCTIONS[self.kind][1](
                x, branch, weight, bias, eps, return_residual=True, out=into, **options
            )  # fmt: skip
        elif into is None:
            y, z = call.plain(x, branch, weight, bias, eps, self.kind == "rms", True)
        else:
            y, z = into
            given.own(x, branch, weight, bias, eps, self.kind, y, z)
        self.owned = self.reuse
        return z, y if rest is ONE else y * rest

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


def _gains(norm: Any, c: Scale) -> tuple[Tensor | None, Tensor | None, Scale]:
    """Weight and bias with c in them, and the factor that is left where there is no weight to hold it."""
    table = norm._parameters
    if "weight" in table:
        weight, bias = table["weight"], table.get("bias")
    else:  # under a parametrization it is a property
        weight, bias = norm.weight, getattr(norm, "bias", None)
    if c.__class__ is float and c == 1.0:
        return weight, bias, ONE
    if weight is None:
        return weight, bias, c
    wide = WIDE.get(weight.dtype, torch.float32)  # c * weight is not rounded to bfloat16
    return weight.to(wide) * c, None if bias is None else bias.to(wide) * c, ONE


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
