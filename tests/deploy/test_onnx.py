"""Tests of ONNX files: every option, in every form and in float32 and float16, as onnxruntime computes them."""

import functools
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import addnorm
from addnorm.onnx import FORMS, OnnxMismatchError, check, export, translations
from addnorm.onnx.check import check_version
from support.cases import DTYPES, VARIANTS, Variant
from support.deployed import Calls, dynamic
from support.fused_model import QUIET, PreNormModel, X
from support.random_models.graphs import Graph
from support.refusals import assert_raises
from support.stacks import encoder

# Imported by the tests that need it: every process of a run collects this file, and one runs it.
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
pytestmark = [*QUIET, pytest.mark.skipif(not all(map(find_spec, PACKAGES)), reason=f"needs {', '.join(PACKAGES)}")]


def without_dropout(variant):
    return replace(
        variant, options={k: v for k, v in variant.options.items() if k not in ("dropout_p", "seed", "offset")}
    )


# onnxruntime has no bfloat16 kernels on the CPU.
CASES = {
    name: without_dropout(variant)
    for name, variant in VARIANTS.items()
    if torch.bfloat16 not in variant.options.values()
} | {
    "casting llama": Variant("rms", weight=True, options={"casting": "llama", "weight_offset": 1.0}),
    "casting t5": Variant("rms", weight=True, bias=True, options={"casting": "t5"}),
    "RMSNorm and branch_bias": Variant("rms", weight=True, options={"branch_bias": "(d,)"}),
    "residual_dtype float16": Variant("layer", weight=True, options={"residual_dtype": torch.float16}),
    "out_dtype float16": Variant("rms", weight=True, options={"out_dtype": torch.float16}),
}


@pytest.fixture(scope="module", autouse=True)
def _shared_functions():
    """List the functions of onnxscript once: each export lists them anew, which takes a third of its time."""
    from torch.onnx._internal._lazy_import import onnxscript_apis

    onnxscript_apis.get_torchlib_ops = functools.cache(onnxscript_apis.get_torchlib_ops)


def load(path):
    import onnx

    return onnx.load(path)


def node_types(path):
    return Counter(node.op_type for node in load(path).graph.node)


@pytest.mark.parametrize(
    ("form", "dtypes"),
    [
        ("skip", "float16"),
        ("plain", "float32"),
        *(
            pytest.param(form, dtypes, marks=pytest.mark.slow)
            for form in FORMS
            for dtypes in ("float32", "float16", "float32 stream, float16 branch", "float64")
        ),
    ],
)
def test_every_option_in_onnxruntime(tmp_path, form, dtypes):
    module = Calls(CASES, DTYPES[dtypes]).eval()
    path = export(module, module.inputs(2, 7), tmp_path / "calls.onnx", form=form, dynamic_shapes=dynamic(2))
    assert check(path, module, module.inputs(3, 1, seed=1)) < 2e-3
    if form != "skip":
        import onnx

        onnx.checker.check_model(onnx.load(path))
    types = node_types(path)
    fused = {name for name in types if "Norm" in name}
    if form == "plain":
        assert not fused
    elif (
        dtypes == "float64"
    ):  # runtimes have no kernels in float64: only calls whose stream has another dtype keep nodes
        in_float32 = [case for case in CASES.values() if case.options.get("residual_dtype")]
        assert types["RMSNormalization"] <= sum(case.norm == "rms" for case in in_float32)
    else:
        assert fused >= {"LayerNormalization", "RMSNormalization"}
        takes_skip = form == "skip" and "branch" not in dtypes  # the node takes one dtype
        assert takes_skip == ("SkipLayerNormalization" in fused) == ("SkipSimplifiedLayerNormalization" in fused)


def test_models_have_one_node_for_each_norm(tmp_path):
    """One node for the first norm, which has no add, and one for each add and norm."""
    model = encoder("pre_ln", 1, norm="rms").half()
    path = export(model, (X.half(),), tmp_path / "rms.onnx", form="skip", dynamic_shapes=dynamic(1), output_names=["y"])
    types = node_types(path)
    assert types["RMSNormalization"] == 1
    assert types["SkipSimplifiedLayerNormalization"] == 2
    assert [entry.name for entry in load(path).graph.output] == ["y"]
    assert check(path, model, (torch.randn(3, 4, 16).half(),)) < 5e-3


def test_fused_model_keeps_its_calls(tmp_path):
    model = PreNormModel().eval()
    fusion = addnorm.fuse(model, X, benchmark=False)
    path = export(model, (X,), tmp_path / "fused.onnx", form="skip")
    assert node_types(path)["SkipLayerNormalization"] == len(fusion.fused)


def test_boundaries_of_several_streams_are_written_out(tmp_path):
    stack = addnorm.ResidualStack([nn.Linear(16, 16)], 16, addnorm.wirings.mhc(2, iterations=1), norm="rms").eval()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    path = export(stack, (X,), tmp_path / "mhc.onnx", form="skip", dynamic_shapes=dynamic(1))
    assert check(path, stack, (torch.randn(3, 4, 16),)) < 1e-5


def test_query_without_keys_gets_zero_attention(tmp_path):
    """Left padding of a causal decoder."""
    model = addnorm.nn.Decoder(1, 16, 2, cross_attention=False).eval()
    export(model, (X,), tmp_path / "decoder.onnx", kwargs={"key_mask": torch.arange(X.shape[1])[None] > 0})


in_place = Graph(lambda m, x: addnorm.add_layer_norm_(x, x.clone()))
with_dropout = Graph(lambda m, x: addnorm.add_layer_norm(x, x, dropout_p=0.5))


def test_training_and_dropout_are_refused(tmp_path):
    path = tmp_path / "model.onnx"
    for sentence, model, options in (
        ("model is in training mode, expected evaluation mode: ", encoder().train(), {}),
        ("dropout_p is 0.5 in the model, expected 0: ", with_dropout.eval(), {}),
        ("the program contains addnorm.add_norm_out, expected forward calls ", in_place.eval(), {}),
        ("form is 'fast', expected one of 'standard', 'skip', 'plain'", encoder(), {"form": "fast"}),
        ("opset_version is 17, expected a whole number from 18", encoder(), {"opset_version": 17}),
        ("opset_version is 99, expected one that onnxscript can", encoder(), {"opset_version": 99}),
    ):
        assert_raises(f"ValueError: {sentence}", lambda m=model, options=options: export(m, (X,), path, **options))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("grad_mode", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_translations_serve_torchs_exporter(tmp_path, grad_mode):
    """With the table, and without it after a decomposition."""
    model, path = encoder("pre_ln", 1), tmp_path / "encoder.onnx"
    with torch.set_grad_enabled(grad_mode):
        program = torch.export.export(model, (X,))
        decomposed = program.run_decompositions(addnorm.decompositions())
        for one, table, norms in ((program, translations("standard", opset_version=18), 3), (decomposed, None, 0)):
            exported = torch.onnx.export(one, (), dynamo=True, verbose=False, custom_translation_table=table)
            exported.save(path)
            assert node_types(path)["LayerNormalization"] == norms
            assert check(path, model, (X,)) < 2e-6


class Changing(nn.Module):
    """Module whose program is not what it computes."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return addnorm.layer_norm(x) * (1.0 if torch.compiler.is_exporting() else 1.0 + self.change)


def test_wrong_file_is_reported_and_not_written(tmp_path):
    path = tmp_path / "norm.onnx"
    path.write_bytes(b"before")
    with pytest.raises(OnnxMismatchError, match=r"^Output 0 differs by .* tolerance .*: try form='plain'\.$"):
        export(Changing(1.0).eval(), (X,), path)
    assert path.read_bytes() == b"before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["norm.onnx"]


@pytest.mark.parametrize(("dtype", "change"), [(torch.float32, 4e-6), (torch.float16, 8e-3)])
@pytest.mark.parametrize("form", ["standard", "plain"])
def test_check_detects_some_roundings(tmp_path, dtype, change, form):
    """The tolerance is the error of torch's own result: about one rounding, 1.2e-7 or 1e-3, after one norm."""
    x, path = X.to(dtype), tmp_path / "norm.onnx"
    with pytest.raises(OnnxMismatchError, match=r"^Output 0 differs by "):
        export(Changing(change).eval(), (x,), path, form=form)
    right = Changing(0.0).eval()
    assert check(export(right, (x,), path, form=form), right, (x,)) < change / 4


class FixedDtype(nn.Module):
    """Module that has no float64 copy."""

    def forward(self, x):
        assert x.dtype == torch.float32
        return addnorm.rms_norm(x)


def test_check_without_a_float64_copy(tmp_path):
    path = export(FixedDtype().eval(), (X,), tmp_path / "norm.onnx")
    assert check(path, FixedDtype(), (X,)) < 1e-6
    assert check(path, FixedDtype().forward, (X,)) < 1e-6
    with pytest.raises(OnnxMismatchError, match=r"tolerance 3\.1e-5: "):  # 256 roundings
        check(path, lambda x: FixedDtype()(x) * 1.0001, (X,))


def test_large_weights_go_into_a_second_file(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 10)
    norm = addnorm.LayerNorm(16).eval()
    path = export(norm, (X,), tmp_path / "norm.onnx")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["norm.onnx", "norm.onnx.data"]
    assert check(path, norm, (X,)) < 1e-6


@pytest.mark.parametrize(
    ("version", "operators", "is_faulty"),
    [
        ("1.29.0", {"LayerNormalization"}, True),
        ("1.20.1", {"SkipLayerNormalization"}, True),
        ("1.29.0", {"RMSNormalization", "SkipSimplifiedLayerNormalization"}, False),
        ("1.30.0", {"LayerNormalization", "SkipLayerNormalization"}, False),
        ("2.0.0", {"LayerNormalization"}, False),
    ],
)
def test_faulty_versions_are_refused(version, operators, is_faulty):
    message = rf"^onnxruntime is {version}, expected 1.30 or later: .*form='plain'\.$"
    with pytest.raises(RuntimeError, match=message) if is_faulty else nullcontext():
        check_version(version, operators)


@pytest.mark.parametrize("form", FORMS)
def test_runtime_is_not_faulty(tmp_path, form):
    """Constant rows, and rows whose mean is a thousand times their deviation: where earlier versions return NaN."""

    model = Graph(lambda m, x, y: addnorm.add_layer_norm(x, y)).eval()
    x = torch.randn(2, 3, 64) + 1000.0
    x[0] = 1.1
    y = torch.zeros_like(x) + 0.3
    path = export(model, (x, y), tmp_path / "norm.onnx", form=form)
    assert check(path, model, (x, y)) < 1e-4


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_package_is_named(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ImportError, match=rf"^{package} is not installed, and is needed to .*: pip install 'addnorm\[onnx\]'$"
    ):
        export(encoder(), (X,), tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("wiring", "norm"),
    [("post_ln", "layer"), (addnorm.wirings.mhc(2, iterations=1), "layer"), ("pre_ln", "rms"), ("fused", "layer")],
)
def test_exporter_of_torch_takes_modules_apart(tmp_path, wiring, norm):
    """Whoever calls `torch.onnx.export`, as other packages do, gets torch's own operators."""
    import onnxruntime

    if wiring == "fused":
        model = PreNormModel(layers=1).eval()
        addnorm.fuse(model, X, benchmark=False)
    else:
        model = encoder(wiring, 1, norm=norm)
    torch.onnx.export(model, (X,), str(tmp_path / "model.onnx"), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (y,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(y), model(X), rtol=1e-5, atol=1e-5)
