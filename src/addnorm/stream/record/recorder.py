"""`record`: statistics of every sublayer of a model's residual streams, forward and backward, step by step.

Statistics are computed where the tensors are, and only numbers are kept: memory does not grow with the length of the input,
and grows by 16 bytes a number with the steps. The first forward of each kind (structure of the inputs, training mode, grad
mode) is inspected first, in an additional forward without side effects. After that each forward runs once.
"""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from addnorm._util.arguments import check_int
from addnorm._util.torch_internals import in_function_transform
from addnorm.stream.dataflow.frames import Frames
from addnorm.stream.dataflow.graph import Value
from addnorm.stream.dataflow.observers import (
    Observer,
    ObserverMode,
    group_observers,
    observe_forwards,
    use_nonreentrant_checkpoints,
)
from addnorm.stream.dataflow.wrappers import inner_tensors, reshard
from addnorm.stream.find.inspect import build_inspection, capture_flow, check_parameters
from addnorm.stream.find.inspection import Inspection
from addnorm.stream.models.inputs import format_inputs
from addnorm.stream.record.forward_statistics import ForwardStatistics
from addnorm.stream.record.plan import (
    Plan,
    find_observable,
    inspection_metadata,
)
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.sample import TokenSample
from addnorm.stream.record.schema import Balance, MemoryMap
from addnorm.stream.record.statistics import Masks, TokenMask, check_mask_streams
from addnorm.stream.record.steps import StepCounter

__all__ = ["record"]


@contextmanager
def record(
    model: nn.Module,
    *,
    grads: bool = True,
    every: int = 1,
    layers: Iterable[int] | None = None,
    tokens: Masks = None,
    accumulate: int | None = 1,
    gather: bool = False,
) -> Iterator[Recording]:
    r"""Record every forward and backward of a model inside the block.

    Args:
        model: any `torch.nn.Module` in which `addnorm.inspect` finds a stream. It runs as it is: in training or evaluation,
            under autocast, with activation checkpoints. A compiled model runs eagerly inside the block, with a warning.
        grads: also record the gradient of the loss at the stream, and the gradients of each sublayer's parameters.
        every: record one step out of this number. If the first forward trains (training mode, gradients on), forwards that
            evaluate are no steps. Forwards that are not recorded run as without a recorder.
        layers: record only the sublayers of these layers, counted from 0.
        tokens: mask of the tokens that count: a tensor `(batch, tokens)`, or the name of the model's keyword argument that is
            the mask, as in `tokens="attention_mask"`; for several streams a dict by their names. All tokens by default.
        accumulate: number of forwards in one step (gradient accumulation). Statistics of the stream are those of the last
            forward, gradients of parameters are the sum. With 1 each forward is a step, and gradients are those of its own
            backward. None means that a step ends when an optimizer of the model's parameters steps.
        gather: measure parameters and their gradients as a whole where they are sharded (FSDP2, tensor parallelism), not the part
            of this process. Statistics of the stream are always those of the tokens of this process.

    A sharded model communicates in its forward, and `record` runs it once more: enter the block in all processes.

    Returns:
        A `Recording` that is filled while the block runs. `addnorm.stream.record.schema.STATISTICS` lists what is recorded.

    Raises:
        ValueError: the model has no residual stream, its parameters have no values, or `gather=True` for
            `FullyShardedDataParallel` (FSDP1).

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3)
        >>> with addnorm.record(model) as rec:
        ...     (model(torch.randn(2, 5, 16)) - torch.randn(2, 5, 16)).square().mean().backward()
        >>> rec
        <Recording of TransformerEncoder: 6 sublayers, step 0, with gradients>
        >>> [site.kind for site, ratio in rec.series("write", "ratio")][:2]
        ['attention', 'feed-forward']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module: addnorm.record(model).")
    check_int("every", every, 1)
    if accumulate is not None:
        check_int("accumulate", accumulate, 1)
    recorder = _Recorder(model, grads, every, layers, tokens, accumulate, gather)
    try:
        with use_nonreentrant_checkpoints(), observe_forwards(model, recorder.begin, recorder.end):
            yield recorder.recording
    finally:
        recorder.close()


class _Recorder(ForwardStatistics):
    """State of one `record` block."""

    def __init__(
        self,
        model: nn.Module,
        grads: bool,
        every: int,
        layers: Iterable[int] | None,
        tokens: Masks,
        accumulate: int | None,
        gather: bool,
    ) -> None:
        if isinstance(layers, int | str):
            raise TypeError(
                f"layers is {layers!r}, expected a list of numbers, counted from 0: [{layers}] for one layer."
            )
        inner = getattr(model, "_orig_mod", model)
        now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
        recording = Recording((), {"model": type(inner).__name__, "torch": torch.__version__, "date": now})
        super().__init__(inner, recording, grads, accumulate != 1, gather)
        self.every = every
        self.layers = None if layers is None else [*layers]
        self.masks = tokens
        self._plans: dict[Any, Plan] = {}
        self._has_new_samples = False  # since the last time that maps were computed
        self.recording.compose = self._compose
        self._steps = StepCounter(self.model, accumulate)
        if model is not self.model or any(hasattr(m, "_orig_mod") for m in model.modules()):
            self._note("the model is compiled, and recorded eagerly")
            warnings.warn(
                "the model is compiled, and recorded eagerly: a compiled graph cannot be observed.", stacklevel=4
            )

    def begin(self, frames: Frames, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObserverMode | None:
        """Prepare the recording of a forward; None if it is not recorded."""
        if self._steps.is_skipped_evaluation():
            self._note("evaluations between training steps are not recorded")
            return None
        step = self._steps.next()
        self._gradients.end_backward()  # a backward that raised has not ended
        if in_function_transform():  # tensors of a transform have no numbers yet
            self._note(f"forward {self._steps.forwards - 1} ran inside torch.func: it is not recorded")
            return None
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        rank = max((t.dim() for t in tensors), default=0)
        if tensors and not any(t.numel() for t in tensors if t.dim() == rank):  # a mask or a prefix may be empty alone
            self._note(f"forward {self._steps.forwards - 1} had an empty input: it is not recorded")
            return None
        if step % self.every:
            return None
        self.step = step
        self._key = _call_key(self.model, args, kwargs)
        plan = self._plans.get(self._key)
        shapes = tuple(t.shape for t in tensors)
        if plan is None or (plan.depends_on_shape(self.masks is not None) and plan.shapes != shapes):
            plan = self._plans[self._key] = self._make_plan(args, kwargs)
            self.recording.metadata.setdefault("inputs", format_inputs(args, kwargs))
            plan.shapes = shapes
        self._plan = plan
        check_mask_streams(self.masks, plan.streams)
        self._tokens = {name: TokenMask.from_argument(self.masks, name, kwargs) for name in plan.streams}
        if self._has_fsdp:
            reshard(self.model)
        self._named = dict(self.model.named_parameters())
        if self.grads:
            self._gradients.add_parameters(plan, self._named, self._has_fsdp)
        self._start_forward()
        observers: list[tuple[Value, Observer]] = []
        self._leaves = pytree.tree_leaves((args, kwargs))
        mode = ObserverMode(frames, {})
        live = self._read_live if self._has_fsdp else None
        self._samples = {
            name: TokenSample(self.model, stream, self._tokens[name], self._leaf, live)
            for name, stream in plan.streams.items()
        }
        for measured, observer in self._list_observers(plan, mode):
            value = find_observable(measured)
            if value.op is not None:
                observers.append((value, observer))
            elif (leaf := self._leaf(value)) is not None:
                mode.note_wrappers(leaf)
                observer(inner_tensors(leaf)[0])
        mode.observers = group_observers(observers)
        return mode

    def end(self, mode: ObserverMode) -> None:
        """Finish the recording of a forward."""
        values = self._plan.values() if self._plan is not None else ()
        ops = {value.op.address: value.op for value in map(find_observable, values) if value.op is not None}
        missed = {address for address, op in ops.items() if mode.is_uncertain(op)}
        if missed:  # other operators ran than in the inspected forward: the next forward is inspected again
            self._plans.pop(self._key, None)
            path, call, *_ = min(missed)
            self._note(
                f"in forward {self._steps.forwards - 1} {len(missed)} of {len(mode.observers)} places were not met, the first in "
                f"call {call + 1} of {path or 'the model'}: the model ran otherwise than when it was inspected"
            )
        self._pending, self._norms, self._operands, self._leaves = {}, {}, {}, ()
        if mode.completed and (
            wrong := [error for name, error in self._mask_errors.items() if name not in self._masked]
        ):
            raise ValueError(str(wrong[0]))
        if count := len(self._gradients.without_graph):
            self._note(f"{count} states had no graph in the forward: no gradient is recorded there")
        if self.grads and self._plan is not None:
            self._record_parameters(self._plan)
        self._has_new_samples = True

    def close(self) -> None:
        """Remove all hooks, and compute the maps of the last step."""
        self._steps.close()
        self._gradients.close()
        try:
            _ = self.recording.memory_maps
        finally:
            self.recording.compose = None
            self._pending, self._samples = {}, {}

    def _note(self, text: str) -> None:
        self.recording.metadata["note"] = text

    def _compose(self) -> dict[str, tuple[MemoryMap | None, Balance]]:
        """Return memory maps and balances of the last step if they are not computed yet."""
        new, self._has_new_samples = self._has_new_samples, False
        return {name: sample.compute() for name, sample in self._samples.items()} if new else {}

    # Plan of a forward.

    def _make_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        check_parameters(self.model, "addnorm.record(model)")
        flow = capture_flow(self.model, args, kwargs)
        with torch.no_grad():
            inspection = build_inspection(self.model, flow)
        if not inspection.sites:
            raise ValueError(
                f"{type(self.model).__name__} has no residual stream to record: {inspection.unknown[0].reason}."
            )
        plan = Plan.from_inspection(inspection, self.layers)
        flow.release_tensors()
        if not plan.sites:
            depth = max(stream.num_layers for stream in inspection.streams)
            raise ValueError(
                f"layers is {self.layers}, expected numbers from 0 to {depth - 1}: the layers of the model."
            )
        self._set_sites(inspection, plan)
        return plan

    def _set_sites(self, inspection: Inspection, plan: Plan) -> None:
        """Set the sites of the recording, or check that another kind of forward has the same sites."""
        if not self.recording.sites:
            self.recording.sites = plan.recorded
            self.recording.metadata |= inspection_metadata(inspection)
        elif [site.id for site in self.recording.sites] != [site.id for site in plan.recorded]:
            raise ValueError(
                f"forward {self._steps.forwards - 1} has {len(plan.sites)} sublayers, expected the {len(self.recording.sites)} "
                "sites of the first: record models or inputs whose sublayers differ one by one."
            )


def _call_key(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return a key of the visible state that determines the operators of a forward; its last entry is the grad mode."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    kinds = tuple(
        (x.dtype, x.dim()) if isinstance(x, Tensor) else x if isinstance(x, bool | str) else type(x) for x in leaves
    )
    training = tuple(module.training for module in model.modules())
    autocast = tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return str(spec), kinds, training, autocast, torch.is_grad_enabled()
