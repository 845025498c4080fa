"""Write the measured sections of add_norm.md from the results in benchmarks/results.

Numbers come from claims.json, norms.json, stack.json and fuse.json. Verdicts come from the first two, where they are computed
from a criterion. An advantage that the numbers refute stays in the table, with its numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import page

from addnorm import wirings
from addnorm.bench.pages import headline

DEEPEST = "64"

Measured = dict[str, Any]


class Row(NamedTuple):
    """Line of a table: a statement about Add & Norm, the claims in claims.json that judge it, and its numbers in words."""

    text: str
    claim: str
    words: Callable[[Measured], str]
    more: str = "claims.md#the-claims"
    and_claims: tuple[str, ...] = ()


def entry(claim: str) -> Measured:
    """Return the entry of a claim: its numbers and its verdict."""
    entries: dict[str, Measured] = {one["claim"]: one for one in page.document("claims")["claims"]}
    if claim not in entries:
        raise SystemExit(
            f"claims.json has no claim {claim!r}: docs/_build/add_norm.py must follow benchmarks/claims.py."
        )
    return entries[claim]


def n(value: float) -> str:
    """Return a number with three digits; with two if it has an exponent."""
    text = f"{value:.3g}"
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.1e}") if "e" in text else text


def count(value: int) -> str:
    """Return a count, "none" for zero."""
    return str(value) if value else "none"


def percent(*values: float) -> str:
    """Return one or several shares in percent."""
    return " and ".join(f"{100 * value:.2g}" for value in values) + "%"


# ------------------------------------------------------------------------------------------ the numbers, in words


def kept(m: Measured) -> str:
    """Return how much of x_0 is kept, at two depths."""
    names = {"pre_ln": "pre-LN", "post_ln": "post-LN", "no_residual": "without the residual"}
    at = {
        layers: ", ".join(f"{name} {round(m[key][layers], 2) + 0.0:.2f}" for key, name in names.items())  # + 0.0: no -0
        for layers in ("8", DEEPEST)
    }
    return f"cosine of a token with its input after 8 layers: {at['8']}; after {DEEPEST}: {at[DEEPEST]}"


def arrives(m: Measured) -> str:
    """Return the gradient at the first layer."""
    without = entry(VANISHES)["measured"]
    return (
        f"gradient at the first of {DEEPEST} layers, over that at the last: pre-LN {n(m['pre_ln'][DEEPEST])}, "
        f"post-LN {n(m['post_ln'][DEEPEST])}; without the residual {n(without['no_residual'][DEEPEST])}, with neither "
        f"{n(without['no_residual, no norm'][DEEPEST])}"
    )


def scale(m: Measured) -> str:
    """Return the size of the stream."""
    return (
        f"size of the stream (rms) after {DEEPEST} layers: post-LN {n(m['post_ln'][DEEPEST])}, "
        f"pre-LN {n(m['pre_ln'][DEEPEST])}; without norms {n(m['no_norm'][DEEPEST])}"
    )


def stacked(m: Measured) -> str:
    """Return the losses of a deep model."""
    return (
        f"{m['num_layers']} layers, 300 steps without warm-up, loss: pre-LN {m['pre_ln']:.2f}, DeepNorm {m['deepnorm']:.2f}, "
        f"post-LN {m['post_ln']:.2f}, no residual {m['no_residual']:.2f}, no norm {m['no_norm']:.0f}; "
        f"having learned nothing is {m['nothing learned']:.2f}"
    )


def distorted(m: Measured) -> str:
    """Return the effect of one sublayer whose output is a hundred times too large."""
    return (
        "the output of one sublayer of 24 is multiplied by 100; the stack's output then moves, in distances between the outputs "
        f"of two inputs, by {n(m['distorted, pre_ln'])} in pre-LN, {n(m['distorted, post_ln'])} in post-LN, "
        f"{n(m['distorted, no_norm'])} without norms; by {n(m['distorted, reordered'])} where the branch itself is normalized "
        "(`reordered`)"
    )


def cost(m: Measured) -> str:
    """Return the share of a block and of a model, and the speed of a whole fused encoder."""
    shares = [row["share"] for row in page.document("fuse")["rows"] if row["variant"] == "plain"]
    mean = next(
        one for one in page.document("stack")["summary"] if one["name"] == "inference: mean, against plain PyTorch"
    )
    narrow, wide = m["d 256"], m["d 768"]
    parameters, eager, fused = (percent(narrow[key], wide[key]) for key in ("parameters", "eager", "addnorm"))
    return (
        f"of an encoder block of width 256 and 768: {parameters} of the parameters, {eager} of the time, fused {fused}; "
        f"of MiniLM's time {100 * min(shares):.1f} to {percent(max(shares))}; a whole encoder of this library runs "
        f"{mean['value']:.2f} times as fast as one in plain PyTorch"
    )


def shapes(m: Measured) -> str:
    """Return how many wrong shapes are refused."""
    return f"{m['wrong shapes refused']} of {m['wrong shapes']} wrong shapes are refused, with a sentence that says what to do"


def unsolved(m: Measured) -> str:
    """Return a problem that a norm at every sublayer does not prevent."""
    after = m["trained at 0.001, L = 12"]["in all"]
    return (
        "post-LN has a norm after every sublayer; yet after 300 steps without warm-up the gradient at the first of 12 layers is "
        f"{n(after)} of that at the last"
    )


def places(m: Measured) -> str:
    """Return the effect of the norm's place, and the number of wirings."""
    return (
        f"{m['num_layers']} layers, loss without and with warm-up: post-LN {m['post_ln']:.2f} and {m['post_ln, warm-up']:.2f}, "
        f"pre-LN {m['pre_ln']:.2f} and {m['pre_ln, warm-up']:.2f}; {len(wirings.CONSTRUCTORS)} wirings are known here, and "
        "`addnorm.inspect` tells which one a model has"
    )


def rest(m: Measured) -> str:
    """Return the share of a block that is not Add & Norm."""
    wide = m["d 768"]
    return (
        f"{100 * (1 - wide['parameters']):.2f}% of the parameters and {100 * (1 - wide['eager']):.1f}% of the time of a block "
        "of width 768 are attention and feed-forward"
    )


VANISHES = "Without the residual, the gradient vanishes or explodes in a deep stack."
PROS = (
    Row("It keeps the input, on the residual path.", "Add preserves the original input through the residual path.", kept,
         "claims.md#by-depth-untrained"),
    Row("It helps the gradient through a deep network.", "With the residual, the gradient reaches the first layer.", arrives,
         "claims.md#by-depth-untrained", (VANISHES,)),
    Row("It steadies the scale of what a block puts out.", "Norm keeps the scale of the stream stable.", scale,
         "claims.md#by-depth-untrained"),
    Row("It makes blocks stack more reliably.", "Add & Norm lets sublayers be stacked deep without training falling apart.",
         stacked, "claims.md#trained"),
    Row("It lowers the risk that one sublayer spoils everything.",
         "Add & Norm reduces the chance that one sublayer completely distorts the representation.", distorted,
         "claims.md#what-it-means"),
)  # fmt: skip

COSTS = "Add & Norm adds extra computation and learned parameters."
CONS = (
    Row("It costs computation and parameters.", COSTS, cost, "fusing.md"),
    Row("x and Sublayer(x) must have the same shape.", "x and Sublayer(x) must have the same shape.", shapes, "#the-shape-rule"),
    Row("The norm does not solve every training problem.",
         "In post-LN a norm sits on the +1 path at each step, and their product can blow up or shrink.", unsolved,
         "claims.md#what-it-means"),
    Row("Some models norm before the sublayer, some after: that confuses.",
         "Pre-LN trains without the warm-up that post-LN demands.", places, "wirings.md"),
    Row("It does not explain the transformer by itself.", COSTS, rest),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the sections


def verdict_words(*verdicts: str) -> str:
    """Return one verdict for all, without its parts."""
    return verdicts[0] if {*verdicts} in ({"holds"}, {"refuted"}) else "in part"


def pros() -> str:
    """Return the table of advantages."""
    rows = [
        [
            one.text,
            one.words(entry(one.claim)["measured"]),
            f"[{verdict_words(*(entry(claim)['verdict'] for claim in (one.claim, *one.and_claims)))}]({one.more})",
        ]
        for one in PROS
    ]
    return page.table(["for it", "measured", "is it so?"], rows)


def cons() -> str:
    """Return the table of disadvantages, and where all was measured."""
    rows = [[one.text, f"{one.words(entry(one.claim)['measured'])} ([more]({one.more}))"] for one in CONS]
    return f"{page.table(['against it', 'measured'], rows)}\n\n{headline(page.document('claims'))}."


def stream() -> str:
    """Return measurements of the residual stream."""
    closed = entry("Pre-LN unrolls: x_L = x_0 + the sum of the sublayers' outputs.")["measured"]["closure of pre-LN"]
    bits = entry("Pre-LN has a clean +1 path: the gradient of x_L arrives at x_0 untouched.")["measured"]
    loss = entry("Removing one sublayer rarely breaks the model.")["measured"]["pre_ln"]
    return (
        f"Measured: after 24 sublayers x_L and the sum differ by {n(closed)} of the stream's length, which is rounding. On the "
        f"way back along the residual, {count(bits[next(iter(bits))])} of a gradient's numbers is changed. Of the {loss['of']} "
        f"sublayers of two small trained pre-LN models, {count(loss['broken after training'])} breaks the model by its absence; "
        f"the loss rises by {loss['median rise']:.2f} in the median, and by {loss['largest rise']:.2f} at most "
        "([claims](claims.md#the-claims))."
    )


def zeros() -> str:
    """Return the effect of sublayers that return zeros."""
    m = entry("A sublayer that has learned nothing useful leaves the output as good as the input.")["measured"]
    return (
        f"Measured: 24 sublayers that return zeros change the stream of pre-LN by {n(m['change by zeros, pre-LN'])}, and that of "
        f"post-LN by {n(m['change by zeros, post-LN'])} of its length: its norms still act ([claims](claims.md#the-claims))."
    )


def batch() -> str:
    """Return how many tokens depend on their batch, under LayerNorm and BatchNorm."""
    m = entry("A token's LayerNorm does not depend on the other examples of its batch, unlike BatchNorm.")["measured"]
    return (
        f"Measured: {m['tokens']} tokens, each in one batch with the others and then alone. Under LayerNorm "
        f"{count(m['tokens changed by their batch, LayerNorm'])} of them differs by as much as a bit, under BatchNorm "
        f"{count(m['tokens changed by their batch, BatchNorm'])} ([claims](claims.md#the-claims))."
    )


def norms() -> str:
    """Return the table of the claims about training with and without norms."""
    results = page.document("norms")
    depths = results["protocol"]["layers"]
    rows = [
        [f"{one['claim']} ({words})", *(
            ", ".join(f"{name} {show(one['measured'][f'{wiring}, {layers}'])}" for wiring, name in NORM_WIRINGS.items())
            for layers in depths
        ), f"[{verdict_words(one['verdict'])}](claims.md#training-with-and-without-norms)"]
        for one, (words, show) in zip(results["claims"], NORMS.values(), strict=True)
    ]  # fmt: skip
    return page.table(["claim (number)", *(f"measured, {layers} layers" for layers in depths), "is it so?"], rows)


def steps(value: float) -> str:
    """Return a number of steps, "never" for infinity."""
    return "never" if value == math.inf else f"{value:.0f}"


def rate(value: float) -> str:
    """Return a learning rate, "none" for zero."""
    return f"{value:g}" if value else "none"


# Number, and its format, of each claim of norms.json, in its order.
NORMS = {
    "shift": ("largest shift of the means of the features that a sublayer reads, in standard deviations", n),
    "size": ("largest factor by which the size of what a sublayer reads changes", n),
    "speed": ("steps until the loss is 0.3 nats below that of single characters", steps),
    "rate": ("largest learning rate at which the model learns", rate),
}
NORM_WIRINGS = {"pre_ln": "pre-LN", "post_ln": "post-LN", "no_norm": "no norm", "rezero": "ReZero"}

SECTIONS = {
    "add_norm:norms": norms, "add_norm:zeros": zeros, "add_norm:stream": stream, "add_norm:batch": batch,
    "add_norm:pros": pros, "add_norm:cons": cons,
}  # fmt: skip
