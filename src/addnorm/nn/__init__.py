"""Modules: the norms alone, Add & Norm, and stacks of any residual wiring."""

from addnorm.nn import wirings
from addnorm.nn.add_norm import AddNorm
from addnorm.nn.norm import LayerNorm, RMSNorm
from addnorm.nn.wiring import Learned, Place, Row, Wiring

__all__ = ["AddNorm", "LayerNorm", "Learned", "Place", "RMSNorm", "Row", "Wiring", "wirings"]
