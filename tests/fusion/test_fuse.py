"""Tests of `addnorm.fuse`, which changes only how a model is computed, and of `addnorm.unfuse`, which restores the model."""

import copy
import gc
import inspect
import io
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import addnorm
from fusion.test_encoder import encoder
from support.fused_model import QUIET, Model, X, count_calls, fuse
from support.graph_capture import relative_difference

pytestmark = QUIET


def test_fuse_and_unfuse_change_only_the_computation():
    model = Model(layers=2).eval()
    attributes, tensors = {*vars(model)}, model.state_dict(keep_vars=True)
    values = [t.clone() for t in tensors.values()]

    def assert_state_is_unchanged():
        now = model.state_dict(keep_vars=True)
        assert [*now] == [*tensors]
        assert all(t is tensors[name] and t.equal(value) for (name, t), value in zip(now.items(), values, strict=True))

    with torch.no_grad():
        before = model(X)
        fusion = fuse(model, X)
        assert count_calls(model, X) == len(fusion.fused) == 4
        assert relative_difference(before, model(X)) < 1e-6
        assert type(model) is Model
        assert_state_is_unchanged()
        assert all(p.grad is None for p in model.parameters())
        assert addnorm.unfuse(model) is model
        assert model(X).equal(before)
    assert count_calls(model, X) == 0
    assert {*vars(model)} == attributes
    assert_state_is_unchanged()
    fuse(model, X)  # and again
    addnorm.unfuse(model)


def test_fused_model_follows_new_weights_and_dtypes():
    model, other = Model().eval(), Model().eval()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
        fuse(model, X)
        model.load_state_dict(other.state_dict())
        assert relative_difference(other(X), model(X)) < 1e-6
        model.bfloat16(), other.bfloat16()
        y, expected = other(X.bfloat16()), model(X.bfloat16())
        assert y.equal(expected) or relative_difference(y, expected) < 1e-2
        assert count_calls(model, X.bfloat16()) == 2


def test_copies_of_a_fused_model_are_not_fused():
    model = Model().eval()
    fuse(model, X)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert count_calls(other, X) == 0
        with torch.no_grad():
            assert relative_difference(model(X), other(X)) < 1e-6
    assert count_calls(model, X) == 2


@pytest.mark.parametrize("place", ["class of a norm", "class of the model", "hook of all modules"])
def test_fused_model_follows_changes_of_all_modules(monkeypatch, place):
    """torch.compile notices none of them; while one is in force, calls run the original."""
    model = Model(layers=2).eval()
    with torch.no_grad():
        before = model(X)
        fuse(model, X)
        fused = model(X)
        if place == "hook of all modules":
            double = lambda module, _, out: 2 * out if isinstance(module, nn.LayerNorm) else None  # noqa: E731
            handle = nn.modules.module.register_module_forward_hook(double)
        else:
            cls = nn.LayerNorm if place == "class of a norm" else Model
            original = cls.forward
            monkeypatch.setattr(cls, "forward", lambda self, x: 2 * original(self, x))
        changed = model(X)
        addnorm.unfuse(model)
        assert changed.equal(model(X))
        assert not changed.equal(before)
        if place == "hook of all modules":
            handle.remove()
        monkeypatch.undo()
        fuse(model, X)
        assert model(X).equal(fused)
        assert count_calls(model, X) == 4


def test_fused_model_follows_hooks():
    model, seen = Model(layers=2).eval(), []
    before = model.layers[1].register_forward_pre_hook(lambda *_: seen.append("before"))
    fuse(model, X)
    seen.clear()
    model.layers[0].register_forward_hook(lambda *_: seen.append("layer"))
    model.register_forward_hook(lambda *_: seen.append("model"))
    with torch.no_grad():
        model(X)
        assert seen == ["layer", "before", "model"]
        before.remove()
        seen.clear()
        model(X)
        assert seen == ["layer", "model"]


def test_fused_encoder_is_freed(frozen_heap):
    model = encoder()
    fuse(model, X)
    gone = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_inspect_and_record_see_the_original():
    model = Model()
    fuse(model, X)
    assert addnorm.inspect(model, X).wiring == "post_ln"
    with addnorm.record(model) as rec:
        model(X).square().mean().backward()
    assert [site.kind for site in rec.sites].count("start") == len(rec.sites) - 2 == 1


def test_fused_model_switches_modes():
    model = Model(p=0.5)
    fuse(model.eval(), X)
    with torch.no_grad():
        assert model(X).equal(model(X))
        model.train()
        assert not model(X).equal(model(X))
        assert count_calls(model, X) == 2


def test_fused_models_run_in_threads():
    from torch._dynamo import config

    models = [Model().eval() for _ in range(2)]
    for model in models:
        fuse(model, X)
    before = config.skip_nnmodule_hook_guards
    with torch.no_grad():
        expected = [model(X) for model in models]

    def run(k):
        with torch.no_grad():
            return all(models[k](X).equal(expected[k]) for _ in range(50))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(run, range(2)))
    assert config.skip_nnmodule_hook_guards == before


@torch._dynamo.config.patch(recompile_limit=3, accumulated_recompile_limit=3)  # 8 and 256 by default
def test_many_models_can_be_fused_in_one_process():
    models = []
    for _ in range(4):  # more than Dynamo's limit for one function
        model = Model().eval()
        assert len(fuse(model, X).fused) == 2
        models.append(model)
    assert all(count_calls(model, X) == 2 for model in models)


def if_torch_has(option):
    """Mark for options that only some versions of torch.compile have."""
    has = option in inspect.signature(torch.compile).parameters
    return pytest.mark.skipif(not has, reason=f"this torch.compile has no {option}")


@if_torch_has("recompile_limit")
@torch._dynamo.config.patch(recompile_limit=3)  # the proof itself captures three times
def test_fused_model_has_its_own_recompile_limit():
    model = Model().eval()
    fuse(model, X)
    for change, x in ((model.train, X), (model.eval, X[0]), (model.bfloat16, X.bfloat16())):
        change()
        with torch.no_grad():
            model(x)  # captures it; the next call only runs
        assert count_calls(model, x) == 2


class Broken(Model):
    """Model with graph breaks. Its forward's code holds the graphs after a break, and all models of the class share the code."""

    def forward(self, x):
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.layers[1](x)


@if_torch_has("isolate_recompiles")
@torch._dynamo.config.patch(recompile_limit=2)
def test_fused_models_take_no_recompilations_from_others():
    model = Broken(layers=2).eval()
    fusion = fuse(model, X)
    assert (len(fusion.fused), fusion.num_graphs) == (4, 2)
    captured = []
    other = torch.compile(Broken(layers=2).eval(), backend=lambda graph, _: captured.append(graph) or graph)
    with torch.no_grad():
        other(X)
    assert len(captured) == 2
