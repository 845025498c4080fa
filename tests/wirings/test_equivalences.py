"""Tests of wirings that are the same function (nn/test_stack_equations.py compares each with its equation)."""

import math

import pytest
import torch
from torch import nn

from addnorm import Row, Wiring, wirings
from support.stack_equality import (
    EPS,
    LAYERS,
    Attention,
    D,
    assert_close,
    assert_equal_functions,
    compute_gradients,
    get_norm_function,
    list_norms,
    list_parameters,
    make_stack,
    make_sublayers,
    make_tokens,
)


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)  # small matrices need no second thread


def copy_norms(source, target, weight=lambda i: 1.0):
    """Copy the norms of `source`, times a factor, to `target`."""
    with torch.no_grad():
        for i, (first, other) in enumerate(zip(list_norms(source), list_norms(target), strict=True)):
            for ours, theirs in zip(list_parameters(first), list_parameters(other), strict=True):
                theirs.copy_(weight(i) * ours)


def learned(stack):
    """Return the parameters of the norms in order."""
    return [parameter for norm in list_norms(stack) for parameter in list_parameters(norm)]


def shared(stack):
    """Return the parameters of the sublayers."""
    return [parameter for connection in stack.connections for parameter in list_parameters(connection.sublayer)]


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_deepnorm_is_post_ln_with_smaller_branches(norm):
    """N(a x + f) = N(x + f/a), with eps / a^2: the norm is independent of the sum's scale."""
    alpha = (2 * LAYERS) ** (1 / 4)
    deep = make_stack("deepnorm", norm=norm)

    def smaller(f):
        return lambda x: f(x) / alpha

    modules = [smaller(connection.sublayer) for connection in deep.connections]
    post_ln = make_stack("post_ln", modules, norm=norm, eps=EPS / alpha**2)
    copy_norms(deep, post_ln)
    assert_equal_functions(deep, post_ln, wanted=shared(deep) + learned(deep), others=shared(deep) + learned(post_ln))


def test_deepnorm_with_alpha_one_is_post_ln():
    assert Row(norm_out=True, a=1.0) == wirings.post_ln().row(0, 0, 1)


@pytest.mark.parametrize(("k", "same"), [(0, "pre_ln"), (LAYERS, "post_ln")])
def test_mix_ln_limits_are_pre_ln_and_post_ln(k, same):
    mixed = make_stack(wirings.mix_ln(k))
    other = make_stack(same, [connection.sublayer for connection in mixed.connections])
    copy_norms(mixed, other)
    assert_equal_functions(mixed, other, wanted=shared(mixed) + learned(mixed), others=shared(mixed) + learned(other))


def test_mix_ln_is_post_ln_stack_then_pre_ln_stack():
    mixed = make_stack(wirings.mix_ln(1))
    modules = [connection.sublayer for connection in mixed.connections]
    first, rest = make_stack("post_ln", modules[:2]), make_stack("pre_ln", modules[2:])
    ours = list_norms(mixed)
    for norm, other in zip(ours, list_norms(first) + list_norms(rest), strict=True):
        other.load_state_dict(norm.state_dict())
    others = shared(mixed) + learned(first) + learned(rest)
    assert_equal_functions(mixed, lambda x: rest(first(x)), wanted=shared(mixed) + learned(mixed), others=others)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_layernorm_scaling_is_pre_ln_with_scaled_affine(norm):
    scaled = make_stack("layernorm_scaling", norm=norm)
    pre_ln = make_stack("pre_ln", [connection.sublayer for connection in scaled.connections], norm=norm)

    def c(i):
        return 1.0 if i == 2 * LAYERS else 1 / math.sqrt(i // 2 + 1)  # the last is N_final

    copy_norms(scaled, pre_ln, c)
    x, cotangent = make_tokens(), torch.randn(2, 5, D, dtype=torch.float64)
    gradients = compute_gradients(scaled, x, shared(scaled) + learned(scaled), cotangent)
    expected = compute_gradients(pre_ln, x, shared(scaled) + learned(pre_ln), cotangent)
    inner = 2 + len(shared(scaled))
    assert_close(gradients[:inner], expected[:inner])
    each = len(list_parameters(list_norms(scaled)[0]))
    folded = [c(i // each) * gradient for i, gradient in enumerate(expected[inner:])]  # weight = c * ours
    assert_close(gradients[inner:], folded)


def test_factor_of_one_is_no_factor():
    """LayerScale with gamma 1 is pre-LN; ReZero and SkipInit with alpha 1 are the stack without norms."""
    for name, same in (("layer_scale", "pre_ln"), ("rezero", "no_norm"), ("skipinit", "no_norm")):
        scaled = make_stack(name)
        for connection in scaled.connections:
            nn.init.ones_(connection.b)
        other = make_stack(same, [connection.sublayer for connection in scaled.connections])
        copy_norms(scaled, other)
        assert_equal_functions(
            scaled, other, wanted=shared(scaled) + learned(scaled), others=shared(scaled) + learned(other)
        )


def test_layer_scale_is_pre_ln_with_scaled_projection_rows():
    scaled = make_stack("layer_scale")
    folded = make_stack("pre_ln")
    copy_norms(scaled, folded)
    with torch.no_grad():
        for ours, theirs in zip(scaled.connections, folded.connections, strict=True):
            theirs.sublayer.load_state_dict(ours.sublayer.state_dict())
            for parameter in list_parameters(last(theirs.sublayer)):
                parameter.mul_(ours.b if parameter.dim() == 1 else ours.b[:, None])
    assert_equal_functions(scaled, folded, wanted=learned(scaled), others=learned(folded))


def last(sublayer):
    return sublayer.out if isinstance(sublayer, Attention) else sublayer[-1]


@pytest.mark.parametrize(
    ("wiring", "k"),
    [
        (wirings.residual_multiplier(0.22), 0.22),
        (wirings.depth_mup(1.4), 1.4 / math.sqrt(LAYERS)),
        (wirings.completep(), 1 / LAYERS),
    ],
)
def test_residual_multiplier_is_pre_ln_with_smaller_projection(wiring, k):
    multiplied, folded = make_stack(wiring), make_stack("pre_ln")
    copy_norms(multiplied, folded)
    with torch.no_grad():
        for ours, theirs in zip(multiplied.connections, folded.connections, strict=True):
            theirs.sublayer.load_state_dict(ours.sublayer.state_dict())
            for parameter in list_parameters(last(theirs.sublayer)):
                parameter.mul_(k)
    assert_equal_functions(multiplied, folded, wanted=learned(multiplied), others=learned(folded))
    assert_equal_functions(
        multiplied, stacked_like(multiplied, wirings.residual_multiplier(k)), wanted=shared(multiplied)
    )


def stacked_like(stack, wiring):
    """Return a stack with the same sublayers and norms and another wiring."""
    other = make_stack(wiring, [connection.sublayer for connection in stack.connections])
    copy_norms(stack, other)
    return other


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (3.5, 0.8)])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_residual_after_input_norm_is_shifted_post_ln(alpha, beta, norm):
    """MiniMax-01 adds to the *normed* input: post-LN with a norm of the embedding."""
    wiring = Wiring("shifted", Row(norm_out=True, a=alpha, b=beta), embedding_norm=True)
    stack = make_stack(wiring, norm=norm)
    *inputs, final = (get_norm_function(norm) for norm in list_norms(stack))

    def minimax(hidden_states):  # with the names of that model's code
        for connection, input_layernorm in zip(stack.connections, inputs, strict=True):
            hidden_states = input_layernorm(hidden_states)
            residual = hidden_states
            hidden_states = connection.sublayer(hidden_states)
            hidden_states = residual * alpha + hidden_states * beta
        return final(hidden_states)

    assert_equal_functions(stack, minimax, wanted=list(stack.parameters()))


def test_pre_ln_is_pre_rms_norm_for_zero_means():
    """Jiang et al. 2023: the variance of a vector with mean zero is its mean square."""

    def centred(x):
        return x - x.mean(-1, keepdim=True)

    def zero_mean(f):
        return lambda x: centred(f(x))

    inner = make_sublayers()
    modules = [zero_mean(f) for f in inner]
    wanted = [parameter for f in inner for parameter in f.parameters()]
    layer, rms = make_stack("pre_ln", modules, bias=False), make_stack("pre_ln", modules, norm="rms")
    copy_norms(layer, rms)
    assert_equal_functions(
        lambda x: layer(centred(x)), lambda x: rms(centred(x)), wanted=wanted + learned(layer),
        others=wanted + learned(rms),
    )  # fmt: skip
    x = make_tokens()
    assert not torch.allclose(layer(x), rms(x)), "and only there"


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("n_norms", [1, 2])
def test_parallel_is_sequential_if_one_sublayer_writes_zero(silent, n_norms):
    def nothing(x):
        return torch.zeros_like(x)

    modules = [nothing if i % 2 == silent else f for i, f in enumerate(make_sublayers())]
    parallel, sequential = make_stack(wirings.parallel(n_norms), modules), make_stack("pre_ln", modules)
    ours, theirs = [], []
    for i, (first, other) in enumerate(zip(parallel.connections, sequential.connections, strict=True)):
        norm = parallel.connections[i - 1].norm_in if first.norm_in is None else first.norm_in
        other.norm_in.load_state_dict(norm.state_dict())
        if i % 2 != silent:
            ours += list_parameters(norm)
            theirs += list_parameters(other.norm_in)
    sequential.norm_final.load_state_dict(parallel.norm_final.state_dict())
    wanted = shared(parallel)
    assert_equal_functions(parallel, sequential, wanted=wanted + ours, others=wanted + theirs)
