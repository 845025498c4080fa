"""`inspect` on what this library makes: its stacks of every wiring, its modules, its functions with every option."""

import pytest
import torch
from torch import nn

import addnorm
from addnorm import Learned, Row, inspect, wirings
from addnorm.nn import AddNorm, Decoder, Encoder, Transformer
from support.families import shake
from support.judge_streams import row_differences
from support.stacks import ALL, D, Mlp, stack_of, stand_in

LAYERS = 3
ATTENTION, CROSS, FEED_FORWARD = "attention", "cross-attention", "feed-forward"


def text(seed=0, dtype=torch.float32, tokens=5):
    return torch.randn(2, tokens, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def judge(found, *expected, kinds=((ATTENTION, FEED_FORWARD),), limit=1e-5, num_layers=LAYERS):
    """The wirings, rows, kinds and final norms of the streams, and that all is proven and understood."""
    assert found.unknown == ()
    assert [stream.wiring.name for stream in found.streams if stream.wiring] == [wiring.name for wiring in expected]
    assert found.closes
    assert found.closure <= limit
    for stream, wiring, kind in zip(found.streams, expected, kinds, strict=True):
        assert [site.kind for site in stream.sites if site.role != "skip"] == [*kind] * num_layers
        assert (stream.final_norm is not None) == wiring.ends_in_norm(num_layers)
        if wiring.flow == "rows":
            assert row_differences(stream, wiring.rows(num_layers, len(kind))) == []


# Stacks.

OTHER = {"mix_ln": wirings.mix_ln(2)}  # a quarter of three layers is none
each_wiring = pytest.mark.parametrize(
    "wiring", [OTHER.get(one.name, one) for one in ALL], ids=lambda wiring: wiring.name
)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@each_wiring
def test_every_wiring_comes_back(wiring, norm):
    encoder = shake(Encoder(LAYERS, D, 2, 32, wiring, norm=norm))
    found = inspect(encoder, text())
    judge(found, wiring)
    assert found.streams[0].norm in (norm, None)
    assert found.streams[0].width == D


@each_wiring
def test_every_wiring_comes_back_of_a_decoder_and_of_a_pair(wiring):
    of_decoder = (ATTENTION, CROSS, FEED_FORWARD)
    judge(inspect(shake(Decoder(LAYERS, D, 2, 32, wiring)), text(), text(1, tokens=4)), wiring, kinds=[of_decoder])
    both = shake(Transformer(LAYERS, LAYERS, D, 2, 32, wiring))
    pair = wiring.paired(LAYERS, LAYERS)
    judge(inspect(both, text(), text(1, tokens=4)), *pair, kinds=[(ATTENTION, FEED_FORWARD), of_decoder])


@each_wiring
def test_every_wiring_comes_back_without_a_gradient_and_before_training(wiring):
    encoder = Encoder(LAYERS, D, 2, 32, wiring)  # ReZero's factors are 0
    with torch.no_grad():
        judge(inspect(encoder, text()), wiring)
    with torch.inference_mode():
        judge(inspect(encoder, text()), wiring)


@each_wiring
def test_every_wiring_comes_back_in_training_with_noise(wiring):
    encoder = shake(Encoder(LAYERS, D, 2, 32, wiring, dropout=0.1, stochastic_depth=0.2)).train()
    judge(inspect(encoder, text()), wiring)
    judge(inspect(shake(Encoder(LAYERS, D, 2, 32, wiring, checkpoint=True)).train(), text().requires_grad_()), wiring)


@pytest.mark.parametrize("stream", [None, torch.float32], ids=["narrow", "float32"])
@each_wiring
def test_every_wiring_comes_back_in_bfloat16(wiring, stream):
    encoder = shake(Encoder(LAYERS, D, 2, 32, wiring, dtype=torch.bfloat16, residual_dtype=stream))
    found = inspect(encoder, text(dtype=torch.bfloat16))
    judge(found, wiring, limit=0.02)
    assert found.streams[0].chain.adds[-1].out.tensor.dtype == (stream or torch.bfloat16)


@each_wiring
def test_every_wiring_closes_to_1e_10_in_float64(wiring):
    encoder = shake(Encoder(LAYERS, D, 2, 32, wiring))
    judge(inspect(encoder, text(), float64=True), wiring, limit=1e-10)
    assert next(encoder.parameters()).dtype == torch.float32


@pytest.mark.parametrize(
    "wiring", [stand_in(name) for name in ("post_ln", "pre_ln", "sandwich", "skipinit")], ids=lambda w: w.name
)
def test_a_stack_of_feed_forwards(wiring):
    found = inspect(shake(stack_of(4, wiring)), text())
    judge(found, wiring, kinds=[(FEED_FORWARD,) * 2], num_layers=2)


@pytest.mark.parametrize(
    "row",
    [Row(norm_in=True, norm_out=True), Row(a=0.5, b=2.0, norm_branch=True), Row(norm_in=True, a=Learned(1.0), b=-0.3)],
    ids=str,
)
def test_the_row_of_a_wiring_of_ones_own(row):
    found = inspect(shake(Encoder(LAYERS, D, 2, 32, row)), text())
    assert found.unknown == ()
    assert found.closure <= 1e-5
    assert row_differences(found.streams[0], [row] * 2 * LAYERS) == []


def test_which_options_are_told():
    def options(wiring, **more):
        return dict(inspect(Encoder(LAYERS, D, 2, 32, wiring, **more), text()).streams[0].wiring.options)

    assert options(wirings.layer_scale(0.1)) == {"gamma": 0.1}
    assert options(wirings.skipinit(0.5)) == {"alpha": 0.5}
    assert options(wirings.mix_ln(2)) == {"k": 2}
    assert options(wirings.residual_multiplier(0.3)) == {"multiplier": 0.3}
    assert options(wirings.depth_mup(1.4)) == {"k": 1.4}
    assert options(wirings.parallel(2)) == {"norms": 2}


def test_a_constant_that_two_rules_give_is_told_of_both():
    stream = inspect(Encoder(4, D, 2, 32, wirings.depth_mup(1.0)), text()).streams[0]
    assert stream.wiring == wirings.residual_multiplier(0.5)
    assert stream.remarks == ("with 4 layers the constant is also that of depth_mup(k=1)",)


# Modules and functions.


class Calls(nn.Module):
    """Two sublayers, each added by `call(x, f(x), weight, bias)`."""

    def __init__(self, call):
        super().__init__()
        self.call, self.parts = call, nn.ModuleList(Mlp() for _ in range(4))
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(D) + 0.5) for _ in range(4))
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(D)) for _ in range(4))
        self.gamma = nn.Parameter(torch.rand(D))
        self.alpha = nn.Parameter(torch.rand(()))

    def forward(self, x):
        x = x * 1.0  # memory of its own
        for part, weight, bias in zip(self.parts, self.weights, self.biases, strict=True):
            x = self.call(self, x, part(x), weight, bias)
        return x


def rows_of(call, dtype=torch.float32, limit=1e-5):
    found = inspect(shake(Calls(call)).to(dtype), text(dtype=dtype))
    assert found.unknown == ()
    assert found.closes
    assert found.closure <= limit
    stream = found.streams[0]
    assert len(stream.sites) == 4
    assert len({str(site.row) for site in stream.sites} - {"x' = N(x + γ f(x))"}) <= 1
    return stream, stream.sites[0].row


KEEP = torch.tensor([[1.0], [0.0]]).expand(2, 5).clone()
SEED = torch.tensor(1234)
POST = Row(norm_out=True)
# What a call is given beside x, f(x), weight and bias, and the row that says so.
OPTIONS = {
    "nothing": (lambda m: {}, POST),
    "residual_scale": (lambda m: {"residual_scale": 2.5}, Row(norm_out=True, a=2.5)),
    "residual_scale, a vector": (
        lambda m: {"residual_scale": m.gamma},
        Row(norm_out=True, a=Learned(1.0, per_feature=True)),
    ),
    "layer_scale": (lambda m: {"layer_scale": m.gamma}, Row(norm_out=True, b=Learned(1.0, per_feature=True))),
    "branch_bias": (lambda m: {"branch_bias": m.gamma}, POST),
    "row_scale": (lambda m: {"row_scale": KEEP}, POST),
    "weight_offset": (lambda m: {"weight_offset": 1.0}, POST),
    "dropout": (lambda m: {"dropout_p": 0.3}, POST),
    "dropout, seeded": (lambda m: {"dropout_p": 0.3, "seed": SEED}, POST),
    "dropout, not training": (lambda m: {"dropout_p": 0.3, "training": False}, POST),
    "float64 out": (lambda m: {"residual_dtype": torch.float32, "out_dtype": torch.float32}, POST),
    "all": (
        lambda m: {
            "residual_scale": 2.5,
            "layer_scale": m.gamma,
            "branch_bias": m.gamma,
            "row_scale": KEEP,
            "dropout_p": 0.3,
        },
        Row(norm_out=True, a=2.5, b=Learned(1.0, per_feature=True)),
    ),
}
FUNCTIONS = {"layer": addnorm.add_layer_norm, "rms": addnorm.add_rms_norm}
IN_PLACE = {"layer": addnorm.add_layer_norm_, "rms": addnorm.add_rms_norm_}
each_option = pytest.mark.parametrize("option", OPTIONS)
each_kind = pytest.mark.parametrize("kind", FUNCTIONS)


@each_kind
@each_option
def test_the_functions_with_every_option(kind, option):
    options, row = OPTIONS[option]
    stream, _ = rows_of(lambda m, x, f, w, b: FUNCTIONS[kind](x, f, w, b, **options(m)))
    assert row_differences(stream, [row] * 4) == []
    assert stream.norm == kind
    assert stream.eps == pytest.approx(1e-5 if kind == "layer" else torch.finfo(torch.float32).eps)


@each_kind
@each_option
def test_the_functions_with_every_option_and_the_residual(kind, option):
    """y is read and z is the stream: pre-LN, but for the first sublayer."""
    options, row = OPTIONS[option]

    class Pre(Calls):
        def forward(self, x):
            read = x = x * 1.0
            for part, weight, bias in zip(self.parts, self.weights, self.biases, strict=True):
                read, x = FUNCTIONS[kind](x, part(read), weight, bias, return_residual=True, **options(self))
            return read

    found = inspect(shake(Pre(None)), text())
    assert found.unknown == ()
    assert found.closure <= 1e-5
    rows = [Row(norm_in=k > 0, a=row.a, b=row.b) for k in range(4)]
    assert row_differences(found.streams[0], rows) == []
    assert found.streams[0].final_norm is not None


@each_kind
@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "float64 out"])
def test_the_functions_in_place(kind, option):
    options, row = OPTIONS[option]

    def call(m, x, f, w, b):
        with torch.no_grad():
            return IN_PLACE[kind](x, f, w, b, **options(m))

    stream, _ = rows_of(call)
    rows = [Row(norm_out=True, a=row.a, b=row.b)] * 4
    assert row_differences(stream, rows) == []


@each_option
def test_the_add_alone(option):
    options, row = OPTIONS[option]
    mine = set(options(Calls(None))) - {"weight_offset", "out_dtype"}

    def call(m, x, f, w, b):
        return addnorm.add_residual(x, f, **{name: value for name, value in options(m).items() if name in mine})

    stream, _ = rows_of(call)
    assert row_differences(stream, [Row(a=row.a, b=row.b)] * 4) == []
    assert stream.norm is None


@pytest.mark.parametrize("casting", ["float32", "llama", "t5"])
def test_the_castings_of_rms_norm(casting):
    stream, row = rows_of(
        lambda m, x, f, w, b: addnorm.add_rms_norm(x, f, w, casting=casting), dtype=torch.bfloat16, limit=0.02
    )
    assert (row, stream.norm) == (POST, "rms")


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_module(norm):
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(Mlp() for _ in range(4))
            self.joins = nn.ModuleList(
                AddNorm(D, norm, dropout=0.2, residual_scale=1.5, layer_scale=0.3) for _ in range(4)
            )

        def forward(self, x):
            for part, join in zip(self.parts, self.joins, strict=True):
                x = join(x, part(x))
            return x

    found = inspect(Layers(), text())
    assert found.unknown == ()
    assert found.closure <= 1e-5
    row = Row(norm_out=True, a=1.5, b=Learned(0.3, per_feature=True))
    assert row_differences(found.streams[0], [row] * 4) == []
    assert [site.path for site in found.sites] == [f"parts.{k}" for k in range(4)]
    assert [site.norm_out.path for site in found.sites] == [f"joins.{k}" for k in range(4)]
