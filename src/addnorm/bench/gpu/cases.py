"""Cases of the GPU benchmark: jobs, dtypes, the plan with the most important first; tensors and timed call of a case."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from addnorm.bench.cases import DROPOUT, NORMS, Call
from addnorm.bench.harness import Case
from addnorm.reference import Norm

FIELDS = ("norm", "job", "rows", "d", "dtype")
MB = 1e6
LARGE, MEDIUM = 64 * MB, 16 * MB  # bytes of the smaller of a case's tensors, from which on the targets hold
TARGET_D = (1024, 2048, 4096, 8192, 16384)


class Dtypes(NamedTuple):
    """Dtypes of the stream (x, z), of the branch (Sublayer(x), y), and of weight and bias."""

    title: str
    stream: torch.dtype
    branch: torch.dtype
    parameters: torch.dtype


DTYPES = {
    "bfloat16": Dtypes("bfloat16", torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "mixed": Dtypes("float32 stream, bfloat16 branch", torch.float32, torch.bfloat16, torch.float32),
    "float16": Dtypes("float16", torch.float16, torch.float16, torch.float16),
    "float32": Dtypes("float32", torch.float32, torch.float32, torch.float32),
}

# The tensors of rows x d, by dtype. The gradients of branch and residual are one tensor if their dtypes are equal, without
# dropout.
STREAM, BRANCH = ("x", "z", "dz", "dx"), ("s", "y", "dy", "ds")
FORWARD, BACKWARD = ("x", "s", "y", "z"), ("dy", "dz", "z", "dx", "ds")


class Job(NamedTuple):
    """Use of the operation that is timed.

    Attributes:
        title: in tables.
        moves: tensors that it must read or write.
        stream: whether z is returned too.
        forward: whether the forward is timed.
        backward: whether the backward is timed.
        dropout: probability.
    """

    title: str
    moves: tuple[str, ...]
    stream: bool = True
    forward: bool = True
    backward: bool = False
    dropout: float = 0.0


JOBS = {
    "forward": Job("forward, y alone", ("x", "s", "y"), stream=False),
    "forward_stream": Job("forward, y and the stream", FORWARD),
    "backward": Job("backward", BACKWARD, forward=False, backward=True),
    "forward_backward": Job("forward + backward", FORWARD + BACKWARD, backward=True),
    "dropout": Job(f"forward + backward, dropout {DROPOUT}", FORWARD + BACKWARD, backward=True, dropout=DROPOUT),
}


def case_of(norm: str, job: str, rows: int, d: int, dtype: str) -> Case:
    """Return a case."""
    return Case(norm=norm, job=job, rows=rows, d=d, dtype=dtype)


def tensor_bytes(case: Case) -> int:
    """Return the bytes of the branch, and of y: the smaller tensors, where the stream is wider."""
    return int(case.rows * case.d * DTYPES[case.dtype].branch.itemsize)


def moved_bytes(case: Case) -> int:
    """Return the bytes that must move, each tensor with its own dtype. Parameters and statistics are negligible."""
    dtypes, job = DTYPES[case.dtype], JOBS[case.job]
    one_gradient = dtypes.stream == dtypes.branch and not job.dropout
    moved = [name for name in job.moves if not (name == "ds" and one_gradient)]
    sizes = [(dtypes.stream if name in STREAM else dtypes.branch).itemsize for name in moved]
    return int(case.rows * case.d * sum(sizes))


def title(case: Case) -> str:
    """Return a case in words."""
    return f"{NORMS[case.norm]}, {JOBS[case.job].title}, {case.rows} x {case.d} {case.dtype}"


class Tier(NamedTuple):
    """Cases of one purpose: every d with each size in bytes and each number of rows."""

    dtypes: tuple[str, ...]
    jobs: tuple[str, ...]
    ds: tuple[int, ...]
    sizes: tuple[float, ...] = ()
    rows: tuple[int, ...] = ()


# First a case of every kind, at d = 4096, then the other sizes: the cases that the budget leaves are more of the same kinds.
# A case of an earlier tier is not repeated.
APART, TOGETHER, FEW = ("forward_stream", "backward"), ("forward_stream", "forward_backward"), (1, 128)
TIERS = (
    Tier(("bfloat16",), (*APART, "forward"), (4096,), (LARGE,)),
    Tier(("bfloat16",), TOGETHER, (4096,), rows=FEW),
    Tier(("bfloat16",), APART, TARGET_D, (LARGE,)),
    Tier(("mixed",), APART, (4096,), (LARGE,)),
    Tier(("bfloat16",), ("dropout", "forward_backward"), (4096,), (LARGE,)),
    Tier(("bfloat16",), (*APART, "forward"), (4096,), (MEDIUM,)),
    Tier(("bfloat16",), TOGETHER, (768,), rows=FEW),
    Tier(("float16", "float32"), APART, (4096,), (LARGE,)),
    Tier(("bfloat16",), ("forward",), TARGET_D, (LARGE,)),
    Tier(("mixed",), APART, TARGET_D, (LARGE,)),
    Tier(("bfloat16",), APART, (768, 32768, 65536), (LARGE,)),
    Tier(("float32",), APART, (1024, 16384), (LARGE,)),
    Tier(("bfloat16",), APART, (1024, 16384), (MEDIUM,)),
    Tier(("mixed",), ("dropout", "forward_backward"), (4096,), (LARGE,)),
    Tier(("bfloat16",), TOGETHER, (768, 4096), rows=(1024,)),
    Tier(("bfloat16",), ("dropout",), (768,), rows=(128,)),
)


def rows_for(size: float, d: int, dtype: str) -> int:
    """Return the power of two that makes a tensor of the branch at least `size` bytes."""
    rows = 1
    while tensor_bytes(case_of("layer", "forward", rows, d, dtype)) < size:
        rows *= 2
    return rows


def plan(
    norms: Sequence[Norm] = tuple(NORMS),
    dtypes: Sequence[str] | None = None,
    jobs: Sequence[str] | None = None,
    ds: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> list[Case]:
    """Return the cases in their order; each argument selects a part.

    With both ds and rows the result is every combination instead, by default of bfloat16 and all jobs, so that any size can be
    measured.

    Raises:
        ValueError: the plan has no such case.
    """
    if ds and rows:
        lines = itertools.product(dtypes or ("bfloat16",), ds, rows, norms, jobs or JOBS)
        return [case_of(norm, job, n, d, dtype) for dtype, d, n, norm, job in lines]
    selected = {"dtype": dtypes, "job": jobs, "d": ds, "rows": rows, "norm": norms}
    cases = [
        case for case in dict.fromkeys(_whole())
        if all(not values or getattr(case, name) in values for name, values in selected.items())
    ]  # fmt: skip
    if not cases:
        words = ", ".join(f"{name} {'/'.join(map(str, values))}" for name, values in selected.items() if values)
        raise ValueError(f"no case of the plan has {words}: give both d and rows to measure other sizes")
    return cases


def _whole() -> Iterator[Case]:
    for tier in TIERS:
        for dtype, d in itertools.product(tier.dtypes, tier.ds):
            for n in (*(rows_for(size, d, dtype) for size in tier.sizes), *tier.rows):
                for norm, job in itertools.product(NORMS, tier.jobs):
                    yield case_of(norm, job, n, d, dtype)


# -------------------------------------------------------------------------------------------------------------- tensors


TIMES_CACHE = 3  # size of all sets together, in caches
MOST_SETS = 256

TimedCall = Callable[[int], object]


class Set(NamedTuple):
    """Inputs of one call: (residual, branch, weight, bias), those with a gradient, and the gradients of y and z."""

    args: tuple[Tensor | None, ...]
    wanted: tuple[Tensor, ...]
    cotangents: tuple[Tensor, Tensor] | tuple[()]


def set_count(case: Case, cache: int) -> int:
    """Return the number of sets, at least two, that leaves no input of a call in the cache from its previous use."""
    return max(2, min(MOST_SETS, -(-TIMES_CACHE * cache // (2 * tensor_bytes(case)))))


def is_cold(case: Case, cache: int, sets: int) -> bool:
    """Return whether the inputs of all sets together are larger than the cache."""
    return sets * 2 * tensor_bytes(case) > cache


def inputs(case: Case, device: torch.device, sets: int) -> list[Set]:
    """Return random sets, the same in every run; weight and bias are the same in all.

    With dropout no element of the branch is small, so that z shows which were dropped (`check`).
    """
    rng = torch.Generator(device).manual_seed(0)
    dtypes, job = DTYPES[case.dtype], JOBS[case.job]

    def drawn(dtype: torch.dtype) -> Tensor:
        return torch.randn(case.rows, case.d, generator=rng, device=device).to(dtype)

    vectors = [torch.rand(case.d, generator=rng, device=device).add_(0.5).to(dtypes.parameters) for _ in range(2)]
    w, b = (t.requires_grad_(job.backward) for t in vectors)
    bias = b if case.norm == "layer" else None
    tensor_sets = []
    for _ in range(sets):
        x, s = drawn(dtypes.stream), drawn(dtypes.branch)
        if job.dropout:
            s = torch.copysign(s.abs() + 0.5, s)
        x.requires_grad_(job.backward), s.requires_grad_(job.backward)
        args = (x, s, w, bias)
        cotangents = (drawn(dtypes.branch), drawn(dtypes.stream)) if job.backward else ()
        wanted = tuple(t for t in args if t is not None) if job.backward else ()
        tensor_sets.append(Set(args, wanted, cotangents))
    return tensor_sets


def gradients(job: Job, outputs: Any, tensors: Set) -> tuple[Tensor, ...]:
    """Return the gradients of a variant's outputs on a set. The graph of `backward` is retained, from its first run on.

    At the first run `torch.compile` decides whether the backward may overwrite saved tensors (`running.retained_graphs`).
    """
    return torch.autograd.grad(outputs, tensors.wanted, tensors.cotangents, retain_graph=not job.forward)


def timed(case: Case, forward: Call, sets: list[Set]) -> TimedCall:
    """Return the timed function: the job on set i, its result dropped. For `backward` the graphs are made here, and retained."""
    job = JOBS[case.job]
    args = [tensors.args for tensors in sets]
    if not job.backward:
        return lambda i: forward(*args[i])
    if job.forward:
        return lambda i: gradients(job, forward(*args[i]), sets[i])
    graphs = [forward(*tensors) for tensors in args]
    return lambda i: gradients(job, graphs[i], sets[i])


def copier(case: Case, device: torch.device, sets: int) -> TimedCall:
    """Return a kernel that reads and writes as many bytes as the case must move (not the driver's copy: see `device.COPIES`)."""
    words = max(1, moved_bytes(case) // 8)  # of four bytes, read and written
    sources = [torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32, device=device) for _ in range(sets)]
    targets = [torch.empty_like(source) for source in sources]
    return lambda i: torch.bitwise_not(sources[i], out=targets[i])
