"""Feed-forward, encoder, decoder and transformer under every wiring. That they compute what torch's do: test_nn_from_torch.py."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F

import addnorm
from addnorm.nn import Decoder, Encoder, FeedForward, KeyValueCache, ResidualStack, Transformer, block, wirings
from addnorm.nn.init import weight_roles
from oracle import relative

f64 = torch.float64
D, HEADS, BATCH, N, M = 16, 4, 3, 5, 7
ALL = {
    name: make(**({"multiplier": 0.4} if name == "residual_multiplier" else {})) for name, make in wirings.CONSTRUCTORS.items()
}  # fmt: skip


def sizes(kind):
    return (2, 3, D, HEADS) if kind is Transformer else (3, D, HEADS)


def inputs(kind, dtype=f64, batch=BATCH):
    x, memory = torch.randn(batch, N, D, dtype=dtype), torch.randn(batch, M, D, dtype=dtype)
    return {Encoder: (x,), Decoder: (x, memory), Transformer: (memory, x)}[kind]


def made(kind, wiring="pre_ln", dtype=f64, **options):
    """A module that is not at its start: every parameter moved, so that no factor is zero and no norm is plain."""
    module = kind(*sizes(kind), wiring=wiring, dtype=dtype, **options)
    if module.wiring.profile is not None:
        module.wiring.init_(module, *inputs(kind, dtype))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def with_gradients(call, parameters, tensors, seed=5):
    leaves = [t.clone().requires_grad_() for t in tensors]
    torch.manual_seed(seed)
    y = call(*leaves)
    torch.manual_seed(seed)
    parameters = list(parameters)
    return [y.detach(), *torch.autograd.grad(y, [*leaves, *parameters], torch.randn(y.shape, dtype=y.dtype))]


def same(got, want, limit=1e-12):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert relative(a, b) < limit, i


def padding_free(n, batch=BATCH):
    """True where a token is none of the padding."""
    return torch.arange(n) < torch.tensor([n, n - 2, n - 3])[:batch, None]


# Feed-forward and block.


def test_the_feed_forwards_are_their_formulas():
    x = torch.randn(BATCH, N, D, dtype=f64)
    for name, act in (("relu", F.relu), ("gelu", F.gelu), (torch.sin, torch.sin)):
        ff = FeedForward(D, 24, name, dtype=f64)
        torch.testing.assert_close(ff(x), act(x @ ff.up.weight.T + ff.up.bias) @ ff.down.weight.T + ff.down.bias)
    ff = FeedForward(D, 24, "swiglu", bias=False, dtype=f64)
    gate, up = x @ ff.gate.weight.T, x @ ff.up.weight.T
    torch.testing.assert_close(ff(x), (gate * torch.sigmoid(gate) * up) @ ff.down.weight.T)


def test_swiglus_width_is_the_least_multiple_of_8_with_as_many_weights():
    assert FeedForward(96).up.out_features == 384
    for d, d_ff in ((48, 128), (96, 256), (64, 176), (1, 8), (4096, 10928)):
        with torch.device("meta"):
            assert FeedForward(d, activation="swiglu").gate.out_features == d_ff
        assert d_ff % 8 == 0
        assert 8 * d / 3 <= d_ff < 8 * d / 3 + 8


def test_the_feed_forwards_dropout_is_inside_and_for_training():
    ff = FeedForward(1, 4000, dropout=0.25, bias=False)
    with torch.no_grad():
        ff.up.weight.fill_(1.0)
        ff.down.weight.fill_(1.0)
    kept = ff(torch.ones(1)).item() * 0.75 / 4000  # the share that is kept, times 4/3 each
    assert abs(kept - 0.75) < 5 * math.sqrt(0.75 * 0.25 / 4000)
    assert ff.eval()(torch.ones(1)).item() == 4000


def test_a_block_is_a_list_of_sublayers_in_their_order():
    names = [type(sublayer).__name__ for sublayer in block(D, HEADS, 8, cross_attention=True, causal=True)]
    assert names == ["SelfAttention", "CrossAttention", "FeedForward"]
    attention, ff = block(D, HEADS, dropout=0.2, attention_dropout=0.1, bias=False)
    assert (attention.dropout, ff.dropout, attention.causal) == (0.2 / 2, 0.2, False)
    assert [name for name, _ in ff.named_parameters()] == ["up.weight", "down.weight"]
    module = torch.nn.PReLU()
    assert block(D, HEADS, activation=module)[1].activation is not module


# Every wiring.


@pytest.mark.parametrize("wiring", ALL)
@pytest.mark.parametrize("kind", [Encoder, Decoder, Transformer])
def test_any_wiring_gives_every_parameter_a_gradient_and_its_start_is_finite(kind, wiring):
    start = kind(*sizes(kind), wiring=ALL[wiring], dtype=f64)
    assert start(*inputs(kind)).isfinite().all()
    module = made(kind, ALL[wiring])
    y, *grads = with_gradients(module, module.parameters(), inputs(kind))
    assert y.shape == (BATCH, N, D)
    for g in grads:
        assert g.isfinite().all()
        assert g.ne(0).any()


@pytest.mark.parametrize("wiring", ALL)
def test_an_encoder_is_a_stack_of_blocks_and_masks_are_merged_for_all_of_them(wiring, monkeypatch):
    encoder = made(Encoder, ALL[wiring])
    (x,) = inputs(Encoder)
    mask, keys = torch.randn(N, N, dtype=f64), padding_free(N)
    want = encoder.stack(x, mask=mask, key_mask=keys)  # each attention merges for itself
    told, sdpa = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, m, *rest: told.append(m) or sdpa(q, k, v, m, *rest)
    )
    assert torch.equal(encoder(x, mask, keys), want)
    assert len(told) == 3
    assert all(m is told[0] for m in told)


@pytest.mark.parametrize("wiring", ALL)
def test_decoding_with_a_cache_works_under_every_wiring(wiring):
    decoder = made(Decoder, ALL[wiring]).eval()
    x, memory = inputs(Decoder)
    with torch.no_grad():
        cache = KeyValueCache()
        got = torch.cat([decoder(step, memory, cache=cache) for step in x.split([2, 1, 2], 1)], 1)
        torch.testing.assert_close(got, decoder(x, memory), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wiring", ["pre_ln", "post_ln", "resi_dual", "parallel"])
def test_a_decoder_does_not_look_ahead_but_where_causal_is_false(wiring):
    for causal in (True, False):
        decoder = made(Decoder, wiring, causal=causal)
        x, memory = inputs(Decoder)
        other = torch.cat([x[:, :3], torch.randn(BATCH, N - 3, D, dtype=f64)], 1)
        assert torch.equal(decoder(x, memory)[:, :3], decoder(other, memory)[:, :3]) is causal


@pytest.mark.parametrize("wiring", ALL)
@pytest.mark.parametrize("kind", [Encoder, Decoder, Transformer])
def test_without_gradients_the_bits_are_the_same_and_nothing_that_was_given_is_written(kind, wiring):
    module = made(kind, ALL[wiring]).eval()
    x = torch.randn(BATCH, N, D, dtype=f64)
    tensors = (x,) if kind is Encoder else (x, x)  # the memory is the stream's start
    want, before = module(*tensors).detach(), x.clone()
    with torch.no_grad():
        assert torch.equal(module(*tensors), want)
    assert torch.equal(x, before)


def test_a_transformer_is_its_encoder_and_its_decoder_and_hides_the_sources_padding_from_both():
    transformer = made(Transformer)
    source, target = inputs(Transformer)
    keep, mask = padding_free(M), torch.randn(N, M, dtype=f64)
    memory = transformer.encoder(source, key_mask=keep)
    assert torch.equal(
        transformer(source, target, None, keep), transformer.decoder(target, memory, memory_key_mask=keep)
    )
    everything = torch.ones(BATCH, M, dtype=torch.bool)
    assert torch.equal(
        transformer(source, target, None, keep, memory_mask=mask, memory_key_mask=everything),
        transformer.decoder(target, memory, memory_mask=mask),
    )


@pytest.mark.parametrize("kind", [Encoder, Decoder, Transformer])
def test_batch_first_is_a_matter_of_layout(kind):
    module, tensors = made(kind), inputs(kind)
    other = kind(*sizes(kind), dtype=f64, batch_first=False)
    other.load_state_dict(module.state_dict())
    keep = {"key_mask" if kind is not Transformer else "source_key_mask": padding_free(M if kind is Transformer else N)}
    want = module(*tensors, **keep)
    got = other(*(t.transpose(0, 1) for t in tensors), **keep)
    torch.testing.assert_close(got.transpose(0, 1), want, rtol=1e-13, atol=1e-13)


# Initialization.


def stds(module, role):
    """The standard deviation of the weights of a role over what Xavier's rule gives, one for each sublayer."""
    found = []
    for connection in module.stack.connections:
        for name, weight in weight_roles(connection.sublayer):
            if name == role:
                found.append(weight.std().item() / math.sqrt(2 / sum(weight.shape)))
    return found


def test_deepnorms_constants_in_an_encoder_decoder_are_the_papers():
    n, m = 2, 3
    transformer = Transformer(n, m, D, HEADS, wiring="deepnorm")
    alphas = {
        transformer.encoder: 0.81 * (n**4 * m) ** (1 / 16),
        transformer.decoder: (3 * m) ** (1 / 4),
        Encoder(n, D, HEADS, wiring="deepnorm"): (2 * n) ** (1 / 4),
        Decoder(m, D, HEADS, wiring=addnorm.wirings.deepnorm("decoder-only"), cross_attention=False): (2 * m)
        ** (1 / 4),
    }
    for module, alpha in alphas.items():
        constants = [connection.a for connection in module.stack.connections]
        assert constants == pytest.approx([alpha] * len(constants), rel=1e-15)


def test_deepnorm_draws_values_outputs_and_feed_forwards_smaller_and_queries_and_keys_not():
    n, m = 2, 4
    transformer = Transformer(n, m, 256, 4, wiring="deepnorm")
    betas = ((transformer.encoder, 0.87 * (n**4 * m) ** (-1 / 16)), (transformer.decoder, (12 * m) ** (-1 / 4)))
    for module, beta in betas:
        for role in ("value", "out", "up", "down"):
            assert stds(module, role) == pytest.approx([beta] * len(stds(module, role)), rel=0.02), role
        for role in ("query", "key"):
            assert stds(module, role) == pytest.approx([1.0] * len(stds(module, role)), rel=0.02), role
    assert len(stds(transformer.decoder, "value")) == 2 * m


def test_the_start_is_the_wirings_own_rule_and_init_repeats_it():
    for wiring in ("pre_ln", "sandwich", "deepnorm", "rezero"):
        torch.manual_seed(11)
        encoder = Encoder(2, D, HEADS, wiring=wiring, activation="swiglu")
        start = copy.deepcopy(encoder.state_dict())
        torch.manual_seed(11)
        twin = Encoder(2, D, HEADS, wiring=wiring, activation="swiglu")
        assert all(torch.equal(start[name], value) for name, value in twin.state_dict().items())
        torch.manual_seed(3)
        encoder.wiring.init_(encoder)
        first = copy.deepcopy(encoder.state_dict())
        torch.manual_seed(3)
        twin.wiring.init_(twin)
        assert all(torch.equal(first[name], value) for name, value in twin.state_dict().items())
        for name, value in start.items():
            assert not name.endswith("proj.bias") or value.eq(0).all()


def test_gpt2s_rule_scales_what_writes_by_the_depth_and_xaviers_bounds_hold():
    sandwich = Encoder(8, 256, 4, wiring="sandwich")
    for connection in sandwich.stack.connections:
        for role, weight in weight_roles(connection.sublayer):
            want = 0.02 / 4 if role in ("out", "down") else 0.02
            assert weight.std().item() == pytest.approx(want, rel=0.03), role
    pre_ln = Encoder(2, 64, 4)
    for connection in pre_ln.stack.connections:
        for _, weight in weight_roles(connection.sublayer):
            bound = math.sqrt(6 / sum(weight.shape))
            assert 0.98 * bound < weight.abs().max() <= bound


def test_admin_measures_a_decoder_with_what_the_encoder_gives_it():
    transformer = Transformer(2, 2, D, HEADS, wiring="admin", dtype=f64, dropout=0.3)
    source, target = inputs(Transformer)
    with pytest.raises(TypeError, match="give init_ what the stack is called with"):
        transformer.wiring.init_(transformer)
    transformer.wiring.init_(transformer, source, target)
    assert transformer.training
    assert transformer.decoder.stack.connections[0].sublayer.training
    transformer.eval().requires_grad_(False)
    first, second, third = list(transformer.decoder.stack.connections)[:3]
    attended = first.sublayer(target)
    x = F.layer_norm(target + attended, (D,))
    torch.testing.assert_close(
        second.a, torch.full_like(second.a, math.sqrt(target.var(correction=0) + attended.var(correction=0)))
    )
    omega = math.sqrt(
        second.a[0] ** 2 * x.var(correction=0) + second.sublayer(x, transformer.encoder(source)).var(correction=0)
    )
    torch.testing.assert_close(third.a, torch.full_like(third.a, omega))
    assert not any(stack._forward_pre_hooks for stack in (transformer.encoder.stack, transformer.decoder.stack))


# What a token depends on.


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("wiring", ["pre_ln", "post_ln", "resi_dual"])
def test_a_token_does_not_depend_on_what_the_other_samples_hold_to_the_bit(wiring, norm):
    encoder = made(Encoder, wiring, torch.float32, norm=norm).eval()
    (x,) = inputs(Encoder, torch.float32)
    other = torch.cat([x[:1], 100 * torch.randn(BATCH - 1, N, D)])
    assert torch.equal(encoder(x)[0], encoder(other)[0])
    # With another number of samples matrix products may add in another order: their rounding, and no more.
    assert relative(encoder(x[:1])[0], encoder(x)[0]) < 1e-6


def test_the_add_and_norms_do_not_depend_on_the_batch_to_the_bit():
    """With sublayers that do no sums over features, so that nothing but the Add & Norms could depend on it."""
    stack = ResidualStack([torch.sin, torch.tanh, torch.exp, torch.cos], 50, "pre_ln")
    x = torch.randn(64, 9, 50)
    whole = stack(x)
    for i in (0, 17, 63):
        assert torch.equal(stack(x[i : i + 1])[0], whole[i])


@pytest.mark.parametrize("kind", [Encoder, Decoder, Transformer])
def test_no_token_depends_on_padding(kind):
    module, keep = made(kind).eval(), padding_free(M)
    x, memory = inputs(Decoder)
    filled = torch.where(keep[..., None], memory, 1e3 * torch.randn_like(memory))
    if kind is Encoder:
        a, b = (module(t, key_mask=keep)[keep] for t in (memory, filled))
        alone = module(memory[2:, : M - 3])[0], module(memory, key_mask=keep)[2, : M - 3]
    elif kind is Decoder:
        a, b = (module(x, t, memory_key_mask=keep) for t in (memory, filled))
        alone = module(x[2:], memory[2:, : M - 3])[0], a[2]
    else:
        a, b = (module(t, x, source_key_mask=keep) for t in (memory, filled))
        alone = module(memory[2:, : M - 3], x[2:])[0], a[2]
    assert torch.equal(a, b)  # what padding holds, to the bit
    torch.testing.assert_close(*alone, rtol=1e-12, atol=1e-12)  # and how much of it there is


# Options of the stack.


def test_dropout_is_of_what_a_sublayer_adds_too_and_eval_has_none():
    encoder = Encoder(1, D, HEADS, wiring=addnorm.Row(), dropout=0.3)
    with torch.no_grad():  # both sublayers return ones, whatever they read
        for name, parameter in encoder.named_parameters():
            parameter.fill_(1.0 if name.endswith(("out_proj.bias", "down.bias")) else 0.0)
    x = torch.zeros(200, N, D)
    added = encoder(x)
    of_each = {0.0: 0.3**2, 1 / 0.7: 2 * 0.3 * 0.7, 2 / 0.7: 0.7**2}
    for value, share in of_each.items():
        found = (added - value).abs().lt(1e-5).float().mean().item()
        assert abs(found - share) < 5 * math.sqrt(share * (1 - share) / x.numel())
    assert torch.equal(encoder.eval()(x), torch.full_like(x, 2.0))
    attention, feed_forward = (connection.sublayer for connection in encoder.stack.connections)
    assert (attention.dropout, feed_forward.dropout) == (0.3, 0.3)


def test_stochastic_depth_drops_samples_not_tokens_in_either_layout():
    for batch_first in (True, False):
        encoder = made(Encoder, "pre_ln", stochastic_depth=1.0, final_norm=False, batch_first=batch_first)
        (x,) = inputs(Encoder, batch=64)
        x = x if batch_first else x.transpose(0, 1)
        last = encoder.stack.connections[-1]
        assert last.stochastic_depth == 1.0
        for i, connection in enumerate(encoder.stack.connections):
            connection.stochastic_depth = 0.5 if i == 0 else 1.0
        changed = encoder(x).ne(x).flatten(2).any(2)  # (batch, tokens) or (tokens, batch)
        samples = changed if batch_first else changed.T
        assert torch.equal(samples, samples[:, :1].expand_as(samples))
        assert 16 < samples[:, 0].sum() < 48


@pytest.mark.parametrize("kind", [Encoder, Decoder, Transformer])
def test_checkpointing_changes_no_number_with_masks_and_dropout(kind):
    module = made(kind, dropout=0.2, attention_dropout=0.1, stochastic_depth=0.3)
    other = kind(*sizes(kind), dtype=f64, dropout=0.2, attention_dropout=0.1, stochastic_depth=0.3, checkpoint=True)
    other.load_state_dict(module.state_dict())
    keep = {"key_mask" if kind is not Transformer else "source_key_mask": padding_free(M if kind is Transformer else N)}
    tensors = inputs(kind)
    a, b = (with_gradients(lambda *t, m=m: m(*t, **keep), m.parameters(), tensors) for m in (module, other))
    assert all(torch.equal(one, two) for one, two in zip(a, b, strict=True))


def test_bfloat16_over_a_float32_stream_is_closer_than_over_its_own():
    exact = made(Encoder)
    (x,) = inputs(Encoder, torch.bfloat16)
    want, errors = exact(x.double()), []
    for stream in (None, torch.float32):
        encoder = Encoder(*sizes(Encoder), dtype=torch.bfloat16, stream_dtype=stream)
        encoder.load_state_dict(exact.state_dict())
        y = encoder(x)
        assert y.dtype == torch.bfloat16
        errors.append(relative(y, want))
    assert errors[1] < errors[0] < 0.05


def test_a_norm_of_any_kind_without_biases_and_an_eps():
    encoder = Encoder(1, D, HEADS, norm="rms", eps=0.5, bias=False, activation="swiglu", final_norm=False)
    assert [name for name, _ in encoder.named_parameters() if "bias" in name] == []
    assert {m.eps for m in encoder.modules() if isinstance(m, addnorm.RMSNorm)} == {0.5}
    assert encoder.stack.norm_final is None


# As any other module.


@pytest.mark.parametrize("kind", [Encoder, Decoder, Transformer])
def test_states_load_and_copies_compute_the_same(kind):
    module, tensors = made(kind, "rezero" if kind is Encoder else "layer_scale"), inputs(kind)
    want = module(*tensors)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = kind(*sizes(kind), wiring=module.wiring, dtype=f64)
    assert not torch.equal(other(*tensors), want)
    other.load_state_dict(torch.load(file))
    for twin in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(*tensors), want)


def test_functional_call_computes_with_other_parameters():
    module, (x, memory) = made(Decoder), inputs(Decoder)
    other = {name: p + 0.1 * torch.randn_like(p) for name, p in module.named_parameters()}
    got = torch.func.functional_call(module, other, (x, memory))
    module.load_state_dict(other)
    assert torch.equal(got, module(x, memory))


# torch.compile builds its own C++ with setuptools' and distutils' deprecated parts, and warns about itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "wiring", "backend"),
    [(Encoder, "pre_ln", "inductor"), (Encoder, "post_ln", "aot_eager"), (Decoder, "resi_dual", "aot_eager"),
     (Transformer, "deepnorm", "aot_eager")],
)  # fmt: skip
def test_the_whole_compiles_into_one_graph_with_eagers_numbers(kind, wiring, backend):
    torch._dynamo.reset()
    module, tensors = made(kind, wiring), inputs(kind)
    keep = padding_free(M if kind is Transformer else N)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    name = "source_key_mask" if kind is Transformer else "key_mask"
    want = with_gradients(lambda *t: module(*t, **{name: keep}), module.parameters(), tensors)
    same(with_gradients(lambda *t: compiled(*t, **{name: keep}), module.parameters(), tensors), want)
    if backend != "inductor":
        with torch.no_grad():
            torch.testing.assert_close(compiled(*tensors), module(*tensors), rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()


X, MEMORY = torch.zeros(BATCH, N, D), torch.zeros(BATCH, M, D)
REFUSED = {
    "no batch": (
        lambda: Encoder(1, D, HEADS)(X[0]),
        ValueError,
        r"x has shape \(5, 16\), expected \(batch, tokens, 16\): x.unsq",
    ),
    "no memory": (lambda: Decoder(1, D, HEADS)(X), TypeError, "memory is None, expected what is attended to"),
    "a memory nobody asked for": (
        lambda: Decoder(1, D, HEADS, cross_attention=False)(X, MEMORY),
        TypeError,
        "memory is given to a decoder that has cross_attention=False, expected none",
    ),
    "a memory's shape": (
        lambda: Decoder(1, D, HEADS)(X, MEMORY[0], memory_mask=torch.ones(N, M)),
        ValueError,
        r"memory has shape \(7, 16\), expected \(batch, tokens, 16\): memory.unsqueeze\(0\)",
    ),
    "a mask": (
        lambda: Encoder(1, D, HEADS)(X, torch.ones(M, M)),
        ValueError,
        r"mask has shape \(7, 7\), expected \(queries",
    ),
    "a cache that would be filled twice": (
        lambda: Decoder(1, D, HEADS, checkpoint=True)(X, MEMORY, cache=KeyValueCache()),
        ValueError,
        "cache is given to a stack with checkpoint=True, expected none while gradients are on",
    ),
    "an activation": (
        lambda: Encoder(1, D, HEADS, activation="elu"),
        ValueError,
        "activation is 'elu', expected one of 'relu'",
    ),
    "an option": (lambda: Encoder(1, D, HEADS, drop=0.1), TypeError, "unexpected keyword argument 'drop'"),
    "a wiring": (lambda: Encoder(1, D, HEADS, wiring="pre-ln"), ValueError, "wiring is 'pre-ln', expected 'pre_ln'"),
    "no layers": (lambda: Encoder(0, D, HEADS), ValueError, "n_layers is 0, expected a whole number from 1"),
    "a norm": (
        lambda: Encoder(1, D, HEADS, norm="batch"),
        ValueError,
        "norm is 'batch', expected one of 'layer', 'rms'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(name):
    call, error, sentence = REFUSED[name]
    with pytest.raises(error, match=sentence):
        call()
