"""`StreamsProbe`: measurements by depth of an untrained stack with several residual streams and perturbed coefficients.

All wirings of a seed have the same sublayers, x_0 and targets, so only the wiring differs. Before training most wirings keep all
streams identical, which hides what A, B and C do: `perturbation` moves the parameters that the coefficients are computed from.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from addnorm import wirings
from addnorm._util.arguments import check_choice, check_int, check_not_negative
from addnorm.lab.cost import own_parameters
from addnorm.lab.init_probe import check_size, name_places, plain_mode
from addnorm.lab.streams import Numbers, StreamsRecorder, norm
from addnorm.lab.toy_model import ToyModel
from addnorm.nn import ResidualStack, Wiring
from addnorm.nn.norm import MODULES
from addnorm.stream.dataflow.state import fork_rng
from addnorm.wirings import CONSTRUCTORS

PROBED = (
    "pre_ln", "reversible", "hyper_connections", "mhc", "attention_residuals", "independent_hc", "gated_residual", "denseformer",
    "muddformer", "x0_residual", "resi_dual", "siamese_norm",
)  # fmt: skip
"""The wirings that can be probed: pre-LN as one stream, and those with several streams or with memory of earlier states."""

MIXED = ("hyper_connections", "mhc")
"""The wirings whose A mixes all streams: the gains of its products are compared."""


@dataclass(frozen=True)
class StreamsProbe:
    """Settings of an untrained stack with several streams, and its measurement.

    The model is `addnorm.lab.toy_model.ToyModel`: attention that averages all tokens, a feed-forward sublayer, all weights
    N(0, 1/d_model), x_0 ~ N(0, 1), and the mean cross-entropy of random targets as loss.

    Args:
        wiring: one of `PROBED`.
        sublayers: even number of sublayers, alternately attention and feed-forward.
        d_model: width of each stream.
        n: number of streams, for wirings with that option.
        seed: seed of the weights, x_0, the targets and the noise.
        perturbation: scale of the noise that is added to the parameters of A, B and C: see `perturb`.
        tokens: length of the sequence.

    Raises:
        ValueError, TypeError: an argument has a wrong value. The message names the argument.

    Example:
        >>> from addnorm.lab import StreamsProbe
        >>> equal, moved = (StreamsProbe("mhc", sublayers=4, perturbation=p).measure() for p in (0.0, 1.0))
        >>> len(moved["streams"]), len(moved["streams"][4])  # x_0 and 4 sublayers; 4 streams
        (5, 4)
        >>> equal["distance"] < 1e-6 < 0.1 < moved["distance"]
        True
    """

    wiring: str = "mhc"
    sublayers: int = 12
    d_model: int = 32
    n: int = 4
    seed: int = 0
    perturbation: float = 0.25
    tokens: int = 8

    def __post_init__(self) -> None:
        check_choice("wiring", self.wiring, PROBED)
        check_size(self)
        check_int("n", self.n, 1)
        object.__setattr__(self, "perturbation", check_not_negative("perturbation", self.perturbation))

    def make_wiring(self) -> Wiring:
        """Return the wiring."""
        options = {"n": self.n} if "n" in inspect.signature(CONSTRUCTORS[self.wiring]).parameters else {}
        return wirings.get(self.wiring, **options)

    @fork_rng()
    def build(self) -> ToyModel:
        """Return the model, with noise on the parameters of A, B and C."""
        model = ToyModel(self.sublayers // 2, "pre_ln", self.seed, tokens=self.tokens, d_model=self.d_model)
        model.stack = self._stack(model, self.wiring)
        return model

    @fork_rng()
    def _stack(self, model: ToyModel, wiring: str) -> ResidualStack:
        """Return a stack of the model's sublayers under a wiring, with noise on the parameters of A, B and C."""
        torch.manual_seed(self.seed)  # for initial values that are drawn
        sublayers = [connection.sublayer for connection in model.stack.connections]
        chosen = replace(self, wiring=wiring).make_wiring()
        stack = ResidualStack(sublayers, self.d_model, chosen, elementwise_affine=False)
        perturb(stack, self.perturbation, self.seed)
        return stack

    @plain_mode()
    def measure(self) -> Numbers:
        """Return statistics at each place, x_0 and every sublayer, as JSON types with NaN and infinity.

        torch uses one thread, so the numbers do not depend on the caller's settings.

        Returns:
            What `addnorm.lab.streams.StreamsRecorder.to_dict` returns, and
            `labels` and `kinds` of the places;
            `write_gradients`, the norm of the loss's gradient at x_0 and at each write, divided by the norm at the last read
            (`coefficients["direct_path"]` is the same without sublayers and with constant coefficients and norms);
            `distance`, the largest root mean square of a stream minus the mean stream, relative to the streams: 0 for identical
            streams, None for one stream or earlier states;
            `difference`, |y - y_pre| / |y_pre| for the output y and the output y_pre of pre-LN with the same sublayers;
            `gains`, for each wiring in `MIXED` the gains of A and its products (`amax_gains`), or None if `wiring` is not in it.
        """
        model = self.build()
        recorder = model.record()
        last = norm(self._read_gradient(model, recorder))
        sources = [model.x, *(site.write for site in recorder.sites)]
        return {
            **name_places(self.sublayers),
            **recorder.to_dict(),
            "write_gradients": [_divide(0.0 if source.grad is None else norm(source.grad), last) for source in sources],
            "distance": _find_distance(recorder.states) if model.stack.is_stacked else None,
            "difference": self._difference(model),
            "gains": self._gains(model) if self.wiring in MIXED else None,
        }

    @staticmethod
    def _read_gradient(model: ToyModel, recorder: StreamsRecorder) -> Tensor:
        """Return the loss's gradient at the last read, before the final norm."""
        read: Tensor = recorder.last_read.requires_grad_()
        final: Any = model.stack.norm_final
        loss = model.loss(read if final is None else final(read))
        gradient: Tensor = torch.autograd.grad(loss, read)[0]
        return gradient

    @torch.no_grad()
    def _difference(self, model: ToyModel) -> float:
        plain = self._stack(model, "pre_ln")(model.x)
        return _divide(norm(model.stack(model.x) - plain), norm(plain))

    @torch.no_grad()
    def _gains(self, model: ToyModel) -> Numbers:
        gains = {}
        for name in MIXED:
            stack = self._stack(model, name)
            with StreamsRecorder(stack) as recorder:
                stack(model.x)
            gains[name] = recorder.coefficients()["gains"]
        return gains


def perturb(stack: ResidualStack, scale: float, seed: int) -> None:
    """Add noise to the parameters of A, B and C of a stack: all of its parameters but those of the sublayers and norms.

    Each element of a parameter moves by `scale` times a normal number. In matrices and in vectors over the features, this number
    is divided by the square root of the last size, so that the coefficients' logits and entries move by about `scale`.
    """
    generator = torch.Generator().manual_seed(seed)
    norms = [module for module in stack.modules() if isinstance(module, tuple(MODULES.values()))]
    for parameter in own_parameters(stack, norms):
        noise = torch.randn(parameter.shape, generator=generator)
        fan_in = parameter.shape[-1] if parameter.dim() > 1 or parameter.shape == (stack.d_model,) else 1
        with torch.no_grad():
            parameter.add_(scale / math.sqrt(fan_in) * noise)


def _find_distance(states: list[tuple[Tensor, ...]]) -> float | None:
    """Return the largest relative distance of the n streams from their mean over all places, or None for one stream."""
    if states[0][0].shape[-2] == 1:
        return None
    each = (state.detach().double() for (state,) in states)
    return max(_divide(norm(x - x.mean(-2, keepdim=True)), norm(x)) for x in each)


def _divide(a: float, b: float) -> float:
    return a / b if b else math.nan
