"""One call of a stack: the steps that every wiring consists of.

    read            c * N_in(x)                  the sublayer's input
    branch          N_branch(f(read))            its output, normalized where the row has norm_branch
    add_and_norm    N_out(a * x + b * branch)    the add, fused with the norm that follows: N_out, the N_in of the next
                                                 sublayer, or the final norm
    add             a * x + b * branch           the add alone

A step of a small stack takes a few microseconds. So the usual step (no factor, no dropout) calls the operator directly, and
modules and parameters are read from `_modules` and `_parameters`: one `nn.Module.__getattr__` takes a tenth of the operation's
time. A norm is called as a module if it may compute more than its formula: another class, parametrized, or with hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from addnorm import functional
from addnorm.nn.norm import LayerNorm, NormKind, RMSNorm
from addnorm.ops import dispatch
from addnorm.wirings.row import Place

__all__ = ["NO_NORM", "Connection", "End", "StackRun", "with_seed"]

Scale = Tensor | float
Options = Mapping[str, Any]
ONE = 1.0
WIDE = {
    torch.float64: torch.float64
}  # dtype of c * weight and of kept writes by the operands' dtype; float32 for all others
FUNCTIONS: dict[NormKind, tuple[Any, Any]] = {
    "layer": (functional.layer_norm, functional.add_layer_norm),
    "rms": (functional.rms_norm, functional.add_rms_norm),
}
# The classes of norms that compute exactly the formula.
PLAIN: dict[NormKind, tuple[type[nn.Module], ...]] = {
    "layer": (LayerNorm, nn.LayerNorm),
    "rms": (RMSNorm, nn.RMSNorm),
}
NO_OPTIONS: Options = {}


class Connection(Protocol):
    """The attributes of a `SublayerConnection` that a run reads."""

    place: Place
    sublayer: Any
    a: Any
    b: Any
    c: Any
    dropout: float
    stochastic_depth: float
    training: bool
    _modules: Any

    @property
    def accepted_kwargs(self) -> frozenset[str] | None: ...  # noqa: D102  # as in SublayerConnection
    def options(self, x: Tensor) -> Options: ...  # noqa: D102


class End:
    """The reader of the stream after the last sublayer: the final norm, with the attributes of a connection."""

    c = ONE

    def __init__(self, norm: nn.Module | None) -> None:
        self._modules = {"norm_in": norm}


NO_NORM = End(None)  # reads the stream itself
Reader = Connection | End


class StackRun:
    """The state of one call of a stack: its keyword arguments, its dtypes and its final norm."""

    __slots__ = ("context", "dtype", "end", "is_simple", "kind", "plain_classes", "residual_dtype", "shape", "writes")

    def __init__(
        self,
        norm: NormKind,
        x: Tensor,
        residual_dtype: torch.dtype | None,
        context: Mapping[str, Any],
        end: End = NO_NORM,
        keep_writes: bool = False,
    ) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x is {type(x).__name__}, expected a tensor of shape (*, d_model).")
        self.kind = norm
        self.context = context
        self.dtype = x.dtype
        self.shape = x.shape[-1:]
        self.residual_dtype = residual_dtype
        self.end = end
        self.writes: list[Tensor] | None = [] if keep_writes else None
        # Norms of these classes need not be called as modules. Empty while hooks for all modules are registered.
        self.plain_classes = () if _has_any_global_hook() else PLAIN[norm]
        self.is_simple = not keep_writes and residual_dtype is None

    def to_stream(self, x: Tensor) -> Tensor:
        """Return x in the stream's dtype."""
        return x if self.residual_dtype is None else x.to(self.residual_dtype)

    def from_stream(self, x: Tensor) -> Tensor:
        """Return x in the dtype of the stack's input."""
        return x if self.residual_dtype is None else x.to(self.dtype)

    def read(self, x: Tensor, reader: Reader) -> Tensor:
        """Return c * N_in(x)."""
        norm = reader._modules["norm_in"]
        if norm is None:
            return self.from_stream(_scaled(x, reader.c))
        return self.normalize(x, norm, reader.c, None if self.residual_dtype is None else self.dtype)

    def normalize(self, x: Tensor, norm: Any, c: Scale = ONE, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return c * N(x)."""
        if not self._is_plain(norm):
            y: Tensor = norm(x)
            return _scaled(y if out_dtype is None else y.to(out_dtype), c)
        weight, bias, factor = _scaled_affine(norm, c)
        arguments = (x, weight, bias) if self.kind == "layer" else (x, weight)
        return _scaled(FUNCTIONS[self.kind][0](*arguments, eps=norm.eps, out_dtype=out_dtype), factor)

    def branch(self, connection: Connection, read: Tensor) -> Tensor:
        """Return N_branch(f(read))."""
        modules = connection._modules
        sublayer: Any = modules.get("sublayer")
        if sublayer is None:  # a callable that is no module
            sublayer = connection.sublayer
        branch: Tensor
        if self.context:
            accepted = connection.accepted_kwargs
            branch = sublayer(
                read, **{name: t for name, t in self.context.items() if accepted is None or name in accepted}
            )
        else:
            branch = sublayer(read)
        if branch.__class__ is not Tensor and not isinstance(branch, Tensor):
            refuse_output(connection, branch, read)
        norm = modules["norm_branch"]
        if norm is None:
            return branch
        if branch.shape != read.shape:
            refuse_output(connection, branch, read)
        return self.normalize(branch, norm)

    def add_and_norm(
        self, connection: Connection, x: Tensor, branch: Tensor, reader: Reader | None, options: Options | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return x' and the input of `reader` that follows from it.

        Args:
            connection: the connection of the sublayer.
            x: the stream before the add.
            branch: the output of `branch`.
            reader: the next sublayer or the end of the stack; None if nothing reads x' yet.
            options: the result of `add_options`, if it was called before.
        """
        try:
            if options is None:
                if self.is_simple and reader is not None:
                    result = self._fast_add_and_norm(connection, x, branch, reader)
                    if result is not None:
                        return result
                options = self.add_options(connection, x)
            if self.writes is not None:
                options = self._keep_write(x, branch, options)
            norm_out = connection._modules["norm_out"]
            if norm_out is not None:
                x, _ = self._fused(x, branch, norm_out, ONE, options, self.residual_dtype, return_residual=False)
                return x, x if reader is None else self.read(x, reader)
            norm = None if reader is None else reader._modules["norm_in"]
            if reader is None or norm is None:
                x = functional.add_residual(x, branch, **options)
                return x, x if reader is None else self.read(x, reader)
            needs_stream = reader.__class__ is not End or self.writes is not None
            read, x = self._fused(x, branch, norm, reader.c, options, self.dtype, return_residual=needs_stream)
            return x, read
        except (TypeError, ValueError, RuntimeError):
            if branch.shape != x.shape:
                refuse_output(connection, branch, x)
            raise

    def _fast_add_and_norm(
        self, connection: Connection, x: Tensor, branch: Tensor, reader: Reader
    ) -> tuple[Tensor, Tensor] | None:
        """Return the result of `add_and_norm` for a plain add and one norm, None for anything else."""
        norm_out, norm_in, c = connection._modules["norm_out"], reader._modules["norm_in"], reader.c
        norm = norm_in if norm_out is None else norm_out
        if norm is None or (norm_out is not None and norm_in is not None) or not (c.__class__ is float and c == ONE):
            return None
        if not (self._is_plain_add(connection) and self._is_plain(norm)):
            return None
        eps: Any = norm.eps
        if eps is None:
            return None
        table = norm._parameters
        weight, bias, is_rms = table["weight"], table.get("bias"), self.kind == "rms"
        if norm_out is not None or reader.__class__ is End:
            y: Any = dispatch.fast_path(x, branch, weight, bias, eps, is_rms, False)
            return (x, y) if norm_out is None else (y, y)
        read, z = dispatch.fast_path(x, branch, weight, bias, eps, is_rms, True)
        return z, read

    def add(self, connection: Connection, x: Tensor, branch: Tensor, options: Options) -> Tensor:
        """Return a * x + b * branch."""
        if branch.shape != x.shape:
            refuse_output(connection, branch, x)
        return functional.add_residual(x, branch, **options)

    def add_options(self, connection: Connection, x: Tensor) -> Options:
        """Return the options of a connection's add; this draws its random numbers."""
        return NO_OPTIONS if self._is_plain_add(connection) else connection.options(x)

    def _is_plain_add(self, connection: Connection) -> bool:
        """Return whether the add of a connection has no option."""
        a, b = connection.a, connection.b
        return (
            a.__class__ is float
            and b.__class__ is float
            and a == b == ONE
            and self.residual_dtype is None
            and not (connection.training and (connection.dropout or connection.stochastic_depth))
        )

    def _fused(
        self,
        x: Tensor,
        branch: Tensor,
        norm: Any,
        c: Scale,
        options: Options,
        out_dtype: torch.dtype | None,
        *,
        return_residual: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return c * N(sum) and the sum (or x without `return_residual`); `out_dtype` holds if the stream has its own dtype."""
        if self.residual_dtype is None:
            out_dtype = None
        if not self._is_plain(norm):
            total = functional.add_residual(x, branch, **options)
            return self.normalize(total, norm, c, out_dtype), total
        weight, bias, factor = _scaled_affine(norm, c)
        result = FUNCTIONS[self.kind][1](
            x, branch, weight, bias, norm.eps, return_residual=return_residual, out_dtype=out_dtype, **options
        )
        y, z = result if return_residual else (result, x)
        return _scaled(y, factor), z

    def _is_plain(self, norm: Any) -> bool:
        """Return whether a norm computes exactly its formula, so that the module need not be called."""
        return (
            norm.__class__ in self.plain_classes
            and norm.normalized_shape == self.shape
            and "weight" in norm._parameters
            and "forward" not in norm.__dict__
            and not norm._forward_hooks
            and not norm._forward_pre_hooks
            and not norm._backward_hooks
            and not norm._backward_pre_hooks
        )

    def _keep_write(self, x: Tensor, branch: Tensor, options: Options) -> Options:
        """Keep the write, in float32 at least; return the options with the seed that the write used."""
        options = with_seed(options, x)
        write_options = {
            name: value for name, value in options.items() if name not in ("residual_scale", "residual_dtype")
        }
        zeros = torch.zeros_like(x, dtype=WIDE.get(x.dtype, torch.float32))
        assert self.writes is not None
        self.writes.append(functional.add_residual(zeros, branch, **write_options))
        return options


def with_seed(options: Options, x: Tensor) -> Options:
    """Return the options with a seed of the dropout mask, so that two adds can share it."""
    if "dropout_p" not in options:
        return options
    return {**options, "seed": torch.randint(-(2**63), 2**63 - 1, (), device=x.device)}


def _scaled_affine(norm: Any, c: Scale) -> tuple[Tensor | None, Tensor | None, Scale]:
    """Return c * weight, c * bias, and the factor that remains to be applied: c if there is no weight."""
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


def refuse_output(connection: Connection, output: Any, read: Tensor) -> NoReturn:
    """Raise an error for a sublayer whose output is not a tensor in the shape of its input."""
    place, name = connection.place, getattr(connection.sublayer, "__name__", type(connection.sublayer).__name__)
    path = f"sublayers[{place.layer * place.sublayers_per_layer + place.sublayer}] ({name})"
    if isinstance(output, Tensor):
        raise ValueError(
            f"{path} returned shape {tuple(output.shape)}, expected {tuple(read.shape)}, the shape of its input: the output "
            "is added to the stream element by element; let the sublayer's last projection have the stream's width."
        )
    if isinstance(output, Sequence) and output and isinstance(output[0], Tensor):
        raise TypeError(
            f"{path} returned a {type(output).__name__} of {len(output)}, expected one tensor: wrap the sublayer so that it "
            "returns the tensor to add, as in lambda x, **kw: module(x, **kw)[0]."
        )
    raise TypeError(f"{path} returned {type(output).__name__}, expected a tensor of shape {tuple(read.shape)}.")
