"""The published wirings with several streams, or with computed coefficients of one.

    R = N_in(C P(X)),   W = N_branch(f(R)),   X' = N_out(A X + B W)

Their initial values are those of the sources. If a source publishes none, the docstring says where the values come from.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from addnorm._util.arguments import check_bool, check_choice, check_int, check_not_negative, check_positive
from addnorm.wirings.catalog import register
from addnorm.wirings.coefficients import (
    GatedMix,
    GatedRead,
    HyperConnection,
    IndependentConnection,
    Interpolation,
    ManifoldConnection,
    ResidualScaling,
    SigmoidRead,
)
from addnorm.wirings.factors import Place
from addnorm.wirings.init import WRITES, Draw, xavier
from addnorm.wirings.spec import Wiring
from addnorm.wirings.stage import Computed, Head, Row, Stage, identity, unit

_SUM_WITH_NORM = Head(2, (1, 1), norm_streams=(False, True))  # u + N(v)


@register
def resi_dual() -> Wiring:
    """Return ResiDual, u' = N(u + f(u)) and v' = v + f(u), two streams from x_0; the output is u + N(v). Xie et al. 2023."""
    return Wiring(
        "resi_dual", _RESI_DUAL, head=_SUM_WITH_NORM,
        source="Xie et al. 2023 (ResiDual), arXiv 2304.14802",
        use="for the gradients of pre-LN and the representations of post-LN at once.",
    )  # fmt: skip


@register
def b2t() -> Wiring:
    """Return B2T, post-LN whose layers add their input once more before their last norm. Takase et al. 2022."""
    return Wiring(
        "b2t", _b2t_stage, source="Takase et al. 2022 (B2T), arXiv 2206.00330",
        use="for post-LN whose gradient passes each layer by a single norm.",
    )  # fmt: skip


def _b2t_stage(place: Place) -> Stage:
    """Return the stage of a B2T sublayer: post-LN, the layer's input in a second stream that its last sublayer adds."""
    n = 1 if place.sublayer == 0 else 2
    if place.sublayer == place.sublayers_per_layer - 1:
        names = ("x",) if n == 1 else ("h", "x")
        return Stage(n, unit(n, 0), ((1.0,) * n,), (1,), norm_out=True, names=names, names_out=("x",))
    if n == 1:
        return Stage(1, (1,), ((1,), (1,)), (1, 0), norm_out=(True, False), names_out=("h", "x"))
    return Stage(2, unit(2, 0), identity(2), (1, 0), norm_out=(True, False), names=("h", "x"))


_RESI_DUAL = Stage(2, collapse=(1, 0), mix=identity(2), inject=(1, 1), norm_out=(True, False))


@register
def hyper_connections(n: int = 4, dynamic: bool = True) -> Wiring:
    """Return hyper-connections, X' = A X + b f(N(c X)), and the norm of the streams' sum. Zhu et al. 2024.

    A, b and c are learned. In the dynamic form a function of each normalized stream is added to them. At first they give pre-LN.
    The last projections of the sublayers start larger by the factor sqrt(n), as in the paper.

    Args:
        n: the number of streams.
        dynamic: whether the coefficients depend on the streams.
    """
    check_bool("dynamic", dynamic)
    stage = Stage(n, coefficients=Computed(HyperConnection, {"dynamic": dynamic}), norm_in=True)
    return Wiring(
        "hyper_connections", stage, final_norm=True, init=_hyper_init, head=Head(n, (1.0,) * n),
        source="Zhu et al. 2024, arXiv 2409.19606",
        use="for a residual stream that is n times as wide, with sublayers of the old width: the model learns what to keep.",
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
        single_pass: whether a sublayer reads with the c that the sublayer before it computes, so that one pass over the streams
            is enough, as in DeepSeek V4.1. The first sublayer reads stream 1, and the c of the last one serves as the head.
        iterations: how often the rows and columns of A are normalized.
        eps: added to c, to the entries of A after the first division, and to each later sum of its rows and columns.
        norm_eps: epsilon of the norm of all streams; GLM-5.3 has 1e-5.
    """
    check_choice("head", head, ("learned", "mean"))
    check_bool("single_pass", single_pass)
    if single_pass and head != "learned":
        raise ValueError(
            f"head is {head!r} with single_pass=True, expected 'learned': the c of the last sublayer is the head."
        )
    check_int("iterations", iterations, 1)
    small = {"eps": check_not_negative("eps", eps), "norm_eps": check_not_negative("norm_eps", norm_eps)}
    gates = Computed(ManifoldConnection, {"iterations": iterations} | small)
    stage = Stage(n, coefficients=gates, delayed=single_pass, norm_in=True)
    end = Head(n, coefficients=Computed(SigmoidRead, small)) if head == "learned" else Head(n, (1.0 / n,) * n)
    source = "Xie et al. 2025, arXiv 2512.24880; DeepSeek V4, arXiv 2606.19348"
    return Wiring(
        "mhc", stage, final_norm=True, head=Head(n, delayed=True) if single_pass else end,
        source="DeepSeek V4.1 Flash, section 2.4.1" if single_pass else source,
        use="for several streams in deep and large models: the mixing can neither amplify nor silence them.",
    )  # fmt: skip


@register
def independent_hc(n: int = 4, magnitude: float = 2.0, eps: float = 1e-6, norm_eps: float = 1e-6) -> Wiring:
    """Return hyper-connections without mixing, X' = X + b f(N(c X)): gates for the read and for each write. HY-V4.

    Args:
        n: the number of streams.
        magnitude: the largest gate of a write, above 0.
        eps: added to the gates.
        norm_eps: epsilon of the norm of all streams; HY-V4 has 1e-5.
    """
    magnitude = check_positive("magnitude", magnitude)
    small = {"eps": check_not_negative("eps", eps), "norm_eps": check_not_negative("norm_eps", norm_eps)}
    gates = Computed(IndependentConnection, {"magnitude": magnitude} | small)
    return Wiring(
        "independent_hc", Stage(n, coefficients=gates, norm_in=True), final_norm=True,
        head=Head(n, coefficients=Computed(SigmoidRead, small)),
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
    check_int("rank", rank, 1)
    options = {"rank": rank, "eps": check_not_negative("eps", eps)}
    gates = Computed(GatedRead, options)
    return Wiring(
        "gated_residual", Stage(n, coefficients=gates),
        head=Head(n, coefficients=Computed(GatedRead, options | {"injects": False})),
        source="Qwen4-Exp, arXiv 2608.30320", use="for reads that choose among the streams feature by feature.",
    )  # fmt: skip


@register
def depth_scaled() -> Wiring:
    """Return x' = sqrt((k-1)/k) x + sqrt(1/k) N(f(N(x))), k = 2, 3, ... counting the sublayers, and a final norm. Beam.

    sqrt(k) x is the stream of the sandwich, a plain sum. So the stream keeps its size, and the model computes the same function.
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
    temperature = check_positive("temperature", temperature)
    gates = Computed(GatedMix, {"temperature": temperature})
    return Wiring(
        "gated_mix", Stage(1, (1,), coefficients=gates, norm_in=True, norm_branch=True), final_norm=True,
        source="transformers' Muse Spark",
        use="for a stream of constant size whose features forget at learned rates.",
    )  # fmt: skip


@register
def residual_scaling() -> Wiring:
    """Return x' = a * (x + v) + b * (f(N(x)) + w), four learned vectors a sublayer, and a final norm. Zaya.

    Zaya keeps the stream in float32: `ResidualStack(..., residual_dtype=torch.float32)`.
    """
    return Wiring(
        "residual_scaling", Stage(1, (1,), coefficients=Computed(ResidualScaling), norm_in=True), final_norm=True,
        source="transformers' Zaya (Zyphra)",
        use="to let each sublayer scale and shift both terms of its add, with four learned vectors.",
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
    alpha = 1.0 if place.layer == 0 else float(place.num_sublayers)
    return Row(norm_in=True, norm_out=True, a=alpha)


@register
def reversible() -> Wiring:
    """Return reversible residuals: of two streams one is read and the other written, in turn. Kitaev et al. 2020 (Reformer).

    y_1 = x_1 + f(N(x_2)), y_2 = x_2 + g(N(y_1)); both streams begin as the embedding. The output is the norm of the streams'
    mean. Reformer concatenates the streams instead, to 2 d features.
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
        alpha: the initial α, above 0. In training α is the absolute value of a learned vector.
    """
    alpha = check_positive("alpha", alpha)
    stage = Stage(1, (1,), coefficients=Computed(Interpolation, {"init": alpha}), norm_branch=True, norm_out=True)
    return Wiring(
        "ngpt", stage, embedding_norm=True, source="Loshchilov et al. 2024, arXiv 2410.01131",
        use="for models all of whose vectors have one length.",
    )  # fmt: skip


@register
def siamese_norm() -> Wiring:
    """Return SiameseNorm: x' = N(x + s f(x + N(y))), y' = y + f(x + N(y)), and the output x + N(y). arXiv 2602.08064.

    s = 1/sqrt(l), l the layer's number; two sources state it differently.
    """
    return Wiring(
        "siamese_norm", _siamese_stage, embedding=(1.0, 1.0), head=_SUM_WITH_NORM,
        symbols={"inject_0": ("s", "1/√l")}, source="arXiv 2602.08064",
        use="for a post-LN and a pre-LN stream that share their sublayers.",
    )  # fmt: skip


def _siamese_stage(place: Place) -> Stage:
    return Stage(
        2, (1, 1), identity(2), (1 / math.sqrt(place.number), 1), norm_streams=(False, True), norm_out=(True, False)
    )
