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

from addnorm import reference
from addnorm.bench.case import Case
from addnorm.bench.gpu.plan import LARGE, stream_itemsize
from addnorm.bench.jobs import DROPOUT, DTYPES, EPS, JOBS, Call, eager, ours, tensor_bytes

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
    job = JOBS[case.job]
    options: dict[str, Any] = {"eps": EPS[case.norm], "prenorm": job.stream}
    if job.dropout:
        options["dropout_p"] = DROPOUT
    return lambda x, s, w, b: call(s, w, b, residual=x, **options)


def quack(case: Case) -> Call:
    """Return `rmsnorm`."""
    from quack import rmsnorm

    options = {"eps": EPS[case.norm], "prenorm": JOBS[case.job].stream}
    return lambda x, s, w, b: rmsnorm(s, w, residual=x, **options)


# ---------------------------------------------------------------------------------------------------------------- table


def _undropped(case: Case) -> bool:
    return not JOBS[case.job].dropout


NO_DROPOUT = Limit("has no dropout", _undropped)
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
        (Limit("takes rows of at most 64 KB", lambda case: case.d * stream_itemsize(case) <= 65536),),
        "flash-attn", "flash_attn",
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
        (Limit("takes its dropout mask as an argument", _undropped),),
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


def version_of(*packages: str) -> str | None:
    """Return the version of the first of the packages that is installed, or None."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:  # or installed under another name, or a checkout on the path
            continue
    return None


def versions() -> dict[str, str]:
    """Return the versions of the installed peers."""
    return {
        name: version_of(variant.package or "") or "of unknown version"
        for name, variant in VARIANTS.items() if variant.module is not None and find_spec(variant.module) is not None
    }  # fmt: skip


def unfit(name: str, case: Case) -> str | None:
    """Return why a variant lacks the operation of a case; None if it has it."""
    return next((limit.why for limit in VARIANTS[name].limits if not limit.fits(case)), None)


def chosen(case: Case, requested: Sequence[str] | None = None) -> list[str]:
    """Return the variants to measure in a case: the requested ones (None: those that the plan samples), where they fit."""
    absent = missing(case.device)
    return [
        name for name, variant in VARIANTS.items()
        if name not in absent and unfit(name, case) is None
        and (variant.sampled(case) if requested is None else name in requested)
    ]  # fmt: skip
