"""Sublayers under a residual wiring, with each add fused with the norm that follows.

The constructor has many parameters, since each option is a parameter, as in torch.nn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from addnorm._util.arguments import check_bool, check_dtype, check_probability
from addnorm._util.norms import Norm
from addnorm.nn.ablation import copy_tables, find_inside, without_write
from addnorm.nn.checks import (
    check_kwargs,
    check_layers,
    check_streams,
    check_tensor,
    list_accepted,
    list_sublayers,
    refuse_width,
)
from addnorm.nn.connection import StreamHead, SublayerConnection, to_dtype
from addnorm.nn.layer import ResidualLayer, refuse_state
from addnorm.nn.norm import Device, Dtype, NormFactory
from addnorm.nn.plain_steps import run_layers
from addnorm.nn.state import NO_OPTIONS, StreamState, is_state
from addnorm.nn.step import add_and_norm, begin, find_collapse, finish, normalize
from addnorm.nn.unmodified import methods_of
from addnorm.nn.unrolling import StreamTerms, expand, find_gains, to_tensor
from addnorm.ops import save_outputs
from addnorm.wirings.coefficients.base import widen
from addnorm.wirings.init import evaluate
from addnorm.wirings.spec import Place, Stage, Wiring, as_wiring

LAYERS = methods_of(ResidualLayer)


class ResidualStack(nn.Module):
    r"""Sublayers with residual connections and norms as a wiring states, each add fused with the norm that follows.

        x_i = N_out(a * x_{i-1} + b * dropout(N_branch(f_i(c * N_in(x_{i-1})))))        y = N_final(x_S)

    The wiring (`addnorm.wirings`) states which norms and factors there are. S sublayers of pre-LN make S + 1 norm calls, all but
    the first fused with an add.

    Args:
        sublayers: modules or callables in their order, each from `(*, d_model)` to `(*, d_model)`. Each sublayer receives the
            keyword arguments of a call (masks, memory, a cache) that its signature names.
        d_model: the width of the stream.
        wiring: a `Wiring`, a `Row`, a `Stage`, or the name of a wiring without required options.
        sublayers_per_layer: the number of sublayers in a layer, which matters to wirings that depend on depth, to parallel
            sublayers and to checkpoints. None means 2 (attention and feed-forward), and the last layer may be shorter. A decoder
            with cross-attention has 3.
        norm: "layer" or "rms".
        eps: epsilon of the norms; None means 1e-5 for LayerNorm and the machine epsilon for RMSNorm, as in torch.
        elementwise_affine: whether the norms have weights.
        bias: whether the norms have biases; None means True for LayerNorm and False for RMSNorm.
        dropout: dropout probability of each sublayer's output.
        stochastic_depth: the probability that a sample's branches of the last layer are dropped in training. It rises linearly
            with depth: in layer l of L it is l/L times this value (Huang et al. 2016, arXiv 1603.09382).
        checkpoint: whether to keep only the input of each layer and recompute the rest in backward; a number k keeps the input
            of every k-th layer. With n streams about sqrt(n L / (n + 2)) layers need the least memory (arXiv 2512.24880).
        residual_dtype: dtype of the stream, such as torch.float32 with bfloat16 sublayers; None is the dtype of x. The output has
            the dtype of x.
        final_norm: whether there is a final norm. None means the wiring's setting.
        device: device of the norms and factors.
        dtype: dtype of the norms and factors.

    Attributes:
        layers: a `ResidualLayer` for each layer. The stack calls them one after the other, and they call their
            `SublayerConnection`s: hooks, `compile()`, `fully_shard`, activation checkpoints and pipeline stages apply to both.
        connections: a list of the connections of all layers, also of those inside wrappers such as activation checkpoints.
        norm_embedding, norm_final: norms, or None.

    A norm is computed in one call with an add, and not called as a module, unless it has hooks, is compiled, or was replaced.
    Where a sublayer changes the stack during a call, hooks, parametrizations and values of parameters act at once, all else from
    the next call on.

    State dicts from before `layers` existed, with the names `connections.0`, `connections.1` and so on, can still be loaded.

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
        wiring: Wiring | Stage | str = "pre_ln",
        *,
        sublayers_per_layer: int | None = None,
        norm: Norm = "layer",
        eps: float | None = None,
        elementwise_affine: bool = True,
        bias: bool | None = None,
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        checkpoint: bool | int = False,
        residual_dtype: Dtype = None,
        final_norm: bool | None = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        sublayers = list_sublayers(sublayers)
        self.wiring = as_wiring(wiring)
        self.d_model = d_model
        self.norm: Norm = norm
        settings: dict[str, Any] = {
            "norm": norm, "eps": eps, "elementwise_affine": elementwise_affine, "bias": bias, "device": device, "dtype": dtype,
        }  # fmt: skip
        norms = NormFactory(d_model, **settings)
        self.sublayers_per_layer, self.num_layers = _count_layers(len(sublayers), sublayers_per_layer)
        self.residual_dtype = check_dtype("residual_dtype", residual_dtype)
        if not isinstance(checkpoint, bool) and not (isinstance(checkpoint, int) and checkpoint > 0):
            raise ValueError(f"checkpoint is {checkpoint!r}, expected True, False, or a whole number of layers from 1.")
        self.checkpoint = checkpoint
        check_probability("stochastic_depth", stochastic_depth)
        connections: list[SublayerConnection] = []
        for i, sublayer in enumerate(sublayers):
            place = Place(*divmod(i, self.sublayers_per_layer), self.num_layers, self.sublayers_per_layer)
            connection = SublayerConnection(
                sublayer, d_model, self.wiring.stage(*place), place=place, dropout=dropout,
                stochastic_depth=stochastic_depth * place.number / self.num_layers, residual_dtype=residual_dtype, **settings,
            )  # fmt: skip
            connections.append(connection)
        n = self.sublayers_per_layer
        self.layers = nn.ModuleList(ResidualLayer(connections[i : i + n]) for i in range(0, len(connections), n))
        check_layers(self.wiring, self._layers())
        for connection, following in itertools.pairwise(connections):
            connection.keeps_state = following.shares_state
        self._share()
        self.register_load_state_dict_pre_hook(_rename_connections)  # type: ignore[no-untyped-call]  # torch's
        self.register_load_state_dict_post_hook(_share_again)  # type: ignore[no-untyped-call]  # as above
        if final_norm is None:
            final_norm = self.wiring.ends_in_norm(self.num_layers)
        check_bool("final_norm", final_norm, ", or None: as the wiring states")
        self.norm_embedding = norms.make(self.wiring.embedding_norm)
        after = Place(*divmod(len(sublayers), n), self.num_layers, n)
        head = self.wiring.last_read(after)
        self.head = None if head is None else StreamHead(head, after, norms)
        self.norm_final = norms.make(final_norm)
        self.is_stacked = check_streams(self.wiring, self.connections, head)

    @property
    def has_streams(self) -> bool:
        """Whether the wiring has several streams, or one stream that `Stage`s describe."""
        return self.head is not None

    @property
    def connections(self) -> list[SublayerConnection]:
        """The connection of every sublayer, in the order of the sublayers."""
        return find_inside(self.layers, SublayerConnection)

    def _layers(self) -> list[list[SublayerConnection]]:
        """Return a list of the connections for each layer."""
        return [find_inside(layer, SublayerConnection) for layer in find_inside(self.layers, ResidualLayer)]

    @property
    def accepted_kwargs(self) -> frozenset[str] | None:
        """The keyword arguments that at least one sublayer accepts. None means any keyword argument."""
        return list_accepted(self.connections)

    def _share(self) -> None:
        """Make shared factors one parameter for all sublayers of a layer."""
        for layer in self._layers():
            for connection in layer[1:]:
                for name, entry in connection.stage.learned.items():
                    if entry.shared:
                        setattr(connection, name, getattr(layer[0], name))

    def _apply(self, *args: Any, **options: Any) -> ResidualStack:
        super()._apply(*args, **options)  # type: ignore[no-untyped-call]  # torch's
        self._share()  # moving parameters one by one separates shared ones
        return self

    def reset_parameters(self) -> None:
        """Reset norms to ones and zeros and learned factors to their initial values. The sublayers' parameters do not change."""
        for connection in self.connections:
            connection.reset_parameters()
        ends: tuple[Any, ...] = (self.norm_embedding, self.head, self.norm_final)
        for module in ends:
            if module is not None:
                module.reset_parameters()

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        """Return the output, `(*, d_model)`, in the dtype of x unless a sublayer returns another dtype."""
        return self._finish(self._run(self._start(x), context))[1]

    def _start(self, x: Tensor, *, keep_sites: bool = False) -> StreamState:
        """Return the state before the first sublayer."""
        check_tensor(x)
        if x.dim() == 0 or x.size(-1) != self.d_model:
            refuse_width(x, self.d_model)
        stream, dtype = to_dtype(x, self.residual_dtype), None if self.residual_dtype is None else x.dtype
        norm = self._modules.get("norm_embedding")  # without the time of `nn.Module.__getattr__`
        if norm is not None:
            stream = normalize(stream, norm, self.norm, 1.0, self.residual_dtype)
        if self.head is not None:
            stream = begin(stream, self.wiring.embedding, stacked=self.is_stacked)
        return StreamState(stream, None, None, None, () if keep_sites else None, dtype)

    def _run(self, state: StreamState, context: dict[str, Any]) -> StreamState:
        """Return the state after the last sublayer."""
        if context:
            check_kwargs(context, self.accepted_kwargs)
            if context.get("cache") is not None:
                self._check_cache()
        is_checkpointed = self.checkpoint and torch.is_grad_enabled() and state.sites is None
        layers: Any = self._modules["layers"]
        if not is_checkpointed:
            return self._run_layers(layers._modules.values(), state, context)
        layers, size = [*layers._modules.values()], int(self.checkpoint)
        # A graph that is compiled saves what the compiler chooses, and torch.compile does not trace contexts of ours.
        contexts: dict[str, Any] = (
            {} if torch.compiler.is_compiling() else {"context_fn": save_outputs.checkpoint_contexts}
        )
        for i in range(0, len(layers), size):
            state = checkpoint(self._run_layers, layers[i : i + size], state, context, use_reentrant=False, **contexts)
        return state

    def _run_layers(self, layers: Iterable[Any], state: StreamState, context: dict[str, Any]) -> StreamState:
        """Run `layers` in order and return the state after them. The leading plain layers run without module calls."""
        layers = [*layers]
        state, number = run_layers(layers, LAYERS, state, context)
        if not is_state(state):
            refuse_state(self.layers, layers[number - 1], state)
        for layer in layers[number:]:
            state = layer(state, **context)
            if not is_state(state):
                refuse_state(self.layers, layer, state)
        return state

    def _finish(self, state: StreamState, *, return_stream: bool = False) -> tuple[Tensor, Tensor]:
        """Return the last stream and the output. Without `return_stream` the stream may lack the last write."""
        norm_final = self._modules.get("norm_final")
        if self.head is None:
            branch, options = (None, NO_OPTIONS) if state.pending is None else state.pending[:2]
            return add_and_norm(
                state.x, branch, norm_final, self.norm, 1.0, state.dtype, options, return_stream=return_stream
            )
        return self.head(state, norm_final)  # type: ignore[no-any-return]  # torch does not type a call

    def _check_cache(self) -> None:
        """Raise a ValueError if keys would be stored twice in a cache: by recomputation, or by a module in two places."""
        if self.checkpoint and torch.is_grad_enabled():
            raise ValueError(
                "cache is given to a stack with checkpoint=True, expected none while gradients are on: recomputed keys would be "
                "stored twice; call it under torch.no_grad(), or without checkpoint."
            )
        first: dict[int, int] = {}
        for i, connection in enumerate(self.connections):
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
            ValueError: a sublayer's output is not finite. All factors keep their values in this case.

        Source: Liu et al. 2020, arXiv 2004.08249.
        """
        connections: list[Any] = self.connections
        a = 1.0
        with evaluate(self), ExitStack() as undo:
            check_kwargs(context, self.accepted_kwargs)
            state = self._start(x, keep_sites=True)
            for i, connection in enumerate(connections):
                undo.callback(connection.a.copy_, connection.a.clone())
                connection.a.fill_(a)
                stream = finish(state)
                state = connection(state, **context)
                a = math.sqrt(a**2 * _variance(stream) + _variance(state.sites[-1].write))
                if not math.isfinite(a):
                    raise ValueError(
                        f"x gives the sublayer {i} an output that is not finite: admin cannot measure its variance; check x "
                        "and the sublayer's weights."
                    )
            undo.pop_all()  # only an error restores the factors

    def unroll(self, x: Tensor, **context: Any) -> StreamTerms:
        """Return x_L as the sum of what x_0 and every write contribute, and check the sum.

        A write is what is added to the stream: after norm, factors, dropout and stochastic depth; in float32 at least. If later
        sublayers mix, scale or normalize the streams, so are x_0 and the writes, with the coefficients and statistics of this
        call. The biases of a norm on the stream and of an add belong to the write of the same sublayer. With n streams at the
        end each term is `(*, n, d_model)`. The check allows for the streams' rounding at every sublayer.

        Raises:
            RuntimeError: the sum differs from x_L: the stream is not finite.
        """
        start, state, y = self._trace(x, context)
        with torch.no_grad():
            first, last = (s.x if self.has_streams else (s.x,) for s in (start, state))
            x_0, writes, tolerance = expand(first, state.sites or (), self.norm)
            x_L = widen(to_tensor(last))
            error = (x_L - sum(writes, x_0)).abs()
            if not bool((error <= tolerance).all()):
                raise RuntimeError(
                    f"x_L differs from x_0 + the sum of the writes by up to {float(error.max()):.3g}, expected round-off: the "
                    "stream has elements that are not finite, or a sublayer changed its input in place."
                )
        return StreamTerms(x_0, writes, x_L, y)

    @torch.no_grad()
    def direct_path(self, x: Tensor, **context: Any) -> Tensor:
        """Return the factor with which x_0 and each write reach the last read, averaged over tokens and features.

        The coefficients and the norms' statistics are those of this call. In pre-LN every factor is 1, since the gradient has a
        path through the residual adds alone. The final norm is not included. The result is `(1 + sublayers,)`, float32.

        Example:
            >>> layers = [torch.nn.Linear(8, 8) for _ in range(4)]
            >>> addnorm.ResidualStack(layers, 8, "pre_ln").direct_path(torch.randn(3, 8))
            tensor([1., 1., 1., 1., 1.])
        """
        _, state, _ = self._trace(x, context)
        row: Any = (1.0,)
        if self.head is not None:
            row = find_collapse(self.head, self.head.stage, state.x, state.collapse)[0]
        embedding = self.wiring.embedding if self.head is not None else row
        gains = find_gains(state.sites or (), embedding, row, self.norm, stacked=self.is_stacked)
        return torch.stack([gain.float().mean() for gain in gains])

    def _trace(self, x: Tensor, context: dict[str, Any]) -> tuple[StreamState, StreamState, Tensor]:
        """Return the first state, the last state with the last write added and its `sites` kept, and the output."""
        start = self._start(x, keep_sites=True)
        state = self._run(start, context)
        streams, y = self._finish(state, return_stream=True)
        return start, state._replace(x=streams, pending=None), y

    def without(self, i: int) -> ResidualStack:
        """Return this stack without the write of sublayer i, which is not called and adds zero.

        The norms and factors of the stream stay, and the other sublayers keep their places. Both stacks share their parameters
        and sublayers: `eval()` of one stack is `eval()` of the sublayers of both. A layer or connection that `torch.compile`
        wraps is not compiled in the new stack.
        """
        n = len(self.connections)
        if not (isinstance(i, int) and not isinstance(i, bool) and -n <= i < n):
            raise ValueError(f"i is {i!r}, expected the number of a sublayer, 0 to {n - 1}.")
        other: ResidualStack = copy_tables(self)
        other.layers = without_write(self.layers, i % n)
        return other

    def extra_repr(self) -> str:
        """Return the wiring and its equation."""
        ends = replace(self.wiring, final_norm=self.norm_final is not None)
        fits = self.sublayers_per_layer == 2 and (self.head is None or self.head.stage.n <= 100)  # more take too long
        text = ends.equation(self.num_layers if fits else None)
        return "\n".join([f"{self.wiring!r}:", text]) if "\n" in text else f"{self.wiring!r}: {text}"


def _rename_connections(stack: ResidualStack, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Rename the parameters of an old state dict, in which the connections of all layers were one list."""
    old = f"{prefix}connections."
    for name in [name for name in state_dict if name.startswith(old)]:
        digits, _, rest = name.removeprefix(old).partition(".")
        if digits.isdigit():
            layer, sublayer = divmod(int(digits), stack.sublayers_per_layer)
            state_dict[f"{prefix}layers.{layer}.connections.{sublayer}.{rest}"] = state_dict.pop(name)


def _share_again(stack: ResidualStack, _: Any) -> None:
    stack._share()  # load_state_dict(assign=True) gives each name its own tensor


def _variance(t: Tensor) -> float:
    return float(t.double().var(correction=0))


def _count_layers(n: int, per_layer: int | None) -> tuple[int, int]:
    """Return the number of sublayers per layer and the number of layers."""
    if per_layer is None:
        return 2, -(-n // 2)
    if not isinstance(per_layer, int) or isinstance(per_layer, bool) or per_layer < 1 or n % per_layer:
        raise ValueError(
            f"sublayers_per_layer is {per_layer!r} for {n} sublayers, expected a whole number that divides {n}."
        )
    return per_layer, n // per_layer
