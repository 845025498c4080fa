"""from_torch: what torch's transformers compute, outputs and every gradient, and a sentence for what they cannot be."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import addnorm
from addnorm.nn import Decoder, Encoder, Transformer, from_torch
from oracle import relative

D, HEADS, D_FF, LAYERS = 24, 3, 40, 2
BATCH, SOURCE, TARGET = 3, 7, 5
LIMIT = {torch.float64: 1e-12, torch.float32: 1e-6}
INF = float("inf")


def layer(kind, **options):
    options = {"dropout": 0.0, "batch_first": True, **options}
    return kind(D, HEADS, D_FF, **options)


def encoder(norm=True, n=LAYERS, **options):
    final = nn.LayerNorm(D, dtype=options.get("dtype"), bias=options.get("bias", True)) if norm else None
    # Nested tensors have a test of their own; elsewhere torch would only warn that it does without.
    return shaken(
        nn.TransformerEncoder(layer(nn.TransformerEncoderLayer, **options), n, final, enable_nested_tensor=False)
    )


def decoder(norm=True, n=LAYERS, **options):
    final = nn.LayerNorm(D, dtype=options.get("dtype"), bias=options.get("bias", True)) if norm else None
    return shaken(nn.TransformerDecoder(layer(nn.TransformerDecoderLayer, **options), n, final))


def transformer(**options):
    options = {"dropout": 0.0, "batch_first": True, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        return shaken(nn.Transformer(D, HEADS, LAYERS, LAYERS, D_FF, **options))


def shaken(module):
    """Every parameter its own random value: layers are clones at first, biases zeros, norms ones."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def padding(n):
    """True where a token is padding, as torch has it; the samples differ."""
    return torch.arange(n) >= torch.tensor([n, n - 2, n - 3]).unsqueeze(1)


def additive(bool_mask, dtype):
    return torch.zeros(bool_mask.shape, dtype=dtype).masked_fill_(bool_mask, -INF)


def later(n):
    """True where a key is later than the query: torch's causal mask."""
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def masks(kind, n, dtype):
    """(torch's attn_mask and key_padding_mask, ours) of a kind."""
    if kind == "none":
        return (None, None), (None, None)
    if kind == "causal":
        return (later(n), None), (~later(n), None)
    if kind == "float":
        bias = torch.randn(n, n, dtype=dtype)
        return (bias, None), (bias, None)
    if kind == "padding":
        return (None, padding(n)), (None, ~padding(n))
    if kind == "causal and padding":
        return (later(n), padding(n)), (~later(n), ~padding(n))
    if kind == "float and padding":
        bias, pad = torch.randn(n, n, dtype=dtype), additive(padding(n), dtype)
        return (bias, pad), (bias, pad)
    raise AssertionError(kind)


KINDS = ("none", "causal", "float", "padding", "causal and padding", "float and padding")


def in_torchs_layout(ours):
    """The gradients of our parameters in the order and the layout of torch's `named_parameters`, one list for a stack."""
    grads = []
    for sublayers in ours.stack.layers():
        tail = []
        for connection in sublayers:
            sublayer = connection.sublayer
            if hasattr(sublayer, "down"):
                linears = [p for m in (sublayer.up, sublayer.down) for p in (m.weight, m.bias)]
            elif hasattr(sublayer, "in_proj"):
                linears = [sublayer.in_proj.weight, sublayer.in_proj.bias, *two(sublayer.out_proj)]
            else:
                joined = [
                    (sublayer.q_proj.weight, sublayer.kv_proj.weight),
                    (sublayer.q_proj.bias, sublayer.kv_proj.bias),
                ]
                linears = [None if a is None else torch.cat([a.grad, b.grad]) for a, b in joined] + two(
                    sublayer.out_proj
                )
            grads += [p.grad if isinstance(p, nn.Parameter) else p for p in linears]
            tail += [None if p is None else p.grad for p in two(connection.norm_in or connection.norm_out)]
        grads += tail
    final = ours.stack.norm_final
    grads += [] if final is None else [None if p is None else p.grad for p in two(final)]
    return [g for g in grads if g is not None]


def two(module):
    return [module.weight, module.bias]


def gradients(ours):
    parts = (ours.encoder, ours.decoder) if isinstance(ours, Transformer) else (ours,)
    return [g for part in parts for g in in_torchs_layout(part)]


def compare(theirs, ours, call_theirs, call_ours, inputs, limit):
    """Outputs, and the gradients of every input and parameter, under the same random cotangent."""
    names = [*(f"input {i}" for i in range(len(inputs))), *(name for name, _ in theirs.named_parameters())]
    results = []
    for module, call in ((theirs, call_theirs), (ours, call_ours)):
        module.zero_grad()
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = call(module, *leaves)
        torch.manual_seed(7)
        y.backward(torch.randn(y.shape, dtype=y.dtype))
        own = [p.grad for p in module.parameters()] if module is theirs else gradients(module)
        results.append([y.detach(), *(leaf.grad for leaf in leaves), *own])
    want, got = results
    assert len(got) == len(want) == len(names) + 1
    for name, a, b in zip(["output", *names], got, want, strict=True):
        assert a.shape == b.shape, name
        assert relative(a, b) < limit, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre_ln", "post_ln"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_computes_what_torchs_does_with_every_gradient(kind, norm_first, dtype):
    theirs = encoder(norm_first=norm_first, dtype=dtype, activation="gelu" if "padding" in kind else "relu")
    ours = from_torch(theirs)
    (mask, pad), (our_mask, our_pad) = masks(kind, SOURCE, dtype)
    x = torch.randn(BATCH, SOURCE, D, dtype=dtype)
    compare(
        theirs, ours, lambda m, x: m(x, mask, pad), lambda m, x: m(x, our_mask, our_pad), [x], LIMIT[dtype]
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre_ln", "post_ln"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_computes_what_torchs_does_with_every_gradient(kind, norm_first, dtype):
    theirs = decoder(norm_first=norm_first, dtype=dtype, activation="relu" if "padding" in kind else "gelu")
    ours = from_torch(theirs)
    (mask, pad), (our_mask, our_pad) = masks(kind, TARGET, dtype)
    (_, memory_pad), (_, our_memory_pad) = masks("padding", SOURCE, dtype)
    memory_mask = torch.randn(TARGET, SOURCE, dtype=dtype) if kind == "float" else None
    memory_pad = additive(memory_pad, dtype) if kind == "float" else memory_pad
    x, memory = torch.randn(BATCH, TARGET, D, dtype=dtype), torch.randn(BATCH, SOURCE, D, dtype=dtype)
    compare(
        theirs, ours,
        lambda m, x, memory: m(x, memory, mask, memory_mask, pad, memory_pad),
        lambda m, x, memory: m(x, memory, our_mask, our_pad, memory_mask, our_memory_pad),
        [x, memory], LIMIT[dtype],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre_ln", "post_ln"])
@pytest.mark.parametrize("kind", ["none", "causal and padding"])
def test_a_transformer_computes_what_torchs_does_with_every_gradient(kind, norm_first, dtype):
    theirs = transformer(norm_first=norm_first, dtype=dtype)
    ours = from_torch(theirs)
    (mask, pad), (our_mask, our_pad) = masks(kind, TARGET, dtype)
    source_pad = None if kind == "none" else padding(SOURCE)
    our_source = None if kind == "none" else ~source_pad
    source, target = torch.randn(BATCH, SOURCE, D, dtype=dtype), torch.randn(BATCH, TARGET, D, dtype=dtype)
    compare(
        theirs, ours,
        lambda m, s, t: m(s, t, None, mask, None, source_pad, pad, source_pad),
        lambda m, s, t: m(s, t, None, our_source, our_mask, our_pad),
        [source, target], LIMIT[dtype],
    )  # fmt: skip


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre_ln", "post_ln"])
@pytest.mark.parametrize(("make", "ours_is"), [(encoder, Encoder), (decoder, Decoder)])
@pytest.mark.parametrize(
    "options",
    [{"norm": False}, {"bias": False}, {"layer_norm_eps": 0.1}, {"activation": torch.tanh},
     {"activation": nn.GELU("tanh")}, {"batch_first": False}],
    ids=lambda options: next(iter(options)) if torch.tanh in options.values() else str(options), # whose text has an address
)  # fmt: skip
def test_options_are_kept(options, make, ours_is, norm_first):
    theirs = make(norm_first=norm_first, dtype=torch.float64, **options).double()
    ours = from_torch(theirs)
    assert type(ours) is ours_is
    shape = (BATCH, TARGET, D) if options.get("batch_first", True) else (TARGET, BATCH, D)
    inputs = [torch.randn(shape, dtype=torch.float64) for _ in range(1 if make is encoder else 2)]
    compare(theirs, ours, lambda m, *x: m(*x), lambda m, *x: m(*x), inputs, 1e-12)


def test_an_activation_with_parameters_is_copied_for_every_layer():
    theirs = encoder(activation=nn.PReLU(dtype=torch.float64), dtype=torch.float64)
    with torch.no_grad():
        for one in theirs.layers:
            one.activation.weight.uniform_(-1, 1)
    ours = from_torch(theirs)
    x = torch.randn(BATCH, SOURCE, D, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    for one, (_, feed_forward) in zip(theirs.layers, ours.stack.layers(), strict=True):
        assert torch.equal(feed_forward.sublayer.activation.weight, one.activation.weight)
        assert feed_forward.sublayer.activation is not one.activation


def test_every_norm_keeps_its_own_eps():
    theirs = encoder(dtype=torch.float64)
    for i, norm in enumerate(m for m in theirs.modules() if isinstance(m, nn.LayerNorm)):
        norm.eps = 10.0 ** -(i + 1)
    x = torch.randn(BATCH, SOURCE, D, dtype=torch.float64)
    torch.testing.assert_close(from_torch(theirs)(x), theirs(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre_ln", "post_ln"])
def test_a_layer_alone_is_a_stack_of_one_without_final_norm(norm_first):
    x, memory = torch.randn(BATCH, TARGET, D, dtype=torch.float64), torch.randn(BATCH, SOURCE, D, dtype=torch.float64)
    one = shaken(layer(nn.TransformerEncoderLayer, norm_first=norm_first, dtype=torch.float64))
    ours = from_torch(one)
    assert type(ours) is Encoder
    assert ours.stack.norm_final is None
    torch.testing.assert_close(ours(x), one(x), rtol=1e-12, atol=1e-12)
    one = shaken(layer(nn.TransformerDecoderLayer, norm_first=norm_first, dtype=torch.float64))
    torch.testing.assert_close(from_torch(one)(x, memory), one(x, memory), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre_ln", "post_ln"])
@pytest.mark.parametrize("heads_even", [True, False])  # torch's fast path wants an even number
@pytest.mark.parametrize("kind", ["none", "causal", "padding"])
def test_torchs_fast_path_in_eval_without_gradients_gives_the_same(kind, heads_even, norm_first):
    d = 24
    one = nn.TransformerEncoderLayer(d, 4 if heads_even else 3, 40, batch_first=True, norm_first=norm_first)
    theirs = shaken(nn.TransformerEncoder(one, 2, nn.LayerNorm(d), enable_nested_tensor=False)).eval()
    ours = from_torch(theirs)
    (mask, pad), (our_mask, our_pad) = masks(kind, SOURCE, torch.float32)
    x = torch.randn(BATCH, SOURCE, d)
    with torch.no_grad():
        want, got = theirs(x, mask, pad), ours(x, our_mask, our_pad)
    assert relative(got, want) < 1e-6


# torch says at every use that nested tensors are a prototype.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_torchs_nested_tensors_give_the_same_where_there_is_no_padding_and_zeros_where_there_is():
    one = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True)
    theirs = shaken(nn.TransformerEncoder(one, 2)).eval()
    x, pad = torch.randn(BATCH, SOURCE, 24), padding(SOURCE)
    with torch.no_grad():
        want, got = theirs(x, None, pad), from_torch(theirs)(x, key_mask=~pad)
    assert want[pad].eq(0).all()
    assert relative(got[~pad], want[~pad]) < 1e-6


def test_a_causal_encoder_becomes_a_decoder_that_masks_by_itself_and_decodes_with_a_cache():
    theirs = encoder(dtype=torch.float64, norm_first=True).eval()
    ours = from_torch(theirs, causal=True)
    assert type(ours) is Decoder
    x = torch.randn(BATCH, SOURCE, D, dtype=torch.float64)
    want = theirs(x, later(SOURCE))
    torch.testing.assert_close(ours(x), want, rtol=1e-12, atol=1e-12)
    cache = addnorm.nn.KeyValueCache()
    steps = torch.cat([ours(step, cache=cache) for step in x.split(2, dim=1)], dim=1)
    torch.testing.assert_close(steps, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [decoder, transformer])
def test_causal_is_the_decoders(make):
    theirs = make(dtype=torch.float64)
    ours = from_torch(theirs, causal=True)
    source, target = (
        torch.randn(BATCH, SOURCE, D, dtype=torch.float64),
        torch.randn(BATCH, TARGET, D, dtype=torch.float64),
    )
    inputs = (source, target) if make is transformer else (target, source)
    torch.testing.assert_close(ours(*inputs), theirs(*inputs, tgt_mask=later(TARGET)), rtol=1e-12, atol=1e-12)


def test_dropouts_modes_and_flags_are_kept():
    theirs = transformer()
    for i, module in enumerate(m for m in theirs.modules() if isinstance(m, nn.Dropout | nn.MultiheadAttention)):
        if isinstance(module, nn.Dropout):
            module.p = (i + 1) / 100
        else:
            module.dropout = (i + 1) / 100
    theirs.decoder.layers[1].dropout2.eval()
    theirs.encoder.layers[0].self_attn.eval()
    theirs.encoder.layers[0].linear1.weight.requires_grad_(False)
    theirs.decoder.layers[0].multihead_attn.in_proj_bias.requires_grad_(False)
    ours = from_torch(theirs)
    layers = zip(
        [*theirs.encoder.layers, *theirs.decoder.layers],
        [*ours.encoder.stack.layers(), *ours.decoder.stack.layers()],
        strict=True,
    )
    for one, connections in layers:
        *attentions, feed_forward = connections
        for i, (name, connection) in enumerate(zip(("self_attn", "multihead_attn"), attentions, strict=False)):
            assert connection.sublayer.dropout == getattr(one, name).dropout
            assert connection.sublayer.training is getattr(one, name).training
            assert connection.dropout == getattr(one, f"dropout{i + 1}").p
            assert connection.training is getattr(one, f"dropout{i + 1}").training
        assert feed_forward.sublayer.dropout == one.dropout.p
        assert feed_forward.dropout == getattr(one, f"dropout{len(connections)}").p
    assert not ours.decoder.stack.connections[4].training
    frozen = {name for name, p in ours.named_parameters() if not p.requires_grad}
    first = "encoder.stack.connections.1.sublayer.up.weight"
    assert frozen == {first, *(f"decoder.stack.connections.1.sublayer.{name}.bias" for name in ("q_proj", "kv_proj"))}
    assert not from_torch(theirs.eval()).decoder.training


def test_dropout_of_all_kinds_has_torchs_mean_and_spread():
    theirs = encoder(n=1, norm_first=True, norm=False, dropout=0.3)
    ours = from_torch(theirs)
    x = torch.randn(1, SOURCE, D).expand(4000, -1, -1)
    with torch.no_grad():
        want, got = theirs(x), ours(x)
    spread = want.std(0)
    # Of 4000 samples a mean is known to 1/sqrt(4000), a spread to about 1/sqrt(8000), of the spread; five of those.
    assert ((got.mean(0) - want.mean(0)).abs() / spread).max() < 5 * (2 / 4000) ** 0.5
    assert (got.std(0) / spread - 1).abs().max() < 7 * (1 / 4000) ** 0.5


def test_the_copy_is_a_copy_in_the_same_dtype_and_nothing_is_drawn():
    theirs = encoder(dtype=torch.bfloat16)
    before = copy.deepcopy(theirs.state_dict())
    state = torch.get_rng_state()
    ours = from_torch(theirs)
    assert torch.equal(torch.get_rng_state(), state)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in ours.parameters()} == {"cpu"}
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    assert all(torch.equal(value, before[name]) for name, value in theirs.state_dict().items())


class Subclass(nn.TransformerEncoderLayer):
    pass


class ScaledNorm(nn.LayerNorm):
    pass


def spoiled(make, spoil, **options):
    module = make(**options)
    spoil(module)
    return module


def set_(path, value):
    def spoil(module):
        *parents, name = path.split(".")
        setattr(module.get_submodule(".".join(parents)), name, value)

    return spoil


def hook(path):
    return lambda module: module.get_submodule(path).register_forward_hook(lambda *_: None)


def tie(module):
    module.layers[1].linear1.weight = module.layers[0].linear1.weight


REFUSED = {
    "another module": (
        lambda: nn.Linear(2, 2),
        TypeError,
        "module is torch.nn.modules.linear.Linear, expected torch.nn.Transformer or",
    ),
    "no module": (lambda: None, TypeError, "module is builtins.NoneType, expected torch.nn.Transformer"),
    "a subclass of the layer": (
        lambda: nn.TransformerEncoder(Subclass(D, HEADS, batch_first=True), 1, enable_nested_tensor=False),
        TypeError,
        r"module.layers.0 is .*Subclass, expected torch.nn.TransformerEncoderLayer itself",
    ),
    "another norm": (
        lambda: spoiled(encoder, set_("layers.1.norm2", nn.RMSNorm(D))),
        TypeError,
        "module.layers.1.norm2 is .*RMSNorm, expected torch.nn.LayerNorm itself: what another class computes is not known",
    ),
    "a norm's subclass": (
        lambda: spoiled(encoder, set_("norm", ScaledNorm(D))),
        TypeError,
        "module.norm is .*ScaledNorm",
    ),
    "a norm of another shape": (
        lambda: spoiled(encoder, set_("norm", nn.LayerNorm((SOURCE, D)))),
        ValueError,
        r"module.norm is over \(7, 24\), expected \(24,\)",
    ),
    "another encoder": (
        lambda: spoiled(transformer, set_("encoder", nn.Identity())),
        TypeError,
        "module.encoder is .*Identity, expected torch.nn.TransformerEncoder",
    ),
    "another dropout": (
        lambda: spoiled(encoder, set_("layers.0.dropout1", nn.AlphaDropout())),
        TypeError,
        "layers.0.dropout1 is .*AlphaDropout",
    ),
    "a parametrization": (
        lambda: spoiled(encoder, lambda m: nn.utils.parametrizations.weight_norm(m.layers[0].linear1)),
        TypeError,
        "module.layers.0.linear1 is .*ParametrizedLinear, expected torch.nn.Linear",
    ),
    "keys that are parameters": (
        lambda: spoiled(
            encoder, set_("layers.0.self_attn", nn.MultiheadAttention(D, HEADS, add_bias_kv=True, batch_first=True))
        ),
        ValueError,
        "module.layers.0.self_attn has bias_k and bias_v, expected none",
    ),
    "keys of zeros": (
        lambda: spoiled(encoder, set_("layers.0.self_attn.add_zero_attn", True)),
        ValueError,
        "self_attn has add_zero_attn=True, expected False",
    ),
    "keys of another width": (
        lambda: spoiled(
            decoder, set_("layers.1.multihead_attn", nn.MultiheadAttention(D, HEADS, kdim=5, batch_first=True))
        ),
        ValueError,
        "module.layers.1.multihead_attn has kdim=5 and vdim=24, expected 24",
    ),
    "layers of two wirings": (
        lambda: spoiled(encoder, set_("layers.1.norm_first", True)),
        ValueError,
        "module.layers.1 has norm_first=True, expected False as module.layers.0 has",
    ),
    "layers of two widths": (
        lambda: spoiled(
            encoder, set_("layers.1", layer(nn.TransformerEncoderLayer).__class__(D, HEADS, 8, batch_first=True))
        ),
        ValueError,
        "module.layers.1.linear1 has out_features=8, expected 40 as module.layers.0.linear1 has",
    ),
    "attentions that differ": (
        lambda: spoiled(decoder, set_("layers.0.multihead_attn.num_heads", 4)),
        ValueError,
        "multihead_attn has num_heads=4, expected 3 as",
    ),
    "encoder and decoder that differ": (
        lambda: spoiled(transformer, set_("encoder", encoder(norm_first=True))),
        ValueError,
        "module.decoder.layers.0 has norm_first=False, expected True as module.encoder.layers.0",
    ),
    "no layers": (
        lambda: spoiled(encoder, set_("layers", nn.ModuleList())),
        ValueError,
        "module.layers is empty, expected at least one",
    ),
    "a hook": (
        lambda: spoiled(encoder, hook("layers.1.linear2")),
        ValueError,
        "module.layers.1.linear2 has hooks, expected none",
    ),
    "a patched forward": (
        lambda: spoiled(encoder, set_("layers.1.forward", lambda x: x)),
        ValueError,
        "module.layers.1 has a forward of its own",
    ),
    "a patched part of the forward": (
        lambda: spoiled(encoder, set_("layers.1._sa_block", lambda *args: args[0])),
        ValueError,
        "module.layers.1 has a _sa_block of its own",
    ),
    "shared weights": (
        lambda: spoiled(encoder, tie),
        ValueError,
        "module.layers.1.linear1.weight is module.layers.0.linear1.weight too, expected one of its own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_be_is_refused_in_a_sentence(name):
    make, error, sentence = REFUSED[name]
    with pytest.raises(error, match=sentence):
        from_torch(make())


def test_the_activation_may_be_a_function_of_any_name():
    theirs = encoder(activation=F.silu, dtype=torch.float64)
    ours = from_torch(theirs)
    assert "activation=silu" in repr(ours)
    assert "activation=relu" in repr(from_torch(encoder()))
