"""Tests of the parts of the benchmark on a GPU: cases, variants, the check of their results, and the clock, simulated."""

import itertools
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from addnorm.bench import exactness, gpu, jobs, peers
from addnorm.bench.case import Case
from addnorm.bench.jobs import JOBS, tensor_bytes
from support.pairwise import product
from support.wrong_gradient import spoil

PEERS = ("liger", "flash_attn", "quack")


def case(norm="rms", job="forward_stream", dtype="bfloat16", rows=16, d=64, device="cpu"):
    return Case(norm=norm, job=job, rows=rows, d=d, dtype=dtype, device=device)


def check_call(item, forward):
    return exactness.check(item, forward, jobs.inputs(item))


def test_plan_begins_with_a_case_of_every_kind():
    cases = gpu.plan({})
    assert len(cases) == len({*cases})
    large = {(item.norm, item.job, item.d) for item in cases[:30] if tensor_bytes(item) >= gpu.LARGE}  # a short run
    assert large >= {*itertools.product(("layer", "rms"), ("forward_stream", "backward"), gpu.TARGET_D)}
    assert {item.job for item in cases[:60]} == {*gpu.TIMED}  # ten minutes
    chosen = gpu.BENCHMARK.plan(selected={"d": [5], "rows": [2], "norm": ["rms"]})
    assert chosen == [case("rms", job, rows=2, d=5, device="cuda") for job in gpu.TIMED]


# Signatures of the real peers: liger-kernel 0.8.5, flash-attn's main branch, quack-kernels 0.6.5. The implementations here are
# plain PyTorch, so that a wrong keyword, order or default is detected without a GPU.


class LigerFusedAddRMSNormFunction:
    @staticmethod
    def apply(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
        assert (casting_mode, in_place) == ("llama", False)
        z = R + X
        return F.rms_norm(z, (z.shape[-1],), W + offset, eps), z


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
    "flash_attn.ops.triton.layer_norm": [layer_norm_fn, rms_norm_fn],
    "quack": [rmsnorm],
}


@pytest.fixture
def installed(monkeypatch):
    """Install fake modules with the peers' names."""
    for name, members in MODULES.items():
        for parent in itertools.accumulate(name.split("."), "{}.{}".format):
            monkeypatch.setitem(sys.modules, parent, SimpleNamespace())
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{one.__name__: one for one in members}))
    monkeypatch.setattr(peers, "find_spec", lambda name: name)


# Every variant computes the same.

MAKE = {name: peers.VARIANTS[name].make for name in ("eager", "addnorm", *PEERS)}
FITS = [
    (name, "rms", job, "bfloat16") for name in PEERS for job in ("forward", "backward")
]  # peers have limits elsewhere


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "norm", "job", "dtype"),
    product([*MAKE], ("layer", "rms"), [*gpu.TIMED], ["bfloat16", "mixed", "float16", "float32"], always=FITS),
)
def test_variant_computes_the_operation(name, norm, job, dtype):
    item = case(norm, job, dtype)
    if not peers.VARIANTS[name].fits(item):
        assert name not in ("eager", "addnorm")
        return
    gradients = {"dresidual", "dbranch", "dweight"} | ({"dbias"} if norm == "layer" else set())
    outputs = {"y", "z"} if JOBS[job].stream else {"y"}
    assert check_call(item, MAKE[name](item)).keys() == outputs | (gradients if JOBS[job].backward else set())


@pytest.mark.parametrize("name", ["y", "z", *exactness.GRADIENTS[:4]])
@pytest.mark.parametrize("job", ["backward", "dropout"])
def test_check_names_the_wrong_tensor(name, job):
    item = case("layer", job, "float32")
    # Under dropout, a z that is 10% off implies another mask; the check detects it in the results that depend on the mask.
    with pytest.raises(exactness.WrongError, match=f"{name} differs by"):
        check_call(item, spoil(jobs.ours(item), name, 1.1))


def test_check_refuses_nan_dtype_shape_and_rounded_stream():
    item, streamed = case(job="forward", dtype="mixed"), case(dtype="mixed")
    right = jobs.eager(streamed)
    for tried, call, words in (
        (item, lambda x, s, w, b: torch.full_like(s, torch.nan), "y differs by inf"),
        (item, lambda x, s, w, b: F.rms_norm(x + s, (64,), w), r"y is torch.float32 \(16, 64\), expected torch.bfloat16 \(16, 64\)"),
        (item, lambda x, s, w, b: s[:8], r"y is torch.bfloat16 \(8, 64\)"),
        (streamed, lambda x, s, w, b: right(x.to(s.dtype).float(), s, w, b), "z differs by"),
    ):  # fmt: skip
        with pytest.raises(exactness.WrongError, match=words):
            check_call(tried, call)


def test_check_counts_the_kept_elements():
    item = case("layer", "dropout", "float32")

    def keep_all(x, s, w, b):
        z = x + s / 0.9
        return F.layer_norm(z, (64,), w, b), z

    with pytest.raises(exactness.WrongError, match=r"dropout 0.1 kept 1.000 of the elements"):
        check_call(item, keep_all)


# Which variants are measured.


@pytest.mark.usefixtures("installed")
def test_variants_are_chosen_by_limit_and_request():
    for item, expected in (
        (case(job="dropout"), {"flash_attn"}), (case(dtype="mixed"), {"flash_attn", "quack"}), (case(), {*PEERS}),
        (case("layer"), {"flash_attn"}), (case("rms", "backward", "float32", 1, 32768), {"liger", "quack"}),
    ):  # fmt: skip
        assert {*peers.choose(item.but(device="cuda"))} == {"eager", "compile", "addnorm", *expected}
        assert {*peers.choose(item)} == {"eager", "compile", "addnorm"}  # the others run on CUDA alone
    requested = ["addnorm", "flash_attn", "quack"]
    assert peers.choose(case("layer").but(device="cuda"), requested) == ["flash_attn", "addnorm"]
    assert peers.list_versions() == dict.fromkeys(PEERS, "of unknown version")


def test_missing_peers_are_not_chosen(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert peers.choose(case().but(device="cuda")) == ["eager", "compile", "addnorm"]
    assert peers.list_versions() == dict.fromkeys(PEERS)


def test_requested_variant_that_cannot_run_is_named(monkeypatch):
    on_gpu = case("layer").but(device="cuda")
    monkeypatch.setattr(peers, "find_spec", lambda name: name if name == "quack" else None)
    assert peers.choose(on_gpu, ["eager", "quack"]) == ["eager"]  # installed; it adds no residual under LayerNorm
    with pytest.warns(UserWarning, match=r"^liger is not measured: liger-kernel is not installed\.$"):
        assert peers.choose(on_gpu, ["liger", "addnorm"]) == ["addnorm"]
    with pytest.warns(UserWarning, match=r"^quack is not measured: it needs a CUDA device\.$"):
        assert peers.choose(case(), ["quack", "addnorm"]) == ["addnorm"]


# What is timed, and the clocks.


@pytest.mark.parametrize(("job", "forwards"), [("forward", 1), ("backward", 0), ("dropout", 1)])
def test_timed_call_runs_the_job(monkeypatch, job, forwards):
    item = case("layer", job, "mixed" if job == "dropout" else "float32")
    tensors, calls, right = jobs.inputs(item), [], jobs.eager(item)

    def forward(*args):
        calls.append(args)
        return right(*args)

    monkeypatch.setitem(peers.VARIANTS, "eager", peers.Variant("eager", lambda case: forward))
    call = gpu.check_variant(item, "eager", tensors)
    assert len(calls) == (2 if job == "backward" else 1)  # the check; then the graph is made
    calls.clear()
    results = [call(), call()]
    assert len(calls) == 2 * forwards
    if job == "backward":
        truth = exactness.truth(item, tensors, {})
        for gradient, name in zip(results[1], exactness.GRADIENTS[:4], strict=True):
            torch.testing.assert_close(gradient.double(), truth[name], rtol=1e-4, atol=1e-4)


def test_clocks_are_tritons_and_the_wall_clock(monkeypatch):
    calls = []
    monkeypatch.setattr("triton.testing.do_bench", lambda call, *_, return_mode: call() or 3.0)
    on_device, wall = gpu.sample("cuda", lambda: calls.append(time.sleep(1e-4)))
    assert on_device == 3e3
    assert 100 <= wall < 3e3
    assert len(calls) > gpu.REPEATS
    on_device, wall = gpu.sample("cpu", lambda: time.sleep(1e-4))
    assert on_device == wall >= 100
    samples = iter([(1.0, 2.0), (3.0, 6.0), (2.0, 4.0)])
    monkeypatch.setattr(gpu, "sample", lambda device, call: next(samples))
    monkeypatch.setattr(gpu, "copy_rate", lambda device: 1.0)
    (row,) = gpu.measure(case(job="forward"), rounds=3, variants=["addnorm"])["rows"]
    assert (row["median_us"], row["q1_us"], row["call_us"]) == (2.0, 1.5, 4.0)


def test_copy_bandwidth_counts_reads_and_writes(monkeypatch):
    monkeypatch.setattr(gpu, "sample", lambda device, call: (1e4, 1e4))
    monkeypatch.setitem(gpu.COPY_BYTES, "cpu", 1000)
    assert gpu.copy_rate("cpu") == 2e5
