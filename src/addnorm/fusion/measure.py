"""What a call of a model gives, takes and keeps: its outputs and gradients, its seconds, its bytes.

All calls begin alike (the contents of the model's tensors and of those it is given, the random states), and leave no trace.
"""

from __future__ import annotations

import gc
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from addnorm.fusion.rng_replay import exchanged
from addnorm.stream.dataflow.state import LEAF_TYPES, find_tensors, preserve_state

__all__ = ["Contents", "Ran", "Tensors", "Times", "run", "saved_bytes", "step", "tensors_of", "times"]

Call = Callable[..., Any]
Tensors = dict[str, Tensor]

SECONDS = 2.0  # for each measurement
FEWEST_ROUNDS, MOST_ROUNDS = 5, 101


class Ran(NamedTuple):
    """The outputs of a call, and the gradients of the parameters."""

    outputs: Tensors
    gradients: Tensors


def run(
    call: Call,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wanted: Mapping[str, Tensor],
    signs: Tensors | None = None,
) -> Ran:
    """Calls it, and takes the gradients of those parameters that are wanted; `.grad` is left alone.

    The loss is the sum of all outputs, each element with a random sign; `signs` keeps them for the next time.
    """
    signs = {} if signs is None else signs
    with torch.inference_mode(False), torch.set_grad_enabled(bool(wanted)):
        args, kwargs = exchanged((tuple(args), dict(kwargs)), _leaf)
        outputs = tensors_of(call(*args, **kwargs))
        loss = {name: t for name, t in outputs.items() if t.requires_grad and t.is_floating_point()}
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if wanted and loss:
            signs.update({name: _signs(name, t) for name, t in loss.items() if name not in signs})
            given = [signs[name] for name in loss]
            found = torch.autograd.grad([*loss.values()], [*wanted.values()], given, allow_unused=True)
        gradients = {name: g for name, g in zip(wanted, found, strict=True) if g is not None}
        return Ran({name: t.detach() for name, t in outputs.items()}, gradients)


def _leaf(tensor: Tensor) -> Tensor:
    """The tensor in the same memory, with no graph of the caller's behind it, which is not ours to walk, nor one to come."""
    if tensor.is_inference():
        return tensor.clone()
    if not tensor.requires_grad:
        return tensor.detach()
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_().clone()


def _signs(name: str, tensor: Tensor) -> Tensor:
    """Random signs, always the same for the same name: they are exact in every dtype."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8)
    return signs.mul_(2).sub_(1).to(tensor.device, tensor.dtype)


def tensors_of(result: Any) -> Tensors:
    """The tensors of a result and their names: of tuples, mappings and what else has attributes, such as a cache."""
    found: Tensors = {}
    seen: set[int] = set()

    def walk(one: Any, path: tuple[str, ...]) -> None:
        if isinstance(one, Tensor):
            found[".".join(path) or "output"] = one
        if isinstance(one, LEAF_TYPES) or callable(one) or id(one) in seen:
            return
        seen.add(id(one))
        if isinstance(one, Mapping):
            inside = [(str(key), value) for key, value in one.items()]
        elif isinstance(one, list | tuple):
            inside = [(str(k) if path else f"[{k}]", value) for k, value in enumerate(one)]
        else:
            inside = [*getattr(one, "__dict__", {}).items()]
        for key, value in inside:
            walk(value, (*path, key))

    walk(result, ())
    return found


class Contents:
    """What the tensors of a model and of its arguments hold, to be put back: a forward may write into them."""

    def __init__(self, model: nn.Module, given: Any = ()) -> None:
        self.model = model
        attributes = [[*vars(module).values()] for module in model.modules()]  # not too many to look into, one by one
        held = {id(t): t for one in (*attributes, given) for t in find_tensors(one)}
        self.tensors = [t for t in held.values() if t.layout == torch.strided and not t.is_nested]
        self.storages = {_address(t) for t in self.tensors}
        self._copies = [(t.detach().clone(), t.is_leaf) for t in self.tensors]
        found = pytree.tree_leaves((attributes, given))
        self._generators = [(one, one.get_state()) for one in found if isinstance(one, torch.Generator)]

    @contextmanager
    def again(self) -> Iterator[None]:
        """What runs inside begins as all others do, and leaves nothing behind."""
        with preserve_state(self.model):
            try:
                yield
            finally:
                try:
                    self._put_back()
                except KeyboardInterrupt:
                    self._put_back()
                    raise

    def _put_back(self) -> None:
        for tensor, (saved, was_leaf) in zip(self.tensors, self._copies, strict=True):
            if was_leaf and not tensor.is_leaf and not tensor._is_view():
                tensor.detach_()  # of the graph of what was written into it
            if not _equal(tensor.detach(), saved):
                tensor.data.copy_(saved)  # .data: a graph that the caller holds is not told of a write undone
        for generator, state in self._generators:
            generator.set_state(state)

    def apart(self, outputs: Tensors) -> Tensors:
        """Outputs in memory of their own: one that is memory of the model's would change when that is put back."""
        return {name: t.clone() if _address(t) in self.storages else t for name, t in outputs.items()}


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether they hold the same; NaN is NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


# --- seconds --------------------------------------------------------------------------------------------------------------


def step(
    call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], wanted: Mapping[str, Tensor] | None = None
) -> Callable[[], Ran]:
    """A call without arguments, for `times`: a forward, and the gradients of the parameters that are wanted."""
    signs: Tensors = {}  # drawn in the first call, which is not timed
    return lambda: run(call, args, kwargs, wanted or {}, signs)


@dataclass(frozen=True)
class Times:
    """The median seconds of a call before and after, and of how many rounds."""

    before: float
    after: float
    rounds: int

    @property
    def ratio(self) -> float:
        """How many times faster it is after."""
        return self.before / self.after

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"before": self.before, "after": self.after, "ratio": self.ratio, "rounds": self.rounds}


def times(
    before: Callable[[], Any], after: Callable[[], Any], *, seconds: float | None = None, model: nn.Module | None = None,
    given: Any = (),
) -> Times:  # fmt: skip
    """Times two calls in turns, so that what disturbs this machine for a while disturbs both.

    Args:
        before: one of them.
        after: the other. Which of them is first in a round alternates.
        seconds: for about how long, beside an untimed call of each; but no fewer than 5 rounds and no more than 101.
        model: is left as it was, with the random states;
        given: and what it is called with.
    """
    calls = (before, after)
    samples: tuple[list[float], list[float]] = ([], [])
    with nullcontext() if model is None else Contents(model, given).again(), _collected_by_hand():
        for call in calls:
            _seconds(call)
        end = time.perf_counter() + (SECONDS if seconds is None else seconds)
        for turn in range(MOST_ROUNDS):
            if turn >= FEWEST_ROUNDS and time.perf_counter() > end:
                break
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                samples[which].append(_seconds(calls[which]))
    return Times(statistics.median(samples[0]), statistics.median(samples[1]), len(samples[0]))


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = call()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    taken = time.perf_counter() - start
    del result  # what it takes to free a graph is no part of the call
    return taken


@contextmanager
def _collected_by_hand() -> Iterator[None]:
    """A collection of garbage in the middle would be one call's and not the other's."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# --- bytes ----------------------------------------------------------------------------------------------------------------


def saved_bytes(call: Callable[[], Any], model: nn.Module, given: Any = ()) -> int:
    """The bytes that autograd keeps for backward in a call of a forward, beside those there were before.

    Each storage counts once and whole. Those of the model's parameters and buffers, and of what it is `given`, do not count.
    """
    contents = Contents(model, given)
    kept: dict[int, torch.UntypedStorage] = {}  # held until the end, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and _address(tensor) not in contents.storages:
            kept[_address(tensor)] = tensor.untyped_storage()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with contents.again(), torch.inference_mode(False), torch.enable_grad(), hooks:
        result = call()
    del result
    return sum(storage.nbytes() for storage in kept.values())
