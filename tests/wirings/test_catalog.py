"""Tests of published wirings: rows and initializations against the numbers of the papers' formulas."""

import inspect
import math

import pytest

from addnorm import Learned, Row, wirings
from addnorm.nn import Place
from addnorm.wirings.catalog import CONSTRUCTORS, EXAMPLES, NOT_OFFERED, deepnorm_constants
from addnorm.wirings.init import RULES, Draw, gpt2

PRE, POST = Row(norm_in=True), Row(norm_out=True)


def draw(wiring, role, layer=0, num_layers=12, sublayers=2):
    return wiring.init(role, Place(layer, 0, num_layers, sublayers), **dict(wiring.options))


# Placement of the norm


@pytest.mark.parametrize(
    ("num_layers", "post_layers"),
    [(12, 3), (24, 6), (32, 8), (3, 0)],  # the paper's quarter
)
def test_mix_ln_is_post_ln_in_a_quarter_of_the_layers(num_layers, post_layers):
    assert wirings.mix_ln().rows(num_layers) == [POST] * 2 * post_layers + [PRE] * 2 * (num_layers - post_layers)


def test_parallel_sublayers_share_in_layers_of_any_size():
    assert wirings.parallel().rows(2, 3) == [PRE, Row(shares="read"), Row(shares="read")] * 2
    assert wirings.parallel(2).rows(2, 3) == [PRE, *[Row(norm_in=True, shares="state")] * 2] * 2


@pytest.mark.parametrize("name", ["post-LN", "Post LN", "POST_LN", " post_ln"])
def test_names_are_taken_as_the_field_writes_them(name):
    assert wirings.get(name) == wirings.as_wiring(name) == wirings.post_ln()


# DeepNorm


@pytest.mark.parametrize(("n", "alpha", "beta"), [(18, 2.449, 0.2887), (100, 3.761, 0.1880), (200, 4.472, 0.1581)])
def test_deepnorm_has_the_constants_of_the_paper(n, alpha, beta):
    for kind in ("encoder-only", "decoder-only"):
        assert deepnorm_constants(kind, n) == (pytest.approx(alpha, abs=5e-4), pytest.approx(beta, abs=5e-5))
        assert {row.a for row in wirings.deepnorm(kind).rows(n)} == {deepnorm_constants(kind, n)[0]}


def test_deepnorm_constants_of_an_encoder_decoder():
    # N = 12, M = 6 by logarithms: (N^4 M)^(1/16) = exp((4 ln 12 + ln 6) / 16).
    root = math.exp((4 * math.log(12) + math.log(6)) / 16)
    encoder, decoder = wirings.deepnorm().paired(12, 6)
    assert (
        encoder.row(0, 0, num_layers=12).a == pytest.approx(0.81 * root, rel=1e-12) == pytest.approx(1.6863, rel=1e-4)
    )
    assert (
        draw(encoder, "down", num_layers=12).gain
        == pytest.approx(0.87 / root, rel=1e-12)
        == pytest.approx(0.4179, rel=1e-4)
    )
    # (3 * 6)^(1/4) is the root of the root of 18, (12 * 6)^(-1/4) one over that of 72.
    assert decoder.row(5, 2, num_layers=6, sublayers_per_layer=3).a == pytest.approx(
        math.sqrt(math.sqrt(18)), rel=1e-12
    )
    assert draw(decoder, "value", num_layers=6).gain == pytest.approx(1 / math.sqrt(math.sqrt(72)), rel=1e-12)
    assert draw(decoder, "query", num_layers=6).gain == 1.0


def test_deepnorm_pair_names_both_halves():
    assert [repr(wiring) for wiring in wirings.deepnorm().paired(12, 6)] == [
        "deepnorm(kind='encoder', other_layers=6)",
        "deepnorm(kind='decoder', other_layers=12)",
    ]


# Factors


@pytest.mark.parametrize(
    ("num_layers", "gamma"), [(1, 1e-4), (12, 1e-4), (23, 1e-4), (24, 1e-5), (35, 1e-5), (36, 1e-6), (48, 1e-6)]
)
def test_layer_scale_starts_as_in_cait(num_layers, gamma):
    assert set(wirings.layer_scale().rows(num_layers)) == {Row(norm_in=True, b=Learned(gamma, per_feature=True))}
    assert set(wirings.layer_scale(0.1).rows(num_layers)) == {Row(norm_in=True, b=Learned(0.1, per_feature=True))}
    assert wirings.layer_scale().ends_in_norm(num_layers)


DEPTHS = [Place(layer, sublayer, 3, 3) for layer in range(3) for sublayer in range(3)]  # decoder layers: 9 sublayers
COUNTED = {  # a factor of each of the 9 sublayers
    "keel, S = 9": (wirings.keel(), "a", [1.0] * 3 + [9.0] * 6),
    "depth_scaled, a^2 = (k-1)/k": (wirings.depth_scaled(), "a", [math.sqrt((k - 1) / k) for k in range(2, 11)]),
    "depth_scaled, b^2 = 1/k": (wirings.depth_scaled(), "b", [math.sqrt(1 / k) for k in range(2, 11)]),
    "skipinit, 1/sqrt(S)": (wirings.skipinit(None), "b", [1 / 3] * 9),
    "admin, sqrt(S)": (wirings.admin(False, "constant"), "a", [3.0] * 9),
    "depth_mup, 1/sqrt(L)": (wirings.depth_mup(), "b", [3**-0.5] * 9),
    "completep, 1/L": (wirings.completep(), "b", [1 / 3] * 9),
    "layernorm_scaling, 1/sqrt(l)": (wirings.layernorm_scaling(), "c", [1.0] * 3 + [2**-0.5] * 3 + [3**-0.5] * 3),
}


@pytest.mark.parametrize("name", COUNTED)
def test_factors_count_the_sublayers_of_any_layer(name):
    wiring, factor, expected = COUNTED[name]
    values = [getattr(wiring.row(*place), factor) for place in DEPTHS]
    values = [value.init if isinstance(value, Learned) else value for value in values]
    assert values == pytest.approx(expected, rel=1e-15)


def test_initializations_count_the_sublayers_of_any_layer():
    for place in DEPTHS:
        assert gpt2("out", place) == Draw("normal", pytest.approx(0.02 / 3, rel=1e-15))
        assert RULES["depth_scaled"]("up", place).gain == pytest.approx(place.number**-0.5, rel=1e-15)


@pytest.mark.parametrize("per_layer", [1, 2, 3])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_x0_residual_starts_as_in_nanochat(num_layers, per_layer):
    """Its code: 1.15 - 0.10 i / max(L - 1, 1) and 0.20 - 0.15 i / max(L - 1, 1) for layer i, and 0.2 of the state in the middle."""
    stages = wirings.x0_residual().stages(num_layers, per_layer)
    starts = [(stage.learned["scale"].init, stage.learned["x0_scale"].init) for stage in stages[::per_layer]]
    line = [i / max(num_layers - 1, 1) for i in range(num_layers)]
    assert starts == [pytest.approx((1.15 - 0.10 * share, 0.20 - 0.15 * share), rel=1e-12) for share in line]
    assert not any(stage.learned for i, stage in enumerate(stages) if i % per_layer)
    head = wirings.x0_residual().last_read(Place(num_layers, 0, num_layers, per_layer))
    assert [entry.init for entry in head.learned.values()] == [-0.2]
    grown = [i for i, stage in enumerate(stages) if stage.n_out > stage.n]
    assert grown == [(num_layers // 2 + 1) * per_layer - 1]  # the state after layer L // 2, counted from 0


def test_attention_residuals_repeat_the_reads_over_the_layers():
    stages = wirings.attention_residuals(reads=(3, 1)).stages(4, 2)
    assert [stage.reads for stage in stages] == [3, 1, 1, 1, 3, 1, 1, 1]


# Initialization


# By name


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_every_wiring_is_complete(name):
    wiring = wirings.get(name, **EXAMPLES.get(name, {}))
    assert wiring.name == name
    assert wiring.source
    assert wiring.use.endswith(".")
    assert wiring == CONSTRUCTORS[name](**EXAMPLES.get(name, {}))
    assert hash(wiring) == hash(CONSTRUCTORS[name](**EXAMPLES.get(name, {})))
    described = inspect.getdoc(CONSTRUCTORS[name])
    for option in inspect.signature(CONSTRUCTORS[name]).parameters:
        assert f"{option}: " in described or option in ("k", "multiplier", "init"), option
    for num_layers in (1, 2, 12, 100 if wiring.has_rows else 24):
        assert len(wiring.stages(num_layers)) == 2 * num_layers
        n, head = len(wiring.embedding), wiring.last_read(Place(num_layers, 0, num_layers, 2))
        for stage in () if wiring.has_rows else wiring.stages(num_layers):
            assert stage.n == n
            n = stage.n_out
        assert head is None or head.n == n


def test_not_offered_has_reasons():
    assert all(name and len(why) > 20 for name, why in NOT_OFFERED.items())
    assert not {name.lower() for name in NOT_OFFERED} & {*CONSTRUCTORS}


def test_as_wiring_accepts_wiring_row_and_name():
    assert wirings.as_wiring("pre_ln") == wirings.pre_ln()
    assert wirings.as_wiring(wirings.pre_ln()) == wirings.pre_ln()
    assert wirings.as_wiring(PRE).rows(3) == [PRE] * 6


@pytest.mark.parametrize("wrong", [None, 3, wirings.pre_ln, ["pre_ln"]])
def test_as_wiring_rejects_other_types(wrong):
    with pytest.raises(TypeError, match=r"expected a Wiring or a name, such as addnorm\.wirings\.pre_ln\(\)"):
        wirings.as_wiring(wrong)


@pytest.mark.parametrize(
    ("sentence", "name", "options"),
    [
        ("wiring is 'pre_l', expected 'pre_ln'.", "pre-L", {}),
        ("wiring is 'layerscale', expected 'layer_scale'.", "layerscale", {}),
        (f"wiring is 'zzz', expected one of {', '.join(CONSTRUCTORS)}.", "zzz", {}),
        ("mix_ln has no option 'alpha', expected k.", "mix_ln", {"alpha": 1}),
        ("rezero has no option 'k', expected none.", "rezero", {"k": 1}),
        (
            "residual_multiplier needs its option 'multiplier': addnorm.wirings.residual_multiplier(multiplier=...).",
            "residual_multiplier",
            {},
        ),
    ],
)
def test_get_names_the_error(sentence, name, options):
    with pytest.raises(ValueError, match=r"expected|needs") as refusal:
        wirings.get(name, **options)
    assert str(refusal.value) == sentence


KINDS = "'encoder-only', 'decoder-only', 'encoder', 'decoder'"


@pytest.mark.parametrize(
    ("error", "sentence", "name", "options"),
    [
        (ValueError, f"kind is 'both', expected one of {KINDS}.", "deepnorm", {"kind": "both"}),
        (ValueError, f"kind is ['encoder'], expected one of {KINDS}.", "deepnorm", {"kind": ["encoder"]}),
        (
            ValueError,
            "other_layers is None, expected the number of decoder layers: the encoder's constants need it.",
            "deepnorm",
            {"kind": "encoder"},
        ),
        (
            ValueError,
            "other_layers is 6, expected None: a stack that is decoder-only has no other half.",
            "deepnorm",
            {"kind": "decoder-only", "other_layers": 6},
        ),
        (
            ValueError,
            "other_layers is 0, expected a whole number from 1.",
            "deepnorm",
            {"kind": "encoder", "other_layers": 0},
        ),
        (ValueError, "growth is 'exp', expected one of 'log', 'linear', 'constant'.", "admin", {"growth": "exp"}),
        (ValueError, "multiplier is nan, expected a finite number.", "residual_multiplier", {"multiplier": math.nan}),
        (ValueError, "k is True, expected a finite number.", "completep", {"k": True}),
        (ValueError, "k is -1, expected a whole number from 0.", "mix_ln", {"k": -1}),
        (
            ValueError,
            "norms is 3, expected 1 (one for all sublayers of a layer) or 2 (one for each).",
            "parallel",
            {"norms": 3},
        ),
        (
            TypeError,
            "init is 'gpt2', expected a function of a role and a Place, as in addnorm.wirings.init.",
            "pre_ln",
            {"init": "gpt2"},
        ),
    ],
)
def test_wrong_options_raise(error, sentence, name, options):
    with pytest.raises(error) as refusal:
        wirings.get(name, **options)
    assert str(refusal.value) == sentence


OPTIONS = [
    (name, option) for name, function in CONSTRUCTORS.items() for option in inspect.signature(function).parameters
]


@pytest.mark.parametrize("value", ["maybe", [], -1.5j], ids=repr)
@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=":".join)
def test_every_option_is_checked(name, option, value):
    with pytest.raises((TypeError, ValueError), match=rf"{option} is .*, expected|expected two numbers"):
        wirings.get(name, **{option: value})
