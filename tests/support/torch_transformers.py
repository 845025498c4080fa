"""Small transformers of torch with random parameters, for the tests of `from_torch`."""

import warnings

import torch
from torch import nn

D, HEADS, D_FF, LAYERS = 24, 3, 40, 2
BATCH, SOURCE, TARGET = 3, 7, 5


def make_layer(kind, **options):
    options = {"dropout": 0.0, "batch_first": True, **options}
    return kind(D, HEADS, D_FF, **options)


def make_encoder(norm=True, n=LAYERS, **options):
    final = nn.LayerNorm(D, dtype=options.get("dtype"), bias=options.get("bias", True)) if norm else None
    # Nested tensors are tested separately; elsewhere torch would only warn that it does not use them.
    return randomize(
        nn.TransformerEncoder(make_layer(nn.TransformerEncoderLayer, **options), n, final, enable_nested_tensor=False)
    )


def make_decoder(norm=True, n=LAYERS, **options):
    final = nn.LayerNorm(D, dtype=options.get("dtype"), bias=options.get("bias", True)) if norm else None
    return randomize(nn.TransformerDecoder(make_layer(nn.TransformerDecoderLayer, **options), n, final))


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
