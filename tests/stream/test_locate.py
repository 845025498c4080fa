"""Tests of `locate`: every state, read and write has its name, in other dtypes and orders, and random tensors have none."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import addnorm
from support.expansion import record_mhc
from support.families import shake
from support.refusals import assert_raises
from support.stacks import encoder
from support.stream_steps import X, make_steps, run_layers

LAYERS, D = 3, 16


@pytest.fixture(scope="module", params=["pre_ln", "post_ln", "peri_ln"])
def case(request):
    model = shake(encoder(request.param, LAYERS))
    x = torch.randn(3, 5, D)
    return model, x, addnorm.inspect(model, x)


def captured(case):
    """Return the values that another program would capture by hooks, with the words of their names."""
    model, x, inspection = case
    found = []

    def keep(site, module, args, out):
        found.extend([(out, ("the output of", site.id)), (args[0], ("what", site.id))])

    hooks = [model.get_submodule(site.path).register_forward_hook(partial(keep, site)) for site in inspection.sites]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_of_sublayers_are_named_in_any_order(case, dtype):
    _, _, inspection = case
    for value, words in captured(case):
        if words[0] == "what" and not any(site.norm_in for site in inspection.sites):
            continue  # post-LN reads the stream itself
        known = value.to(dtype)
        whole = addnorm.locate(inspection, known)
        assert whole.found
        assert all(word in whole.name for word in words)
        assert whole.tokens == "all tokens"
        for part, tokens in (
            (known.transpose(0, 1), "all tokens, in another order"), (known[1:, 2:4], "some tokens"),
            (known[:, -1], "some tokens"), (known.transpose(-1, 1), "all tokens"),
        ):  # fmt: skip
            other = addnorm.locate(inspection, part)
            assert (other.found, other.name, other.tokens) == (True, whole.name, tokens)


def test_states_are_named_to_the_bit(case):
    _, x, inspection = case
    assert addnorm.locate(inspection, x).name in ("the start of the stream", "the embedding before its norm")
    (stream,) = inspection.streams
    names = [addnorm.locate(inspection, value.tensor) for value in stream.chain.states()]
    assert all(one.found and one.distance == 0.0 for one in names)
    assert [one.site for one in names[1:]] == [site.id for site in stream.sites]
    assert str(names[1]).endswith(", to the bit")
    end = addnorm.locate(inspection, case[0](x))
    assert end.found
    assert ("final norm" in end.name) == (stream.final_norm is not None)


def test_random_tensors_have_no_name(case):
    _, _, inspection = case
    values = [value.tensor for value in inspection.streams[0].chain.states()]
    generator = torch.Generator().manual_seed(0)
    for k in range(340):
        like = values[k % len(values)]
        noise = torch.randn(like.shape, generator=generator) * like.std() + like.mean()
        found = addnorm.locate(inspection, noise[: 1 + k % 3])
        assert not found.found
    assert str(found).startswith("no value of a stream; nearest: ")
    assert found.to_dict()["found"] is False


def test_equal_tokens_are_no_obstacle(case):
    model, x, _ = case
    x = x[:, :1].expand(3, 5, D).clone()
    inspection = addnorm.inspect(model, x)
    state = inspection.streams[0].chain.states()[2].tensor
    assert addnorm.locate(inspection, state.transpose(0, 1)).found
    assert not addnorm.locate(inspection, torch.cat([state] * 2)).found  # more equal tokens than there are


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_is_compared(case, dtype):
    state = case[2].streams[0].chain.states()[2].tensor.to(dtype)
    name = addnorm.locate(case[2], state).name
    for part in (state, state.transpose(0, 1), state[1:, 2:4]):
        location = addnorm.locate(case[2], part)
        assert (location.found, location.name, location.distance) == (True, name, 0.0)
    assert not addnorm.locate(case[2], torch.randn(5, D).to(dtype)).found


def make_fake(tensor):
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


ONES = torch.ones(2, D)
REFUSED = {
    "ValueError: tensor has shape (2, 7), expected a dimension of size 16": lambda: ONES[:, :7],
    "TypeError: tensor has dtype int64, expected float32, bfloat16, float16 or float64": ONES.long,
    "TypeError: tensor is a meta": lambda: ONES.to("meta"),
    "TypeError: tensor is a meta or fake tensor": lambda: make_fake(ONES),
    "TypeError: tensor has layout": ONES.to_sparse,
    "TypeError: tensor is a nested tensor": lambda: torch.nested.nested_tensor([ONES, ONES[:1]], layout=torch.jagged),
    "TypeError: tensor is a list": lambda: [ONES],
    "TypeError: tensor is a ndarray": ONES.numpy,
    "ValueError: tensor has no numbers": lambda: ONES[:0],
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_wrong_tensors_are_refused(case, sentence):
    assert_raises(sentence, lambda: addnorm.locate(case[2], REFUSED[sentence]()))


def test_inspection_without_a_stream_is_refused(case):
    model, x, _ = case
    for inspection in (addnorm.inspect(nn.Linear(D, D), ONES), addnorm.inspect(model, x[:0])):
        with pytest.raises(ValueError, match=r"no stream"):
            addnorm.locate(inspection, ONES)


def return_states(m, x):
    """Return the states of three layers, as models of transformers do: the last one is after the final norm."""
    states = [x]
    for k in range(LAYERS):
        states.append(run_layers(m, states[-1], 2 * k, 2 * k + 2))
    y = m.last(states[-1])
    return {"hidden_states": (*states[:-1], y)} if m.named else (y, states[1])


def test_places_in_the_output_are_named():
    model = make_steps(return_states)
    model.named = True
    with torch.no_grad():
        states = model(X)["hidden_states"]
    found = addnorm.inspect(model, X)
    assert [*found.results] == [f"hidden_states[{k}]" for k in range(LAYERS + 1)]
    for k, state in enumerate(states):
        location = addnorm.locate(found, state.bfloat16())
        assert location.others == (f"the model's hidden_states[{k}]",)
        assert location.site == (found.sites[2 * k - 1].id if 0 < k < LAYERS else None)
    model.named = False
    assert "the model's output[1]" in addnorm.locate(addnorm.inspect(model, X), states[1]).others


class Returned:
    """A class of outputs that is registered without the names of its parts, as by diffusers."""

    def __init__(self, sample):
        self.sample = sample


def test_output_without_names_of_its_parts_is_taken():
    if Returned not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(Returned, lambda out: ([out.sample], None), lambda parts, _: Returned(*parts))
    model, x = make_steps(lambda m, x: Returned(m.last(run_layers(m, x)))), torch.randn(3, 5, D)
    found = addnorm.inspect(model, x)
    assert (found.wiring, found.closes) == ("pre_ln", True)
    assert addnorm.locate(found, model(x).sample).others == ("the model's output[0]",)


def make_equation(add, c=1.0):
    """Return the model of x' = add(x, f(c N(x)), g), which keeps what a hook would capture of its last sublayer."""

    def run(m, x):
        for k in range(LAYERS):
            m.norm_out = m.norms[k](x)
            m.read = m.norm_out if c == 1.0 else m.norm_out * c
            m.out = m.mlps[k](m.read)
            x = add(x, m.out, m.gammas[0])
        return x

    return make_steps(run)


def test_read_with_a_factor_is_named():
    model = make_equation(lambda x, w, g: x + w, c=0.5)
    model(X)
    found = addnorm.inspect(model, X)
    assert found.sites[-1].row.c == 0.5
    site = found.sites[-1].id
    assert addnorm.locate(found, model.read).name == f"what {site} reads"
    assert addnorm.locate(found, model.norm_out).name == f"the norm of the stream before {site}, without the factor"


ADDS = {
    "plain product": (lambda x, w, g: x + g * w, lambda w, g: g * w),
    "alpha of a product": (lambda x, w, g: torch.add(x, g * w, alpha=0.22), lambda w, g: 0.22 * g * w),
    "sub": (lambda x, w, g: x - w, lambda w, g: -w),
    "addcmul": (torch.addcmul, torch.mul),
    "lerp": (lambda x, w, g: torch.lerp(x, w, 0.3), lambda w, g: 0.3 * w),
    "scaled sum": (lambda x, w, g: x + g * (w + torch.tanh(w)), lambda w, g: g * (w + torch.tanh(w))),
}


@pytest.mark.parametrize("add", ADDS)
def test_write_with_the_factors_of_its_add_is_named(add):
    function, compute_write = ADDS[add]
    model = make_equation(function)
    found = addnorm.inspect(model, X)
    model(X)
    site, w, g = found.sites[-1].id, model.out, model.gammas[0]
    written = addnorm.locate(found, compute_write(w, g))
    assert (written.found, written.name) == (True, f"what {site} writes")
    for other in (w, g * w):
        location = addnorm.locate(found, other)
        is_write = location.found and location.name == f"what {site} writes"
        assert not is_write or torch.allclose(other, compute_write(w, g))


def make_latents(has_norm):
    """Return a model of learned tokens, expanded to the batch, that read the inputs."""

    def run(m, x):
        z, keys = m.context(m.tokens) if has_norm else m.tokens, m.gates[0](x)
        z = z.expand(len(x), -1, -1)
        z = z + nn.functional.scaled_dot_product_attention(m.norms[0](z), keys, keys)
        return z + m.mlps[0](m.norms[1](z))

    model = make_steps(run)
    model.tokens = nn.Parameter(torch.randn(1, 4, D))
    return model


@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "plain"])
def test_broadcast_start_is_named(has_norm):
    model = make_latents(has_norm)
    found = addnorm.inspect(model, torch.randn(3, 6, D))
    tokens = model.tokens.detach()
    name = "the embedding before its norm" if has_norm else "the start of the stream"
    for captured in (tokens, tokens.expand(3, -1, -1).clone()):
        assert str(addnorm.locate(found, captured)) == f"{name}, to the bit"
    assert addnorm.locate(found, tokens.expand(3, -1, -1).transpose(0, 1)).found
    assert not addnorm.locate(found, tokens.expand(4, -1, -1)).found  # more tokens than there are


def test_reordered_tokens_with_a_large_offset_are_named():
    x = 1000.0 + 0.1 * torch.randn(2, 64, D)
    found = addnorm.inspect(make_equation(lambda x, w, g: x + w), x)
    for captured in (x.transpose(0, 1), x[:, 5:50], x.flatten(0, 1)[torch.randperm(128)]):
        location = addnorm.locate(found, captured)
        assert (location.found, location.name, location.distance) == (True, "the start of the stream", 0.0)


def test_results_outlive_a_change_of_the_model_and_its_inputs():
    model, x = make_equation(lambda x, w, g: x + g * w), X.clone()
    before, found, parts = x.clone(), addnorm.inspect(model, x), addnorm.decompose(model, x)
    with torch.no_grad():
        for tensor in (x, *model.parameters()):
            tensor.normal_()
    assert str(addnorm.locate(found, before)) == "the start of the stream, to the bit"
    torch.testing.assert_close(sum(parts.components().values()), parts.state())


def test_states_of_a_stream_of_images_are_named():
    def run(m, x):
        for k in range(3):
            x = x + m.branch(k, x.flatten(2).mT).mT.unsqueeze(-1)
        return x

    model, x = make_steps(run), torch.randn(2, D, 5, 1)
    captured = run_layers(model, x.flatten(2).mT, last=2)
    assert addnorm.locate(addnorm.inspect(model, x), captured).name == "the stream after mlps.1"


# Several streams, in three layouts.


@pytest.fixture(scope="module", params=["first", "tuple", "flat"])
def run(request):
    run = record_mhc(request.param)
    return addnorm.inspect(run.model, run.x), run


def test_whole_state_is_named_in_every_layout(run):
    found, run = run
    state, (_, before, after, _) = run.states[2], found.program.sites
    flat = [state.flatten(-2).transpose(0, 1)] if run.model.form == "flat" else []
    for same in (state, state.movedim(-2, 0), state.bfloat16(), *flat):
        location = addnorm.locate(found, same)
        assert location.found
        assert location.name == f"the 4 streams after {before.id}, not collapsed"
    location = addnorm.locate(found, state[..., 2, :].transpose(0, 1))
    assert location.name == f"stream 3 of 4 after {before.id}"
    assert "in another order" in location.tokens
    read = (run.sites[2].c[..., None] * state).sum(-2)
    assert addnorm.locate(found, read).name == f"what {after.id} reads, before its norm"
