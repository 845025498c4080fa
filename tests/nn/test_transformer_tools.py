"""Tests of Encoder, Decoder and Transformer with torch's tools: state dicts, copies, functional_call, torch.compile."""

import copy
import io
import pickle

import pytest
import torch

from addnorm.nn import Decoder, Encoder, Transformer
from support.transformer_inputs import (
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


@pytest.mark.parametrize("kind", [Encoder, Decoder, Transformer])
def test_state_dicts_load_and_copies_match(kind):
    module, tensors = make_module(kind, "rezero" if kind is Encoder else "layer_scale"), make_inputs(kind)
    expected = module(*tensors)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = kind(*get_sizes(kind), wiring=module.wiring, dtype=f64)
    assert not torch.equal(other(*tensors), expected)
    other.load_state_dict(torch.load(file))
    for twin in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(*tensors), expected)


def test_functional_call_uses_other_parameters():
    module, (x, memory) = make_module(Decoder), make_inputs(Decoder)
    other = {name: p + 0.1 * torch.randn_like(p) for name, p in module.named_parameters()}
    actual = torch.func.functional_call(module, other, (x, memory))
    module.load_state_dict(other)
    assert torch.equal(actual, module(x, memory))


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
