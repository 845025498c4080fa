"""The proof that a model computes the same as before: how far each output and each gradient is off, and how far it may be.

Two ways to round the same formula differ by about as much as each of them differs from the exact result. So the model itself
says how much may change: it also runs in float64, and how far eager is off from that is the measure for fused.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.convert.measure import Contents, Ran, Tensors, run
from addnorm.convert.noise import same_noise, widened

__all__ = ["Difference", "Proof", "prove", "worst"]

TIMES = 2  # if fused is as exact as eager is, they differ by at most the sum of both errors
# Without float64 nothing tells how roundings add up in a model. In 46 small ones in float32, rounded otherwise, tensors were
# off by 3 eps of their size, one of a hundred by more than 15, one by 93; a lost bias or another mask is a million.
ROUNDINGS = 256
AT_MOST = 0.1  # of the size: so many roundings of bfloat16 would allow anything


@dataclass(frozen=True)
class Difference:
    """How far one tensor is off.

    Attributes:
        name: where it is in the outputs ("logits", "past_key_values.layers.0.keys", "[0]", "output"), or the parameter's.
        off: the largest |after - before|; infinite where it is another tensor: shape, dtype, NaN, integers.
        error: the largest |before - float64|, which is eager's own; None where float64 has none.
        size: the largest |before|.
        limit: what `off` may be.
    """

    name: str
    off: float
    error: float | None
    size: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether it is off by no more than it may."""
        return self.off <= self.limit

    @property
    def share(self) -> float:
        """What it is off, as a share of the limit."""
        return self.off / self.limit if self.limit else math.inf if self.off else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        off = self.off if math.isfinite(self.off) else None
        return {**dataclasses.asdict(self), "off": off, "holds": self.holds}


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


def worst(differences: Sequence[Difference]) -> Difference | None:
    """That which uses most of its limit."""
    return max(differences, key=lambda one: one.share, default=None)


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

    Args:
        model: whose parameters both use, and which runs in float64: not fused.
        before: the model as it was.
        after: the same, of the same arguments.
        args: of both.
        kwargs: of both.
        gradients: whether to compare them; None: if any parameter requires one.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    modes: list[Mapping[str, Tensor]] = [{}, learned] if learned and gradients is not False else [{}]
    contents = Contents(model, (args, kwargs))

    def ran(call: Callable[..., Any], wanted: Mapping[str, Tensor]) -> Ran:
        with contents.again():
            outputs, found = run(call, args, kwargs, wanted)
            return Ran(contents.apart(outputs), found)

    eager = [ran(before, wanted) for wanted in modes]
    dtype, eps = _precision(model)
    truth, oracle = _in_float64(model, args, kwargs, dtype, contents, bool(modes[-1]))
    errors = [tuple(map(_errors, one, truth or Ran({}, {}))) for one in eager]
    truth = None
    if _unlike(eager[-1].outputs, errors[-1][0], eps):
        errors, oracle = [({}, {}) for _ in eager], "the float64 run computes something else: other random numbers?"
    outputs: dict[str, Difference] = {}
    of_parameters: list[Difference] = []
    for wanted, plain, (of_outputs, of_gradients) in zip(modes, eager, errors, strict=True):
        fused = ran(after, wanted)
        for found in _judged(plain.outputs, fused.outputs, _limits(plain.outputs, of_outputs, eps)):
            outputs[found.name] = worst([found, *filter(None, [outputs.get(found.name)])]) or found
        of_parameters += _judged(plain.gradients, fused.gradients, _limits(plain.gradients, of_gradients, eps, True))
    mode = "training" if model.training else "evaluation"
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


# --- what may be off, and what is -----------------------------------------------------------------------------------------


def _limits(before: Tensors, errors: Mapping[str, float], eps: float, gradients: bool = False) -> list[Difference]:
    """What each tensor may be off; what it is off is not known yet."""
    sizes = {name: _size(t) for name, t in before.items()}
    inexact = {name: max(eps, torch.finfo(t.dtype).eps) for name, t in before.items() if _is_inexact(t)}
    whole = max((sizes[name] for name in inexact), default=0.0) if gradients else 0.0
    # A tensor of few elements may by luck have almost no error. So each may be off by as much, beside its size, as nine of
    # ten tensors are: the ones with the largest error tell nothing of the others.
    shares = sorted(
        errors[n] / sizes[n] for n in inexact if n in errors and errors[n] <= _lost(inexact[n]) * sizes[n] > 0
    )
    typical = shares[math.ceil(0.9 * (len(shares) - 1))] if shares else 0.0
    found = []
    for name, size in sizes.items():
        fine, error = inexact.get(name, 0.0), errors.get(name)
        # A gradient is a sum of many terms. Where these cancel their rounding stays: wholly in the gradient of the bias of
        # attention's keys, which is zero, and noise in floating point; else in part. The terms are about as large as the
        # largest gradient of all.
        left = fine * whole
        noise = gradients and error is not None and error >= size / 8 and size <= 64 * left
        if error is None or (error > _lost(fine) * size and not noise):
            limit = min(ROUNDINGS * fine, AT_MOST) * size + left
        else:
            limit = TIMES * max(error, typical * size) + fine * size + (left if noise else min(left, size / 128))
        found.append(Difference(name, 0.0, error, size, limit))
    return found


def _lost(eps: float) -> float:
    """The share of its size by which a tensor is off when three of four digits are lost: roundings do not do that."""
    return math.sqrt(math.sqrt(eps))


def _judged(before: Tensors, after: Tensors, limits: Sequence[Difference]) -> list[Difference]:
    """What each is off. What there was not before, or is not any more, is off by infinity."""
    new = [Difference(name, math.inf, None, 0.0, 0.0) for name in after if name not in before]
    return [dataclasses.replace(one, off=_off(before[one.name], after.get(one.name))) for one in limits] + new


def _unlike(outputs: Tensors, errors: Mapping[str, float], eps: float) -> bool:
    """Whether most outputs have nothing in common with float64's."""
    lost = [error > _lost(eps) * _size(outputs[name]) for name, error in errors.items()]
    return sum(lost) > len(lost) / 2


def _errors(before: Tensors, truth: Tensors) -> dict[str, float]:
    """What eager is off from float64, where both have numbers."""
    pairs = {n: (t, truth[n]) for n, t in before.items() if _is_inexact(t) and n in truth and truth[n].shape == t.shape}
    return {
        n: _largest((_wide(t) - _wide(exact)).where(_ordinary(t) & _ordinary(exact), 0))
        for n, (t, exact) in pairs.items()
    }


def _off(before: Tensor, after: Tensor | None) -> float:
    """The largest difference; infinite where one has a number and the other none, or what should be equal is not."""
    if after is None or before.shape != after.shape or before.dtype != after.dtype:
        return math.inf
    if not _is_inexact(before):
        return 0.0 if torch.equal(before, after) else math.inf
    a, b = _wide(after), _wide(before)
    same = (a == b) | (a.isnan() & b.isnan())
    return _largest((a - b).where(~same, 0))  # of equal infinities the difference is no number


def _size(tensor: Tensor) -> float:
    return _largest(_wide(tensor).where(_ordinary(tensor), 0))


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().nan_to_num(nan=math.inf, posinf=math.inf).max()) if tensor.numel() else 0.0


def _ordinary(tensor: Tensor) -> Tensor:
    """Where a tensor has numbers. One at the end of what its dtype can hold is a mask's, and says nothing of the others' size."""
    dense = tensor.to_dense()
    if not _is_inexact(tensor):
        return torch.ones_like(dense, dtype=torch.bool)
    return dense.isfinite() & (dense.abs() < torch.finfo(tensor.dtype).max / 4)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> Tensor:
    """In float64, or complex128."""
    return tensor.to_dense().to(torch.complex128 if tensor.is_complex() else torch.float64)
