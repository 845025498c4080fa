"""`addnorm ablate`: a model without each of its sublayers."""

from typing import Literal

from addnorm.cli._model import (
    ModelOptions,
    ablate_model,
    check_proof,
    describe_inputs,
    document_of,
    find_streams,
    load_model,
    with_model,
)
from addnorm.cli._output import ProofError, print_result
from addnorm.stream.models.hf import first_line

DIVERGENCE = "The KL divergence is that of the softmax over the output's last dimension. "
CHANGE = "The change of the output is relative to the whole model's output."


@with_model
def run(model: ModelOptions, as_json: bool, mode: Literal["zero", "mean"]) -> None:
    """Remove each sublayer in turn and measure how the output changes."""
    loaded = load_model(model)
    inspection = find_streams(loaded)
    try:
        result = ablate_model(loaded, inspection, mode)
    except Exception as error:  # an operand cannot be replaced, the output has no tensor, or another one of the model
        raise ProofError(f"{inspection.model} cannot be ablated ({first_line(error)}).") from error
    document = document_of(loaded, "addnorm.ablation", model=inspection.model, mode=mode, sites=result.to_dict())
    note = DIVERGENCE * any(effect.kl is not None for effect in result) + CHANGE
    print_result(as_json, document, result, note, describe_inputs(loaded), loaded.source)
    check_proof(inspection)
