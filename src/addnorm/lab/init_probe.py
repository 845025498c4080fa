"""`InitProbe`: an untrained stack with its norm in one of six placements, measured at every depth.

All placements of a seed have the same weights (DeepNorm scales some by its beta), and a shallow stack has the first weights of a
deep one, so only the placement differs. A measurement takes some tens of milliseconds: the explorer runs it while the user moves
a slider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn

from addnorm import reference, wirings
from addnorm._util.arguments import check_bool, check_choice, check_float, check_int, check_not_negative
from addnorm._util.norms import KINDS, Norm
from addnorm.lab.streams import StreamsRecorder, list_sites, token_similarities
from addnorm.lab.train import one_thread
from addnorm.nn import ResidualStack, SublayerConnection, Wiring, block
from addnorm.wirings.catalog import deepnorm_constants
from addnorm.wirings.spec import normalize_name

PLACEMENTS: dict[str, Callable[[], Wiring]] = {
    "post": wirings.post_ln,
    "pre": wirings.pre_ln,
    "sandwich": wirings.sandwich,
    "reordered": wirings.reordered,
    "deepnorm": wirings.deepnorm,
    "none": wirings.no_norm,
}
"""Wirings by the placement of their norm."""

CACHED_WEIGHTS = 2**20  # sublayers * d_model**2: larger stacks are not cached
CACHED_SHAPES = 2
BAND = (0.05, 0.95)  # quantiles of the tokens

Modules = tuple[nn.Module, ...]


@contextmanager
def plain_mode() -> Iterator[None]:
    """Run the block with one thread, with gradients and without autocast, whatever modes the caller has set."""
    with one_thread(), torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        yield


@dataclass(frozen=True)
class InitProbe:
    """Settings of an untrained stack of attention and feed-forward sublayers, and its measurement.

    x_0 is N(0, 1). Weights are N(0, gain^2 / fan_in) without biases; DeepNorm scales values, outputs and feed-forward weights by
    its beta. The loss is the sum over tokens of <y_t, v_t>, where y is the output and v_t a random unit vector, so the gradient
    at y is v for every stack.

    Args:
        placement: one of `PLACEMENTS`, or the name of its wiring, as in "post_ln" or "post-LN" for "post".
        sublayers: even number of sublayers, alternately attention and feed-forward.
        d_model: width of the stream.
        tokens: length of the sequence. Each token attends to all tokens.
        gain: scale of the weights, at least 0.
        alpha: factor a of the residual. None is the wiring's factor: (2L)^(1/4) in DeepNorm with L layers, otherwise 1.
        seed: seed of the weights, x_0 and v.
        norm: "layer" or "rms".
        residual: False removes the residual connection: a = 0.
        final_norm: whether a norm follows the last sublayer. None is the wiring's setting.

    Raises:
        ValueError, TypeError: an argument has a wrong value. The message names the argument.

    Example:
        >>> from addnorm.lab import InitProbe
        >>> measured = InitProbe("pre", sublayers=8).measure()
        >>> len(measured["stream"]), measured["labels"][:2]
        (9, ['x_0', 'attention 1'])
        >>> measured["stream"][8] > measured["stream"][0]
        True
    """

    placement: str = "post"
    sublayers: int = 24
    d_model: int = 64
    tokens: int = 16
    gain: float = 1.0
    alpha: float | None = None
    seed: int = 0
    norm: Norm = "layer"
    residual: bool = True
    final_norm: bool | None = None

    def __post_init__(self) -> None:
        names = {maker.__name__: name for name, maker in PLACEMENTS.items()}
        placement = normalize_name(self.placement)
        object.__setattr__(self, "placement", names.get(placement, placement))
        check_choice("placement", self.placement, PLACEMENTS)
        check_choice("norm", self.norm, KINDS)
        check_size(self)
        object.__setattr__(self, "gain", check_not_negative("gain", self.gain))
        if self.alpha is not None:
            object.__setattr__(self, "alpha", check_float("alpha", self.alpha, ", or None: the wiring's value"))
        check_bool("residual", self.residual)
        if self.final_norm is not None:
            check_bool("final_norm", self.final_norm, ", or None: the wiring's value")

    @property
    def wiring(self) -> Wiring:
        """Wiring of `placement` with this probe's `alpha`, `residual` and `final_norm`."""
        chosen = PLACEMENTS[self.placement]()
        row = chosen.row(0, 0, self.sublayers // 2)
        a = row.a if self.alpha is None else self.alpha
        changed = replace(row, a=a if self.residual else 0.0)
        final = chosen.final_norm if self.final_norm is None else self.final_norm
        if changed == row and final == chosen.final_norm:
            return chosen
        return Wiring(chosen.name, changed, final_norm=final)

    def build(self) -> tuple[ResidualStack, Tensor, Tensor]:
        """Return the stack, x_0 and v, `(1, tokens, d_model)` each."""
        return self._build(_allocate)

    def _build(self, allocate: Callable[[int, int], Modules]) -> tuple[ResidualStack, Tensor, Tensor]:
        sublayers = allocate(self.sublayers, self.d_model)
        x_0, v = _draw(sublayers, self.seed, self.tokens, self.gain, self.placement == "deepnorm")
        stack = ResidualStack(
            sublayers, self.d_model, self.wiring, norm=self.norm, elementwise_affine=False, device="cpu"
        )
        return stack, x_0, v

    @plain_mode()
    def measure(self) -> dict[str, Any]:
        """Return statistics at each place, x_0 and every sublayer, as JSON types with NaN and infinity.

        torch uses one thread, so the numbers do not depend on the caller's settings.

        Returns:
            A dict. Each key but `closure` has a list over the places, with None where a statistic does not exist:

            - `labels`, `kinds`: the names of the places.
            - `stream`: the norm of a token over sqrt(d), mean over tokens. `low` and `high` are its 5% and 95% quantiles.
            - `gradient`: the norm of the loss's gradient at a token of the stream, mean over tokens.
            - `parameters`: the norm of the gradient of the sublayer's weights.
            - `ratio`, `cosine`: |write| / |x|, and the cosine of write and x, means over tokens.
            - `similarity`: the mean cosine of two tokens.
            - `direct_path`: the factor with which x_0 and each write reach the end through adds and norms alone: the product of
              the norms' slopes along the residual path, 1 in pre-LN.
            - `map`: for each source (x_0 and every write) its share in the stream at each place, None before the source exists.
            - `closure`: the largest relative difference between the stream and the sum of its sources, one number.
        """
        stack, x_0, v = self._build(_reuse if self.sublayers * self.d_model**2 <= CACHED_WEIGHTS else _allocate)
        stack.zero_grad()  # the sublayers may have gradients of an earlier measurement
        with StreamsRecorder(stack) as recorder:
            (stack(x_0.requires_grad_()) * v).sum().backward()
        states = [state for (state,) in recorder.states]
        x = torch.cat(states).detach().double()  # (places, tokens, d_model)
        writes = torch.cat([site.write for site in recorder.sites]).detach().double()
        lengths = x.norm(dim=-1)
        rms = lengths / self.d_model**0.5
        low, high = rms.quantile(torch.tensor(BAND, dtype=rms.dtype, device="cpu"), dim=-1)
        ratio = (writes.norm(dim=-1) / lengths[:-1]).mean(-1)
        cosine = torch.cosine_similarity(writes, x[:-1], dim=-1).mean(-1)
        shares, closure = _shares(stack.connections, x, writes)
        return {
            **name_places(self.sublayers),
            "stream": rms.mean(-1).tolist(), "low": low.tolist(), "high": high.tolist(),
            "gradient": torch.cat([cast(Tensor, state.grad) for state in states]).double().norm(dim=-1).mean(-1).tolist(),
            "parameters": [None, *map(_norm_of_gradient, stack.connections)],
            "ratio": [None, *ratio.tolist()],
            "cosine": [None, *cosine.tolist()],
            "similarity": [None] * len(x) if self.tokens == 1 else token_similarities(x).tolist(),
            "direct_path": stack.direct_path(x_0).tolist(),
            "map": shares, "closure": closure,
        }  # fmt: skip


def check_size(probe: Any) -> None:
    """Raise a ValueError or TypeError if the `sublayers`, `d_model`, `tokens` or `seed` of a probe is invalid."""
    for name, minimum in (("sublayers", 2), ("d_model", 1), ("tokens", 1), ("seed", 0)):
        check_int(name, getattr(probe, name), minimum)
    if probe.sublayers % 2:
        raise ValueError(
            f"sublayers is {probe.sublayers}, expected an even number: attention and feed-forward alternate."
        )
    if probe.seed >= 2**63:
        raise ValueError(f"seed is {probe.seed}, expected a whole number below 2^63, the limit of torch.")


def name_places(sublayers: int) -> dict[str, list[str]]:
    """Return {"labels": ["x_0", "attention 1", ...], "kinds": ["start", "attention", ...]}."""
    sites = list_sites(sublayers)
    return {"labels": [site["id"] for site in sites], "kinds": [site["kind"] for site in sites]}


def _allocate(n: int, d_model: int) -> Modules:
    """Return `n` sublayers with uninitialized weights. This takes a third of the time of `to_empty` from the meta device."""
    sublayers: list[nn.Module] = []
    for _ in range(n // 2):
        sublayers += block(d_model, math.gcd(d_model, 4), bias=False, device="meta", dtype=torch.float32)
    for sublayer in sublayers:
        for module in sublayer.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(torch.empty(module.weight.shape, dtype=torch.float32, device="cpu"))
    return tuple(sublayers)


# Users of the explorer change the placement far more often than the shape, and allocating takes a quarter of a measurement.
_reuse = lru_cache(maxsize=CACHED_SHAPES)(_allocate)


def _draw(sublayers: Modules, seed: int, tokens: int, gain: float, deepnorm: bool) -> tuple[Tensor, Tensor]:
    """Draw the weights into the sublayers, and return x_0 and v."""
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    d_model = cast(Any, sublayers[0]).d_model
    x, v = (torch.randn(1, tokens, d_model, **options) for _ in "xv")
    beta = deepnorm_constants("encoder-only", len(sublayers) // 2)[1] if deepnorm else 1.0
    for sublayer in cast(tuple[Any, ...], sublayers):
        for role, weight in sublayer.weight_roles():
            scale = 1.0 if role in ("query", "key") else beta
            weight.detach().normal_(std=gain * scale * weight.shape[1] ** -0.5, generator=generator)
    return x, v / v.norm(dim=-1, keepdim=True)


def _norm_of_gradient(module: nn.Module) -> float:
    """Return the norm of the gradients of all parameters as one vector, in float64 without float64 copies."""
    gradients = [cast(Tensor, parameter.grad) for parameter in module.parameters()]
    return math.hypot(*(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) for gradient in gradients))


def _shares(connections: list[SublayerConnection], x: Tensor, writes: Tensor) -> tuple[list[list[float | None]], float]:
    """Return the share of every source at every place (see `addnorm.decompose`), and the largest relative error of their sum."""
    parts, columns, errors = x[:1], [], []
    for k, state in enumerate(x):
        if k:
            parts = _carry(connections[k - 1], parts, x[k - 1], writes[k - 1 : k])
        columns.append(((parts * state).sum(-1) / state.square().sum(-1)).mean(-1).tolist())
        errors.append((parts.sum(0) - state).norm() / state.norm())
    rows = [[*row] for row in zip_longest(*columns)]  # a source has no share before its write
    return rows, float(torch.stack(errors).max())  # NaN counts as the largest


def _carry(connection: SublayerConnection, parts: Tensor, x: Tensor, write: Tensor) -> Tensor:
    """Return the sources' contributions after one more sublayer. The last one is that of the sublayer's own write.

    A norm on the stream is applied to each source with the denominator of their sum.
    """
    norm: Any = connection.norm_out
    a = float(connection.a)
    parts = torch.cat([a * parts, write])
    if norm is not None:
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        rstd = reference.statistics(a * x + write[0], connection.norm, eps).rstd
        if KINDS[connection.norm].is_centred:
            parts = parts - parts.mean(-1, keepdim=True)
        parts = parts * rstd
    return parts
