"""`addnorm decompose`: the share of each sublayer in a model's residual stream."""

import math

from torch import Tensor

import addnorm
from addnorm._util.blocks import Paragraph
from addnorm._util.numbers import format_number
from addnorm._util.render import print_blocks
from addnorm.cli._model import (
    ModelOptions,
    describe_inputs,
    document_of,
    find_streams,
    load_model,
    token_mask,
    with_model,
)
from addnorm.cli._output import ProofError, print_json, print_notes, stdout, working
from addnorm.stream.decomposition import Decomposition, tabulate_shares
from addnorm.stream.find.sites import Stream
from addnorm.stream.models.hf import quiet

NOTE = "The share of a source is ⟨its part, x⟩ / |x|² of a token, averaged over the tokens; the shares sum to one."

NAN = "nan: the stream of a token that counts holds NaN or infinite numbers, which have no share."


@with_model
def run(model: ModelOptions, as_json: bool, float64: bool) -> None:
    """Compute each sublayer's share of a model's residual stream."""
    loaded = load_model(model)
    inspection = find_streams(loaded)
    streams: list[tuple[Decomposition, dict[str, float]]] = []  # each with its shares
    refused, mask = [], token_mask(loaded.kwargs)
    with working(f"decompose {inspection.model}"), quiet():
        for part in inspection.parts:
            name = part.name if isinstance(part, Stream) else None
            try:
                parts = addnorm.decompose(loaded.model, *loaded.args, stream=name, float64=float64, **loaded.kwargs)
                streams.append((parts, _mean_shares(parts, mask)))
            except ValueError as error:  # the stream cannot be decomposed; the inputs are right, since the model ran
                refused.append(str(error).replace("addnorm.inspect lists", "`addnorm inspect` lists"))
    if as_json:
        entries = [
            {"name": parts.name, "depth": parts.depth, "closure": parts.closure, "shares": shares}
            for parts, shares in streams
        ]
        print_json(
            document_of(loaded, "addnorm.decomposition", model=inspection.model, streams=entries, refused=refused)
        )
    elif streams:
        console = stdout()
        for k, (parts, shares) in enumerate(streams):
            depth = f"{parts.name} after {parts.steps}"
            title = (
                f"{inspection.model}, {depth}: the sum of its parts, relative error {format_number(parts.closure, 2)}"
            )
            print_blocks(console, *[Paragraph()] * bool(k), tabulate_shares(title, shares))
        has_nan = any(math.isnan(share) for _, shares in streams for share in shares.values())
        print_notes(console, NOTE, NAN * has_nan, describe_inputs(loaded), loaded.source)
    if refused:
        raise ProofError(" ".join(refused))


def _mean_shares(decomposition: Decomposition, mask: Tensor | None) -> dict[str, float]:
    """Return the shares at the end, averaged over all tokens but padding, or over all if the mask does not fit."""
    try:
        return decomposition.mean_shares(tokens=mask)
    except ValueError:
        return decomposition.mean_shares()
