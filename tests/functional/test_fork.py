"""Tests of forked processes: a child computes the same bits on one thread; on several threads it hangs, as torch does.

OpenMP's threads do not survive a fork. torch's DataLoader therefore sets its workers to one thread. A program that forks after
torch has computed on several threads must do the same, with or without addnorm.
"""

import os
import signal
import subprocess
import sys

import pytest

from support import SUPPORT


def run(operation, how, seconds=60):
    """Return the script's output, or that it hung."""
    command = [sys.executable, str(SUPPORT / "run_forked.py"), operation, how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=seconds)
        return output.split() if process.returncode == 0 else f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the child that waits is in its group
            process.communicate()


@pytest.mark.parametrize(
    ("operation", "how"),
    [
        ("with backward", "fork, one thread"),
        ("with backward", "multiprocessing, one thread"),
        ("with backward", "DataLoader"),
        ("one row", "fork"),  # too small for a second thread
    ],
)
def test_a_forked_child_computes_the_same_bits(operation, how):
    assert run(operation, how) == ["same", "same"]


@pytest.mark.slow  # detecting a hang takes the whole timeout
def test_a_forked_child_with_many_threads_does_what_torch_does():
    torch_does = run("torch.add", "fork", seconds=10)
    assert torch_does in ("hung", ["same", "same"])
    for operation in ("add_layer_norm", "with backward"):
        assert run(operation, "fork", seconds=10) == torch_does
