"""Small transformers of torch with random parameters, for the tests of `from_torch`."""

import warnings

import torch
from torch import nn

D, HEADS, D_FF, LAYERS = 24, 3, 40, 2
BATCH, SOURCE, TARGET = 3, 7, 5


def make_layer(kind, **options):
    options = {"dropout": 0.0, "batch_first": True, **options}
    return kind(D, HEADS, D_FF, **options)


def make_final_norm(is_wanted, dtype=None, bias=True, **others):
    return nn.LayerNorm(D, dtype=dtype, bias=bias) if is_wanted else None


def make_encoder(norm=True, **options):
    # Nested tensors are tested separately; elsewhere torch would only warn that it does not use them.
    layer = make_layer(nn.TransformerEncoderLayer, **options)
    return randomize(nn.TransformerEncoder(layer, LAYERS, make_final_norm(norm, **options), enable_nested_tensor=False))


def make_decoder(norm=True, **options):
    layer = make_layer(nn.TransformerDecoderLayer, **options)
    return randomize(nn.TransformerDecoder(layer, LAYERS, make_final_norm(norm, **options)))


def make_transformer(**options):
    options = {"dropout": 0.0, "batch_first": True, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        return randomize(nn.Transformer(D, HEADS, LAYERS, LAYERS, D_FF, **options))


def randomize(module, size=0.1):
    """Move every parameter: initially layers are clones, biases zeros and norms ones, which would hide errors."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * size)
    return module
