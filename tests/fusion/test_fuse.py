"""`addnorm.fuse` changes what a model does when it is called, and nothing else; `addnorm.unfuse` gives it back."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import addnorm
from support.captured import off
from support.families import families
from support.fusing import QUIET, D, Model, X, calls, fused

pytestmark = QUIET


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


def test_a_fused_model_calls_the_operation_and_computes_the_same():
    model = Model().eval()
    with torch.no_grad():
        before = model(X)
    done = fused(model, X)
    assert calls(model, X) == len(done.fused) == 4
    with torch.no_grad():
        assert off(before, model(X)) < 1e-6


def test_unfuse_gives_the_model_back_to_the_bit():
    model = Model().eval()
    state = {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
    attributes = set(vars(model))
    with torch.no_grad():
        before = model(X)
        fused(model, X)
        assert addnorm.unfuse(model) is model
        assert model(X).equal(before)
    assert calls(model, X) == 0
    assert set(vars(model)) == attributes
    assert {name: id(t) for name, t in model.state_dict(keep_vars=True).items()} == state
    fused(model, X)  # and again
    addnorm.unfuse(model)


def test_class_parameters_and_state_dict_are_what_they_were():
    model = Model()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    parameters = [id(p) for p in model.parameters()]
    fused(model, X)
    assert type(model) is Model
    assert [id(p) for p in model.parameters()] == parameters
    assert list(model.state_dict()) == list(state)
    assert all(t.equal(state[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_it_is_called_with_what_it_was_called_with_positional_or_named():
    model = Model().eval()
    fused(model, X, scale=2.0)
    with torch.no_grad():
        assert off(model(x=X, scale=3.0), 3.0 * model(X)) < 1e-6


def test_loading_new_weights_or_another_dtype_is_seen():
    model, other = Model().eval(), Model().eval()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
        fused(model, X)
        model.load_state_dict(other.state_dict())
        assert off(other(X), model(X)) < 1e-6
        model.bfloat16(), other.bfloat16()
        assert other(X.bfloat16()).equal(model(X.bfloat16())) or off(other(X.bfloat16()), model(X.bfloat16())) < 1e-2
        assert calls(model, X.bfloat16()) == 4


def test_a_copy_a_pickle_and_a_saved_model_are_whole_and_not_fused():
    model = Model().eval()
    fused(model, X)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert calls(other, X) == 0
        with torch.no_grad():
            assert off(model(X), other(X)) < 1e-6
    assert calls(model, X) == 4


def test_save_pretrained_and_from_pretrained_work(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertModel(config).eval()
    ids = torch.randint(5, 99, (2, 7))
    fused(model, ids)
    model.save_pretrained(tmp_path)
    other = transformers.BertModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert off(other(ids).last_hidden_state, model(ids).last_hidden_state) < 1e-6


def test_hooks_are_called_whenever_they_are_registered_and_no_more_when_they_are_removed():
    model, seen = Model().eval(), []
    before = model.layers[1].register_forward_pre_hook(lambda *_: seen.append("before"))
    fused(model, X)
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


def test_a_model_that_is_gone_takes_everything_with_it():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 32, batch_first=True), 2).eval()
    fused(model, X)
    gone = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_inspect_and_record_see_the_model_as_its_author_wrote_it():
    model = Model()
    fused(model, X)
    assert addnorm.inspect(model, X).wiring == "post_ln"
    with addnorm.record(model) as rec:
        model(X).square().mean().backward()
    assert [site.kind for site in rec.sites].count("start") == len(rec.sites) - 4 == 1


def test_compile_goes_on_to_inductor_with_the_same_random_numbers():
    model = Model(layers=1, p=0.2).train()
    done = fused(model, X, compile=True)
    assert done.inductor
    assert done.proof.holds
    assert len(done.fused) == 2
    assert calls(model, X) == 2
    addnorm.unfuse(model)


@pytest.mark.parametrize(
    ("name", "boundaries"), [("torch Transformer post_ln", 10), pytest.param("whisper", 11, marks=pytest.mark.slow)]
)
def test_a_family_of_several_streams_is_fused_and_given_back(name, boundaries):
    model, args, kwargs = families()[name].build()

    def returned():
        found = model(*args, **kwargs)
        return getattr(found, "last_hidden_state", found)

    with torch.no_grad():
        before = returned()
        done = fused(model, *args, **kwargs)
        assert len(done.fused) == boundaries
        assert off(before, returned()) < 1e-5
        addnorm.unfuse(model)
        assert returned().equal(before)
