"""Tests of replaying a model's random numbers in float64."""

import pytest
import torch
import torch.nn.functional as F

import addnorm
from addnorm.fusion.rng_replay import RngReplay
from support.stream_steps import noise

X = noise(3, 4, 8, seed=1)
Q = noise(2, 2, 5, 8, seed=2)


def drawn(function, *inputs, dtype=torch.float32, seed=3):
    """Return the result of a function, and its result in float64 with replayed random numbers."""
    torch.manual_seed(seed)
    with torch.no_grad():
        low = function(*(x.to(dtype) for x in inputs))
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        with RngReplay(dtype):
            high = function(*(x.to(dtype).double() for x in inputs))
    assert torch.equal(torch.get_rng_state(), state)  # the generator advanced as far
    return low, high


def assert_close(low, high):
    assert torch.equal(low == 0, high == 0)
    torch.testing.assert_close(low.double(), high, rtol=1e-5, atol=1e-5)


# Methods that draw in place, with their arguments.
IN_PLACE = {
    "bernoulli_": (0.3,), "uniform_": (-1, 2), "normal_": (1, 2), "exponential_": (2,), "cauchy_": (), "log_normal_": (),
    "geometric_": (0.2,),
}  # fmt: skip
# Draws whose result must be bit-identical.
ALONE = {
    **{name: lambda x, name=name: getattr(torch.empty_like(x), name)(*IN_PLACE[name]) for name in IN_PLACE},
    "rand": lambda x: torch.rand(40, dtype=x.dtype),
    "randn": lambda x: torch.randn(40, dtype=x.dtype),
    "with a generator": lambda x: torch.randn(40, dtype=x.dtype, generator=torch.Generator().manual_seed(7)),
    "randint": lambda x: torch.randint(0, 100, (40,), dtype=x.dtype),
    "randperm": lambda x: torch.randperm(40, dtype=x.dtype),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "new_empty": lambda x: x.new_empty(40).normal_(),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(torch.full_like(x, 0.25)),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.25)),
    "bernoulli of p": lambda x: torch.bernoulli(x, 0.25),
    "normal": lambda x: torch.normal(torch.ones_like(x), 2.0),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 2.5)),
    "multinomial": lambda x: torch.multinomial(torch.ones_like(x[0]), 3),
    "columns": lambda x: torch.zeros_like(x)[..., ::2].normal_(),
    "transposed": lambda x: torch.empty_like(x).mT.normal_(),
    "nothing": lambda x: x.new_empty(0).normal_(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALONE)
def test_replayed_draws_are_bit_identical(name, dtype):
    low, high = drawn(ALONE[name], X, dtype=dtype)
    assert high.dtype == (torch.float64 if low.is_floating_point() else low.dtype)
    assert torch.equal(low.to(high.dtype), high)


# Arithmetic with draws, in float64.
USED = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "dropout of channels": lambda x: F.dropout1d(x, 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "native dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "native dropout, all": lambda x: torch.native_dropout(x, 1.0, True)[0],
    "native dropout, no training": lambda x: torch.native_dropout(x, 0.4, False)[0],
    "gumbel": F.gumbel_softmax,
    "stochastic depth": lambda x: x / 0.8 * torch.floor(0.8 + torch.rand((len(x), 1, 1), dtype=x.dtype)),
    "ours": lambda x: addnorm.add_layer_norm(x, x.sin(), dropout_p=0.4),
}


@pytest.mark.parametrize("name", USED)
def test_replayed_masks_with_float64_arithmetic(name):
    low, high = drawn(USED[name], X)
    assert high.dtype == torch.float64
    assert_close(low, high)
    if "gumbel" not in name and "ours" not in name and "alpha" not in name:
        factors = high / X.double()
        assert len(factors.round(decimals=12).unique()) <= 2  # 0 and 1 / (1 - p), which float32 cannot represent


def test_replay_covers_attention_dropout():
    assert_close(*drawn(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), Q))


def test_replay_covers_checkpoints():
    def gradient(dtype):
        torch.manual_seed(5)
        x = X.to(dtype).requires_grad_()
        y = torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x.sin(), 0.4), x, use_reentrant=False)
        return torch.autograd.grad(y.sum(), x)[0]

    low = gradient(torch.float32)
    with RngReplay(torch.float32):
        high = gradient(torch.float64)
    assert_close(low, high)


def test_replay_leaves_other_dtypes():
    for function in (lambda: torch.randn(40), lambda: torch.randint(0, 9, (40,)), lambda: torch.randperm(9)):
        torch.manual_seed(3)
        plain = function()
        torch.manual_seed(3)
        with RngReplay(torch.bfloat16):
            inside = function()
        assert torch.equal(plain, inside)


def test_replay_leaves_out_arguments():
    out = torch.zeros(40, dtype=torch.float64)
    with RngReplay(torch.float32):
        assert torch.rand(40, out=out) is out
    assert out.all()
