"""Tests of the files of benchmarks/: each is run on tiny cases, refuses other results, and has the pages' sections."""

import copy
import importlib
import itertools
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from addnorm.bench import harness
from addnorm.bench.case import Case, has
from addnorm.fusion import benchmark as fusion_benchmark
from addnorm.ops import compile_mode
from addnorm.stream.models.load import LoadedModel
from support.families import families
from support.loading import ROOT

# torch.compile builds its own C++ with deprecated parts of setuptools and distutils, which warn.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NAMES = ("stack", "limit", "memory", "stream", "streams", "fuse", "compile")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the loop is compiled with g++")


@pytest.fixture(scope="module")
def scripts():
    """Return the benchmarks as modules, which other processes can import too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield SimpleNamespace(**{name: importlib.import_module(f"bench_{name}") for name in NAMES})


def small_bert(name, *, texts, tokens, dtype):
    """Return a small BERT with random weights in place of MiniLM."""
    model = families()["bert"].build()[0].to(getattr(torch, dtype or "float32"))
    ids = torch.randint(0, 50, (len(texts), tokens))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return LoadedModel(name, model, (), inputs, tuple(texts), "random")


@pytest.fixture
def small(scripts, monkeypatch, one_thread):
    """Make the models, texts and copies of all benchmarks small, without a compiler, on one thread."""
    decoder = scripts.fuse.models.SIZES | {"num_hidden_layers": 1, "vocab_size": 60}
    for place, name, value in (
        (scripts.stream.models, "load", small_bert),
        (scripts.stack, "has_inductor", has(wiring=scripts.stack.STREAMS)), (scripts.fuse, "SECONDS", 0.01),
        (scripts.fuse.models, "SIZES", decoder), (fusion_benchmark, "SHARE_SECONDS", 0.0),
        (scripts.memory, "SETTINGS", dict(itertools.islice(scripts.memory.SETTINGS.items(), 2))),
        (scripts.streams, "COPY_BYTES", 4096),
        (torch, "compile", lambda function, **options: function),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, value)
    yield scripts
    compile_mode.set_compile_mode(None)


TRAINED = {"batch": 1, "tokens": 8, "dtype": "bfloat16"}
COMPILED = {"norm": "layer", "rows": 6, "d": 16, "dtype": "float32", "device": "cpu"}
OPERATION = {"rows": 4, "d": 64, "dtype": "bfloat16"}
STACK = {"wiring": "pre_ln", "norm": "layer", "dtype": "float32", "job": "inference", "batch": 2, "tokens": 3, "d": 64}
BOUNDARY = {"job": "forward_backward", "rows": 3, "d": 16, "dtype": "float32"}
# Cases of each benchmark, with the variants that are measured.
CASES = [
    ("stack", STACK, ("addnorm", "plain", "torch")),
    ("stack", STACK | {"wiring": "post_ln", "job": "training"}, ("addnorm", "plain", "torch")),
    *(("stack", STACK | {"wiring": wiring, "norm": "rms", "dtype": "bfloat16", "job": job, "tokens": n}, ("addnorm", "plain"))
      for wiring, job, n in (("pre_ln", "decode", 1), ("sandwich", "training", 3), ("sandwich", "decode", 1))),
    *(("stack", STACK | {"wiring": wiring, "job": "training"}, ("addnorm", "plain", "addnorm, compiled", "plain, compiled"))
      for wiring in ("hyper_connections", "mhc", "attention_residuals")),
    pytest.param("limit", {"norm": "layer", "job": "stream", **OPERATION}, ("addnorm", "add", "loop"), marks=needs_compiler),
    pytest.param("limit", {"norm": "rms", "job": "y", **OPERATION}, ("addnorm", "add", "loop"), marks=needs_compiler),
    ("limit", {"norm": "rms", "job": "forward_backward", **OPERATION}, ("eager", "addnorm")),
    ("memory", {"model": "plain", "job": "inference", "batch": 2, "tokens": 3, "d": 64}, ("glibc", "glibc, memory kept")),
    ("stream", {"batch": 1, "tokens": 8}, ("plain", "recorded", "without gradients", "inspect", "decompose")),
    ("streams", BOUNDARY | {"job": "forward", "dtype": "bfloat16"}, ("addnorm", "transformers")),
    ("streams", BOUNDARY, ("addnorm", "transformers", "compile")),
    *(pytest.param("fuse", {"model": model, "job": job, **TRAINED}, ("plain", "fused", "frontend"), marks=pytest.mark.slow)
      for model, job in (("minilm", "training"), ("llama", "decode"), ("gemma3_text", "inference"))),
    *(("compile", {"job": job, **COMPILED}, ("op", "formula", "torch", "eager")) for job in ("y", "training", "around_training")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values", "variants"), CASES)
def test_case_has_a_row_for_each_variant_and_sections(small, name, values, variants):
    benchmark = getattr(small, name).BENCHMARK
    case = Case(**values, threads=1)
    options = benchmark.options | ({"compile": "compile" in variants} if name == "streams" else {})
    document = harness.run(benchmark, [case], rounds=2, **options)
    assert [row["variant"] for row in document["rows"]] == [*variants]
    assert document["rows"][0].keys() >= {*benchmark.fields}
    assert all(0 < row.get("q1_us", 1) <= row["median_us"] for row in document["rows"])
    assert document.get("failures", []) == []
    assert document["complete"]
    assert torch.get_num_threads() == 1
    if name == "memory":  # without processes, in which torch imports its compiler for an optimizer
        assert all(small.memory.work(Case(**values | {"job": "training"}, threads=1)))
    if name == "stack":
        measured = [row for row in document["rows"] if "compiled" not in row["variant"]]
        assert all(("saved_bytes" in row) == (case.job == "training") for row in measured)
        assert {row["variant"] for row in measured if "share" in row} == ({"plain"} if case.norm == "rms" else set())
    for section in benchmark.sections.values():
        assert section(document)


# Other results are refused.


def test_different_results_are_an_error(small, monkeypatch):
    plain, forward = small.stack.Plain, small.streams.Fused.forward

    def spoiled_stack(stack):
        module = plain(copy.deepcopy(stack))  # which shares no parameter
        with torch.no_grad():
            [*module.parameters()][-1][5] += 1e-3
        return module

    def spoiled_boundary(self, streams, output, *rest):
        return forward(self, streams, output * 1.1, *rest)

    monkeypatch.setattr(small.stack, "Plain", spoiled_stack)
    monkeypatch.setattr(small.streams.Fused, "forward", spoiled_boundary)
    for script, values, error, words in (
        (small.stack, STACK, AssertionError, "not close"),
        (small.streams, BOUNDARY, ValueError, r"the results differ by .* expected at most 1e-05"),
    ):
        with pytest.raises(error, match=words):
            script.measure(Case(**values, threads=1), rounds=1)


@pytest.mark.parametrize(("off", "error"), [(0.03, None), (0.042, "not close")])
def test_decoders_may_differ_by_their_round_off(small, monkeypatch, off, error):
    class Off(nn.Module):
        def forward(self, x):
            return x + off * (1 + x.abs())

    monkeypatch.setattr(small.stack, "variants", lambda case: {"addnorm": nn.Identity(), "plain": Off()})
    monkeypatch.setattr(small.stack, "measure_share", lambda *_: None)
    case = Case(**STACK | {"norm": "rms", "dtype": "bfloat16"}, threads=1)
    with pytest.raises(AssertionError, match=error) if error else nullcontext():
        small.stack.measure(case, rounds=1)


def test_text_that_is_too_short_is_refused(small, monkeypatch):
    monkeypatch.setattr(
        small.fuse.models, "load", lambda *args, tokens, **more: small_bert(*args, tokens=tokens - 1, **more)
    )
    with pytest.raises(ValueError, match=r"the text gave \(1, 7\), expected \(1, 8\): use longer passages"):
        small.fuse.models.load_model(Case(**TRAINED, model="minilm"))


# What single benchmarks compare.


class Grown(nn.Module):
    """A sublayer that costs next to nothing."""

    def forward(self, x, **context):
        return x + 1


def test_plain_stack_shares_parameters_and_has_torchs_norms(scripts):
    modules = scripts.stack.variants(Case(**STACK))
    storages = {name: {parameter.data_ptr() for parameter in module.parameters()} for name, module in modules.items()}
    assert storages["addnorm"] == storages["plain"] == storages["torch"]  # copies would lie elsewhere in memory
    assert {type(module) for module in modules["plain"].modules() if isinstance(module, nn.LayerNorm)} == {nn.LayerNorm}


def test_share_of_a_decoder_is_that_of_its_add_and_norms(scripts, monkeypatch, one_thread):
    monkeypatch.setattr("stacks.LAYERS", 1)
    x, past = torch.randn(1, 1, 64), torch.randn(1, 64, 64)
    plain = scripts.stack.Plain(scripts.stack.decoder(64, "pre_ln", torch.float32).stack).eval()
    share = scripts.stack.measure_share(plain, x, past)
    assert 0 < share < 1
    assert plain._compiled_call_impl is None  # a copy is fused
    plain.sublayers = nn.ModuleList(Grown() for _ in plain.sublayers)
    assert share < scripts.stack.measure_share(plain, x, None)


def test_fuse_measures_inductor_in_chosen_cases_and_reports_failures(small, monkeypatch):
    models = []

    def fail(model, kwargs):
        models.append(model)
        raise RuntimeError("no compiler here")

    case, plain = Case(**TRAINED, model="minilm", job="inference", threads=1), small.fuse.MAKE["plain"]
    monkeypatch.setattr(small.fuse, "MAKE", {"plain": plain, "fused": fail, "inductor": fail})
    monkeypatch.setattr(small.fuse, "has_inductor", lambda case: True)
    result = small.fuse.measure(case, rounds=1)
    assert [row["variant"] for row in result["rows"]] == ["plain"]
    assert [row["variant"] for row in result["failures"]] == ["fused", "inductor"]
    assert result["failures"][0]["error"] == "RuntimeError: no compiler here"
    storages = [{parameter.data_ptr() for parameter in model.parameters()} for model in models]
    assert not storages[0] & storages[1]
    assert [row["variant"] for row in small.fuse.measure(case, rounds=1, inductor=False)["failures"]] == ["fused"]


@needs_compiler
@pytest.mark.parametrize(("with_bias", "with_stream"), [*itertools.product((False, True), repeat=2)])
def test_loop_reads_and_writes_every_row(scripts, with_bias, with_stream):
    x, branch, weight, bias = (
        torch.randint(0, 2**31, shape, dtype=torch.int32) for shape in ((5, 48), (5, 48), (48,), (48,))
    )
    y, z = torch.zeros_like(x), torch.zeros_like(x) if with_stream else None
    scripts.limit.loop_of([x, branch, weight, bias if with_bias else None], y, z, 2)()
    expected = x | branch
    assert z is None or z.equal(expected)
    assert y.equal(expected | weight | bias if with_bias else expected | weight)


# torch.compile.


@pytest.mark.parametrize("job", ["y", "stream", "training", "around", "chain_training", "stack", "stack_training"])
def test_addnorm_and_torch_compute_the_same_job(small, job):
    case = Case(**COMPILED | {"job": job, "norm": ("layer", "rms")[len(job) % 2]}, threads=1)
    tensors = small.compile.inputs(case)
    ours, theirs = (small.compile.forward(case, name)(*tensors.args) for name in ("eager", "torch"))
    torch.testing.assert_close(ours, theirs, rtol=1e-2 if job == "around" else 1e-4, atol=1e-4)
    if tensors.cotangents:  # every input is read
        assert None not in torch.autograd.grad(ours, tensors.leaves, tensors.cotangents)
