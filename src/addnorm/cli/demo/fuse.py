"""The part of the demonstration that changes a model: MiniLM's Add & Norms made fused, proved, and timed.

The report is that of `addnorm.fuse`. Times prove nothing about another machine; the proof does.
"""

from __future__ import annotations

import torch
from rich.console import Console

import addnorm
from addnorm.cli.demo.stream import heading, minilm
from addnorm.stream.models.load import quiet

__all__ = ["fused"]

SECONDS = 0.5  # for each measurement
TEXTS = 2  # of those that MiniLM reads in the other parts: this is a glance


def fused(screen: Console) -> bool | None:
    """The report on MiniLM, and whether the proof held; None where there is no MiniLM."""
    heading(
        screen,
        "7. The same model, fused: MiniLM",
        "addnorm.fuse makes each add and the norm after it one call, compares all outputs and gradients with before, and "
        f"measures: here {TEXTS} texts on one thread. The model stays what it was; addnorm.unfuse gives it back.",
    )
    loaded = minilm(screen, TEXTS)
    if loaded is None:
        return None
    screen.print()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what else this machine does then disturbs the times least
    try:
        with quiet():
            done = addnorm.fuse(loaded.model, timed=SECONDS, **loaded.kwargs)
    except addnorm.VerificationError as error:
        screen.print(error.fusion)
        return False
    finally:
        torch.set_num_threads(threads)
    screen.print(done)
    return bool(done.fused)
