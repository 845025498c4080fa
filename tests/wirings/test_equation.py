"""Tests of equations and descriptions of rows and wirings."""

import dataclasses
import math
import re

import pytest

from addnorm import Learned, Row, Wiring, wirings
from addnorm.wirings import Computed, Head, Stage, append_zero, coefficients, unit
from addnorm.wirings.catalog import CONSTRUCTORS, EXAMPLES
from addnorm.wirings.equation import explain, wrap_equation
from addnorm.wirings.factors import format_interval


class Own(coefficients.CoefficientModule):
    computes = ("collapse", "inject")


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("x' = N(x + N(f(N(x))))", Row(norm_in=True, norm_branch=True, norm_out=True)),
        ("x' = N(2 x + 0.5 N(f(0.25 N(x))))", Row(True, True, True, a=2.0, b=0.5, c=0.25)),
        ("x' = N(0.5 f(x))", Row(norm_out=True, a=0.0, b=0.5)),
        ("x' = -x - 0.5 f(-2 x)", Row(a=-1.0, b=-0.5, c=-2.0)),
        ("x' = x + 3.142 f(x)", Row(b=math.pi)),
        ("x' = N(a ⊙ x + f(x)),   a starts at 1", Row(norm_out=True, a=Learned(1.0, per_feature=True))),
        ("x' = a x + b f(c x),   a starts at 0,   b starts at 1,   c starts at -1e-5",
         Row(a=Learned(0.0), b=Learned(1.0), c=Learned(-1e-5))),
        ("X' = A X + b N(f(N(c X))),   c, A, b learned",
         Stage(4, coefficients=Computed(coefficients.HyperConnection, {"dynamic": False}), norm_in=True, norm_branch=True)),
        ("X' = X + b f(c X),   c, b computed by Own", Stage(2, coefficients=Computed(Own))),
    ],
)  # fmt: skip
def test_equation_of_a_row_or_stage(text, row):
    assert str(row) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [([0.5, 0.5], "0.5"), ([1.0, 0.5, 0.25], "1 ... 0.25"), ([0.1, 0.9, 0.5], "0.1 to 0.9"), ([3.0], "3")],
)
def test_interval_shows_ends_or_extremes(values, text):
    assert format_interval(values) == text


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
    "resi_dual": "u' = N(u + f(u)),   v' = v + f(u),   u_0 = v_0 = x_0,   y = u + N(v)",
    "b2t": "sublayer 1:  h = N(x + f(x))\nsublayer 2:  x' = N(h + x + f(h))",
    "hyper_connections": "X' = A X + b f(N(c X)),   c = c_0 + s tanh(N(X) w_c),   A = A_0 + s tanh(N(X) W_A)ᵀ, "
    "b = b_0 + t tanh(N(X) w_b),   c_0, A_0, b_0, w_c, W_A, w_b, s, t learned,   X_0 = 4 copies of x_0,   y = N(Σ_i X_i)",
    "mhc": "X' = A X + b f(N(c X)),   (z_c, z_b, Z_A) = φ R(vec X),   c = σ(α_1 z_c + β_c) + ε,   b = 2 σ(α_2 z_b + β_b), "
    "A = SK(α_3 Z_A + β_A),   φ, α, β learned,   X_0 = 4 copies of x_0,   y = N(h X_L), "
    "h = σ(α_h φ_h R(vec X) + β_h) + ε,   φ_h, α_h, β_h learned",
    "independent_hc": "X' = X + b f(N(c X)),   (z_c, z_b) = φ R(vec X),   c = σ(α_1 z_c + β_c) + ε, "
    "b = 2 σ(α_2 z_b + β_b) + ε,   φ, α, β learned,   X_0 = 4 copies of x_0,   y = N(h X_L), "
    "h = σ(α_h φ_h R(vec X) + β_h) + ε,   φ_h, α_h, β_h learned",
    "gated_residual": "X' = X + b f(Σ_i G_i ⊙ Y_i / n),   Y_i = γ_i ⊙ R(X_i),   G = σ(W_up silu(W_down vec Y / n)), "
    "b = 2 σ(W_b vec Y / n),   γ, W_up, W_down, W_b learned,   X_0 = 4 copies of x_0,   y = Σ_i G_i ⊙ Y_i / n",
    "attention_residuals": "layer 1 of 12, sublayer 1:  x_{n+1} = f(N(x_n))\n"
    "elsewhere:  x_{n+1} = f(N(Σ_i p_i x_i)),   p_i = softmax_i(q · (γ ⊙ R(x_i))),   q, γ learned\n"
    "at the end:  y = N(Σ_i p_i x_i)",
    "denseformer": "layer 1 of 12, sublayer 1:  x_{n+1} = x_n + f(N(x_n))\n"
    "sublayer 2:  x_n' = x_n + f(N(x_n))\n"
    "layers 2 to 12, sublayer 1:  x_{n+1} = Σ_i α_i x_i + f(N(Σ_i α_i x_i)),   α_i starts at 1 for the newest state, 0 for the others\n"
    "at the end:  y = N(Σ_i α_i x_i)",
    "muddformer": "layer 1 of 12, sublayer 1:  x_{n+1} = x_n + f(N(x_n))\n"
    "sublayer 2:  x_n' = x_n + f(N(x_n))\n"
    "layers 2 to 12, sublayer 1:  x_{n+1} = Σ_i v_i x_i + f(N(Σ_i w_i x_i)), "
    "(w, v) = GELU(R(x_n) W_1) W_2 + B,   W_1, W_2, B learned\n"
    "at the end:  y = N(Σ_i w_i x_i),   w = GELU(R(x_n) W_1) W_2 + B",
    "x0_residual": "at the start:  x_0 = N(x)\n"
    "sublayer 1:  x' = λ x + μ x_0 + f(N(λ x + μ x_0)),   λ starts at 1.15 ... 1.05,   μ starts at 0.2 ... 0.05\n"
    "layers 1 to 6, 8 to 12 of 12, sublayer 2:  x' = x + f(N(x))\n"
    "layer 7, sublayer 2:  x' = x_mid = x + f(N(x))\n"
    "at the end:  y = N(x + β x_mid),   β starts at -0.2",
    "depth_scaled": "x' = a x + b N(f(N(x))),   a = √((k-1)/k),   b = 1/√k for the sublayers k = 2, 3, ...,   y = N(x_L)",
    "gated_mix": "x' = a ⊙ x + b ⊙ N(f(N(x))),   b = σ(g/0.3),   a = √max(1 - b², 0.001),   g learned,   y = N(x_L)",
    "residual_scaling": "x' = a ⊙ (x + v) + b ⊙ (f(N(x)) + w),   a, b, v, w learned,   y = N(x_L)",
    "keel": "layer 1 of 12, sublayer 1:  x' = x + f(N(x))\n"
    "layer 1, sublayer 2:  x' = N(x + f(N(x)))\n"
    "layers 2 to 12:  x' = N(α x + f(N(x))),   α = S",
    "reversible": "at the start:  u_0 = v_0 = x_0\nsublayer 1:  u' = u + f(N(v))\nsublayer 2:  v' = v + f(N(u))\n"
    "at the end:  y = N(0.5 u + 0.5 v)",
    "ngpt": "x_0 = N(x),   x' = N((1 - α) ⊙ x + α ⊙ N(f(x))),   α learned",
    "siamese_norm": "u' = N(u + s f(u + N(v))),   v' = v + f(u + N(v)),   s = 1/√l,   u_0 = v_0 = x_0,   y = u + N(v)",
}


def joined(text):
    """Return an equation with one space for each run of spaces, and each form in a line."""
    return re.sub(r" +", " ", re.sub(r",\s+", ", ", text))


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_equation_of_every_wiring(name):
    assert joined(wirings.get(name, **EXAMPLES.get(name, {})).equation()) == joined(WRITTEN[name])


@pytest.mark.parametrize(
    ("wiring", "pieces"),
    [
        (wirings.mhc(single_pass=True), ["f(N(c⁻ X))", "c⁻ the c of the sublayer before (in the first: stream 1)", "y = N(c⁻ X_L)"]),
        (wirings.mhc(2, "mean"), ["X_0 = 2 copies of x_0", "y = N(Σ_i X_i / n)"]),
        (wirings.hyper_connections(1, dynamic=False), ["X' = A X + b f(N(c X)),   c, A, b learned,   X_0 = x_0,   y = N(X_L)"]),
        (wirings.attention_residuals(2, normed_values=True, reads=3),
         ["layer 1 of 12, sublayer 1:            x_{n+1} = f(r_1, r_2, r_3),   r_m = N_m(x_n)",
          "x_n' = x_n + f(N(Σ_i p_i R(x_i))),", "p_mi = softmax_i(q_m · R(x_i) / √d)", "layers 3, 5, 7, ..., 11, sublayer 1:  x_{n+1}"]),
        (wirings.denseformer(dilation=3, period=2), ["α_i (i = n, n-3, n-6, ...) starts at 1", "layers 3, 5, 7, ..., 11, sublayer 1: "]),
        (wirings.muddformer(3), ["Σ_i v_i x_i + f(r_1, r_2, r_3),   r_m = N_m(Σ_i w_mi x_i)"]),
        (wirings.x0_residual(scale=(1.5, 0.5), backout=0.0), ["λ starts at 1.5 ... 0.5", "at the end:    y = N(x)"]),
    ],
)  # fmt: skip
def test_equation_follows_the_options(wiring, pieces):
    assert [piece for piece in pieces if piece not in wiring.equation()] == []


@pytest.mark.parametrize(
    ("wiring", "num_layers", "text"),
    [
        (wirings.layernorm_scaling(), 12, "x' = x + f((1 ... 0.2887) N(x)),   y = N(x_L)"),
        (wirings.layernorm_scaling(), 1, "x' = x + f(N(x)),   y = N(x_L)"),
        (wirings.layer_scale(), 24, "x' = x + γ ⊙ f(N(x)),   γ starts at 1e-5,   y = N(x_L)"),
        (wirings.mix_ln(2), 2, "x' = N(x + f(x))"),
        (wirings.mix_ln(1), 2, "layer 1:     x' = N(x + f(x))\nlayer 2:     x' = x + f(N(x))\nat the end:  y = N(x_L)"),
    ],
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
        (own(lambda at: Row(b=1 / at.num_layers)), "x' = x + b_L f(x)"),
        (own(lambda at: Row(b=1 / at.number), symbols={"b": ("β", "")}), "x' = x + β_l f(x)"),
        (own(lambda at: Row(b=Learned(1 / at.num_layers))), "x' = x + b f(x),   b starts at a value that depends on depth"),
        (
            own(lambda at: Row(norm_out=at.number % 4 == 0)),
            "layers 1 to 3, 5 to 7, 9 to 11 of 12:  x' = x + f(x)\nlayers 4, 8, 12:                        x' = N(x + f(x))",
        ),
        (
            own(lambda at: Row(norm_in=at.layer < 30)),  # a change that only a deep stack has
            "layers 1 to 30 of 48:  x' = x + f(N(x))\nlayers 31 to 48:       x' = x + f(x)",
        ),
        (
            own(lambda at: Row(norm_in=True, b=2.0, shares="state" if at.sublayer else "")),
            "x' = x + 2 f_1(N_1(x)) + 2 f_2(N_2(x))",
        ),
        (own(Stage(2, (1, 0), None, (0.5, 0.5)), embedding=(1.0, 0.0)), "u' = u + 0.5 f(u), v' = v + 0.5 f(u), u_0 = x_0, v_0 = 0, y = u"),
        (own(lambda at: Stage(1, (2.0,), ((0.5,),), (1 / at.number,))), "x' = 0.5 x + b_l f(2 x)"),
        (
            own(lambda at: Stage(2, (0, 1), ((0, 1), (1, Learned(0.5))), (3, 1 / at.num_layers)), embedding=(1.0, 1.0)),
            "u' = v + 3 f(v), v' = u + a_22 v + b_2,L f(v), a_22 starts at 0.5, u_0 = v_0 = x_0, y = u",
        ),
        (
            own(Stage(2, ((1, 0), (0, 2)), None, (1, 0), norm_in=True), embedding=(2.0, 1.0), head=Head(2, (1.0, 3.0))),
            "u' = u + f(r_1, r_2), r_1 = N_1(u), r_2 = N_2(2 v), u_0 = 2 x_0, v_0 = x_0, y = u + 3 v",
        ),
        (
            own(lambda at: Stage(at.layer * 2 + at.sublayer + 1, unit(at.layer * 2 + at.sublayer + 1, -1),
                                 append_zero(at.layer * 2 + at.sublayer + 1), unit(at.layer * 2 + at.sublayer + 2, -1), names="s")),
            "x_{n+1} = f(x_n)".replace("x", "s") + ",   y = x_1",
        ),
    ],
)  # fmt: skip
def test_equation_of_custom_wirings(wiring, text):
    assert re.sub(r":\s+", ": ", joined(wiring.equation())) == re.sub(r":\s+", ": ", joined(text))


def test_explain_tells_the_symbols_that_occur():
    assert "SK(Z)" in explain(wirings.mhc().equation())
    assert "SK(Z)" not in explain(wirings.independent_hc().equation())


def test_str_and_wrap_equation_keep_the_equation():
    width = 24
    for wiring in wirings.list_all():
        text = wiring.equation()
        line = str(wiring).removeprefix(f"{wiring.name}: ")
        assert "\n" not in line
        assert re.sub(r"[\s;]", "", line) == re.sub(r"\s", "", text)
        lines = wrap_equation(wiring, width)
        assert re.sub(r"[\s,;]", "", "".join(lines)) == re.sub(r"[\s,]", "", text)
        pieces = line.replace(";  ", ",   ").split(",   ")
        assert all(len(line) <= width + 1 or line.removesuffix(",") in pieces for line in lines)


def test_head_without_names_takes_those_of_the_stages():
    ema = Stage(2, (1, 0.5), ((1, 0), (0, 0.9)), (1, 0.1), norm_in=True, names=("x", "m"))
    for head in (Head(2, (1, 0)), lambda place: Head(2, (1, 0))):
        wiring = Wiring("ema", ema, True, embedding=(1.0, 0.0), head=head)
        assert wiring.equation().endswith("y = N(x)")
        assert "x ──┤ N ├──► y" in wiring.draw()


def test_head_can_be_copied_with_other_fields():
    assert dataclasses.replace(Head(2, (1, 0)), names=("x", "m")) == Head(2, (1, 0), names=("x", "m"))


# Descriptions


SUM = "So the stream is a plain sum: x_0 and every write."
NO_SUM = "no plain sum of writes"
# docs/wirings.md has the descriptions of all wirings with their default options.
CASES = [
    (wirings.parallel(2), "reads its own norm of the stream;", SUM),
    (wirings.mhc(single_pass=True), "with weights c⁻ that the sublayer before computed;", NO_SUM),
    (wirings.attention_residuals(2, True, 3), "what it returns is added to the newest state.",
     "has 3 inputs, each the norm of a sum of the norms of all states so far with its own weights p;"),
    (Wiring("own", lambda at: Row(b=1 / at.number)), "b_l: from 1 to 0.08333 in 12 layers, from 1 to 0.01 in 100.", SUM),
    (Wiring("own", Stage(2, (1, 0), ((0, 1), (1, 0)), (1, 0)), embedding=(1.0, 0.5)), "begin as multiples", "; u becomes v.", NO_SUM),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case[0]))
def test_description_follows_the_stages(case):
    wiring, *facts = case
    described = wiring.describe()
    assert [fact for fact in facts if fact not in described] == []
    for sentence in (SUM, NO_SUM):
        assert (sentence in described) == any(sentence in fact for fact in facts), sentence
