"""Sublayers under a residual wiring, fused across their boundaries."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from addnorm import wirings
from addnorm._util.arguments import check_bool, check_dtype
from addnorm.nn.executor import Pass
from addnorm.nn.norm import NormKind
from addnorm.nn.residual import Norms, Routed, SublayerConnection, probability, refuse_unknown
from addnorm.nn.schedules import FLOWS
from addnorm.wirings.spec import Factor, Learned, Place, Row, Wiring

__all__ = ["ResidualStack", "Unrolled"]


class Unrolled(NamedTuple):
    """The stream of a stack as the sum it is: x_L = x_0 + the writes; `y` is the stack's output (N_final(x_L))."""

    x_0: Tensor
    writes: tuple[Tensor, ...]
    x_L: Tensor
    y: Tensor


class ResidualStack(Routed, nn.Module):
    r"""Sublayers, each in its residual connection and norms as a wiring says; Add & Norms fused across the boundaries.

        x_i = N_out(a * x_{i-1} + b * dropout(N_branch(f_i(c * N_in(x_{i-1})))))        y = N_final(x_S)

    Which norms and factors stand is the wiring's (`addnorm.wirings`). Where one sublayer ends in an add and the next begins
    with a norm, both are one call: S sublayers of pre-LN are S + 1 norm calls, all but the first fused with an add.

    Args:
        sublayers: modules or callables in their order, each from `(*, d_model)` to `(*, d_model)`. Of a call's keyword arguments
            (masks, memory, a cache) each sublayer receives those that its signature names.
        d_model: the width of the stream.
        wiring: a `Wiring`, a `Row`, or the name of a wiring that needs no options.
        sublayers_per_layer: for wirings that depend on the depth, for parallel ones, and for checkpoints. None is 2
            (attention and feed-forward), the last layer shorter if need be; a decoder with cross-attention has 3.
        norm: "layer" or "rms".
        eps: of the norms; None is 1e-5 for LayerNorm and the machine epsilon for RMSNorm, as in torch.
        elementwise_affine: whether the norms have weights.
        bias: whether the norms have biases; None: LayerNorm has, RMSNorm has not.
        dropout: of what each sublayer adds.
        stochastic_depth: the probability that a sample loses the last layer's branches while training; it rises
            linearly: layer l of L has l/L of it (Huang et al. 2016, arXiv 1603.09382).
        checkpoint: keep only what enters each layer, and compute it again in the backward.
        residual_dtype: of the stream, torch.float32 under bfloat16 sublayers; None: that of x. The output has x's.
        final_norm: whether N_final stands; None: as the wiring says.
        device: of the norms and factors.
        dtype: of the norms and factors.

    Attributes:
        connections: the `SublayerConnection` of every sublayer.
        norm_embedding, norm_final: norms, or None.

    Without gradients, on CPU and from 64 KB of stream on, the Add & Norms allocate nothing but the stream and the first read:
    a sublayer's output becomes what the next one reads, unless somebody else holds it. (B2T adds the input of a layer in
    memory of its own, ResiDual its second stream, and a norm after a norm has its own.)

    Neither the connections nor their norms are called as modules: hooks belong on the sublayers. A norm that has one, or that
    was replaced, is called.

    Raises:
        ValueError, TypeError: a sublayer that returns no tensor or another shape, with its path; a keyword nobody takes.

    Example:
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(6)]
        >>> stack = addnorm.ResidualStack(layers, 8, addnorm.wirings.pre_ln(), norm="rms")
        >>> x = torch.randn(2, 5, 8)
        >>> y = stack(x)
        >>> x_0, writes, x_L, y = stack.unroll(x)
        >>> torch.testing.assert_close(x_L, x_0 + sum(writes))
    """

    def __init__(
        self,
        sublayers: Iterable[Callable[..., Tensor]],
        d_model: int,
        wiring: Wiring | Row | str = "pre_ln",
        *,
        sublayers_per_layer: int | None = None,
        norm: NormKind = "layer",
        eps: float | None = None,
        elementwise_affine: bool = True,
        bias: bool | None = None,
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        checkpoint: bool = False,
        residual_dtype: torch.dtype | None = None,
        final_norm: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sublayers = list(sublayers)
        if not sublayers:
            raise ValueError("sublayers is empty, expected at least one: without any there is nothing to connect.")
        self.wiring = wirings.given(wiring)
        self.d_model = d_model
        self.norm: NormKind = norm
        norms = Norms(d_model, norm, eps, elementwise_affine, bias, device, dtype)
        self.sublayers_per_layer, self.num_layers = _layers(len(sublayers), sublayers_per_layer)
        self.residual_dtype = check_dtype("residual_dtype", residual_dtype)
        check_bool("checkpoint", checkpoint)
        self.checkpoint = checkpoint
        probability("stochastic_depth", stochastic_depth)
        affine: dict[str, Any] = {"device": device, "dtype": dtype}
        affine |= {"norm": norm, "eps": eps, "elementwise_affine": elementwise_affine, "bias": bias}
        self.connections = nn.ModuleList()
        for i, sublayer in enumerate(sublayers):
            place = Place(*divmod(i, self.sublayers_per_layer), self.num_layers, self.sublayers_per_layer)
            self.connections.append(
                SublayerConnection(
                    sublayer, d_model, self.wiring.row(*place), place=place, dropout=dropout, residual_dtype=residual_dtype,
                    stochastic_depth=stochastic_depth * place.number / self.num_layers, **affine,
                )
            )  # fmt: skip
        _refuse_rows(self)
        self._share()
        self.register_load_state_dict_post_hook(_shared_again)  # type: ignore[no-untyped-call]  # torch's
        if final_norm is None:
            final_norm = self.wiring.ends_in_norm(self.num_layers)
        check_bool("final_norm", final_norm, ", or None: as the wiring says")
        self.norm_embedding = norms.make(self.wiring.embedding_norm)
        self.norm_final = norms.make(final_norm)

    @property
    def takes(self) -> frozenset[str] | None:  # type: ignore[override]  # found out when it is asked for
        """The keyword arguments that any of the sublayers gets."""
        taken = [here.takes for layer in self.layers() for here in layer]
        return None if None in taken else frozenset().union(*(names for names in taken if names is not None))

    def _share(self) -> None:
        """One parameter for all the sublayers of a layer, where the row says so."""
        for layer in self.layers():
            for here in layer[1:]:
                for name in SHARED:
                    if _is_shared(getattr(here.row, name)):
                        setattr(here, name, getattr(layer[0], name))

    def _apply(self, *args: Any, **options: Any) -> ResidualStack:
        super()._apply(*args, **options)  # type: ignore[no-untyped-call]  # torch's
        self._share()  # what moves parameters one by one takes shared ones apart
        return self

    def reset_parameters(self) -> None:
        """Norms ones and zeros, learned factors their initial values; the sublayers are left alone."""
        for layer in self.layers():
            for connection in layer:
                connection.reset_parameters()
        for norm in (self.norm_embedding, self.norm_final):
            if norm is not None:
                norm.reset_parameters()

    def layers(self) -> list[list[SublayerConnection]]:
        """The connections, layer by layer."""
        connections: list[Any] = [*self.connections._modules.values()]
        n = self.sublayers_per_layer
        return [connections[i : i + n] for i in range(0, len(connections), n)]

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        """Return the output, `(*, d_model)`, in the dtype of x unless a sublayer returns another one."""
        return self._run(Pass(self.norm, x, self.residual_dtype, context), x)[0]

    def _run(self, run: Pass, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output, and the stream before the first and after the last sublayer."""
        if run.context:
            refuse_unknown(run.context, self.takes)
            if run.context.get("cache") is not None:
                self._refuse_cache()
        stream = run.begin(x)
        if self.norm_embedding is not None:
            stream = run.normalize(stream, self.norm_embedding, 1.0, self.residual_dtype)
        flow = FLOWS[self.wiring.flow]
        checkpointed = self.checkpoint and torch.is_grad_enabled() and run.writes is None
        layers = self.layers()
        if flow.at_once and not checkpointed:
            layers = [[here for layer in layers for here in layer]]
        state = flow.start(run, self, stream, layers[0])
        for layer, after in zip(layers, [*layers[1:], None], strict=True):
            if checkpointed:
                state = checkpoint(flow.layer, run, self, state, layer, after, use_reentrant=False)
            else:
                state = flow.layer(run, self, state, layer, after)
        return flow.end(run, self, state), stream, state[0]

    def _refuse_cache(self) -> None:
        """ValueError where what a sublayer keeps in a cache would not be that of one place and one call."""
        if self.checkpoint and torch.is_grad_enabled():
            raise ValueError(
                "cache is given to a stack with checkpoint=True, expected none while gradients are on: what is computed again "
                "would be kept twice; call it under torch.no_grad(), or without checkpoint."
            )
        first: dict[int, int] = {}
        for i, here in enumerate(here for layer in self.layers() for here in layer):
            takes = here.takes
            if (takes is None or "cache" in takes) and first.setdefault(id(here.sublayer), i) != i:
                raise ValueError(
                    f"sublayers[{i}] is sublayers[{first[id(here.sublayer)]}] too and cache is given, expected modules of their "
                    "own: a cache keeps the keys of each module, not of each place; the modules may share parameters."
                )

    def unroll(self, x: Tensor, **context: Any) -> Unrolled:
        """The stream as the sum it is: x_0 and every write, whose sum x_L was compared with.

        A write is exactly what is added: after norm, factors, dropout and stochastic depth; in float32 at least. The comparison
        allows each add to round once in the stream's dtype.

        Raises:
            ValueError: the wiring's stream is no plain sum of writes (a norm stands on it, or a factor).
            RuntimeError: it does not close: the stream is not finite.
        """
        if self.wiring.flow not in SUMS or not all(here.row.is_sum for layer in self.layers() for here in layer):
            raise ValueError(
                f"the stream of {self.wiring.name} is no plain sum of writes ({self.wiring.equation()}): unroll a stack "
                "whose rows have a = 1 and no N_out, such as pre_ln."
            )
        run = Pass(self.norm, x, self.residual_dtype, context, keep=True)
        y, x_0, x_L = self._run(run, x)
        writes = tuple(run.writes or ())
        with torch.no_grad():
            wide = torch.promote_types(x_0.dtype, torch.float32)
            total, size = x_0.to(wide), x_0.to(wide).abs()
            for write in writes:
                total, size = total + write, size + write.abs()
            off = (x_L.to(wide) - total).abs()
            bound = (len(writes) + 1) * torch.finfo(x_L.dtype).eps * size
            if not bool((off <= bound).all()):
                raise RuntimeError(
                    f"x_L differs from x_0 + the sum of the writes by up to {float(off.max()):.3g}, expected roundings: the "
                    "stream has elements that are not finite, or a sublayer changed its input in place."
                )
        return Unrolled(x_0, writes, x_L, y)

    def without(self, i: int) -> ResidualStack:
        """This stack without the write of sublayer i: it is not called, and adds zero; all parameters are shared.

        Everything else stands, norms and factors of the stream too, and the other sublayers keep their places. They are the same
        modules: `eval()` of one stack is `eval()` of their sublayers.
        """
        n = len(self.connections)
        if not (isinstance(i, int) and not isinstance(i, bool) and -n <= i < n):
            raise ValueError(f"i is {i!r}, expected the number of a sublayer, 0 to {n - 1}.")
        other: ResidualStack = _shallow(self)
        connections: list[Any] = list(self.connections)
        silent = connections[i] = _shallow(connections[i])
        takes = silent.takes
        for name in ("sublayer", "norm_branch"):
            silent._modules.pop(name, None)
        silent.sublayer = _Silent(takes)
        silent.register_module("norm_branch", None)
        other.connections = nn.ModuleList(connections)
        return other

    def extra_repr(self) -> str:
        """The wiring and its equation."""
        ends = replace(self.wiring, final_norm=self.norm_final is not None)
        return f"{self.wiring!r}: {ends.equation()}"


SUMS = ("rows", "parallel")  # the flows with one stream to which every sublayer adds once


def _refuse_rows(stack: ResidualStack) -> None:
    """ValueError for a row that the wiring's flow cannot run, or that shares a factor which the others of its layer have not."""
    flow = FLOWS[stack.wiring.flow]
    for layer in stack.layers():
        for name in SHARED:
            factors = [getattr(here.row, name) for here in layer]
            if any(map(_is_shared, factors)) and factors != factors[:1] * len(factors):
                raise ValueError(
                    f"{name} is {', '.join(map(repr, factors))} in the rows of one layer of {stack.wiring.name!r}, expected the "
                    "same in all: a factor that is shared is one parameter."
                )
        for here in layer:
            if not flow.fits(here.row):
                raise ValueError(
                    f"wiring {stack.wiring.name!r} has the row {here.row!r}, expected {flow.rows}: so its flow, "
                    f"{stack.wiring.flow!r}, runs; for other rows leave the flow out."
                )


class _Silent(Routed):
    """A sublayer that writes nothing, and takes what the one took in whose place it is."""

    def __init__(self, takes: frozenset[str] | None) -> None:
        self.takes = takes

    def __call__(self, read: Tensor, **_: Any) -> Tensor:
        return torch.zeros_like(read)


SHARED = ("a", "b", "c")


def _is_shared(factor: Factor) -> bool:
    return isinstance(factor, Learned) and factor.shared


def _shared_again(stack: ResidualStack, _: Any) -> None:
    stack._share()  # loaded with assign=True each name has a tensor of its own


def _shallow(module: Any) -> Any:
    """A copy that shares parameters and submodules, but not the tables they stand in."""
    other = copy.copy(module)
    for name, table in vars(module).items():
        if isinstance(table, dict):  # modules, parameters, hooks
            setattr(other, name, copy.copy(table))
    return other


def _layers(n: int, per_layer: int | None) -> tuple[int, int]:
    """Sublayers a layer, and layers."""
    if per_layer is None:
        return 2, -(-n // 2)
    if not isinstance(per_layer, int) or isinstance(per_layer, bool) or per_layer < 1 or n % per_layer:
        raise ValueError(
            f"sublayers_per_layer is {per_layer!r} for {n} sublayers, expected a whole number that divides {n}."
        )
    return per_layer, n // per_layer
