"""Adversarial models with misleading names or code, and correct models beside them, each with the expected streams.

    model, args, kwargs = adversarial_models()["alpha on the branch"].build()

Models in `WRONG` have typical mistakes (a norm or a factor at the wrong place). Models in `RIGHT` are correct wirings in the
spellings of real code. Models in `OTHER` (adversarial_graphs.py) are not a plain chain of sublayers.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm import Learned, Row
from support import handwritten_models as parts
from support.adversarial_graphs import OTHER
from support.answers import Answer
from support.families import AF, Model, ln, rms, table
from support.handwritten_models import (
    EPS,
    Attention,
    D,
    Mlp,
    Part,
    Step,
    chain,
    every,
    factor,
    post,
    post_ln,
    pre,
    pre_ln,
    stream,
    tiny_family,
    tokens,
)

ALPHA = 4 ** (1 / 4)  # DeepNorm's constants for two layers
LEARNED = Learned(1.0)
NO_BACKWARD = "for inference: autograd refuses to go back through a norm whose input was overwritten"


# --- mistakes -----------------------------------------------------------------------------------------------------------


class PreNormBlock(nn.Module):
    """A pre-LN block: the input of each sublayer is normalized first, x + f(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_norm_attention, self.pre_norm_mlp = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.pre_norm_attention(x + self.attention(x))  # the block is post-LN
        return self.pre_norm_mlp(x + self.mlp(x))


class PostNormBlock(PreNormBlock):
    """Post-LN block, as in the original Transformer."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.pre_norm_attention(x))
        return x + self.mlp(self.pre_norm_mlp(x))


def from_the_norm(part: Part, x: Tensor) -> Tensor:
    z = part.norm(x)
    return z + part.f(z)


def half(which: type[nn.Module]) -> Step:
    """Take the residual of one kind of sublayers from the normalized input (wrong), and that of the others from the stream."""
    return lambda part, x: (from_the_norm if isinstance(part.f, which) else pre)(part, x)


BOTH = Row(norm_in=True, norm_out=True)
WRONG = (
    tiny_family("alpha on the branch", lambda s, x: s.norm(x + ALPHA * s.f(x)),
         stream(None, rows=every(Row(norm_out=True, b=ALPHA))), "DeepNorm with alpha on the wrong term"),
    tiny_family("alpha on the sum", lambda s, x: s.norm(ALPHA * (x + s.f(x))),
         stream(None, rows=every(Row(norm_out=True, a=ALPHA, b=ALPHA)))),
    tiny_family("alpha on a pre-LN stream", lambda s, x: ALPHA * x + s.f(s.norm(x)),
         stream(None, rows=every(Row(norm_in=True, a=ALPHA)), final_norm=True), "the stream grows by alpha each time"),
    Model("named pre-LN, is post-LN", partial(chain, PreNormBlock, PreNormBlock), tokens, Answer((post_ln(),))),
    Model("named post-LN, is pre-LN", partial(chain, PostNormBlock, PostNormBlock), tokens,
           Answer((stream("pre_ln"),))),
    tiny_family("residual from the norm", from_the_norm,
         stream("post_ln", embedding_norm=True, rows={3: Row()}), "z = N(x), x' = z + f(z): the stream is post-LN, from z_0 on,"
         " without its last norm", embedding_norm=False),
    tiny_family("residual from the norm, final norm", from_the_norm, stream("post_ln", embedding_norm=True),
         "with a final norm it is post-LN to the last", embedding_norm=False, final_norm=True),
    tiny_family("attention's residual from the norm", half(Attention),
         stream(None, embedding_norm=True, rows={0: Row(), 1: BOTH, 2: Row(), 3: Row(norm_in=True)}), embedding_norm=False),
    tiny_family("feed-forward's residual from the norm", half(Mlp),
         stream(None, rows={0: BOTH, 1: Row(), 2: BOTH, 3: Row()}, final_norm=True)),
    tiny_family("residual counted twice", lambda s, x: x + s.norm(x + s.f(x)), stream(None, remark="x' = x + N(x + f(x))")),
    tiny_family("normed residual, raw sublayer", lambda s, x: s.norm(x) + s.f(x),
         stream(None, remark="x' = N(x) + f(x): the norm stands on the wrong one of the two")),
    tiny_family("norm inside the branch alone", lambda s, x: x + s.norm(s.f(x)), stream("reordered", final_norm=True)),
    tiny_family("one norm for all", lambda s, x: x + s.f(F.layer_norm(x, (D,), eps=EPS)), pre_ln(), "the norms have no weights"),
    tiny_family("pre-LN that forgets the add", lambda s, x: s.f(s.norm(x)) if s.number == 2 else pre(s, x),
         pre_ln(AF, remark="the second layer's sublayers replace the stream: to it they are a head after a final norm"),
         final_norm=False),
    tiny_family("two norms in a row", lambda s, x: s.norm_2(s.norm(x + s.f(x))),
         stream(None, remark="x' = N(N(x + f(x)))")),
)  # fmt: skip


# --- correct, in many spellings ---------------------------------------------------------------------------------------------


def in_place(part: Part, x: Tensor) -> Tensor:
    read = part.norm(x)
    x += part.f(read)
    return x


def on_columns(part: Part, x: Tensor) -> Tensor:
    """Compute the add inside the matrix product with torch.addmm."""
    h = part.norm(x).flatten(0, 1)
    h = F.gelu(h @ part.f.up.weight.T + part.f.up.bias)
    return torch.addmm(x.flatten(0, 1) + part.f.down.bias, h, part.f.down.weight.T).view_as(x)


def wide_add(part: Part, x: Tensor) -> Tensor:
    return (x.double() + part.f(part.norm(x)).double()).to(x.dtype)


NORMS = tuple(
    tiny_family(f"norm by hand: {formula.__name__}", pre, pre_ln(norm=kind, eps=eps), remark=formula.__doc__ or "",
         norm=partial(parts.HandNorm, formula, eps))
    for kind, eps, formulas in ((rms, 1e-6, parts.RMS_FORMULAS), (ln, 1e-5, parts.LAYER_FORMULAS)) for formula in formulas
)  # fmt: skip
WIRINGS = (
    tiny_family("post-LN", post, post_ln()),
    tiny_family("pre-LN", pre, stream("pre_ln")),
    tiny_family("pre-LN, final norm", pre, pre_ln()),
    tiny_family("DeepNorm", lambda s, x: s.norm(ALPHA * x + s.f(x)), stream("deepnorm")),
    tiny_family("sandwich", lambda s, x: x + s.norm_2(s.f(s.norm(x))), factor("sandwich")),
    tiny_family("peri-LN", lambda s, x: x + s.norm_2(s.f(s.norm(x))), factor("peri_ln", embedding_norm=True)),
    tiny_family("LayerNorm scaling", lambda s, x: x + s.f(s.norm(x) / s.number**0.5), factor("layernorm_scaling")),
    tiny_family("LayerScale", lambda s, x: x + s.gamma * s.f(s.norm(x)), factor("layer_scale")),
    tiny_family("ReZero", lambda s, x: x + s.scale * s.f(x), stream("skipinit", norm=None, eps=None),
         "a factor for each sublayer: SkipInit by the table's names"),
    tiny_family("residual multiplier", lambda s, x: x + 0.3 * s.f(s.norm(x)),
         factor("residual_multiplier", options={"multiplier": 0.3})),
    tiny_family("no norm", lambda s, x: x + s.f(x), stream("no_norm", norm=None, eps=None)),
    tiny_family("no norm, half of the branch", lambda s, x: x + 0.5 * s.f(x), stream(None, norm=None, eps=None, rows=every(Row(b=0.5)))),
    tiny_family("Admin", lambda s, x: s.norm(x * s.gamma + s.f(x)), stream("admin")),
    tiny_family("Mix-LN", lambda s, x: (post if s.number == 1 else pre)(s, x), factor("mix_ln", options={"k": 1})),
    tiny_family("learned factor of the stream", lambda s, x: s.scale * x + s.f(s.norm(x)),
         factor(None, rows=every(Row(norm_in=True, a=LEARNED)))),
)  # fmt: skip
WRITINGS = (
    tiny_family("x += f", in_place, pre_ln(), NO_BACKWARD),
    tiny_family("x.add_(f)", lambda s, x: x.add_(s.f(s.norm(x))), pre_ln(), NO_BACKWARD),
    tiny_family("torch.add with alpha", lambda s, x: torch.add(x, s.f(s.norm(x)), alpha=0.5),
         factor("residual_multiplier", options={"multiplier": 0.5})),
    tiny_family("torch.addcmul", lambda s, x: torch.addcmul(x, s.gamma, s.f(s.norm(x))), factor("layer_scale")),
    tiny_family("torch.addmm", on_columns, pre_ln("ff"), functions=(Mlp,)),
    tiny_family("torch.lerp", lambda s, x: torch.lerp(x, s.f(s.norm(x)), 0.25),
         factor(None, rows=every(Row(norm_in=True, a=0.75, b=0.25)))),
    tiny_family("sum of a stack", lambda s, x: torch.stack((x, s.f(s.norm(x)))).sum(0), pre_ln()),
    tiny_family("x - (-f)", lambda s, x: x - s.f(s.norm(x)).neg(), pre_ln()),
    tiny_family("x - f", lambda s, x: x - s.f(s.norm(x)), factor("residual_multiplier", options={"multiplier": -1.0})),
    tiny_family("add in float64", wide_add, pre_ln()),
    tiny_family("dropout in eval", lambda s, x: x + s.path(s.drop(s.f(s.norm(x)))), pre_ln()),
    tiny_family("drop path at work", lambda s, x: x + s.always(s.f(s.norm(x))),
         pre_ln(remark="a sample's branch is times 0 or 1.25, by chance")),
    tiny_family("rotary, tanh GELU", pre, pre_ln(), functions=(parts.Rotary, parts.TanhGelu)),
    tiny_family("GELU at the stream's width", post, post_ln(), functions=(Attention, parts.NarrowGelu)),
    tiny_family("sdpa, SwiGLU", pre, pre_ln(), functions=(parts.Scaled, parts.SwiGlu)),
    tiny_family("nn.MultiheadAttention", pre, pre_ln(), functions=(parts.Multihead, Mlp)),
    tiny_family("normed queries", pre, pre_ln(), functions=(parts.NormedHeads, Mlp)),
    tiny_family("experts", pre, pre_ln(), functions=(Attention, parts.Experts)),
    tiny_family("a convolution between", pre, pre_ln("aof" * 2), functions=(Attention, parts.Convolution, Mlp)),
    tiny_family("macaron", lambda s, x: x + 0.5 * s.f(s.norm(x)), factor("residual_multiplier", "faf" * 2, options={"multiplier": 0.5}),
         functions=(Mlp, Attention, Mlp)),
)  # fmt: skip
RIGHT = WIRINGS + NORMS + WRITINGS


def adversarial_models() -> dict[str, Model]:
    return table(WRONG + RIGHT + OTHER)
