"""Tests of the proof of each fused call by itself: right calls hold, planted faults are found in every dtype."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from addnorm.fusion import call_proof
from addnorm.fusion.backend import backend
from support.call_faults import all_hold, assert_calls_hold, capture, change_inputs, change_results, fuse_copies
from support.changed_models import Function
from support.families import families
from support.fused_model import QUIET, D, Model, PreNormModel, X
from support.wrong_gradient import scale_gradient

pytestmark = QUIET


# By default each family in one dtype, since the capture takes seconds, and each fault in one family.
CASES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}", marks=() if dtype == first else pytest.mark.slow)
    for name, first in (("bert", torch.float32), ("llama", torch.bfloat16), ("t5", torch.bfloat16))
    for dtype in (torch.float32, torch.bfloat16)
]
OWN = "own"


@functools.cache
def graphs_of(name, dtype):
    """Return the graphs of a small model of transformers, or of our own; they are captured once."""
    own = PreNormModel(), (X.to(dtype),), {}
    model, args, kwargs = own if name == OWN else families()[name].build()
    return capture(model.to(dtype).train(), *args, **kwargs)


def replace_rows(of, factor):
    """Return a change of y in some rows."""
    return lambda y, z, x, s: (torch.where(of(s).all(-1, keepdim=True), y * factor + (factor - 1), y), z)


def write_residual(y, z, x, s):
    x.data.mul_(1.0).add_(1e-3)
    return y, z


# Faults of a call on rows that random numbers seldom have, and of the memory of its results.
RARE_FAULTS = {
    "rows of zeros": change_results(replace_rows(lambda s: s == 0, 1.5)),
    "tiny rows": change_results(replace_rows(lambda s: (s.abs() < 1e-4) & (s != 0), 1.5)),
    "large rows": change_results(replace_rows(lambda s: s.abs().amax(-1, keepdim=True) > 1e3, 1.01)),
    "an odd number of rows": change_results(
        lambda y, z, x, s: (y * 1.01 if y.numel() // y.shape[-1] % 2 else y, z)
    ),
    "NaN to zero": change_results(lambda y, z, x, s: (y.nan_to_num(0.0, 1e30, -1e30), z)),
    "residual written": change_results(write_residual),
    "y in other memory": change_results(lambda y, z, x, s: (y.transpose(0, 1).contiguous().transpose(0, 1), z)),
    "results in one buffer": change_results(
        lambda y, z, x, s: (y, z) if z is None else tuple(torch.stack([y, z]).unbind(0))
    ),
    "no gradient through the sum": change_results(lambda y, z, x, s: (y, None if z is None else z.detach())),
}  # fmt: skip


FAULTS = {
    "residual detached": change_inputs(lambda x, f, *args: (x.detach(), f, *args)),
    "branch detached at one site": change_inputs(lambda x, f, *args: (x, f.detach(), *args), only=1),
    "gradient of the residual times 0.99": change_inputs(lambda x, f, *args: (scale_gradient(x, 0.99), f, *args)),
    "gradient of the branch times 0.99": change_inputs(lambda x, f, *args: (x, scale_gradient(f, 0.99), *args)),
    "gradient of the weight times 1.01": change_inputs(lambda x, f, w, *args: (x, f, scale_gradient(w, 1.01), *args)),
    "weight detached": change_inputs(lambda x, f, w, *args: (x, f, w.detach(), *args), only=1),
    "sum doubled": change_inputs(lambda x, f, *args: (x + f, f, *args), only=1),
    "weight in another order": change_inputs(lambda x, f, w, *args: (x, f, w.flip(0), *args), only=1),
    "results exchanged": change_results(lambda y, z, x, s: (y, z) if z is None else (z, y)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), [*CASES, (OWN, torch.float32), (OWN, torch.bfloat16)])
def test_calls_of_a_model_hold(name, dtype):
    differences, count = fuse_copies(graphs_of(name, dtype))
    assert count >= 4
    assert all_hold(differences)
    assert {difference.name.rpartition(", ")[2] for difference in differences} == {"in float64", str(dtype)[6:]}
    assert len(differences) == 2 * count  # in both precisions


@pytest.mark.parametrize(("fault", "name", "dtype"), [
    pytest.param(fault, *case.values, id=f"{fault}-{case.id}", marks=case.marks if k // 2 == i % 3 else pytest.mark.slow)
    for i, fault in enumerate(FAULTS)
    for k, case in enumerate(CASES)
    if (fault, case.values[0]) != ("results exchanged", "bert")  # no call of a post-LN model returns its sum
])  # fmt: skip
def test_fault_of_a_call_is_found(monkeypatch, fault, name, dtype):
    graphs = graphs_of(name, dtype)
    FAULTS[fault](monkeypatch)
    differences, _ = fuse_copies(graphs)
    assert not all_hold(differences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", RARE_FAULTS)
def test_rare_fault_is_found(monkeypatch, fault, dtype):
    graphs = graphs_of(OWN, dtype)
    RARE_FAULTS[fault](monkeypatch)
    assert not all_hold(fuse_copies(graphs)[0])


def test_equal_calls_are_compared_once(monkeypatch):
    compare, compared = call_proof._Replacement.compare, []
    monkeypatch.setattr(
        call_proof._Replacement, "compare", lambda self, contexts: compared.append(self) or compare(self, contexts)
    )
    model = Model(layers=3)
    model.layers[1].n.eps = 1e-3
    differences, count = fuse_copies(capture(model, X))
    assert count == 6
    assert (
        len(compared) == 2 + 1
    )  # the first call reads the model's input, the others what calls return; one has another eps
    assert len({difference.name.partition(": ")[0] for difference in differences}) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_fault_of_one_dtype_is_found(monkeypatch, dtype, factor):
    """A call that is right in float64 is compared in the model's dtype by its round-off."""
    graphs = graphs_of(OWN, dtype)
    change_inputs(lambda x, f, *args: (scale_gradient(x, factor if x.dtype == dtype else 1.0), f, *args))(monkeypatch)
    differences, _ = fuse_copies(graphs)
    failed = [difference.name for difference in differences if not difference.holds]
    assert failed
    assert all(name.endswith(str(dtype)[6:]) for name in failed)


def test_graph_whose_call_fails_stays_as_it_was(monkeypatch):
    model = PreNormModel()
    with torch.no_grad():
        expected = model(X)
    FAULTS["sum doubled"](monkeypatch)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"a graph is not fused: layers.1.n: .* differs by"):
        result = torch.compile(model, backend=backend)(X)
    assert result.equal(expected)


def test_call_without_float64_is_compared_by_roundings(monkeypatch):
    monkeypatch.setattr(call_proof._Replacement, "_run_exactly", lambda *_: None)
    graphs = capture(Model(), X)
    differences, count = fuse_copies(graphs)
    assert len(differences) == count == 2
    assert all_hold(differences)
    FAULTS["gradient of the branch times 0.99"](monkeypatch)
    assert not any(difference.holds for difference in fuse_copies(graphs)[0])


@pytest.mark.parametrize("d", [1, 2, 3])
def test_few_features_have_tolerances_of_round_off(d):
    model = Function(lambda m, x: F.layer_norm(x + x.sin(), (d,), m.w), d)
    assert_calls_hold(capture(model, torch.randn(2, 7, d)), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_without_eps_has_that_of_its_dtype(dtype):
    model = Model().to(dtype)
    model.layers[0].n = nn.RMSNorm(D, dtype=dtype)
    model.layers[0].m = nn.RMSNorm(D, eps=None, elementwise_affine=False)
    assert_calls_hold(capture(model, X.to(dtype) * 1e-3), 2)
