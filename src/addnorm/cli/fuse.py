"""`addnorm fuse`: a model's Add & Norms as fused calls, with the proof that its results stay the same."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import addnorm
from addnorm import Fusion, VerificationError
from addnorm.cli._model import ModelOptions, describe_inputs, load_model, model_facts, with_model
from addnorm.cli._output import ProofError, print_result, working
from addnorm.stream.models.hf import first_line, quiet
from addnorm.stream.models.load import input_error

COMPILERS = ("torch._dynamo", "torch._inductor", "torch.fx")  # modules whose errors are not the model's


@with_model
def run(model: ModelOptions, as_json: bool, inductor: bool, benchmark: bool) -> None:
    """Fuse the Add & Norms of a model and prove that its results stay the same."""
    loaded = load_model(model)
    try:
        with working(f"fuse {loaded.name}"), quiet(), _silent_compiler():
            fusion = addnorm.fuse(loaded.model, *loaded.args, compile=inductor, benchmark=benchmark, **loaded.kwargs)
        failure = _describe_nothing(fusion)
    except VerificationError as error:
        fusion, failure = error.fusion, str(error)
    except Exception as error:  # of the model, or of the compiler
        if not type(error).__module__.startswith(COMPILERS):
            raise input_error(error, loaded) from error
        inner = getattr(error, "inner_exception", error)  # of a backend
        reason = f"it cannot be captured as graphs ({first_line(inner)})"
        raise ProofError(f"{type(loaded.model).__name__} is not fused: {reason}.") from error
    document = {**model_facts(loaded), **fusion.to_dict()}
    print_result(as_json, document, fusion, describe_inputs(loaded), loaded.source)
    if failure:
        raise ProofError(failure)


@contextmanager
def _silent_compiler() -> Iterator[None]:
    """Silence the compiler's warnings, unless TORCH_LOGS is set."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        if "TORCH_LOGS" not in os.environ:
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)


def _describe_nothing(fusion: Fusion) -> str | None:
    """Return why nothing was fused, in a sentence, or None."""
    if fusion.fused:
        return None
    if not fusion.boundaries:
        return f"{fusion.model} is not fused: in its graphs no norm reads a sum."
    reasons = dict.fromkeys(str(boundary.reason) for boundary in fusion.unfused)
    return f"{fusion.model} is not fused: {'; '.join(reasons)}."
