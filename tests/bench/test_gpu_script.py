"""Tests of benchmarks/bench_gpu.py: arguments, output, files, exit codes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from addnorm import Backend
from addnorm.bench import gpu
from addnorm.bench.gpu import variants
from addnorm.bench.gpu.cases import case_of
from support.gpu_runs import UNCOMPILED, interrupting, shrink

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "bench_gpu.py"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    shrink(monkeypatch)


@pytest.fixture(scope="module")
def script():
    """Return benchmarks/bench_gpu.py as a module."""
    spec = importlib.util.spec_from_file_location("bench_gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def called(script, monkeypatch, capsys):
    """Return a function that runs the script with arguments and returns its exit code and output on both streams."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
        try:
            code = script.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


def test_script_needs_only_torch():
    """A machine with a GPU often has nothing else installed."""
    without = (
        "import sys; sys.modules |= dict.fromkeys(['rich', 'click']); sys.argv[0] = sys.argv[1]; del sys.argv[1]; "
    )
    run = "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", without + run, str(SCRIPT), "--list"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, len(done.stdout.splitlines())) == (0, len(gpu.plan())), done.stderr


def test_the_script_measures_writes_and_prints(called, tmp_path):
    path = tmp_path / "trial.json"
    words = ["--device", "cpu", "--d", "16", "--rows", "2", "--job", "forward", "backward", "--variants", *UNCOMPILED]
    code, out, err = called(*words, "--rounds", "1", "--json", str(path))
    assert code == 0, err
    assert "which is no GPU" in out
    assert out.endswith(f"Written: {path}\n")
    assert len(err.splitlines()) == 4
    assert len(json.loads(path.read_text())["cells"]) == 4
    code, out, err = called(*words, "--json", str(path), "--resume")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "there is no CUDA device: --device cpu tries everything but the clock"),
        (
            ["--device", "cpu", "--json", str(ROOT / "benchmarks/results/gpu.json")],
            "is for times of a GPU, and this run is on cpu",
        ),
        (["--device", "cpu", "--d", "5"], "no case of the plan has d 5"),
        (["--device", "cpu", "--rows", "0"], "0 is less than 1"),
    ],
    ids=["no-gpu", "results", "no-cell", "rows"],
)
def test_script_refuses_wrong_arguments(called, words, sentence):
    if not words and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    code, _, err = called(*words)
    assert code == 2
    assert sentence in err


def test_script_refuses_to_time_the_formulas_as_addnorm(script, called, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(script, "backends", lambda: [Backend("triton", False, "Triton 3.0 is too old")])
    code, _, err = called("--json", str(tmp_path / "gpu.json"))
    assert (code, err) == (2, "bench_gpu.py: addnorm has no kernels: Triton 3.0 is too old\n")


def test_script_lists_the_cases(called):
    code, out, _ = called("--list")  # and without a GPU
    assert code == 0
    assert out.splitlines() == [*map(gpu.title, gpu.plan())]


def test_part_of_the_plan_goes_to_a_temporary_file(script, called, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "TRIAL", tmp_path / "aside.json")
    words = ["--device", "cpu", "--d", "8", "--rows", "2", "--job", "forward", "--norm", "rms", "--variants", "addnorm"]
    code, out, _ = called(*words)
    assert code == 0
    assert out.endswith(f"Written: {tmp_path / 'aside.json'}\n")


def test_script_exits_with_3_for_failures_and_130_if_interrupted(called, monkeypatch, tmp_path):
    def broken(cell):
        raise RuntimeError("no kernel")

    monkeypatch.setitem(variants.VARIANTS, "addnorm", variants.Variant("addnorm", broken))
    words = ["--device", "cpu", "--d", "8", "--rows", "2", "--job", "forward", "--variants", *UNCOMPILED]
    words += ["--rounds", "1", "--json", str(tmp_path / "gpu.json")]
    assert called(*words)[0] == 3
    interrupting(monkeypatch, case_of("rms", "forward", 2, 8, "bfloat16"))
    code, out, err = called(*words)
    assert code == 130
    assert "Cut short (interrupt): the same command with --resume continues." in err
    assert out.endswith(f"Written: {tmp_path / 'gpu.partial.json'}\n")
