"""Tests of from_torch: outputs, gradients and settings of the converted transformers, and modules that it cannot convert."""

import copy

import pytest
import torch
from torch import nn

from addnorm.nn import Decoder, Encoder, from_torch
from support.equality import assert_same
from support.pairwise import product
from support.refusals import assert_refused
from support.torch_transformers import (
    BATCH,
    HEADS,
    SOURCE,
    TARGET,
    D,
    make_decoder,
    make_encoder,
    make_layer,
    make_transformer,
    randomize,
)
from support.transformer_inputs import assert_close, compute_gradients

f64 = torch.float64
LIMIT = {f64: 1e-12, torch.float32: 2e-6}  # 1e-6 is exceeded on some CPUs, by 3 %
INF = float("inf")


def padding(n):
    """Return a padding mask in torch's convention, different for each sample."""
    return torch.arange(n) >= torch.tensor([n, n - 2, n - 3]).unsqueeze(1)


def additive(bool_mask, dtype):
    return torch.zeros(bool_mask.shape, dtype=dtype).masked_fill_(bool_mask, -INF)


def later(n):
    """Return torch's causal mask: True where a key is later than the query."""
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def masks(kind, n, dtype):
    """Return the masks of a kind: torch's attn_mask and key_padding_mask, and ours."""
    mask = torch.randn(n, n, dtype=dtype) if "float" in kind else later(n) if "causal" in kind else None
    pad = padding(n) if "padding" in kind else None
    if kind == "float and padding":
        pad = additive(pad, dtype)
    return (mask, pad), tuple(~m if m is not None and m.dtype is torch.bool else m for m in (mask, pad))


KINDS = ("none", "causal", "float", "padding", "causal and padding", "float and padding")


def compare(theirs, inputs, given=(), ours_given=(), limit=1e-12):
    """Compare a module and its conversion: outputs and the gradients of all inputs and parameters for one random cotangent."""
    ours, n = from_torch(theirs), len(inputs)
    y, *wanted = compute_gradients(lambda *t: theirs(*t, *given), theirs.parameters(), inputs)
    gradients = copy.deepcopy(theirs)  # a module whose parameters are the gradients
    for own, gradient in zip(gradients.parameters(), wanted[n:], strict=True):
        own.data = gradient
    expected = [y, *wanted[:n], *from_torch(gradients).parameters()]
    actual = compute_gradients(lambda *t: ours(*t, *ours_given), ours.parameters(), inputs)
    assert_close(actual, expected, limit)


@pytest.mark.parametrize(
    ("make", "kind", "norm_first", "dtype"),
    product([make_encoder, make_decoder], KINDS, [True, False], [f64, torch.float32]),
)
def test_converted_stack_matches_torch_with_every_gradient(make, kind, norm_first, dtype):
    is_encoder = make is make_encoder
    n = SOURCE if is_encoder else TARGET
    (mask, pad), (our_mask, our_pad) = masks(kind, n, dtype)
    inputs, given, ours_given = [torch.randn(BATCH, n, D, dtype=dtype)], (mask, pad), (our_mask, our_pad)
    if not is_encoder:
        inputs.append(torch.randn(BATCH, SOURCE, D, dtype=dtype))
        (_, memory_pad), (_, our_memory_pad) = masks("padding", SOURCE, dtype)
        memory_mask = torch.randn(TARGET, SOURCE, dtype=dtype) if kind == "float" else None
        memory_pad = additive(memory_pad, dtype) if kind == "float" else memory_pad
        given, ours_given = (mask, memory_mask, pad, memory_pad), (our_mask, our_pad, memory_mask, our_memory_pad)
    activation = "gelu" if ("padding" in kind) == is_encoder else "relu"
    theirs = make(norm_first=norm_first, dtype=dtype, activation=activation)
    compare(theirs, inputs, given, ours_given, LIMIT[dtype])


def give_own_activations(module):
    with torch.no_grad():
        for layer in module.layers:
            layer.activation.weight.uniform_(-1, 1)


def give_own_eps(module):
    for i, norm in enumerate(m for m in module.modules() if isinstance(m, nn.LayerNorm)):
        norm.eps = 10.0 ** -(i + 1)


OPTIONS = [
    {"norm": False}, {"bias": False}, {"layer_norm_eps": 0.1}, {"activation": nn.functional.silu}, {"activation": nn.GELU("tanh")},
    {"batch_first": False}, {"activation": nn.PReLU(dtype=f64), "change": give_own_activations}, {"change": give_own_eps},
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "make", "norm_first"), product(OPTIONS, [make_encoder, make_decoder], [True, False])
)
def test_options_are_kept(options, make, norm_first):
    change, options = options.get("change"), {name: value for name, value in options.items() if name != "change"}
    make = make_encoder if change is give_own_activations else make  # torch's decoder layers lose theirs in a copy
    theirs = make(norm_first=norm_first, dtype=f64, **options).double()
    if change:
        change(theirs)
    assert type(from_torch(theirs)) is (Encoder if make is make_encoder else Decoder)
    shape = (BATCH, TARGET, D) if options.get("batch_first", True) else (TARGET, BATCH, D)
    inputs = [torch.randn(shape, dtype=f64) for _ in range(1 if make is make_encoder else 2)]
    compare(theirs, inputs)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre_ln", "post_ln"])
def test_single_layer_becomes_stack_without_final_norm(norm_first):
    for kind, own, count in ((nn.TransformerEncoderLayer, Encoder, 1), (nn.TransformerDecoderLayer, Decoder, 2)):
        layer = randomize(make_layer(kind, norm_first=norm_first, dtype=f64))
        ours, inputs = from_torch(layer), torch.randn(count, BATCH, TARGET, D, dtype=f64)
        assert (type(ours), ours.stack.norm_final) == (own, None)
        assert_close([ours(*inputs)], [layer(*inputs)])


@pytest.mark.parametrize("make", [make_encoder, make_decoder, make_transformer])
def test_causal_applies_to_the_decoder(make):
    theirs = make(dtype=f64)
    ours = from_torch(theirs, causal=True)
    source, target = (torch.randn(BATCH, n, D, dtype=f64) for n in (SOURCE, TARGET))
    inputs = {make_encoder: (target,), make_decoder: (target, source), make_transformer: (source, target)}[make]
    mask = {"mask" if make is make_encoder else "tgt_mask": later(TARGET)}
    assert_close([ours(*inputs)], [theirs(*inputs, **mask)])
    assert isinstance(ours, Decoder) or make is make_transformer


# Settings that the copy keeps


def test_dropout_modes_and_flags_are_kept():
    theirs = make_transformer()
    for i, module in enumerate(m for m in theirs.modules() if isinstance(m, nn.Dropout | nn.MultiheadAttention)):
        setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", (i + 1) / 100)
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
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    assert_same(theirs.state_dict(), before)


# Modules that cannot be converted


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
    ".ScaledNorm, expected torch.nn.LayerNorm itself: what another class computes is not known": lambda: spoiled(
        make_encoder, "norm", ScaledNorm(D)
    ),
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
    assert_refused(f"has another {method} than its class had at first", lambda: from_torch(module))


@pytest.mark.parametrize("sentence", REFUSED)
def test_unsupported_modules_raise(sentence):
    module = REFUSED[sentence]()
    assert_refused(sentence, lambda: from_torch(module))
