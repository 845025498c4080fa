"""The proof that a model computes the same as before: how far each output and each gradient is off, and how far it may be.

Two ways to round the same formula differ by about as much as each of them differs from the exact result. So the model itself
says how much may change: it also runs in float64, and how far eager is off from that is the measure for fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from addnorm.fusion.baseline import Eager, Errors
from addnorm.fusion.measure import Ran
from addnorm.fusion.tolerance import Difference, judged, limits, numbers_in, widened_by, worst

__all__ = ["Difference", "Proof", "prove", "worst"]

SWAYS = 4  # how often eager runs with its parameters rounded otherwise, before a proof fails
DRAWS = 16  # and how often its error is drawn again
LUCK = 4.0  # how many times as large it may be found to be: of an ill-conditioned element draws differ by ten times


@dataclass(frozen=True)
class Proof:
    """What `prove` found.

    Attributes:
        outputs: of the run without gradients and, if there was one, of that with them; the worse of both.
        gradients: of the parameters, each of one and the same loss; empty if there were none.
        oracle: "float64", or in a line why there was no such run. "float32" for a model in half precision without float64.
        mode: "training" or "evaluation".
        without: why there are no gradients, where the model itself fails to compute them.
    """

    outputs: tuple[Difference, ...]
    gradients: tuple[Difference, ...]
    oracle: str
    mode: str
    without: str | None = None

    @property
    def holds(self) -> bool:
        """Whether every output and every gradient is off by no more than it may."""
        return all(one.holds for one in (*self.outputs, *self.gradients))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        outputs, gradients = ([one.to_dict() for one in part] for part in (self.outputs, self.gradients))
        return {
            "holds": self.holds, "outputs": outputs, "gradients": gradients, "oracle": self.oracle, "mode": self.mode,
            "without_gradients": self.without,
        }  # fmt: skip


def prove(
    model: nn.Module, before: Callable[..., Any], after: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *,
    gradients: bool | None = None,
) -> Proof:  # fmt: skip
    """Compares what two callables compute with the parameters of a model: all outputs, and the gradient of each parameter.

    Each runs without gradients, and with: then the loss is the sum of all outputs, each element with a random sign. Every run
    begins with the same random state and contents of memory, and all is as it was afterwards; `.grad` is not touched.

    A copy of the model runs in float64 with the same random numbers. Where the model itself casts to float32, so does the copy:
    the errors are then differences of two roundings, and as large. A tensor of which most digits are others was computed
    otherwise there (another expert, another mask), and is judged as if there were no copy.

    Where one element is ill-conditioned, as that of a feature which is a hundred times the others, eager may by luck have hit it
    well. So before a proof fails the errors are drawn again, of parameters that are moved a little, and the largest count. And
    eager runs with its parameters rounded otherwise: how far that takes a tensor, it may be off, if float64 says no less.

    Args:
        model: whose parameters both use, and which runs in float64: not fused.
        before: the model as it was.
        after: the same, of the same arguments.
        args: of both.
        kwargs: of both.
        gradients: whether to compare them; None: if any parameter requires one.

    Raises:
        ValueError: no output has a number, so that nothing would be proved.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    eager = Eager(model, before, args, kwargs, gradients)
    if not numbers_in(eager.ran[0].outputs):
        raise ValueError("model returns no finite number for these inputs, so that nothing can be proved.")
    errors, oracle = eager.errors(eager.ran)
    fused = eager.runs(after)
    mode = "training" if model.training else "evaluation"
    proof = Proof(*_compared(eager, fused, errors), oracle, mode, eager.without)
    return proof if proof.holds or not oracle.startswith("float") else _again(proof, eager, fused, errors)


def _again(proof: Proof, eager: Eager, fused: Sequence[Ran], errors: Sequence[Errors]) -> Proof:
    """The proof once more, with what eager's error is when it is drawn again."""
    sways = eager.sways(SWAYS)
    draws: list[list[Errors]] = []

    def look(errors: Sequence[Errors]) -> Proof:
        outputs, gradients = _compared(eager, fused, errors, sways)
        return replace(proof, outputs=outputs, gradients=gradients)

    found = look(errors)
    for seed in range(DRAWS):
        most = worst((*found.outputs, *found.gradients))
        if most is None or not 1.0 < most.share < LUCK:
            break
        draws.append(eager.moved(seed))
        found = look([_drawn(own, [draw[k] for draw in draws]) for k, own in enumerate(errors)])
    return found


def _drawn(own: Errors, draws: Sequence[Errors]) -> Errors:
    """The largest error of each tensor."""

    def largest(k: int, name: str, error: float) -> float:
        return min(max((draw[k].get(name, 0.0) for draw in draws), default=0.0), LUCK * error)

    outputs, gradients = (
        {name: max(error, largest(k, name, error)) for name, error in part.items()} for k, part in enumerate(own)
    )
    return outputs, gradients


def _compared(
    eager: Eager, fused: Sequence[Ran], errors: Sequence[Errors], sways: Sequence[Errors] | None = None
) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
    """What each output and each gradient is off, and what it may be; or twice its sway, if that is more."""
    outputs: dict[str, Difference] = {}
    gradients: list[Difference] = []
    sways = sways or [({}, {}) for _ in errors]
    for plain, other, error, sway in zip(eager.ran, fused, errors, sways, strict=True):
        given = limits(plain.outputs, error[0], eager.eps)
        for found in judged(
            plain.outputs, other.outputs, [widened_by(one, sway[0].get(one.name, 0.0)) for one in given]
        ):
            outputs[found.name] = worst([found, *filter(None, [outputs.get(found.name)])]) or found
        given = limits(plain.gradients, error[1], eager.eps, True)
        gradients += judged(
            plain.gradients, other.gradients, [widened_by(one, sway[1].get(one.name, 0.0)) for one in given]
        )
    return tuple(outputs.values()), tuple(gradients)
