"""Tests of from_torch: settings that the copy keeps."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from addnorm.nn import from_torch
from support.torch_transformers import BATCH, SOURCE, D, make_encoder, make_transformer


def test_activation_with_parameters_is_copied_for_each_layer():
    theirs = make_encoder(activation=nn.PReLU(dtype=torch.float64), dtype=torch.float64)
    with torch.no_grad():
        for layer in theirs.layers:
            layer.activation.weight.uniform_(-1, 1)
    ours = from_torch(theirs)
    x = torch.randn(BATCH, SOURCE, D, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    for layer, (_, feed_forward) in zip(theirs.layers, ours.stack._layers(), strict=True):
        assert torch.equal(feed_forward.sublayer.activation.weight, layer.activation.weight)
        assert feed_forward.sublayer.activation is not layer.activation


def test_each_norm_keeps_its_eps():
    theirs = make_encoder(dtype=torch.float64)
    for i, norm in enumerate(m for m in theirs.modules() if isinstance(m, nn.LayerNorm)):
        norm.eps = 10.0 ** -(i + 1)
    x = torch.randn(BATCH, SOURCE, D, dtype=torch.float64)
    torch.testing.assert_close(from_torch(theirs)(x), theirs(x), rtol=1e-12, atol=1e-12)


def test_dropout_modes_and_flags_are_kept():
    theirs = make_transformer()
    for i, module in enumerate(m for m in theirs.modules() if isinstance(m, nn.Dropout | nn.MultiheadAttention)):
        if isinstance(module, nn.Dropout):
            module.p = (i + 1) / 100
        else:
            module.dropout = (i + 1) / 100
    theirs.decoder.layers[1].dropout2.eval()
    theirs.encoder.layers[0].self_attn.eval()
    theirs.encoder.layers[0].linear1.weight.requires_grad_(False)
    theirs.decoder.layers[0].multihead_attn.in_proj_bias.requires_grad_(False)
    ours = from_torch(theirs)
    layers = zip(
        [*theirs.encoder.layers, *theirs.decoder.layers],
        [*ours.encoder.stack._layers(), *ours.decoder.stack._layers()],
        strict=True,
    )
    for layer, connections in layers:
        *attentions, feed_forward = connections
        for i, (name, connection) in enumerate(zip(("self_attn", "multihead_attn"), attentions, strict=False)):
            assert connection.sublayer.dropout == getattr(layer, name).dropout
            assert connection.sublayer.training is getattr(layer, name).training
            assert connection.dropout == getattr(layer, f"dropout{i + 1}").p
            assert connection.training is getattr(layer, f"dropout{i + 1}").training
        assert feed_forward.sublayer.dropout == layer.dropout.p
        assert feed_forward.dropout == getattr(layer, f"dropout{len(connections)}").p
    assert not ours.decoder.stack.connections[4].training
    frozen = {name for name, p in ours.named_parameters() if not p.requires_grad}
    first = "encoder.stack.layers.0.connections.1.sublayer.up.weight"
    assert frozen == {
        first,
        *(f"decoder.stack.layers.0.connections.1.sublayer.{name}.bias" for name in ("q_proj", "kv_proj")),
    }
    assert not from_torch(theirs.eval()).decoder.training


def test_copy_keeps_dtype_and_random_state():
    theirs = make_encoder(dtype=torch.bfloat16)
    before = copy.deepcopy(theirs.state_dict())
    state = torch.get_rng_state()
    ours = from_torch(theirs)
    assert torch.equal(torch.get_rng_state(), state)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in ours.parameters()} == {"cpu"}
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    assert all(torch.equal(value, before[name]) for name, value in theirs.state_dict().items())


def test_activation_may_be_any_function():
    theirs = make_encoder(activation=F.silu, dtype=torch.float64)
    ours = from_torch(theirs)
    assert "activation=silu" in repr(ours)
    assert "activation=relu" in repr(from_torch(make_encoder()))
