"""Modules: the norms alone, Add & Norm, and stacks of any residual wiring."""

from addnorm.nn import wirings
from addnorm.nn.add_norm import AddNorm
from addnorm.nn.connection import SublayerConnection
from addnorm.nn.norm import LayerNorm, RMSNorm
from addnorm.nn.stack import ResidualStack
from addnorm.nn.wiring import Learned, Place, Row, Wiring

__all__ = [
    "AddNorm", "LayerNorm", "Learned", "Place", "RMSNorm", "ResidualStack", "Row", "SublayerConnection", "Wiring", "wirings",
]  # fmt: skip
