"""Variants of the GPU benchmark as data: how each is made, which cases it does not support and why, and whether it is installed.

Under torch.compile addnorm's own forms are measured by benchmarks/bench_compile.py.

Kernel libraries are called as their own documentation calls them. Each function returns a call of (residual, branch, weight,
bias) that returns y, or (y, z). Peers take the branch first, and the residual as an option. Signatures: liger-kernel 0.8.5,
flash-attn's main branch, quack-kernels 0.6.5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from addnorm.bench.case import Case
from addnorm.bench.environment import version_of
from addnorm.bench.jobs import DROPOUT, DTYPES, EPS, JOBS, Call, compiled, eager, ours


class Variant(NamedTuple):
    """One implementation of the operation, such as addnorm or a kernel library.

    Attributes:
        title: name in tables.
        make: function of a case that returns the call.
        limits: conditions that the variant requires of a case, by the reason why it does not support others.
        package: name of the package that must be installed.
        module: name by which the package is imported. A variant with a module runs on CUDA only.
    """

    title: str
    make: Callable[[Case], Call]
    limits: Mapping[str, Callable[[Case], bool]] = {}
    package: str | None = None
    module: str | None = None


# ------------------------------------------------------------------------------------------------------------ libraries


def liger(case: Case) -> Call:
    """Return a call of `LigerFusedAddRMSNormFunction`. Liger's LayerNorm has no add, so torch adds before it."""
    eps = EPS[case.norm]
    if case.norm == "rms":
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        # Offset 0 and the casting of Llama are its defaults. Not in place: that would overwrite the gradient of y, which
        # the next call reads again.
        more = (eps, 0.0, "llama", False)
        both: Call = lambda x, s, w, b: LigerFusedAddRMSNormFunction.apply(s, x, w, *more)  # noqa: E731
    else:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        both = lambda x, s, w, b: (LigerLayerNormFunction.apply(z := x + s, w, b, eps), z)  # noqa: E731
    return both if JOBS[case.job].stream else lambda *args: both(*args)[0]


def flash_attn(case: Case) -> Call:
    """Return a call of flash-attn's `layer_norm_fn` or `rms_norm_fn`."""
    from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn

    call = {"layer": layer_norm_fn, "rms": rms_norm_fn}[case.norm]
    job = JOBS[case.job]
    options: dict[str, Any] = {"eps": EPS[case.norm], "prenorm": job.stream}
    if job.dropout:
        options["dropout_p"] = DROPOUT
    return lambda x, s, w, b: call(s, w, b, residual=x, **options)


def quack(case: Case) -> Call:
    """Return a call of QuACK's `rmsnorm`."""
    from quack import rmsnorm

    options = {"eps": EPS[case.norm], "prenorm": JOBS[case.job].stream}
    return lambda x, s, w, b: rmsnorm(s, w, residual=x, **options)


# ---------------------------------------------------------------------------------------------------------------- table


def _fits_flash_attn(case: Case) -> bool:
    """Return whether one token of the widest tensor that the kernel keeps has at most 64 KB."""
    dtypes = DTYPES[case.dtype]
    widest = dtypes.stream if JOBS[case.job].backward else dtypes.branch
    return int(case.d * widest.itemsize) <= 65536


NO_DROPOUT = {"has no dropout": lambda case: not JOBS[case.job].dropout}
VARIANTS = {
    "eager": Variant("eager", eager),
    "compile": Variant("torch.compile", compiled),
    "liger": Variant(
        "Liger", liger, {**NO_DROPOUT, "keeps the stream in the branch's dtype": lambda case: case.dtype != "mixed"},
        "liger-kernel", "liger_kernel",
    ),
    "flash_attn": Variant(
        "flash-attn", flash_attn, {"takes rows of at most 64 KB": _fits_flash_attn}, "flash-attn", "flash_attn"
    ),
    "quack": Variant(
        "QuACK", quack, {**NO_DROPOUT, "adds no residual in its LayerNorm": lambda case: case.norm == "rms"},
        "quack-kernels", "quack",
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
    return {
        name: version_of(variant.package or "") or "of unknown version"
        for name, variant in VARIANTS.items() if variant.module is not None and find_spec(variant.module) is not None
    }  # fmt: skip


def unfit(name: str, case: Case) -> str | None:
    """Return why a variant does not support a case, or None if it does."""
    return next((why for why, fits in VARIANTS[name].limits.items() if not fits(case)), None)


def chosen(case: Case, requested: Sequence[str] | None = None) -> list[str]:
    """Return the `requested` variants (None: all) that are installed and support the case."""
    named, left_out = requested or VARIANTS, missing(case.device)
    return [name for name in VARIANTS if name in named and name not in left_out and unfit(name, case) is None]
