"""`addnorm ablate`: a model without each of its sublayers."""

from __future__ import annotations

from typing import Literal

import addnorm
from addnorm.cli._model import (
    ModelOptions,
    check_proof,
    describe_inputs,
    document_of,
    find_streams,
    load_model,
    with_model,
)
from addnorm.cli._output import ProofError, print_result, stderr_if_terminal, working
from addnorm.stream.models.hf import first_line, quiet

DIVERGENCE = "The KL divergence is that of the softmax over the output's last dimension. "
CHANGE = "The change of the output is relative to the whole model's output."


@with_model
def run(model: ModelOptions, as_json: bool, mode: Literal["zero", "mean"]) -> None:
    """Remove each sublayer in turn and measure how the output changes."""
    loaded = load_model(model)
    inspection = find_streams(loaded)
    name, progress = inspection.model, stderr_if_terminal()
    try:
        with working(f"ablate {name}", has_bar=True), quiet():
            result = addnorm.ablate_each(inspection, *loaded.args, mode=mode, progress=progress, **loaded.kwargs)
    except Exception as error:  # an operand cannot be replaced, the output has no tensor, or another one of the model
        raise ProofError(f"{name} cannot be ablated ({first_line(error)}).") from error
    document = document_of(loaded, "addnorm.ablation", model=name, mode=mode, sites=result.to_dict())
    note = DIVERGENCE * any(effect.kl is not None for effect in result) + CHANGE
    print_result(as_json, document, result, note, describe_inputs(loaded), loaded.source)
    check_proof(inspection)
