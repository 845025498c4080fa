"""One pass through a stack: the steps that every wiring is made of, and where their results may be put.

    read     c * N_in(x)                        what a sublayer reads
    branch   N_branch(f(read))                  what it returns, normalized where the row says so
    join     N_out(a * x + b * branch)          the add, and in the same call the norm that comes next: N_out, or that with
                                                which the next sublayer (or the end of the stack) reads
    add      a * x + b * branch                 the add alone

Where nothing is recorded for a backward, results go into memory that is free: y into that of the branch, the stream into
its own. Free is what nobody else holds: a branch that is also a parameter, what was read, an entry of a cache, or in the
hands of a hook is left alone, and the result gets memory of its own. A stream below 64 KB gets new memory each time: that
is had sooner than the answer to the question who else holds the old.

A step of a small stack is a few microseconds, so the usual one (no factor, no dropout) goes straight to the operator, and
modules and parameters are taken from their tables (`nn.Module.__getattr__` costs a tenth of the operation each time). A norm is
called as a module where it is more than its formula: of another class, parametrized, or with hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from addnorm import functional
from addnorm.nn.norm import LayerNorm, NormKind, RMSNorm
from addnorm.ops import aliasing, dispatch
from addnorm.ops import out as out_ops

if TYPE_CHECKING:
    from addnorm.nn.residual import SublayerConnection

__all__ = ["NOTHING", "End", "Pass", "seeded"]

Scale = Tensor | float
Options = Mapping[str, Any]
ONE = 1.0
WIDE = {torch.float64: torch.float64}  # of the products c * weight, and of writes; float32 for all others
FUNCTIONS: dict[NormKind, tuple[Any, Any]] = {
    "layer": (functional.layer_norm, functional.add_layer_norm),
    "rms": (functional.rms_norm, functional.add_rms_norm),
}
# The classes of norms that are nothing but the formula.
PLAIN: dict[NormKind, tuple[type[nn.Module], ...]] = {
    "layer": (LayerNorm, nn.LayerNorm),
    "rms": (RMSNorm, nn.RMSNorm),
}
NO_OPTIONS: Options = {}
SMALL = 64 * 1024  # bytes of a stream: below, new memory is had sooner than the answer to whose the old is


class End:
    """What reads the stream after the last sublayer, in the form of a connection: the final norm."""

    c = ONE

    def __init__(self, norm: nn.Module | None) -> None:
        self._modules = {"norm_in": norm}


NOTHING = End(None)  # reads x itself


class Pass:
    """The state of one call of a stack: its keyword arguments, its dtypes, the memory that may be written."""

    __slots__ = (
        "context",
        "dtype",
        "free",
        "inference",
        "kind",
        "owned",
        "plain",
        "residual_dtype",
        "reuse",
        "shape",
        "simple",
        "writes",
    )

    def __init__(
        self,
        norm: NormKind,
        x: Tensor,
        residual_dtype: torch.dtype | None,
        context: Mapping[str, Any],
        keep: bool = False,
    ) -> None:
        """`keep`: every write is kept in `writes`."""
        if not isinstance(x, Tensor):
            raise TypeError(f"x is {type(x).__name__}, expected a tensor of shape (*, d_model).")
        self.kind = norm
        self.context = context
        self.dtype = x.dtype
        self.shape = x.shape[-1:]
        self.residual_dtype = residual_dtype
        self.writes: list[Tensor] | None = [] if keep else None
        # The classes of norms whose modules need not be called; none, where hooks of all modules are waiting.
        self.plain = () if _has_any_global_hook() else PLAIN[norm]
        self.simple = not keep and residual_dtype is None
        self.reuse = not keep and out_ops.may_overwrite(x) and x.nbytes >= SMALL
        self.inference = self.reuse and torch.is_inference_mode_enabled()
        self.free = False  # the memory of the branch may be written
        self.owned = False  # the stream's memory may be written: it is of this pass, and nobody has seen it

    def begin(self, x: Tensor) -> Tensor:
        """The stream."""
        return x if self.residual_dtype is None else x.to(self.residual_dtype)

    def finish(self, x: Tensor) -> Tensor:
        """What is read or returned: in the dtype of what came, where the stream has one of its own."""
        return x if self.residual_dtype is None else x.to(self.dtype)

    def read(self, x: Tensor, following: SublayerConnection | End) -> Tensor:
        """c * N_in(x)."""
        norm = following._modules["norm_in"]
        if norm is None:
            return self.finish(_scaled(x, following.c))
        return self.normalize(x, norm, following.c, None if self.residual_dtype is None else self.dtype)

    def normalize(
        self, x: Tensor, norm: Any, c: Scale = ONE, out_dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """c * N(x)."""
        if not self._direct(norm):
            y: Tensor = norm(x)
            return _scaled(y if out_dtype is None else y.to(out_dtype), c)
        weight, bias, rest = _gains(norm, c)
        arguments = (x, weight, bias) if self.kind == "layer" else (x, weight)
        y = FUNCTIONS[self.kind][0](*arguments, eps=norm.eps, out_dtype=out_dtype, out=out)
        return _scaled(y, rest)

    def branch(self, here: SublayerConnection, read: Tensor) -> Tensor:
        """N_branch(f(read))."""
        modules = here._modules
        sublayer: Any = modules.get("sublayer")
        raw: Tensor
        if sublayer is None:  # a callable that is no module
            sublayer = here.sublayer
        if self.context:
            takes = here.takes
            raw = sublayer(read, **{name: t for name, t in self.context.items() if takes is None or name in takes})
        else:
            raw = sublayer(read)
        if raw.__class__ is not Tensor and not isinstance(raw, Tensor):
            refuse(here, raw, read)
        if self.reuse:
            self.free = getrefcount(raw) == aliasing.ALONE and self._usable(raw)
        norm = modules["norm_branch"]
        if norm is None:
            return raw
        if raw.shape != read.shape:
            refuse(here, raw, read)
        normed = self.normalize(raw, norm, out=raw if self.free else None)
        if self.reuse:
            del raw  # its memory may be that of the result, and would count as another holder
            self.free = getrefcount(normed) == aliasing.ALONE and self._usable(normed)
        return normed

    def join(
        self,
        here: SublayerConnection,
        x: Tensor,
        branch: Tensor,
        following: SublayerConnection | End | None,
        options: Options | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x', and what `following` reads (None: nobody reads x' now); `options`: those of `here`, drawn before."""
        try:
            if options is None:
                if self.simple and not self.free:
                    done = self._usual(here, x, branch, following)
                    if done is not None:
                        return done
                options = self.options(here, x)
            if self.writes is not None:
                options = self._kept(x, branch, options)
            norm_out = here._modules["norm_out"]
            if norm_out is not None:
                x, _ = self._fused(x, branch, norm_out, ONE, options, self.residual_dtype, stream=False)
                self._own(False)
                return x, x if following is None else self.read(x, following)
            norm = None if following is None else following._modules["norm_in"]
            if following is None or norm is None:
                x = self._sum(x, branch, options)
                self._own(following is None)
                return x, x if following is None else self.read(x, following)
            last = following.__class__ is End and self.writes is None  # nobody needs the stream any more
            read, x = self._fused(x, branch, norm, following.c, options, self.dtype, stream=not last)
            self._own(self._direct(norm))
            return x, read
        except (TypeError, ValueError, RuntimeError):
            if branch.shape != x.shape:
                refuse(here, branch, x)
            raise

    def _usual(
        self, here: SublayerConnection, x: Tensor, branch: Tensor, following: SublayerConnection | End | None
    ) -> tuple[Tensor, Tensor] | None:
        """`join` where there is nothing but an add and one norm, in new memory; None where there is more."""
        if following is None or not self._at_rest(here):
            return None
        out, after, c = here._modules["norm_out"], following._modules["norm_in"], following.c
        norm = after if out is None else out
        if norm is None or (out is not None and after is not None) or not (c.__class__ is float and c == ONE):
            return None
        if not self._direct(norm):
            return None
        eps: Any = norm.eps
        if eps is None:
            return None
        table = norm._parameters
        weight, bias, rms = table["weight"], table.get("bias"), self.kind == "rms"
        if out is not None or following.__class__ is End:
            y: Any = dispatch.fast_path(x, branch, weight, bias, eps, rms, False)
            return (x, y) if out is None else (y, y)
        read, z = dispatch.fast_path(x, branch, weight, bias, eps, rms, True)
        self._own(True)
        return z, read

    def add(self, here: SublayerConnection, x: Tensor, branch: Tensor, options: Options) -> Tensor:
        """a * x + b * branch, in memory of its own."""
        if branch.shape != x.shape:
            refuse(here, branch, x)
        return functional.add_residual(x, branch, **options)

    def options(self, here: SublayerConnection, x: Tensor) -> Options:
        """What the add of a sublayer is told besides its tensors; random numbers are drawn here."""
        return NO_OPTIONS if self._at_rest(here) else here.options(x)

    def _at_rest(self, here: SublayerConnection) -> bool:
        """Whether the add of a sublayer is nothing but an add."""
        a, b = here.a, here.b
        return (
            a.__class__ is float
            and b.__class__ is float
            and a == b == ONE
            and self.residual_dtype is None
            and not (here.training and (here.dropout or here.stochastic_depth))
        )

    def _sum(self, x: Tensor, branch: Tensor, options: Options) -> Tensor:
        out = branch if self.free and x.dtype is branch.dtype else None
        return functional.add_residual(x, branch, out=out, **options)

    def _fused(
        self,
        x: Tensor,
        branch: Tensor,
        norm: Any,
        c: Scale,
        options: Options,
        dtype: torch.dtype | None,
        *,
        stream: bool,
    ) -> tuple[Tensor, Tensor]:
        """The norm of the sum, in `dtype` where the stream has one of its own; and the sum (or x, where nobody needs it)."""
        narrow = self.residual_dtype is not None
        if not self._direct(norm):
            total = self._sum(x, branch, options)
            return self.normalize(total, norm, c, dtype if narrow else None), total
        weight, bias, rest = _gains(norm, c)
        eps = norm.eps
        y: Any = None
        z: Any = None
        if narrow:
            options = {**options, "out_dtype": dtype}
        if self.free and (not narrow or dtype is branch.dtype):
            y = branch
            if stream:
                z = x if self.owned else torch.empty_like(x, memory_format=torch.contiguous_format)
        if options or eps is None:
            out = y if z is None else (y, z)
            found = FUNCTIONS[self.kind][1](
                x, branch, weight, bias, eps, return_residual=stream, out=out, **options
            )  # fmt: skip
        elif y is None:
            found = dispatch.fast_path(x, branch, weight, bias, eps, self.kind == "rms", stream)
        else:
            out_ops.write_private(x, branch, weight, bias, eps, self.kind, y, z)
            found = (y, z) if stream else y
        y, z = found if stream else (found, x)
        return y if rest is ONE else _scaled(y, rest), z

    def _direct(self, norm: Any) -> bool:
        """Whether a norm is nothing but its formula, which is then computed without calling the module."""
        return (
            norm.__class__ in self.plain
            and norm.normalized_shape == self.shape
            and "weight" in norm._parameters
            and "forward" not in norm.__dict__
            and not norm._forward_hooks
            and not norm._forward_pre_hooks
            and not norm._backward_hooks
            and not norm._backward_pre_hooks
        )

    def _usable(self, t: Tensor) -> bool:
        """Whether memory is such that a result may be written there; that nobody else holds the tensor, the caller knows."""
        return (
            t.__class__ is Tensor
            and t.dtype is self.dtype
            and not t.requires_grad
            and t.is_inference() == self.inference
            and t.is_contiguous()
            and aliasing.unshared(t)
        )

    def _own(self, owned: bool) -> None:
        if self.reuse:  # else nothing is written here: a compiled checkpoint allows no side effects
            self.owned = owned

    def _kept(self, x: Tensor, branch: Tensor, options: Options) -> Options:
        """Keeps the write: the add to a stream of zeros, with the same random numbers, at least in float32."""
        options = seeded(options, x)
        alone = {name: value for name, value in options.items() if name not in ("residual_scale", "residual_dtype")}
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
    weight, bias = table["weight"], table.get("bias")
    if c.__class__ is float and c == ONE:
        return weight, bias, ONE
    if weight is None:
        return weight, bias, c
    wide = WIDE.get(weight.dtype, torch.float32)  # c * weight is not rounded to bfloat16
    return weight.to(wide) * c, None if bias is None else bias.to(wide) * c, ONE


def _scaled(x: Tensor, c: Scale) -> Tensor:
    return x if c.__class__ is float and c == ONE else (x * c).to(x.dtype)


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
