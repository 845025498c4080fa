"""Modules: the norms alone, and Add & Norm."""

from addnorm.nn.add_norm import AddNorm
from addnorm.nn.norm import LayerNorm, RMSNorm

__all__ = ["AddNorm", "LayerNorm", "RMSNorm"]
