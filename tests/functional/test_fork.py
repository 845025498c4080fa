"""Tests of forked processes: a child computes the same bits on one thread; on several threads it may hang, as in torch.

OpenMP's threads do not survive a fork. torch's DataLoader therefore sets its workers to one thread. A program that forks after
torch has computed on several threads must do the same, with or without addnorm.
"""

from support import SUPPORT
from support.processes import run_python


def test_forked_child_computes_the_same_bits():
    """One row is too small for a second thread."""
    alone = "fork, one thread"
    pairs = ("one row", "fork", "streams", alone, "with backward", alone, "with backward", "DataLoader")
    process = run_python(SUPPORT / "run_forked.py", *pairs, timeout=100)
    assert process.stdout.split() == ["same"] * len(pairs)
