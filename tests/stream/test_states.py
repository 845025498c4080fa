"""Tests of `verify(like=...)` and `save_states`: planted errors are named by term, and equal models are equal in any layout."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import addnorm
from addnorm import Learned, Row
from support.families import shake
from support.random_models.graphs import Graph
from support.stacks import encoder, torch_encoder
from support.stream_steps import X, make_steps, noise, normalize, repeat

LAYERS, D = 3, 16


def make_model(norm_first=True, num_layers=LAYERS, **options):
    return shake(torch_encoder(norm_first, num_layers, nn.LayerNorm(D), **options))


@pytest.fixture(scope="module", params=[True, False], ids=["pre_ln", "post_ln"])
def case(request):
    model = make_model(request.param)
    return model, addnorm.inspect(model, X)


def list_differences(model, x, like):
    """Return what differs between a model and another one, an inspection of it, or its saved states."""
    found = addnorm.verify(model, x, like=like)
    sentences = [*found.list_sentences()]
    assert found.agrees == (not sentences)
    return sentences


def sentences(case, change):
    """Return what differs between a changed copy of the model and the model."""
    model, inspection = case
    twin = copy.deepcopy(model)
    with torch.no_grad():
        change(twin.layers)
    return list_differences(twin, X, inspection)


def assert_only(differences, start):
    """Check that there is one difference, with this beginning, and return it."""
    (sentence,) = differences
    assert sentence.startswith(start), sentence
    return sentence


def test_error_inside_a_branch_is_told_from_the_residual_terms(case):
    inside = "all residual terms agree; the difference begins inside the "
    for change, place in (
        (lambda layers: layers[2].self_attn.out_proj.weight[3].mul_(1.01), "attention of layer 3 (layers.2.self_attn)"),
        (lambda layers: layers[1].linear1.weight[0, 2:3].add_(0.1), "feed-forward of layer 2 (layers.1)"),
    ):
        sentence = assert_only(sentences(case, change), inside + place)
        assert "more term" not in sentence  # the later ones are fed with the reference's values


def test_norms_and_their_places_are_compared(case):
    is_pre = case[0].layers[0].norm_first
    norm = "before" if is_pre else "after"
    assert_only(
        sentences(case, lambda layers: layers[1].norm2.weight[3].add_(0.01)),
        f"the difference begins at the norm {norm} the feed-forward of layer 2 (layers.1): relative",
    )
    (sentence,) = sentences(case, lambda layers: setattr(layers[1].norm1, "eps", 1e-6))
    assert sentence == "eps is 1e-6, expected 1e-5: layers.1.self_attn"
    moved, *_ = sentences(case, lambda layers: setattr(layers[2], "norm_first", not is_pre))
    found, expected = ("after the add", "before the sublayer") if is_pre else ("before the sublayer", "after the add")
    assert moved == f"the norm is {found}, expected {expected}: layers.2.self_attn, layers.2"


def test_ends_of_the_stream_are_compared(case):
    model, inspection = case
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.norm.weight[1].add_(0.1)
    assert_only(list_differences(twin, X, inspection), "the difference begins at the final norm: relative error")
    twin.norm = None
    assert "the final norm is missing, expected there" in list_differences(twin, X, inspection)
    sentence = assert_only(
        list_differences(model, 1.01 * X, inspection),
        "the difference begins at the start of the stream: relative error 0.010",
    )
    assert "more term" not in sentence
    (sentence,) = list_differences(model, X * X, inspection)
    assert "more term" not in sentence  # no other order of dimensions is taken for the same


@pytest.mark.parametrize(
    "wiring", [Row(norm_in=True, b=0.5), Row(norm_in=True, b=Learned(0.5)), Row(norm_out=True, a=1.5)], ids=str
)
def test_factors_are_compared_by_their_numbers(wiring):
    model = shake(encoder(wiring))
    other = replace(wiring, a=wiring.a * 1.1) if isinstance(wiring.b, float) else wiring
    twin = encoder(other)
    twin.load_state_dict(model.state_dict())
    if other is wiring:
        with torch.no_grad():
            twin.stack.layers[1].connections[0].b.add_(0.1)
    first, *_ = list_differences(twin, X, model)
    learned = "the difference begins at the add after the attention of layer 2 (stack.layers.1.connections.0.sublayer)"
    assert first.startswith(
        learned if other is wiring else f"the factor of the residual is {other.a:.4g}, expected {wiring.a:g}"
    )


def test_other_dtypes_differ_by_roundings_only(case):
    model, _ = case
    for dtype, most in ((torch.bfloat16, 4), (torch.float16, 4), (torch.float64, 10)):
        found = addnorm.verify(copy.deepcopy(model).to(dtype), X.to(dtype), like=model)
        assert found.agrees, str(found)
        assert 0 < max(term.roundings for term in found.terms) < most
        assert "roundings" in str(found)
        assert addnorm.verify(model, X, like=addnorm.inspect(copy.deepcopy(model).to(dtype), X.to(dtype))).agrees
    assert "equal to the bit" in " ".join(str(addnorm.verify(model, X, like=model)).split())


def test_sum_in_another_dtype_is_named():
    class Wide(nn.TransformerEncoderLayer):
        def forward(self, x, *_, **__):
            x = x.float() + self._sa_block(self.norm1(x.bfloat16()), None, None)
            return x + self._ff_block(self.norm2(x.bfloat16()))

    model = make_model().bfloat16()
    twin = copy.deepcopy(model)
    for layer in twin.layers:
        layer.__class__ = Wide
    twin.norm.float()
    (sentence, *_) = list_differences(model, X.bfloat16(), twin)
    assert sentence == "the dtype of the sum is bfloat16, expected float32: in all 6"


def test_another_implementation_agrees(case):
    model, inspection = case
    own = addnorm.nn.from_torch(model)
    assert addnorm.verify(own, X, like=inspection).agrees
    assert addnorm.verify(model, X, like=own).agrees
    turned = make_model(model.layers[0].norm_first, batch_first=False)
    for square in (X, torch.randn(5, 5, D)):  # where the shape does not show the order
        reference = addnorm.inspect(turned, square.transpose(0, 1))
        assert addnorm.verify(model, square, like=reference).agrees
        assert addnorm.verify(own, square, like=reference).agrees
    with torch.no_grad():
        own.stack.layers[1].connections[1].sublayer.up.weight.mul_(1.01)
    assert_only(
        list_differences(own, X, model),
        "all residual terms agree; the difference begins inside the feed-forward of layer 2",
    )


def run_parallel(m, x):
    """Run layers x + f_1(N(x)) + f_2(N(x)), whose sublayers run in either order."""
    for norm, *sublayers in m.layers:
        read, outputs = norm(x), {}
        for j in m.order:
            outputs[j] = sublayers[j](read)
        x = x + outputs[0] + outputs[1]
    return x


def make_parallel(second, *order):
    layers = ([nn.LayerNorm(D), addnorm.nn.SelfAttention(D, 2), second()] for _ in range(LAYERS))
    return shake(Graph(run_parallel, layers=nn.ModuleList(map(nn.ModuleList, layers)), order=order).eval())


@pytest.mark.parametrize(
    "second", [lambda: addnorm.nn.FeedForward(D), lambda: addnorm.nn.SelfAttention(D, 2)], ids=["kinds", "sizes"]
)
def test_parallel_sublayers_agree_in_any_order(second):
    model, twin = make_parallel(second, 0, 1), make_parallel(second, 1, 0)
    assert list_differences(model, X, twin) == []
    twin.layers[1][1].out_proj.weight.data[3] *= 1.01
    (sentence,) = list_differences(model, X, twin)
    assert "the difference begins inside the attention of layer 2 (layers.1.1)" in sentence


TURNS = {
    "sequence first": (lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 1)),
    "features first": (lambda x: x.mT, lambda x: x.mT),
    "image": (lambda x: x.mT.unsqueeze(-1), lambda x: x.flatten(2).mT),
}


def make_turned(turn, back, is_post):
    """Return a model whose stream has another layout than its norms, which have the features last."""

    def run(m, x):
        x = turn(x)
        for k in range(3):
            x = x + turn(m.mlps[k](back(x)) if is_post else m.branch(k, back(x)))
            x = turn(m.norms[k](back(x))) if is_post else x
        return m.last(back(x))

    return make_steps(run)


@pytest.mark.parametrize("is_post", [False, True], ids=["pre_ln", "post_ln"])
@pytest.mark.parametrize("name", TURNS)
def test_stream_in_another_layout_than_its_norms_agrees(name, is_post):
    model, port = make_turned(lambda x: x, lambda x: x, is_post), make_turned(*TURNS[name], is_post)
    assert list_differences(port, X, model) == []
    assert list_differences(model, X, port) == []
    with torch.no_grad():
        port.norms[1].weight.mul_(1.1)
    where = "after" if is_post else "before"
    assert_only(list_differences(port, X, model), f"the difference begins at the norm {where} ")


def test_rounded_branch_is_no_difference_at_the_add(case):
    model, inspection = case
    with torch.autocast("cpu", torch.bfloat16):
        own = addnorm.inspect(model, X)
    found = addnorm.verify(own, like=inspection)
    assert found.agrees, str(found)
    tolerances = {term.term: term.tolerance for term in found.terms}
    assert tolerances["sum"] == tolerances["branch"] > 1e-3 > tolerances["start"]


def test_reference_of_mixed_dtypes_gets_the_inputs_of_the_model():
    model = make_steps(repeat(lambda m, k, x: x + m.mlps[k](m.norms[k](x).bfloat16()), end=normalize))
    model.mlps.bfloat16()
    model.gammas.data = model.gammas.data.bfloat16()  # the first parameter
    assert list_differences(model, X, copy.deepcopy(model)) == []


def test_norm_of_the_embedding_is_compared():
    model, twin = shake(encoder("peri_ln")), shake(encoder("peri_ln"))
    assert addnorm.verify(twin, X, like=model).agrees
    with torch.no_grad():
        twin.stack.norm_embedding.weight[3].mul_(1.1)
    assert_only(list_differences(twin, X, model), "the difference begins at the start of the stream: relative error")
    twin.stack.norm_embedding = None
    sentences = list_differences(twin, X, model)
    assert "the embedding norm is missing, expected there" in sentences


def test_saved_states_are_those_of_the_run(case, tmp_path):
    model, inspection = case
    path = addnorm.save_states(inspection, tmp_path / "states.pt")
    found = addnorm.verify(model, X, like=str(path))
    assert (found.agrees, found.reference, len(found.terms)) == (True, "TransformerEncoder", 20)
    assert found.to_dict()["agrees"] is True
    assert addnorm.verify(inspection, like=path).terms == addnorm.verify(inspection, like=inspection).terms
    (tmp_path / "empty.pt").touch()
    torch.save({"x": X}, tmp_path / "other.pt")
    for name in ("empty.pt", "other.pt", "none.pt"):
        with pytest.raises(ValueError, match=f"like is '.*{name}', expected a file of `addnorm record --states`"):
            addnorm.verify(model, X, like=tmp_path / name)
    with pytest.raises(ValueError, match="inspection has no residual stream"):
        addnorm.save_states(addnorm.inspect(nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "states.pt")


@pytest.mark.parametrize(
    "keys",
    [
        ("inspection",),
        ("terms", "0..start"),
        ("inspection", "unknown"),
        ("inspection", "streams", 0, "sites", 0, "row", "a"),
    ],
)
def test_saved_states_without_a_part_get_one_sentence(case, tmp_path, keys):
    model, inspection = case
    saved = torch.load(addnorm.save_states(inspection, tmp_path / "states.pt"))
    *outer, last = keys
    part = saved
    for key in outer:
        part = part[key]
    del part[last]
    torch.save(saved, tmp_path / "part.pt")
    with pytest.raises(
        ValueError, match=r"like is '.*part.pt', expected a whole file of `addnorm record --states`: a part is"
    ):
        addnorm.verify(model, X, like=tmp_path / "part.pt")


def test_streams_of_other_sizes_get_one_sentence(case):
    model, inspection = case
    two = make_model(model.layers[0].norm_first, 2)
    assert list_differences(two, X, inspection) == ["the number of layers is 2, expected 3"]
    wide = addnorm.nn.Encoder(LAYERS, 2 * D, nhead=2).eval()
    found = addnorm.verify(addnorm.inspect(wide, torch.randn(2, 5, 2 * D)), like=inspection)
    assert str(found) == "differs from the reference, TransformerEncoder: the width is 32, expected 16"
    assert found.terms == ()
    with pytest.raises(ValueError, match=r"the stream has shape \(1, 5, 16\), expected \(2, 5, 16\) as the reference"):
        addnorm.verify(model, X[:1], like=inspection)
    for wrong in ({"wiring": "pre_ln"}, {"eps": 1e-5}):
        with pytest.raises(TypeError, match="like is set, and wiring, eps, norm or dtype too"):
            addnorm.verify(model, X, like=model, **wrong)
    with pytest.raises(TypeError, match="wiring and like are not set"):
        addnorm.verify(model, X)
    with pytest.raises(TypeError, match=r"like is int, expected a torch\.nn\.Module"):
        addnorm.verify(model, X, like=3)


def test_training_mode_is_named_and_random_numbers_are_kept(case):
    model, inspection = case
    state = torch.get_rng_state()
    first, *_ = list_differences(copy.deepcopy(model).train(), X, inspection)
    assert first == "the mode is training, expected evaluation"
    assert torch.equal(state, torch.get_rng_state())


def route(m, x):
    """Choose tokens by their values, as a router of experts does, with views of as many tokens."""
    chosen = (x[..., 0] > 0).nonzero(as_tuple=True)
    tokens = m.linear(x[chosen]).view(len(chosen[0]), 2, -1)
    return x.new_zeros(x.shape).index_put(chosen, tokens.flatten(1))


def test_another_choice_of_a_router_is_no_verdict():
    x = noise(3, 4, D)
    model = encoder("pre_ln")
    model.stack.layers[0].connections[1].sublayer = Graph(route, linear=nn.Linear(D, D))
    model = shake(model.eval())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.stack.layers[0].connections[0].sublayer.out_proj.weight.mul_(-9)
    found = addnorm.verify(other, x, like=model)
    (inside,), (uncompared,) = found.different, [term for term in found.terms if term.error is None]
    assert (inside.place.split(" (")[0], found.agrees) == ("inside the attention of layer 1", False)
    assert "as if these choose other experts" in str(uncompared)
    assert found.terms[-1].agrees  # the later terms are fed with the reference's values


@pytest.mark.parametrize("shape", [(0, 5, 16), (2, 0, 16)])
def test_empty_batch_proves_nothing(shape, tmp_path):
    model, x = make_model(), torch.randn(shape)
    found = addnorm.verify(model, x, like=copy.deepcopy(model))
    assert not found
    assert not found.terms
    assert "the inputs hold no token, so nothing is proven" in " ".join(str(found).split())
    with pytest.raises(ValueError, match="inspection has no numbers, expected one of inputs that hold a token"):
        addnorm.save_states(addnorm.inspect(model, x), tmp_path / "states.pt")
    assert not [*tmp_path.iterdir()]
