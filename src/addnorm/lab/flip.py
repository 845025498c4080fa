"""A stack of attention and feed-forward before training, its norm in one of six places: what is measured at every depth.

The weights are the same for every placement of a seed, and those of a shallow stack are the first of a deep one, so that what
changes is the placement alone. All of it takes some ten milliseconds: the explorer computes it while a slider is moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.lab.toy import likeness
from addnorm.lab.train import one_thread
from addnorm.nn import ResidualStack, SublayerConnection, Wiring, block, checks, wirings
from addnorm.nn.norm import NormKind
from addnorm.nn.wirings import deepnorm_constants

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

BAND = (0.05, 0.95)  # of the tokens, around their mean


@dataclass(frozen=True)
class Flip:
    """A stack at init, and everything that is chosen about it.

    x_0 is N(0, 1), weights are N(0, gain^2 / fan_in) without biases, DeepNorm's values, outputs and feed-forwards smaller by its
    beta. The loss is the sum over tokens of <y_t, v_t>, y the output and each v_t random of length one: its gradient at y is v,
    whatever the stack does.

    Args:
        placement: one of `PLACEMENTS`.
        sublayers: attention and feed-forward in turn: an even number.
        d: the width.
        tokens: in the one sequence; each attends to all.
        gain: of the weights.
        alpha: the factor of the residual, a; None is the wiring's own, 1 or DeepNorm's (2L)^(1/4).
        seed: of weights, x_0 and v.
        norm: "layer" or "rms".
        residual: False takes the residual connection away, a = 0.
        final_norm: None is the wiring's own.

    Example:
        >>> from addnorm.lab.flip import Flip
        >>> found = Flip("pre", sublayers=8).measure()
        >>> len(found["stream"]), found["labels"][:2]
        (9, ['x_0', 'attention 1'])
        >>> found["stream"][8] > found["stream"][0]
        True
    """

    placement: str = "post"
    sublayers: int = 24
    d: int = 64
    tokens: int = 16
    gain: float = 1.0
    alpha: float | None = None
    seed: int = 0
    norm: NormKind = "layer"
    residual: bool = True
    final_norm: bool | None = None

    def __post_init__(self) -> None:
        checks.one_of("placement", self.placement, PLACEMENTS)
        checks.one_of("norm", self.norm, ("layer", "rms"))
        for name, least in (("sublayers", 2), ("d", 1), ("tokens", 1), ("seed", 0)):
            checks.whole(name, getattr(self, name), least)
        if self.sublayers % 2:
            raise ValueError(
                f"sublayers is {self.sublayers}, expected an even number: attention and feed-forward in turn."
            )
        for name in ("gain", "alpha"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, checks.number(name, value))
        checks.flag("residual", self.residual)
        if self.final_norm is not None:
            checks.flag("final_norm", self.final_norm, ", or None: as the wiring says")

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
        """The stack, x_0 and v, `(1, tokens, d)` each."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(1, self.tokens, self.d, generator=generator)
        v = torch.randn(1, self.tokens, self.d, generator=generator)
        heads = math.gcd(self.d, 4)
        sublayers: list[nn.Module] = []
        for _ in range(self.sublayers // 2):
            with torch.device("meta"):  # whose weights nobody draws: they are drawn here
                sublayers += block(self.d, heads, bias=False)
        beta = deepnorm_constants("encoder-only", self.sublayers // 2)[1] if self.placement == "deepnorm" else 1.0
        for sublayer in sublayers:
            sublayer.to_empty(device="cpu")
            self._draw(sublayer, beta, generator)
        with torch.device("cpu"):
            stack = ResidualStack(sublayers, self.d, self.wiring, norm=self.norm, elementwise_affine=False)
        return stack, x, v / v.norm(dim=-1, keepdim=True)

    def _draw(self, sublayer: Any, beta: float, generator: torch.Generator) -> None:
        for role, weight in sublayer.weight_roles():
            smaller = 1.0 if role in ("query", "key") else beta
            weight.detach().normal_(std=self.gain * smaller * weight.shape[1] ** -0.5, generator=generator)

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
        with one_thread():
            return self._run()

    def _run(self) -> dict[str, Any]:
        stack, x, v = self.build()
        raws: list[Tensor] = []
        connections: list[SublayerConnection] = list(stack.connections)  # type: ignore[arg-type]  # a ModuleList of them
        for here in connections:
            here.sublayer.register_forward_hook(lambda module, args, raw: raws.append(raw))  # type: ignore[attr-defined]  # a module
        stream = [x.requires_grad_()]
        for here in connections:
            stream.append(here(stream[-1]))
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
        x = torch.cat(stream).double()  # (places, tokens, d)
        writes = torch.cat([_write(here, raw) for here, raw in zip(connections, raws, strict=True)]).double()
        lengths = x.norm(dim=-1)
        rms = lengths / self.d**0.5
        low, high = rms.quantile(torch.tensor(BAND, dtype=rms.dtype), dim=-1)
        ratio = (writes.norm(dim=-1) / lengths[:-1]).mean(-1)
        cosine = torch.cosine_similarity(writes, x[:-1], dim=-1).mean(-1)
        shares, closure = _shares(connections, x, writes)
        names = [("attention", "feed-forward")[i % 2] for i in range(self.sublayers)]
        return {
            "labels": ["x_0", *(f"{name} {i // 2 + 1}" for i, name in enumerate(names))],
            "kinds": ["start", *names],
            "stream": rms.mean(-1).tolist(), "low": low.tolist(), "high": high.tolist(),
            "gradient": torch.cat(gradients).double().norm(dim=-1).mean(-1).tolist(),
            "parameters": [None, *(float(torch.cat([one.flatten() for one in some]).double().norm()) for some in of_weights)],
            "ratio": [None, *ratio.tolist()],
            "cosine": [None, *cosine.tolist()],
            "similarity": [likeness(one) if self.tokens > 1 else None for one in x],
            "map": shares, "closure": closure,
        }  # fmt: skip


def _write(here: SublayerConnection, raw: Tensor) -> Tensor:
    """What is added to the stream: b * N_branch(f(...))."""
    return here.b * (raw if here.norm_branch is None else here.norm_branch(raw))  # type: ignore[no-any-return,operator]  # torch does not type attributes


def _shares(connections: list[SublayerConnection], x: Tensor, writes: Tensor) -> tuple[list[list[float | None]], float]:
    """Of every source at every place, and by how much they miss the stream at most: see `addnorm.decompose`."""
    parts, columns, misses = x[:1], [], []
    for k, state in enumerate(x):
        if k:
            parts = _carried(connections[k - 1], parts, x[k - 1], writes[k - 1])
        total = parts.sum(0)
        size = state.square().sum(-1)
        columns.append(((parts * state).sum(-1) / size).mean(-1).tolist())
        misses.append((total - state).norm() / state.norm())
    n = len(columns)
    rows = [[columns[c][r] if r <= c else None for c in range(n)] for r in range(n)]
    return rows, float(torch.stack(misses).max())  # of which a NaN is the largest


def _carried(here: SublayerConnection, parts: Tensor, x: Tensor, write: Tensor) -> Tensor:
    """The sources after one more sublayer: a norm on the stream is applied to each with the denominator of their sum."""
    norm: Any = here.norm_out
    parts = torch.cat([float(here.a) * parts, write[None]])
    if norm is None:
        return parts
    z = float(here.a) * x + write
    if here.norm == "layer":
        parts, z = parts - parts.mean(-1, keepdim=True), z - z.mean(-1, keepdim=True)
    eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
    return parts * (z.square().mean(-1, keepdim=True) + eps).rsqrt()
