"""Sublayers under a residual wiring, with each add fused with the norm that follows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from addnorm._util.arguments import check_bool, check_dtype, check_probability
from addnorm.nn.executor import NO_NORM, End, StackRun
from addnorm.nn.norm import NormKind
from addnorm.nn.residual import NormFactory, SublayerConnection, check_kwargs
from addnorm.nn.schedules import SCHEDULES
from addnorm.wirings.spec import FACTORS, Factor, Learned, Place, Row, Wiring, as_wiring

__all__ = ["ResidualStack", "StreamTerms"]


class StreamTerms(NamedTuple):
    """The stream of a stack as a sum: x_L = x_0 + the writes; `y` is the stack's output, N_final(x_L)."""

    x_0: Tensor
    writes: tuple[Tensor, ...]
    x_L: Tensor
    y: Tensor


class ResidualStack(nn.Module):
    r"""Sublayers with residual connections and norms as a wiring states, each add fused with the norm that follows.

        x_i = N_out(a * x_{i-1} + b * dropout(N_branch(f_i(c * N_in(x_{i-1})))))        y = N_final(x_S)

    The wiring (`addnorm.wirings`) states which norms and factors there are. S sublayers of pre-LN make S + 1 norm calls, all but
    the first fused with an add.

    Args:
        sublayers: modules or callables in their order, each from `(*, d_model)` to `(*, d_model)`. Of a call's keyword arguments
            (masks, memory, a cache) each sublayer receives those that its signature names.
        d_model: the width of the stream.
        wiring: a `Wiring`, a `Row`, or the name of a wiring without required options.
        sublayers_per_layer: for wirings that depend on depth, for parallel sublayers, and for checkpoints. None means 2
            (attention and feed-forward), where the last layer may be shorter; a decoder with cross-attention has 3.
        norm: "layer" or "rms".
        eps: epsilon of the norms; None means 1e-5 for LayerNorm and the machine epsilon for RMSNorm, as in torch.
        elementwise_affine: whether the norms have weights.
        bias: whether the norms have biases; None means True for LayerNorm and False for RMSNorm.
        dropout: dropout probability of each sublayer's output.
        stochastic_depth: the probability that a sample's branches of the last layer are dropped in training. It rises linearly
            with depth: in layer l of L it is l/L times this value (Huang et al. 2016, arXiv 1603.09382).
        checkpoint: whether to keep only the input of each layer and recompute the rest in backward.
        residual_dtype: dtype of the stream, such as torch.float32 with bfloat16 sublayers; None means that of x. The output has
            the dtype of x.
        final_norm: whether there is a final norm; None means as the wiring states.
        device: device of the norms and factors.
        dtype: dtype of the norms and factors.

    Attributes:
        connections: the `SublayerConnection` of every sublayer.
        norm_embedding, norm_final: norms, or None.

    Neither the connections nor their norms are called as modules: register hooks on the sublayers. A norm that has hooks, or was
    replaced, is called.

    Raises:
        ValueError, TypeError: a sublayer returns no tensor or another shape (the message has its path), or no sublayer accepts a
            keyword argument.

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
        self.wiring = as_wiring(wiring)
        self.d_model = d_model
        self.norm: NormKind = norm
        norms = NormFactory(d_model, norm, eps, elementwise_affine, bias, device, dtype)
        self.sublayers_per_layer, self.num_layers = _count_layers(len(sublayers), sublayers_per_layer)
        self.residual_dtype = check_dtype("residual_dtype", residual_dtype)
        check_bool("checkpoint", checkpoint)
        self.checkpoint = checkpoint
        check_probability("stochastic_depth", stochastic_depth)
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
        _check_rows(self)
        self._share()
        self.register_load_state_dict_post_hook(_share_again)  # type: ignore[no-untyped-call]  # torch's
        if final_norm is None:
            final_norm = self.wiring.ends_in_norm(self.num_layers)
        check_bool("final_norm", final_norm, ", or None: as the wiring states")
        self.norm_embedding = norms.make(self.wiring.embedding_norm)
        self.norm_final = norms.make(final_norm)

    @property
    def accepted_kwargs(self) -> frozenset[str] | None:
        """The keyword arguments that any of the sublayers receives; None means all."""
        accepted: set[str] = set()
        for layer in self.layers():
            for connection in layer:
                names = connection.accepted_kwargs
                if names is None:
                    return None
                accepted |= names
        return frozenset(accepted)

    def _share(self) -> None:
        """Make shared factors one parameter for all sublayers of a layer."""
        for layer in self.layers():
            for connection in layer[1:]:
                for name in FACTORS:
                    if _is_shared(getattr(connection.row, name)):
                        setattr(connection, name, getattr(layer[0], name))

    def _apply(self, *args: Any, **options: Any) -> ResidualStack:
        super()._apply(*args, **options)  # type: ignore[no-untyped-call]  # torch's
        self._share()  # moving parameters one by one separates shared ones
        return self

    def reset_parameters(self) -> None:
        """Reset norms to ones and zeros and learned factors to their initial values; the sublayers do not change."""
        for layer in self.layers():
            for connection in layer:
                connection.reset_parameters()
        for norm in (self.norm_embedding, self.norm_final):
            if norm is not None:
                norm.reset_parameters()

    def layers(self) -> list[list[SublayerConnection]]:
        """Return the connections, layer by layer."""
        connections: list[Any] = [*self.connections._modules.values()]
        n = self.sublayers_per_layer
        return [connections[i : i + n] for i in range(0, len(connections), n)]

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        """Return the output, `(*, d_model)`, in the dtype of x unless a sublayer returns another one."""
        return self._run(self._start(x, context), x)[0]

    def _start(self, x: Tensor, context: dict[str, Any], keep_writes: bool = False) -> StackRun:
        return StackRun(self.norm, x, self.residual_dtype, context, End(self.norm_final), keep_writes)

    def _embed(self, run: StackRun, x: Tensor) -> Tensor:
        """Return x_0, the stream before the first sublayer."""
        stream = run.to_stream(x)
        if self.norm_embedding is None:
            return stream
        return run.normalize(stream, self.norm_embedding, 1.0, self.residual_dtype)

    def _run(self, run: StackRun, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and the stream before the first and after the last sublayer."""
        if run.context:
            check_kwargs(run.context, self.accepted_kwargs)
            if run.context.get("cache") is not None:
                self._check_cache()
        stream = self._embed(run, x)
        schedule = SCHEDULES[self.wiring.flow]
        is_checkpointed = self.checkpoint and torch.is_grad_enabled() and run.writes is None
        layers = self.layers()
        if schedule.ignores_layers and not is_checkpointed:
            layers = [[connection for layer in layers for connection in layer]]
        state = schedule.start(run, stream, layers[0])
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            if is_checkpointed:
                state = checkpoint(schedule.layer, run, state, layer, following, use_reentrant=False)
            else:
                state = schedule.layer(run, state, layer, following)
        return schedule.end(run, state), stream, state[0]

    def _check_cache(self) -> None:
        """Check that each entry of a cache belongs to one place and one call."""
        if self.checkpoint and torch.is_grad_enabled():
            raise ValueError(
                "cache is given to a stack with checkpoint=True, expected none while gradients are on: recomputed keys would be "
                "stored twice; call it under torch.no_grad(), or without checkpoint."
            )
        first: dict[int, int] = {}
        for i, connection in enumerate(connection for layer in self.layers() for connection in layer):
            accepted = connection.accepted_kwargs
            if accepted is not None and "cache" not in accepted:
                continue
            k = first.setdefault(id(connection.sublayer), i)
            if k != i:
                raise ValueError(
                    f"sublayers[{i}] is sublayers[{k}] too and cache is given, expected separate modules: "
                    "a cache stores the keys of each module, not of each place; the modules may share parameters."
                )

    def profile_admin_(self, x: Tensor, **context: Any) -> None:
        """Set Admin's factor a of each sublayer: 1 for the first, then sqrt(a^2 var(x) + var f(x)) of the sublayer before.

        Variances are over all elements. Dropout is off during this call. `wirings.admin().init_(stack, x)` calls it.

        Raises:
            ValueError: a sublayer's output is not finite; no factor has changed then.

        Source: Liu et al. 2020, arXiv 2004.08249.
        """
        modes = {module: module.training for module in self.modules()}
        connections: Any = [connection for layer in self.layers() for connection in layer]
        factors, a = [], 1.0
        try:
            self.eval()
            with torch.no_grad():
                run = self._start(x, context)
                stream = self._embed(run, x)
                for connection in connections:
                    factors.append(a)
                    branch = run.branch(connection, run.from_stream(stream))
                    variance = a**2 * _variance(stream) + _variance(branch)
                    # Parameters change after the last measurement; until then the factor is an option of the add.
                    stream, _ = run.add_and_norm(connection, stream, branch, NO_NORM, {"residual_scale": a})
                    a = math.sqrt(variance)
                    if not math.isfinite(a):
                        raise ValueError(
                            f"x gives the sublayer {len(factors) - 1} an output that is not finite: admin cannot measure its "
                            "variance; check x and the sublayer's weights."
                        )
                for connection, value in zip(connections, factors, strict=True):
                    connection.a.fill_(value)
        finally:
            for module, mode in modes.items():
                module.training = mode

    def unroll(self, x: Tensor, **context: Any) -> StreamTerms:
        """Return x_0 and every write, after a check that their sum is x_L.

        A write is what is added to the stream: after norm, factors, dropout and stochastic depth; in float32 at least. The check
        allows one rounding in the stream's dtype for each add.

        Raises:
            ValueError: the wiring's stream is no plain sum of writes (it has a norm or a factor).
            RuntimeError: the sum differs from x_L: the stream is not finite.
        """
        if self.wiring.flow not in SUMS or not all(
            connection.row.is_sum for layer in self.layers() for connection in layer
        ):
            raise ValueError(
                f"the stream of {self.wiring.name} is no plain sum of writes ({self.wiring.equation()}): unroll a stack "
                "whose rows have a = 1 and no N_out, such as pre_ln."
            )
        run = self._start(x, context, keep_writes=True)
        y, x_0, x_L = self._run(run, x)
        writes = tuple(run.writes or ())
        with torch.no_grad():
            wide = torch.promote_types(x_0.dtype, torch.float32)
            total, size = x_0.to(wide), x_0.to(wide).abs()
            for write in writes:
                total, size = total + write, size + write.abs()
            error = (x_L.to(wide) - total).abs()
            tolerance = (len(writes) + 1) * torch.finfo(x_L.dtype).eps * size
            if not bool((error <= tolerance).all()):
                raise RuntimeError(
                    f"x_L differs from x_0 + the sum of the writes by up to {float(error.max()):.3g}, expected round-off: the "
                    "stream has elements that are not finite, or a sublayer changed its input in place."
                )
        return StreamTerms(x_0, writes, x_L, y)

    def without(self, i: int) -> ResidualStack:
        """Return this stack without the write of sublayer i, which is not called and adds zero.

        The norms and factors of the stream stay, and the other sublayers keep their places. Both stacks share their parameters
        and sublayers: `eval()` of one stack is `eval()` of the sublayers of both.
        """
        n = len(self.connections)
        if not (isinstance(i, int) and not isinstance(i, bool) and -n <= i < n):
            raise ValueError(f"i is {i!r}, expected the number of a sublayer, 0 to {n - 1}.")
        other: ResidualStack = _shallow(self)
        connections: list[Any] = list(self.connections)
        without_write = connections[i] = _shallow(connections[i])
        accepted = without_write.accepted_kwargs
        for name in ("sublayer", "norm_branch"):
            without_write._modules.pop(name, None)
        without_write.sublayer = ZeroSublayer(accepted)
        without_write.register_module("norm_branch", None)
        other.connections = nn.ModuleList(connections)
        return other

    def extra_repr(self) -> str:
        """Return the wiring and its equation."""
        ends = replace(self.wiring, final_norm=self.norm_final is not None)
        return f"{self.wiring!r}: {ends.equation()}"


SUMS = ("rows", "parallel")  # the flows with one stream, to which every sublayer adds once


def _check_rows(stack: ResidualStack) -> None:
    """Check that the schedule supports every row, and that sublayers of a layer agree on shared factors."""
    schedule = SCHEDULES[stack.wiring.flow]
    for layer in stack.layers():
        for name in FACTORS:
            factors = [getattr(connection.row, name) for connection in layer]
            if any(map(_is_shared, factors)) and factors != factors[:1] * len(factors):
                raise ValueError(
                    f"{name} is {', '.join(map(repr, factors))} in the rows of one layer of {stack.wiring.name!r}, expected the "
                    "same in all: a factor that is shared is one parameter."
                )
        for connection in layer:
            if not schedule.supports(connection.row):
                raise ValueError(
                    f"wiring {stack.wiring.name!r} has the row {connection.row!r}, expected {schedule.supported_rows}: its "
                    f"flow, {stack.wiring.flow!r}, runs no others; for other rows leave the flow out."
                )


class ZeroSublayer:
    """A sublayer that returns zeros and accepts the keyword arguments of the sublayer that it replaces."""

    def __init__(self, accepted_kwargs: frozenset[str] | None) -> None:
        self.accepted_kwargs = accepted_kwargs

    def __call__(self, read: Tensor, **_: Any) -> Tensor:
        return torch.zeros_like(read)


def _is_shared(factor: Factor) -> bool:
    return isinstance(factor, Learned) and factor.shared


def _share_again(stack: ResidualStack, _: Any) -> None:
    stack._share()  # load_state_dict(assign=True) gives each name its own tensor


def _shallow(module: Any) -> Any:
    """Return a copy that shares parameters and submodules, but has its own tables of them."""
    other = copy.copy(module)
    for name, table in vars(module).items():
        if isinstance(table, dict):  # modules, parameters, hooks
            setattr(other, name, copy.copy(table))
    return other


def _variance(t: Tensor) -> float:
    return float(t.double().var(correction=0))


def _count_layers(n: int, per_layer: int | None) -> tuple[int, int]:
    """Return the sublayers per layer and the number of layers."""
    if per_layer is None:
        return 2, -(-n // 2)
    if not isinstance(per_layer, int) or isinstance(per_layer, bool) or per_layer < 1 or n % per_layer:
        raise ValueError(
            f"sublayers_per_layer is {per_layer!r} for {n} sublayers, expected a whole number that divides {n}."
        )
    return per_layer, n // per_layer
