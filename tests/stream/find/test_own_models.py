"""Tests of `inspect` on this library's models: stacks of every wiring, modules, and functions with every option."""

from itertools import product

import pytest
import torch

import addnorm
from addnorm import Learned, Row, inspect, wirings
from addnorm.nn import Decoder, Encoder, Transformer
from support import pairwise
from support.families import shake
from support.inspection_checks import find_row_differences
from support.stacks import ALL, D
from support.stream_steps import make_steps

LAYERS = 3
ATTENTION, CROSS, FEED_FORWARD = "attention", "cross-attention", "feed-forward"


def make_tokens(seed=0, dtype=torch.float32, tokens=5):
    return torch.randn(2, tokens, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(inspection, *expected, kinds=((ATTENTION, FEED_FORWARD),), closure=1e-5, num_layers=LAYERS):
    """Check the wirings, rows, kinds and final norms of the streams, and that all is proven and understood."""
    assert inspection.unknown == ()
    assert [stream.wiring.name for stream in inspection.streams if stream.wiring] == [
        wiring.name for wiring in expected
    ]
    assert inspection.closes
    assert inspection.closure <= closure
    for stream, wiring, kind in zip(inspection.streams, expected, kinds, strict=True):
        assert [site.kind for site in stream.sites if site.role != "skip"] == [*kind] * num_layers
        ends_in_norm = wiring.ends_in_norm(num_layers) or wiring.name == "resi_dual"  # whose head has it
        assert (stream.final_norm is not None) == ends_in_norm
        assert stream.width == D
        if wiring.is_sequential:
            assert find_row_differences(stream, wiring.rows(num_layers, len(kind))) == []


# Stacks.

OTHER = {"mix_ln": wirings.mix_ln(2)}  # by default a quarter of the layers, which is none of three
KNOWN = ("resi_dual", "b2t")  # with stages, and found nevertheless
WIRINGS = {wiring.name: OTHER.get(wiring.name, wiring) for wiring in ALL if wiring.has_rows or wiring.name in KNOWN}
KINDS = {kind.__name__: kind for kind in (Encoder, Decoder, Transformer)}
NORMS = ("layer", "rms")
MODES = ("eager", "untrained", "inference_mode", "noise", "checkpoint")
DTYPES = ("float32", "bfloat16", "float32 residual", "float64")
RUNS = pairwise.pairwise(tuple(KINDS), NORMS, MODES, DTYPES)
# Each wiring with two of the rows in which every pair of the other axes occurs.
CASES = [(name, *RUNS[(2 * k + i) % len(RUNS)]) for k, name in enumerate(WIRINGS) for i in range(2)]
# All cases with at most two values that are not the first of their axis, and every pair with a wiring.
AXES = (tuple(WIRINGS), tuple(KINDS), NORMS, MODES, DTYPES)
SLOW = [
    case for case in product(*AXES) if sum(value != axis[0] for value, axis in zip(case[1:], AXES[1:], strict=True)) < 3
]
SLOW += [case for case in pairwise.pairwise(*AXES) if case not in SLOW]


@pytest.mark.parametrize(
    "wiring", [wiring for wiring in ALL if wiring.name not in WIRINGS], ids=lambda wiring: wiring.name
)
def test_inspect_claims_no_wiring_of_several_streams(wiring):
    inspection = inspect(shake(Encoder(LAYERS, D, 2, 32, wiring)), make_tokens())
    assert not inspection.closes or not any(stream.wiring for stream in inspection.streams)
    assert inspection.closes == (inspection.unknown == ())


@pytest.mark.parametrize(
    ("wiring", "kind", "norm", "mode", "dtype"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in CASES)],
)
def test_inspect_finds_wiring_of_own_model(wiring, kind, norm, mode, dtype):
    wiring, kind = WIRINGS[wiring], KINDS[kind]
    options = {"norm": norm, "dtype": torch.bfloat16 if dtype in ("bfloat16", "float32 residual") else None}
    options |= {"residual_dtype": torch.float32} if dtype == "float32 residual" else {}
    options |= {"noise": {"dropout": 0.1, "stochastic_depth": 0.2}, "checkpoint": {"checkpoint": True}}.get(mode, {})
    sizes = (LAYERS, LAYERS, D, 2, 32) if kind is Transformer else (LAYERS, D, 2, 32)
    model = kind(*sizes, wiring, **options)
    model = model if mode == "untrained" else shake(model)  # the factors of ReZero are 0 before training
    model.train(mode in ("noise", "checkpoint"))
    inputs = [make_tokens(dtype=options["dtype"] or torch.float32)]
    inputs += [] if kind is Encoder else [make_tokens(1, options["dtype"] or torch.float32, tokens=4)]
    if mode == "checkpoint":
        inputs[0].requires_grad_()
    context = {"untrained": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, torch.enable_grad)
    with context():
        inspection = inspect(model, *inputs, float64=dtype == "float64")
    expected = wiring.paired(LAYERS, LAYERS) if kind is Transformer else [wiring]
    kinds = {Encoder: [(ATTENTION, FEED_FORWARD)], Decoder: [(ATTENTION, CROSS, FEED_FORWARD)]}
    kinds[Transformer] = kinds[Encoder] + kinds[Decoder]
    closure = {"float32": 1e-5, "float64": 1e-10}.get(dtype, 0.02)
    check(inspection, *expected, kinds=kinds[kind], closure=closure)
    assert inspection.streams[0].norm in (norm, None)
    if options["dtype"]:
        assert inspection.streams[0].chain.adds[-1].out.tensor.dtype == options.get("residual_dtype", torch.bfloat16)


@pytest.mark.parametrize(("wiring", "options"), [
    (wirings.layer_scale(0.1), {"gamma": 0.1}), (wirings.skipinit(0.5), {"alpha": 0.5}), (wirings.mix_ln(2), {"k": 2}),
    (wirings.residual_multiplier(0.3), {"multiplier": 0.3}), (wirings.depth_mup(1.4), {"k": 1.4}), (wirings.parallel(2), {"norms": 2}),
], ids=lambda value: getattr(value, "name", ""))  # fmt: skip
def test_inspect_finds_options_of_wiring(wiring, options):
    inspection = inspect(Encoder(LAYERS, D, 2, 32, wiring), make_tokens())
    assert dict(inspection.streams[0].wiring.options) == options


# Modules and functions.


def calls(call):
    """Return the forward of four sublayers, each added by `call(model, x, f(x), weight, bias)`."""

    def run(m, x):
        x = x * 1.0  # a copy to write to
        for k in range(4):
            x = call(m, x, m.mlps[k](x), m.gammas[k], m.shifts[k])
        return x

    return run


def pre_norm_calls(call):
    """Return the forward of sublayers that read y, where z is the stream: pre-LN except for the first sublayer."""

    def run(m, x):
        y = z = x * 1.0
        for k in range(4):
            y, z = call(m, z, m.mlps[k](y), m.gammas[k], m.shifts[k])
        return y

    return run


def inspect_calls(run, dtype=torch.float32, closure=1e-5):
    inspection = inspect(make_steps(run).to(dtype), make_tokens(dtype=dtype))
    assert inspection.unknown == ()
    assert inspection.closes
    assert inspection.closure <= closure
    assert len(inspection.sites) == 4
    return inspection.streams[0]


KEEP = torch.tensor([[1.0], [0.0]]).expand(2, 5).clone()
VECTOR = Learned(1.0, per_feature=True)
# The options of a call, as a function of the model's gamma, and the row that they give.
OPTIONS = {
    "nothing": (lambda g: {}, Row()),
    "residual_scale": (lambda g: {"residual_scale": 2.5}, Row(a=2.5)),
    "residual_scale, a vector": (lambda g: {"residual_scale": g}, Row(a=VECTOR)),
    "layer_scale": (lambda g: {"layer_scale": g}, Row(b=VECTOR)),
    "branch_bias": (lambda g: {"branch_bias": g}, Row()),
    "row_scale": (lambda g: {"row_scale": KEEP}, Row()),
    "weight_offset": (lambda g: {"weight_offset": 1.0}, Row()),
    "dropout": (lambda g: {"dropout_p": 0.3}, Row()),
    "dropout, seeded": (lambda g: {"dropout_p": 0.3, "seed": torch.tensor(1234)}, Row()),
    "dropout, not training": (lambda g: {"dropout_p": 0.3, "training": False}, Row()),
    "output dtypes": (lambda g: {"residual_dtype": torch.float32, "out_dtype": torch.float32}, Row()),
    "all": (
        lambda g: {"residual_scale": 2.5, "layer_scale": g, "branch_bias": g, "row_scale": KEEP, "dropout_p": 0.3},
        Row(a=2.5, b=VECTOR),
    ),
}  # fmt: skip
FUNCTIONS = {"layer": addnorm.add_layer_norm, "rms": addnorm.add_rms_norm}
IN_PLACE = {"layer": addnorm.add_layer_norm_, "rms": addnorm.add_rms_norm_}
FORMS = ("out of place", "with residual", "in place")


@pytest.mark.parametrize(("option", "form", "kind"), pairwise.product(tuple(OPTIONS), FORMS, tuple(FUNCTIONS)))
def test_inspect_finds_row_of_function(option, form, kind):
    form = "out of place" if option == "output dtypes" else form  # the others have no such option
    make_options, row = OPTIONS[option]

    def call(model, x, branch, weight, bias):
        options = make_options(model.gammas[5])
        if form == "in place":
            with torch.no_grad():
                return IN_PLACE[kind](x, branch, weight, bias, **options)
        return FUNCTIONS[kind](x, branch, weight, bias, return_residual=form == "with residual", **options)

    is_pre_norm = form == "with residual"
    stream = inspect_calls((pre_norm_calls if is_pre_norm else calls)(call))
    rows = [Row(norm_in=is_pre_norm and k > 0, norm_out=not is_pre_norm, a=row.a, b=row.b) for k in range(4)]
    assert find_row_differences(stream, rows) == []
    assert (stream.final_norm is not None) == is_pre_norm
    assert stream.norm == kind
    assert stream.eps == pytest.approx(1e-5 if kind == "layer" else torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("option", OPTIONS)
def test_inspect_finds_row_of_add_residual(option):
    make_options, row = OPTIONS[option]

    def call(model, x, branch, weight, bias):
        options = make_options(model.gammas[5])
        return addnorm.add_residual(
            x, branch, **{name: options[name] for name in options.keys() - {"weight_offset", "out_dtype"}}
        )

    stream = inspect_calls(calls(call))
    assert find_row_differences(stream, [row] * 4) == []
    assert stream.norm is None


@pytest.mark.parametrize("casting", ["float32", "llama", "t5"])
def test_inspect_finds_rms_norm_of_every_casting(casting):
    run = calls(lambda m, x, f, w, b: addnorm.add_rms_norm(x, f, w, casting=casting))
    stream = inspect_calls(run, dtype=torch.bfloat16, closure=0.02)
    assert (stream.sites[0].row, stream.norm) == (Row(norm_out=True), "rms")
