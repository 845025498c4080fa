"""Variants of the GPU benchmark as data: how each is made, where it does not fit and why, and why it is missing.

Kernel libraries are called as their own documentation calls them. Each function returns a call of (residual, branch, weight,
bias) that returns y, or (y, z). Peers take the branch first, and the residual as an option. Signatures: liger-kernel 0.8.5,
flash-attn's main branch, quack-kernels 0.6.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import addnorm
from addnorm import reference
from addnorm.bench.cases import EPS, Call
from addnorm.bench.gpu.cases import DTYPES, JOBS, LARGE, tensor_bytes
from addnorm.bench.harness import Case

COPY = "copy"  # no variant of the operation: a kernel that copies as many bytes, in the same rounds
EVERY = "every variant"  # name in `failures` where a whole case failed


class Limit(NamedTuple):
    """Cases for which a variant lacks the operation, and why."""

    why: str
    fits: Callable[[Case], bool]


class Variant(NamedTuple):
    """Implementation of the operation.

    Attributes:
        title: in tables.
        make: returns the call for a case.
        limits: where it does not fit.
        package: that must be installed.
        module: name under which the package is imported; its kernels run on CUDA only.
        sampled: where it is measured unless it is requested by name.
        compiles: whether it uses torch.compile.
    """

    title: str
    make: Callable[[Case], Call]
    limits: tuple[Limit, ...] = ()
    package: str | None = None
    module: str | None = None
    sampled: Callable[[Case], bool] = lambda case: True
    compiles: bool = False


def eager(case: Case) -> Call:
    """Return plain PyTorch: y has the branch's dtype."""
    shape, eps, dtypes, job = (case.d,), EPS[case.norm], DTYPES[case.dtype], JOBS[case.job]
    kinds: dict[str, Call] = {
        "layer": lambda z, w, b: F.layer_norm(z, shape, w, b, eps),
        "rms": lambda z, w, b: F.rms_norm(z, shape, w, eps),
    }
    narrowed: dict[str, Call] = {
        "layer": lambda z, w, b: F.layer_norm(z, shape, w, b, eps).to(dtypes.branch),
        "rms": lambda z, w, b: F.rms_norm(z, shape, w, eps).to(dtypes.branch),
    }
    norm = (kinds if dtypes.stream == dtypes.branch else narrowed)[case.norm]
    if job.dropout:
        return lambda x, s, w, b: (norm(z := x + F.dropout(s, job.dropout), w, b), z)
    if job.stream:
        return lambda x, s, w, b: (norm(z := x + s, w, b), z)
    return lambda x, s, w, b: norm(x + s, w, b)


def ours(case: Case) -> Call:
    """Return the public function."""
    functions: dict[str, Call] = {"layer": addnorm.add_layer_norm, "rms": addnorm.add_rms_norm}
    call, eps, job = functions[case.norm], EPS[case.norm], JOBS[case.job]
    options: dict[str, Any] = {"return_residual": True} if job.stream else {}
    if job.dropout:
        options["dropout_p"] = job.dropout
    return lambda x, s, w, b: call(x, s, w, b, eps, **options)


def formula(case: Case) -> Call:
    """Return the formula of `addnorm.reference`, for a compiler to fuse."""
    eps, norm, stream, dtype = EPS[case.norm], case.norm, JOBS[case.job].stream, DTYPES[case.dtype].branch

    def call(x: torch.Tensor, s: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
        z = reference.add(x, s)
        y = reference.normalize(z, w, b, norm=norm, eps=eps, dtype=dtype)
        return (y, z) if stream else y

    return call


def compiled(make: Callable[[Case], Call]) -> Callable[[Case], Call]:
    """Return a variant compiled for the case's own size: the best that Inductor can do, since nothing is symbolic."""
    return lambda case: torch.compile(make(case), dynamic=False, fullgraph=True)


# ------------------------------------------------------------------------------------------------------------ libraries


def liger(case: Case) -> Call:
    """Return `LigerFusedAddRMSNormFunction`. Liger's LayerNorm adds nothing, so torch adds before it."""
    eps, stream = EPS[case.norm], JOBS[case.job].stream
    if case.norm == "rms":
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        # Offset 0 and the casting of Llama are its defaults. Not in place: that would overwrite the gradient of y, which
        # the next call reads again.
        more = (eps, 0.0, "llama", False)
        add_rms = LigerFusedAddRMSNormFunction.apply
        if stream:
            return lambda x, s, w, b: add_rms(s, x, w, *more)
        return lambda x, s, w, b: add_rms(s, x, w, *more)[0]
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    norm = LigerLayerNormFunction.apply
    if stream:
        return lambda x, s, w, b: (norm(z := x + s, w, b, eps), z)
    return lambda x, s, w, b: norm(x + s, w, b, eps)


def flash_attn(case: Case) -> Call:
    """Return `layer_norm_fn` or `rms_norm_fn`."""
    from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn

    call = {"layer": layer_norm_fn, "rms": rms_norm_fn}[case.norm]
    options: dict[str, Any] = {"eps": EPS[case.norm], "prenorm": JOBS[case.job].stream}
    if JOBS[case.job].dropout:
        options["dropout_p"] = JOBS[case.job].dropout
    return lambda x, s, w, b: call(s, w, b, residual=x, **options)


def quack(case: Case) -> Call:
    """Return `rmsnorm`."""
    from quack import rmsnorm

    options = {"eps": EPS[case.norm], "prenorm": JOBS[case.job].stream}
    return lambda x, s, w, b: rmsnorm(s, w, residual=x, **options)


def fits_flash_attn(case: Case) -> bool:
    """Return whether a row fits the kernels of flash-attn, 64 KB: of the branch forward, of the stream backward."""
    dtypes = DTYPES[case.dtype]
    return bool(case.d * (dtypes.stream if JOBS[case.job].backward else dtypes.branch).itemsize <= 65536)


# ---------------------------------------------------------------------------------------------------------------- table


NO_DROPOUT = Limit("has no dropout", lambda case: not JOBS[case.job].dropout)
VARIANTS = {
    "eager": Variant("eager PyTorch", eager),
    "compile": Variant("torch.compile of eager", compiled(eager), compiles=True),
    "liger": Variant(
        "Liger", liger,
        (NO_DROPOUT, Limit("keeps the stream in the branch's dtype", lambda case: case.dtype != "mixed")),
        "liger-kernel", "liger_kernel",
    ),
    "flash_attn": Variant(
        "flash-attn's Triton layer norm", flash_attn,
        (Limit("takes rows of at most 64 KB", fits_flash_attn),), "flash-attn", "flash_attn",
    ),
    "quack": Variant(
        "QuACK", quack,
        (NO_DROPOUT, Limit("adds no residual in its LayerNorm", lambda case: case.norm == "rms")),
        "quack-kernels", "quack",
    ),
    "compile_addnorm": Variant(
        "torch.compile of addnorm's call", compiled(ours), compiles=True,
        # The cost of the call from a graph: where the host decides, and where the device does.
        sampled=lambda case: (case.dtype, case.d) == ("bfloat16", 4096) and case.job in ("forward_stream", "forward_backward")
        and (case.rows == 1 or tensor_bytes(case) >= LARGE),
    ),
    "compile_reference": Variant(
        "torch.compile of addnorm's formula", compiled(formula),
        (Limit("takes its dropout mask as an argument", lambda case: not JOBS[case.job].dropout),),
        # Its pairwise sums are long graphs that compile slowly: only on request.
        sampled=lambda case: False, compiles=True,
    ),
    "addnorm": Variant("addnorm", ours),
}  # fmt: skip


def missing(device: str) -> dict[str, str]:
    """Return the variants that cannot be measured here, each with the reason."""
    reasons = {}
    for name, variant in VARIANTS.items():
        if variant.module is None:
            continue
        if find_spec(variant.module) is None:
            reasons[name] = f"{variant.title} is not installed: pip install {variant.package}"
        elif device != "cuda":
            reasons[name] = f"{variant.title} runs on CUDA alone, and this is a run on {device}"
    return reasons


def versions() -> dict[str, str]:
    """Return the versions of the installed peers."""
    versions = {}
    for name, variant in VARIANTS.items():
        if variant.module is not None and variant.package is not None and find_spec(variant.module) is not None:
            try:
                versions[name] = version(variant.package)
            except PackageNotFoundError:  # installed under another name, or a checkout on the path
                versions[name] = "of unknown version"
    return versions


def unfit(name: str, case: Case) -> str | None:
    """Return why a variant lacks the operation of a case; None if it has it."""
    return next((limit.why for limit in VARIANTS[name].limits if not limit.fits(case)), None)


def chosen(case: Case, device: str, requested: Sequence[str] | None = None) -> list[str]:
    """Return the variants to measure in a case: the requested ones (None: those that the plan samples), where they fit."""
    absent = missing(device)
    wanted = VARIANTS if requested is None else [name for name in VARIANTS if name in requested]
    return [
        name for name in wanted
        if name not in absent and unfit(name, case) is None and (requested is not None or VARIANTS[name].sampled(case))
    ]  # fmt: skip
