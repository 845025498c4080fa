"""Tests of every wiring against its own equation in plain PyTorch, to round-off."""

import functools
import math

import pytest
import torch.nn.functional as F

from addnorm import Row, Wiring, wirings
from support.pairwise import product
from support.stack_equality import (
    EPS,
    D,
    assert_equal_functions,
    get_norm_function,
    make_stack,
)


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)  # small matrices need no second thread


class Here:
    """Terms of a sublayer's equation: f, the norms, the learned factors, l and the number of layers."""

    def __init__(self, stack, i):
        self.at = stack.connections[i]
        self.f = self.at.sublayer
        self.l, self.num_layers, self.n_sublayers = i // 2 + 1, len(stack.connections) // 2, len(stack.connections)
        self.into, self.branch, self.out = (
            get_norm_function(norm) for norm in (self.at.norm_in, self.at.norm_branch, self.at.norm_out)
        )


def in_rows(equation, embedding=False, final=True):
    """Return the function of a whole stack with x' = equation(s, x) at every sublayer."""

    def run(stack, x):
        x = get_norm_function(stack.norm_embedding)(x) if embedding else x
        for i in range(len(stack.connections)):
            x = equation(Here(stack, i), x)
        return get_norm_function(stack.norm_final)(x) if final else x

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
    return get_norm_function(stack.norm_final)(x)


def parallel_two(stack, x):
    for i in range(0, len(stack.connections), 2):
        attention, forward = Here(stack, i), Here(stack, i + 1)
        x = x + attention.f(attention.into(x)) + forward.f(forward.into(x))
    return get_norm_function(stack.norm_final)(x)


def keel(s, x):
    if s.l == 1:
        return x + s.f(s.into(x)) if s.at.norm_out is None else s.out(x + s.f(s.into(x)))
    return s.out(s.n_sublayers * x + s.f(s.into(x)))


def depth_scaled(stack, x):
    for i in range(len(stack.connections)):
        s = Here(stack, i)
        x = math.sqrt((i + 1) / (i + 2)) * x + math.sqrt(1 / (i + 2)) * s.branch(s.f(s.into(x)))
    return get_norm_function(stack.norm_final)(x)


def resi_dual(stack, x):
    u = v = x
    for i in range(len(stack.connections)):
        s = Here(stack, i)
        write = s.f(u)
        u, v = get_norm_function(s.at.norm_outs["0"])(u + write), v + write
    return u + get_norm_function(stack.head.norm_streams["1"])(v)


def b2t(stack, x):
    for i in range(0, len(stack.connections), 2):
        attention, forward = Here(stack, i), Here(stack, i + 1)
        h = get_norm_function(attention.at.norm_outs["0"])(x + attention.f(x))
        x = get_norm_function(forward.at.norm_outs["0"])(h + forward.f(h) + x)
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
    "depth_mup": [({"k": 1.4}, in_rows(lambda s, x: x + 1.4 / math.sqrt(s.num_layers) * s.f(s.into(x))))],
    "completep": [({"k": 0.9}, in_rows(lambda s, x: x + 0.9 / s.num_layers * s.f(s.into(x))))],
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
    "keel": [({}, in_rows(keel, final=False))],
    "depth_scaled": [({}, depth_scaled)],
}
CASES = [
    pytest.param(name, options, equation, norm, id="-".join([name, *map(str, options.values()), norm]))
    for name, variants in EQUATIONS.items()
    for options, equation in variants
    for norm in ("layer", "rms")
]


def test_every_wiring_of_rows_has_a_reference_equation():
    """Those with several streams are compared in tests/wirings/test_transcriptions.py."""
    assert set(EQUATIONS) >= {wiring.name for wiring in wirings.list_all() if wiring.has_rows}


@pytest.mark.parametrize(("name", "options", "equation", "norm"), CASES)
def test_stack_matches_its_equation(name, options, equation, norm):
    stack = make_stack(wirings.get(name, **options), norm=norm)
    assert_equal_functions(stack, lambda x: equation(stack, x), wanted=list(stack.parameters()))


@pytest.mark.parametrize(
    ("norm", "n_in", "n_branch", "n_out"), product(["layer", "rms"], [False, True], [False, True], [False, True])
)
def test_any_row_matches_the_equation(norm, n_in, n_branch, n_out):
    """x' = N_out(a x + b N_branch(f(c N_in(x)))), for every choice of norms, with unusual factors."""

    def same(x):
        return x

    def equation(s, x):
        into, branch, out = (norm or same for norm in (s.into, s.branch, s.out))
        return out(0.7 * x - 1.3 * branch(s.f(0.6 * into(x))))

    row = Row(norm_in=n_in, norm_branch=n_branch, norm_out=n_out, a=0.7, b=-1.3, c=0.6)
    for ends in (False, True):
        stack = make_stack(Wiring("mine", row, final_norm=ends), norm=norm)
        other = functools.partial(in_rows(equation, final=ends), stack)
        assert_equal_functions(stack, other, wanted=list(stack.parameters()))


def test_comparison_detects_a_small_error():
    stack = make_stack("pre_ln")
    for wrong in (
        in_rows(lambda s, x: x + (1 + 1e-10) * s.f(s.into(x))),
        in_rows(pre, final=False),
        in_rows(lambda s, x: x + s.f(F.layer_norm(x, (D,), s.at.norm_in.weight, s.at.norm_in.bias, EPS + 1e-10))),
    ):
        with pytest.raises(AssertionError):
            assert_equal_functions(stack, lambda x: wrong(stack, x), wanted=[])  # noqa: B023
