"""Modules that compute a wiring's coefficients, from parameters alone or from the streams of each token.

`base.py` has their base class, `hyper.py` hyper-connections and related wirings, whose n streams are one tensor, `sources.py`
reads of earlier states, `gated.py` gated residuals, `scales.py` scales of the two terms of an add.
"""

from addnorm.wirings.coefficients.base import CoefficientModule, Coefficients, Notation
from addnorm.wirings.coefficients.gated import GatedRead
from addnorm.wirings.coefficients.hyper import (
    HyperConnection,
    IndependentConnection,
    ManifoldConnection,
    SigmoidRead,
)
from addnorm.wirings.coefficients.scales import GatedMix, Interpolation, ResidualScaling
from addnorm.wirings.coefficients.sources import DynamicSources, SourceAttention

__all__ = [
    "CoefficientModule", "Coefficients", "DynamicSources", "GatedMix", "GatedRead", "HyperConnection", "IndependentConnection",
    "Interpolation", "ManifoldConnection", "Notation", "ResidualScaling", "SigmoidRead", "SourceAttention",
]  # fmt: skip
