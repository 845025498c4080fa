"""Sentences about the untrained stacks of the compared wirings, for a comparison without training."""

from __future__ import annotations

import math
from collections.abc import Iterator

from addnorm._util.numbers import format_number
from addnorm.lab.measure import Numbers
from addnorm.lab.results import Finding, Results

__all__ = ["describe_untrained", "summarize_stack"]


def describe_untrained(results: Results) -> Iterator[Finding]:
    """Yield what the deepest untrained stack of each compared wiring does to stream and gradient, if nothing was trained."""
    if results.runs or not results.stacks:
        return
    deepest = {row["wiring"]: row for row in sorted(results.untrained, key=lambda row: row["num_layers"])}
    for name in results.compared:
        if name not in deepest:
            sentence = f"Untrained stacks of {name} are not measured: the toy model has none of their kind."
            yield Finding("untrained", sentence, "")
            continue
        numbers = summarize_stack(deepest[name])
        text = {key: format_number(value, 3, trim=True) for key, value in numbers.items() if value is not None}
        start = f"Untrained {name}, {deepest[name]['num_layers']} layers:"
        if "growth" in numbers:
            sentence = (
                f"{start} from x_0 to x_L the root mean square of the stream changes by a factor of {text['growth']}; the "
                f"gradient at x_0 is {text['gradient_ratio']} times that at x_L; two tokens of x_L have a mean "
                f"cosine of {text['similarity']}."
            )
        else:
            gain = (
                f"; with random coefficients the streams' mixing has a gain of {text['gain']}" if "gain" in text else ""
            )
            sentence = (
                f"{start} the largest read is {text['read']} times x_0, in pre_ln {text['pre_read']} times; the output differs "
                f"from that of pre_ln by {text['difference']} of its norm{gain}."
            )
        yield Finding("untrained", sentence, "the toy model of the published results, mean over the seeds", numbers)


def summarize_stack(row: Numbers) -> Numbers:
    """Return numbers of a whole untrained stack: growth, gradient and similarity of one stream, or the reads of several."""
    if "variance" in row:
        growth = math.sqrt(row["variance"][-1] / row["variance"][0])
        return {"growth": growth, "gradient_ratio": row["gradient_ratio"], "similarity": row["similarity"][-1]}
    largest = {name: max(row[name]) for name in ("read", "pre_read")}
    return {**largest, "difference": row["difference"], "gain": row.get("gain")}
