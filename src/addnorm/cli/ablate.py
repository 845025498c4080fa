"""`addnorm ablate`: a model without each of its sublayers."""

from __future__ import annotations

from typing import Literal

import addnorm
from addnorm.cli._model import (
    ModelOptions,
    describe_failure,
    describe_inputs,
    inspect_model,
    load_model,
    model_facts,
    with_model,
)
from addnorm.cli._output import print_json, print_notes, stderr_if_terminal, stdout, working
from addnorm.stream.models.hf import first_line, quiet

__all__ = ["run"]

DIVERGENCE = "The KL divergence is that of the softmax over the output's last dimension."
CHANGE = "The change of the output is relative to the whole model's output."


@with_model
def run(model: ModelOptions, as_json: bool, mode: Literal["zero", "mean"]) -> str | None:
    """Remove each sublayer in turn and measure how the output changes."""
    loaded = load_model(model)
    inspection = inspect_model(loaded)
    if not inspection.sites:
        return describe_failure(inspection)
    try:
        with working(f"ablate {inspection.model}", has_bar=True), quiet():
            result = addnorm.ablate_each(
                inspection, *loaded.args, mode=mode, progress=stderr_if_terminal(), **loaded.kwargs
            )
    except Exception as error:  # an operand cannot be replaced, the output has no tensor, or another one of the model
        return f"{inspection.model} cannot be ablated ({first_line(error)})."
    if as_json:
        facts = {"schema": "addnorm.ablation", "schema_version": 1, **model_facts(loaded), "model": inspection.model}
        print_json({**facts, "mode": mode, "sites": result.to_dict()})
    else:
        console = stdout()
        console.print(result)
        note = f"{DIVERGENCE} {CHANGE}" if any(effect.kl is not None for effect in result) else CHANGE
        print_notes(console, note, describe_inputs(loaded), loaded.source)
    return describe_failure(inspection)
