"""Tests of from_torch: modules that it cannot convert."""

import pytest
from torch import nn

from addnorm.nn import from_torch
from support.refusals import assert_refused
from support.torch_transformers import HEADS, SOURCE, D, make_decoder, make_encoder, make_transformer


class Subclass(nn.TransformerEncoderLayer):
    pass


class ScaledNorm(nn.LayerNorm):
    pass


def spoiled(make, path, value):
    """Return a module with another attribute."""
    module = make()
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, value)
    return module


def changed(make, change):
    module = make()
    change(module)
    return module


REFUSED = {
    "TypeError: module is torch.nn.modules.linear.Linear, expected torch.nn.Transformer or": lambda: nn.Linear(2, 2),
    "TypeError: module is builtins.NoneType, expected torch.nn.Transformer": lambda: None,
    ".Subclass, expected torch.nn.TransformerEncoderLayer itself": lambda: nn.TransformerEncoder(
        Subclass(D, HEADS, batch_first=True), 1, enable_nested_tensor=False
    ),
    ".RMSNorm, expected torch.nn.LayerNorm itself: what another class computes is not known": lambda: spoiled(
        make_encoder, "layers.1.norm2", nn.RMSNorm(D)
    ),
    ".ScaledNorm, expected": lambda: spoiled(make_encoder, "norm", ScaledNorm(D)),
    "ValueError: module.norm is over (7, 24), expected (24,)": lambda: spoiled(make_encoder, "norm", nn.LayerNorm((SOURCE, D))),
    "TypeError: module.encoder is torch.nn.modules.linear.Identity, expected torch.nn.TransformerEncoder": lambda: spoiled(
        make_transformer, "encoder", nn.Identity()
    ),
    "TypeError: module.layers.0.dropout1 is torch.nn.modules.dropout.AlphaDropout": lambda: spoiled(
        make_encoder, "layers.0.dropout1", nn.AlphaDropout()
    ),
    ".ParametrizedLinear, expected torch.nn.Linear": lambda: changed(
        make_encoder, lambda m: nn.utils.parametrizations.weight_norm(m.layers[0].linear1)
    ),
    "ValueError: module.layers.0.self_attn has bias_k and bias_v, expected none": lambda: spoiled(
        make_encoder, "layers.0.self_attn", nn.MultiheadAttention(D, HEADS, add_bias_kv=True, batch_first=True)
    ),
    "self_attn has add_zero_attn=True, expected False": lambda: spoiled(make_encoder, "layers.0.self_attn.add_zero_attn", True),
    "module.layers.1.multihead_attn has kdim=5 and vdim=24, expected 24": lambda: spoiled(
        make_decoder, "layers.1.multihead_attn", nn.MultiheadAttention(D, HEADS, kdim=5, batch_first=True)
    ),
    "ValueError: module.layers.1 has norm_first=True, expected False as module.layers.0 has": lambda: spoiled(
        make_encoder, "layers.1.norm_first", True
    ),
    "module.layers.1.linear1 has out_features=8, expected 40 as module.layers.0.linear1 has": lambda: spoiled(
        make_encoder, "layers.1", nn.TransformerEncoderLayer(D, HEADS, 8, batch_first=True)
    ),
    "multihead_attn has num_heads=4, expected 3 as": lambda: spoiled(make_decoder, "layers.0.multihead_attn.num_heads", 4),
    "module.decoder.layers.0 has norm_first=False, expected True as module.encoder.layers.0": lambda: spoiled(
        make_transformer, "encoder", make_encoder(norm_first=True)
    ),
    "ValueError: module.layers is empty, expected at least one": lambda: spoiled(make_encoder, "layers", nn.ModuleList()),
    "ValueError: module.layers.1.linear2 has hooks, expected none": lambda: changed(make_encoder, lambda m: m.layers[1].linear2.register_forward_hook(print)),
    "ValueError: module.layers.1 has a forward of its own": lambda: spoiled(make_encoder, "layers.1.forward", lambda x: x),
    "module.layers.1 has a _sa_block of its own": lambda: spoiled(make_encoder, "layers.1._sa_block", lambda *args: args[0]),
    "module.layers.1.linear1.weight is module.layers.0.linear1.weight too, expected one of its own": lambda: changed(
        make_encoder, lambda m: setattr(m.layers[1].linear1, "weight", m.layers[0].linear1.weight)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "method"), [(nn.LayerNorm, "forward"), (nn.TransformerEncoderLayer, "_ff_block")])
def test_a_method_that_was_replaced_in_a_class_raises(kind, method, monkeypatch):
    module = make_encoder()
    monkeypatch.setattr(kind, method, lambda module, x: x)
    with pytest.raises(ValueError, match=f"has another {method} than its class had at first"):
        from_torch(module)


@pytest.mark.parametrize("sentence", REFUSED)
def test_unsupported_modules_raise(sentence):
    module = REFUSED[sentence]()
    assert_refused(sentence, lambda: from_torch(module))
