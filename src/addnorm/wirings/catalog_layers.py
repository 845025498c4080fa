"""Published wirings of one stream whose layers or sublayers differ, and ablations.

l is a layer's number from 1; the other letters are those of `catalog.py`.
"""

from __future__ import annotations

import math

from addnorm._util.arguments import check_bool, check_int
from addnorm.wirings.catalog import POST, PRE, register
from addnorm.wirings.spec import Place, Row, Wiring


@register
def layernorm_scaling() -> Wiring:
    """Return LayerNorm Scaling, x' = x + f(N(x)/sqrt(l)), l the layer's number, and a final norm. Sun et al. 2025.

    Its authors advise against combining it with the init `gpt2`.
    """
    return Wiring(
        "layernorm_scaling", _lns_row, final_norm=True, symbols={"c": ("c", "1/√l")},
        source="Sun et al. 2025, arXiv 2502.05795",
        use="for pre-LN whose deep layers still count: the stream grows like ln l instead of l.",
    )  # fmt: skip


def _lns_row(place: Place) -> Row:
    return Row(norm_in=True, c=1 / math.sqrt(place.number))


@register
def mix_ln(k: int | None = None) -> Wiring:
    """Return Mix-LN: the first k layers post-LN, the others pre-LN with a final norm. Li et al. 2024.

    Args:
        k: the number of post-LN layers; None means a quarter of the layers, as in the paper.
    """
    if k is not None:
        check_int("k", k, 0)
    return Wiring(
        "mix_ln", _mix_ln_row, final_norm=_mix_ln_final, source="Li et al. 2024, arXiv 2412.13795",
        use="for the gradients of post-LN in the deep layers and those of pre-LN in the first.",
    )  # fmt: skip


def _mix_ln_k(num_layers: int, k: int | None) -> int:
    return num_layers // 4 if k is None else k


def _mix_ln_row(place: Place, k: int | None) -> Row:
    return POST if place.layer < _mix_ln_k(place.num_layers, k) else PRE


def _mix_ln_final(num_layers: int, k: int | None) -> bool:
    return _mix_ln_k(num_layers, k) < num_layers


@register
def no_norm() -> Wiring:
    """Return x' = x + f(x), an ablation. The stream's variance doubles with every sublayer that keeps variance."""
    return Wiring(
        "no_norm", Row(), source="ablation",
        use="to see what the norm is for: without it the stream grows by a factor with every sublayer.",
    )  # fmt: skip


@register
def no_residual(norm: bool = True) -> Wiring:
    """Return x' = N(f(x)), or x' = f(x), an ablation (Dong et al. 2021: tokens become alike).

    Args:
        norm: whether the norm stays.
    """
    check_bool("norm", norm)
    return Wiring(
        "no_residual", Row(norm_out=norm, a=0.0), source="ablation; Dong et al. 2021, arXiv 2103.03404",
        use="to see what the residual connection is for: the gradient has no path around a sublayer.",
    )  # fmt: skip


@register
def parallel(norms: int = 1) -> Wiring:
    """Return parallel sublayers, x' = x + f_1(N(x)) + f_2(N(x)), and a final norm.

    Args:
        norms: 1 for one norm that all sublayers of a layer read (GPT-J, PaLM), 2 for one norm each (GPT-NeoX).
    """
    if norms not in (1, 2) or isinstance(norms, bool):
        raise ValueError(f"norms is {norms!r}, expected 1 (one for all sublayers of a layer) or 2 (one for each).")
    sources = {
        1: "GPT-J; Chowdhery et al. 2022 (PaLM), arXiv 2204.02311",
        2: "Black et al. 2022 (GPT-NeoX), arXiv 2204.06745",
    }
    return Wiring(
        "parallel", _parallel_row, final_norm=True, source=sources[norms],
        use="where the sublayers of a layer are to run at the same time (GPT-J, PaLM, Falcon).",
    )  # fmt: skip


def _parallel_row(place: Place, norms: int) -> Row:
    if place.sublayer == 0:
        return PRE
    return Row(norm_in=True, shares="state") if norms == 2 else Row(shares="read")
