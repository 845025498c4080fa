"""Modules: the norms alone, Add & Norm, stacks of any residual wiring, and the transformer on them."""

from addnorm import wirings
from addnorm.nn.add_norm import AddNorm
from addnorm.nn.attention import CrossAttention, SelfAttention
from addnorm.nn.cache import KeyValueCache
from addnorm.nn.connection import SublayerConnection
from addnorm.nn.feed_forward import FeedForward
from addnorm.nn.from_torch import from_torch
from addnorm.nn.layer import ResidualLayer
from addnorm.nn.norm import LayerNorm, RMSNorm
from addnorm.nn.stack import ResidualStack
from addnorm.nn.transformer import Decoder, Encoder, Transformer, block
from addnorm.wirings.spec import Learned, Place, Row, Wiring

__all__ = [
    "AddNorm", "CrossAttention", "Decoder", "Encoder", "FeedForward", "KeyValueCache", "LayerNorm", "Learned", "Place", "RMSNorm",
    "ResidualLayer", "ResidualStack", "Row", "SelfAttention", "SublayerConnection", "Transformer", "Wiring",
    "block", "from_torch", "wirings",
]  # fmt: skip
