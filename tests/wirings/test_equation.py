"""Tests of equations of rows and wirings."""

import math
import re

import pytest

from addnorm import Learned, Row, Wiring, wirings
from addnorm.wirings.catalog import CONSTRUCTORS, EXAMPLES
from addnorm.wirings.equation import format_layers, group_layers, wrap_equation
from addnorm.wirings.row import equation, format_factor, format_interval


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("x' = x + f(x)", Row()),
        ("x' = x + f(N(x))", Row(norm_in=True)),
        ("x' = x + N(f(x))", Row(norm_branch=True)),
        ("x' = N(x + f(x))", Row(norm_out=True)),
        ("x' = N(x + N(f(N(x))))", Row(norm_in=True, norm_branch=True, norm_out=True)),
        ("x' = N(2 x + 0.5 N(f(0.25 N(x))))", Row(True, True, True, a=2.0, b=0.5, c=0.25)),
        ("x' = x + f(0.25 x)", Row(c=0.25)),
        ("x' = f(x)", Row(a=0.0)),
        ("x' = N(0.5 f(x))", Row(norm_out=True, a=0.0, b=0.5)),
        ("x' = -x - 0.5 f(-2 x)", Row(a=-1.0, b=-0.5, c=-2.0)),
        ("x' = x + 3.142 f(x)", Row(b=math.pi)),
        ("x' = x + b f(x),   b starts at 0", Row(b=Learned(0.0))),
        ("x' = x + b f(x),   b starts at 0, one a layer", Row(b=Learned(0.0, shared=True))),
        ("x' = N(a ⊙ x + f(x)),   a starts at 1", Row(norm_out=True, a=Learned(1.0, per_feature=True))),
        ("x' = a x + b f(c x),   a starts at 0,   b starts at 1,   c starts at -1e-5",
         Row(a=Learned(0.0), b=Learned(1.0), c=Learned(-1e-5))),
    ],
)  # fmt: skip
def test_equation_of_a_row(text, row):
    assert equation(row) == str(row) == text


def test_symbols_name_the_factors():
    symbols = {"a": ("α", "√L"), "b": ("β", ""), "c": ("κ", "1/L")}
    assert equation(Row(a=2.0, b=Learned(0.0)), symbols) == "x' = α x + β f(x),   α = √L,   β starts at 0"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.0, "2"), (200**0.25, "3.761"), (1e-5, "1e-5"), (1.25e-4, "1.25e-4"), (0.001, "0.001"), (-0.5, "-0.5"),
        (0.0, "0"), (12345.0, "12345"), (1.2345e6, "1.234e6"), (1e100, "1e100"), (-3e-7, "-3e-7"), (100.0, "100"),
    ],
)  # fmt: skip
def test_numbers_have_four_significant_digits(value, text):
    assert format_factor(value) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [([0.5, 0.5], "0.5"), ([1.0, 0.5, 0.25], "1 ... 0.25"), ([0.1, 0.9, 0.5], "0.1 to 0.9"), ([3.0], "3")],
)
def test_interval_shows_ends_or_extremes(values, text):
    assert format_interval(values) == text


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([4], "layer 5"),
        ([0, 1, 2], "layers 1 to 3"),
        ([0, 2, 3], "layers 1, 3 to 4"),
        ([*range(0, 40, 2)], "layers 1, 3, 5, ..., 39"),
    ],
)
def test_format_layers_counts_from_one(layers, text):
    assert format_layers(layers) == text


# Published wirings

WRITTEN = {
    "post_ln": "x' = N(x + f(x))",
    "pre_ln": "x' = x + f(N(x)),   y = N(x_L)",
    "sandwich": "x' = x + N(f(N(x))),   y = N(x_L)",
    "peri_ln": "x_0 = N(x),   x' = x + N(f(N(x))),   y = N(x_L)",
    "reordered": "x' = x + N(f(x)),   y = N(x_L)",
    "deepnorm": "x' = N(α x + f(x)),   α = (2L)^(1/4)",
    "admin": "x' = N(ω ⊙ x + f(x)),   ω starts as measured",
    "rezero": "x' = x + α f(x),   α starts at 0, one a layer",
    "skipinit": "x' = x + α f(x),   α starts at 0",
    "layer_scale": "x' = x + γ ⊙ f(N(x)),   γ starts at 1e-4, 1e-5 or 1e-6,   y = N(x_L)",
    "residual_multiplier": "x' = x + 0.22 f(N(x)),   y = N(x_L)",
    "depth_mup": "x' = x + b f(N(x)),   b = 1/√L,   y = N(x_L)",
    "completep": "x' = x + b f(N(x)),   b = 1/L,   y = N(x_L)",
    "layernorm_scaling": "x' = x + f(c N(x)),   c = 1/√l,   y = N(x_L)",
    "mix_ln": "layers 1 to 3 of 12:  x' = N(x + f(x))\n"
    "layers 4 to 12:       x' = x + f(N(x))\n"
    "at the end:           y = N(x_L)",
    "no_norm": "x' = x + f(x)",
    "no_residual": "x' = N(f(x))",
    "parallel": "x' = x + f_1(N(x)) + f_2(N(x)),   y = N(x_L)",
    "resi_dual": "u' = N(u + f(u)),   v' = v + f(u),   y = u + N(v)",
    "b2t": "h = N(x + f_1(x)),   x' = N(h + f_2(h) + x)",
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_equation_of_every_wiring(name):
    assert wirings.get(name, **EXAMPLES.get(name, {})).equation() == WRITTEN[name]


@pytest.mark.parametrize(
    ("wiring", "num_layers", "text"),
    [
        (wirings.deepnorm(), 100, "x' = N(3.761 x + f(x))"),
        (wirings.deepnorm("encoder", 6), 12, "x' = N(1.686 x + f(x))"),
        (wirings.layernorm_scaling(), 12, "x' = x + f((1 ... 0.2887) N(x)),   y = N(x_L)"),
        (wirings.layernorm_scaling(), 1, "x' = x + f(N(x)),   y = N(x_L)"),
        (wirings.depth_mup(1.4), 64, "x' = x + 0.175 f(N(x)),   y = N(x_L)"),
        (wirings.layer_scale(), 24, "x' = x + γ ⊙ f(N(x)),   γ starts at 1e-5,   y = N(x_L)"),
        (wirings.skipinit(None), 8, "x' = x + α f(x),   α starts at 0.25"),
        (wirings.admin(), 8, "x' = N(ω ⊙ x + f(x)),   ω starts as measured"),
        (wirings.mix_ln(2), 2, "x' = N(x + f(x))"),
        (wirings.mix_ln(1), 2, "layer 1:     x' = N(x + f(x))\nlayer 2:     x' = x + f(N(x))\nat the end:  y = N(x_L)"),
        (wirings.parallel(2), 4, "x' = x + f_1(N_1(x)) + f_2(N_2(x)),   y = N(x_L)"),
    ],
    ids=lambda value: repr(value) if isinstance(value, Wiring) else "",
)
def test_equation_with_num_layers_has_numbers(wiring, num_layers, text):
    assert wiring.equation(num_layers) == text


@pytest.mark.parametrize(
    ("wiring", "formula"),
    [
        (wirings.deepnorm("decoder-only"), "α = (2L)^(1/4)"),
        (wirings.deepnorm("encoder", 6), "α = 0.81 (6 L^4)^(1/16)"),
        (wirings.deepnorm("decoder", 12), "α = (3L)^(1/4)"),
        (wirings.depth_mup(1.4), "b = 1.4/√L"),
        (wirings.completep(2), "b = 2/L"),
        (wirings.layernorm_scaling(), "c = 1/√l"),
        (wirings.skipinit(None), "α starts at 1/√S"),
        (wirings.admin(False), "ω starts at √((S+1)/ln(S+1) - 1)"),
        (wirings.admin(False, "constant"), "ω starts at √S"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("num_layers", [3, 100])
def test_printed_formulas_match_computed_factors(wiring, formula, num_layers):
    assert formula in wiring.equation()
    letter, _, text = formula.replace("starts at", "=").partition(" = ")
    name = next(name for name, (symbol, _) in wiring.symbols if symbol == letter)
    factor = getattr(wiring.row(num_layers - 1, 0, num_layers), name)
    text = re.sub(r"√(\w)", r"\1**0.5", re.sub(r"√(\(.*\))$", r"\1**0.5", text.replace("^", "**")))
    text = re.sub(r"(\d|\)) ?(?=L|\()", r"\1*", text).replace("ln*(", "ln(")
    value = eval(text, {"L": num_layers, "l": num_layers, "S": 2 * num_layers, "ln": math.log})
    assert (factor.init if isinstance(factor, Learned) else factor) == pytest.approx(value, rel=1e-12)


# Custom wirings


def own(rule, **options):
    return Wiring("own", rule, **options)


@pytest.mark.parametrize(
    ("wiring", "text"),
    [
        (own(lambda at: Row(b=1 / at.number)), "x' = x + b_l f(x)"),
        (own(lambda at: Row(b=1 / at.num_layers)), "x' = x + b_L f(x)"),
        (own(lambda at: Row(b=0.5)), "x' = x + 0.5 f(x)"),
        (own(lambda at: Row(b=1 / at.number), symbols={"b": ("β", "")}), "x' = x + β_l f(x)"),
        (own(lambda at: Row(b=Learned(1 / at.num_layers))), "x' = x + b f(x),   b starts at a value that depends on depth"),
        (
            own(lambda at: Row(norm_in=at.sublayer == 0)),
            "sublayer 1:  x' = x + f(N(x))\nsublayer 2:  x' = x + f(x)",
        ),
        (
            own(lambda at: Row(norm_out=at.number % 4 == 0)),
            "layers 1 to 3, 5 to 7, 9 to 11 of 12:  x' = x + f(x)\nlayers 4, 8, 12:                        x' = N(x + f(x))",
        ),
        (
            own(lambda at: Row(a=0.0 if at.layer == 0 else 1.0), embedding_norm=True),
            "at the start:     x_0 = N(x)\nlayer 1 of 12:    x' = f(x)\nlayers 2 to 12:   x' = x + f(x)",
        ),
        (
            own(lambda at: Row(norm_in=at.layer < 30)),  # a change that only a deep stack has
            "layers 1 to 30 of 48:  x' = x + f(N(x))\nlayers 31 to 48:       x' = x + f(x)",
        ),
        (own(Row(b=0.5), flow="two_streams"), "u' = u + 0.5 f(u),   v' = v + 0.5 f(u)"),
        (own(Row(norm_in=True, b=2.0), flow="parallel"), "x' = x + 2 f_1(N_1(x)) + 2 f_2(N_2(x))"),
    ],
)  # fmt: skip
def test_equation_of_custom_wirings(wiring, text):
    assert re.sub(r":\s+", ": ", wiring.equation()) == re.sub(r":\s+", ": ", text)


def test_groups_cover_every_layer_once():
    labels = [group.label for group in group_layers(wirings.mix_ln(), 8)]
    assert labels == ["layers 1 to 2", "layers 3 to 8"]
    assert [group.label for group in group_layers(wirings.pre_ln())] == [""]


@pytest.mark.parametrize("width", [24, *(pytest.param(width, marks=pytest.mark.slow) for width in (40, 100))])
def test_str_and_wrap_equation_keep_the_equation(width):
    for wiring in wirings.list_all():
        text = wiring.equation()
        line = str(wiring).removeprefix(f"{wiring.name}: ")
        assert "\n" not in line
        assert re.sub(r"[\s;]", "", line) == re.sub(r"\s", "", text)
        lines = wrap_equation(wiring, width)
        assert re.sub(r"[\s,;]", "", "".join(lines)) == re.sub(r"[\s,]", "", text)
        pieces = [piece for line in lines for piece in line.removesuffix(",").split(", ")]
        assert all(len(line) <= width + 1 or line.removesuffix(",") in pieces or "starts at" in line for line in lines)
