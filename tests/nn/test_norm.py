"""Tests of LayerNorm and RMSNorm: torch's modules with this library's arithmetic."""

import copy
import pickle

import pytest
import torch

import addnorm

PAIRS = [
    (addnorm.LayerNorm, torch.nn.LayerNorm, {}),
    (addnorm.LayerNorm, torch.nn.LayerNorm, {"bias": False}),
    (addnorm.LayerNorm, torch.nn.LayerNorm, {"elementwise_affine": False, "eps": 1e-3}),
    (addnorm.RMSNorm, torch.nn.RMSNorm, {}),
    (addnorm.RMSNorm, torch.nn.RMSNorm, {"eps": 1e-3}),
    (addnorm.RMSNorm, torch.nn.RMSNorm, {"elementwise_affine": False}),
]


@pytest.mark.parametrize("shape", [(6,), (3, 6)], ids=str)
@pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS)
def test_norm_with_torch_state_matches_torch(ours, theirs, options, shape):
    reference = theirs(shape, dtype=torch.float64, **options)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter)
    norm = ours(shape, dtype=torch.float64, **options)
    assert norm.load_state_dict(reference.state_dict()).missing_keys == []
    x = torch.randn(2, 5, *shape, dtype=torch.float64)
    cotangent = torch.randn_like(x)
    results = []
    for module in (norm, reference):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        results.append((y, *torch.autograd.grad(y, (leaf, *module.parameters()), cotangent)))
    for mine, torchs in zip(*results, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS)
def test_norm_is_torch_subclass_and_survives_copy(ours, theirs, options):
    norm = ours(6, **options)
    assert isinstance(norm, theirs)
    assert repr(norm) == repr(theirs(6, **options))
    x = torch.randn(4, 6)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert torch.equal(twin(x), norm(x))


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
