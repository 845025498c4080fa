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


def run(*arguments, seconds=100):
    """Return the program's output, or that it hung."""
    command = [sys.executable, str(SUPPORT / "run_forked.py"), *arguments]
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


def test_forked_child_computes_the_same_bits():
    """One row is too small for a second thread."""
    hows = ["fork, one thread", "multiprocessing, one thread", "DataLoader"]
    pairs = [("one row", "fork"), ("streams", hows[1]), *(("with backward", how) for how in hows)]
    assert run(*(argument for pair in pairs for argument in pair)) == ["same", "same"] * len(pairs)


@pytest.mark.slow  # detecting a hang takes the whole timeout
def test_forked_child_with_many_threads_acts_like_torch():
    torch_add = run("torch.add", "fork", seconds=10)
    assert torch_add in ("hung", ["same", "same"])
    for operation in ("add_layer_norm", "with backward", "streams"):
        assert run(operation, "fork", seconds=10) == torch_add
