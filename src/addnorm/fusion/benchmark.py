"""Time and memory of a model before and after fusing, and the share of Add & Norm in a forward pass.

The share bounds the gain in time: fusing gains at most the time of Add & Norm.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from addnorm._util.jsonio import Document
from addnorm._util.timing import interleave, median_interval, quartiles, synchronize
from addnorm.fusion.match import Match
from addnorm.fusion.runs import map_tensors, run
from addnorm.stream.dataflow.memory import storage_key
from addnorm.stream.dataflow.snapshot import StateSnapshot

Call = Callable[..., Any]

SECONDS, MAX_SECONDS = 1.0, 10.0  # for each comparison of times, and while it has fewer than `MIN_ROUNDS`
MIN_ROUNDS, MAX_ROUNDS = 12, 101
SHARE_SECONDS = 1.0
MIN_SHARE_RUNS, MAX_SHARE_RUNS = 3, 7


# Times.


@dataclass(frozen=True)
class Timing(Document):
    """Times of a call before and after fusing. Both are called once a round, so the two times of a round are a pair.

    Attributes:
        before: median in seconds.
        after: median in seconds.
        rounds: number of rounds.
        before_quartiles: first and third quartile in seconds.
        after_quartiles: first and third quartile in seconds.
        ratio: how many times as fast the call is after fusing: the median over the rounds of before / after. A machine that
            becomes slower changes the two medians, but hardly the ratio of the two times of one round.
        interval: 95% interval of `ratio`, from the order of the ratios alone (`median_interval`); infinite with fewer than six
            rounds.
    """

    before: float
    after: float
    rounds: int
    before_quartiles: tuple[float, float]
    after_quartiles: tuple[float, float]
    ratio: float
    interval: tuple[float, float]

    PROPERTIES = ("is_significant",)

    @property
    def is_significant(self) -> bool:
        """Whether the interval of the ratio excludes 1."""
        return not self.interval[0] <= 1 <= self.interval[1]


def compare_times(before: Callable[[], Any], after: Callable[[], Any], state: StateSnapshot) -> Timing:
    """Time two calls in alternating order, so that a disturbance of the machine affects both.

    It takes about `SECONDS` for 12 to 101 rounds. If 12 rounds take longer, it takes up to `MAX_SECONDS` and the time of the last
    round. After fewer than six rounds, no difference is significant.

    Args:
        before: one call.
        after: the other call.
        state: snapshot that is restored afterwards, with the random states.
    """
    samplers = {"before": partial(_time, before), "after": partial(_time, after)}
    with state.restored():
        start = time.perf_counter()
        first = {
            name: [sampler()] for name, sampler in samplers.items()
        }  # may be slower: it counts if it is the only one
        samples = interleave(samplers, _rounds(start))
    times = samples if samples["before"] else first
    ratios = [one / other for one, other in zip(*times.values(), strict=True)]
    (before_1, median_before, before_3), (after_1, median_after, after_3) = map(quartiles, times.values())
    return Timing(
        median_before, median_after, len(ratios), (before_1, before_3), (after_1, after_3),
        statistics.median(ratios), median_interval(ratios),
    )  # fmt: skip


def _rounds(start: float) -> Iterator[int]:
    """Yield the numbers of the rounds while there is time."""
    for turn in range(MAX_ROUNDS):
        if time.perf_counter() - start > (MAX_SECONDS if turn < MIN_ROUNDS else SECONDS):
            break
        yield turn


def _time(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = call()
    synchronize()
    seconds = time.perf_counter() - start
    del result  # after the clock was read: freeing the graph is not part of the call
    return seconds


# Memory.


def saved_bytes(call: Callable[[], Any], state: StateSnapshot) -> int:
    """Return the bytes that autograd saves for backward in one forward call.

    Each storage counts once and in full. Storages in the state, of parameters, buffers and arguments, do not count.
    """
    storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and storage_key(tensor) not in state.storages:
            storages[storage_key(tensor)] = tensor.untyped_storage()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with state.restored(), torch.inference_mode(False), torch.enable_grad(), hooks:
        result = call()
    del result
    return sum(storage.nbytes() for storage in storages.values())


# Time and memory, before and after.


@dataclass(frozen=True)
class Benchmark(Document):
    """Times and memory of a model before and after fusing.

    Attributes:
        inference: time of a call without gradients.
        training: time of a call and the gradients of all parameters; None if no parameter requires one.
        saved_bytes: bytes that autograd saves for backward, before and after; None if no parameter requires a gradient.
        threads: number of torch's threads.
        load: average number of running processes on the machine in the last minute; None where the system does not report it.
    """

    inference: Timing
    training: Timing | None = None
    saved_bytes: tuple[int, int] | None = None
    threads: int = 1
    load: float | None = None

    @property
    def runs(self) -> dict[str, Timing]:
        """The times by the name of the run."""
        return {"inference": self.inference} | ({} if self.training is None else {"training step": self.training})

    @property
    def changes(self) -> dict[str, Timing]:
        """The runs whose time has changed significantly, those that are slower first."""
        changed = [(name, timing) for name, timing in self.runs.items() if timing.is_significant]
        return dict(sorted(changed, key=lambda item: item[1].ratio))

    @property
    def is_slower(self) -> bool:
        """Whether a run is slower after fusing, and none is faster."""
        return bool(self.changes) and all(timing.ratio < 1 for timing in self.changes.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes for JSON."""
        saved = self.saved_bytes and {"before": self.saved_bytes[0], "after": self.saved_bytes[1]}
        return {**super().to_dict(), "saved_bytes": saved}


def measure(
    before: Call, after: Call, args: Sequence[Any], kwargs: Mapping[str, Any], parameters: Mapping[str, Tensor],
    state: StateSnapshot,
) -> Benchmark:  # fmt: skip
    """Measure two callables that compute the same.

    Args:
        before: one callable.
        after: the other callable, with the same arguments.
        args: positional arguments.
        kwargs: keyword arguments.
        parameters: the parameters whose gradients a training step computes; if there are none, only inference is measured.
        state: snapshot of the model and the arguments, restored after each measurement.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # before the measurement adds to it

    def timing(parameters: Mapping[str, Tensor]) -> Timing:
        # The signs of the loss are drawn in the first call, which does not count.
        first, second = (partial(run, call, args, kwargs, parameters, {}) for call in (before, after))
        return compare_times(first, second, state)

    def memory(call: Call) -> int:
        positional, named = map_tensors((tuple(args), dict(kwargs)), lambda tensor: tensor)  # copies of caches
        return saved_bytes(lambda: call(*positional, **named), state)

    inference, threads = timing({}), torch.get_num_threads()
    if not parameters:
        return Benchmark(inference, threads=threads, load=load)
    return Benchmark(inference, timing(parameters), (memory(before), memory(after)), threads, load)


# The share of Add & Norm.


class NodeTimer(fx.Interpreter):
    """Interpreter that runs a graph of a module as it was before it was rewritten, and times each node."""

    def __init__(self, module: fx.GraphModule, graph: fx.Graph, matches: Iterable[Match]) -> None:
        super().__init__(module, graph=graph)
        self._add_norm = {
            node for match in matches if match.z for node in (match.add, *match.inner)
        }  # z: the add was found
        self._current: Counter[fx.Node] = Counter()  # nanoseconds in this pass
        self._shortest: dict[fx.Node, int] = {}  # nanoseconds in the pass where the node took least

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and add the duration to the node's time in this pass, in which the graph may run several times."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        synchronize()
        start = time.perf_counter_ns()
        out = getattr(self, n.op)(n.target, args, kwargs)
        synchronize()
        self._current[n] += time.perf_counter_ns() - start
        return out

    def end_pass(self) -> None:
        """End a pass, and keep for each node the shortest time that it took in any pass."""
        for node, nanoseconds in self._current.items():
            self._shortest[node] = min(nanoseconds, self._shortest.get(node, nanoseconds))
        self._current.clear()

    @property
    def nanoseconds(self) -> tuple[int, int]:
        """Time in nodes of Add & Norms, and in all nodes."""
        add_norm = sum(nanoseconds for node, nanoseconds in self._shortest.items() if node in self._add_norm)
        return add_norm, sum(self._shortest.values())


def measure_share(timers: Sequence[NodeTimer], call: Callable[[], Any], state: StateSnapshot) -> float | None:
    """Return the share of Add & Norm in the time of a forward pass, from 0 to 1.

    Each node counts with its shortest time of several passes, which the load of the machine disturbs least.

    Args:
        timers: timers of all graphs of the pass.
        call: function that runs the pass with these timers.
        state: snapshot that is restored after each pass.
    """
    end = time.perf_counter() + SHARE_SECONDS
    for count in range(MAX_SHARE_RUNS):
        if count >= MIN_SHARE_RUNS and time.perf_counter() > end:
            break
        with state.restored():
            call()
        for timer in timers:
            timer.end_pass()
    add_norm, total = (sum(part) for part in zip(*(timer.nanoseconds for timer in timers), strict=True))
    return add_norm / total if total else None
