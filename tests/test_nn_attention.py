"""Attention: the formula, what masks mean, what a fully masked query gets, and decoding with a cache."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch

from addnorm import ResidualStack
from addnorm.nn import CrossAttention, Decoder, KeyValueCache, SelfAttention, block
from addnorm.nn.masks import Merged, merge
from oracle import relative

f64 = torch.float64
D, HEADS, BATCH, N, M = 12, 3, 2, 5, 7
INF = float("inf")


def formula(attention, x, memory, mask=None):
    """The definition, with loops over samples and heads; `mask` bool or float, `(batch, heads, queries, keys)`."""
    if isinstance(attention, SelfAttention):
        q, k, v = attention.in_proj(x).chunk(3, -1)
    else:
        q, (k, v) = attention.q_proj(x), attention.kv_proj(memory).chunk(2, -1)
    width, samples = D // HEADS, []
    for i in range(x.shape[0]):
        heads = []
        for h in range(HEADS):
            columns = slice(h * width, (h + 1) * width)
            scores = q[i, :, columns] @ k[i, :, columns].T / width**0.5
            if mask is not None:
                scores = torch.where(mask[i, h], scores, -INF) if mask.dtype == torch.bool else scores + mask[i, h]
            heads.append(scores.softmax(-1).nan_to_num(0.0) @ v[i, :, columns])
        samples.append(torch.cat(heads, -1))
    return attention.out_proj(torch.stack(samples))


def inputs(attention, n=N, m=M, dtype=f64):
    x = torch.randn(BATCH, n, D, dtype=dtype)
    return (x,) if isinstance(attention, SelfAttention) else (x, torch.randn(BATCH, m, D, dtype=dtype))


def allowed(*shape):
    """A random bool mask that leaves every query the first key."""
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    return mask


KINDS = [SelfAttention, CrossAttention]
SHAPES = {
    "(queries, keys)": lambda n, m: (n, m),
    "(1, keys)": lambda n, m: (1, m),
    "(batch, queries, keys)": lambda n, m: (BATCH, n, m),
    "(batch, 1, queries, keys)": lambda n, m: (BATCH, 1, n, m),
    "(batch, heads, queries, keys)": lambda n, m: (BATCH, HEADS, n, m),
    "(1, heads, 1, keys)": lambda n, m: (1, HEADS, 1, m),
}


def full(mask, n, m):
    return (mask[:, None] if mask.dim() == 3 else mask).expand(BATCH, HEADS, n, m)


def with_gradients(call, attention, tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = call(*leaves)
    torch.manual_seed(3)
    given = torch.randn(y.shape, dtype=y.dtype)
    return [y, *torch.autograd.grad(y, [*leaves, *attention.parameters()], given)]


def same(got, want, limit=1e-12):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert relative(a, b) < limit, i


@pytest.mark.parametrize("key_mask", [None, torch.bool, f64], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, f64], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_any_shape_alone_or_with_one_of_keys_does_what_the_formula_says(kind, shape, dtype, key_mask):
    attention = kind(D, HEADS, dtype=f64)
    tensors = inputs(attention)
    m = N if kind is SelfAttention else M
    keep = allowed(*SHAPES[shape](N, m))
    mask = keep if dtype == torch.bool else torch.randn(keep.shape, dtype=f64).masked_fill(~keep, -INF)
    scores = torch.zeros(BATCH, HEADS, N, m, dtype=f64)
    scores = scores.masked_fill(~full(mask, N, m), -INF) if mask.dtype == torch.bool else scores + full(mask, N, m)
    named = {"mask": mask}
    if key_mask is not None:
        keys = allowed(BATCH, m)
        bias = torch.randn(BATCH, m, dtype=f64)
        named["key_mask"] = keys if key_mask == torch.bool else bias
        scores = scores + (torch.zeros(()).masked_fill(~keys, -INF) if key_mask == torch.bool else bias)[:, None, None]
    if kind is CrossAttention:
        named = {f"memory_{name}": value for name, value in named.items()}
    got = with_gradients(lambda *t: attention(*t, **named), attention, tensors)
    same(got, with_gradients(lambda *t: formula(attention, *t, *[None] * (2 - len(t)), scores), attention, tensors))


@pytest.mark.parametrize("kind", KINDS)
def test_without_masks_every_query_attends_to_every_key(kind):
    attention = kind(D, HEADS, dtype=f64)
    tensors = inputs(attention)
    got = with_gradients(attention, attention, tensors)
    same(got, with_gradients(lambda *t: formula(attention, *t, *[None] * (2 - len(t))), attention, tensors))


@pytest.mark.parametrize("mask", [None, torch.bool, f64], ids=str)
@pytest.mark.parametrize("keys", [None, torch.bool, f64], ids=str)
def test_causal_hides_later_tokens_besides_what_masks_hide(mask, keys):
    attention = SelfAttention(D, HEADS, causal=True, dtype=f64)
    (x,) = inputs(attention)
    scores = torch.zeros(BATCH, HEADS, N, N, dtype=f64).masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -INF)
    named = {}
    for name, kind, shape, lift in (
        ("mask", mask, (N, N), ...),
        ("key_mask", keys, (BATCH, N), (slice(None), None, None)),
    ):
        if kind == torch.bool:
            named[name] = allowed(*shape)
            scores = scores.masked_fill(~named[name][lift], -INF)
        elif kind == f64:
            named[name] = torch.randn(shape, dtype=f64)
            scores = scores + named[name][lift]
    got = with_gradients(lambda x: attention(x, **named), attention, (x,))
    same(got, with_gradients(lambda x: formula(attention, x, None, scores), attention, (x,)))


def test_a_bool_mask_is_the_inverse_of_that_of_torchs_multihead_attention():
    theirs = torch.nn.MultiheadAttention(D, HEADS, batch_first=True, dtype=f64)
    ours = SelfAttention(D, HEADS, dtype=f64)
    ours.in_proj.weight, ours.in_proj.bias = theirs.in_proj_weight, theirs.in_proj_bias
    ours.out_proj = theirs.out_proj
    (x,) = inputs(ours)
    hidden, padding = ~allowed(N, N), ~allowed(BATCH, N)
    want = theirs(x, x, x, key_padding_mask=padding, attn_mask=hidden, need_weights=False)[0]
    torch.testing.assert_close(ours(x, ~hidden, ~padding), want, rtol=1e-12, atol=1e-12)
    of_each_head = torch.randn(BATCH * HEADS, N, N, dtype=f64)
    want = theirs(x, x, x, attn_mask=of_each_head, need_weights=False)[0]
    torch.testing.assert_close(ours(x, of_each_head.unflatten(0, (BATCH, HEADS))), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, f64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_that_may_attend_to_nothing_gets_the_bias_of_out_proj_and_finite_gradients(
    kind, as_float, dropout, dtype
):
    attention = kind(D, HEADS, dropout=dropout, dtype=dtype)
    tensors = inputs(attention, dtype=dtype)
    mask = torch.ones(BATCH, N, N if kind is SelfAttention else M, dtype=torch.bool)
    mask[0, 2] = False
    if as_float:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -INF)
    named = {"mask" if kind is SelfAttention else "memory_mask": mask}
    results = with_gradients(lambda *t: attention(*t, **named), attention, tensors)
    assert torch.equal(results[0][0, 2], attention.out_proj.bias)
    assert not torch.equal(results[0][0, 1], attention.out_proj.bias)
    assert all(t.isfinite().all() for t in results)


def test_left_padding_under_causality_gives_no_nan():
    attention = SelfAttention(D, HEADS, causal=True, dtype=f64)
    (x,) = inputs(attention)
    keys = torch.tensor([[False, False, True, True, True], [True] * 5])
    y = attention(x, key_mask=keys)
    assert torch.equal(y[0, :2], attention.out_proj.bias.expand(2, D))
    torch.testing.assert_close(y[:1, 2:], attention(x[:1, 2:]), rtol=1e-12, atol=1e-12)


def test_a_float_mask_may_train():
    attention = SelfAttention(D, HEADS, causal=True, dtype=f64)
    bias = torch.randn(1, HEADS, N, N, dtype=f64, requires_grad=True)
    (x,) = inputs(attention)
    attention(x, bias).square().sum().backward()
    later = torch.ones(N, N, dtype=torch.bool).triu(1)
    assert bias.grad[..., later].eq(0).all()
    assert bias.grad[..., ~later].ne(0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_drops_attention_weights_while_training_and_keeps_their_mean(kind):
    attention = kind(D, HEADS, dropout=0.4, dtype=f64)
    tensors = inputs(attention)
    many = attention(*(t[:1].expand(4000, -1, -1) for t in tensors))
    want = attention.eval()(*(t[:1] for t in tensors))[0]
    assert many.std(0).min() > 0
    assert ((many.mean(0) - want).abs() / many.std(0)).max() < 5 / 4000**0.5
    assert torch.equal(attention(*tensors), attention(*tensors))


def test_bfloat16_is_as_close_as_bfloat16_can_be_and_takes_float32_masks():
    attention = SelfAttention(D, HEADS, dtype=torch.bfloat16)
    x, mask = torch.randn(BATCH, N, D, dtype=torch.bfloat16), torch.randn(N, N)
    exact = copy.deepcopy(attention).double()
    want = exact(x.double(), mask.double())
    assert attention(x, mask).dtype == torch.bfloat16
    assert relative(attention(x, mask), want) < 4 * 2.0**-8  # projections, weights, values, output: a rounding each
    with torch.autocast("cpu", torch.bfloat16):
        y = copy.deepcopy(attention).float()(x.float(), mask, allowed(BATCH, N))
    assert y.dtype == torch.bfloat16


def test_no_tokens_and_no_samples_are_no_trouble():
    attention, crossing = SelfAttention(D, HEADS, causal=True), CrossAttention(D, HEADS)
    assert attention(torch.randn(2, 0, D)).shape == (2, 0, D)
    assert attention(torch.randn(0, 3, D), key_mask=torch.ones(0, 3, dtype=torch.bool)).shape == (0, 3, D)
    y = crossing(torch.randn(2, 3, D), torch.randn(2, 0, D))
    assert torch.equal(y, crossing.out_proj.bias.expand(2, 3, D))  # nothing to attend to


@pytest.mark.parametrize("kind", KINDS)
def test_weight_roles_are_views_of_the_packed_weights_in_torchs_order(kind):
    attention = kind(D, HEADS)
    packed = (
        attention.in_proj.weight
        if kind is SelfAttention
        else torch.cat([attention.q_proj.weight, attention.kv_proj.weight])
    )
    roles = dict(attention.weight_roles())
    assert list(roles) == ["query", "key", "value", "out"]
    for role, part in zip(roles, packed.chunk(3), strict=False):
        assert torch.equal(roles[role], part)
    with torch.no_grad():
        for i, weight in enumerate(roles.values()):
            torch.nn.init.constant_(weight, i)
    assert [sorted(set(p.flatten().tolist())) for n, p in attention.named_parameters() if n.endswith("weight")] == (
        [[0, 1, 2], [3]] if kind is SelfAttention else [[0], [1, 2], [3]]
    )


# Merged masks: once for all layers.


def test_a_merged_mask_is_taken_as_it_is():
    x = torch.randn(BATCH, N, D)
    merged = merge(x, N, HEADS, None, allowed(BATCH, N), causal=True)
    assert merged.mask.dtype == x.dtype
    assert merge(x, N, HEADS, merged, None, causal=True) is merged
    attention = SelfAttention(D, HEADS, causal=False)
    assert torch.equal(attention(x, Merged(None, True)), attention(x, torch.ones(N, N, dtype=torch.bool).tril()))


def test_causality_alone_is_no_mask_where_none_is_needed():
    one, many = torch.randn(BATCH, 1, D), torch.randn(BATCH, N, D)
    assert merge(one, 9, HEADS, None, None, causal=True) == Merged(None, False)
    assert merge(many, N, HEADS, None, None, causal=True) == Merged(None, True)
    offset = merge(many, N + 2, HEADS, None, None, causal=True).mask
    assert torch.equal(offset == 0, torch.arange(N + 2) <= torch.arange(N)[:, None] + 2)


# Decoding with a cache.

CHUNKS = [[1] * 9, [9], [4, 5], [1, 3, 1, 4], [6, 1, 1, 1], [2, 0, 7]]


def decoder(cross=True, **options):
    return Decoder(2, D, HEADS, 16, cross_attention=cross, dtype=f64, **options).eval()


def decoded(module, x, chunks, cache, *memory, **named):
    return torch.cat([module(step, *memory, cache=cache, **named) for step in x.split(chunks, dim=1)], dim=1)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_decoding_in_chunks_gives_what_the_whole_sequence_gives(chunks, batch_first, cross, grad):
    module = decoder(cross, batch_first=batch_first)
    x, memory = torch.randn(BATCH, 9, D, dtype=f64), torch.randn(BATCH, M, D, dtype=f64)
    along = 1
    if not batch_first:
        x, memory, along = x.transpose(0, 1), memory.transpose(0, 1), 0
    named = {"memory": memory, "memory_key_mask": allowed(BATCH, M)} if cross else {}
    cache = KeyValueCache(capacity=4)
    with torch.set_grad_enabled(grad):
        want = module(x, **named)
        got = torch.cat([module(step, cache=cache, **named) for step in x.split(chunks, dim=along)], dim=along)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert cache.length == 9


def test_with_a_cache_masks_have_an_entry_for_every_key_so_far():
    module = decoder(cross=False)
    x, keys, mask = torch.randn(BATCH, 9, D, dtype=f64), allowed(BATCH, 9), torch.randn(9, 9, dtype=f64)
    want, cache, steps = module(x, mask=mask, key_mask=keys), KeyValueCache(), []
    for begin, end in ((0, 3), (3, 4), (4, 9)):
        steps.append(module(x[:, begin:end], mask=mask[begin:end, :end], key_mask=keys[:, :end], cache=cache))
    torch.testing.assert_close(torch.cat(steps, 1), want, rtol=1e-12, atol=1e-12)


def test_gradients_reach_everything_that_was_kept():
    module = decoder()
    x, memory = torch.randn(BATCH, 9, D, dtype=f64), torch.randn(BATCH, M, D, dtype=f64)
    whole = with_gradients(module, module, (x, memory))
    same(
        with_gradients(lambda x, memory: decoded(module, x, [4, 1, 4], KeyValueCache(), memory), module, (x, memory)),
        whole,
    )


def test_an_attention_alone_keeps_its_tokens_too():
    attention = SelfAttention(D, HEADS, causal=True, dtype=f64)
    (x,) = inputs(attention)
    cache = KeyValueCache()
    with torch.no_grad():
        got = torch.cat([attention(step, cache=cache) for step in x.split([2, 3], 1)], 1)
        torch.testing.assert_close(got, attention(x), rtol=1e-12, atol=1e-12)


def test_not_causal_a_query_sees_all_that_is_kept_and_all_of_its_call():
    attention = SelfAttention(D, HEADS, dtype=f64)
    (x,) = inputs(attention)
    cache = KeyValueCache()
    attention(x[:, :2], cache=cache)
    torch.testing.assert_close(attention(x[:, 2:], cache=cache), attention(x)[:, 2:], rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_without_gradients_memory_is_allocated_a_few_times_and_written_in_place():
    attention, cache, places = SelfAttention(D, HEADS, causal=True), KeyValueCache(capacity=8), []
    for step in torch.randn(100, 1, 1, D):
        attention(step, cache=cache)
        places.append(cache._tokens[attention].pairs.data_ptr())
    assert sum(a != b for a, b in pairwise(places)) == 4  # 8, 16, 32, 64, 128
    assert cache._tokens[attention].pairs.shape[3] == 128


def test_grad_modes_may_alternate():
    module = decoder(cross=False)
    x = torch.randn(BATCH, 9, D, dtype=f64)
    cache, want = KeyValueCache(), module(x).detach()
    with torch.inference_mode():
        steps = [module(x[:, :2], cache=cache)]
    with torch.no_grad():
        steps.append(module(x[:, 2:4], cache=cache))
    steps.append(module(x[:, 4:6], cache=cache))
    kept = steps[-1]
    with torch.no_grad():
        steps.append(module(x[:, 6:], cache=cache))
    torch.testing.assert_close(torch.cat([s.detach().clone() for s in steps], 1), want, rtol=1e-12, atol=1e-12)
    kept.sum().backward()  # nothing that the graph holds was written


def test_what_a_graph_holds_is_not_written_after_truncate_either():
    attention, held = SelfAttention(D, HEADS, causal=True, dtype=f64), []
    attention.in_proj.register_forward_hook(lambda module, args, output: held.append(output))
    x, cache = torch.randn(BATCH, 9, D, dtype=f64), KeyValueCache()
    attention(x[:, :6], cache=cache)
    (projected,) = held
    before = projected.detach().clone()
    cache.truncate(4)
    with torch.no_grad():
        attention(x[:, 6:8], cache=cache)
    assert torch.equal(projected, before)


@torch.no_grad()
@pytest.mark.parametrize("batch_first", [True, False])
def test_keys_and_values_of_the_memory_are_computed_once(batch_first):
    module, calls = decoder(batch_first=batch_first), []
    for connection in module.stack.connections:
        if isinstance(connection.sublayer, CrossAttention):
            connection.sublayer.kv_proj.register_forward_hook(lambda *_: calls.append(1))
    along = 1 if batch_first else 0
    x, memory, other = torch.randn(BATCH, BATCH, D, dtype=f64), *torch.randn(2, BATCH, BATCH, D, dtype=f64)
    cache = KeyValueCache()
    steps = [module(step, memory, cache=cache) for step in x.split(1, dim=along)]
    assert len(calls) == 2  # of each layer once
    torch.testing.assert_close(torch.cat(steps, along), module(x, memory), rtol=1e-12, atol=1e-12)
    calls.clear()
    last = x.narrow(along, 1, 1)
    cache.truncate(1)
    torch.testing.assert_close(module(last, cache=cache), steps[1], rtol=1e-15, atol=1e-15)  # that which the cache has
    assert not calls
    cache.truncate(1)
    changed = module(last, other, cache=cache)
    assert len(calls) == 2  # another tensor is another memory
    assert not torch.allclose(changed, steps[1])


@torch.no_grad()
@pytest.mark.parametrize("index", [[1, 0], [1, 1], [0, 0, 1, 1, 1], [1]], ids=str)
def test_reorder_makes_sample_i_what_sample_index_i_was(index):
    module = decoder()
    index = torch.tensor(index)
    x, memory = torch.randn(BATCH, 4, D, dtype=f64), torch.randn(BATCH, M, D, dtype=f64)
    new = torch.randn(len(index), 3, D, dtype=f64)
    cache = KeyValueCache(capacity=4)
    decoded(module, x, [3, 1], cache, memory)
    cache.reorder(index)
    got = decoded(module, new, [1, 2], cache)
    want = module(torch.cat([x[index], new], 1), memory[index])[:, 4:]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_truncate_forgets_the_last_tokens_and_clear_all():
    module = decoder(cross=False)
    x = torch.randn(BATCH, 9, D, dtype=f64)
    cache, want = KeyValueCache(), module(x)
    module(torch.cat([x[:, :4], torch.randn(BATCH, 3, D, dtype=f64)], 1), cache=cache)
    cache.truncate(4)
    assert repr(cache) == "KeyValueCache(length=4)"
    torch.testing.assert_close(module(x[:, 4:], cache=cache), want[:, 4:], rtol=1e-12, atol=1e-12)
    cache.clear()
    assert cache.length == 0
    torch.testing.assert_close(module(x, cache=cache), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grad", [True, False])
def test_a_call_that_fails_leaves_the_cache_as_it_was(grad):
    module = decoder(cross=False)
    x, cache = torch.randn(BATCH, 9, D, dtype=f64), KeyValueCache()
    with torch.set_grad_enabled(grad):
        module(x[:, :4], cache=cache)
        last = module.stack.connections[-1].sublayer
        handle = last.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            module(x[:, 4:], cache=cache)
        handle.remove()
        assert cache.length == 4
        torch.testing.assert_close(module(x[:, 4:], cache=cache), module(x)[:, 4:], rtol=1e-12, atol=1e-12)


def test_attention_survives_copy_and_pickle():
    attention = SelfAttention(D, HEADS, causal=True, dropout=0.25)
    (x,) = inputs(attention, dtype=torch.float32)
    attention.eval()
    for twin in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert torch.equal(twin(x), attention(x))
    assert repr(attention).startswith("SelfAttention(\n  n_heads=3, dropout=0.25, causal=True\n")


ATTENTION = SelfAttention(D, HEADS)
CROSSING = CrossAttention(D, HEADS)
X, MEMORY = torch.zeros(BATCH, N, D), torch.zeros(BATCH, M, D)
REFUSED = {
    "a width": (
        lambda: ATTENTION(torch.zeros(BATCH, N, 8)),
        ValueError,
        r"x has shape \(2, 5, 8\), expected \(batch, tokens, 12\): let its width be 12",
    ),
    "no batch": (
        lambda: ATTENTION(torch.zeros(N, D)),
        ValueError,
        r"x has shape \(5, 12\), expected \(batch, tokens, 12\): x.unsqueeze\(0\) is a batch of one",
    ),
    "a memory's width": (
        lambda: CROSSING(X, torch.zeros(BATCH, N, 8)),
        ValueError,
        r"memory has shape \(2, 5, 8\), expected \(batch, tokens, 12\)",
    ),
    "a memory's batch": (lambda: CROSSING(X, MEMORY[:1]), ValueError, "memory has a batch of 1, expected 2, that of x"),
    "no memory": (lambda: CROSSING(X), TypeError, "memory is None, expected what is attended to"),
    "an integer mask": (
        lambda: ATTENTION(X, torch.ones(N, N, dtype=torch.int64)),
        TypeError,
        r"mask has dtype torch.int64, expected torch.bool \(True: may attend\) or torch.float32 .*: give it as mask.bool\(\)",
    ),
    "a mask of another float": (
        lambda: ATTENTION(X, key_mask=torch.ones(BATCH, N, dtype=f64)),
        TypeError,
        r"key_mask has dtype torch.float64, expected .*give it as key_mask.to\(torch.float32\)",
    ),
    "no tensor": (lambda: ATTENTION(X, [[True]]), TypeError, "mask is list, expected a tensor"),
    "keys": (
        lambda: ATTENTION(X, torch.ones(N, N + 1)),
        ValueError,
        r"mask has shape \(5, 6\), expected \(queries, keys\) = \(5, 5\)",
    ),
    "one key for all": (
        lambda: ATTENTION(X, torch.ones(N, 1)),
        ValueError,
        r"mask has shape \(5, 1\), expected \(queries, keys\)",
    ),
    "queries": (lambda: ATTENTION(X, torch.ones(N + 1, N)), ValueError, r"mask has shape \(6, 5\), expected"),
    "heads": (
        lambda: ATTENTION(X, torch.ones(BATCH, 2, N, N)),
        ValueError,
        r"mask has shape \(2, 2, 5, 5\), expected \(batch, heads, queries, keys\) = \(2, 3, 5, 5\), or 1",
    ),
    "torch's mask of heads": (
        lambda: ATTENTION(X, torch.ones(BATCH * HEADS, N, N)),
        ValueError,
        r"torch.nn.MultiheadAttention's becomes mask.unflatten\(0, \(2, 3\)\)",
    ),
    "one dimension": (
        lambda: ATTENTION(X, torch.ones(N)),
        ValueError,
        r"mask has shape \(5,\), expected .*: key_mask is for masks of",
    ),
    "a key mask as mask of keys": (
        lambda: CROSSING(X, MEMORY, memory_key_mask=torch.ones(N, M)),
        ValueError,
        r"memory_key_mask has shape \(5, 7\), expected \(batch, keys\) = \(2, 7\): .*; memory_mask is for other shapes",
    ),
    "a memory's mask": (
        lambda: CROSSING(X, MEMORY, torch.ones(N, N)),
        ValueError,
        r"memory_mask has shape \(5, 5\), expected \(queries, keys\) = \(5, 7\)",
    ),
    "heads that do not divide": (
        lambda: SelfAttention(10, 3),
        ValueError,
        "n_heads is 3, expected a number that divides d = 10",
    ),
    "no heads": (lambda: CrossAttention(10, 0), ValueError, "n_heads is 0, expected a whole number from 1"),
    "dropout": (lambda: SelfAttention(10, 2, dropout=2.0), ValueError, "dropout is 2.0, expected a probability"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(name):
    call, error, sentence = REFUSED[name]
    with pytest.raises(error, match=sentence):
        call()


def test_a_cache_of_another_batch_is_refused():
    cache = KeyValueCache()
    ATTENTION(X, cache=cache)
    with pytest.raises(ValueError, match=r"x has a batch of 1, expected 2, that of the cache: cache.reorder"):
        ATTENTION(X[:1], cache=cache)


# A cache in the wrong hands


def test_one_attention_at_two_places_is_refused_with_a_cache():
    attention, other = SelfAttention(16, 4, causal=True), torch.nn.Linear(16, 16)
    stack = ResidualStack([attention, other, attention, other], 16)
    x = torch.randn(1, 3, 16)
    stack(x)
    with pytest.raises(ValueError, match=r"sublayers\[2\] is sublayers\[0\] too and cache is given"):
        stack(x, cache=KeyValueCache())


def test_checkpoints_with_a_cache_are_refused_in_any_stack():
    stack = ResidualStack(block(16, 4, causal=True), 16, checkpoint=True)
    with pytest.raises(ValueError, match="cache is given to a stack with checkpoint=True"):
        stack(torch.randn(1, 3, 16), cache=KeyValueCache())


def test_a_call_that_fails_leaves_the_memory_of_before():
    decoder, cache = Decoder(2, 16, 4).eval(), KeyValueCache()
    x, memory, other = torch.randn(1, 2, 16), torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    with torch.no_grad():
        decoder(x, memory, cache=cache)
        expected = copy.deepcopy(cache)
        last = decoder.stack.connections[4].sublayer

        def fail(module, args):
            raise RuntimeError("out of luck")

        handle = last.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            decoder(x, other, cache=cache)
        handle.remove()
        assert torch.equal(decoder(x, cache=cache), decoder(x, cache=expected))
        with pytest.raises(ValueError, match="memory has a batch of 3"):
            decoder(x, torch.randn(3, 5, 16), cache=cache)
        decoder(x, cache=cache)


def test_a_first_call_that_fails_and_truncate_to_nothing_leave_an_empty_cache():
    decoder, cache = Decoder(1, 16, 4, cross_attention=False).eval(), KeyValueCache()
    with torch.no_grad():
        with pytest.raises(ValueError, match="mask has shape"):
            decoder(torch.randn(3, 2, 16), cache=cache, mask=torch.ones(5, 5, dtype=torch.bool))
        decoder(torch.randn(2, 2, 16), cache=cache)
        cache.truncate(0)
        decoder(torch.randn(4, 1, 16), cache=cache)
    assert cache.length == 1


def test_truncate_to_nothing_forgets_the_reordered_memory_too():
    decoder, cache = Decoder(1, 16, 4).eval(), KeyValueCache()
    x, memory = torch.randn(2, 1, 16), torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = decoder(x, memory, cache=cache)
        cache.reorder(torch.tensor([1, 0]))
        cache.truncate(0)
        assert torch.equal(decoder(x, memory, cache=cache), expected)


def test_a_copy_of_a_cache_is_a_draft_of_its_own():
    decoder, cache = Decoder(2, 16, 4, cross_attention=False).eval(), KeyValueCache()
    x = torch.randn(1, 5, 16)
    with torch.no_grad():
        decoder(x[:, :3], cache=cache)
        draft = copy.deepcopy(cache)
        decoder(torch.randn(1, 2, 16), cache=draft)
        assert (cache.length, draft.length) == (3, 5)
        torch.testing.assert_close(decoder(x[:, 3:], cache=cache), decoder(x)[:, 3:])


def test_the_cache_of_another_decoder_is_refused():
    decoder, cache = Decoder(1, 16, 4, cross_attention=False).eval(), KeyValueCache()
    x = torch.randn(1, 3, 16)
    with torch.no_grad():
        decoder(x, cache=cache)
        with pytest.raises(ValueError, match="cache has 3 tokens of another stack and none of this one"):
            copy.deepcopy(decoder)(x, cache=cache)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_gradients_reach_a_memory_that_was_first_seen_without_them(guard):
    decoder, cache = Decoder(1, 16, 4).eval(), KeyValueCache()
    x, memory = torch.randn(1, 1, 16), torch.randn(1, 5, 16, requires_grad=True)
    with guard():
        decoder(x, memory, cache=cache)
    if guard is torch.inference_mode:
        cache._tokens.clear()  # tokens of inference mode stay there
    decoder(x, memory, cache=cache).sum().backward()
    assert memory.grad is not None
    assert decoder.stack.connections[1].sublayer.kv_proj.weight.grad is not None
