"""What `addnorm fuse` does with the model that it was given the name of: the report, and the sentence where nothing is proved."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

import addnorm
from addnorm import Fusion, VerificationError
from addnorm.cli.stream import Given, inputs_of, loaded_of, notes, print_json, said, working
from addnorm.stream.models.hf import first_line
from addnorm.stream.models.load import Loaded, quiet, refused

__all__ = ["fuse"]

COMPILERS = ("torch._dynamo", "torch._inductor", "torch.fx")  # where an error is not the model's


def fuse(given: Given, screen: Console, *, as_json: bool, inductor: bool, benchmark: bool) -> str | None:
    """The report; returns why nothing is fused, in a sentence, or None."""
    loaded = loaded_of(given)
    try:
        done, unproved = _fused(loaded, inductor, benchmark), None
    except VerificationError as error:
        done, unproved = error.fusion, str(error)
    except Exception as error:  # of the model, at what it was called with; or of the compiler
        if not type(error).__module__.startswith(COMPILERS):
            raise refused(error, loaded) from error
        inner = getattr(error, "inner_exception", error)  # what a backend raised
        return f"{type(loaded.model).__name__} is not fused: it cannot be captured as graphs ({first_line(inner)})."
    if as_json:
        print_json({**said(loaded), **done.to_dict()})
    else:
        screen.print(done)
        notes(screen, inputs_of(loaded), loaded.source)
    return unproved or _nothing(done)


def _fused(loaded: Loaded, inductor: bool, benchmark: bool) -> Fusion:
    with working(f"fuse {loaded.name}"), quiet(), _calm():
        return addnorm.fuse(loaded.model, *loaded.args, compile=inductor, benchmark=benchmark, **loaded.kwargs)


@contextmanager
def _calm() -> Iterator[None]:
    """The compiler without its warnings; TORCH_LOGS asks for them."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        if "TORCH_LOGS" not in os.environ:
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)


def _nothing(done: Fusion) -> str | None:
    """Why nothing was fused."""
    if done.fused:
        return None
    if not done.boundaries:
        return f"{done.model} is not fused: in its graphs no norm reads a sum."
    reasons = dict.fromkeys(str(one.reason) for one in done.left)
    return f"{done.model} is not fused: {'; '.join(reasons)}."
