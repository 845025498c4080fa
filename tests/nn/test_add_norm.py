"""Tests of AddNorm, LayerNorm and RMSNorm: parameters, options and calls, and torch's modules with this library's arithmetic."""

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close

import addnorm
from addnorm import AddNorm
from support.refusals import assert_refused, make_test
from support.torch_transformers import randomize
from support.transformer_inputs import compute_gradients

f64 = torch.float64
shapes = pytest.mark.parametrize("shape", [(6,), (3, 6)], ids=str)


def inputs(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype), torch.randn(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"bias": False}, ["weight"]),
        ({"elementwise_affine": False}, []),
        ({"norm": "rms", "bias": True, "layer_scale": 0.1}, ["weight", "bias", "layer_scale"]),
    ],
)
def test_parameters_follow_the_options(options, names):
    assert [name for name, _ in AddNorm(5, **options).named_parameters()] == names


@shapes
@pytest.mark.parametrize(("norm", "theirs"), [("layer", torch.nn.LayerNorm), ("rms", torch.nn.RMSNorm)])
def test_scales_and_loaded_norm_match_torch(norm, theirs, shape):
    residual, branch = inputs(4, 3, 6, dtype=f64)
    reference = randomize(theirs(shape, dtype=f64), size=1.0)
    options = {"residual_scale": 3.0, "layer_scale": 0.125, "residual_dtype": f64}
    add_norm = AddNorm(shape, norm, **options, dtype=f64)
    assert add_norm.float()(residual.float(), branch.float(), return_residual=True)[1].dtype == f64
    assert add_norm.double().load_state_dict(reference.state_dict(), strict=False) == (["layer_scale"], [])
    y, stream = add_norm(residual, branch, return_residual=True)
    assert_close(stream, 3.0 * residual + 0.125 * branch)
    assert_close(y, reference(stream), rtol=1e-12, atol=1e-12)
    assert torch.equal(add_norm(residual, branch), y)


def test_dropout_is_active_in_training_only():
    add_norm = AddNorm(64, dropout=0.5)
    residual, branch = inputs(8, 64)
    first, second = (add_norm(residual, branch, return_residual=True)[1] for _ in range(2))
    assert not torch.equal(first, second)
    dropped = first == residual
    assert_close(first[~dropped], (residual + 2 * branch)[~dropped])
    assert torch.equal(add_norm.eval()(residual, branch, return_residual=True)[1], residual + branch)


def test_repr_has_the_settings():
    assert repr(AddNorm(8)) == "AddNorm((8,), norm='layer', eps=1e-05)"
    options = {"dropout": 0.1, "residual_scale": 2.0, "layer_scale": 0.1, "residual_dtype": torch.float32}
    shown = ", ".join(f"{name}={value}" for name, value in options.items())
    assert repr(AddNorm(8, "rms", **options)) == f"AddNorm((8,), norm='rms', eps=None, {shown})"


REFUSED = {
    "ValueError: norm is 'batch', expected one of 'layer', 'rms'": lambda: AddNorm(8, "batch"),
    "ValueError: dropout is 1.5, expected": lambda: AddNorm(8, dropout=1.5),
    "TypeError: normalized_shape is '12', expected a whole number or a sequence": lambda: AddNorm("12"),
}


test_wrong_options_raise = make_test(REFUSED)


@pytest.mark.parametrize(
    "module", [addnorm.LayerNorm(16, elementwise_affine=False), addnorm.RMSNorm(16, elementwise_affine=False)]
)
def test_norm_without_parameters_keeps_its_width(module):
    sentence = "ValueError: normalized_shape is (16,), expected the last dimensions of"
    assert_refused(f"{sentence} x (3, 8)", lambda: module(torch.randn(3, 8)))
    assert_refused(sentence, lambda: AddNorm(16, elementwise_affine=False)(*inputs(3, 8)))


# The norms alone

PAIRS = [
    (addnorm.LayerNorm, torch.nn.LayerNorm, {}),
    (addnorm.LayerNorm, torch.nn.LayerNorm, {"bias": False}),
    (addnorm.LayerNorm, torch.nn.LayerNorm, {"elementwise_affine": False, "eps": 1e-3}),
    (addnorm.RMSNorm, torch.nn.RMSNorm, {}),
    (addnorm.RMSNorm, torch.nn.RMSNorm, {"eps": 1e-3}),
    (addnorm.RMSNorm, torch.nn.RMSNorm, {"elementwise_affine": False}),
]


@shapes
@pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS)
def test_norm_with_torch_state_matches_torch(ours, theirs, options, shape):
    reference = randomize(theirs(shape, dtype=f64, **options), size=1.0)
    norm = ours(shape, dtype=f64, **options)
    assert norm.load_state_dict(reference.state_dict()).missing_keys == []
    assert isinstance(norm, theirs)
    assert repr(norm) == repr(reference)
    x = torch.randn(2, 5, *shape, dtype=f64)
    modules = norm, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), reference
    *results, expected = (compute_gradients(module, module.parameters(), [x]) for module in modules)
    for result in results:
        assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [addnorm.LayerNorm, addnorm.RMSNorm, addnorm.AddNorm])
def test_norm_is_a_leaf_of_symbolic_traces(make):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = make(8)

        def forward(self, x):
            branch = x.sin()
            return self.norm(x, branch) if make is addnorm.AddNorm else self.norm(branch)

    model, x = Model(), torch.randn(3, 8)
    graph = torch.fx.symbolic_trace(model)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["norm"]
    assert graph(x).equal(model(x))
