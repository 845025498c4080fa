"""The proof that a fused model computes the same: the difference of each output and gradient, and its tolerance.

Two roundings of the same formula differ by about as much as each differs from the exact result. So the tolerance comes from the
model itself: it also runs in float64, and its error against that result sets the tolerance for the fused model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from addnorm._util.jsonio import Document
from addnorm.fusion.rng_replay import RngReplay, copy_in_dtype
from addnorm.fusion.runs import INPUT, RunResult, floating_inputs, run
from addnorm.fusion.tolerance import (
    Difference,
    compare,
    has_finite_numbers,
    largest_errors,
    mostly_unrelated,
    worst,
)  # fmt: skip
from addnorm.stream.dataflow.snapshot import StateSnapshot

Errors = tuple[dict[str, float], ...]  # by tensor, of outputs and of gradients

PERTURBATIONS = 4  # runs of the model with perturbed parameters before a proof fails
DRAWS = 16  # and runs with moved parameters, each of which draws the model's error again
MAX_GROWTH = (
    16.0  # of the error by these draws: for an ill-conditioned element they differ by a factor of twelve and more
)
MOVE = 1e-2  # relative change of the moved parameters


@dataclass(frozen=True)
class Proof(Document):
    """Result of `prove`.

    Attributes:
        outputs: differences of the outputs: for each, the larger of a run without gradients and a run with gradients.
        gradients: differences of the gradients of the parameters, then of the floating-point inputs ("input x"); empty if none
            reaches the outputs.
        oracle: "float64", or "float32" for a model in half precision without float64; else why there is no such run.
        mode: "training" or "evaluation".
        gradient_error: the error that the model itself raises with gradients; None if there is none.
        calls: differences of each fused call from the operators that it replaced, in float64 and in the model's dtype.
    """

    outputs: tuple[Difference, ...]
    gradients: tuple[Difference, ...]
    oracle: str
    mode: str
    gradient_error: str | None = None
    calls: tuple[Difference, ...] = ()

    PROPERTIES = ("holds",)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All differences."""
        return (*self.calls, *self.outputs, *self.gradients)

    @property
    def holds(self) -> bool:
        """Whether every difference is within its tolerance."""
        return all(difference.holds for difference in self.differences)


def prove(
    model: nn.Module, before: Callable[..., Any], after: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Proof:  # fmt: skip
    """Compare two callables that use the parameters of a model: all outputs, and the gradients of parameters and inputs.

    Each callable runs without gradients, with the gradients of the parameters, and once more with those of the floating-point
    inputs. The loss is the sum of all outputs, each element with a random sign.
    All runs start from the same random state and the same contents of memory, which are restored afterwards. `.grad` is not
    touched.

    A copy of the model runs in float64 with the same random numbers. Where the model casts to float32, so does the copy; the
    errors are then differences of two roundings, and of the same size. If a tensor agrees with the copy's in few digits, the copy
    has computed something else (another expert, another mask); the tolerance of this tensor does not use the copy.

    An ill-conditioned element, such as one of a feature that is a hundred times the others, may by chance have a small error. So
    before a proof fails, the errors are drawn again with parameters that are moved a little, and the largest counts. The model
    also runs with parameters perturbed by one rounding: a tensor may differ by twice what that changes, if float64 confirms that
    error.

    Args:
        model: its parameters are used by both callables, and its copy runs in float64. It is not fused.
        before: the model as it was.
        after: the fused model, with the same arguments.
        args: positional arguments of both.
        kwargs: keyword arguments of both.

    Raises:
        ValueError: the outputs contain no finite number, so that nothing would be proven.
    """
    model = getattr(model, "_orig_mod", model)  # the model inside the wrapper of torch.compile
    baseline = _Baseline(model, before, args, kwargs)
    if not has_finite_numbers(baseline.results[0].outputs):
        raise ValueError("model returns no finite number for these inputs, so that nothing can be proven.")
    errors, oracle = baseline.errors(baseline.results)
    fused = baseline.run_modes(after)
    mode = "training" if model.training else "evaluation"
    unchanged: list[Errors] = [({}, {}) for _ in errors]
    proof = Proof(*_differences(baseline, fused, errors, unchanged), oracle, mode, baseline.gradient_error)
    return proof if proof.holds or not oracle.startswith("float") else _draw_again(proof, baseline, fused, errors)


def _draw_again(proof: Proof, baseline: _Baseline, fused: Sequence[RunResult], errors: Sequence[Errors]) -> Proof:
    """Repeat a failed proof with tolerances from more float64 runs of the original model, until it holds or `DRAWS` is reached.

    The parameters are slightly moved in each run.
    """
    perturbed = baseline.perturbed_errors(PERTURBATIONS)
    draws: list[list[Errors]] = []

    def with_errors(errors: Sequence[Errors]) -> Proof:
        outputs, gradients = _differences(baseline, fused, errors, perturbed)
        return replace(proof, outputs=outputs, gradients=gradients)

    proof = with_errors(errors)
    for seed in range(DRAWS):
        most = worst((*proof.outputs, *proof.gradients))
        if most is None or not 1.0 < most.tolerance_share < MAX_GROWTH:
            break
        draws.append(baseline.moved_errors(seed))
        proof = with_errors([_largest_of_draws(*of_mode) for of_mode in zip(errors, *draws, strict=True)])
    return proof


def _largest_of_draws(first: Errors, *draws: Errors) -> Errors:
    """Return the largest error of each tensor over the draws, at most `MAX_GROWTH` times its first error."""
    return tuple(
        {
            name: max(error, min(max(part.get(name, 0.0) for part in others), MAX_GROWTH * error))
            for name, error in errors.items()
        }
        for errors, *others in zip(first, *draws, strict=True)
    )


def _errors(results: RunResult, exact: RunResult) -> Errors:
    return tuple(map(largest_errors, results, exact))


def _differences(
    baseline: _Baseline, fused: Sequence[RunResult], errors: Sequence[Errors], perturbed: Sequence[Errors]
) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
    """Return the differences of outputs and of gradients; if several runs have a tensor, its worst difference."""
    found: tuple[dict[str, Difference], dict[str, Difference]] = {}, {}
    for of_mode in zip(baseline.results, fused, errors, perturbed, strict=True):
        for k, (plain, other, own, changes) in enumerate(zip(*of_mode, strict=True)):
            for difference in compare(plain, other, own, baseline.eps, gradients=bool(k), perturbed=changes):
                known = [found[k][difference.name]] if difference.name in found[k] else []
                found[k][difference.name] = worst([difference, *known]) or difference
    outputs, gradients = found
    return tuple(outputs.values()), tuple(gradients.values())


class Mode(NamedTuple):
    """Mode of a run: the parameters whose gradients are computed, and whether the gradients of the inputs are."""

    parameters: Mapping[str, Tensor]
    inputs: bool

    def is_in(self, proof: Proof) -> bool:
        """Return whether a proof has results of this mode: no if the model raises an error in it or has no gradient."""
        names = {difference.name for difference in proof.gradients}
        if self.inputs:
            return any(name.startswith(INPUT) for name in names)
        return not self.parameters or not names.isdisjoint(self.parameters)


def modes_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Mode]:
    """Return the runs of a proof: without gradients, with those of the parameters, with those of the inputs."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    modes = [Mode({}, False)]
    if parameters:
        modes.append(Mode(parameters, False))
    if floating_inputs(args, kwargs):
        modes.append(Mode({}, True))
    return modes


class _Baseline:
    """Model before fusing, with its inputs, its results and their errors.

    Attributes:
        modes: the mode of each run: first without gradients, then with the gradients of the parameters that require one, then
            with those of all floating-point inputs. A mode in which the model raises an error is left out.
        results: of the model in each mode.
        gradient_error: the error that the model raises with gradients.
        eps: distance of adjacent numbers at 1 in the dtype in which the model computes.
    """

    def __init__(self, model: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.model, self.call, self.args, self.kwargs = model, call, args, kwargs
        self.state = StateSnapshot(model, (args, kwargs))
        self.dtype, self.eps = _precision(model)
        self.gradient_error: str | None = None
        self.modes: list[Mode] = []
        self.results: list[RunResult] = []
        for mode in modes_of(model, args, kwargs):
            try:
                self.results.append(self._run(call, mode))
                self.modes.append(mode)
            except Exception as error:  # some models have gradients in training mode only
                if not self.modes:
                    raise
                self.gradient_error = f"{type(error).__name__}: {_first_line(error)}"

    def run_modes(self, call: Callable[..., Any] | None = None, state: StateSnapshot | None = None) -> list[RunResult]:
        """Run the model, or another callable, in each mode."""
        return [self._run(call or self.call, mode, state) for mode in self.modes]

    def _run(self, call: Callable[..., Any], mode: Mode, state: StateSnapshot | None = None) -> RunResult:
        state = state or self.state
        with state.restored():
            outputs, gradients = run(call, self.args, self.kwargs, mode.parameters, inputs=mode.inputs)
            return RunResult(state.copy_aliases(outputs), gradients)

    def errors(self, results: Sequence[RunResult], state: StateSnapshot | None = None) -> tuple[list[Errors], str]:
        """Return the errors of results against float64 and the dtype's name, or no errors and the reason."""
        exact, oracle = self._run_exact(state or self.state)
        errors = [_errors(result, exact or RunResult({}, {})) for result in results]
        if mostly_unrelated(results[-1].outputs, errors[-1][0], self.eps):
            return [({}, {}) for _ in results], "the float64 run computes something else: other random numbers?"
        return errors, oracle

    def moved_errors(self, seed: int) -> list[Errors]:
        """Return the model's errors with its parameters moved by about a percent, and other dropout masks."""
        with self.state.restored():
            torch.manual_seed(seed)
            self._scale_parameters(MOVE, None)
            state = StateSnapshot(self.model, (self.args, self.kwargs))
            return self.errors(self.run_modes(state=state), state)[0]

    def perturbed_errors(self, seeds: int) -> list[Errors]:
        """Return the largest change of each result when the parameters are perturbed by one rounding.

        A gradient through a saturated softmax has few correct digits, or none. Against float64 alone that looks like a different
        computation.
        """
        largest: list[Errors] = [({}, {}) for _ in self.modes]
        for seed in range(seeds):
            with self.state.restored():
                self._scale_parameters(self.eps, torch.Generator().manual_seed(seed))
                perturbed = self.run_modes(state=StateSnapshot(self.model, (self.args, self.kwargs)))
            for of_mode, *pair in zip(largest, self.results, perturbed, strict=True):
                for known, new in zip(of_mode, _errors(*pair), strict=True):
                    known.update({name: max(value, known.get(name, 0.0)) for name, value in new.items()})
        return largest

    def _scale_parameters(self, deviation: float, generator: torch.Generator | None) -> None:
        """Scale every parameter element by a random factor around 1."""
        with torch.no_grad():
            for p in self.model.parameters():
                if p.is_floating_point():
                    p.mul_(1 + deviation * torch.randn(p.shape, generator=generator).to(p.device, p.dtype))

    def _run_exact(self, state: StateSnapshot) -> tuple[RunResult | None, str]:
        """Return the results of a copy in float64 and the name of the dtype, or None and the reason."""
        reason = "the model itself is in float64"
        for wide in (torch.float64, torch.float32):
            if torch.finfo(wide).eps >= torch.finfo(self.dtype).eps:
                break
            try:
                with state.restored(), ExitStack() as stack:
                    for device in {"cpu", *(t.device.type for t in state.tensors)}:
                        stack.enter_context(torch.autocast(device, enabled=False))
                    model, (args, kwargs) = copy_in_dtype(self.model, (self.args, self.kwargs), state.tensors, wide)
                    names = {name for mode in self.modes for name in mode.parameters}
                    parameters = {name: p for name, p in model.named_parameters() if name in names}
                    inputs = any(mode.inputs for mode in self.modes)
                    with RngReplay(self.dtype, wide):
                        exact = run(model, args, kwargs, parameters, inputs=inputs)
                        return exact, str(wide).removeprefix("torch.")
            except Exception as error:  # a model that cannot be copied, or has no float64, fails with any error
                problem = f"no float64 run: {type(error).__name__}: {_first_line(error)}"
                reason = problem if wide == torch.float64 else reason
        return None, reason


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _precision(model: nn.Module) -> tuple[torch.dtype, float]:
    """Return the dtype of most of a model's elements, and the largest eps among that dtype and autocast's."""
    count: Counter[torch.dtype] = Counter()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            count[tensor.dtype] += tensor.numel()
    dtype = count.most_common(1)[0][0] if count else torch.get_default_dtype()
    devices = {p.device.type for p in model.parameters()} or {"cpu"}
    casts = [torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)]
    return dtype, max(torch.finfo(candidate).eps for candidate in (dtype, *casts))
