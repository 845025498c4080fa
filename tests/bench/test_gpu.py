"""Tests of the benchmark on a GPU: its cases, the variants, and the check of their results."""

import itertools
import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from addnorm.bench import jobs, proofs
from addnorm.bench.gpu import benchmark, plan, variants
from addnorm.bench.gpu.plan import LARGE
from addnorm.bench.jobs import JOBS, tensor_bytes
from support.gpu_benchmark import case, plant
from support.loading import ROOT
from support.pairwise import product
from support.wrong_gradient import scale_gradient

PEERS = ("liger", "flash_attn", "quack")
UNCOMPILED = ["eager", "addnorm"]
SCRIPT = ROOT / "benchmarks" / "bench_gpu.py"


def check_call(item, forward):
    return proofs.check(item, forward, jobs.inputs(item)[0])


def test_plan_begins_with_a_case_of_every_kind():
    cases = plan.plan({})
    assert len(cases) == len({*cases})
    large = {(item.norm, item.job, item.d) for item in cases[:30] if tensor_bytes(item) >= LARGE}  # a short run
    assert large >= {
        (norm, job, d) for norm in ("layer", "rms") for job in ("forward_stream", "backward") for d in plan.TARGET_D
    }
    assert {item.job for item in cases[:60]} == {*plan.TIMED}  # ten minutes
    assert {item.dtype for item in cases[:60]} == {"bfloat16", "mixed", "float16", "float32"}
    assert {item.d for item in cases} >= {768, 32768, 65536}
    assert {item.rows for item in cases} >= {1, 128, 65536}
    assert plan.plan({"d": [5], "rows": [2], "norm": ["rms"]}) == [
        case("rms", job, "bfloat16", 2, 5, "cuda") for job in plan.TIMED
    ]


# Signatures of the real peers: liger-kernel 0.8.5, flash-attn's main branch, quack-kernels 0.6.5. The implementations here are
# plain PyTorch, so that a wrong keyword, order or default is detected without a GPU.


class LigerFusedAddRMSNormFunction:
    @staticmethod
    def apply(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
        assert (casting_mode, in_place) == ("llama", False)
        z = R + X
        return F.rms_norm(z, (z.shape[-1],), W + offset, eps), z


class LigerLayerNormFunction:
    @staticmethod
    def apply(X, W, B, eps):
        return F.layer_norm(X, (X.shape[-1],), W, B, eps)


def layer_norm_fn(x, weight, bias, residual=None, *, eps=1e-6, dropout_p=0.0, prenorm=False, is_rms_norm=False):
    z = residual + F.dropout(x, dropout_p)
    parts = (weight.float(), None if bias is None else bias.float())
    shape = (x.shape[-1],)
    y = F.rms_norm(z.float(), shape, parts[0], eps) if is_rms_norm else F.layer_norm(z.float(), shape, *parts, eps)
    y = y.to(x.dtype)
    return (y, z) if prenorm else y


def rms_norm_fn(x, weight, bias, residual=None, **options):
    return layer_norm_fn(x, weight, bias, residual, is_rms_norm=True, **options)


def rmsnorm(x, weight=None, bias=None, residual=None, *, eps=1e-6, prenorm=False):
    return layer_norm_fn(x, weight, bias, residual, eps=eps, prenorm=prenorm, is_rms_norm=True)


MODULES = {
    "liger_kernel.ops.fused_add_rms_norm": [LigerFusedAddRMSNormFunction],
    "liger_kernel.ops.layer_norm": [LigerLayerNormFunction],
    "flash_attn.ops.triton.layer_norm": [layer_norm_fn, rms_norm_fn],
    "quack": [rmsnorm],
}


@pytest.fixture
def installed(monkeypatch):
    """Install fake modules with the peers' names."""
    for name, members in MODULES.items():
        parts = name.split(".")
        for path in (".".join(parts[:k]) for k in range(1, len(parts) + 1)):
            if path not in sys.modules:
                module = ModuleType(path)
                module.__spec__ = ModuleSpec(path, None)
                monkeypatch.setitem(sys.modules, path, module)
        for member in members:
            setattr(sys.modules[name], member.__name__, member)
    find_spec, names = variants.find_spec, {name.split(".")[0] for name in MODULES}
    monkeypatch.setattr(variants, "find_spec", lambda name: object() if name in names else find_spec(name))


# Every variant computes the same.

MAKE = {name: variants.VARIANTS[name].make for name in ("eager", "addnorm", *PEERS)}
MAKE["compile_reference"] = variants.formula  # uncompiled
FITS = [
    (name, "rms", job, "bfloat16") for name in PEERS for job in ("forward", "backward")
]  # peers have limits elsewhere
FITS += [("liger", "layer", "backward", "bfloat16")]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "norm", "job", "dtype"),
    product([*MAKE], ("layer", "rms"), [*plan.TIMED], ["bfloat16", "mixed", "float16", "float32"], always=FITS),
)
def test_variant_computes_the_operation(name, norm, job, dtype):
    item = case(norm, job, dtype)
    limit = variants.unfit(name, item)
    if limit is not None:
        assert name not in ("eager", "addnorm")
        assert limit in [each.why for each in variants.VARIANTS[name].limits]
        return
    errors, problem = check_call(item, MAKE[name](item))
    assert problem is None
    gradients = {"dresidual", "dbranch", "dweight"} | ({"dbias"} if norm == "layer" else set())
    outputs = {"y", "z"} if JOBS[job].stream else {"y"}
    assert errors.keys() == outputs | (gradients if JOBS[job].backward else set())


WRONG = {
    "y": lambda f, x, s, w, b: (f(x, s, w, b)[0] * 1.1, f(x, s, w, b)[1]),
    "z": lambda f, x, s, w, b: (f(x, s, w, b)[0], f(x, s, w, b)[1] * 1.1),
    "dresidual": lambda f, x, s, w, b: f(scale_gradient(x, 1.1), s, w, b),
    "dbranch": lambda f, x, s, w, b: f(x, scale_gradient(s, 1.1), w, b),
    "dweight": lambda f, x, s, w, b: f(x, s, scale_gradient(w, 1.1), b),
    "dbias": lambda f, x, s, w, b: f(x, s, w, scale_gradient(b, 1.1)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "job"), list(itertools.product(WRONG, ("backward", "dropout"))))
def test_check_names_the_wrong_tensor(name, job):
    item = case("layer", job, "float32")
    right = variants.ours(item)
    _, problem = check_call(item, lambda *args: WRONG[name](right, *args))
    # Under dropout, a z that is 10 % off implies another mask; the check detects it in the results that depend on the mask.
    assert f"{name} differs by" in problem


def test_check_refuses_nan_dtype_shape_and_rounded_stream():
    item = case(job="forward", dtype="mixed")
    assert "y differs by nan" in check_call(item, lambda x, s, w, b: torch.full_like(s, torch.nan))[1]
    message = "y is torch.float32 (16, 64), expected torch.bfloat16 (16, 64)"
    assert check_call(item, lambda x, s, w, b: F.rms_norm(x + s, (64,), w)) == ({}, message)
    assert "y is torch.bfloat16 (8, 64)" in check_call(item, lambda x, s, w, b: s[:8])[1]
    item = case(dtype="mixed")
    right = variants.eager(item)
    assert "z differs by" in check_call(item, lambda x, s, w, b: right(x.to(s.dtype).float(), s, w, b))[1]


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_check_refuses_another_share_of_dropout(p):
    item = case(job="dropout", dtype="float32")
    scale = (1 - p) / 0.9  # so that the kept elements have the right values, and only their number is wrong

    def other(x, s, w, b):
        z = x + scale * F.dropout(s, p)
        return F.rms_norm(z, (64,), w, 1e-6), z

    errors, problem = check_call(item, other)
    assert errors["z"] < 1e-6
    share = re.fullmatch(r"dropout 0.1 kept (\d\.\d+) of the elements", problem)
    assert float(share[1]) == pytest.approx(1 - p, abs=0.06)


# Which variants are measured.


def test_variants_are_chosen_by_limit_device_and_request(installed):
    assert variants.unfit("liger", case(job="dropout")) == "has no dropout"
    assert variants.unfit("liger", case(dtype="mixed")) == "keeps the stream in the branch's dtype"
    assert variants.unfit("quack", case(norm="layer")) == "adds no residual in its LayerNorm"
    fits = [variants.unfit("flash_attn", case("rms", "backward", "float32", 1, d)) is None for d in (16384, 32768)]
    assert fits == [True, False]
    large = case("rms", "forward_stream", rows=8192, d=4096, device="cuda")
    every = [name for name in variants.VARIANTS if name != "compile_reference"]  # only on request
    assert variants.chosen(large) == every
    assert variants.chosen(large.but(device="cpu")) == ["eager", "compile", "compile_addnorm", "addnorm"]
    other = case("layer", "backward", "float32", 4096, 4096, "cuda")
    assert variants.chosen(other) == ["eager", "compile", "liger", "flash_attn", "addnorm"]
    assert variants.chosen(other, ["addnorm", "compile_reference", "quack"]) == ["compile_reference", "addnorm"]
    assert variants.missing("cuda") == {}
    assert variants.missing("cpu")["quack"] == "QuACK runs on CUDA alone, and this is a run on cpu"
    assert variants.versions().keys() == {*PEERS}


def test_missing_peers_have_a_reason(monkeypatch):
    monkeypatch.setattr(variants, "find_spec", lambda name: None)
    assert {name: reason.rpartition(" ")[2] for name, reason in variants.missing("cuda").items()} == {
        "liger": "liger-kernel", "flash_attn": "flash-attn", "quack": "quack-kernels",
    }  # fmt: skip
    assert variants.versions() == {}


# What is timed.


@pytest.mark.parametrize("job", ["forward", "backward", "dropout"])
def test_timed_call_runs_the_job_on_its_set(monkeypatch, job):
    item = case("layer", job, "mixed" if job == "dropout" else "float32")
    measurement = benchmark._Measurement(item, {part: [] for part in benchmark.PARTS})
    sets, order, right = measurement.sets, [], jobs.eager(item)
    assert not torch.equal(sets[0].args[0], sets[1].args[0])

    def forward(*args):
        order.append(next(i for i, other in enumerate(sets) if other.args[0] is args[0]))
        return right(*args)

    plant(monkeypatch, lambda case: forward)
    call = measurement._checked("eager")
    assert order == ([0, 0, 1, 2] if job == "backward" else [0])  # the check; then the graphs are made
    order.clear()
    results = [call(1), call(1)]
    assert order == ([] if job == "backward" else [1, 1])
    if job == "backward":
        truth = proofs.truth(item, sets[1])
        for gradient, name in zip(results[1], proofs.GRADIENTS[:4], strict=True):
            torch.testing.assert_close(gradient.double(), truth[name], rtol=1e-4, atol=1e-4)
