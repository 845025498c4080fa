"""`addnorm.fuse` changes what a model does when it is called, and nothing else; `addnorm.unfuse` gives it back."""

import copy
import gc
import io
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import addnorm
from addnorm.convert import call
from captured import off
from families import families

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
D = 16
X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.f, self.g = nn.Linear(D, D), nn.Linear(D, D)
        self.n, self.m = nn.LayerNorm(D), nn.LayerNorm(D)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        x = self.n(x + self.drop(self.f(x)))
        return self.m(x + self.drop(torch.tanh(self.g(x))))


class Model(nn.Module):
    def __init__(self, layers=2, p=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer(p) for _ in range(layers))

    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = layer(x)
        return x * scale


def fused(model, *args, **kwargs):
    return addnorm.fuse(model, *args, timed=False, **kwargs)


def calls(model, *args, **kwargs):
    """How often the operation is called."""
    with torch.profiler.profile() as profile, torch.no_grad():
        model(*args, **kwargs)
    return sum(event.name.startswith("addnorm::add_norm") for event in profile.events())


# --- what it is after --------------------------------------------------------------------------------------------------------


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


# --- training ----------------------------------------------------------------------------------------------------------------


def losses(model, dtype, x, target, fuse=False, steps=5):
    """Of a few steps with AdamW, dropout and all."""
    model = copy.deepcopy(model).to(dtype).train()
    x, target = (t.to(dtype) for t in (x, target))
    if fuse:
        assert fused(model, x).proof.mode == "training"
        assert calls(model, x) == 4
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return torch.tensor(found, dtype=torch.float64), {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_five_steps_of_training_have_the_same_losses_and_weights_either_way(dtype):
    model = Model(p=0.2)
    x, target = torch.randn(16, 5, D), torch.randn(16, 5, D)
    before, weights = losses(model, dtype, x, target)
    after, trained = losses(model, dtype, x, target, fuse=True)
    assert before[4] < 0.95 * before[0]  # it learns
    eps = torch.finfo(dtype).eps
    assert (before - after).abs().max() <= 8 * eps * before.max()
    step = 5 * 1e-2  # of AdamW, whose steps have the size of the learning rate however small a gradient is
    assert all((weights[name].double() - trained[name].double()).abs().mean() < 0.02 * step + eps for name in weights)


def test_gradients_accumulate_and_parameters_may_be_frozen():
    model = Model().train()
    model.layers[0].n.weight.requires_grad_(False)
    fused(model, X)
    for _ in range(2):
        model(X).sum().backward()
    assert model.layers[0].n.weight.grad is None
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_switching_between_training_and_evaluation_goes_on_being_fused():
    model = Model(p=0.5)
    fused(model.eval(), X)
    with torch.no_grad():
        assert model(X).equal(model(X))
        model.train()
        assert not model(X).equal(model(X))
        assert calls(model, X) == 4


# --- the report --------------------------------------------------------------------------------------------------------------


def test_the_report_tells_what_was_fused_and_what_was_not():
    class Two(Model):
        def __init__(self):
            super().__init__(layers=1)
            self.places = nn.Parameter(torch.randn(5, D))
            self.first = nn.LayerNorm(D)

        def forward(self, x):
            return super().forward(self.first(x + self.places))

    done = fused(Two().eval(), X)
    assert [(one.add, one.norm, one.reason) for one in done.boundaries] == [
        ("", "first", "its add broadcasts"), ("layers.0", "layers.0.n", None), ("layers.0", "layers.0.m", None),
    ]  # fmt: skip
    assert (len(done.fused), len(done.left), done.graphs) == (2, 1, 1)
    found = done.to_dict()
    assert found["fused"] == 2
    assert found["proof"]["holds"]
    assert found["measured"] is None


def test_two_norms_in_one_module_are_told_apart():
    class Both(Model):
        def forward(self, x):
            z = x + self.layers[0].f(x)
            return F.layer_norm(z, (D,)) * torch.sigmoid(F.layer_norm(z, (D,), eps=1e-3))

    done = fused(Both().eval(), X)
    assert [(one.eps, one.fused) for one in done.boundaries] == [(1e-5, True), (1e-3, False)]
    assert done.left[0].reason.startswith("its sum is fused with the norm in")


def test_what_is_measured_is_measured():
    done = addnorm.fuse(Model(p=0.1).train(), X)
    took = done.measured
    assert 0 < took.share < 1
    assert took.inference.before > 0 < took.training.after
    assert min(took.saved) > X.nbytes
    assert done.to_dict()["measured"]["saved"]["before"] == took.saved[0]


def test_a_frozen_model_has_no_gradients_to_prove():
    model = Model().requires_grad_(False)
    done = addnorm.fuse(model, X)
    assert done.proof.holds
    assert done.proof.gradients == ()
    assert done.measured.training is done.measured.saved is None


def test_graphs_that_break_between_add_and_norm_leave_it_and_say_so():
    class Broken(Model):
        def forward(self, x):
            x = x + self.layers[0].f(x)
            torch._dynamo.graph_break()
            return self.layers[1](self.layers[0].n(x))

    done = fused(Broken().eval(), X)
    assert done.graphs == 2
    assert [(one.norm, one.reason) for one in done.boundaries] == [
        ("layers.1.n", None), ("layers.1.m", None), ("layers.0.n", "the frontend ends a graph between its add and its norm"),
    ]  # fmt: skip


def test_one_graph_that_runs_for_every_layer_is_told_for_every_layer():
    class Looped(Model):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x

    done = fused(Looped(layers=3).eval(), X)
    assert [(one.add, one.norm) for one in done.fused] == [
        (f"layers.{k}", f"layers.{k}.{norm}") for k in range(3) for norm in "nm"
    ]
    assert done.left == ()


def test_a_model_without_add_and_norm_is_left_as_it_is():
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.LayerNorm(D))
    done = fused(model, X)
    assert done.boundaries == ()
    assert model._compiled_call_impl is None
    with pytest.raises(ValueError, match="which is not fused"):
        addnorm.unfuse(model)


# --- proof -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["eps", "swap", "weight"])
def test_a_wrong_rewrite_is_not_proven_and_changes_nothing(monkeypatch, fault):
    def wrong(x, f, weight=None, bias=None, eps=1e-5, **options):
        if fault == "eps":
            return addnorm.add_layer_norm(x, f, weight, bias, 1.001 * eps + 1e-4, **options)
        if fault == "swap":
            return addnorm.add_layer_norm(f, x, bias, weight, eps, **options)
        return addnorm.add_layer_norm(x, f, weight if weight is None else weight * 1.0001, bias, eps, **options)

    monkeypatch.setitem(call.OPERATION, "layer", wrong)
    monkeypatch.setattr(call, "_same", lambda *_: True)  # else it would be left
    model = Model().eval()
    with torch.no_grad():
        before = model(X)
    with pytest.raises(
        addnorm.NotProven, match=r"is not fused: .* differs by .* twice what eager itself is off"
    ) as error:
        fused(model, X)
    assert not error.value.fusion.proof.holds
    assert model._compiled_call_impl is None
    with torch.no_grad():
        assert model(X).equal(before)


def test_a_rewrite_that_computes_something_else_is_left_boundary_by_boundary(monkeypatch):
    def wrong(x, f, weight=None, bias=None, eps=1e-5, **options):
        return addnorm.add_layer_norm(x, f, weight, bias, eps + 1e-4, **options)

    monkeypatch.setitem(call.OPERATION, "layer", wrong)
    done = fused(Model().eval(), X)
    assert done.fused == ()
    assert {one.reason for one in done.left} == {"its norm is not the formula that it looks like"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("no memory")])
def test_an_interrupt_or_an_error_leaves_the_model_as_it_was(monkeypatch, error):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 32, batch_first=True), 2).eval()

    def fails(*_, **__):
        raise error

    monkeypatch.setattr("addnorm.convert.fuse.prove", fails)
    with pytest.raises(error if isinstance(error, type) else RuntimeError):
        fused(model, X)
    assert model._compiled_call_impl is None
    assert all("forward" not in vars(module) for module in model.modules())


def test_what_the_model_raises_is_raised():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fused(Model(), torch.randn(2, 5, D + 1))


def test_a_proof_without_float64_says_what_it_was_judged_by():
    class Random(Model):
        def forward(self, x):
            return super().forward(x) + self.noise.pop()  # other numbers in every run

    model = Random().eval().double()
    model.noise = [float(k) for k in range(99)]
    with pytest.raises(addnorm.NotProven, match="what a few roundings do"):
        fused(model, X.double())


def test_several_fused_models_may_run_at_once_and_hooks_are_guarded_until_the_last_is_done():
    from torch._dynamo import config

    given = [Model(layers=1).eval() for _ in range(3)]
    for model in given:
        fused(model, X)
    before = config.skip_nnmodule_hook_guards
    with torch.no_grad():
        wanted = [model(X) for model in given]

    def run(k):
        with torch.no_grad():
            return all(given[k](X).equal(wanted[k]) for _ in range(50))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(run, range(3)))
    assert config.skip_nnmodule_hook_guards == before


def test_a_scripted_model_is_not_captured_and_left():
    model = torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)))
    done = fused(model, X)
    assert (done.graphs, done.fused) == (0, ())
    assert "captures nothing of it" in str(done)


REFUSED = {
    "model is int, expected a torch.nn.Module": lambda: addnorm.fuse(3, X),
    "which is not made yet": lambda: addnorm.fuse(nn.Sequential(nn.LazyLinear(D)), X),
    "on the meta device": lambda: addnorm.fuse(nn.Linear(D, D, device="meta"), X),
    "is compiled already": lambda: addnorm.fuse(torch.compile(Model()), X),
    "is not fused: fuse it with": lambda: addnorm.unfuse(Model()),
    "model is int, which is not fused": lambda: addnorm.unfuse(3),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_fused_is_refused_in_a_sentence(sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        REFUSED[sentence]()


def test_a_model_that_is_fused_or_compiled_is_not_fused_again():
    model = Model().eval()
    fused(model, X)
    with pytest.raises(ValueError, match="model is fused already"):
        addnorm.fuse(model, X)
    addnorm.unfuse(model)
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="model is compiled already"):
        addnorm.fuse(model, X)


# --- Inductor ----------------------------------------------------------------------------------------------------------------


def test_compile_goes_on_to_inductor_with_the_same_random_numbers():
    model = Model(layers=1, p=0.2).train()
    done = fused(model, X, compile=True)
    assert done.inductor
    assert done.proof.holds
    assert len(done.fused) == 2
    assert calls(model, X) == 2
    addnorm.unfuse(model)


@torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2)  # 8 and 256 as a rule
def test_many_models_may_be_fused_in_one_process():
    given = []
    for _ in range(4):  # more than the frontend allows of one function
        model = Model(layers=1).eval()
        assert len(fused(model, X).fused) == 2
        given.append(model)
    assert all(calls(model, X) == 2 for model in given)


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
