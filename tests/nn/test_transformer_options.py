"""Tests of Encoder, Decoder and Transformer: dropout, stochastic depth, checkpoints, a float32 stream, norms, compilation."""

import inspect

import pytest
import torch

import addnorm
from addnorm.nn import Decoder, Encoder, Transformer
from support.oracle import relative
from support.transformer_inputs import (
    HEADS,
    D,
    M,
    N,
    assert_close,
    compute_gradients,
    f64,
    get_sizes,
    make_inputs,
    make_module,
    padding_mask,
)


def test_stochastic_depth_drops_samples_in_either_layout():
    for batch_first in (True, False):
        encoder = make_module(Encoder, "pre_ln", stochastic_depth=1.0, final_norm=False, batch_first=batch_first)
        (x,) = make_inputs(Encoder, batch=64)
        x = x if batch_first else x.transpose(0, 1)
        last = encoder.stack.connections[-1]
        assert last.stochastic_depth == 1.0
        for i, connection in enumerate(encoder.stack.connections):
            connection.stochastic_depth = 0.5 if i == 0 else 1.0
        changed = encoder(x).ne(x).flatten(2).any(2)  # (batch, tokens) or (tokens, batch)
        samples = changed if batch_first else changed.T
        assert torch.equal(samples, samples[:, :1].expand_as(samples))
        assert 16 < samples[:, 0].sum() < 48


@pytest.mark.parametrize("kind", [Encoder, Decoder, Transformer])
def test_checkpointing_keeps_numbers_with_masks_and_dropout(kind):
    module = make_module(kind, dropout=0.2, attention_dropout=0.1, stochastic_depth=0.3)
    other = kind(*get_sizes(kind), dtype=f64, dropout=0.2, attention_dropout=0.1, stochastic_depth=0.3, checkpoint=True)
    other.load_state_dict(module.state_dict())
    keep = {"key_mask" if kind is not Transformer else "source_key_mask": padding_mask(M if kind is Transformer else N)}
    tensors = make_inputs(kind)
    a, b = (compute_gradients(lambda *t, m=m: m(*t, **keep), m.parameters(), tensors) for m in (module, other))
    assert all(torch.equal(first, second) for first, second in zip(a, b, strict=True))


def test_float32_stream_is_more_accurate_than_bfloat16():
    exact = make_module(Encoder)
    (x,) = make_inputs(Encoder, torch.bfloat16)
    expected, errors = exact(x.double()), []
    for stream in (None, torch.float32):
        encoder = Encoder(*get_sizes(Encoder), dtype=torch.bfloat16, residual_dtype=stream)
        encoder.load_state_dict(exact.state_dict())
        y = encoder(x)
        assert y.dtype == torch.bfloat16
        errors.append(relative(y, expected))
    assert errors[1] < errors[0] < 0.05


def test_norm_kind_bias_eps_and_dropout_are_passed_on():
    encoder = Encoder(1, D, HEADS, norm="rms", eps=0.5, bias=False, activation="swiglu", final_norm=False)
    assert [name for name, _ in encoder.named_parameters() if "bias" in name] == []
    assert {m.eps for m in encoder.modules() if isinstance(m, addnorm.RMSNorm)} == {0.5}
    assert encoder.stack.norm_final is None
    for connection in Encoder(1, D, HEADS, dropout=0.3).stack.connections:
        assert (connection.dropout, connection.sublayer.dropout) == (0.3, 0.3)


def test_signatures_of_the_three_modules_agree():
    sizes = {"num_layers", "num_encoder_layers", "num_decoder_layers", "cross_attention", "causal"}
    options = [
        {name: (p.kind, p.default) for name, p in inspect.signature(kind).parameters.items() if name not in sizes}
        for kind in (Encoder, Decoder, Transformer)
    ]
    assert options[0] == options[1] == options[2]
    assert inspect.Parameter.VAR_KEYWORD not in {kind for kind, _ in options[0].values()}


# torch.compile uses deprecated parts of setuptools and distutils, which warn.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "wiring", "backend"),
    [
        (Encoder, "pre_ln", "aot_eager"),
        pytest.param(Encoder, "pre_ln", "inductor", marks=pytest.mark.slow),
        pytest.param(Decoder, "resi_dual", "aot_eager", marks=pytest.mark.slow),
        pytest.param(Encoder, "post_ln", "aot_eager", marks=pytest.mark.slow),
        pytest.param(Transformer, "deepnorm", "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_transformer_compiles_into_one_graph(kind, wiring, backend):
    torch._dynamo.reset()
    module, tensors = make_module(kind, wiring), make_inputs(kind)
    keep = padding_mask(M if kind is Transformer else N)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    name = "source_key_mask" if kind is Transformer else "key_mask"
    expected = compute_gradients(lambda *t: module(*t, **{name: keep}), module.parameters(), tensors)
    assert_close(compute_gradients(lambda *t: compiled(*t, **{name: keep}), module.parameters(), tensors), expected)
    if backend != "inductor":
        with torch.no_grad():
            torch.testing.assert_close(compiled(*tensors), module(*tensors), rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()
