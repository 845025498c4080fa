"""What a hostile reader tried on `addnorm.fuse`: each of these went wrong once."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import fx, nn
from torch.func import functional_call

import addnorm
from addnorm.fusion import runs
from addnorm.fusion.proof import prove
from support.captured import off
from support.families import families

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
D = 16
X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0))
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """A layer that writes into a cache, if it is given one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.f, self.n = nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x, cache=None):
        x = self.n(x + self.f(x))
        if cache is not None:
            cache["seen"] = x if cache["seen"] is None else torch.cat([cache["seen"], x], 1)
        return x


def encoder():
    torch.manual_seed(1)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 32, batch_first=True), 1).eval()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.n = encoder(), nn.LayerNorm(D)

    def forward(self, x, padding):
        return self.n(x + self.inner(x, src_key_padding_mask=padding))


# --- encoders that return zeros at padding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_a_model_and_a_part_of_it_are_unfused_in_any_order(first):
    model = Outer().eval()
    with torch.no_grad():
        before = model(X, PADDING)
        addnorm.fuse(model.inner, X, src_key_padding_mask=PADDING)
        addnorm.fuse(model, X, PADDING)
        order = [model.inner, model] if first == "inner" else [model, model.inner]
        for one in order:
            addnorm.unfuse(one)
            assert off(before, model(X, PADDING)) < 1e-6
        assert model(X, PADDING).equal(before)
    assert "forward" not in vars(model.inner)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_fused_encoder_is_fused_and_unfused_as_any_other(again):
    model = encoder()
    with torch.no_grad():
        before = model(X, src_key_padding_mask=PADDING)
        addnorm.fuse(model, X)
        other = again(model)
        assert other(X, src_key_padding_mask=PADDING).equal(before)
        addnorm.fuse(other, X)
        assert off(before, other(X, src_key_padding_mask=PADDING)) < 1e-6
        addnorm.unfuse(other)
        assert "forward" not in vars(other)
        assert off(before, model(X, src_key_padding_mask=PADDING)) < 1e-6


# --- what is left behind -----------------------------------------------------------------------------------------------------


def test_a_cache_that_the_model_is_given_is_left_as_it_was_when_times_are_measured():
    cache = {"seen": None}
    done = addnorm.fuse(Model().eval(), X, benchmark=True, cache=cache)
    assert done.benchmark is not None
    assert cache == {"seen": None}


def test_an_interrupt_while_memory_is_put_back_leaves_it_as_it_was(monkeypatch):
    model = nn.Sequential(Model(), nn.Flatten(0, 1), nn.BatchNorm1d(D)).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    equal, calls = runs._equal, []

    def interrupted(a, b):
        calls.append(a)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return equal(a, b)

    monkeypatch.setattr(runs, "_equal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        addnorm.fuse(model, X)
    assert all(t.equal(before[name]) for name, t in model.state_dict().items())


def test_a_fused_model_is_freed_with_all_its_graphs():
    model = Model().eval()
    addnorm.fuse(model, X)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_nothing_is_left_of_a_model_that_was_unfused():
    model, before = Model().eval(), graphs()
    for _ in range(2):
        addnorm.fuse(model, X)
        addnorm.unfuse(model)
    assert graphs() <= before


def graphs():
    """How many graphs there are."""
    gc.collect()
    return sum(issubclass(type(one), fx.GraphModule) for one in gc.get_objects())


# --- proofs of nothing -------------------------------------------------------------------------------------------------------


class Silent(Model):
    def forward(self, x):
        super().forward(x)


@pytest.mark.parametrize(
    ("model", "x"),
    [(Model, X * torch.nan), (Model, X / 0), (Model, X[:0]), (Silent, X)],
    ids=["nan", "inf", "empty", "none"],
)
def test_where_there_is_no_number_to_compare_nothing_is_fused(model, x):
    model = model().eval()
    with pytest.raises(ValueError, match="no finite number for these inputs, so that nothing can be proven"):
        addnorm.fuse(model, x)
    assert model._compiled_call_impl is None


def test_outputs_that_are_zero_are_compared():
    model = Model().eval()
    nn.init.zeros_(model.n.weight)
    assert addnorm.fuse(model, X).proof.holds


# --- models of which eager itself computes little ------------------------------------------------------------------------------


def saturated(name, seed):
    """A model with features that are thirty times the others: its attention is all on one token, and that has no gradient."""
    torch.manual_seed(seed)
    model, args, kwargs = families()[name].build()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
            if p.dim() == 1:
                p[p.numel() // 3] *= 30
    return model.eval(), args, kwargs


@pytest.mark.parametrize(("name", "seed"), [("roberta", 16), ("qwen3", 21)])
def test_gradients_that_are_lost_in_eager_too_prove_nothing_against_the_fused_model(name, seed):
    model, args, kwargs = saturated(name, seed)
    proof = addnorm.fuse(model, *args, **kwargs).proof
    assert proof.oracle == "float64"
    assert proof.holds


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_what_is_wrong_is_found_in_them_all_the_same(factor):
    model, args, kwargs = saturated("roberta", 16)
    norm = "encoder.layer.0.output.LayerNorm.weight"

    def wrong(*args, **kwargs):
        weights = {name: p * factor if name == norm else p for name, p in model.named_parameters()}
        return functional_call(model, weights, args, kwargs)

    assert not prove(model, model, wrong, args, kwargs).holds
