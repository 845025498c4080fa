"""Base class of the modules that compute coefficients, their result, and helpers that keep both in float32 or wider."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from addnorm._util.torch_internals import in_transform, is_recording
from addnorm.boundary import StreamGates, compute_gates
from addnorm.ops.autocast import disable_autocast
from addnorm.wirings.factors import Place


class Coefficients(NamedTuple):
    """Computed coefficients of one sublayer. A field is None if the constant of the stage is used instead.

    If the streams are one tensor `(*, n, d_model)`, the coefficients are tensors. If the streams are a tuple of n tensors, the
    coefficients are tuples, whose entries are floats or tensors that broadcast to `(*, d_model)`.

    Attributes:
        collapse: C, `(*, n)`, or gates `(*, n, d_model)`; or a tuple of n entries for each read.
        mix: A, `(*, n, n)`; or a tuple of rows of entries. None where it is the identity.
        inject: B, `(*, n)`; or a tuple of entries.
        bias: one entry for each new stream, added to it.
    """

    collapse: Any = None
    mix: Any = None
    inject: Any = None
    bias: Any = None


class Notation(NamedTuple):
    """Letters and formulas of the coefficients that a module computes, for equation, description and drawing.

    Attributes:
        collapse, mix, inject: the letters of C, A and B.
        terms: how to write the product of a coefficient and its operand, unless it is "letter operand", by "collapse", "mix" or
            "inject": `{"mix": "a ⊙ ({x} + v)"}`. {x} is the operand, {m} the number of the read if there are several.
        boxes: the boxes of a drawing, unless it is a single box with the letter: `{"mix": ("+v", "⊙a")}`.
        formulas: the definitions of the letters, in their order.
        learned: the letters of the parameters.
        start: how the coefficients start, in sentences.
    """

    collapse: str = "c"
    mix: str = "A"
    inject: str = "b"
    terms: Mapping[str, str] = MappingProxyType({})
    boxes: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    formulas: tuple[str, ...] = ()
    learned: str = ""
    start: str = ""


class CoefficientModule(nn.Module):
    """Base class of modules that compute coefficients.

    The parameters stay in float32 under `.bfloat16()`, `.half()` and autocast; with float64 streams everything is in float64.

    Class attributes:
        computes: which of "collapse", "mix", "inject" and "bias" the module returns.
        stacked: whether it takes the streams as one tensor `(*, n, d_model)`; otherwise as a tuple.
        appends: whether the `mix` that it computes has one row more than there are streams.
        notation: how texts write the coefficients. If this depends on the options, override `notate`.
        decays: names of the parameters to which weight decay applies.
        starts: initial values of parameters whose elements are equal at first. For others override `reset_parameters`.
        counterparts: for each constant and parameter here, its name in the module of transformers that computes the same.

    Args:
        d_model: width of the streams.
        n: number of streams.
        reads: number of the sublayer's reads.
        place: position of the sublayer; for a head the position after the last sublayer.
    """

    computes: ClassVar[tuple[str, ...]] = ()
    stacked: ClassVar[bool] = True
    appends: ClassVar[bool] = False
    notation: ClassVar[Notation] = Notation()
    decays: ClassVar[tuple[str, ...]] = ()
    starts: ClassVar[Mapping[str, float]] = MappingProxyType({})
    counterparts: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init__(self, d_model: int, n: int, reads: int, place: Place) -> None:
        super().__init__()
        self.d_model, self.n, self.reads, self.place = d_model, n, reads, place

    @classmethod
    def find_computed(cls, **options: Any) -> tuple[str, ...]:
        """Return which coefficients a module with these options computes. Options may leave out some of `computes`."""
        return cls.computes

    @classmethod
    def notate(cls, **options: Any) -> Notation:
        """Return how texts write the coefficients that a module with these options computes; by default `notation`."""
        return cls.notation

    def reset_parameters(self) -> None:
        """Set the parameters to their initial values: by default those of `starts`."""
        if not self.starts:
            raise NotImplementedError
        for name, value in self.starts.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                nn.init.constant_(parameter, value)

    @property
    def is_constant(self) -> bool:
        """Whether the coefficients do not depend on the streams."""
        return False

    def gates(self) -> StreamGates | None:
        """Return the parameters with which `addnorm.add_norm_streams` computes the coefficients; None if it cannot."""
        return None

    def compute(self, streams: Any) -> Coefficients:
        """Return the coefficients for streams, with autocast off."""
        gates = self.gates()
        assert gates is not None, "a module without gates overrides this method"
        return Coefficients(*compute_gates(streams, gates))

    def forward(self, streams: Any) -> Coefficients:
        """Return the coefficients of every token: the streams are one tensor if `stacked`, otherwise a tuple."""
        with disable_autocast(streams if isinstance(streams, Tensor) else streams[0]):
            return self.compute(streams)

    @torch.no_grad()
    def load_transformers(self, source: Any) -> None:
        """Copy the parameters of the module of transformers that computes the same coefficients."""
        if not self.counterparts:
            raise NotImplementedError(f"{type(self).__name__} has no counterpart in transformers.")
        values = {
            own: attrgetter(name)(source) for own, name in self.counterparts.items() if getattr(self, own) is not None
        }
        self.check_settings(**{own: value for own, value in values.items() if own not in self._parameters})
        for own, parameter in self.named_parameters():
            parameter.copy_(values[own].reshape(parameter.shape))

    def check_settings(self, **settings: Any) -> None:
        """Raise a ValueError unless this module has the constants of the one to load. A state dict has none."""
        for name, value in settings.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, expected {value!r} as in the source: build the wiring with that {name}."
                )

    def parameter(self, *shape: int, device: Any = None, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return a parameter in float32, or in float64 if that is the dtype."""
        return nn.Parameter(torch.empty(shape, device=device, dtype=widen_dtype(dtype)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CoefficientModule:
        """Apply `fn` to all tensors, but keep tensors in float32 that `fn` would round to a lower precision."""
        return super()._apply(keep_wide(fn), recurse)  # type: ignore[no-any-return,no-untyped-call]  # torch's

    def extra_repr(self) -> str:
        """Return the number of streams."""
        return f"n={self.n}"


def keep_wide(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function for `nn.Module._apply` that moves tensors as `fn` does, but rounds none below float32."""

    def move(t: Tensor) -> Tensor:
        result = fn(t)
        if t.is_floating_point() and result.is_floating_point() and result.dtype.itemsize < t.dtype.itemsize:
            return t.to(result.device, torch.promote_types(result.dtype, torch.float32))
        return result

    return move


def is_eager(*streams: Tensor) -> bool:
    """Return whether no transform, graph or tensor subclass sees a call on `streams`: its code may be untraceable."""
    is_traced = torch.compiler.is_compiling() or in_transform() or is_recording()
    return not is_traced and all(type(x) is Tensor for x in streams)


def uses_node(*streams: Tensor) -> bool:
    """Return whether a call may compute a formula by its own `torch.autograd.Function`."""
    return torch.is_grad_enabled() and is_eager(*streams)


def widen_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of coefficients for streams of `dtype`: float64 for float64, else float32.

    None means torch's default dtype.
    """
    return torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)


def widen(streams: Tensor) -> Tensor:
    """Return streams in float32. Streams in float64 stay in float64."""
    return streams if streams.dtype is torch.float64 else streams.float()


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean x^2 + eps) over the last dimension, which is kept."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
