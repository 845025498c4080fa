"""Who is compared, as data: how each variant is made, where it does not fit and why, and why it is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import addnorm
from addnorm import reference
from addnorm.bench.expressions import EPS, Call
from addnorm.bench.gpu import peers
from addnorm.bench.gpu.cells import DTYPES, JOBS, LARGE, Cell

COPY = "copy"  # not a variant of the operation: a kernel that copies as many bytes, in the same rounds
EVERY = "every variant"  # what failed, where it was none of them


class Limit(NamedTuple):
    """Where a variant has not the operation."""

    why: str
    fits: Callable[[Cell], bool]


class Variant(NamedTuple):
    """One way to compute the operation."""

    title: str
    make: Callable[[Cell], Call]
    limits: tuple[Limit, ...] = ()
    package: str | None = None  # that must be installed,
    module: str | None = None  # under this name; its kernels run on CUDA alone
    sampled: Callable[[Cell], bool] = lambda cell: True  # where it is measured if nobody asks for it by name
    compiles: bool = False  # with torch.compile


def eager(cell: Cell) -> Call:
    """As one writes it in PyTorch: y has the branch's dtype."""
    shape, eps, dtypes, job = (cell.d,), EPS[cell.norm], DTYPES[cell.dtype], JOBS[cell.job]
    kinds: dict[str, Call] = {
        "layer": lambda z, w, b: F.layer_norm(z, shape, w, b, eps),
        "rms": lambda z, w, b: F.rms_norm(z, shape, w, eps),
    }
    narrowed: dict[str, Call] = {
        "layer": lambda z, w, b: F.layer_norm(z, shape, w, b, eps).to(dtypes.branch),
        "rms": lambda z, w, b: F.rms_norm(z, shape, w, eps).to(dtypes.branch),
    }
    norm = (kinds if dtypes.stream == dtypes.branch else narrowed)[cell.norm]
    if job.dropout:
        return lambda x, s, w, b: (norm(z := x + F.dropout(s, job.dropout), w, b), z)
    if job.stream:
        return lambda x, s, w, b: (norm(z := x + s, w, b), z)
    return lambda x, s, w, b: norm(x + s, w, b)


def ours(cell: Cell) -> Call:
    """The public function."""
    functions: dict[str, Call] = {"layer": addnorm.add_layer_norm, "rms": addnorm.add_rms_norm}
    call, eps, job = functions[cell.norm], EPS[cell.norm], JOBS[cell.job]
    options: dict[str, Any] = {"return_residual": True} if job.stream else {}
    if job.dropout:
        options["dropout_p"] = job.dropout
    return lambda x, s, w, b: call(x, s, w, b, eps, **options)


def formula(cell: Cell) -> Call:
    """`addnorm.reference`: the formula, for a compiler to fuse."""
    eps, norm, stream, dtype = EPS[cell.norm], cell.norm, JOBS[cell.job].stream, DTYPES[cell.dtype].branch

    def call(x: torch.Tensor, s: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
        z = reference.add(x, s)
        y = reference.normalize(z, w, b, norm=norm, eps=eps, dtype=dtype)
        return (y, z) if stream else y

    return call


def compiled(make: Callable[[Cell], Call]) -> Callable[[Cell], Call]:
    """Compiled for the cell's own size: the best that Inductor can do, since nothing in it is symbolic."""
    return lambda cell: torch.compile(make(cell), dynamic=False, fullgraph=True)


NO_DROPOUT = Limit("has no dropout", lambda cell: not JOBS[cell.job].dropout)
VARIANTS = {
    "eager": Variant("eager PyTorch", eager),
    "compile": Variant("torch.compile of eager", compiled(eager), compiles=True),
    "liger": Variant(
        "Liger", peers.liger,
        (NO_DROPOUT, Limit("keeps the stream in the branch's dtype", lambda cell: cell.dtype != "mixed")),
        "liger-kernel", "liger_kernel",
    ),
    "flash_attn": Variant(
        "flash-attn's Triton layer norm", peers.flash_attn,
        (Limit("takes rows of at most 64 KB", peers.fits_flash_attn),), "flash-attn", "flash_attn",
    ),
    "quack": Variant(
        "QuACK", peers.quack,
        (NO_DROPOUT, Limit("adds no residual in its LayerNorm", lambda cell: cell.norm == "rms")),
        "quack-kernels", "quack",
    ),
    "compile_addnorm": Variant(
        "torch.compile of addnorm's call", compiled(ours), compiles=True,
        # What the call costs from a graph: where the host decides, and where the device does.
        sampled=lambda cell: (cell.dtype, cell.d) == ("bfloat16", 4096) and cell.job in ("forward_stream", "forward_backward")
        and (cell.rows == 1 or cell.tensor_bytes >= LARGE),
    ),
    "compile_reference": Variant(
        "torch.compile of addnorm's formula", compiled(formula),
        (Limit("takes its dropout mask as an argument", lambda cell: not JOBS[cell.job].dropout),),
        # Its sums by halves are long graphs, which compile for long: only for those who ask.
        sampled=lambda cell: False, compiles=True,
    ),
    "addnorm": Variant("addnorm", ours),
}  # fmt: skip


def missing(device: str) -> dict[str, str]:
    """The variants that cannot be measured here, each with the reason in a sentence."""
    found = {}
    for name, one in VARIANTS.items():
        if one.module is None:
            continue
        if find_spec(one.module) is None:
            found[name] = f"{one.title} is not installed: pip install {one.package}"
        elif device != "cuda":
            found[name] = f"{one.title} runs on CUDA alone, and this is a run on {device}"
    return found


def versions() -> dict[str, str]:
    """Of the peers that are installed."""
    found = {}
    for name, one in VARIANTS.items():
        if one.module is not None and one.package is not None and find_spec(one.module) is not None:
            try:
                found[name] = version(one.package)
            except PackageNotFoundError:  # installed under another name, or a checkout on the path
                found[name] = "of unknown version"
    return found


def unfit(name: str, cell: Cell) -> str | None:
    """Why a variant has not the operation of this cell; None where it has."""
    return next((limit.why for limit in VARIANTS[name].limits if not limit.fits(cell)), None)


def chosen(cell: Cell, device: str, asked: Sequence[str] | None = None) -> list[str]:
    """The variants that are measured in a cell: those asked for (None: those that the plan samples), where they fit."""
    absent = missing(device)
    wanted = VARIANTS if asked is None else [name for name in VARIANTS if name in asked]
    return [
        name for name in wanted
        if name not in absent and unfit(name, cell) is None and (asked is not None or VARIANTS[name].sampled(cell))
    ]  # fmt: skip
