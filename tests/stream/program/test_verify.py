"""Tests of `verify` on several streams: planted errors are named with their sublayers, and right models are right."""

import copy
import importlib
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import addnorm
from addnorm import wirings
from support.random_models.graphs import Graph
from support.several_streams import FORMS, LAYERS, MHC, D, build_transformers, make_mhc
from support.stacks import Mlp, encoder
from support.stream_steps import X, make_steps

A, B, C = "A, the mixing matrix, is ", "B, the weights of the write, is ", "C, the weights of the read, is "
SITES = 2 * LAYERS
# The error, the words of the deviation, and the number of sublayers that have it; 0 for one of the whole model.
PLANTED = [
    ("transposed", A + "transposed", SITES),
    ("rows first", A + "transposed", SITES),
    ("not applied", A + "not applied", SITES),
    ("scaled", A + "0.5 times", SITES),
    ("tanh", C + "another one", SITES),
    ("turned read", C + "with its streams in the opposite order", SITES),
    ("turned write", B + "with its streams in the opposite order", SITES),
    ("own rms", "the norm of the coefficients is over each stream alone", SITES - 1),  # the first streams are equal
    ("stale", "the input of the coefficients is the streams before the last write", SITES - 1),
    ("iterations", "the option iterations is 3, expected 6", 0),
    ("norm eps", "the option norm_eps is 0.0001, expected 1e-06", 0),
    ("single pass", "the option single_pass is True, expected False", 0),
    ("mean head", "the option head is 'mean', expected 'learned'", 0),
    ("eps", "eps is 1e-5, expected 1e-6", SITES),
    ("no norm", "the norm is missing, expected before the sublayer", SITES),
    ("no final norm", "the final norm is missing, expected after the last sublayer", 0),
    ({2: "transposed", 3: "transposed"}, A + "transposed", 2),
    ({0: "transposed"}, A + "transposed", 1),
]


def verify_hand_made(faults, wiring=MHC, **options):
    model = make_mhc(faults=faults).double()
    return addnorm.verify(model, X.double(), wiring=wiring, **options)


@pytest.mark.parametrize(("faults", "words", "count"), PLANTED, ids=str)
def test_planted_error_is_named_with_its_sublayers(faults, words, count):
    found = verify_hand_made(faults, eps=1e-6)
    assert not found.agrees
    deviation = next(one for one in found.deviations if words in str(one))
    assert len(deviation.sites) == count
    assert {*deviation.sites} <= {site.id for site in found.inspection.program.sites} | {
        site.norm_in.path for site in found.inspection.program.sites if site.norm_in
    }


@pytest.mark.parametrize(
    ("wiring", "words"),
    [
        (wirings.mhc(n=3), "the option n is 4, expected 3"),
        (wirings.mhc(iterations=5), "the option iterations is 6, expected 5"),
        (wirings.mhc(head="mean"), "the option head is 'learned', expected 'mean'"),
        (wirings.independent_hc(), A + "another one"),
        (wirings.reversible(), "the number of streams is 4, expected 2"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_other_wiring_is_not_that_of_the_model(wiring, words):
    found = verify_hand_made("", wiring)
    assert any(words in str(one) for one in found.deviations), str(found)


def test_coefficients_of_a_write_may_be_computed_after_the_sublayer():
    found = verify_hand_made("late")
    assert found.agrees, str(found)
    assert found.inspection.program.sizes == [4] * (SITES + 1)


def test_norm_and_dtype_are_compared():
    found = verify_hand_made("", norm="layer", dtype=torch.float32)
    words = [str(one) for one in found.deviations]
    assert any("the kind of the norm is rms, expected layer" in text for text in words)
    assert any("the dtype of the streams is float64, expected float32" in text for text in words)


def test_one_stream_is_not_several():
    model = encoder("pre_ln")
    found = addnorm.verify(model, X, wiring="mhc")
    assert not found.agrees
    assert "the number of streams is 1, expected 4" in str(found)


@pytest.mark.parametrize("form", FORMS)
def test_equal_models_agree_in_any_layout(form, tmp_path):
    inspection, other = (addnorm.inspect(make_mhc(one), X) for one in ("stacked", form))
    for like in (other, addnorm.save_states(other, tmp_path / "states.pt")):
        found = addnorm.verify(inspection, like=like)
        assert found.agrees, str(found)
        assert len(found.terms) == 1 + 3 * 4 + 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("transposed", "the difference begins at the add after {}"),
        ("turned read", "the difference begins at the norm before {}"),
        ("eps", "eps is 1e-5, expected 1e-6: {}"),
    ],
)
@pytest.mark.parametrize("place", [2, 3])  # the streams before the first are equal
def test_the_first_term_that_differs_is_named(fault, words, place):
    model, other = make_mhc("flat", {place: fault}), make_mhc("first")
    found = addnorm.verify(model, X, like=other)
    assert not found.agrees
    sentence = next(iter(found.list_sentences()))
    site = found.inspection.program.sites[place]
    name = site.id if fault == "eps" else f"the feed-forward of layer 2 ({site.id})"
    assert sentence.startswith(words.format(name)), sentence


def test_a_difference_inside_a_branch_is_no_residual_term():
    model, other = make_mhc(), make_mhc("tuple")
    with torch.no_grad():
        model.layers[1][0].up.weight[3].mul_(1.1)
    (sentence,) = addnorm.verify(model, X, like=other).list_sentences()
    assert sentence.startswith("all residual terms agree; the difference begins inside")
    assert "feed-forward of layer 2 (the model (3))" in sentence


def test_one_stream_and_several_have_other_states():
    one, several = (encoder(name) for name in ("pre_ln", "mhc"))
    for model, other in ((one, several), (several, one)):
        (sentence,) = addnorm.verify(model, X, like=other).list_sentences()
        assert "one stream with rows" in sentence
        assert "several streams" in sentence
    wide = encoder(wirings.mhc(n=2))
    (sentence,) = addnorm.verify(wide, X, like=several).list_sentences()
    assert sentence == "the number of streams is 2, expected 4"


def rotate(angle):
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, s], [-s, c]])


def test_constant_matrices_are_compared_as_numbers():
    def run(m, x):
        """Run two streams whose mixing is a buffer, rounded in bfloat16."""
        streams = torch.stack([x, 0.5 * x], -2)
        for k in range(4):
            write = torch.tanh(m.branch(k, streams[..., 0, :]))
            streams = m.mix @ streams + write.unsqueeze(-2) * torch.tensor([[1.0], [0.5]], dtype=x.dtype)
        return m.last(streams[..., 0, :] + streams[..., 1, :])

    model = make_steps(run)
    model.mix = nn.Buffer(rotate(0.4))
    half, other = copy.deepcopy(model).bfloat16(), copy.deepcopy(model)
    other.mix.copy_(rotate(0.5))
    found = addnorm.verify(half, X.bfloat16(), like=model)
    assert not found.deviations, str(found)
    assert "the matrix A is" in str(addnorm.verify(other, X, like=model))


def test_models_of_transformers_are_compared_term_by_term():
    model = build_transformers("deepseek_v4:DeepseekV4")
    twin, ids = copy.deepcopy(model), torch.randint(1, 60, (2, 5))
    assert addnorm.verify(twin, input_ids=ids, like=model).agrees
    scale = next(p for name, p in twin.named_parameters() if "layers.1" in name and p.shape[-1:] == (4 * 32,))
    with torch.no_grad():
        scale.mul_(1.5)
    assert "layers.1" in str(addnorm.verify(twin, input_ids=ids, like=model))


def make_model(run, shapes, layers=2, **more):
    """Return a model of a forward, its sublayers, and learned coefficients of these shapes."""
    norms, mlps = (nn.ModuleList(one(D) for _ in range(layers)) for one in (nn.LayerNorm, Mlp))
    learned = {name: nn.ParameterList(0.5 * torch.randn(shape) for _ in norms) for name, shape in shapes.items()}
    return Graph(run, norms=norms, mlps=mlps, last=nn.LayerNorm(D), **learned, **more).eval()


MATRICES = {"collapse": (4,), "mix": (4, 4), "inject": (4, 1)}


def learned_hyper_connections(read=lambda c, streams: c @ streams, write=lambda a, b, streams, w: a @ streams + b * w):
    """Return hyper-connections with learned matrices, and functions of them that compute what a sublayer reads, and its write."""

    def run(m, x):
        streams = x.unsqueeze(-2).repeat(1, 1, 4, 1)
        for c, a, b, norm, mlp in zip(m.collapse, m.mix, m.inject, m.norms, m.mlps, strict=True):
            streams = write(a, b, streams, mlp(norm(read(c, streams))).unsqueeze(-2))
        return m.last(streams.sum(-2))

    return make_model(run, MATRICES)


READS = {
    "X c": lambda c, streams: streams.mT @ c,
    "einsum": lambda c, streams: torch.einsum("n,btnd->btd", c, streams),
    "tensordot": lambda c, streams: torch.tensordot(c, streams, ([0], [2])),
}
WRITES = {
    "[b A] [w; X]": lambda a, b, streams, w: torch.cat([b, a], 1) @ torch.cat([w, streams], -2),
    "einsum": lambda a, b, streams, w: torch.einsum("kj,btjd->btkd", torch.cat([a, b], 1), torch.cat([streams, w], -2)),
    "sum": lambda a, b, streams, w: (torch.cat([a, b], 1)[..., None] * torch.cat([streams, w], -2).unsqueeze(-3)).sum(
        -2
    ),
}


@pytest.mark.parametrize("form", [*READS, *WRITES])
def test_read_and_write_in_one_product_are_right(form):
    wiring = wirings.hyper_connections(dynamic=False)
    forms = {name: table[form] for name, table in (("read", READS), ("write", WRITES)) if form in table}
    model = learned_hyper_connections(**forms)
    found = addnorm.verify(model, X, wiring=wiring)
    assert found.agrees, str(found)
    assert addnorm.inspect(model, X).wiring == "hyper_connections"


def published_hyper_connections(is_dynamic, fault=""):
    """Return hyper-connections as in the appendix of their paper: one parameter for C and A, which one product applies."""

    def run(m, x):
        h = x.unsqueeze(-2).repeat(1, 1, 4, 1)
        for k, (norm, mlp) in enumerate(zip(m.norms, m.mlps, strict=True)):
            alpha, beta = m.static_alpha[k], m.static_beta[k]
            if is_dynamic:
                normed = m.norms_hc[k](h)
                alpha = alpha + torch.tanh(normed @ m.alpha_fn[k]) * m.alpha_scale[k]
                beta = beta + torch.tanh(normed @ m.beta_fn[k]) * m.beta_scale[k]
            if fault == "transposed":
                alpha = torch.cat([alpha[..., :1], alpha[..., 1:].mT], -1)
            mixed = alpha.mT @ h
            beta = 2.0 * beta if fault == "double write" else beta
            h = beta.unsqueeze(-1) * mlp(norm(mixed[..., 0, :])).unsqueeze(-2) + mixed[..., 1:, :]
        return m.last(h.sum(-2))

    shapes = {"static_alpha": (4, 5), "static_beta": (4,)}
    if is_dynamic:
        shapes |= {"alpha_fn": (D, 5), "beta_fn": (D,), "alpha_scale": (1,), "beta_scale": (1,)}
    return make_model(run, shapes, norms_hc=nn.ModuleList(nn.LayerNorm(D) for _ in range(2)))


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_published_form_joins_c_and_a(is_dynamic):
    wiring = wirings.hyper_connections(dynamic=is_dynamic)
    model = published_hyper_connections(is_dynamic)
    found = addnorm.verify(model, X, wiring=wiring)
    assert found.agrees, str(found)
    assert found.inspection.program.sizes == [4, 4, 4]
    assert addnorm.inspect(model, X).wiring == "hyper_connections"


@pytest.mark.parametrize(("fault", "words"), [("transposed", A + "transposed"), ("double write", B + "2 times")])
def test_error_in_the_published_form_is_named(fault, words):
    model = published_hyper_connections(True, fault)
    found = addnorm.verify(model, X, wiring=wirings.hyper_connections())
    assert [str(one).startswith(words) for one in found.deviations] == [True], str(found)


@pytest.mark.parametrize("is_list", [True, False])
def test_attention_over_the_first_state_alone_is_its_read(is_list):
    def run(m, x):
        """Attend over a list of states that is stacked for each read, or over one tensor that grows."""
        states = [x] if is_list else x[None]
        for k, (query, weight, norm, mlp) in enumerate(zip(m.queries, m.weights, m.norms, m.mlps, strict=True)):
            values = torch.stack(states) if is_list else states
            keys = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6) * weight
            read = norm(torch.einsum("nbt,nbtd->btd", torch.softmax(keys @ query, 0), values))
            if k < 3:
                states = [*states, mlp(read)] if is_list else torch.cat([states, mlp(read)[None]])
        return read

    model = make_model(run, {"queries": (D,), "weights": (D,)}, layers=4)
    found = addnorm.verify(model, X, wiring="attention_residuals")
    assert found.agrees, str(found)
    assert found.inspection.program.sizes == [1, 2, 3, 4]


def test_norm_over_unknown_dimensions_is_not_missing():
    def run(m, x):
        """Keep all streams of all tokens in two dimensions, of which no operator shows the features."""
        streams = x.repeat(4, 1, 1, 1).reshape(4, -1)
        for c, a, b, norm, mlp in 2 * [*zip(m.collapse, m.mix, m.inject, m.norms, m.mlps, strict=True)]:
            streams = torch.addmm(b * mlp(norm((c @ streams).view(x.shape))).reshape(1, -1), a, streams)
        return m.last(streams.sum(0).view(x.shape))

    found = addnorm.verify(make_model(run, MATRICES), X, wiring=wirings.hyper_connections(dynamic=False))
    assert not found
    assert not found.deviations
    assert found.unproven[0].reason.startswith("it begins with a norm over a dimension")


@pytest.mark.parametrize("scales", [(1.0, 0.5**0.5, 3**-0.5), (1.0, 1.0, 1.0)])
def test_wrong_weight_of_a_siamese_write_is_no_read(scales):
    def run(m, x):
        """Run SiameseNorm, whose reads contain norms of a stream."""
        u = v = x
        for k, scale in enumerate(scales):
            w = m.mlps[k](u + m.others[k](v))
            u, v = m.norms[k](u + scale * w), v + w
        return u + m.last(v)

    found = addnorm.verify(make_steps(run), X, wiring="siamese_norm")
    assert [str(one).startswith(B) for one in found.deviations] == [True] * (scales[-1] == 1.0), str(found)


@pytest.mark.parametrize("wiring", [w for w in wirings.list_all() if not w.has_rows], ids=lambda w: w.name)
def test_right_model_agrees_before_training(wiring):
    found = addnorm.verify(encoder(wiring), X, wiring=wiring)
    assert found.agrees, str(found)


def test_result_says_where_no_parameters_were_moved(monkeypatch):
    model = encoder("hyper_connections")
    found = addnorm.verify(model, X, wiring="hyper_connections")
    assert found.moved
    assert found.to_dict()["moved"]
    assert "as they are" not in str(found)
    monkeypatch.setattr(importlib.import_module("addnorm.stream.verify"), "MOVE", 1e38)
    found = addnorm.verify(model, X, wiring="hyper_connections")
    assert found.agrees
    assert found.to_dict()["moved"] is False
    text = "with the parameters of the coefficients as they are: streams that are equal before training hide errors"
    assert " ".join(str(found).split()).endswith(text)
    for wiring in ("pre_ln", "siamese_norm"):  # without parameters of coefficients
        assert addnorm.verify(encoder(wiring), X, wiring=wiring).moved is None


def test_threads_that_verify_one_model_leave_it_as_it_is():
    model = encoder("mhc", 1)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(lambda _: addnorm.verify(model, X, wiring="mhc"), range(6))]
    assert all(one.agrees and one.moved for one in found), [*map(str, found)]
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
