"""`addnorm decompose`: the share of each sublayer in a model's residual stream."""

from __future__ import annotations

from rich.console import Console
from torch import Tensor

import addnorm
from addnorm._util.numbers import format_count
from addnorm.cli._model import (
    ModelOptions,
    describe_failure,
    describe_inputs,
    inspect_model,
    load_model,
    model_facts,
    token_mask,
    with_model,
)
from addnorm.cli._output import print_blocks, print_json, print_notes, stdout, working
from addnorm.stream.decompose import Decomposition, tabulate_shares
from addnorm.stream.models.hf import quiet

__all__ = ["print_shares", "run"]

NOTE = "The share of a source is ⟨its part, x⟩ / |x|² of a token, averaged over the tokens; the shares sum to one."

NAN = "nan: the stream of a token that counts holds NaN or infinite numbers, which have no share."


@with_model
def run(model: ModelOptions, as_json: bool, float64: bool) -> str | None:
    """Compute each sublayer's share of a model's residual stream."""
    loaded = load_model(model)
    inspection = inspect_model(loaded)
    if not inspection.sites:
        return describe_failure(inspection)
    decompositions, refused = [], []
    with working(f"decompose {inspection.model}"), quiet():
        for stream in inspection.streams:
            try:
                decompositions.append(
                    addnorm.decompose(loaded.model, *loaded.args, stream=stream.name, float64=float64, **loaded.kwargs)
                )
            except ValueError as error:  # the stream cannot be decomposed; the inputs are right, since the model ran
                refused.append(str(error).replace("addnorm.inspect lists", "`addnorm inspect` lists"))
    mask = token_mask(loaded.kwargs)
    shares = [_mean_shares(decomposition, mask) for decomposition in decompositions]
    if as_json:
        streams = [
            {
                "name": decomposition.stream.name,
                "depth": decomposition.depth,
                "closure": decomposition.closure,
                "shares": stream_shares,
            }
            for decomposition, stream_shares in zip(decompositions, shares, strict=True)
        ]
        facts = {
            "schema": "addnorm.decomposition",
            "schema_version": 1,
            **model_facts(loaded),
            "model": inspection.model,
        }
        print_json({**facts, "streams": streams, "refused": refused})
    else:
        console = stdout()
        for k, (decomposition, stream_shares) in enumerate(zip(decompositions, shares, strict=True)):
            console.print(end="\n" * bool(k))
            depth = f"{decomposition.stream.name} after {format_count(decomposition.depth, 'add')}"
            title = f"{inspection.model}, {depth}: the sum of its parts, relative error {decomposition.closure:.1e}"
            print_shares(console, title, stream_shares)
        if decompositions:
            has_nan = any(share != share for part in shares for share in part.values())
            print_notes(console, NOTE, *[NAN] * has_nan, describe_inputs(loaded), loaded.source)
    return " ".join(refused) or None


def print_shares(console: Console, title: str, shares: dict[str, float]) -> None:
    """Print the share of each source, by depth, the biases of the norms last."""
    print_blocks(console, [tabulate_shares(title, shares)])


def _mean_shares(decomposition: Decomposition, mask: Tensor | None) -> dict[str, float]:
    """Return the shares at the end over the tokens that are not padding; over all where the mask is that of other tokens."""
    try:
        return decomposition.mean_shares(tokens=mask)
    except ValueError:
        return decomposition.mean_shares()
