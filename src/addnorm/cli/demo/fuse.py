"""The part of the demonstration that changes a model: MiniLM's Add & Norms fused, with proof."""

from __future__ import annotations

from rich.console import Console

import addnorm
from addnorm.cli.demo.stream import heading, minilm
from addnorm.stream.models.load import quiet

__all__ = ["fused"]

TEXTS = 2  # of those that MiniLM reads in the other parts: this is a glance


def fused(screen: Console) -> bool | None:
    """The report on MiniLM, and whether the proof held; None where there is no MiniLM."""
    heading(
        screen,
        "7. The same model, fused: MiniLM",
        "addnorm.fuse replaces each add and the norm after it by one call, and compares all outputs and gradients with those "
        f"before: here for {TEXTS} texts. addnorm.unfuse restores the model.",
    )
    loaded = minilm(screen, TEXTS)
    if loaded is None:
        return None
    screen.print()
    try:
        with quiet():
            done = addnorm.fuse(loaded.model, **loaded.kwargs)
    except addnorm.VerificationError as error:
        screen.print(error.fusion)
        return False
    screen.print(done)
    return bool(done.fused)
