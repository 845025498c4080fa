"""A stack of attention and feed-forward before training, its norm in one of six places: what is measured at every depth.

The weights are the same for every placement of a seed (in DeepNorm times its beta, where its paper says so), and those of a
shallow stack are the first of a deep one, so that what changes is the placement alone. All of it takes some tens of
milliseconds: the explorer computes it while a slider is moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from addnorm import wirings
from addnorm._util.arguments import check_bool, check_choice, check_float, check_int
from addnorm.lab.train import one_thread
from addnorm.nn import ResidualStack, SublayerConnection, Wiring, block
from addnorm.nn.norm import NormKind
from addnorm.wirings.catalog import deepnorm_constants

__all__ = ["PLACEMENTS", "Flip"]

PLACEMENTS: dict[str, Callable[[], Wiring]] = {
    "post": wirings.post_ln,
    "pre": wirings.pre_ln,
    "sandwich": wirings.sandwich,
    "reordered": wirings.reordered,
    "deepnorm": wirings.deepnorm,
    "none": wirings.no_norm,
}
"""The wirings between which the norm moves, by the name of its place."""

REMEMBERED = 2**20  # weights over six: of larger stacks none are kept
KEPT = 2  # shapes
BAND = (0.05, 0.95)  # of the tokens, around their mean

Modules = tuple[nn.Module, ...]
# What was measured last, by its shape: the norm is moved far more often than anything else is changed. Only one thread measures.
_kept: dict[tuple[int, int], tuple[Modules, Any, Any]] = {}


@dataclass(frozen=True)
class Flip:
    """A stack at init, and everything that is chosen about it.

    x_0 is N(0, 1), weights are N(0, gain^2 / fan_in) without biases, DeepNorm's values, outputs and feed-forwards smaller by its
    beta. The loss is the sum over tokens of <y_t, v_t>, y the output and each v_t random of length one: its gradient at y is v,
    whatever the stack does.

    Args:
        placement: one of `PLACEMENTS`.
        sublayers: attention and feed-forward in turn: an even number.
        d_model: the width.
        tokens: in the one sequence; each attends to all.
        gain: of the weights, not negative.
        alpha: the factor of the residual, a; None is the wiring's own, 1 or DeepNorm's (2L)^(1/4).
        seed: of weights, x_0 and v.
        norm: "layer" or "rms".
        residual: False takes the residual connection away, a = 0.
        final_norm: None is the wiring's own.

    Raises:
        ValueError, TypeError: what does not fit, by its name.

    Example:
        >>> from addnorm.lab import Flip
        >>> found = Flip("pre", sublayers=8).measure()
        >>> len(found["stream"]), found["labels"][:2]
        (9, ['x_0', 'attention 1'])
        >>> found["stream"][8] > found["stream"][0]
        True
    """

    placement: str = "post"
    sublayers: int = 24
    d_model: int = 64
    tokens: int = 16
    gain: float = 1.0
    alpha: float | None = None
    seed: int = 0
    norm: NormKind = "layer"
    residual: bool = True
    final_norm: bool | None = None

    def __post_init__(self) -> None:
        check_choice("placement", self.placement, PLACEMENTS)
        check_choice("norm", self.norm, ("layer", "rms"))
        for name, least in (("sublayers", 2), ("d_model", 1), ("tokens", 1), ("seed", 0)):
            check_int(name, getattr(self, name), least)
        if self.sublayers % 2:
            raise ValueError(
                f"sublayers is {self.sublayers}, expected an even number: attention and feed-forward in turn."
            )
        object.__setattr__(self, "gain", check_float("gain", self.gain))
        if self.gain < 0:
            raise ValueError(f"gain is {self.gain:g}, expected a number from 0: weights are N(0, gain^2 / fan_in).")
        if self.alpha is not None:
            object.__setattr__(self, "alpha", check_float("alpha", self.alpha, ", or None: as the wiring says"))
        if self.seed >= 2**63:
            raise ValueError(f"seed is {self.seed}, expected a whole number below 2^63, as torch takes it.")
        check_bool("residual", self.residual)
        if self.final_norm is not None:
            check_bool("final_norm", self.final_norm, ", or None: as the wiring says")

    @property
    def wiring(self) -> Wiring:
        """The wiring, with what was changed about it."""
        chosen = PLACEMENTS[self.placement]()
        row = chosen.row(0, 0, self.sublayers // 2)
        changed = replace(row, a=self._a)
        final = chosen.final_norm if self.final_norm is None else self.final_norm
        if changed == row and final == chosen.final_norm:
            return chosen
        return Wiring(chosen.name, changed, final_norm=final)

    @property
    def _a(self) -> float:
        if not self.residual:
            return 0.0
        if self.alpha is not None:
            return self.alpha
        return deepnorm_constants("encoder-only", self.sublayers // 2)[0] if self.placement == "deepnorm" else 1.0

    def build(self) -> tuple[ResidualStack, Tensor, Tensor]:
        """The stack, x_0 and v, `(1, tokens, d_model)` each."""
        sublayers = _allocated(self.sublayers, self.d_model)
        return self._stacked(sublayers), *_drawn(sublayers, *self._of_the_draw())

    def _of_the_draw(self) -> tuple[int, int, float, bool]:
        """What weights, x_0 and v depend on, besides the shape: all placements but DeepNorm have the same."""
        return self.seed, self.tokens, self.gain, self.placement == "deepnorm"

    def _remembered(self) -> tuple[Modules, Tensor, Tensor]:
        """The sublayers of the last measurement of this shape, with this one's weights: nobody else has them. And x_0 and v."""
        shape, key = (self.sublayers, self.d_model), self._of_the_draw()
        sublayers, of, drawn = _kept.pop(shape, None) or (_allocated(*shape), None, ())
        if of != key:
            drawn = _drawn(sublayers, *key)
        if self.sublayers * self.d_model**2 <= REMEMBERED:
            _kept[shape] = sublayers, key, drawn
        if len(_kept) > KEPT:
            del _kept[next(iter(_kept))]
        return sublayers, *drawn

    def _stacked(self, sublayers: Sequence[nn.Module]) -> ResidualStack:
        return ResidualStack(
            sublayers, self.d_model, self.wiring, norm=self.norm, elementwise_affine=False, device="cpu"
        )

    def measure(self) -> dict[str, Any]:
        """What is to be seen, as JSON types (with NaN and inf as they are): one number for each place, x_0 and every sublayer.

        On one thread, so that the numbers are the same whoever asks.

        Returns:
            A dict of lists: `labels` and `kinds` of the places; `stream`, the length of a token over sqrt(d), mean over tokens,
            with `low` and `high`, between which nine of ten tokens are; `gradient`, the length of a token's gradient of the loss
            at the stream there, mean over tokens; `parameters`, the length of its gradient of the sublayer's weights; `ratio`,
            |write| / |x| mean over tokens, and `cosine` of the two; `similarity`, the mean cosine of two tokens (None for one
            token); `map`, the share of each source (x_0, every write) in the stream, row by row of sources, None before it
            writes; `closure`, by how much the sources miss the stream at most, relative. None where there is nothing, as for the
            parameters of x_0.
        """
        with one_thread(), torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            return self._run()

    def _run(self) -> dict[str, Any]:
        sublayers, x, v = self._remembered()
        stack = self._stacked(sublayers)
        raws: list[Tensor] = []
        connections: list[SublayerConnection] = list(stack.connections)  # type: ignore[arg-type]  # a ModuleList of them
        hooks = [one.register_forward_hook(lambda module, args, raw: raws.append(raw)) for one in sublayers]
        stream = [x.detach().requires_grad_()]
        try:
            for here in connections:
                stream.append(here(stream[-1]))
        finally:
            for hook in hooks:
                hook.remove()
        y = stream[-1] if stack.norm_final is None else stack.norm_final(stream[-1])
        weights = [[*here.parameters()] for here in connections]
        found = iter(torch.autograd.grad((y * v).sum(), [*stream, *(one for some in weights for one in some)]))
        gradients = [next(found) for _ in stream]
        of_weights = [[next(found) for _ in some] for some in weights]
        with torch.no_grad():
            return self._measured(connections, stream, raws, gradients, of_weights)

    def _measured(
        self, connections: list[SublayerConnection], stream: list[Tensor], raws: list[Tensor], gradients: list[Tensor],
        of_weights: list[list[Tensor]],
    ) -> dict[str, Any]:  # fmt: skip
        x = torch.cat(stream).double()  # (places, tokens, d_model)
        writes = torch.cat([_write(here, raw) for here, raw in zip(connections, raws, strict=True)]).double()
        lengths = x.norm(dim=-1)
        rms = lengths / self.d_model**0.5
        low, high = rms.quantile(torch.tensor(BAND, dtype=rms.dtype, device="cpu"), dim=-1)
        ratio = (writes.norm(dim=-1) / lengths[:-1]).mean(-1)
        cosine = torch.cosine_similarity(writes, x[:-1], dim=-1).mean(-1)
        shares, closure = _shares(connections, x, writes)
        names = [("attention", "feed-forward")[i % 2] for i in range(self.sublayers)]
        return {
            "labels": ["x_0", *(f"{name} {i // 2 + 1}" for i, name in enumerate(names))],
            "kinds": ["start", *names],
            "stream": rms.mean(-1).tolist(), "low": low.tolist(), "high": high.tolist(),
            "gradient": torch.cat(gradients).double().norm(dim=-1).mean(-1).tolist(),
            "parameters": [None, *map(_length, of_weights)],
            "ratio": [None, *ratio.tolist()],
            "cosine": [None, *cosine.tolist()],
            "similarity": _likenesses(x),
            "map": shares, "closure": closure,
        }  # fmt: skip


def _allocated(n: int, d_model: int) -> Modules:
    """Sublayers whose weights nobody has drawn: `to_empty` from meta, in a third of its time."""
    found: list[nn.Module] = []
    for _ in range(n // 2):
        found += block(d_model, math.gcd(d_model, 4), bias=False, device="meta", dtype=torch.float32)
    for sublayer in found:
        for module in sublayer.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(torch.empty(module.weight.shape, dtype=torch.float32, device="cpu"))
    return tuple(found)


def _drawn(sublayers: Modules, seed: int, tokens: int, gain: float, deepnorm: bool) -> tuple[Tensor, Tensor]:
    """x_0 and v of a seed; and its weights, in the sublayers."""
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    d_model = cast(Any, sublayers[0]).d_model
    x, v = (torch.randn(1, tokens, d_model, **options) for _ in "xv")
    beta = deepnorm_constants("encoder-only", len(sublayers) // 2)[1] if deepnorm else 1.0
    for sublayer in cast(tuple[Any, ...], sublayers):
        for role, weight in sublayer.weight_roles():
            smaller = 1.0 if role in ("query", "key") else beta
            weight.detach().normal_(std=gain * smaller * weight.shape[1] ** -0.5, generator=generator)
    return x, v / v.norm(dim=-1, keepdim=True)


def _length(some: list[Tensor]) -> float:
    """Of tensors as one vector, in float64 without a copy in it."""
    return math.hypot(*(float(torch.linalg.vector_norm(one, dtype=torch.float64)) for one in some))


def _write(here: SublayerConnection, raw: Tensor) -> Tensor:
    """What is added to the stream: b * N_branch(f(...))."""
    return here.b * (raw if here.norm_branch is None else here.norm_branch(raw))  # type: ignore[no-any-return,operator]  # torch does not type attributes


def _likenesses(x: Tensor) -> list[float | None]:
    """The mean cosine of two different tokens, at every place: `addnorm.lab.toy_model.likeness` of each at once."""
    places, n, _ = x.shape
    if n == 1:
        return [None] * places
    unit = x / x.norm(dim=-1, keepdim=True)
    found: list[float | None] = ((unit.sum(-2).square().sum(-1) - n) / (n * (n - 1))).tolist()
    return found


def _shares(connections: list[SublayerConnection], x: Tensor, writes: Tensor) -> tuple[list[list[float | None]], float]:
    """Of every source at every place, and by how much they miss the stream at most: see `addnorm.decompose`."""
    sources, columns, misses = torch.empty_like(x), [], []
    sources[0] = x[0]
    for k, state in enumerate(x):
        if k:
            sources[k] = writes[k - 1]
            _carry(connections[k - 1], sources[: k + 1], x[k - 1])
        parts = sources[: k + 1]
        size = state.square().sum(-1)
        columns.append(((parts * state).sum(-1) / size).mean(-1).tolist())
        misses.append((parts.sum(0) - state).norm() / state.norm())
    n = len(columns)
    rows = [[columns[c][r] if r <= c else None for c in range(n)] for r in range(n)]
    return rows, float(torch.stack(misses).max())  # of which a NaN is the largest


def _carry(here: SublayerConnection, parts: Tensor, x: Tensor) -> None:
    """The sources after one more sublayer, in place; its write is the last of them.

    A norm on the stream is applied to each, with the denominator of their sum.
    """
    norm: Any = here.norm_out
    a, write = float(here.a), parts[-1]
    if norm is not None:
        z = a * x + write
        if here.norm == "layer":
            z -= z.mean(-1, keepdim=True)
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        rstd = (z.square().mean(-1, keepdim=True) + eps).rsqrt()
    if a != 1.0:
        parts[:-1] *= a
    if norm is not None:
        if here.norm == "layer":
            parts -= parts.mean(-1, keepdim=True)
        parts *= rstd
