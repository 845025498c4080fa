"""The published wirings whose sublayers read earlier states: the embedding, earlier writes, the states after earlier layers.

    R = N_in(C P(X)),   W = N_branch(f(R)),   X' = N_out(A X + B W)

Their initial values are those of the sources. If a source publishes none, the docstring says where the values come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from addnorm._util.arguments import check_bool, check_float, check_int
from addnorm.wirings.catalog import register
from addnorm.wirings.coefficients import DynamicSources, SourceAttention
from addnorm.wirings.factors import Learned, Place
from addnorm.wirings.spec import Wiring
from addnorm.wirings.stage import Computed, Head, Stage, append_zero, identity, unit


@register
def attention_residuals(
    layers_per_block: int | None = None, normed_values: bool = False, reads: int | tuple[int, ...] = 1
) -> Wiring:
    """Return attention residuals: each sublayer attends over the embedding and the earlier writes. arXiv 2603.15031; Kimi K3.

    r = N(sum_i p_i x_i), p = softmax_i(q · (γ ⊙ R(x_i))), x_0 the embedding and x_i the write of sublayer i. q = 0 at first: with
    the norm of the read that is pre-LN.

    Args:
        layers_per_block: the number of layers whose writes are summed to one source; None means that each write is a source.
        normed_values: whether to use Inkling 2's form: the read is a sum of R(x_i), γ is absent and the scores are divided by
            sqrt(d_model).
        reads: the number of inputs of the first sublayer of a layer, each with its own query: 3 for separate query, key and value
            inputs. A tuple is repeated over the layers.
    """
    if layers_per_block is not None:
        check_int("layers_per_block", layers_per_block, 1)
    cycle = (reads,) if isinstance(reads, int) and not isinstance(reads, bool) else reads
    if not isinstance(cycle, Sequence) or not cycle:
        raise ValueError(f"reads is {reads!r}, expected a whole number from 1, or a tuple of them.")
    for number in cycle:
        check_int("reads", number, 1)
    check_bool("normed_values", normed_values)
    return Wiring(
        "attention_residuals", _attention_stage, final_norm=True, head=_attention_head,
        source="Kimi team 2026, arXiv 2603.15031", use="where a deep sublayer is to find the write of an early one undiluted.",
    )  # fmt: skip


def _count_sources(place: Place, layers_per_block: int | None) -> tuple[int, bool]:
    """Return the number of sources at a place, and whether the write of the sublayer there begins a new source."""
    index = place.position
    block = 1 if layers_per_block is None else layers_per_block * place.sublayers_per_layer
    return 1 - (-index // block), index % block == 0


def _source_attention(normed_values: bool) -> Computed:
    if normed_values:
        return Computed(SourceAttention, {"weighted": False, "normed_values": True, "scaled": True})
    return Computed(SourceAttention)


def _attention_stage(
    place: Place, layers_per_block: int | None, normed_values: bool, reads: int | tuple[int, ...]
) -> Stage:
    n, begins = _count_sources(place, layers_per_block)
    cycle = (reads,) if isinstance(reads, int) else reads
    own = cycle[place.layer % len(cycle)] if place.sublayer == 0 else 1
    mix, inject = (append_zero(n), unit(n + 1, -1)) if begins else (None, unit(n, -1))
    if n == 1:  # one source needs no query
        return Stage(1, ((1.0,),) * own, mix, inject, norm_in=True, names="x")
    attention = _source_attention(normed_values)
    return Stage(n, mix=mix, inject=inject, coefficients=attention, reads=own, norm_in=True, names="x")


def _attention_head(place: Place, layers_per_block: int | None, normed_values: bool, reads: Any) -> Head:
    n, _ = _count_sources(place, layers_per_block)
    return Head(n, coefficients=_source_attention(normed_values), names="x")


@register
def denseformer(dilation: int = 1, period: int = 1) -> Wiring:
    """Return DenseFormer: every layer reads a learned average of the states after all earlier layers. Pagliardini et al. 2024.

    x = sum_j α_j x_j is the average of the embedding and the states after earlier layers. The layer is pre-LN on x, to which its
    writes are added. At first α is 1 for the newest state and 0 for the others, which is pre-LN.

    Args:
        dilation: only every `dilation`-th earlier state is averaged, counted back from the newest.
        period: only every `period`-th layer averages.
    """
    check_int("dilation", dilation, 1)
    check_int("period", period, 1)
    return Wiring(
        "denseformer", _dense_stage, final_norm=True, head=_dense_head,
        symbols={"weight": ("α", "1 for the newest state, 0 for the others")},
        source="Pagliardini et al. 2024, arXiv 2402.02622",
        use="for direct paths between layers at the price of a few numbers a layer and the memory of their states.",
    )  # fmt: skip


def _dense_weights(n: int, dilation: int, period: int) -> tuple[Any, ...]:
    """Return the weights of n states, the newest last, before layer n - 1 or at the end."""
    if n == 1 or (n - 1) % period:
        return unit(n, -1)
    return tuple(
        Learned(float(j == n - 1), name=f"weight_{j}") if (n - 1 - j) % dilation == 0 else 0.0 for j in range(n)
    )


def _pre_ln_stage(n: int) -> Stage:
    """Return the stage of a pre-LN sublayer on the newest of n states."""
    return Stage(n, unit(n, -1), None, unit(n, -1), norm_in=True, names="x")


def _dense_stage(place: Place, dilation: int, period: int) -> Stage:
    n = _count_states(place)
    if place.sublayer:
        return _pre_ln_stage(n)
    weights = _dense_weights(n, dilation, period)
    return Stage(n, weights, (*identity(n), weights), unit(n + 1, -1), norm_in=True, names="x")


def _dense_head(place: Place, dilation: int, period: int) -> Head:
    n = _count_states(place)
    return Head(n, _dense_weights(n, dilation, period), names="x")


def _count_states(place: Place) -> int:
    """Return the number of states before a place: the embedding and one for each layer, the current one included."""
    return place.layer + 1 + (place.sublayer > 0)


@register
def muddformer(reads: int = 1) -> Wiring:
    """Return MUDDFormer: the state before a layer computes weights of all earlier states, for each read. Xiao et al. 2025.

    r_q = N(sum_j w_qj x_j), w = GELU(R(x_n) W_1) W_2 + w_0 from the newest state x_n. Another row of w weighs the states for the
    sum to which the layer's writes are added. At first w is 1 for the newest state and 0 for the others, which is pre-LN.

    Args:
        reads: the number of inputs of the first sublayer of a layer: 1, or 3 for separate query, key and value inputs, as in the
            paper.
    """
    check_int("reads", reads, 1)
    return Wiring(
        "muddformer", _mudd_stage, final_norm=True, head=_mudd_head,
        source="Xiao et al. 2025, arXiv 2502.12170",
        use="for direct paths between layers that each token weighs, with separate ones for query, key and value.",
    )  # fmt: skip


def _mudd_stage(place: Place, reads: int) -> Stage:
    n = _count_states(place)
    if place.sublayer:
        return _pre_ln_stage(n)
    if n == 1:
        return Stage(1, ((1.0,),) * reads, ((1.0,), (1.0,)), (0.0, 1.0), norm_in=True, names="x")
    return Stage(n, inject=unit(n + 1, -1), coefficients=Computed(DynamicSources), reads=reads, norm_in=True, names="x")


def _mudd_head(place: Place, reads: int) -> Head:
    return Head(_count_states(place), coefficients=Computed(DynamicSources, {"residual": False}), names="x")


@register
def x0_residual(
    scale: tuple[float, float] = (1.15, 1.05), x0_scale: tuple[float, float] = (0.2, 0.05), backout: float = 0.2
) -> Wiring:
    """Return pre-LN whose layers begin by mixing the embedding in again: x ← λ x + μ x_0. nanochat.

    λ and μ are learned numbers, one pair a layer. At the end the state after the middle layer, times a learned number, is
    subtracted. The embedding is normalized first.

    Args:
        scale: initial λ of the first and of the last layer. The layers between them are interpolated linearly.
        x0_scale: initial μ of the first and of the last layer, as in `scale`.
        backout: initial factor of the state after layer L // 2, counted from 0, that is subtracted at the end. 0 means that
            nothing is subtracted.
    """
    for name, pair in (("scale", scale), ("x0_scale", x0_scale)):
        if not (isinstance(pair, Sequence) and len(pair) == 2):
            raise ValueError(f"{name} is {pair!r}, expected two numbers: in the first layer and in the last.")
        for value in pair:
            check_float(f"an entry of {name}", value)
    check_float("backout", backout)
    return Wiring(
        "x0_residual", _x0_stage, final_norm=True, embedding_norm=True, embedding=(1.0, 1.0), head=_x0_head,
        symbols={"scale": ("λ", " ... ".join(f"{value:g}" for value in scale)), "backout": ("β", ""),
                 "x0_scale": ("μ", " ... ".join(f"{value:g}" for value in x0_scale))},
        source="nanochat (Karpathy), gpt.py at 92d63d4",
        use="to keep the embedding in reach of deep layers, at two numbers a layer.",
    )  # fmt: skip


_X0_NAMES = ("x", "x_0", "x_mid")


def _x0_stage(place: Place, scale: tuple[float, float], x0_scale: tuple[float, float], backout: float) -> Stage:
    is_after_middle = backout != 0.0 and place.layer > place.num_layers // 2
    n = 3 if is_after_middle else 2
    keep, collapse = list(identity(n)), unit(n, 0)
    if place.sublayer == 0:
        share = place.layer / max(1, place.num_layers - 1)
        pair = tuple(
            Learned(first + share * (last - first), name=name)
            for name, (first, last) in (("scale", scale), ("x0_scale", x0_scale))
        )
        collapse = (*pair, *(0.0,) * (n - 2))
        keep[0] = collapse
    inject = unit(n, 0)
    ends_middle = place.layer == place.num_layers // 2 and place.sublayer == place.sublayers_per_layer - 1
    if backout != 0.0 and ends_middle:
        keep, inject = [*keep, keep[0]], (*inject, 1.0)  # the state after this layer stays
    names_out = _X0_NAMES[: len(keep)]
    return Stage(n, collapse, tuple(keep), inject, norm_in=True, names=_X0_NAMES[:n], names_out=names_out)


def _x0_head(place: Place, backout: float, **options: Any) -> Head:
    if backout == 0.0 or place.layer <= place.num_layers // 2:
        return Head(2, (1.0, 0.0), names=_X0_NAMES[:2])
    return Head(3, (1.0, 0.0, Learned(-backout, name="backout")), names=_X0_NAMES)
