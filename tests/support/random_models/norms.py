"""Norms in the spellings of real code, each with its formula in float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.answers import Norm


@dataclass(frozen=True)
class Spelling:
    """One way to write a norm.

    Args:
        kind: "layer", "rms" or "scale".
        formula: the code, from x with its features last, weight, bias and eps; None for a norm that is a module of torch.
        module: makes that module from the width and eps.
        has_weight, has_bias: whether it has these parameters.
        offset: number that is added to the weight.
        outside: eps is added to the root.
        unbiased: the variance is divided by d - 1.
        has_length: the root is computed as the length, with eps as its lower bound.
    """

    kind: str
    formula: Callable[..., Tensor] | None = None
    module: Callable[..., nn.Module] = nn.LayerNorm
    has_weight: bool = True
    has_bias: bool = False
    offset: float = 0.0
    outside: bool = False
    unbiased: bool = False
    has_length: bool = False


def mean(x):
    """Return the mean over the features, which stay a dimension."""
    return x.mean(-1, keepdim=True)


# --- formulas of x, weight, bias and eps -----------------------------------------------------------------------------------


def llama(x, w, b, eps):
    wide = x.to(torch.float32)
    variance = mean(wide.pow(2))
    return w * (wide * torch.rsqrt(variance + eps)).to(x.dtype)


def gemma(x, w, b, eps):
    y = x.float() * torch.rsqrt(mean(x.float().pow(2)) + eps)
    return (y * (1.0 + w.float())).type_as(x)


def square_root(x, w, b, eps):
    return x / torch.sqrt(mean(x * x) + eps) * w


def inverse_root(x, w, b, eps):
    wide = x.double()
    return (wide * (1 / (mean(wide**2) + eps).sqrt())).to(x.dtype) * w


def root_plus_eps(x, w, b, eps):
    """RMSNorm of Zhang and Sennrich's code: eps is outside the root."""
    rms = x.norm(2, dim=-1, keepdim=True) * x.shape[-1] ** -0.5
    return w * (x / (rms + eps))


def unit_length(x, w, b, eps):
    return F.normalize(x, dim=-1, eps=eps) * math.sqrt(x.shape[-1]) * w


def functional_rms(x, w, b, eps):
    return F.rms_norm(x, (x.shape[-1],), w, eps)


def annotated(x, w, b, eps):
    """The Annotated Transformer's: the unbiased deviation, and eps added to it."""
    return w * (x - mean(x)) / (x.std(-1, keepdim=True) + eps) + b


def variance(x, w, b, eps):
    return (x - mean(x)) * torch.rsqrt(torch.var(x, -1, unbiased=False, keepdim=True) + eps) * w + b


def var_mean(x, w, b, eps):
    var, center = torch.var_mean(x, -1, correction=0, keepdim=True)
    return torch.addcmul(b, (x - center) / torch.sqrt(var + eps), w)


def centered(x, w, b, eps):
    c = x.float() - mean(x.float())
    return (c * mean(c * c).add(eps).rsqrt()).to(x.dtype) * w + b


def moments(x, w, b, eps):
    """The variance as E[x^2] - E[x]^2."""
    center = mean(x)
    return (x - center) / torch.sqrt(mean(x.square()) - center.square() + eps) * w + b


def sums(x, w, b, eps):
    """Means as sums over the width."""
    d = x.shape[-1]
    c = x - x.sum(-1, keepdim=True) / d
    return c / (c.pow(2).sum(-1, keepdim=True) / d + eps) ** 0.5 * w + b


def functional_layer(x, w, b, eps):
    return F.layer_norm(x, (x.shape[-1],), w, b, eps)


def native_layer(x, w, b, eps):
    return torch.native_layer_norm(x, (x.shape[-1],), w, b, eps)[0]


def scale_norm(x, w, b, eps):
    """ScaleNorm of Nguyen and Salazar: one weight for all features."""
    return w * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=eps)


def rms_weight_first(x, w, b, eps):
    """RMSNorm as in Moshi, whose weight has as many dimensions as x."""
    return x * (w.view(*(1,) * (x.dim() - 1), -1) * torch.rsqrt(mean(x.square()) + eps))


def rms_by_logarithm(x, w, b, eps):
    return w * (x * torch.exp(-0.5 * torch.log(mean(x.square()) + eps)))


def rms_by_product(x, w, b, eps):
    average = torch.full((x.shape[-1], 1), 1 / x.shape[-1], dtype=x.dtype)
    return x * (w / torch.sqrt((x * x) @ average + eps))


BARE = partial(nn.LayerNorm, elementwise_affine=False)
layer, rms = partial(Spelling, "layer"), partial(Spelling, "rms")
affine = partial(layer, has_bias=True)
SPELLINGS = {
    "nn.LayerNorm": affine(),
    "nn.LayerNorm without bias": layer(module=partial(nn.LayerNorm, bias=False)),
    "nn.LayerNorm without parameters": layer(module=BARE, has_weight=False),
    "nn.LayerNorm, weight outside": layer(module=BARE),
    "F.layer_norm": affine(functional_layer),
    "native_layer_norm": affine(native_layer),
    "F.layer_norm, weight outside": layer(lambda x, w, b, eps: functional_layer(x, None, b, eps) * w),
    "F.layer_norm, weight and bias outside": affine(lambda x, w, b, eps: functional_layer(x, None, None, eps) * w + b),
    "F.layer_norm, 1 + w outside": layer(lambda x, w, b, eps: functional_layer(x, None, b, eps) * (w + 1), offset=1.0),
    "F.layer_norm, 1 + w": affine(lambda x, w, b, eps: functional_layer(x, w + 1, b, eps), offset=1.0),
    "F.layer_norm without parameters": layer(functional_layer, has_weight=False),
    "LayerNorm by var": affine(variance),
    "LayerNorm by var_mean": affine(var_mean),
    "LayerNorm by centred squares": affine(centered),
    "LayerNorm by E[x^2] - E[x]^2": affine(moments),
    "LayerNorm by sums": affine(sums),
    "LayerNorm by std, eps outside": affine(annotated, outside=True, unbiased=True),
    "nn.RMSNorm": rms(module=nn.RMSNorm),
    "F.rms_norm": rms(functional_rms),
    "F.rms_norm, weight outside": rms(lambda x, w, b, eps: w * functional_rms(x, None, b, eps)),
    "F.rms_norm without weight": rms(functional_rms, has_weight=False),
    "RMSNorm as in Llama": rms(llama),
    "RMSNorm as in Gemma, 1 + w": rms(gemma, offset=1.0),
    "RMSNorm by sqrt": rms(square_root),
    "RMSNorm by the inverse root": rms(inverse_root),
    "RMSNorm as in Moshi": rms(rms_weight_first),
    "RMSNorm by the logarithm": rms(rms_by_logarithm),
    "RMSNorm by a product": rms(rms_by_product),
    "RMSNorm, eps outside": rms(root_plus_eps, outside=True),
    "RMSNorm by F.normalize": rms(unit_length, has_length=True),
    "ScaleNorm": Spelling("scale", scale_norm, has_length=True),
    "F.normalize": Spelling(
        "scale", lambda x, w, b, eps: F.normalize(x, dim=-1, eps=eps), has_weight=False, has_length=True
    ),
}
PLAIN = ("nn.LayerNorm", "nn.LayerNorm", "nn.RMSNorm", "RMSNorm as in Llama", "F.layer_norm")


class SpelledNorm(nn.Module):
    """Norm over the features of a layout.

    Args:
        spelling: key of `SPELLINGS`.
        layout: layout of the stream.
        width: number of features.
        eps: the constant in the denominator.
    """

    def __init__(self, spelling, layout, width, eps):
        super().__init__()
        self.name, self.spelling, self.layout, self.eps = spelling, SPELLINGS[spelling], layout, eps
        kind, size = self.spelling, 1 if spelling == "ScaleNorm" else width
        start = torch.zeros if kind.offset else torch.ones
        self.inner = kind.module(width, eps=eps) if kind.formula is None else None
        is_inner = self.inner is not None and any(True for _ in self.inner.parameters())
        self.weight = nn.Parameter(start(size)) if kind.has_weight and not is_inner else None
        self.bias = nn.Parameter(torch.zeros(size)) if kind.has_bias and not is_inner else None

    def forward(self, x):
        if self.layout.features_last:
            return self._compute(x)
        return self._compute(x.movedim(1, -1)).movedim(-1, 1)

    def _compute(self, x):
        if self.inner is None:
            return self.spelling.formula(x, self.weight, self.bias, self.eps)
        y = self.inner(x)
        return y if self.weight is None else y * self.weight

    def _find_parameter(self, name):
        own = getattr(self, name)
        return getattr(self.inner, name, None) if own is None else own

    def answer(self, path):
        """Return the answer of the norm at a path."""
        return Norm(path, self.spelling.kind, self.eps, self.spelling.outside)

    def by_hand(self, x):
        """Return the norm of a canonical tensor by its definition."""
        return self.linear_by_hand(x, self.denominator_by_hand(x)) + self.shift_by_hand(x)

    def denominator_by_hand(self, x):
        """Return the divisor of each token."""
        kind, d = self.spelling, x.shape[-1]
        centred = x - mean(x) if kind.kind == "layer" else x
        squares = (centred * centred).sum(-1, keepdim=True)
        if kind.has_length:
            return squares.sqrt() / (d**0.5 if kind.kind == "rms" else 1.0)  # eps is far below the length
        variance = squares / (d - kind.unbiased)
        return variance.sqrt() + self.eps if kind.outside else (variance + self.eps).sqrt()

    def linear_by_hand(self, x, denominator):
        """Return the norm without its bias, with a denominator of another tensor."""
        weight = self._find_parameter("weight")
        centred = x - mean(x) if self.spelling.kind == "layer" else x
        gain = 1.0 if weight is None else weight.detach() + self.spelling.offset
        return centred / denominator * gain

    def shift_by_hand(self, x):
        """Return the bias, or zeros."""
        bias = self._find_parameter("bias")
        return x.new_zeros(()) if bias is None else bias.detach()


def draw_norm(rng, is_plain):
    """Return a spelling and its eps; plain ones are those that most models have."""
    spelling = rng.choice(PLAIN if is_plain else [*SPELLINGS])
    return spelling, rng.choice((1e-5, 1e-6, 1e-12) if SPELLINGS[spelling].has_length else (1e-5, 1e-6, 1e-3))
