"""Tests of a run of the GPU benchmark, on a CPU: document, failures, interrupts, budget, resuming, and the script."""

import functools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from addnorm import Backend
from addnorm.bench import gpu
from addnorm.bench.gpu import cases, clock, running, variants
from addnorm.bench.gpu.cases import case_of
from addnorm.bench.harness import Case, by_case, partial_path, write
from support.loading import ROOT, load

CPU = torch.device("cpu")
UNCOMPILED = ["eager", "addnorm"]
PLAN = gpu.plan(ds=[16], rows=[4], dtypes=["float32"])  # every norm and job
SCRIPT = ROOT / "benchmarks" / "bench_gpu.py"


def run(plan=PLAN, **options):
    return gpu.run(plan, CPU, **{"rounds": 2, "requested": UNCOMPILED} | options)


def plant(monkeypatch, make, name="eager"):
    """Replace a variant by another implementation."""
    monkeypatch.setitem(variants.VARIANTS, name, variants.Variant(name, make))


def raise_error(case):
    raise RuntimeError("no kernel")


def interrupt_at(monkeypatch, case, error=KeyboardInterrupt):
    """Raise an error in place of the measurement of one case."""
    measure = running.measure

    def interrupted(at, *args, **options):
        if at == case:
            raise error
        return measure(at, *args, **options)

    monkeypatch.setattr(running, "measure", interrupted)


@pytest.fixture(scope="module")
def document():
    """Return the document of a run of every job and norm; tests must not change it."""
    return run()


def test_document_has_a_row_for_each_variant_and_case(document):
    assert (document["complete"], document["ended"]) == (True, "done")
    assert (document["device"]["type"], document["clock"]) == ("cpu", "host clock")
    rows = by_case(document["rows"], gpu.FIELDS)
    assert list(rows) == PLAN
    assert all(list(of_case) == [*UNCOMPILED, "copy"] for of_case in rows.values())
    for row in document["rows"]:
        assert row["device_us"] == row["host_us"] == row["call_us"] > 0
        assert (row["rounds"], row["sets"]) == (2, 3)
        assert row["share_of_copy"] > 0 < row["ready_s"]
    assert document["failures"] == document["left"] == []
    assert all(row["met"] is None for row in document["summary"] if row["norm"])
    assert document["missing"].keys() == {"liger", "flash_attn", "quack"}
    assert document["limits"]["quack"] == ["has no dropout", "adds no residual in its LayerNorm"]
    assert document["versions"].keys() >= {"torch", "triton", "cuda", "addnorm"}
    assert len(document["errors"]) == len(PLAN) * len(UNCOMPILED)
    for row in document["errors"]:
        assert all(row[name] <= limit for name, limit in row["limits"].items() if name in row)
    json.dumps(document, allow_nan=False)


FAILURES = {
    "wrong": (lambda case: lambda x, s, w, b: F.rms_norm(x - s, (case.d,), w, 1e-6), "wrong: y differs by "),
    "nan": (lambda case: lambda x, s, w, b: torch.full_like(s, torch.nan), "wrong: y differs by nan"),
    "raising": (raise_error, "RuntimeError: no kernel"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failing_variant_is_reported_and_not_timed(monkeypatch, kind):
    make, error = FAILURES[kind]
    plant(monkeypatch, make)
    document = run([case_of("rms", "forward", 4, 16, "float32")])
    assert [row["variant"] for row in document["rows"]] == ["addnorm", "copy"]
    assert document["rows"][0]["device_ratio_to_eager"] is None
    (failure,) = document["failures"]
    assert failure["variant"] == "eager"
    assert failure["error"].startswith(error)
    assert f"| eager | RMSNorm, forward, y alone, 4 x 16 float32 | {failure['error']} |" in gpu.report(document)
    json.dumps(document, allow_nan=False)


def test_failing_case_is_reported_and_the_next_measured(monkeypatch):
    interrupt_at(monkeypatch, PLAN[0], torch.OutOfMemoryError("too large"))
    document = run(PLAN[:2])
    assert document["complete"]
    assert [(row["variant"], row["error"]) for row in document["failures"]] == [
        (running.EVERY, "OutOfMemoryError: too large")
    ]
    assert list(by_case(document["rows"], gpu.FIELDS)) == PLAN[1:2]
    assert gpu.failed_cases(document["failures"]) == 1  # addnorm is one of the variants


def test_interrupted_run_is_saved_and_resumed(tmp_path, monkeypatch):
    path, plan, progress = tmp_path / "gpu.json", PLAN[:4], []
    with monkeypatch.context() as patch:
        interrupt_at(patch, plan[2])
        document = run(plan, save=lambda document: write(document, path))
    assert (document["complete"], document["ended"]) == (False, "interrupt")
    assert list(tmp_path.iterdir()) == [partial_path(path)]  # saved after each case
    earlier = gpu.resumable(path, CPU)
    assert [Case(**cell) for cell in earlier["cells"]] == plan[:2]
    resumed = run(plan, earlier=earlier, progress=progress.append)
    assert len(progress) == 2
    assert list(by_case(resumed["rows"], gpu.FIELDS)) == plan
    times = [row["device_us"] for row in earlier["rows"]]
    assert [row["device_us"] for row in resumed["rows"]][: len(times)] == times
    copies = earlier["copy"]["bytes_per_second"]
    assert resumed["copy"]["bytes_per_second"][: len(copies)] == copies
    assert write(resumed, path) == path
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"commit": "other"}, r"gpu\.json has commit other, this run has .*: measure again without"),
     ({"device": {"type": "cuda", "name": "Some GPU"}}, "has device Some GPU, this run has"),
     ({"versions": {"torch": "1.0"}}, "has versions ")],
)  # fmt: skip
def test_run_of_another_environment_is_not_resumed(tmp_path, document, change, message):
    assert gpu.resumable(tmp_path / "gpu.json", CPU) is None
    write(document | change, tmp_path / "gpu.json")
    with pytest.raises(ValueError, match=message):
        gpu.resumable(tmp_path / "gpu.json", CPU)


@pytest.mark.parametrize(("durations", "budget", "measured"), [
    ((1, 1, 1, 1), 1e-9, 1),  # the most important case is always measured
    ((0, 100, 0, 0), 50, 1),  # a variant that compiles for long: its case is left
    ((30, 1, 1, 1), 40, 4),  # the first case does not count as typical
    ((30, 1, 1, 1), 31.5, 2),  # the third may take as long as the second
])  # fmt: skip
def test_budget_ends_a_run_as_complete(monkeypatch, durations, budget, measured):
    now = [0.0]
    monkeypatch.setattr(running.time, "monotonic", lambda: now[0])

    def slow(case):
        now[0] += durations[PLAN.index(case)]
        return variants.eager(case)

    plant(monkeypatch, slow)
    document = run(PLAN[:4], budget=budget)
    assert (document["complete"], document["ended"]) == (True, "done" if measured == 4 else "budget")
    assert (
        [Case(**cell) for cell in document["cells"]] == list(by_case(document["rows"], gpu.FIELDS)) == PLAN[:measured]
    )
    assert [Case(**cell) for cell in document["left"]] == PLAN[measured:4]


@pytest.mark.parametrize("lost_by", ["variant", "case"])
def test_lost_device_ends_the_run_and_resume_skips_it(monkeypatch, lost_by):
    lost = []

    class LostDevice(clock.HostClock):
        def wait(self):
            if lost:
                raise RuntimeError("an illegal memory access was encountered")

    def access(*_, **__):
        lost.append(1)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(clock, "clock_of", lambda device: LostDevice())
    with monkeypatch.context() as patch:
        if lost_by == "variant":
            plant(patch, access)
        else:
            patch.setattr(running, "interleave", access)
        document = run(PLAN[:2])
    assert not document["complete"]
    assert document["ended"].startswith("the device was lost: RuntimeError: an illegal memory access")
    assert document["cells"] == []
    assert [row["variant"] for row in document["failures"]] == ["eager" if lost_by == "variant" else running.EVERY]
    lost.clear()  # a new process
    resumed = run(PLAN[:2], earlier=json.loads(json.dumps(document)))
    assert resumed["complete"]
    assert len(resumed["failures"]) == 1
    skipped = ["addnorm", "copy"] if lost_by == "variant" else []
    assert [row["variant"] for row in resumed["rows"]] == [*skipped, *UNCOMPILED, "copy"]


def run_backward_elsewhere(monkeypatch, thread):
    """Run backward in another thread, as on a GPU, where settings of this thread do not apply."""
    gradients = cases.gradients
    monkeypatch.setattr(cases, "gradients", lambda *args: thread.submit(gradients, *args).result())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the tools with which torch.compile builds
@pytest.mark.parametrize(
    ("backend", "requested"),
    [("aot_eager", ["compile", "compile_addnorm"]),
     pytest.param("inductor", ["compile", "compile_addnorm", "compile_reference"], marks=pytest.mark.slow)],
)  # fmt: skip
def test_compiled_variants_run_backward_on_retained_graphs(monkeypatch, tmp_path, backend, requested):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # and nothing from earlier runs
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    with ThreadPoolExecutor(1) as thread:
        run_backward_elsewhere(monkeypatch, thread)
        document = run([case_of("rms", "backward", 4, 16, "float32")], rounds=1, requested=requested)
    assert document["failures"] == []
    assert [row["variant"] for row in document["rows"]] == [*requested, "copy"]


# The script.


@pytest.fixture(scope="module")
def script():
    return load("benchmarks/bench_gpu.py")


@pytest.fixture
def call_script(script, monkeypatch, capsys):
    """Return a function that runs the script with arguments and returns its exit code and output on both streams."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
        try:
            code = script.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


TRIAL = ["--device", "cpu", "--d", "8", "--rows", "2", "--job", "forward", "--variants", *UNCOMPILED, "--rounds", "1"]


def test_script_lists_cases_and_needs_only_torch():
    """A machine with a GPU often has nothing else installed, and the list needs no GPU."""
    program = (
        "import sys; sys.modules |= dict.fromkeys(['rich', 'click']); sys.argv[0] = sys.argv[1]; del sys.argv[1]; "
        "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", program, str(SCRIPT), "--list"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [gpu.title(case) for case in gpu.plan()]


def test_script_measures_writes_prints_and_resumes(script, call_script, monkeypatch, tmp_path):
    path = tmp_path / "trial.json"
    monkeypatch.setattr(script, "TRIAL", path)  # for a part of the plan
    code, out, err = call_script(*TRIAL)
    assert code == 0, err
    assert "which is no GPU" in out
    assert out.endswith(f"Written: {path}\n")
    assert len(err.splitlines()) == len(json.loads(path.read_text())["cells"]) == 2
    code, _, err = call_script(*TRIAL, "--json", str(path), "--resume")
    assert (code, err) == (0, "")


def test_script_exits_with_3_for_failures_and_130_if_interrupted(call_script, monkeypatch, tmp_path):
    plant(monkeypatch, raise_error, "addnorm")
    words = [*TRIAL, "--json", str(tmp_path / "gpu.json")]
    assert call_script(*words)[0] == 3
    interrupt_at(monkeypatch, case_of("rms", "forward", 2, 8, "bfloat16"))
    code, out, err = call_script(*words)
    assert code == 130
    assert "Cut short (interrupt): the same command with --resume continues." in err
    assert out.endswith(f"Written: {tmp_path / 'gpu.partial.json'}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "there is no CUDA device: --device cpu tries everything but the clock"),
     (["--device", "cpu", "--json", str(ROOT / "benchmarks/results/gpu.json")], "is for times of a GPU, and this run is on cpu"),
     (["--device", "cpu", "--d", "5"], "no case of the plan has d 5"), (["--device", "cpu", "--rows", "0"], "0 is less than 1")],
    ids=["no-gpu", "results", "no-case", "rows"],
)  # fmt: skip
def test_script_refuses_wrong_arguments(call_script, monkeypatch, words, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = call_script(*words)
    assert code == 2
    assert message in err


def test_script_refuses_to_time_the_formulas_as_addnorm(script, call_script, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(script, "backends", lambda: [Backend("triton", False, "Triton 3.0 is too old")])
    code, _, err = call_script("--json", str(tmp_path / "gpu.json"))
    assert (code, err) == (2, "bench_gpu.py: addnorm has no kernels: Triton 3.0 is too old\n")
