"""The demonstration: what it prints, and that a proof that fails is told. No test asserts a time."""

import io
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from rich.console import Console

from addnorm import bench, demo
from addnorm.bench import facts, timing
from addnorm.cli import main


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(timing, "SEGMENT_MS", 0.01)
    monkeypatch.setattr(demo, "SPEED_SHAPES", ((2, 8),))
    monkeypatch.setattr(demo, "SPEED_ROUNDS", 1)
    monkeypatch.setattr(demo, "ROWS", 256)


def printed(part):
    """What a part returned, and its text."""
    screen = Console(record=True, width=100, file=io.StringIO())
    return part(screen), screen.export_text()


def test_every_proof_holds():
    done = CliRunner().invoke(main, ["demo"])
    assert done.exit_code == 0, done.output
    assert "Every proof held." in done.stdout
    assert all(len(line.rstrip()) <= 100 for line in done.stdout.splitlines())
    assert "\x1b" not in done.stdout


def test_worked_examples_of_the_lessons():
    held, text = printed(demo.one_token)
    assert held
    for number in ("[1.5, 1, 4.5]", "2.3333", "2.3889", "[-0.53916, -0.86266, 1.4018]", "[3.16, 0.61, 1.87]", "1.0838"):
        assert text.count(number) >= 2, number  # step by step, and by the operation


def test_bias_gradient_of_ones():
    held, text = printed(demo.bias_gradient)
    assert held
    assert text.count("16,384") == 2


def test_speed_is_told_for_every_job_and_dtype():
    _, text = printed(demo.speed)
    for word in ("float32", "bfloat16", *(bench.JOBS[job].title for job in bench.PLAIN)):
        assert word in text


@pytest.mark.parametrize(
    ("name", "value"),
    [("bias_gradient_of_ones", {"addnorm": 512.0, "eager": 512.0}),
     ("errors", dict.fromkeys(("addnorm", "eager"), facts.Errors(0.1, 0.1, 0.1, 0.1, True)))],
)  # fmt: skip
def test_failed_proof_exits_with_3(monkeypatch, name, value):
    monkeypatch.setattr(facts, name, lambda *_, **__: value)
    done = CliRunner().invoke(main, ["demo"])
    assert done.exit_code == 3
    assert "1 of 3 proofs failed." in done.stdout
    assert "!!" in done.stdout


def test_a_stream_that_differs_is_a_failed_proof(monkeypatch):
    exact = facts.Errors(0.0, 0.0, 0.0, 0.0, False)
    monkeypatch.setattr(facts, "errors", lambda *_, **__: {"addnorm": exact, "eager": exact})
    held, text = printed(demo.real_tensors)
    assert not held
    assert "differs" in text


def test_without_the_kernels_it_says_so_and_holds():
    code = "import addnorm.demo as d; d.PROOFS = d.PROOFS[:1]; d.speed = lambda screen: None; assert d.run()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "ADDNORM_CPP": "0"}, capture_output=True, text=True, check=True
    )
    assert "The C++ kernels are absent: switched off by ADDNORM_CPP=0" in " ".join(done.stdout.split())


def test_the_command_line_imports_neither_bench_nor_demo():
    code = "import sys, addnorm.cli; assert not {'addnorm.bench', 'addnorm.demo'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_console_is_100_columns_in_a_pipe():
    assert bench.console().width == 100
