"""Tests of the GPU benchmark's variants: signatures of peers, missing peers, the check, the timed calls."""

import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from addnorm.bench.gpu import cases, check, variants
from addnorm.bench.gpu.cases import DTYPES, JOBS, case_of, moved_bytes

CPU = torch.device("cpu")
PLAIN = ("forward", "forward_stream", "backward", "forward_backward")


def cell(norm="rms", job="forward_stream", dtype="bfloat16", rows=16, d=64):
    return case_of(norm, job, rows, d, dtype)


def checked(one, forward):
    return check.errors(one, forward, cases.inputs(one, CPU, 1)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("name", ["eager", "addnorm"])
def test_right_variant_passes_the_check(name, norm, job, dtype):
    one = cell(norm, job, dtype)
    found, problem = checked(one, variants.VARIANTS[name].make(one))
    assert problem is None
    gradients = {"dresidual", "dbranch", "dweight"} | ({"dbias"} if norm == "layer" else set())
    outputs = {"y", "z"} if JOBS[job].stream else {"y"}
    assert set(found) == outputs | (gradients if JOBS[job].backward else set())


@pytest.mark.parametrize("job", PLAIN)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_formula_passes_the_check(norm, job):
    one = cell(norm, job, "mixed")
    assert checked(one, variants.formula(one))[1] is None


class Spoiled(torch.autograd.Function):
    """Identity whose gradient is 10 % off."""

    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, dt):
        return dt * 1.1


WRONG = {
    "y": lambda f, x, s, w, b: (f(x, s, w, b)[0] * 1.1, f(x, s, w, b)[1]),
    "z": lambda f, x, s, w, b: (f(x, s, w, b)[0], f(x, s, w, b)[1] * 1.1),
    "dresidual": lambda f, x, s, w, b: f(Spoiled.apply(x), s, w, b),
    "dbranch": lambda f, x, s, w, b: f(x, Spoiled.apply(s), w, b),
    "dweight": lambda f, x, s, w, b: f(x, s, Spoiled.apply(w), b),
    "dbias": lambda f, x, s, w, b: f(x, s, w, Spoiled.apply(b)),
}  # fmt: skip


@pytest.mark.parametrize("job", ["backward", "dropout"])
@pytest.mark.parametrize("what", WRONG)
def test_check_names_the_wrong_tensor(what, job):
    one = cell("layer", job, "float32")
    right = variants.ours(one)
    _, problem = checked(one, lambda *args: WRONG[what](right, *args))
    # Under dropout, a z that is 10 % off implies another mask; the check detects it in the results that depend on the mask.
    assert problem is not None
    assert f"{what} differs by" in problem


def test_check_refuses_nan_dtype_and_shape():
    one = cell(job="forward", dtype="mixed")
    assert "y differs by nan" in checked(one, lambda x, s, w, b: torch.full_like(s, torch.nan))[1]
    wide = "y is torch.float32 (16, 64), expected torch.bfloat16 (16, 64)"
    assert checked(one, lambda x, s, w, b: F.rms_norm(x + s, (64,), w)) == ({}, wide)
    assert "y is torch.bfloat16 (8, 64)" in checked(one, lambda x, s, w, b: s[:8])[1]


def test_check_refuses_a_rounded_stream():
    one = cell(dtype="mixed")
    right = variants.eager(one)
    _, problem = checked(one, lambda x, s, w, b: right(x.to(s.dtype).float(), s, w, b))
    assert "z differs by" in problem


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_check_refuses_another_share_of_dropout(p):
    one = cell(job="dropout", dtype="float32")
    scale = (1 - p) / 0.9  # so that the kept elements have the right values, and only their number is wrong

    def other(x, s, w, b):
        z = x + scale * F.dropout(s, p)
        return F.rms_norm(z, (64,), w, 1e-6), z

    found, problem = checked(one, other)
    assert found["z"] < 1e-6
    told = re.fullmatch(r"dropout 0.1 kept (\d\.\d+) of the elements", problem)
    assert float(told[1]) == pytest.approx(1 - p, abs=0.06)


# Signatures of the real peers: liger-kernel 0.8.5, flash-attn's main branch, quack-kernels 0.6.5. The implementations here
# are plain PyTorch, so that a wrong keyword, order or default is detected without a GPU.


class LigerFusedAddRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
        assert not in_place
        z = R + X
        ctx.save_for_backward(z, W)
        ctx.eps = eps
        return F.rms_norm(z, (z.shape[-1],), W + offset, eps), z

    @staticmethod
    def backward(ctx, dY, dS_out):
        z, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = F.rms_norm(z, (z.shape[-1],), w, ctx.eps)
        dz, dw = torch.autograd.grad(y, (z, w), dY)
        return dz + dS_out, dz + dS_out, dw, None, None, None, None, None


class LigerLayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, W, B, eps):
        ctx.save_for_backward(X, W, B)
        ctx.eps = eps
        return F.layer_norm(X, (X.shape[-1],), W, B, eps)

    @staticmethod
    def backward(ctx, dY):
        given = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            y = F.layer_norm(given[0], (dY.shape[-1],), *given[1:], ctx.eps)
        return *torch.autograd.grad(y, given, dY), None


def layer_norm_fn(
    x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0, rowscale=None, prenorm=False,
    residual_in_fp32=False, zero_centered_weight=False, is_rms_norm=False, return_dropout_mask=False, out_dtype=None, out=None,
    residual_out=None,
):  # fmt: skip
    z = residual + F.dropout(x, dropout_p)
    parts = (weight.float(), None if bias is None else bias.float())
    shape = (x.shape[-1],)
    y = F.rms_norm(z.float(), shape, parts[0], eps) if is_rms_norm else F.layer_norm(z.float(), shape, *parts, eps)
    y = y.to(x.dtype)
    return (y, z) if prenorm else y


def rms_norm_fn(
    x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0, rowscale=None, prenorm=False,
    residual_in_fp32=False, zero_centered_weight=False, return_dropout_mask=False, out_dtype=None, out=None, residual_out=None,
):  # fmt: skip
    options = {"eps": eps, "dropout_p": dropout_p, "prenorm": prenorm}
    return layer_norm_fn(x, weight, bias, residual, is_rms_norm=True, **options)


def rmsnorm(
    x,
    weight=None,
    bias=None,
    residual=None,
    out_dtype=None,
    dresidual_dtype=None,
    eps=1e-6,
    prenorm=False,
    weight_offset=0.0,
):
    return layer_norm_fn(x, weight, bias, residual, eps=eps, prenorm=prenorm, is_rms_norm=True)


FAKES = {
    "liger_kernel.ops.fused_add_rms_norm": [LigerFusedAddRMSNormFunction],
    "liger_kernel.ops.layer_norm": [LigerLayerNormFunction],
    "flash_attn.ops.triton.layer_norm": [layer_norm_fn, rms_norm_fn],
    "quack": [rmsnorm],
}


@pytest.fixture
def installed(monkeypatch):
    """Install fake modules with the peers' names."""
    for name, members in FAKES.items():
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            path = ".".join(parts[:k])
            if path not in sys.modules:
                module = ModuleType(path)
                module.__spec__ = ModuleSpec(path, None)
                monkeypatch.setitem(sys.modules, path, module)
        for member in members:
            setattr(sys.modules[name], member.__name__, member)
    real = variants.find_spec
    names = {name.split(".")[0] for name in FAKES}
    monkeypatch.setattr(variants, "find_spec", lambda name: object() if name in names else real(name))


PEERS = ("liger", "flash_attn", "quack")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("peer", PEERS)
def test_peer_is_called_by_its_signature(peer, norm, job, dtype, installed):
    one = cell(norm, job, dtype)
    why = variants.unfit(peer, one)
    if why is None:
        assert checked(one, variants.VARIANTS[peer].make(one))[1] is None
    else:
        assert why in [limit.why for limit in variants.VARIANTS[peer].limits]


def test_unfit_peers_have_a_reason():
    assert variants.unfit("liger", cell(job="dropout")) == "has no dropout"
    assert variants.unfit("liger", cell(dtype="mixed")) == "keeps the stream in the branch's dtype"
    assert variants.unfit("quack", cell(norm="layer")) == "adds no residual in its LayerNorm"
    fits = {
        (job, dtype): [d for d in (8192, 16384, 32768, 65536) if variants.unfit("flash_attn", cell("rms", job, dtype, 1, d)) is None]
        for job in ("forward", "backward") for dtype in ("bfloat16", "mixed", "float32")
    }  # fmt: skip
    assert [found[-1] for found in fits.values()] == [32768, 32768, 16384, 32768, 16384, 16384]


def test_missing_peers_have_a_reason(monkeypatch):
    monkeypatch.setattr(variants, "find_spec", lambda name: None)
    assert variants.missing("cuda") == {
        "liger": "Liger is not installed: pip install liger-kernel",
        "flash_attn": "flash-attn's Triton layer norm is not installed: pip install flash-attn",
        "quack": "QuACK is not installed: pip install quack-kernels",
    }
    assert variants.versions() == {}


def test_installed_peers_are_missing_on_a_cpu(installed):
    assert variants.missing("cuda") == {}
    assert variants.missing("cpu")["quack"] == "QuACK runs on CUDA alone, and this is a run on cpu"
    assert set(variants.versions()) == set(PEERS)


def test_chosen_variants_are_planned_or_requested(installed):
    large = cell("rms", "forward_stream", rows=8192, d=4096)
    every = [name for name in variants.VARIANTS if name != "compile_reference"]  # only on request
    assert variants.chosen(large, "cuda") == every
    assert variants.chosen(large, "cpu") == ["eager", "compile", "compile_addnorm", "addnorm"]
    other = cell("layer", "backward", "float32", 4096, 4096)
    assert variants.chosen(other, "cuda") == ["eager", "compile", "liger", "flash_attn", "addnorm"]
    asked = ["addnorm", "compile_reference", "quack"]
    assert variants.chosen(other, "cuda", asked) == ["compile_reference", "addnorm"]


# What is timed.


def test_set_count_keeps_the_cache_cold():
    one = cell(rows=1024, d=1024)  # 2 MiB a tensor, 4 MiB of inputs
    cache = 60 * 2**20
    sets = cases.set_count(one, cache)
    assert sets == 45
    assert cases.is_cold(one, cache, sets)
    assert cases.set_count(cell(rows=2**16, d=2**12), cache) == 2
    small = cell(rows=1, d=768)
    assert cases.set_count(small, cache) == cases.MOST_SETS
    assert not cases.is_cold(small, cache, cases.MOST_SETS)


@pytest.mark.parametrize("job", JOBS)
def test_inputs_are_reproducible_and_differ_by_set(job):
    one = cell("layer", job, "mixed")
    first, second = cases.inputs(one, CPU, 2)
    again = cases.inputs(one, CPU, 2)[0]
    for k in range(4):
        assert torch.equal(first.args[k], again.args[k])
    assert not torch.equal(first.args[0], second.args[0])
    assert first.args[2] is second.args[2]
    assert [t.dtype for t in first.args] == [torch.float32, torch.bfloat16, torch.float32, torch.float32]
    assert all(t.requires_grad == JOBS[job].backward for t in first.args)
    if JOBS[job].backward:
        assert [t.dtype for t in first.cotangents] == [torch.bfloat16, torch.float32]
        assert all(t.any() for t in first.cotangents)
    if job == "dropout":
        assert first.args[1].abs().min() >= 0.5


@pytest.mark.parametrize("job", JOBS)
def test_timed_call_runs_the_job_on_its_set(job):
    one = cell("layer", job, "float32")
    given = cases.inputs(one, CPU, 2)
    seen = []

    def forward(*args):
        seen.append(next(i for i, other in enumerate(given) if other.args[0] is args[0]))
        return variants.eager(one)(*args)

    call = cases.timed(one, forward, given)
    assert seen == ([0, 1] if job == "backward" else [])  # the graphs were captured before, and no other
    found = [call(1), call(1)]
    assert seen[len(given) if job == "backward" else 0 :] == ([] if job == "backward" else [1, 1])
    if JOBS[job].backward:
        assert [t.shape for t in found[0]] == [t.shape for t in given[1].wanted]
    if job == "backward":
        want = check.truth(one, given[1])
        for got, name in zip(found[1], check.GRADIENTS, strict=True):
            torch.testing.assert_close(got.double(), want[name], rtol=1e-4, atol=1e-4)


def test_copy_moves_the_bytes_of_the_case():
    one = cell(job="forward_stream", rows=3, d=8)
    call = cases.copier(one, CPU, 2)
    target = call(1)
    assert 2 * target.nbytes == moved_bytes(one)
    assert target.any()
    assert call(1) is target
    assert call(0) is not target


def test_variants_have_titles_and_reasons():
    for name, one in variants.VARIANTS.items():
        assert one.title, name
        assert all(limit.why for limit in one.limits)
        assert (one.package is None) == (one.module is None)
        assert one.compiles == name.startswith("compile")
    assert variants.COPY not in variants.VARIANTS
    assert all(variants.unfit(name, one) is None for one in cases.plan() for name in ("eager", "compile", "addnorm"))
