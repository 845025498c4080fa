"""The published wirings with several streams, memory of earlier states, or computed coefficients.

    R = N_in(C P(X)),   W = N_branch(f(R)),   X' = N_out(A X + B W)

Their initial values are those of the sources. Where a source publishes none, the docstring says whose are taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from addnorm._util.arguments import check_bool, check_choice, check_float, check_int
from addnorm.wirings.catalog import register
from addnorm.wirings.coefficients import (
    DynamicSources,
    GatedMix,
    GatedRead,
    HyperConnection,
    IndependentConnection,
    Interpolation,
    ManifoldConnection,
    ResidualScaling,
    SigmoidRead,
    SourceAttention,
)
from addnorm.wirings.init import WRITES, Draw, xavier
from addnorm.wirings.row import Learned, Place, Row
from addnorm.wirings.spec import Wiring
from addnorm.wirings.stage import Computed, Head, Matrix, Stage, append_zero, identity, unit

__all__ = [
    "attention_residuals", "denseformer", "depth_scaled", "gated_mix", "gated_residual", "hyper_connections", "independent_hc",
    "keel", "mhc", "muddformer", "ngpt", "residual_scaling", "reversible", "siamese_norm", "x0_residual",
]  # fmt: skip


@register
def hyper_connections(n: int = 4, dynamic: bool = True) -> Wiring:
    """Return hyper-connections, X' = A X + b f(N(c X)), and the norm of the streams' sum. Zhu et al. 2024.

    A, b and c are learned, and in the dynamic form each stream's norm moves them. At first they give pre-LN. The last projections
    of the sublayers start larger by sqrt(n), as in the paper.

    Args:
        n: the number of streams.
        dynamic: whether the coefficients depend on the streams.
    """
    check_int("n", n, 1)
    stage = Stage(n, coefficients=Computed(HyperConnection, {"dynamic": dynamic}), norm_in=True)
    return Wiring(
        "hyper_connections", stage, final_norm=True, init=_hyper_init, embedding=(1.0,) * n, head=Head(n, (1.0,) * n),
        options={"n": n, "dynamic": dynamic}, source="Zhu et al. 2024, arXiv 2409.19606",
        use="for a residual stream that is n times as wide at the cost of one: the model learns what to keep.",
    )  # fmt: skip


def _hyper_init(role: str | None, place: Place, n: int, **options: Any) -> Draw:
    draw = xavier(role, place)
    return draw._replace(gain=draw.gain * math.sqrt(n)) if role in WRITES else draw


HeadKind = Literal["learned", "mean"]


@register
def mhc(
    n: int = 4, head: HeadKind = "learned", single_pass: bool = False, iterations: int = 20, eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> Wiring:  # fmt: skip
    """Return manifold-constrained hyper-connections: n streams, mixed by a nearly doubly stochastic matrix. Xie et al. 2025.

    X' = A X + b f(N(c X)); gates c and b and the matrix A are computed from all streams of a token.

    Args:
        n: the number of streams.
        head: how the streams become the output: "learned" gates as in DeepSeek V4, or their "mean" as in GLM-5.3.
        single_pass: whether a sublayer reads with the c of the one before it, so that one pass over the streams is enough, as in
            DeepSeek V4.1; the first reads stream 1, and the c of the last sublayer is the head.
        iterations: how often the rows and columns of A are normalized.
        eps: added to c and to the sums of rows and columns.
        norm_eps: epsilon of the norm of all streams; GLM-5.3 has 1e-5.
    """
    check_int("n", n, 1)
    check_choice("head", head, ("learned", "mean"))
    check_bool("single_pass", single_pass)
    small = {"eps": eps, "norm_eps": norm_eps}
    gates = Computed(ManifoldConnection, {"iterations": iterations} | small)
    stage = Stage(n, coefficients=gates, delayed=single_pass, norm_in=True)
    end = Head(n, coefficients=Computed(SigmoidRead, small)) if head == "learned" else Head(n, (1.0 / n,) * n)
    source = "Xie et al. 2025, arXiv 2512.24880; DeepSeek V4, arXiv 2606.19348"
    return Wiring(
        "mhc", stage, final_norm=True, embedding=(1.0,) * n, head=Head(n, delayed=True) if single_pass else end,
        options={"n": n, "head": head, "single_pass": single_pass, "iterations": iterations} | small,
        source="DeepSeek V4.1 Flash, section 2.4.1" if single_pass else source,
        use="for several streams in deep and large models: the mixing can neither amplify nor silence them.",
    )  # fmt: skip


@register
def independent_hc(n: int = 4, magnitude: float = 2.0, eps: float = 1e-6, norm_eps: float = 1e-6) -> Wiring:
    """Return hyper-connections without mixing, X' = X + b f(N(c X)): gates for the read and for each write. HY-V4.

    Args:
        n: the number of streams.
        magnitude: the largest gate of a write.
        eps: added to the gates.
        norm_eps: epsilon of the norm of all streams; HY-V4 has 1e-5.
    """
    check_int("n", n, 1)
    small = {"eps": eps, "norm_eps": norm_eps}
    gates = Computed(IndependentConnection, {"magnitude": magnitude} | small)
    return Wiring(
        "independent_hc", Stage(n, coefficients=gates, norm_in=True), final_norm=True, embedding=(1.0,) * n,
        head=Head(n, coefficients=Computed(SigmoidRead, small)), options={"n": n, "magnitude": magnitude} | small,
        source="HY-V4 (Tencent)",
        use="for several streams that each stay a plain sum of writes, each write with its own gate.",
    )  # fmt: skip


@register
def gated_residual(n: int = 4, rank: int = 320, eps: float = 1e-6) -> Wiring:
    """Return gated residuals, X'_i = X_i + b_i f(sum_i G_i * X_i): a gate for every feature of every stream. Qwen4-Exp.

    The gates contain the norm of each stream; there is no other norm, and the last read is the output.

    Args:
        n: the number of streams.
        rank: the rank of the gates' projection.
        eps: epsilon of the streams' norms.
    """
    check_int("n", n, 1)
    options = {"rank": rank, "eps": eps}
    gates = Computed(GatedRead, options)
    return Wiring(
        "gated_residual", Stage(n, coefficients=gates), embedding=(1.0,) * n,
        head=Head(n, coefficients=Computed(GatedRead, options | {"injects": False})), options={"n": n} | options,
        source="Qwen4-Exp, arXiv 2608.30320", use="for reads that choose among the streams feature by feature.",
    )  # fmt: skip


@register
def attention_residuals(
    layers_per_block: int | None = None, normed_values: bool = False, reads: int | tuple[int, ...] = 1
) -> Wiring:
    """Return attention residuals: each sublayer attends over the embedding and the earlier writes. arXiv 2603.15031; Kimi K3.

    r = N(sum_i p_i x_i), p = softmax_i(q · (γ ⊙ R(x_i))), x_0 the embedding and x_i the write of sublayer i. q = 0 at first: with
    the norm of the read that is pre-LN.

    Args:
        layers_per_block: None for one source a write; otherwise the writes of that many layers are one source, their sum.
        normed_values: Inkling 2's form: the read is a sum of R(x_i), γ is absent and the scores are divided by sqrt(d_model).
        reads: the inputs of the first sublayer of a layer, each with its own query: 3 for separate query, key and value inputs; a
            tuple is repeated over the layers.
    """
    if layers_per_block is not None:
        check_int("layers_per_block", layers_per_block, 1)
    cycle = (reads,) if isinstance(reads, int) and not isinstance(reads, bool) else reads
    if not isinstance(cycle, Sequence) or not cycle:
        raise ValueError(f"reads is {reads!r}, expected a whole number from 1, or a tuple of them.")
    for number in cycle:
        check_int("reads", number, 1)
    check_bool("normed_values", normed_values)
    options: dict[str, Any] = {"layers_per_block": layers_per_block, "normed_values": normed_values}
    options["reads"] = reads if isinstance(reads, int) else tuple(reads)
    return Wiring(
        "attention_residuals", _attention_stage, final_norm=True, head=_attention_head, options=options,
        source="Kimi team 2026, arXiv 2603.15031", use="where a deep sublayer is to find the write of an early one undiluted.",
    )  # fmt: skip


def _count_sources(place: Place, layers_per_block: int | None) -> tuple[int, bool]:
    """Return the sources at a place, and whether its write begins a new one."""
    index = place.layer * place.sublayers_per_layer + place.sublayer
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

    The average is the state that goes on: x = sum_j α_j x_j over the embedding and the states after earlier layers, and the layer
    is pre-LN on x. At first α reads the newest state alone: pre-LN.

    Args:
        dilation: only every `dilation`-th earlier state is averaged, counted back from the newest.
        period: only every `period`-th layer averages.
    """
    check_int("dilation", dilation, 1)
    check_int("period", period, 1)
    return Wiring(
        "denseformer", _dense_stage, final_norm=True, head=_dense_head, options={"dilation": dilation, "period": period},
        symbols={"weight": ("α", "")}, source="Pagliardini et al. 2024, arXiv 2402.02622",
        use="for direct paths between layers at the price of a few numbers a layer and the memory of their states.",
    )  # fmt: skip


def _dense_weights(n: int, dilation: int, period: int) -> tuple[Any, ...]:
    """Return the weights of n states, the newest last, before layer n - 1 or at the end."""
    if n == 1 or (n - 1) % period:
        return unit(n, -1)
    return tuple(
        Learned(float(j == n - 1), name=f"weight_{j}") if (n - 1 - j) % dilation == 0 else 0.0 for j in range(n)
    )


def _dense_stage(place: Place, dilation: int, period: int) -> Stage:
    n = _count_states(place)
    if place.sublayer:
        return Stage(n, unit(n, -1), None, unit(n, -1), norm_in=True, names="x")
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

    r_q = N(sum_j w_qj x_j), w = GELU(R(x_n) W_1) W_2 + w_0 from the newest state x_n, and another row of w for the state that
    goes on. At first w reads the newest state alone: pre-LN.

    Args:
        reads: the inputs of the first sublayer of a layer: 1, or 3 for separate query, key and value inputs, as in the paper.
    """
    check_int("reads", reads, 1)
    return Wiring(
        "muddformer", _mudd_stage, final_norm=True, head=_mudd_head, options={"reads": reads},
        source="Xiao et al. 2025, arXiv 2502.12170",
        use="for direct paths between layers that each token weighs, with separate ones for query, key and value.",
    )  # fmt: skip


def _mudd_stage(place: Place, reads: int) -> Stage:
    n = _count_states(place)
    if place.sublayer:
        return Stage(n, unit(n, -1), None, unit(n, -1), norm_in=True, names="x")
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

    λ and μ are learned numbers, one pair a layer. At the end `backout` times the state in the middle is subtracted, and learned
    too. The embedding is normalized first.

    Args:
        scale: λ at first in the first and in the last layer; the others lie on a line.
        x0_scale: μ at first in the first and in the last layer.
        backout: the share of the state after layer L // 2 that is subtracted at the end; 0 for none.
    """
    for name, pair in (("scale", scale), ("x0_scale", x0_scale)):
        if not (isinstance(pair, Sequence) and len(pair) == 2):
            raise ValueError(f"{name} is {pair!r}, expected two numbers: in the first layer and in the last.")
        for value in pair:
            check_float(f"an entry of {name}", value)
    options = {"scale": tuple(scale), "x0_scale": tuple(x0_scale), "backout": check_float("backout", backout)}
    return Wiring(
        "x0_residual", _x0_stage, final_norm=True, embedding_norm=True, embedding=(1.0, 1.0), head=_x0_head, options=options,
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


@register
def depth_scaled() -> Wiring:
    """Return x' = sqrt((k-1)/k) x + sqrt(1/k) N(f(N(x))), k = 2, 3, ... counting the sublayers, and a final norm. Beam.

    sqrt(k) x is the sandwich's plain sum: the stream's size stays the same, and so does the model's function.
    """
    return Wiring(
        "depth_scaled", _depth_scaled_row, final_norm=True,
        symbols={"a": ("a", "√((k-1)/k)"), "b": ("b", "1/√k for the sublayers k = 2, 3, ...")},
        source="transformers' Beam", use="for the sandwich in low precision: the stream does not grow with depth.",
    )  # fmt: skip


def _depth_scaled_row(place: Place) -> Row:
    k = place.layer * place.sublayers_per_layer + place.sublayer + 2
    return Row(norm_in=True, norm_branch=True, a=math.sqrt((k - 1) / k), b=math.sqrt(1 / k))


@register
def gated_mix(temperature: float = 0.3) -> Wiring:
    """Return x' = a * x + b * N(f(N(x))), b = σ(g/t) and a = sqrt(1 - b^2) learned vectors, and a final norm. Muse Spark.

    Args:
        temperature: t.
    """
    gates = Computed(GatedMix, {"temperature": temperature})
    return Wiring(
        "gated_mix", Stage(1, (1,), coefficients=gates, norm_in=True, norm_branch=True), final_norm=True,
        options={"temperature": temperature}, source="transformers' Muse Spark",
        use="for a stream of constant size whose features forget at learned rates.",
    )  # fmt: skip


@register
def residual_scaling() -> Wiring:
    """Return x' = a * (x + v) + b * (f(N(x)) + w), four learned vectors a sublayer, and a final norm. Zaya.

    Zaya keeps the stream in float32: `ResidualStack(..., residual_dtype=torch.float32)`.
    """
    return Wiring(
        "residual_scaling", Stage(1, (1,), coefficients=Computed(ResidualScaling), norm_in=True), final_norm=True,
        source="transformers' Zaya (Zyphra)", use="to let every sublayer rescale what came before it, at 4 d numbers each.",
    )  # fmt: skip


@register
def keel() -> Wiring:
    """Return Keel, x' = N(α x + f(N(x))), α the number of sublayers; the first attention is pre-LN, the first FFN has α = 1.

    Taken from a secondary source: the paper (arXiv 2601.19895) could not be read.
    """
    return Wiring(
        "keel", _keel_row, symbols={"a": ("α", "S")}, source="arXiv 2601.19895",
        use="for post-LN at depth: each norm changes the stream by about 1/S.",
    )  # fmt: skip


def _keel_row(place: Place) -> Row:
    if place.layer == place.sublayer == 0:
        return Row(norm_in=True)
    alpha = 1.0 if place.layer == 0 else float(place.n_sublayers)
    return Row(norm_in=True, norm_out=True, a=alpha)


@register
def reversible() -> Wiring:
    """Return reversible residuals: of two streams one is read and the other written, in turn. Kitaev et al. 2020 (Reformer).

    y_1 = x_1 + f(N(x_2)), y_2 = x_2 + g(N(y_1)); both begin as the embedding. The output is the norm of their mean; Reformer has
    2 d features there, the streams side by side.
    """
    return Wiring(
        "reversible", _reversible_stage, final_norm=True, embedding=(1.0, 1.0), head=Head(2, (0.5, 0.5)),
        source="Gomez et al. 2017 (RevNet), arXiv 1707.04585; Kitaev et al. 2020 (Reformer), arXiv 2001.04451",
        use="where activations do not fit in memory: each layer's input can be computed from its output.",
    )  # fmt: skip


def _reversible_stage(place: Place) -> Stage:
    target = place.sublayer % 2
    return Stage(2, unit(2, 1 - target), None, unit(2, target), norm_in=True)


@register
def ngpt(alpha: float = 0.05) -> Wiring:
    """Return nGPT's step on the sphere: x' = N((1 - α) x + α N(f(x))), α a learned vector. Loshchilov et al. 2024.

    N is a norm without weights: `ResidualStack(..., "ngpt", norm="rms", elementwise_affine=False)`; the paper's vectors have
    length 1, these sqrt(d_model). The embedding is normalized first. Its normalized weight matrices are not part of the wiring.

    Args:
        alpha: α at first.
    """
    alpha = check_float("alpha", alpha)
    stage = Stage(1, (1,), coefficients=Computed(Interpolation, {"init": alpha}), norm_branch=True, norm_out=True)
    return Wiring(
        "ngpt", stage, embedding_norm=True, options={"alpha": alpha}, source="Loshchilov et al. 2024, arXiv 2410.01131",
        use="for models all of whose vectors have one length.",
    )  # fmt: skip


@register
def siamese_norm() -> Wiring:
    """Return SiameseNorm: x' = N(x + s f(x + N(y))), y' = y + f(x + N(y)), and the output x + N(y). arXiv 2602.08064.

    s = 1/sqrt(l), l the layer's number; two sources state it differently.
    """
    return Wiring(
        "siamese_norm", _siamese_stage, embedding=(1.0, 1.0), head=Head(2, (1, 1), norm_streams=(False, True)),
        symbols={"inject_0": ("s", "1/√l")}, source="arXiv 2602.08064",
        use="for a post-LN and a pre-LN stream that share their sublayers.",
    )  # fmt: skip


def _siamese_stage(place: Place) -> Stage:
    mix: Matrix = identity(2)
    return Stage(2, (1, 1), mix, (1 / math.sqrt(place.number), 1), norm_streams=(False, True), norm_out=(True, False))
