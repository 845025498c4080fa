"""Statistics of untrained stacks with several streams: what their papers state about them before training.

The model is that of `addnorm.lab.theory`, with the same weights for all wirings. A row of `measure_streams_init` has the keys
that `addnorm.lab.published` compares: the difference from pre-LN's function, sizes by depth, the gains of mixing matrices, and
the weights of the sources where earlier states are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from addnorm import wirings
from addnorm.lab.streams import StreamsRecorder, amax_gains
from addnorm.lab.toy_model import ToyModel
from addnorm.nn import ResidualStack, Wiring
from addnorm.wirings.coefficients import CoefficientModule, HyperConnection, ManifoldConnection

__all__ = ["STREAM_DEPTHS", "STREAM_WIRINGS", "measure_streams_init"]

Numbers = dict[str, Any]

STREAM_WIRINGS = ("hyper_connections", "mhc", "attention_residuals", "denseformer", "muddformer")
STREAM_DEPTHS = (4, 16)  # layers
SEQUENCES = 1
TOKENS = 32
SPREAD = 1.0  # standard deviation of the random logits of mHC; of hyper-connections' random entries it is SPREAD / n


def measure_streams_init(wiring: Wiring, num_layers: int, seed: int) -> Numbers:
    """Return the statistics of one untrained stack of several streams.

    Returns:
        A dict with `num_layers`, `seed`, and
        `difference`: |y - y_pre| / |y_pre| for the output y and that of pre-LN with the same weights.
        `read`: the root mean square of C X before its norm, by sublayer, divided by that of x_0.
        `pre_read`: the same in pre-LN.
        `gain`: the largest forward or backward gain of the product of all A (`amax_gains`) with random coefficients; None
            if the streams do not mix.
        `from_mean`: the largest |n p_j - 1| over all reads, the head's included, and their n sources, for the weights p of the
            sources averaged over the tokens: 0 for a mean of the sources. None if no sublayer appends a source.
        `from_newest`: the largest |p_j - 1| of the newest source and |p_j| of the others, likewise: 0 for a read of the newest.
    """
    model = ToyModel(num_layers, wiring, seed, sequences=SEQUENCES, tokens=TOKENS)
    plain = ToyModel(num_layers, wirings.pre_ln(), seed, sequences=SEQUENCES, tokens=TOKENS)
    _copy_sublayers(plain.stack, model.stack)
    with StreamsRecorder(model.stack) as recorder:
        y = model.stack(model.x)
        model.loss(y).backward()
    with torch.no_grad():
        terms = plain.stack.unroll(model.x)
    start = _rms(model.x)
    state, sizes = terms.x_0, []
    for write in terms.writes:
        sizes.append(_rms(state) / start)
        state = state + write
    return {
        "num_layers": num_layers, "seed": seed,
        "difference": float((y.detach() - terms.y).norm() / terms.y.norm()),
        "read": [size / start for size in recorder.statistics()["reads"][:-1]],
        "pre_read": sizes,
        **_compare_weights(recorder),
        "gain": _random_gain(model, seed),
    }  # fmt: skip


def _compare_weights(recorder: StreamsRecorder) -> Numbers:
    """Return `from_mean` and `from_newest`: the largest differences of the sources' mean weights from two plain reads."""
    if len(recorder.states[0]) == len(recorder.states[-1]):
        return {"from_mean": None, "from_newest": None}
    coefficients = recorder.coefficients()
    rows = [*(row for site in coefficients["sites"] for row in site["collapse"]), coefficients["head"]]
    weights = [torch.tensor(row, dtype=torch.float64) for row in rows]
    newest = [torch.eye(len(row), dtype=torch.float64)[-1] for row in weights]
    return {
        "from_mean": _largest(len(row) * row - 1 for row in weights),
        "from_newest": _largest(row - one_hot for row, one_hot in zip(weights, newest, strict=True)),
    }


def _largest(differences: Iterable[Tensor]) -> float:
    """Return the largest absolute entry of all; NaN if one is NaN."""
    return float(torch.cat(list(differences)).abs().max())


def _copy_sublayers(target: ResidualStack, source: ResidualStack) -> None:
    """Give a stack the sublayers of another one."""
    for own, other in zip(target.connections, source.connections, strict=True):
        own.sublayer = other.sublayer


def _random_gain(model: ToyModel, seed: int) -> float | None:
    """Return the gain of the product of all A with coefficients drawn at random: logits or entries of standard deviation 1."""
    connections: list[Any] = model.stack.connections
    modules = [connection.coefficients for connection in connections]
    if not all(isinstance(module, HyperConnection | ManifoldConnection) for module in modules):
        return None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in modules:
            _perturb(module, generator)
        mixes = [module(_random_streams(model, module, generator)).mix for module in modules]
    gains = amax_gains(mixes)
    return None if gains is None else max(gains["forward"][-1], gains["backward"][0])


def _perturb(module: CoefficientModule, generator: torch.Generator) -> None:
    """Add noise of standard deviation `SPREAD` to the logits of A, or SPREAD / n to its entries."""
    if isinstance(module, ManifoldConnection):
        bias = module.bias[2 * module.n :]
        bias.copy_(SPREAD * torch.randn(bias.shape, generator=generator))
    elif isinstance(module, HyperConnection):
        module.mix.add_(SPREAD / module.n * torch.randn(module.mix.shape, generator=generator))


def _random_streams(model: ToyModel, module: CoefficientModule, generator: torch.Generator) -> Tensor:
    return torch.randn(TOKENS, module.n, model.stack.d_model, generator=generator)


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
