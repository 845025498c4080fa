"""The proof that a model computes the same as before: how far each output and each gradient is off, and how far it may be.

Two ways to round the same formula differ by about as much as each of them differs from the exact result. So the model itself
says how much may change: it also runs in float64, and how far eager is off from that is the measure for fused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.convert.difference import Difference, errors_of, judged, limits, numbers_in, unlike, widened_by, worst
from addnorm.convert.measure import Contents, Ran, run
from addnorm.convert.noise import same_noise, widened

DRAWS, MOVED = 16, 1e-2  # how often eager's error is drawn again before a proof fails, of parameters moved by as much
HOPELESS = 5.0  # times its limit: no luck
SWAYS = 4  # how often its parameters are rounded otherwise
Errors = tuple[Mapping[str, float], ...]  # of outputs, and of gradients

__all__ = ["Difference", "Proof", "prove", "worst"]


@dataclass(frozen=True)
class Proof:
    """What `prove` found.

    Attributes:
        outputs: of the run without gradients and, if there was one, of that with them; the worse of both.
        gradients: of the parameters, each of one and the same loss; empty if there were none.
        oracle: "float64", or in a line why there was no such run. "float32" for a model in half precision without float64.
        mode: "training" or "evaluation".
    """

    outputs: tuple[Difference, ...]
    gradients: tuple[Difference, ...]
    oracle: str
    mode: str

    @property
    def holds(self) -> bool:
        """Whether every output and every gradient is off by no more than it may."""
        return all(one.holds for one in (*self.outputs, *self.gradients))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        outputs, gradients = ([one.to_dict() for one in part] for part in (self.outputs, self.gradients))
        return {
            "holds": self.holds, "outputs": outputs, "gradients": gradients, "oracle": self.oracle, "mode": self.mode,
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
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    modes: list[Mapping[str, Tensor]] = [{}, learned] if learned and gradients is not False else [{}]
    contents = Contents(model, (args, kwargs))
    eager, errors, oracle = _eager(model, before, args, kwargs, modes, contents)
    if not numbers_in(eager[0].outputs):
        raise ValueError("model returns no finite number for these inputs, so that nothing can be proved.")
    fused = [_ran(after, args, kwargs, wanted, contents) for wanted in modes]
    mode = "training" if model.training else "evaluation"
    proof = _compared(eager, fused, errors, oracle, mode, _precision(model)[1])
    sways: tuple[dict[str, float], dict[str, float]] = ({}, {})
    if not proof.holds and oracle.startswith("float"):
        sways = _sways(model, before, args, kwargs, modes, contents, eager)
        proof = _within(proof, sways)
    for seed in range(DRAWS if oracle.startswith("float") else 0):
        most = worst((*proof.outputs, *proof.gradients))
        if most is None or not 1.0 < most.share < HOPELESS:
            break
        with contents.again():
            _move(model, seed)
            _, more, _ = _eager(model, before, args, kwargs, modes, Contents(model, (args, kwargs)))
        errors = [tuple(map(_larger, *of)) for of in zip(errors, more, strict=True)]
        proof = _within(_compared(eager, fused, errors, oracle, mode, _precision(model)[1]), sways)
    return proof


def _ran(call: Callable[..., Any], args: Any, kwargs: Any, wanted: Mapping[str, Tensor], contents: Contents) -> Ran:
    with contents.again():
        outputs, found = run(call, args, kwargs, wanted)
        return Ran(contents.apart(outputs), found)


def _eager(
    model: nn.Module, before: Callable[..., Any], args: Any, kwargs: Any, modes: Sequence[Mapping[str, Tensor]],
    contents: Contents,
) -> tuple[list[Ran], list[Errors], str]:  # fmt: skip
    """What eager computes in each mode, what it is off, and from what."""
    eager = [_ran(before, args, kwargs, wanted, contents) for wanted in modes]
    dtype, eps = _precision(model)
    truth, oracle = _in_float64(model, args, kwargs, dtype, contents, bool(modes[-1]))
    errors: list[Errors] = [tuple(map(errors_of, one, truth or Ran({}, {}))) for one in eager]
    if unlike(eager[-1].outputs, errors[-1][0], eps):
        return eager, [({}, {}) for _ in eager], "the float64 run computes something else: other random numbers?"
    return eager, errors, oracle


def _move(model: nn.Module, seed: int) -> None:
    """Changes all parameters a little, so that they are rounded otherwise: the error of a few elements is a matter of luck."""
    torch.manual_seed(seed)  # and what is dropped is other elements
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.mul_(1 + MOVED * torch.randn(p.shape).to(p.device))


def _sways(
    model: nn.Module, before: Callable[..., Any], args: Any, kwargs: Any, modes: Sequence[Mapping[str, Tensor]],
    contents: Contents, eager: Sequence[Ran],
) -> tuple[dict[str, float], dict[str, float]]:  # fmt: skip
    """What eager is off from itself with its parameters rounded otherwise: of outputs, and of gradients.

    A gradient through a saturated softmax has few digits left, or none. By float64 alone that looks like another expert.
    """
    sways: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for seed in range(SWAYS):
        with contents.again():
            _round(model, seed, _precision(model)[1])
            others = [_ran(before, args, kwargs, wanted, Contents(model, (args, kwargs))) for wanted in modes]
        for one, other in zip(eager, others, strict=True):
            for found, off in zip(sways, map(errors_of, one, other), strict=True):
                found.update({name: max(value, found.get(name, 0.0)) for name, value in off.items()})
    return sways


def _within(proof: Proof, sways: Sequence[Mapping[str, float]]) -> Proof:
    """The proof where each tensor may be off by twice its sway."""
    outputs, gradients = (
        tuple(widened_by(one, of.get(one.name, 0.0)) for one in part)
        for part, of in zip((proof.outputs, proof.gradients), sways, strict=True)
    )
    return replace(proof, outputs=outputs, gradients=gradients)


def _round(model: nn.Module, seed: int, eps: float) -> None:
    """Changes all parameters by about one rounding; random numbers of the model stay what they are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.mul_(1 + eps * torch.randn(p.shape, generator=generator).to(p.device, p.dtype))


def _larger(errors: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """The larger of two errors of each tensor."""
    return {name: max(error, more.get(name, 0.0)) for name, error in errors.items()}


def _compared(
    eager: Sequence[Ran], fused: Sequence[Ran], errors: Sequence[Errors], oracle: str, mode: str, eps: float
) -> Proof:
    """What each tensor is off, and what it may be."""
    outputs: dict[str, Difference] = {}
    of_parameters: list[Difference] = []
    for plain, other, (of_outputs, of_gradients) in zip(eager, fused, errors, strict=True):
        for found in judged(plain.outputs, other.outputs, limits(plain.outputs, of_outputs, eps)):
            outputs[found.name] = worst([found, *filter(None, [outputs.get(found.name)])]) or found
        of_parameters += judged(plain.gradients, other.gradients, limits(plain.gradients, of_gradients, eps, True))
    return Proof(tuple(outputs.values()), tuple(of_parameters), oracle, mode)


# --- float64 --------------------------------------------------------------------------------------------------------------


def _in_float64(
    model: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype, contents: Contents, gradients: bool
) -> tuple[Ran | None, str]:
    """What a copy of the model computes in float64 and what that is called, or why there is none."""
    reason = "the model itself is in float64"
    for wide in (torch.float64, torch.float32):
        if torch.finfo(wide).eps >= torch.finfo(dtype).eps:
            break
        try:
            with contents.again(), ExitStack() as stack:
                for device in {"cpu", *(t.device.type for t in contents.tensors)}:
                    stack.enter_context(torch.autocast(device, enabled=False))
                twin, (args64, kwargs64) = widened(model, (args, kwargs), contents.tensors, wide)
                wanted = {name: p for name, p in twin.named_parameters() if p.requires_grad and gradients}
                with same_noise(dtype, wide):
                    return run(twin, args64, kwargs64, wanted), str(wide).removeprefix("torch.")
        except Exception as error:  # what cannot be copied, or has no float64, fails in its own way
            first = next(iter(str(error).splitlines()), "")
            reason = f"no float64 run: {type(error).__name__}: {first}" if wide == torch.float64 else reason
    return None, reason


def _precision(model: nn.Module) -> tuple[torch.dtype, float]:
    """The dtype in which most of a model is, and the distance of two numbers next to 1 in which it computes."""
    count: Counter[torch.dtype] = Counter()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            count[tensor.dtype] += tensor.numel()
    dtype = count.most_common(1)[0][0] if count else torch.get_default_dtype()
    devices = {p.device.type for p in model.parameters()} or {"cpu"}
    casts = [torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)]
    return dtype, max(torch.finfo(one).eps for one in (dtype, *casts))
