"""Write the tables of the arguments for and against Add & Norm in claims.md from the results in benchmarks/results.

Numbers come from claims.json, stack.json and fuse.json. Verdicts come from the first, where they are computed from a criterion.
An advantage that the numbers refute stays in the table, with its numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import page
from add_norm import Measured, entry, n

from addnorm import wirings
from addnorm.bench.pages import headline

DEEPEST = "64"


class Row(NamedTuple):
    """Line of a table: a statement about Add & Norm, the claims in claims.json that judge it, and its numbers in words."""

    text: str
    claim: str
    words: Callable[[Measured], str]
    more: str = "#the-claims"
    and_claims: tuple[str, ...] = ()


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
    shares = [
        row["share"] for row in page.document("fuse")["rows"] if row["variant"] == "plain" and row["model"] == "minilm"
    ]
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
    after = m["trained at 0.001, L = 12"]
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
         "#by-depth-untrained"),
    Row("It helps the gradient through a deep network.", "With the residual, the gradient reaches the first layer.", arrives,
         "#by-depth-untrained", (VANISHES,)),
    Row("It steadies the scale of what a block puts out.", "Norm keeps the scale of the stream stable.", scale,
         "#by-depth-untrained"),
    Row("It makes blocks stack more reliably.", "Add & Norm lets sublayers be stacked deep without training falling apart.",
         stacked, "#trained"),
    Row("It lowers the risk that one sublayer spoils everything.",
         "Add & Norm reduces the chance that one sublayer completely distorts the representation.", distorted,
         "#what-it-means"),
)  # fmt: skip

COSTS = "Add & Norm adds extra computation and learned parameters."
CONS = (
    Row("It costs computation and parameters.", COSTS, cost, "fusing.md"),
    Row("x and Sublayer(x) must have the same shape.", "x and Sublayer(x) must have the same shape.", shapes,
         "add_norm.md#the-shape-rule"),
    Row("The norm does not solve every training problem.",
         "In post-LN a norm sits on the +1 path at each step, and their product can blow up or shrink.", unsolved,
         "#what-it-means"),
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


SECTIONS = {"claims:pros": pros, "claims:cons": cons}
