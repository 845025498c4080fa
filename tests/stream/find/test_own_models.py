"""Tests of `inspect` on this library's models: stacks of every wiring, modules, and functions with every option."""

from dataclasses import replace
from itertools import zip_longest

import pytest
import torch

import addnorm
from addnorm import Learned, Row, inspect, wirings
from addnorm.nn import Decoder, Encoder, Transformer
from support import pairwise
from support.families import shake
from support.judge import rows_match
from support.stacks import ALL, D
from support.stream_steps import make_steps, noise

LAYERS = 3


def make_tokens(seed=0, dtype=torch.float32, tokens=5):
    return noise(2, tokens, D, seed=seed).to(dtype)


def find_row_differences(stream, rows):
    """Return the differences of a stream's rows from the expected ones."""
    pairs = zip_longest([site.row for site in stream.sites if site.role != "skip"], rows)
    return [
        f"row {k}: {row}, expected {expected}"
        for k, (row, expected) in enumerate(pairs)
        if row is None or expected is None or not rows_match(row, expected)
    ]


def check(inspection, expected, kinds, closure):
    """Check the wirings, rows, kinds and final norms of the streams, and that all is proven and understood."""
    assert inspection.unknown == ()
    assert [stream.wiring.name for stream in inspection.streams if stream.wiring] == [
        wiring.name for wiring in expected
    ]
    assert inspection.closes
    assert inspection.closure <= closure
    for stream, wiring, kind in zip(inspection.streams, expected, kinds, strict=True):
        assert [site.kind for site in stream.sites if site.role != "skip"] == [*kind] * LAYERS
        ends_in_norm = wiring.ends_in_norm(LAYERS) or wiring.name == "resi_dual"  # whose head has it
        assert (stream.final_norm is not None) == ends_in_norm
        assert stream.width == D
        if wiring.is_sequential:
            assert find_row_differences(stream, wiring.rows(LAYERS, len(kind))) == []


# Stacks.

OTHER = {"mix_ln": wirings.mix_ln(2)}  # by default a quarter of the layers, which is none of three
KNOWN = ("resi_dual", "b2t")  # with stages, and found nevertheless
WIRINGS = {wiring.name: OTHER.get(wiring.name, wiring) for wiring in ALL if wiring.has_rows or wiring.name in KNOWN}
KINDS = {kind.__name__: kind for kind in (Encoder, Decoder, Transformer)}
NORMS = ("layer", "rms")
MODES = ("eager", "untrained", "inference_mode", "noise", "checkpoint")
DTYPES = ("float32", "bfloat16", "float32 residual", "float64")
RUNS = pairwise.pairwise(tuple(KINDS), NORMS, MODES, DTYPES)  # rows in which every pair occurs


@pytest.mark.parametrize(("wiring", "run"), pairwise.rotate([*WIRINGS], RUNS, 2), ids=str)
def test_inspect_finds_wiring_of_own_model(wiring, run):
    kind, norm, mode, dtype = run
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
    kinds = {Encoder: [("attention", "feed-forward")], Decoder: [("attention", "cross-attention", "feed-forward")]}
    kinds[Transformer] = kinds[Encoder] + kinds[Decoder]
    closure = {"float32": 1e-5, "float64": 1e-10}.get(dtype, 0.02)
    check(inspection, expected, kinds[kind], closure)
    assert inspection.streams[0].norm in (norm, None)
    if options["dtype"]:
        assert inspection.streams[0].chain.adds[-1].out.tensor.dtype == options.get("residual_dtype", torch.bfloat16)


@pytest.mark.parametrize("wiring", [
    wirings.layer_scale(0.1), wirings.skipinit(0.5), wirings.mix_ln(2), wirings.residual_multiplier(0.3), wirings.depth_mup(1.4),
    wirings.parallel(2),
], ids=lambda wiring: wiring.name)  # fmt: skip
def test_inspect_finds_options_of_wiring(wiring):
    found = inspect(Encoder(LAYERS, D, 2, 32, wiring), make_tokens()).streams[0].wiring
    assert found == wiring


# Modules and functions.


def inspect_calls(call, dtype=torch.float32, closure=1e-5):
    """Inspect four sublayers that read y, each added by `call(model, z, f(y), weight, bias)`, which returns y and z, or one value."""

    def run(m, x):
        y = z = x * 1.0  # a copy to write to
        for k in range(4):
            out = call(m, z, m.mlps[k](y), m.gammas[k], m.shifts[k])
            y, z = out if isinstance(out, tuple) else (out, out)
        return y

    inspection = inspect(make_steps(run).to(dtype), make_tokens(dtype=dtype))
    assert (inspection.unknown, inspection.closes, len(inspection.sites)) == ((), True, 4)
    assert inspection.closure <= closure
    return inspection.streams[0]


KEEP = torch.tensor([[1.0], [0.0]]).expand(2, 5).clone()
VECTOR = Learned(1.0, per_feature=True)
# The options of a call, with VECTOR in place of a learned vector.
OPTIONS = {
    "nothing": {},
    "residual_scale": {"residual_scale": 2.5},
    "residual_scale, a vector": {"residual_scale": VECTOR},
    "layer_scale": {"layer_scale": VECTOR},
    "branch_bias": {"branch_bias": VECTOR},
    "row_scale": {"row_scale": KEEP},
    "weight_offset": {"weight_offset": 1.0},
    "dropout": {"dropout_p": 0.3},
    "dropout, seeded": {"dropout_p": 0.3, "seed": torch.tensor(1234)},
    "dropout, not training": {"dropout_p": 0.3, "training": False},
    "output dtypes": {"residual_dtype": torch.float32, "out_dtype": torch.float32},
    "all": {"residual_scale": 2.5, "layer_scale": VECTOR, "branch_bias": VECTOR, "row_scale": KEEP, "dropout_p": 0.3},
}  # fmt: skip
OF_NORM = ("weight_offset", "out_dtype")
FUNCTIONS = {"layer": addnorm.add_layer_norm, "rms": addnorm.add_rms_norm}
IN_PLACE = {"layer": addnorm.add_layer_norm_, "rms": addnorm.add_rms_norm_}
FORMS = ("out of place", "with residual", "in place", "no norm")


@pytest.mark.parametrize(("option", "form", "kind"), pairwise.product(tuple(OPTIONS), FORMS, tuple(FUNCTIONS)))
def test_inspect_finds_row_of_function(option, form, kind):
    form = "out of place" if option == "output dtypes" and form != "no norm" else form  # the others have no such option
    options = OPTIONS[option]

    def call(model, x, branch, *parameters):
        own = {name: model.gammas[5] if value is VECTOR else value for name, value in options.items()}
        if form == "no norm":
            return addnorm.add_residual(
                x, branch, **{name: value for name, value in own.items() if name not in OF_NORM}
            )
        if form == "in place":
            with torch.no_grad():
                return IN_PLACE[kind](x, branch, *parameters, **own)
        return FUNCTIONS[kind](x, branch, *parameters, return_residual=form == "with residual", **own)

    stream = inspect_calls(call)
    is_pre_norm, has_norm = form == "with residual", form != "no norm"
    row = Row(
        a=options.get("residual_scale", 1.0), b=options.get("layer_scale", 1.0), norm_out=has_norm and not is_pre_norm
    )
    assert find_row_differences(stream, [replace(row, norm_in=is_pre_norm and k > 0) for k in range(4)]) == []
    assert (stream.final_norm is not None) == is_pre_norm
    assert stream.norm == (kind if has_norm else None)
    assert not has_norm or stream.eps == pytest.approx(1e-5 if kind == "layer" else torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("casting", ["float32", "llama", "t5"])
def test_inspect_finds_rms_norm_of_every_casting(casting):
    stream = inspect_calls(
        lambda m, x, f, w, b: addnorm.add_rms_norm(x, f, w, casting=casting), dtype=torch.bfloat16, closure=0.02
    )
    assert (stream.sites[0].row, stream.norm) == (Row(norm_out=True), "rms")
