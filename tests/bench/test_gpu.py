"""Tests of the GPU benchmark's run on a CPU: jobs and variants, interruption, budget, resuming, failures."""

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from addnorm.bench import gpu
from addnorm.bench.gpu import cases, clock, device, running, variants
from addnorm.bench.gpu.cases import case_of
from addnorm.bench.harness import Case, by_case, partial_path, write
from support.gpu_runs import UNCOMPILED, interrupting, shrink

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
TINY = gpu.plan(ds=[16], rows=[4], dtypes=["float32"])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    shrink(monkeypatch)


def measured(cells=TINY, **options):
    return gpu.run(cells, CPU, **{"rounds": 2, "requested": UNCOMPILED} | options)


@pytest.fixture(scope="module")
def document():
    """Return the document of a run of every job and norm; tests must not change it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        shrink(monkeypatch)
        return measured()


def test_document_has_a_row_for_each_variant_and_case(document):
    assert document["complete"]
    assert document["ended"] == "done"
    assert (document["device"]["type"], document["clock"]) == ("cpu", "host clock")
    found = by_case(document["rows"], gpu.FIELDS)
    assert list(found) == TINY
    assert all(list(rows) == [*UNCOMPILED, "copy"] for rows in found.values())
    for row in document["rows"]:
        assert row["device_us"] == row["host_us"] == row["call_us"] > 0
        assert row["rounds"] == 2
        assert row["sets"] == 3
        assert row["share_of_copy"] > 0
        assert row["ready_s"] > 0
    assert len(document["copy"]["bytes_per_second"]) == 1 + len(TINY)
    assert document["failures"] == []
    assert document["left"] == []
    assert all(one["met"] is None for one in document["summary"] if one["norm"])
    assert set(document["missing"]) == {"liger", "flash_attn", "quack"}
    assert document["limits"]["quack"] == ["has no dropout", "adds no residual in its LayerNorm"]
    assert {"torch", "triton", "cuda", "addnorm"} <= set(document["versions"])
    json.dumps(document)


def test_errors_are_within_their_limits(document):
    assert len(document["errors"]) == len(TINY) * len(UNCOMPILED)
    names = {"y", "z", "dresidual", "dbranch", "dweight", "dbias"}
    for one in document["errors"]:
        assert all(one[name] <= one["limits"][name] for name in names & set(one))
    backward = [one for one in document["errors"] if (one["norm"], one["job"]) == ("layer", "backward")]
    assert all(names <= set(one) for one in backward)


def test_wrong_variant_is_a_failure_without_times(monkeypatch):
    def wrong(cell):
        return lambda x, s, w, b: F.rms_norm(x - s, (cell.d,), w, 1e-6)

    planted = variants.Variant("wrong", wrong)
    monkeypatch.setattr(variants, "VARIANTS", variants.VARIANTS | {"wrong": planted})
    found = measured([case_of("rms", "forward", 4, 16, "float32")], requested=[*UNCOMPILED, "wrong"])
    assert [row["variant"] for row in found["rows"]] == [*UNCOMPILED, "copy"]
    (failure,) = found["failures"]
    assert failure["variant"] == "wrong"
    assert failure["error"].startswith("wrong: y differs by")
    assert [one["variant"] for one in found["errors"]] == [*UNCOMPILED, "wrong"]
    assert "| wrong | RMSNorm, forward, y alone, 4 x 16 float32 | wrong: y differs by" in gpu.report(found)


def test_nan_is_a_failure_and_the_document_is_json(monkeypatch):
    nothing = variants.Variant("nothing", lambda cell: lambda x, s, w, b: torch.full_like(s, torch.nan))
    monkeypatch.setitem(variants.VARIANTS, "eager", nothing)
    found = measured([case_of("rms", "forward", 4, 16, "float32")])
    assert "y differs by nan" in found["failures"][0]["error"]
    assert found["errors"][0]["y"] is None
    json.dumps(found, allow_nan=False)


def test_raising_variant_is_a_failure(monkeypatch):
    def broken(cell):
        raise ImportError("no such library")

    monkeypatch.setitem(variants.VARIANTS, "eager", variants.Variant("eager", broken))
    found = measured(TINY[:1])
    assert [row["variant"] for row in found["rows"]] == ["addnorm", "copy"]
    assert found["rows"][0]["device_ratio_to_eager"] is None
    assert found["failures"][0]["error"] == "ImportError: no such library"


def test_failing_case_is_recorded_and_the_next_is_measured(monkeypatch):
    real = cases.inputs

    def full(cell, *args):
        if cell == TINY[0]:
            raise torch.OutOfMemoryError("too large")
        return real(cell, *args)

    monkeypatch.setattr(cases, "inputs", full)
    found = measured(TINY[:2])
    assert found["complete"]
    assert [(one["variant"], one["error"]) for one in found["failures"]] == [
        (running.EVERY, "OutOfMemoryError: too large")
    ]
    assert list(by_case(found["rows"], gpu.FIELDS)) == TINY[1:2]
    assert gpu.failed_cases(found["failures"]) == 1  # addnorm is one of the variants


@pytest.mark.parametrize("name", [*UNCOMPILED, "copy"])
def test_variant_that_fails_while_timed_is_left_out(name, monkeypatch):
    real = clock.repeats_for
    made = []

    class Full:
        def sample(self, repeats):
            raise torch.OutOfMemoryError("grown too large")

    def timer(self, call, sets):
        made.append(call)
        return (
            Full() if ["the run's copy", *UNCOMPILED, "copy"][len(made) - 1] == name else clock._HostTimer(call, sets)
        )

    monkeypatch.setattr(clock, "repeats_for", lambda timer: 4 if isinstance(timer, Full) else real(timer))
    monkeypatch.setattr(device, "COPIES", {"memcpy": device.COPIES["memcpy"]})
    monkeypatch.setattr(clock.HostClock, "timer", timer)
    found = measured(TINY[:1])
    assert [row["variant"] for row in found["rows"]] == [one for one in (*UNCOMPILED, "copy") if one != name]
    assert all(row["rounds"] == 2 for row in found["rows"])
    assert [(one["variant"], one["error"]) for one in found["failures"]] == [
        (name, "OutOfMemoryError: grown too large")
    ]
    assert all((row["share_of_cell_copy"] is None) == (name == "copy") for row in found["rows"])
    assert gpu.report(found)


def test_failure_frees_its_memory_before_the_next_variant(monkeypatch):
    told = []

    def broken(cell):
        told.append("broken")
        raise RuntimeError("no kernel")

    def ours(cell):
        told.append("ours")
        return variants.ours(cell)

    monkeypatch.setitem(variants.VARIANTS, "eager", variants.Variant("eager", broken))
    monkeypatch.setitem(variants.VARIANTS, "addnorm", variants.Variant("addnorm", ours))
    monkeypatch.setattr(running, "free", lambda device: told.append("free"))
    measured(TINY[:1])
    assert told == ["broken", "free", "ours"]


def test_interrupted_run_is_resumed(tmp_path, monkeypatch):
    path = tmp_path / "gpu.json"
    tiny = TINY[:4]
    real = interrupting(monkeypatch, tiny[2])
    found = measured(tiny, save=lambda document: write(document, path))
    assert not found["complete"]
    assert found["ended"] == "interrupt"
    assert write(found, path) == partial_path(path)
    assert not path.exists()
    monkeypatch.setattr(running, "measure", real)
    earlier = gpu.resumable(path, CPU)
    assert [Case(**one) for one in earlier["cells"]] == tiny[:2]
    lines = []
    whole = measured(tiny, earlier=earlier, progress=lines.append)
    assert len(lines) == len(tiny) - 2
    assert list(by_case(whole["rows"], gpu.FIELDS)) == tiny
    before = {(*row.values(),)[:6]: row["device_us"] for row in earlier["rows"]}
    again = {(*row.values(),)[:6]: row["device_us"] for row in whole["rows"]}
    assert before.items() <= again.items()
    assert (
        whole["copy"]["bytes_per_second"][: len(earlier["copy"]["bytes_per_second"])]
        == earlier["copy"]["bytes_per_second"]
    )
    assert write(whole, path) == path
    assert list(tmp_path.iterdir()) == [path]


def test_document_is_saved_after_every_case():
    saved = []
    measured(TINY[:3], save=lambda document: saved.append((len(document["cells"]), document["complete"])))
    assert saved == [(1, False), (2, False), (3, False)]


def test_budget_ends_a_run_as_complete(tmp_path):
    tiny = TINY[:3]
    found = measured(tiny, budget=1e-9)
    assert (found["complete"], found["ended"]) == (True, "budget")
    assert len(found["cells"]) == 1  # the most important case is always measured
    assert [Case(**one) for one in found["left"]] == tiny[1:]
    path = write(found, tmp_path / "gpu.json")
    assert len(measured(tiny, earlier=gpu.resumable(path, CPU))["cells"]) == len(tiny)


def test_case_that_exceeds_the_budget_is_left(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(running.time, "monotonic", lambda: now[0])

    def slow(cell):
        now[0] += 100.0 * (cell == TINY[1])  # simulates a compilation
        return variants.eager(cell)

    monkeypatch.setitem(variants.VARIANTS, "eager", variants.Variant("eager", slow))
    found = measured(TINY[:3], budget=50.0)
    assert (found["complete"], found["ended"]) == (True, "budget")
    assert [Case(**one) for one in found["cells"]] == list(by_case(found["rows"], gpu.FIELDS)) == TINY[:1]
    assert [Case(**one) for one in found["left"]] == TINY[1:3]


def test_first_case_does_not_shorten_the_run(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(running.time, "monotonic", lambda: now[0])

    def slow(cell):
        now[0] += 30.0 if cell == TINY[0] else 1.0
        return variants.eager(cell)

    monkeypatch.setitem(variants.VARIANTS, "eager", variants.Variant("eager", slow))
    assert len(measured(TINY[:4], budget=40.0)["cells"]) == 4
    assert len(measured(TINY[:4], budget=31.5)["cells"]) == 2  # the third may take as long as the second


def test_another_version_commit_or_device_is_not_resumed(tmp_path, document):
    path = tmp_path / "gpu.json"
    write(document | {"commit": "other"}, path)
    with pytest.raises(ValueError, match=r"gpu\.json has commit other, this run has .*: measure again without"):
        gpu.resumable(path, CPU)
    write(document | {"device": {"type": "cuda", "name": "Some GPU"}}, path)
    with pytest.raises(ValueError, match=r"has device Some GPU, this run has"):
        gpu.resumable(path, CPU)
    write(document | {"versions": document["versions"] | {"torch": "1.0"}}, path)
    with pytest.raises(ValueError, match="has versions "):
        gpu.resumable(path, CPU)
    assert gpu.resumable(tmp_path / "nothing.json", CPU) is None


class Lost(clock.HostClock):
    """Device that is lost as soon as a variant raises."""

    gone = False

    def wait(self):
        if Lost.gone:
            raise RuntimeError("an illegal memory access was encountered")


def test_lost_device_ends_the_run_and_resume_skips_the_variant(monkeypatch):
    def fatal(cell):
        Lost.gone = True
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Lost, "gone", False)
    monkeypatch.setattr(clock, "clock_of", lambda device: Lost())
    with monkeypatch.context() as patch:
        patch.setitem(variants.VARIANTS, "eager", variants.Variant("eager", fatal))
        found = measured(TINY[:2])
    assert not found["complete"]
    assert found["ended"].startswith("the device was lost: RuntimeError: an illegal memory access")
    assert found["cells"] == []
    assert [one["variant"] for one in found["failures"]] == ["eager"]
    Lost.gone = False  # simulates a new process
    again = measured(TINY[:2], earlier=json.loads(json.dumps(found)))
    assert again["complete"]
    assert [row["variant"] for row in again["rows"]] == ["addnorm", "copy", *UNCOMPILED, "copy"]
    assert len(again["failures"]) == 1


def test_case_that_lost_the_device_is_not_repeated(monkeypatch):
    def fatal(*_, **__):
        Lost.gone = True
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Lost, "gone", False)
    monkeypatch.setattr(clock, "clock_of", lambda device: Lost())
    with monkeypatch.context() as patch:
        patch.setattr(running, "interleave", fatal)
        found = measured(TINY[:2])
    assert [one["variant"] for one in found["failures"]] == [running.EVERY]
    Lost.gone = False
    again = measured(TINY[:2], earlier=found)
    assert again["complete"]
    assert list(by_case(again["rows"], gpu.FIELDS)) == TINY[1:2]


def test_commit_of_a_copy_is_the_given_one(monkeypatch):
    monkeypatch.setattr(running.environment, "commit", lambda: {"commit": None, "dirty": None})
    assert running.identity(CPU, "abc")["commit"] == "abc"
    monkeypatch.setattr(running.environment, "commit", lambda: {"commit": "here", "dirty": False})
    assert running.identity(CPU, "abc")["commit"] == "here"


BACKWARD = case_of("rms", "backward", 4, 16, "float32")


@pytest.fixture
def elsewhere(monkeypatch):
    """Run backward in another thread, as on a GPU, where thread-local settings of this thread do not apply."""
    real = cases.gradients
    with ThreadPoolExecutor(1) as thread:
        monkeypatch.setattr(cases, "gradients", lambda *given: thread.submit(real, *given).result())
        yield


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the tools with which torch.compile builds
def test_compiled_variants_run_backward_on_a_retained_graph(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    found = measured([BACKWARD], rounds=1, requested=["compile", "compile_addnorm"])
    assert found["failures"] == []
    assert [row["variant"] for row in found["rows"]] == ["compile", "compile_addnorm", "copy"]


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the tools with which torch.compile builds
def test_inductor_runs_backward_on_a_retained_graph(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # and nothing from earlier runs
    compiled = ["compile", "compile_addnorm", "compile_reference"]
    for job in ("forward_backward", "backward"):
        found = measured([BACKWARD.but(job=job)], rounds=1, requested=compiled)
        assert found["failures"] == []
        assert [row["variant"] for row in found["rows"]] == [*compiled, "copy"]


@pytest.mark.parametrize("job", gpu.JOBS)
def test_donated_buffers_are_allowed_for_graphs_run_once(job):
    with running.retained_graphs(TINY[0].but(job=job)):
        assert torch._functorch.config.donated_buffer == (job != "backward")


def test_compiler_is_reset_only_for_compiled_variants(monkeypatch):
    def woken():
        raise AssertionError("the compiler begins anew")

    monkeypatch.setattr(torch.compiler, "reset", woken)
    assert measured(TINY[:1])["failures"] == []
    assert (
        measured(TINY[:1], requested=["compile"])["failures"][0]["error"] == "AssertionError: the compiler begins anew"
    )
