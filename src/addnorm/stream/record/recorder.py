"""`record`: what happens at every sublayer of a model's residual streams, forward and backward, step by step.

Measured is where the values are made, and only numbers are kept: memory does not grow with the length of the input, and with
the number of steps by 16 bytes a number. The first forward of each kind (its inputs' structure, training or not, with gradients
or not) is inspected first, in an additional forward that leaves no trace; after that each forward runs once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from addnorm._util.arguments import check_int
from addnorm.stream.dataflow.capture import PARAMETER, Frames, Value
from addnorm.stream.dataflow.observers import Tap, Watch, checkpoints_with_graph, gather, watched
from addnorm.stream.find.inspect import capture, understand
from addnorm.stream.find.inspection import Inspection
from addnorm.stream.find.ops import up
from addnorm.stream.record import sample, statistics
from addnorm.stream.record.backward import Backward
from addnorm.stream.record.balance import Balance
from addnorm.stream.record.call_key import Masks, copied, kind_of, mask_of
from addnorm.stream.record.metadata import known
from addnorm.stream.record.plan import Plan, PlannedNorm, PlannedSite, PlannedState
from addnorm.stream.record.recording import Map, Recording
from addnorm.stream.record.statistics import Size, Tokens

__all__ = ["record"]


@contextmanager
def record(
    model: nn.Module,
    *,
    grads: bool = True,
    every: int = 1,
    layers: Iterable[int] | None = None,
    tokens: Masks = None,
    accumulate: int = 1,
) -> Iterator[Recording]:
    r"""Records every forward, and every backward, of a model inside the block.

    Args:
        model: any `torch.nn.Module` in which `addnorm.inspect` finds a stream. It runs as it is, in training or evaluation,
            under autocast, with checkpoints; a compiled model runs eagerly meanwhile, and says so.
        grads: also the gradient of the loss at the stream, and that of each sublayer's parameters.
        every: record one forward in so many; the others run as if there were no recorder.
        layers: only the sublayers of these layers, counted from 0.
        tokens: which tokens count: a tensor `(batch, tokens)`, true where one does, or the name of the model's keyword
            argument that is one, as in `tokens="attention_mask"`; of several streams by their names, as in
            `tokens={"encoder": "attention_mask"}`. All by default.
        accumulate: how many forwards make one step (gradient accumulation). The statistics of the stream are of the last of them,
            the gradients of parameters are the sum. With 1 each forward is a step, and they are of its own backward alone.

    Returns:
        A `Recording`, which fills while the block runs; `addnorm.stream.record.recording.STATISTICS` says what is recorded.

    Raises:
        ValueError: no residual stream was found in the model.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3)
        >>> with addnorm.record(model) as rec:
        ...     model(torch.randn(2, 5, 16)).square().mean().backward()
        >>> rec
        <Recording of TransformerEncoder: 6 sublayers, 1 step 0, with gradients>
        >>> [site.kind for site, ratio in rec.series("write", "ratio")][:2]
        ['attention', 'feed-forward']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module: addnorm.record(model).")
    check_int("every", every, 1)
    check_int("accumulate", accumulate, 1)
    recorder = Recorder(model, grads, every, layers, tokens, accumulate)
    try:
        with checkpoints_with_graph(), watched(model, recorder.begin, recorder.end):
            yield recorder.recording
    finally:
        recorder.close()


@dataclass
class Held:
    """A state, until the last write that is added to it has been compared with it."""

    x: Tensor
    size: Size
    version: int
    wanted: int


class Recorder:
    """The state of one `record`."""

    def __init__(
        self,
        model: nn.Module,
        grads: bool,
        every: int,
        layers: Iterable[int] | None,
        tokens: Masks,
        accumulate: int,
    ) -> None:
        self.model = getattr(model, "_orig_mod", model)
        self.grads, self.every, self.accumulate = grads, every, accumulate
        self.layers = None if layers is None else [*layers]
        self.which = tokens
        self.recording = Recording((), {"model": type(self.model).__name__, "torch": torch.__version__})
        self.forwards = 0
        self.step = 0
        self._plans: dict[Any, Plan] = {}
        self._plan: Plan | None = None
        self._key: Any = None
        self._tokens: dict[str, Tokens] = {}  # of each stream
        self._named: dict[str, nn.Parameter] = {}
        self._held: dict[Value, Held] = {}  # the states that a write is still to be compared with
        self._sizes: dict[Value, Size] = {}
        self._samples: dict[str, sample.Sample] = {}
        self._fresh = False  # the samples are of a step whose maps nobody has asked for
        self.recording.mapper = self._maps
        self._made: dict[Value, Tensor] = {}  # writes that wait for their scales, and these
        self._backward = Backward(self.recording, accumulate > 1)
        self._leaves: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()
        self._lost: list[PlannedState] = []
        compiled = model is not self.model or any(hasattr(m, "_orig_mod") for m in model.modules())
        if compiled:
            note = "the model is compiled, and recorded eagerly"
            self.recording.facts["note"] = note
            warnings.warn(f"{note}: a compiled graph has no place to listen.", stacklevel=4)

    def begin(self, frames: Frames, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch | None:
        """A forward begins."""
        number = self.forwards
        self.forwards += 1
        self._backward.over()  # one that an error has ended does not say so
        if torch._C._functorch.peek_interpreter_stack() is not None:  # whose tensors have no numbers yet
            self.recording.facts["note"] = f"forward {number} ran inside torch.func: it is not recorded"
            return None
        step = number // self.accumulate
        if step % self.every:
            return None
        self.step = step
        self._key = kind_of(self.model, args, kwargs)
        plan = self._plans.get(self._key)
        if plan is None:
            plan = self._plans[self._key] = self._planned(args, kwargs)
        self._plan = plan
        wrong = [name for name in self.which if name not in plan.streams] if isinstance(self.which, Mapping) else []
        if wrong:
            raise ValueError(
                f"tokens has the stream {wrong[0]!r}, expected some of {', '.join(map(repr, plan.streams))}."
            )
        self._tokens = {name: Tokens(mask_of(self.which, name, kwargs)) for name in plan.streams}
        self._named = dict(self.model.named_parameters())
        if self.grads:
            self._backward.listen(plan, self._named)
        self._held, self._sizes, self._made = {}, {}, {}
        self._lost = []
        taps: list[tuple[Value, Tap]] = []
        leaves = pytree.tree_leaves((args, kwargs))
        watch = Watch(frames, {})
        self._samples = {name: sample.Sample(plan, name, self._tokens[name]) for name in plan.streams}
        for value, tap in self._taps(plan, watch):
            if value.op is not None:
                taps.append((value, tap))
            elif (leaf := self._leaf(value, leaves)) is not None:
                tap(leaf)
        watch.taps = gather(taps)
        return watch

    def end(self, watch: Watch) -> None:
        """It is over."""
        heard = {
            v.op.address: v.op for v in (self._plan.values() if self._plan is not None else ()) if v.op is not None
        }
        missed = {address for address, op in heard.items() if watch.otherwise(op)}
        if missed:  # it ran otherwise than the one that was inspected: the next one is inspected again
            self._plans.pop(self._key, None)
            path, call, *_ = min(missed)
            self.recording.facts["note"] = (
                f"in forward {self.forwards - 1} {len(missed)} of {len(watch.taps)} places were not met, the first in call "
                f"{call + 1} of {path or 'the model'}: the model ran otherwise than when it was inspected"
            )
        self._held, self._sizes, self._made = {}, {}, {}
        if self._lost:
            self.recording.facts["note"] = (
                f"{len(self._lost)} states had no graph in the forward: no gradient is recorded there"
            )
        if self.grads and self._plan is not None:
            self._weights(self._plan)
        self._fresh = True

    def close(self) -> None:
        """Takes every hook away."""
        self._backward.close()
        for handle in self._leaves.values():
            handle.remove()
        try:
            _ = self.recording.maps
        finally:
            self.recording.mapper = None
            self._held, self._samples = {}, {}

    def _maps(self) -> dict[str, tuple[Map | None, Balance]]:
        """The memory maps and balance sheets of the last step, made when they are asked for."""
        fresh, self._fresh = self._fresh, False
        return {name: one.made() for name, one in self._samples.items()} if fresh else {}

    # What to hear.

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        flow = capture(self.model, *copied(args, kwargs))
        with torch.no_grad():
            found = understand(self.model, flow)
        if not found.sites:
            raise ValueError(
                f"{type(self.model).__name__} has no residual stream to record: {found.unknown[0].reason}."
            )
        plan = Plan.of(found, self.layers)
        flow.forget()
        if not plan.sites:
            depth = max(stream.num_layers for stream in found.streams)
            raise ValueError(
                f"layers is {self.layers}, expected numbers from 0 to {depth - 1}: the layers of the model."
            )
        self._know(found, plan)
        return plan

    def _know(self, found: Inspection, plan: Plan) -> None:
        """Takes the sites over, and begins to listen to the parameters."""
        if not self.recording.sites:
            self.recording.sites = plan.recorded
            self.recording.facts |= known(found)
        elif [site.id for site in self.recording.sites] != [site.id for site in plan.recorded]:
            raise ValueError(
                f"forward {self.forwards - 1} has {len(plan.sites)} sublayers, expected the {len(self.recording.sites)} sites of "
                "the first: record models or inputs whose sublayers differ one by one."
            )

    def _taps(self, plan: Plan, watch: Watch) -> Iterator[tuple[Value, Tap]]:
        for state in plan.states:
            yield state.value, partial(self._state, watch, state)
        for site in plan.sites:
            if site.read is not None:
                yield site.read, partial(self._sized, "read", site)
            yield site.raw, partial(self._sized, "raw", site)
            if any(scale.op is not None for scale in site.write.scales):
                yield from ((value, partial(self._scaled, site, value)) for value in _made(site))
            else:
                yield site.write.value, partial(self._write, site)
        for norm in plan.norms:
            yield (
                (norm.norm.x, partial(self._normed, norm))
                if norm.rstd is None
                else (norm.rstd, partial(self._rstd, norm))
            )
        for name, (stream, _) in plan.streams.items():
            yield from self._samples[name].taps(stream)

    def _leaf(self, value: Value, leaves: Sequence[Any]) -> Tensor | None:
        """What no operator makes: an input, or a parameter."""
        if isinstance(value.part, int) and 0 <= value.part < len(leaves):
            leaf = leaves[value.part]
            return leaf if isinstance(leaf, Tensor) else None
        if value.name:
            return self._named.get(value.name)
        return None

    # What is heard.

    def _put(self, site: int, role: str, numbers: Iterable[tuple[str, float]]) -> None:
        for name, value in numbers:
            self.recording.add(self.step, site, role, name, value)

    def _state(self, watch: Watch, state: PlannedState, tensor: Tensor) -> None:
        if self.grads and state.leaving and self._key[-1]:  # gradients are wanted, as the forward began
            watch.waiting.append(partial(self._hook, state, tensor))
        with torch.no_grad():
            tokens = self._tokens[state.stream]
            t = statistics.rows(tensor.detach(), state.width, state.axis)
            of_t = self._sizes[state.value] = statistics.size(t, tokens)
            if state.wanted:
                self._held[state.value] = Held(t, of_t, _version(t), state.wanted)
            numbers = [*of_t.numbers()]
            for site in state.entering:
                self._put(site, "in", numbers)
            if state.leaving:
                more = [("similarity", statistics.similarity(t, of_t, tokens)), *statistics.massive(t, of_t, tokens)]
                for site in state.leaving:
                    self._put(site, "out", [*numbers, *more])

    def _hook(self, state: PlannedState, tensor: Tensor) -> None:
        if tensor.requires_grad:
            handle = tensor.register_hook(partial(self._gradient, state, self.step, self._tokens[state.stream]))
            if tensor.is_leaf:  # the same one may enter the next forward
                if tensor in self._leaves:
                    self._leaves[tensor].remove()
                self._leaves[tensor] = handle
        elif state.value.op is not None and state.value.kind & PARAMETER:
            self._lost.append(state)

    def _gradient(self, state: PlannedState, step: int, tokens: Tokens, grad: Tensor) -> None:
        self._backward.reached(step)
        with torch.no_grad():
            of_grad = statistics.size(statistics.rows(grad, state.width, state.axis), tokens)
            for site in state.leaving:
                for name, value in of_grad.numbers():
                    self.recording.add(step, site, "grad", name, value)

    def _sized(self, role: str, site: PlannedSite, tensor: Tensor) -> None:
        with torch.no_grad():
            assert self._plan is not None
            state = self._plan.states[site.state]
            t = statistics.rows(tensor.detach(), state.width, state.axis)
            tokens = self._tokens[state.stream]
            every = Tokens() if tokens.mask is not None and t.shape[:-1].numel() != tokens.mask.numel() else tokens
            value = site.raw if role == "raw" else site.read
            assert value is not None
            if value not in self._sizes:  # what is read may be the stream itself
                self._sizes[value] = statistics.size(t, every)
            self._put(site.index, role, self._sizes[value].numbers())

    def _scaled(self, site: PlannedSite, value: Value, tensor: Tensor) -> None:
        """A write is heard once its scales are, in whichever order they are made."""
        self._made[value] = tensor
        if all(one in self._made for one in _made(site)):
            self._write(site, self._made.pop(site.write.value))

    def _write(self, site: PlannedSite, tensor: Tensor) -> None:
        assert self._plan is not None
        state = self._plan.states[site.state]
        with torch.no_grad():
            write = tensor.detach()
            if site.write.factor != 1.0:
                write = write * site.write.factor
            for scale in site.write.scales:
                current = self._made.get(scale) if scale.op is not None else self._leaf(scale, ())
                write = write * (scale.tensor if current is None else current).detach()
            write = statistics.rows(write, state.width, state.axis)
            same = not site.write.scales and site.write.factor == 1.0 and up(site.write.value) is site.raw
            of_write = self._sizes.get(site.raw) if same else None
            tokens = self._tokens[state.stream]
            of_write = of_write or statistics.size(write, tokens)
            self._put(site.index, "write", of_write.numbers())
            held = self._held.get(state.value)
            if held is not None:
                x = held.x
                if x.numel() == write.numel() and held.version == _version(x):
                    numbers = statistics.pair(x, write.reshape(x.shape), held.size, of_write, tokens)
                    self._put(site.index, "write", numbers)
                held.wanted -= 1
                if not held.wanted:
                    del self._held[state.value]

    def _normed(self, norm: PlannedNorm, tensor: Tensor) -> None:
        with torch.no_grad():
            self._rstd(norm, 1.0 / norm.norm.denominator(statistics.wide(tensor.detach())))

    def _rstd(self, norm: PlannedNorm, rstd: Tensor) -> None:
        with torch.no_grad():
            t = rstd.detach().float()
            tokens = self._tokens[norm.stream]
            mask = tokens.of(t) if tokens.mask is not None and t.numel() == tokens.mask.numel() else None
            t = t.reshape(-1) if mask is None else t.reshape(-1)[mask]
            if t.numel():
                numbers = [("rstd", float(t.mean())), ("rstd_min", float(t.min())), ("rstd_max", float(t.max()))]
                for site in norm.sites:
                    self._put(site, norm.role, numbers)

    def _weights(self, plan: Plan) -> None:
        for site in plan.sites:
            held = [self._named[name].detach() for name in site.parameters if name in self._named]
            sizes = [torch.linalg.vector_norm(statistics.wide(parameter)) for parameter in held]
            if sizes:
                self._put(site.index, "params", [("l2", float(torch.stack(sizes).square().sum().sqrt()))])


def _made(site: PlannedSite) -> list[Value]:
    """Of a write and what scales it what is no parameter."""
    return [site.write.value, *(scale for scale in site.write.scales if scale.op is not None)]


def _version(t: Tensor) -> int:
    """Changes when the memory is written; inference tensors do not tell."""
    return 0 if t.is_inference() else t._version
