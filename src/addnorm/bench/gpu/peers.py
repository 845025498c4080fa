"""Kernel libraries as peers: Liger, flash-attn's Triton layer norm, QuACK, each called as its own docs call it.

Each function gives a call of (residual, branch, weight, bias) that returns y, or (y, z). Peers take the branch first, and the
residual as an option. Signatures: liger-kernel 0.8.5, flash-attn's main branch, quack-kernels 0.6.5.
"""

from __future__ import annotations

from typing import Any

from addnorm.bench.expressions import EPS, Call
from addnorm.bench.gpu.cells import DTYPES, JOBS, Cell

__all__ = ["flash_attn", "liger", "quack"]


def liger(cell: Cell) -> Call:
    """`LigerFusedAddRMSNormFunction`; its LayerNorm adds nothing, so torch adds before it."""
    eps, stream = EPS[cell.norm], JOBS[cell.job].stream
    if cell.norm == "rms":
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        # Offset 0 and the casting of Llama are its defaults. Not in place: that would write over the gradient of y, which
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


def flash_attn(cell: Cell) -> Call:
    """`layer_norm_fn` and `rms_norm_fn`."""
    from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn

    call = {"layer": layer_norm_fn, "rms": rms_norm_fn}[cell.norm]
    options: dict[str, Any] = {"eps": EPS[cell.norm], "prenorm": JOBS[cell.job].stream}
    if JOBS[cell.job].dropout:
        options["dropout_p"] = JOBS[cell.job].dropout
    return lambda x, s, w, b: call(s, w, b, residual=x, **options)


def quack(cell: Cell) -> Call:
    """`rmsnorm`."""
    from quack import rmsnorm

    options = {"eps": EPS[cell.norm], "prenorm": JOBS[cell.job].stream}
    return lambda x, s, w, b: rmsnorm(s, w, residual=x, **options)


def fits_flash_attn(cell: Cell) -> bool:
    """Its kernels hold a row of at most 64 KB: of the branch forward, of the stream backward."""
    dtypes = DTYPES[cell.dtype]
    return cell.d * (dtypes.stream if JOBS[cell.job].backward else dtypes.branch).itemsize <= 65536
