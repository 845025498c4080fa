"""Wirings that are the same function, and every wiring as its own equation in plain PyTorch.

Nothing is at its initial value: weights, biases and learned factors of the norms are random, and a large eps shows whether it
is in the right place. Forward, the gradient of x_0 and of every parameter; float64, to rounding.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from addnorm import ResidualStack, Row, Wiring, wirings

D, LAYERS, EPS = 12, 3, 1e-2


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)  # tiny matrices: a second thread only waits


class Attention(nn.Module):
    """One head of causal self-attention: tokens mix, nonlinearly."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(D, D, bias=False).double() for _ in range(4))

    def forward(self, x):
        mixed = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)
        return self.out(mixed)


def feed_forward():
    return nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)).double()


def sublayers(n_layers=LAYERS):
    return [make() for _ in range(n_layers) for make in (Attention, feed_forward)]


def stacked(wiring, modules=None, norm="layer", **options):
    """A stack whose norms and learned factors are random."""
    options = {"eps": EPS, "dtype": torch.float64, **options}
    stack = ResidualStack(sublayers() if modules is None else modules, D, wiring, norm=norm, **options)
    inside = {id(p) for connection in stack.connections for p in parameters(connection.sublayer)}
    for parameter in stack.parameters():
        if id(parameter) not in inside:
            nn.init.normal_(parameter, 0.5, 0.5)
    return stack


def parameters(sublayer):
    return list(sublayer.parameters()) if isinstance(sublayer, nn.Module) else []


def tokens(*shape):
    return torch.randn(*(shape or (2, 5)), D, dtype=torch.float64, requires_grad=True)


def assert_close(found, expected, what=""):
    """To 1e-12 of the tensor's largest element."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) <= 1e-12 * float(other.abs().max()), what


def differentiated(function, x, wanted, cotangent):
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *wanted], cotangent)]


def assert_same(function, other, x=None, wanted=(), others=None):
    """The same output, and the same gradients of x and of the parameters (`others`: those of the other, in the same order)."""
    x = tokens() if x is None else x
    cotangent = torch.randn_like(x)
    found = differentiated(function, x, wanted, cotangent)
    expected = differentiated(other, x, wanted if others is None else others, cotangent)
    assert_close(found, expected)


def norms(stack):
    """The norms of a stack in the order in which the stream meets them."""
    found = [stack.norm_embedding]
    for connection in stack.connections:
        found += [connection.norm_in, connection.norm_branch, connection.norm_out]
    return [norm for norm in [*found, stack.norm_final] if norm is not None]


def copy_norms(source, target, weight=lambda i: 1.0):
    """The norms of `target` become those of `source`, times a factor."""
    with torch.no_grad():
        for i, (one, other) in enumerate(zip(norms(source), norms(target), strict=True)):
            for ours, theirs in zip(parameters(one), parameters(other), strict=True):
                theirs.copy_(weight(i) * ours)


def learned(stack):
    """Parameters of the norms, in order."""
    return [parameter for norm in norms(stack) for parameter in parameters(norm)]


def shared(stack):
    """Parameters of the sublayers."""
    return [parameter for connection in stack.connections for parameter in parameters(connection.sublayer)]


# ------------------------------------------------------------------- every wiring as its equation, in plain PyTorch


class Here:
    """One sublayer as its equation sees it: f, the norms, the learned factors, l and the number of layers."""

    def __init__(self, stack, i):
        self.at = stack.connections[i]
        self.f = self.at.sublayer
        self.l, self.n_layers, self.n_sublayers = i // 2 + 1, len(stack.connections) // 2, len(stack.connections)
        self.into, self.branch, self.out = (
            plain(norm) for norm in (self.at.norm_in, self.at.norm_branch, self.at.norm_out)
        )


def plain(norm):
    """A norm as PyTorch's function."""
    if isinstance(norm, nn.LayerNorm):
        return lambda x: F.layer_norm(x, (D,), norm.weight, norm.bias, EPS)
    if isinstance(norm, nn.RMSNorm):
        return lambda x: F.rms_norm(x, (D,), norm.weight, EPS)
    return None


def in_rows(equation, embedding=False, final=True):
    """A whole stack: x' = equation(s, x) at every sublayer."""

    def run(stack, x):
        x = plain(stack.norm_embedding)(x) if embedding else x
        for i in range(len(stack.connections)):
            x = equation(Here(stack, i), x)
        return plain(stack.norm_final)(x) if final else x

    return run


def pre(s, x):
    return x + s.f(s.into(x))


def post(s, x):
    return s.out(x + s.f(x))


def sandwiched(s, x):
    return x + s.branch(s.f(s.into(x)))


def parallel_one(stack, x):
    for i in range(0, len(stack.connections), 2):
        attention, forward = Here(stack, i), Here(stack, i + 1)
        read = attention.into(x)
        x = x + attention.f(read) + forward.f(read)
    return plain(stack.norm_final)(x)


def parallel_two(stack, x):
    for i in range(0, len(stack.connections), 2):
        attention, forward = Here(stack, i), Here(stack, i + 1)
        x = x + attention.f(attention.into(x)) + forward.f(forward.into(x))
    return plain(stack.norm_final)(x)


def resi_dual(stack, x):
    u = v = x
    for i in range(len(stack.connections)):
        s = Here(stack, i)
        write = s.f(u)
        u, v = s.out(u + write), v + write
    return u + plain(stack.norm_final)(v)


def b2t(stack, x):
    for i in range(0, len(stack.connections), 2):
        attention, forward = Here(stack, i), Here(stack, i + 1)
        h = attention.out(x + attention.f(x))
        x = forward.out(h + forward.f(h) + x)
    return x


def deepnorm(alpha):
    return in_rows(lambda s, x: s.out(alpha * x + s.f(x)), final=False)


pre_scaled = in_rows(lambda s, x: x + s.at.b * s.f(s.into(x)))
omega = in_rows(lambda s, x: s.out(s.at.a * x + s.f(x)), final=False)
alpha_l = in_rows(lambda s, x: x + s.at.b * s.f(x), final=False)

EQUATIONS = {
    "post_ln": [({}, in_rows(post, final=False))],
    "pre_ln": [({}, in_rows(pre))],
    "sandwich": [({}, in_rows(sandwiched))],
    "peri_ln": [({}, in_rows(sandwiched, embedding=True))],
    "reordered": [({}, in_rows(lambda s, x: x + s.branch(s.f(x))))],
    "deepnorm": [
        ({}, deepnorm((2 * 3) ** (1 / 4))),
        ({"kind": "decoder-only"}, deepnorm((2 * 3) ** (1 / 4))),
        ({"kind": "encoder", "other_layers": 5}, deepnorm(0.81 * (3**4 * 5) ** (1 / 16))),
        ({"kind": "decoder", "other_layers": 5}, deepnorm((3 * 3) ** (1 / 4))),
    ],
    "admin": [({}, omega), ({"profiled": False}, omega)],
    "rezero": [({}, alpha_l)],
    "skipinit": [({}, alpha_l)],
    "layer_scale": [({}, pre_scaled)],
    "residual_multiplier": [({"multiplier": 0.22}, in_rows(lambda s, x: x + 0.22 * s.f(s.into(x))))],
    "depth_mup": [({"k": 1.4}, in_rows(lambda s, x: x + 1.4 / math.sqrt(s.n_layers) * s.f(s.into(x))))],
    "completep": [({"k": 0.9}, in_rows(lambda s, x: x + 0.9 / s.n_layers * s.f(s.into(x))))],
    "layernorm_scaling": [({}, in_rows(lambda s, x: x + s.f(s.into(x) / math.sqrt(s.l))))],
    "mix_ln": [({"k": 1}, in_rows(lambda s, x: post(s, x) if s.l == 1 else pre(s, x)))],
    "no_norm": [({}, in_rows(lambda s, x: x + s.f(x), final=False))],
    "no_residual": [
        ({}, in_rows(lambda s, x: s.out(s.f(x)), final=False)),
        ({"norm": False}, in_rows(lambda s, x: s.f(x), final=False)),
    ],
    "parallel": [({}, parallel_one), ({"norms": 2}, parallel_two)],
    "resi_dual": [({}, resi_dual)],
    "b2t": [({}, b2t)],
}
CASES = [
    pytest.param(name, options, equation, norm, id="-".join([name, *map(str, options.values()), norm]))
    for name, found in EQUATIONS.items()
    for options, equation in found
    for norm in ("layer", "rms")
]


def test_every_wiring_has_its_equation_here():
    assert set(EQUATIONS) == set(wirings.CONSTRUCTORS)


@pytest.mark.parametrize(("name", "options", "equation", "norm"), CASES)
def test_a_fused_stack_is_its_equation(name, options, equation, norm):
    stack = stacked(wirings.get(name, **options), norm=norm)
    assert_same(stack, lambda x: equation(stack, x), wanted=list(stack.parameters()))


@pytest.mark.parametrize(("name", "options", "equation", "norm"), CASES)
def test_checkpoints_and_inference_change_no_bit(name, options, equation, norm):
    stack = stacked(wirings.get(name, **options), norm=norm)
    x = tokens()
    wanted, cotangent = list(stack.parameters()), torch.randn_like(x)
    expected = differentiated(stack, x, wanted, cotangent)
    with torch.no_grad():
        assert torch.equal(stack(x), expected[0])
    stack.checkpoint = True
    for found, one in zip(differentiated(stack, x, wanted, cotangent), expected, strict=True):
        assert torch.equal(found, one)


def everything(a=1.0, b=1.0, c=1.0):
    return Row(norm_in=True, norm_branch=True, norm_out=True, a=a, b=b, c=c)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("n_in", [False, True])
@pytest.mark.parametrize("n_branch", [False, True])
@pytest.mark.parametrize("n_out", [False, True])
def test_any_row_is_the_one_equation(norm, n_in, n_branch, n_out):
    """x' = N_out(a x + b N_branch(f(c N_in(x)))), for every choice of norms, with factors that no paper has."""

    def same(x):
        return x

    def equation(s, x):
        into, branch, out = (norm or same for norm in (s.into, s.branch, s.out))
        return out(0.7 * x - 1.3 * branch(s.f(0.6 * into(x))))

    row = Row(norm_in=n_in, norm_branch=n_branch, norm_out=n_out, a=0.7, b=-1.3, c=0.6)
    for ends in (False, True):
        stack = stacked(Wiring("mine", row, final_norm=ends), norm=norm)
        assert_same(stack, lambda x: in_rows(equation, final=ends)(stack, x), wanted=list(stack.parameters()))  # noqa: B023


def test_the_comparison_sees_a_small_mistake():
    stack = stacked("pre_ln")
    for wrong in (
        in_rows(lambda s, x: x + (1 + 1e-10) * s.f(s.into(x))),
        in_rows(pre, final=False),
        in_rows(lambda s, x: x + s.f(F.layer_norm(x, (D,), s.at.norm_in.weight, s.at.norm_in.bias, EPS + 1e-10))),
    ):
        with pytest.raises(AssertionError):
            assert_same(stack, lambda x: wrong(stack, x), wanted=[])  # noqa: B023


# ------------------------------------------------------------------------------------- wirings that are the same


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_deepnorm_is_post_ln_with_smaller_branches(norm):
    """N(a x + f) = N(x + f/a), with eps / a^2: the norm does not see the scale of the sum."""
    alpha = (2 * LAYERS) ** (1 / 4)
    deep = stacked("deepnorm", norm=norm)

    def smaller(f):
        return lambda x: f(x) / alpha

    modules = [smaller(connection.sublayer) for connection in deep.connections]
    post_ln = stacked("post_ln", modules, norm=norm, eps=EPS / alpha**2)
    copy_norms(deep, post_ln)
    assert_same(deep, post_ln, wanted=shared(deep) + learned(deep), others=shared(deep) + learned(post_ln))


def test_deepnorm_with_alpha_one_is_post_ln():
    assert Row(norm_out=True, a=1.0) == wirings.post_ln().row(0, 0, 1)


@pytest.mark.parametrize(("k", "same"), [(0, "pre_ln"), (LAYERS, "post_ln")])
def test_mix_ln_is_pre_ln_at_one_end_and_post_ln_at_the_other(k, same):
    mixed = stacked(wirings.mix_ln(k))
    other = stacked(same, [connection.sublayer for connection in mixed.connections])
    copy_norms(mixed, other)
    assert_same(mixed, other, wanted=shared(mixed) + learned(mixed), others=shared(mixed) + learned(other))


def test_mix_ln_is_a_post_ln_stack_and_then_a_pre_ln_stack():
    mixed = stacked(wirings.mix_ln(1))
    modules = [connection.sublayer for connection in mixed.connections]
    first, rest = stacked("post_ln", modules[:2]), stacked("pre_ln", modules[2:])
    ours = norms(mixed)
    for one, other in zip(ours, norms(first) + norms(rest), strict=True):
        other.load_state_dict(one.state_dict())
    others = shared(mixed) + learned(first) + learned(rest)
    assert_same(mixed, lambda x: rest(first(x)), wanted=shared(mixed) + learned(mixed), others=others)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_layernorm_scaling_is_pre_ln_with_its_factor_in_weight_and_bias(norm):
    scaled = stacked("layernorm_scaling", norm=norm)
    pre_ln = stacked("pre_ln", [connection.sublayer for connection in scaled.connections], norm=norm)

    def c(i):
        return 1.0 if i == 2 * LAYERS else 1 / math.sqrt(i // 2 + 1)  # the last is N_final

    copy_norms(scaled, pre_ln, c)
    x, cotangent = tokens(), torch.randn(2, 5, D, dtype=torch.float64)
    found = differentiated(scaled, x, shared(scaled) + learned(scaled), cotangent)
    expected = differentiated(pre_ln, x, shared(scaled) + learned(pre_ln), cotangent)
    inner = 2 + len(shared(scaled))
    assert_close(found[:inner], expected[:inner])
    each = len(parameters(norms(scaled)[0]))
    folded = [c(i // each) * gradient for i, gradient in enumerate(expected[inner:])]  # weight = c * ours
    assert_close(found[inner:], folded)


def test_a_factor_of_one_is_no_factor():
    """LayerScale with gamma 1 is pre-LN; ReZero and SkipInit with alpha 1 are the stack without norms."""
    for name, same in (("layer_scale", "pre_ln"), ("rezero", "no_norm"), ("skipinit", "no_norm")):
        scaled = stacked(name)
        for connection in scaled.connections:
            nn.init.ones_(connection.b)
        other = stacked(same, [connection.sublayer for connection in scaled.connections])
        copy_norms(scaled, other)
        assert_same(scaled, other, wanted=shared(scaled) + learned(scaled), others=shared(scaled) + learned(other))


def test_layer_scale_is_pre_ln_with_gamma_in_the_rows_of_the_last_projection():
    scaled = stacked("layer_scale")
    folded = stacked("pre_ln")
    copy_norms(scaled, folded)
    with torch.no_grad():
        for ours, theirs in zip(scaled.connections, folded.connections, strict=True):
            theirs.sublayer.load_state_dict(ours.sublayer.state_dict())
            for parameter in parameters(last(theirs.sublayer)):
                parameter.mul_(ours.b if parameter.dim() == 1 else ours.b[:, None])
    assert_same(scaled, folded, wanted=learned(scaled), others=learned(folded))


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
def test_a_residual_multiplier_is_pre_ln_with_a_smaller_last_projection(wiring, k):
    multiplied, folded = stacked(wiring), stacked("pre_ln")
    copy_norms(multiplied, folded)
    with torch.no_grad():
        for ours, theirs in zip(multiplied.connections, folded.connections, strict=True):
            theirs.sublayer.load_state_dict(ours.sublayer.state_dict())
            for parameter in parameters(last(theirs.sublayer)):
                parameter.mul_(k)
    assert_same(multiplied, folded, wanted=learned(multiplied), others=learned(folded))
    assert_same(multiplied, stacked_like(multiplied, wirings.residual_multiplier(k)), wanted=shared(multiplied))


def stacked_like(stack, wiring):
    """The same sublayers and norms under another wiring."""
    other = stacked(wiring, [connection.sublayer for connection in stack.connections])
    copy_norms(stack, other)
    return other


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (3.5, 0.8)])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_residual_taken_after_the_input_norm_is_post_ln_shifted_by_a_norm(alpha, beta, norm):
    """MiniMax-01's layer: what is added to is the *normed* input. That is post-LN with a norm of the embedding."""
    wiring = Wiring("shifted", Row(norm_out=True, a=alpha, b=beta), embedding_norm=True)
    stack = stacked(wiring, norm=norm)
    *inputs, final = (plain(norm) for norm in norms(stack))

    def minimax(hidden_states):  # in the words of that model's code
        for connection, input_layernorm in zip(stack.connections, inputs, strict=True):
            hidden_states = input_layernorm(hidden_states)
            residual = hidden_states
            hidden_states = connection.sublayer(hidden_states)
            hidden_states = residual * alpha + hidden_states * beta
        return final(hidden_states)

    assert_same(stack, minimax, wanted=list(stack.parameters()))


def test_pre_ln_is_pre_rms_norm_where_every_mean_is_zero():
    """Jiang et al. 2023: the variance is the mean square of what has mean zero."""

    def centred(x):
        return x - x.mean(-1, keepdim=True)

    def zero_mean(f):
        return lambda x: centred(f(x))

    inner = sublayers()
    modules = [zero_mean(f) for f in inner]
    wanted = [parameter for f in inner for parameter in f.parameters()]
    layer, rms = stacked("pre_ln", modules, bias=False), stacked("pre_ln", modules, norm="rms")
    copy_norms(layer, rms)
    assert_same(
        lambda x: layer(centred(x)), lambda x: rms(centred(x)), wanted=wanted + learned(layer),
        others=wanted + learned(rms),
    )  # fmt: skip
    x = tokens()
    assert not torch.allclose(layer(x), rms(x)), "and only there"


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("n_norms", [1, 2])
def test_parallel_is_sequential_where_one_of_the_two_writes_nothing(silent, n_norms):
    def nothing(x):
        return torch.zeros_like(x)

    modules = [nothing if i % 2 == silent else f for i, f in enumerate(sublayers())]
    parallel, sequential = stacked(wirings.parallel(n_norms), modules), stacked("pre_ln", modules)
    ours, theirs = [], []
    for i, (one, other) in enumerate(zip(parallel.connections, sequential.connections, strict=True)):
        norm = parallel.connections[i - 1].norm_in if one.norm_in is None else one.norm_in
        other.norm_in.load_state_dict(norm.state_dict())
        if i % 2 != silent:
            ours += parameters(norm)
            theirs += parameters(other.norm_in)
    sequential.norm_final.load_state_dict(parallel.norm_final.state_dict())
    wanted = shared(parallel)
    assert_same(parallel, sequential, wanted=wanted + ours, others=wanted + theirs)
