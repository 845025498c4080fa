"""Jobs of the operation: the bytes that each must move, its tensors, and its code in eager PyTorch and in addnorm.

A case has a norm, a job, rows, d and the name of its dtypes. Both expressions of a job are functions of the same tensors,
(residual, branch, weight, bias) and the job's `extra` tensors, and each is one Python frame. For RMSNorm the bias is None.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from addnorm import inplace
from addnorm._util.norms import KINDS
from addnorm.bench.case import Call, Case
from addnorm.functional import FUNCTIONS
from addnorm.reference import torch_norm

NORMS = {name: kind.title for name, kind in KINDS.items()}
FIELDS = ("norm", "job", "rows", "d", "dtype", "threads")  # of a case on a CPU
EPS = {name: kind.eps or 1e-6 for name, kind in KINDS.items()}
DROPOUT = 0.1
# In place, a call's y is the next call's branch. With a weight and a bias of a millionth all the calls of a case, some
# 100,000, move the stream by a tenth: the values stay ordinary, and every call moves the bytes that it would have moved.
IN_PLACE_SCALE = 2.0**-20


Tensors = dict[str, Tensor]


class Dtypes(NamedTuple):
    """Dtypes of the stream (x, z), of the branch (Sublayer(x), y), and of weight and bias."""

    stream: torch.dtype
    branch: torch.dtype
    parameters: torch.dtype


DTYPES = {
    **{name: Dtypes(*[getattr(torch, name)] * 3) for name in ("bfloat16", "float16", "float32", "float64")},
    "mixed": Dtypes(torch.float32, torch.bfloat16, torch.float32),
    "wide parameters": Dtypes(torch.bfloat16, torch.bfloat16, torch.float32),
}

# Names of tensors of rows x d. Those in STREAM have the stream's dtype, the others the branch's.
STREAM = {"x", "z", "dz", "dx"}
FORWARD, BACKWARD = ("x", "s", "y", "z"), ("dy", "dz", "z", "dx", "ds")


class Job(NamedTuple):
    """Kind of call that is timed, such as the forward alone or the forward with backward.

    Attributes:
        title: name in tables.
        moves: tensors of rows x d that the job must read or write.
        stream: whether z is returned too.
        backward: whether gradients are computed.
        retained: whether the backward alone is timed, on a graph that was made before and is retained.
        dropout: whether dropout is applied to the branch.
        extra: arguments besides residual, branch, weight and bias.
    """

    title: str
    moves: tuple[str, ...]
    stream: bool = True
    backward: bool = False
    retained: bool = False
    dropout: bool = False
    extra: tuple[str, ...] = ()


JOBS = {
    "forward": Job("forward, y alone", ("x", "s", "y"), stream=False),
    "forward_stream": Job("forward, y and the stream", FORWARD),
    "backward": Job("backward", BACKWARD, backward=True, retained=True),
    "forward_backward": Job("forward + backward", FORWARD + BACKWARD, backward=True),
    "dropout": Job(f"forward + backward, dropout {DROPOUT}", FORWARD + BACKWARD, backward=True, dropout=True),
    "everything": Job(  # the gradient of the layer scale reads s once more
        "forward + backward, all options", (*FORWARD, *BACKWARD, "s"), backward=True, dropout=True,
        extra=("layer_scale", "branch_bias"),
    ),
    "in_place": Job("in place, y and the stream", FORWARD),
    "reuse": Job("into given memory, y alone", ("x", "s", "y"), stream=False, extra=("out",)),
}  # fmt: skip


def tensor_bytes(case: Case) -> int:
    """Return the bytes of the branch, which are also those of y. The stream may have a wider dtype."""
    return int(case.rows * case.d * DTYPES[case.dtype].branch.itemsize)


def moved_bytes(case: Case) -> int:
    """Return the bytes that the job of a case must read and write. Parameters and statistics are not counted.

    The gradients of branch and residual are one tensor if their dtypes are equal, without dropout.
    """
    dtypes, job = DTYPES[case.dtype], JOBS[case.job]
    moved = [name for name in job.moves if name != "ds" or job.dropout or dtypes.stream != dtypes.branch]
    return int(
        case.rows * case.d * sum((dtypes.stream if name in STREAM else dtypes.branch).itemsize for name in moved)
    )


# -------------------------------------------------------------------------------------------------------------- tensors


class Set(NamedTuple):
    """Inputs of one call: the arguments, and with backward the gradients of y and z."""

    args: tuple[Tensor | None, ...]
    cotangents: tuple[Tensor, ...]

    @property
    def leaves(self) -> list[Tensor]:
        """All arguments but None."""
        return [t for t in self.args if t is not None]


def inputs(case: Case, device: torch.device | str = "cpu") -> Set:
    """Return random tensors, the same in every run.

    With dropout no element of the branch is small, even with its bias, so that z shows which elements were dropped.
    """
    rng = torch.Generator(device).manual_seed(0)
    dtypes, job = DTYPES[case.dtype], JOBS[case.job]
    wide = torch.float64 if dtypes.stream == torch.float64 else torch.float32
    options: Any = {"generator": rng, "device": device, "dtype": wide}

    def drawn(dtype: torch.dtype) -> Tensor:
        return torch.randn(case.rows, case.d, **options).to(dtype)

    vectors = [torch.rand(case.d, **options).add_(0.5) for _ in range(4 if job.dropout and job.extra else 2)]
    if case.job == "in_place":
        vectors = [t.mul_(IN_PLACE_SCALE) for t in vectors]
    weight, bias, *extra = (t.to(dtypes.parameters) for t in vectors)
    x, s = drawn(dtypes.stream), drawn(dtypes.branch)
    if job.dropout:
        s = torch.copysign(s.abs() + 2.0, s)
    cotangents = (drawn(dtypes.branch), drawn(dtypes.stream)) if job.backward else ()
    more = extra or [torch.empty_like(s) for _ in job.extra]
    args = (x, s, weight, bias if KINDS[case.norm].has_bias else None, *more)
    return Set(tuple(None if t is None else t.requires_grad_(job.backward) for t in args), cotangents)


def timed(call: Call, tensors: Set, *, retained: bool = False) -> Call:
    """Return a function without arguments that runs a job: the call, and its gradients if there are cotangents.

    With `retained` the call runs here, once, and the function computes the gradients of its graph alone.
    """
    args, wanted, grad = tensors.args, tensors.leaves, torch.autograd.grad
    if retained:
        graph = call(*args)
        return lambda: grad(graph, wanted, tensors.cotangents, retain_graph=True)
    if tensors.cotangents:
        return lambda: grad(call(*args), wanted, tensors.cotangents)
    return partial(call, *args)


# ---------------------------------------------------------------------------------------------------------- expressions


def eager(case: Case) -> Call:
    """Return the job of a case in plain PyTorch. y has the branch's dtype."""
    shape, eps, dtypes, kind = (case.d,), EPS[case.norm], DTYPES[case.dtype], KINDS[case.norm]
    function: Call = kind.function or (lambda z, shape, w, eps: torch_norm(case.norm, z, w, None, eps))
    plain: Call = function if kind.has_bias else lambda z, shape, w, b, eps: function(z, shape, w, eps)
    norm: Call = plain if dtypes.stream == dtypes.branch else lambda *args: plain(*args).to(dtypes.branch)
    calls: dict[str, Call] = {
        "forward": lambda x, s, w, b: norm(x + s, shape, w, b, eps),
        "dropout": lambda x, s, w, b: (norm(z := x + F.dropout(s, DROPOUT), shape, w, b, eps), z),
        "everything": lambda x, s, w, b, g, c: (norm(z := x + g * F.dropout(s + c, DROPOUT), shape, w, b, eps), z),
        "reuse": lambda x, s, w, b, y: norm(x + s, shape, w, b, eps),
    }
    return calls.get(case.job, lambda x, s, w, b: (norm(z := x + s, shape, w, b, eps), z))


def compiled(case: Case) -> Call:
    """Return `eager`, compiled for the case's own size: the best that Inductor can do, since nothing is symbolic."""
    torch.compiler.reset()  # only this case's graphs, without the guards of earlier ones
    return torch.compile(eager(case), dynamic=False, fullgraph=True)


def ours(case: Case) -> Call:
    """Return the job of a case in addnorm."""
    op: Any = FUNCTIONS[case.norm][1]
    op_: Any = getattr(inplace, f"{op.__name__}_")
    eps, p = EPS[case.norm], DROPOUT
    calls: dict[str, Call] = {
        "forward": lambda x, s, w, b: op(x, s, w, b, eps),
        "dropout": lambda x, s, w, b: op(x, s, w, b, eps, dropout_p=p, return_residual=True),
        "everything": lambda x, s, w, b, g, c: op(
            x, s, w, b, eps, layer_scale=g, branch_bias=c, dropout_p=p, return_residual=True
        ),
        "in_place": lambda x, s, w, b: (op_(x, s, w, b, eps), x),
        "reuse": lambda x, s, w, b, y: op(x, s, w, b, eps, out=y),
    }
    return calls.get(case.job, lambda x, s, w, b: op(x, s, w, b, eps, return_residual=True))
