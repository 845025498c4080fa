"""`record`: statistics of every sublayer of a model's residual streams, forward and backward, step by step.

Statistics are computed where the tensors are, and only numbers are kept: memory does not grow with the length of the input,
and grows by 16 bytes a number with the steps. The first forward of each kind (structure of the inputs, training mode, grad
mode) is inspected first, in an additional forward without side effects. After that each forward runs once. With several streams
an additional forward precedes each recorded one: the matrices are measured in it.
"""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from addnorm._util.arguments import check_int
from addnorm._util.torch_internals import in_function_transform
from addnorm.stream.dataflow.graph import Flow
from addnorm.stream.dataflow.observers import ObserverMode, observe_forwards, use_nonreentrant_checkpoints
from addnorm.stream.dataflow.wrappers import find_fsdp_modules, find_ranks, has_flat_parameters, meet, reshard
from addnorm.stream.edits import AddEdit, OutputEdit, list_edits
from addnorm.stream.inspect import (
    capture_flow,
    check_parameters,
    find_repeated_program,
    inspect_flow,
    leave_inference_mode,
)
from addnorm.stream.inspection import Inspection
from addnorm.stream.models.inputs import format_inputs
from addnorm.stream.program.naming import identify
from addnorm.stream.program.result import Program
from addnorm.stream.record.forward import Forward, StreamForward
from addnorm.stream.record.gradients import GradientHooks, parameter_norm
from addnorm.stream.record.measurements import do_nothing
from addnorm.stream.record.probes import Leaves, Probes, StreamProbes, describe_parts
from addnorm.stream.record.program_forward import ProgramForward, ProgramProbes
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.sample import Sample
from addnorm.stream.tokens import Masks, read_masks


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
        tokens: mask of the tokens to measure: a tensor `(batch, tokens)`, or the name of the model's keyword argument that is
            the mask, as in `tokens="attention_mask"`; for several streams a dict by their names. All tokens by default.
        accumulate: number of forwards in one step (gradient accumulation). Statistics of the stream are those of the last
            forward, gradients of parameters are the sum. With 1 each forward is a step, and gradients are those of its own
            backward. None means that a step ends when an optimizer of the model's parameters steps.
        gather: measure parameters and their gradients as a whole where they are sharded (FSDP2, tensor parallelism), not the part
            of this process. Statistics of the stream are always those of the tokens of this process.

    With several streams, or computed coefficients, statistics are those of all streams together; "rms_0", ... are those of each.
    Every recorded forward then runs once more before, with its activations in memory, to measure its matrices: use `every`. Where
    coefficients are computed from the streams, "grad_frozen" is the gradient with these coefficients detached, but not the
    norms and sublayers. It takes a second backward through the model, in which hooks on its tensors are called too.

    A sharded model communicates in its forward, and `record` runs it once more: enter the block in all processes. A process that
    is alone in the block raises an error after 30 seconds, before it communicates.

    Returns:
        A `Recording` that is filled while the block runs. `addnorm.stream.record.schema.STATISTICS` lists what is recorded.

    Raises:
        ValueError: the model has no residual stream, its parameters have no values, or `gather=True` for
            `FullyShardedDataParallel` (FSDP1).
        RuntimeError: the model is sharded, and another process does not record it.

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
    if isinstance(layers, int | str):
        raise TypeError(f"layers is {layers!r}, expected a list of numbers, counted from 0: [{layers}] for one layer.")
    chosen = None if layers is None else [*layers]
    recorder = _Recorder(model, grads, every, chosen, tokens, accumulate, gather)
    try:
        with use_nonreentrant_checkpoints(), observe_forwards(model, recorder.begin, recorder.end):
            yield recorder.recording
    finally:
        recorder.close()


class StepCounter:
    """Counter of the forwards of a model, which groups them into steps.

    If the first forward trains (training mode, gradients on), forwards that evaluate are no part of a step.

    Args:
        model: the recorded model.
        accumulate: number of forwards in a step; None means that a step ends when an optimizer of the model's parameters steps.

    Attributes:
        forwards: number of forwards so far, without skipped evaluations.
    """

    def __init__(self, model: nn.Module, accumulate: int | None) -> None:
        self.model, self.accumulate = model, accumulate
        self.forwards = 0
        self._trains = False  # the first forward
        self._optimizer_steps = 0
        self._ran_since_step = False
        self._hook = None if accumulate else register_optimizer_step_post_hook(self._end_step)

    def next(self) -> int | None:
        """Count a forward and return its step; None if it evaluates between forwards that train."""
        trains = self.model.training and torch.is_grad_enabled()
        self._trains = self._trains if self.forwards else trains
        if self._trains and not trains:
            return None
        number = self.forwards
        self.forwards += 1
        self._ran_since_step = True
        return number // self.accumulate if self.accumulate else self._optimizer_steps

    def close(self) -> None:
        """Remove the hooks on optimizers."""
        if self._hook is not None:
            self._hook.remove()

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count a step if the model ran since the last one, so that several optimizers of one model make one step."""
        own = {*map(id, self.model.parameters())}
        if self._ran_since_step and any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._optimizer_steps += 1
            self._ran_since_step = False


@dataclass(eq=False)
class _Recorder:
    """State of one `record` block; its arguments are those of `record`."""

    model: nn.Module
    grads: bool
    every: int
    layers: list[int] | None
    masks: Masks
    accumulate: int | None
    gather: bool

    def __post_init__(self) -> None:
        model = self.model
        self.model = getattr(model, "_orig_mod", model)
        now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
        metadata = {"model": type(self.model).__name__, "torch": torch.__version__, "date": now}
        self.recording = Recording((), metadata)
        self._has_fsdp = bool(find_fsdp_modules(self.model))
        if self.gather and has_flat_parameters(self.model):
            raise ValueError(
                "gather is True, expected False for FullyShardedDataParallel: shard the model with fully_shard to measure "
                "whole parameters."
            )
        self._gradients = GradientHooks(self.recording, self.accumulate != 1, self.gather)
        self._steps = StepCounter(self.model, self.accumulate)
        # By the kind of forward. A forward that has a residual program is captured anew each time.
        self._probes: dict[Any, Probes] = {}
        self._key: Any = None  # of the forward
        self._forward: Forward | None = None
        if model is not self.model or any(hasattr(m, "_orig_mod") for m in model.modules()):
            self._note("the model is compiled, and recorded eagerly")
            warnings.warn(
                "the model is compiled, and recorded eagerly: a compiled graph cannot be observed.", stacklevel=5
            )

    def begin(self, mode: ObserverMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Prepare the recording of a forward, and return whether it is recorded."""
        step = self._steps.next()
        if step is None:
            self._note("evaluations between training steps are not recorded")
            return False
        self._gradients.end_backward()  # a backward that raised has not ended
        arguments = pytree.tree_leaves((args, kwargs))
        tensors = [t for t in arguments if isinstance(t, Tensor)]
        rank = max((t.dim() for t in tensors), default=0)
        if in_function_transform():  # tensors of a transform have no numbers yet
            self._note(f"forward {self._steps.forwards - 1} ran inside torch.func: it is not recorded")
            return False
        if tensors and not any(t.numel() for t in tensors if t.dim() == rank):  # a mask or a prefix may be empty alone
            self._note(f"forward {self._steps.forwards - 1} had an empty input: it is not recorded")
            return False
        if step % self.every:
            return False
        self._key = _call_key(self.model, args, kwargs)
        probes = known = self._probes.get(self._key)
        shapes = tuple(t.shape for t in tensors)
        if known is None or known.is_stale(shapes, self.masks is not None):
            if (probes := self._find_probes(args, kwargs, shapes)) is None:
                probes = known if known is not None and known.shapes == shapes else None
                self._note(
                    f"forward {self._steps.forwards - 1} {'is not' if probes is None else 'is only in part'} recorded: the "
                    "equations of the first do not close in it, as where numbers overflow or a layer is skipped"
                )
                if probes is None:
                    return False
            self.recording.metadata.setdefault("inputs", format_inputs(args, kwargs))
        assert probes is not None
        masks = read_masks(self.masks, probes.streams, kwargs)
        if self._has_fsdp:
            reshard(self.model)
        leaves = Leaves(self.model, arguments, dict(self.model.named_parameters()), self._has_fsdp)
        if self.grads:
            self._gradients.add_parameters(probes.sites, leaves.parameters, self._has_fsdp)
        gradients = self._gradients if self.grads else None
        kind: type[Forward] = ProgramForward if isinstance(probes, ProgramProbes) else StreamForward
        self._forward = kind(self.recording, step, probes, masks, leaves, gradients, mode)
        self.recording._update_maps = do_nothing  # of the step before
        return True

    def end(self, mode: ObserverMode) -> None:
        """Finish the recording of a forward."""
        forward, self._forward = self._forward, None
        assert forward is not None
        forward.release()
        if missed := forward.list_missed():  # other operators ran: the next forward is inspected again
            if isinstance(forward.probes, StreamProbes):
                self._probes.pop(self._key, None)
            path, call, *_ = min(missed)
            self._note(
                f"in forward {self._steps.forwards - 1} {len(missed)} of {len(forward.ops)} places were not met, the first in "
                f"call {call + 1} of {path or 'the model'}: the model ran otherwise than when it was inspected"
            )
        if mode.completed:
            forward.check_masks()
        if forward.without_graph:
            self._note(f"{forward.without_graph} states had no graph in the forward: no gradient is recorded there")
        for site in forward.probes.sites if self.grads else ():
            named = forward.leaves.parameters
            parameters = [named[name].detach() for name in site.parameters if name in named]
            if (norm := parameter_norm(parameters, self.gather)) is not None:
                self.recording.add(forward.step, site.index, "params", "l2", norm)
        self.recording._update_maps = partial(self._compute_maps, forward.samples)

    def close(self) -> None:
        """Remove all hooks, and compute the maps of the last step."""
        self._steps.close()
        self._gradients.close()
        self.recording._update_maps()  # so that the recording does not keep the model

    def _note(self, text: str) -> None:
        self.recording.metadata["note"] = text

    def _compute_maps(self, samples: Mapping[str, Sample]) -> None:
        """Compute memory maps and balances of a step. Delete the old map of a stream that has none in this step."""
        self.recording._update_maps = do_nothing
        for name, sample in samples.items():
            memory_map, self.recording.balances[name] = sample.compute()
            self.recording.memory_maps.pop(name, None)
            if memory_map is not None:
                self.recording.memory_maps[name] = memory_map

    def _find_probes(self, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> Probes | None:
        """Inspect the model and return the values to measure; check that another kind of forward has the same sites.

        Return None if forwards of this kind had a residual program before, and this one does not have the same.
        """
        check_parameters(self.model, "addnorm.record(model)")
        if ranks := find_ranks(self.model):
            meet(
                ranks,
                f"record runs the sharded {type(self.model).__name__} once more, in which all processes communicate",
            )
        flow, inspection, program = self._inspect(args, kwargs)
        probes: Probes
        if program is not None:
            for edit in list_edits(self.model):  # of a model that ran otherwise
                if isinstance(edit, AddEdit):
                    raise edit.build_missed_error()
            probes = ProgramProbes(program, flow, self.layers, shapes)
        elif inspection is None:
            return None
        elif not inspection.sites:
            raise ValueError(
                f"{type(self.model).__name__} has no residual stream to record: {inspection.unknown[0].reason}."
            )
        else:
            probes = StreamProbes(inspection, self.layers, shapes)
            flow.release_tensors()
        if not probes.sites:
            last = max(stream.num_layers for stream in probes.streams.values()) - 1
            raise ValueError(f"layers is {self.layers}, expected numbers from 0 to {last}: the layers of the model.")
        known = self.recording.sites
        if not known:
            self.recording.sites = tuple(probes.recorded)
            unknown = inspection.unknown if inspection is not None and program is None else ()
            mode = "training" if self.model.training else "evaluation"
            self.recording.metadata |= describe_parts([*probes.streams.values()], unknown, mode)
        elif [site.id for site in known] != [site.id for site in probes.recorded]:
            if isinstance(self._probes.get(self._key), ProgramProbes):
                return None
            raise ValueError(
                f"forward {self._steps.forwards - 1} has {len(probes.sites)} sublayers, expected the {len(known)} sites of the "
                "first: record models or inputs whose sublayers differ one by one."
            )
        self._probes[self._key] = probes
        return probes

    def _inspect(self, args: Any, kwargs: dict[str, Any]) -> tuple[Flow, Inspection | None, Program | None]:
        """Capture a run; return it, its inspection or None, and its residual program or None.

        Once a forward had a residual program, later runs are searched for a program only. Edits of writes to several streams, as
        by `ablate`, are in effect in the captured run as in the forward.
        """
        edits = [edit for edit in list_edits(self.model) if isinstance(edit, OutputEdit)]
        in_inference = torch.is_inference_mode_enabled()
        has_program = any(isinstance(probes, ProgramProbes) for probes in self._probes.values())
        if not has_program:
            flow = capture_flow(self.model, args, kwargs, edits)
            with torch.no_grad():
                inspection = inspect_flow(self.model, flow)
            found = flow, inspection, inspection.with_program().program
            if inspection.closes or not in_inference:
                return found
        with leave_inference_mode() if in_inference else nullcontext():
            flow = capture_flow(self.model, args, kwargs, edits)
            with torch.no_grad():
                program = find_repeated_program(flow)
                if program is not None and not has_program:
                    identify(program)
        return (flow, None, program) if program is not None or has_program else found


def _call_key(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return a key of the visible state that determines the operators of a forward."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    kinds = tuple(
        (x.dtype, x.dim()) if isinstance(x, Tensor) else x if isinstance(x, bool | str) else type(x) for x in leaves
    )
    training = tuple(module.training for module in model.modules())
    autocast = tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return str(spec), kinds, training, autocast, torch.is_grad_enabled()
