"""The jobs of the benchmark and its stopwatch: all variants compute the same, and are timed as is said."""

import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from addnorm import bench
from addnorm.bench import expressions, jobs, onnx_peer, timing

SMALL = bench.matrix(shapes=((5, 16),))


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(timing, "SEGMENT_MS", 0.01)


@pytest.mark.parametrize("cell", SMALL, ids=lambda cell: "-".join(map(str, cell)))
def test_variants_compute_the_same(cell, monkeypatch):
    # The masks are not the same: without dropping, all the rest is.
    monkeypatch.setattr(expressions, "DROPOUT", 0.0)
    results = {}
    for name in timing.variants(cell, compiled=False)[0]:
        calls, args = timing.variants(cell, compiled=False)  # anew: what is in place changes them
        results[name] = calls[name](*args)
    eager = results.pop("eager")
    del results["add"]
    assert set(results) == {"addnorm"} | ({"onnxruntime"} if onnx_peer.applies(cell) else set())
    for found in results.values():
        pairs = zip(eager, found, strict=True) if isinstance(eager, tuple) else [(eager, found)]
        for theirs, ours in pairs:
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=5e-2 if cell.dtype == "bfloat16" else 1e-5)
    counts = {"forward_backward": 4, "dropout": 4, "everything": 6}
    if cell.job in counts:
        assert len(eager) == counts[cell.job] - (cell.norm == "rms")


@pytest.mark.parametrize("job", ["dropout", "everything"])
@pytest.mark.parametrize("norm", bench.NORMS)
def test_a_tenth_of_the_branch_is_dropped(norm, job):
    calls, args = timing.variants(bench.Cell(norm, job, 256, 64, "float32", 1), compiled=False)
    for name in ("eager", "addnorm"):
        dbranch = calls[name](*args)[1]
        assert (dbranch == 0).double().mean().item() == pytest.approx(jobs.DROPOUT, abs=0.02), name


@pytest.mark.parametrize("dtype", bench.DTYPES)
@pytest.mark.parametrize("norm", bench.NORMS)
def test_in_place_the_values_stay_as_they_were(norm, dtype):
    calls, args = timing.variants(bench.Cell(norm, "in_place", 2, 64, dtype, 1), compiled=False)
    x, s = args[:2]
    before = x.clone()
    smallest = torch.finfo(s.dtype).tiny
    for turn in range(20_000):
        y, z = calls["addnorm"](*args)
        if turn in (0, 19_999):
            assert (y.data_ptr(), z.data_ptr()) == (s.data_ptr(), x.data_ptr())
            assert not ((s.abs() < smallest) & (s != 0)).any()
    assert torch.isfinite(x).all()
    assert torch.isfinite(s).all()
    assert (x - before).abs().max() < 6  # the first branch, and then next to nothing
    assert 0.5 < x.std() < 3


def test_reuse_returns_the_memory_that_was_given():
    for norm in bench.NORMS:
        calls, args = timing.variants(bench.Cell(norm, "reuse", 3, 8, "float32", 1), compiled=False)
        args[4].fill_(math.nan)
        y = calls["addnorm"](*args)
        assert y.data_ptr() == args[4].data_ptr()
        torch.testing.assert_close(y, calls["eager"](*args))


def test_order_is_rotated_each_round(monkeypatch):
    called = []
    names = ("eager", "addnorm", "add")
    calls = {name: lambda *_, name=name: called.append(name) for name in names}
    monkeypatch.setattr(timing, "variants", lambda cell, compiled: (calls, []))
    monkeypatch.setattr(timing, "_calibrated", lambda call, args: (1, 1e-3))
    timing.measure(SMALL[0], rounds=4)
    timed = called[::2]  # each is called once untimed, once timed
    assert timed == called[1::2]
    assert [timed[k : k + 3] for k in range(0, 12, 3)] == [
        ["eager", "addnorm", "add"],
        ["addnorm", "add", "eager"],
        ["add", "eager", "addnorm"],
        ["eager", "addnorm", "add"],
    ]


@pytest.mark.parametrize(
    ("seconds", "rounds", "done"), [(0.01, 21, 21), (0.1, 21, 13), (0.3, 21, 5), (9.0, 21, 5), (9.0, 3, 3)]
)
def test_rounds_are_fewer_where_a_round_takes_long(monkeypatch, seconds, rounds, done):
    calls = dict.fromkeys(("eager", "addnorm", "add"), lambda *_: None)
    monkeypatch.setattr(timing, "variants", lambda cell, compiled: (calls, []))
    monkeypatch.setattr(timing, "_calibrated", lambda call, args: (1, seconds))
    found, _ = timing.measure(SMALL[0], rounds=rounds)
    assert [row["rounds"] for row in found] == [done] * 3


def test_a_call_that_takes_long_is_calibrated_by_two_calls(monkeypatch):
    count = 0

    def call():
        nonlocal count
        count += 1

    monkeypatch.setattr(timing, "_seconds", lambda call, args, repeats: call() or 0.5)
    assert timing._calibrated(call, []) == (1, 1.0)
    assert count == 2


def test_eager_is_what_a_user_writes():
    x, s, w, b, g, c = expressions.inputs("everything", 6, 16, torch.float32)[0]
    torch.manual_seed(3)
    y, z = expressions.expressions("layer", "everything", 16)["eager"](x, s, w, b, g, c)
    torch.manual_seed(3)
    assert torch.equal(z, x + g * F.dropout(s + c, 0.1))
    assert torch.equal(y, F.layer_norm(z, (16,), w, b, 1e-5))


def test_onnxruntime_that_is_absent_is_named_and_left_out(monkeypatch):
    monkeypatch.setattr(onnx_peer, "find_spec", lambda name: None)
    assert onnx_peer.status() == "onnxruntime and onnx not installed"
    monkeypatch.setattr(onnx_peer, "find_spec", lambda name: None if name == "onnx" else name)
    assert onnx_peer.status() == "onnx not installed"
    assert not any(onnx_peer.applies(cell) for cell in SMALL)


def test_onnxruntime_that_fails_is_recorded(monkeypatch):
    def broken(cell, args):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(onnx_peer, "applies", lambda cell: True)
    monkeypatch.setattr(onnx_peer, "bound", broken)
    found, failures = timing.measure(SMALL[0], rounds=1)
    assert {row["variant"] for row in found} == {"eager", "addnorm", "add"}
    assert [(one["variant"], one["error"]) for one in failures] == [("onnxruntime", "RuntimeError: no such operator")]


def test_onnxruntime_is_measured_in_float32_without_gradients(monkeypatch):
    monkeypatch.setattr(onnx_peer, "status", lambda: "1.30")
    applies = {(cell.job, cell.dtype) for cell in SMALL if onnx_peer.applies(cell)}
    assert applies == {(job, "float32") for job in ("forward", "forward_stream", "reuse")}
    monkeypatch.setitem(sys.modules, "onnxruntime", types.ModuleType("onnxruntime"))
    with pytest.raises(AttributeError):
        onnx_peer.bound(SMALL[0], [])
