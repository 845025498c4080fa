"""The published residual wirings of one stream, each a row (or a rule for rows) with its source; more in `catalog_layers.py`.

    stack = ResidualStack(sublayers, d_model, wirings.pre_ln())         or, without options, "pre_ln"

N is the norm, f the sublayer, L the number of layers, l a layer's number from 1, S the number of sublayers.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

from addnorm._util.arguments import check_bool, check_choice, check_float, check_int
from addnorm.wirings.init import Draw, InitRule, gpt2, require_role, xavier
from addnorm.wirings.spec import CONSTRUCTORS, Learned, Place, Row, Wiring

POST = Row(norm_out=True)
PRE = Row(norm_in=True)
SANDWICH = Row(norm_in=True, norm_branch=True)

Constructor = TypeVar("Constructor", bound=Callable[..., Wiring])


def register(make: Constructor) -> Constructor:
    """Register a constructor under its name for `get` and `list_all`; its arguments but `init` become the wiring's options."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def construct(*args: Any, **kwargs: Any) -> Wiring:
        wiring, bound = make(*args, **kwargs), signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return replace(wiring, options={name: value for name, value in bound.arguments.items() if name != "init"})

    CONSTRUCTORS[make.__name__] = construct
    return cast(Constructor, construct)


@register
def post_ln(init: InitRule = xavier) -> Wiring:
    """Return post-LN, x' = N(x + f(x)): the norm after the add, on the stream. Vaswani et al. 2017."""
    return Wiring(
        "post_ln", POST, init=init, source="Vaswani et al. 2017, arXiv 1706.03762",
        use="to reproduce the original Transformer, BERT or BART; deep stacks need warm-up.",
    )  # fmt: skip


@register
def pre_ln(init: InitRule = xavier) -> Wiring:
    """Return pre-LN, x' = x + f(N(x)), and a final norm: the modern default. Wang et al. 2019, Xiong et al. 2020.

    Args:
        init: the rule for the weights, such as `addnorm.wirings.init.gpt2`.
    """
    return Wiring(
        "pre_ln", PRE, final_norm=True, init=init, source="Xiong et al. 2020, arXiv 2002.04745",
        use="by default: trains at depth without warm-up, and the stream is a plain sum.",
    )  # fmt: skip


@register
def sandwich() -> Wiring:
    """Return the sandwich, x' = x + N(f(N(x))), and a final norm; last projections start at 0.02/sqrt(2L). Ding et al. 2021."""
    return Wiring(
        "sandwich", SANDWICH, final_norm=True, init=gpt2, source="Ding et al. 2021 (CogView), arXiv 2105.13290",
        use="in low precision, where a write must not grow with its sublayer's weights (Gemma 2 and 3, GLM-4).",
    )  # fmt: skip


@register
def peri_ln() -> Wiring:
    """Return peri-LN, the sandwich with a norm of the embedding: x_0 = N(x). Kim et al. 2025."""
    return Wiring(
        "peri_ln", SANDWICH, final_norm=True, embedding_norm=True, source="Kim et al. 2025, arXiv 2502.02732",
        use="as the sandwich: the variance of the stream grows linearly also after training.",
    )  # fmt: skip


@register
def reordered() -> Wiring:
    """Return x' = x + N(f(x)), and a final norm, as in OLMo 2 and Swin v2. OLMo 2, 2024."""
    return Wiring(
        "reordered", Row(norm_branch=True), final_norm=True, source="OLMo 2, arXiv 2501.00656; Swin v2, arXiv 2111.09883",
        use="for fewer spikes of the loss than pre-LN, together with norms of queries and keys (OLMo 2).",
    )  # fmt: skip


Kind = Literal["encoder-only", "decoder-only", "encoder", "decoder"]
# alpha and beta of a stack of n layers, where the other half of an encoder-decoder has m; and alpha's formula.
_DEEPNORM: dict[str, tuple[Callable[[int, int], tuple[float, float]], str]] = {
    **dict.fromkeys(
        ("encoder-only", "decoder-only"), (lambda n, m: ((2 * n) ** (1 / 4), (8 * n) ** (-1 / 4)), "(2L)^(1/4)")
    ),
    "encoder": (lambda n, m: (0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)), "0.81 ({m} L^4)^(1/16)"),
    "decoder": (lambda n, m: ((3 * n) ** (1 / 4), (12 * n) ** (-1 / 4)), "(3L)^(1/4)"),
}


def deepnorm_constants(kind: Kind, num_layers: int, other_layers: int | None = None) -> tuple[float, float]:
    """Return DeepNorm's alpha and beta.

    Example:
        >>> from addnorm.wirings.catalog import deepnorm_constants
        >>> [round(x, 3) for x in deepnorm_constants("encoder-only", 100)]
        [3.761, 0.188]
    """
    return _DEEPNORM[kind][0](num_layers, num_layers if other_layers is None else other_layers)


@register
def deepnorm(kind: Kind = "encoder-only", other_layers: int | None = None) -> Wiring:
    """Return DeepNorm, x' = N(alpha x + f(x)); values, outputs and feed-forward weights start smaller by beta. Wang et al. 2022.

    alpha = (2L)^(1/4) and beta = (8L)^(-1/4) for an encoder or a decoder alone. In an encoder-decoder of N and M layers the
    encoder has alpha = 0.81 (N^4 M)^(1/16), beta = 0.87 (N^4 M)^(-1/16), the decoder alpha = (3M)^(1/4), beta = (12M)^(-1/4);
    `addnorm.nn.Transformer` uses them. beta is the gain of Xavier-normal; queries and keys have gain 1.

    Args:
        kind: "encoder-only", "decoder-only", or "encoder" or "decoder" for one half of an encoder-decoder.
        other_layers: the layers of the other half, on which the constants of the encoder of an encoder-decoder depend.
    """
    check_choice("kind", kind, _DEEPNORM)
    if other_layers is not None:
        check_int("other_layers", other_layers, 1)
    if kind == "encoder" and other_layers is None:
        raise ValueError(
            "other_layers is None, expected the number of decoder layers: the encoder's constants need it."
        )
    if kind.endswith("only") and other_layers is not None:
        raise ValueError(f"other_layers is {other_layers}, expected None: a stack that is {kind} has no other half.")
    alpha = _DEEPNORM[kind][1].format(m=other_layers)
    return Wiring(
        "deepnorm", _deepnorm_row, init=_deepnorm_init,
        symbols={"a": ("α", alpha)}, source="Wang et al. 2022 (DeepNet), arXiv 2203.00555",
        use="for post-LN at any depth: a thousand layers train.", pair=_deepnorm_pair,
    )  # fmt: skip


def _deepnorm_row(place: Place, kind: Kind, other_layers: int | None) -> Row:
    return Row(norm_out=True, a=deepnorm_constants(kind, place.num_layers, other_layers)[0])


def _deepnorm_init(role: str | None, place: Place, kind: Kind, other_layers: int | None) -> Draw:
    if role in ("query", "key"):
        return Draw("xavier_normal")
    require_role(role)
    return Draw("xavier_normal", deepnorm_constants(kind, place.num_layers, other_layers)[1])


def _deepnorm_pair(wiring: Wiring, num_encoder_layers: int, num_decoder_layers: int) -> tuple[Wiring, Wiring]:
    return deepnorm("encoder", num_decoder_layers), deepnorm("decoder", num_encoder_layers)


Growth = Literal["log", "linear", "constant"]
# omega as a function of S, by how much the output may change when every weight changes (`admin-torch`).
_ADMIN: dict[str, Callable[[int], float]] = {
    "log": lambda s: math.sqrt((s + 1) / math.log(s + 1) - 1),
    "linear": lambda s: 1.0,
    "constant": math.sqrt,
}


@register
def admin(profiled: bool = True, growth: Growth = "log") -> Wiring:
    """Return Admin, x' = N(omega * x + f(x)), omega a learned vector for each sublayer. Liu et al. 2020.

    Args:
        profiled: whether one forward pass measures omega's initial value (`init_(stack, x)`): 1 in the first sublayer, and then
            sqrt(omega^2 var(x) + var f(x)) of the sublayer before. If False, the number of sublayers alone sets it, as in
            admin-torch.
        growth: how the output's change may grow with the number of sublayers S, if not `profiled`: "log" sets omega to
            sqrt((S+1)/ln(S+1) - 1), "linear" to 1, "constant" to sqrt(S).
    """
    check_bool("profiled", profiled)
    check_choice("growth", growth, _ADMIN)
    if profiled and growth != "log":
        raise ValueError(
            f"growth is {growth!r} with profiled=True, expected profiled=False: a profile measures omega itself."
        )
    formula = {"log": "√((S+1)/ln(S+1) - 1)", "linear": "1", "constant": "√S"}[growth]
    return Wiring(
        "admin", _admin_row,
        symbols={"a": ("ω", "" if profiled else formula)},
        source="Liu et al. 2020, arXiv 2004.08249", profile=_admin_profile if profiled else None,
        use="for post-LN whose branches start with equal shares of the stream, measured on data.",
    )  # fmt: skip


def _admin_profile(stack: Any, *inputs: Any, **context: Any) -> None:
    stack.profile_admin_(*inputs, **context)


def _admin_row(place: Place, profiled: bool, growth: Growth) -> Row:
    return Row(norm_out=True, a=Learned(1.0 if profiled else _ADMIN[growth](place.num_sublayers), per_feature=True))


@register
def rezero() -> Wiring:
    """Return ReZero, x' = x + alpha f(x) without norms; one learned alpha per layer, initially 0. Bachlechner et al. 2020."""
    return Wiring(
        "rezero", Row(b=Learned(0.0, shared=True)), symbols={"b": ("α", "")},
        source="Bachlechner et al. 2020, arXiv 2003.04887",
        use="to do without norms: every layer starts as the identity.",
    )  # fmt: skip


@register
def skipinit(alpha: float | None = 0.0) -> Wiring:
    """Return SkipInit, x' = x + alpha f(x) without norms; one learned alpha per sublayer. De and Smith 2020.

    Args:
        alpha: the initial value; None means 1/sqrt(S).
    """
    if alpha is not None:
        alpha = check_float("alpha", alpha)
    return Wiring(
        "skipinit", _skipinit_row, symbols={"b": ("α", "1/√S" if alpha is None else "")},
        source="De, Smith 2020, arXiv 2002.10444", use="to do without norms: every sublayer starts as the identity.",
    )  # fmt: skip


def _skipinit_row(place: Place, alpha: float | None) -> Row:
    return Row(b=Learned(1 / math.sqrt(place.num_sublayers) if alpha is None else alpha))


# From CaiT's code: the default of its class, the value of its models of 24 layers, and of 36 (but XXS36: 1e-5) and 48.
_CAIT = ((36, 1e-6), (24, 1e-5), (0, 1e-4))


@register
def layer_scale(gamma: float | None = None) -> Wiring:
    """Return LayerScale, x' = x + gamma * f(N(x)), gamma a learned vector, and a final norm. Touvron et al. 2021 (CaiT).

    Args:
        gamma: the initial value; None means the value of CaiT's code: 1e-4 below 24 layers, 1e-5 below 36, then 1e-6.
    """
    if gamma is not None:
        gamma = check_float("gamma", gamma)
    start = "1e-4, 1e-5 or 1e-6" if gamma is None else ""
    return Wiring(
        "layer_scale", _layer_scale_row, final_norm=True, symbols={"b": ("γ", start)},
        source="Touvron et al. 2021 (CaiT), arXiv 2103.17239",
        use="for deep vision transformers: every sublayer starts near the identity.",
    )  # fmt: skip


def _layer_scale_row(place: Place, gamma: float | None) -> Row:
    init = next(value for depth, value in _CAIT if place.num_layers >= depth) if gamma is None else gamma
    return Row(norm_in=True, b=Learned(init, per_feature=True))


@register
def residual_multiplier(multiplier: float) -> Wiring:
    """Return x' = x + k f(N(x)), k a constant, and a final norm. Granite 3 uses k = 0.22."""
    multiplier = _nonzero("multiplier", multiplier)
    return Wiring(
        "residual_multiplier", Row(norm_in=True, b=multiplier), final_norm=True,
        source="Granite 3 (IBM)",
        use="to load models that have one, or to damp every write alike.",
    )  # fmt: skip


@register
def depth_mup(k: float = 1.0) -> Wiring:
    """Return Depth-muP, x' = x + k/sqrt(L) f(N(x)), and a final norm. Yang et al. 2023; MiniCPM3 uses k = 1.4."""
    k = _nonzero("k", k)
    return Wiring(
        "depth_mup", _depth_mup_row, final_norm=True, symbols={"b": ("b", f"{k:g}/√L")},
        source="Yang et al. 2023, arXiv 2310.02244",
        use="to carry the best learning rate from shallow to deep models.",
    )  # fmt: skip


def _depth_mup_row(place: Place, k: float) -> Row:
    return Row(norm_in=True, b=k / math.sqrt(place.num_layers))


@register
def completep(k: float = 1.0) -> Wiring:
    """Return CompleteP, x' = x + k/L f(N(x)), and a final norm. Dey et al. 2025."""
    k = _nonzero("k", k)
    return Wiring(
        "completep", _completep_row, final_norm=True, symbols={"b": ("b", f"{k:g}/L")},
        source="Dey et al. 2025, arXiv 2505.01618",
        use="to carry hyperparameters over depth with every layer still learning features.",
    )  # fmt: skip


def _completep_row(place: Place, k: float) -> Row:
    return Row(norm_in=True, b=k / place.num_layers)


EXAMPLES = {"residual_multiplier": {"multiplier": 0.22}}  # values for options without a default

# Wirings that are not offered, with the reason.
NOT_OFFERED = {
    "SpanNorm": "the formula by which its streams are combined could not be verified",
    "T-Fixup, GLM-130B's DeepNorm": "the exponents of their initializations could not be verified",
    "B2T's own initialization": "its rescaling could not be verified; b2t() starts with Xavier's",
    "GTrXL": "the bias of its gate could not be verified",
    "NormFormer, Sub-LN, HybridNorm": "they have norms inside the sublayers: build those into the modules you pass",
    "AltUp": "the coefficients of its write depend on the write, and it steps around a whole layer",
    "LAuReL (Gemma 3n)": "it stands inside a layer and reads the normalized input",
    "adaLN": "its scales are computed from an input that is not the stream: build it into the modules you pass",
    "value residuals (ResFormer)": "they lie inside attention",
    "Fractional connections": "their streams are parts of the features, each of another width than the sublayer's",
    "convolutions of writes (Inkling, Qwen), Funnel": "they mix tokens: put the convolution into the sublayer",
    "DyT, Derf, GatedNorm": "these are kinds of norm, not wirings: replace a connection's norm_in by such a module",
}


def _nonzero(name: str, value: Any) -> float:
    factor = check_float(name, value)
    if factor == 0.0:
        raise ValueError(f"{name} is 0, expected another number: no sublayer would ever write.")
    return factor


def list_all() -> list[Wiring]:
    """Return each registered wiring once, with its default options or those in `EXAMPLES`."""
    return [make(**EXAMPLES.get(name, {})) for name, make in CONSTRUCTORS.items()]
