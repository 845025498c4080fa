"""Claims about Add & Norm from the lessons, each with a criterion that computes its verdict from measured numbers.

bench_claims.py measures the numbers and writes the document; `judge_all` returns an entry for each claim. A verdict
is "holds", "refuted", or both with the parts to which each applies. Statements that no number decides are not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from addnorm._util.numbers import format_number
from addnorm.bench.case import Document
from addnorm.bench.pages import markdown

Measured = dict[str, Any]
Measure = Callable[[Document], Measured]
Verdict = str | bool | dict[str, bool]  # a text, or whether the claim holds: as a whole, or by part

# The lessons, by topic.
IDEA = "Add & Norm, the idea"
HAND = "Add & Norm by hand"
STREAM = "Placements and the residual stream"
BLOCK = "Add & Norm in encoder and decoder"

LEARNED = 0.3  # nats a character below the entropy of single characters; a run with less has learned nothing
PASSES = (0.01, 100.0)  # a gradient that arrives with its norm within these factors neither vanished nor exploded
WARM = ", warm-up"  # ends the name of a run with it
ROUND_OFF = 1e-15  # a smaller number is zero
COMPLETE = ("pre_ln", "post_ln", "deepnorm")  # wirings with a residual and norms
ALIKE = 0.1  # mean cosine; that of unrelated vectors is 0, measured to within 0.02


class Claim(NamedTuple):
    """Claim: the sentence, its lesson, the criterion, the function that selects its numbers, and the one that judges them."""

    claim: str
    lesson: str
    criterion: str
    measure: Measure
    verdict: Callable[[Measured], Verdict]

    def judge(self, results: Document) -> dict[str, Any]:
        """Return the entry of a document."""
        measured = self.measure(results)
        return {
            "claim": self.claim, "lesson": self.lesson, "criterion": self.criterion, "measured": measured,
            "verdict": in_words(self.verdict(measured)),
        }  # fmt: skip


def judge_all(claims: Iterable[Claim], document: Document) -> Document:
    """Return every claim with its numbers and its verdict; nothing for a document that is not complete."""
    results = document.get("results")
    return {} if results is None else {"claims": [claim.judge(results) for claim in claims]}


def table(document: Document) -> str:
    """Return the table of the claims: criterion, measured numbers, verdict."""
    return markdown(
        {"claim": f"{one['claim']} ({one['lesson'].replace('; ', ' / ')})", "criterion": one["criterion"],
         "measured": "<br>".join(f"{name}: {in_short(value)}" for name, value in one["measured"].items()),
         "verdict": f"**{one['verdict']}**"}
        for one in document["claims"]
    )  # fmt: skip


def in_short(value: Any) -> str:
    """Return a number with three digits, or several with their names: of a series by depth the first and the last."""
    if not isinstance(value, dict):
        return "never" if value == math.inf else "0" if abs(value) < ROUND_OFF else format_number(value, 3, trim=True)
    if all(key.isdigit() for key in value):
        ends = min(value, key=int), max(value, key=int)
        return ", ".join(f"{in_short(value[depth])} at L = {depth}" for depth in ends)
    return ", ".join(f"{name} {in_short(one)}" for name, one in value.items() if one is not None)


def mark_best(text: str, row: Measured, rows: Sequence[Measured]) -> str:
    """Return the loss of a run of several rates, the best one in bold."""
    return f"**{text}**" if row is best_of(rows) else text


def explain_losses(document: Document) -> str:
    """Return the text below a table of losses: the loss of a model that has learned nothing, and which losses are bold."""
    return (
        f"a model that knows only how often each character occurs has {document['results']['unigram']:.3f}. Bold: the best rate; "
        "where it is the smallest or the largest one, a better one may lie outside of the grid."
    )


# -------------------------------------------------------------------------------------------------------------- verdicts


def in_words(verdict: Verdict) -> str:
    """Return the verdict of a claim: "holds", "refuted", or by part "holds: ...; refuted: ..."."""
    if isinstance(verdict, str):
        return verdict
    where = verdict if isinstance(verdict, dict) else {"": verdict}
    if not where:
        return "not measured"
    if all(where.values()):
        return "holds"
    if not any(where.values()):
        return "refuted"
    good, bad = ([name for name, holds in where.items() if holds is is_good] for is_good in (True, False))
    return f"holds: {' / '.join(good)}; refuted: {' / '.join(bad)}"


def by_depth(measured: Measured, holds: Callable[[float], bool]) -> str:
    """Return the verdict of a claim that may hold without a gap to some depth only, for each complete wiring."""
    every = {name: [*measured[name].items()] for name in COMPLETE}
    reached = {name: [*takewhile(lambda item: holds(item[1]), depths)] for name, depths in every.items()}
    if reached == every:
        return "holds"
    if not any(reached.values()):
        return "refuted"
    lines = [
        f"{name} to L = {depths[-1][0]}{', all measured' * (depths == every[name])}" if depths else f"{name} nowhere"
        for name, depths in reached.items()
    ]
    return f"holds: {' / '.join(lines)}"


def passes(ratio: float) -> bool:
    """Return whether a gradient neither vanished nor exploded."""
    return PASSES[0] <= ratio <= PASSES[1]


# --------------------------------------------------------------------------------------------------------- measured numbers


def depths(key: str, *wirings: str) -> Measure:
    """Return the function that selects a number of the untrained stacks by wiring and depth."""
    return lambda results: {
        wiring: {str(row["num_layers"]): row[key] for row in rows_of(results["depth"], wiring=wiring)}
        for wiring in wirings
    }


def rows_of(rows: Iterable[Measured], **values: Any) -> list[Measured]:
    """Return the rows with these values."""
    return [row for row in rows if values.items() <= row.items()]


def exact(*keys: str) -> Measure:
    """Return the function that selects single numbers."""
    return lambda results: {key: results["exact"][key] for key in keys}


def best(results: Document, wiring: str, num_layers: int, warm_up: bool = False) -> dict[str, Any]:
    """Return the training with the best learning rate."""
    rows = rows_of(results["training"], wiring=wiring, num_layers=num_layers)
    return best_of(row for row in rows if bool(row["warm_up"]) is warm_up)


def best_of(rows: Iterable[Measured]) -> Measured:
    """Return the row with the lowest loss."""
    return min(rows, key=lambda row: row["loss"])


def losses(num_layers: int, *runs: str) -> Measure:
    """Return the function that selects the best losses of some runs, and the loss without learning.

    A run is a wiring, without warm-up, or "WIRING, warm-up".
    """
    return lambda results: {
        "num_layers": num_layers, "nothing learned": results["unigram"],
        **{run: best(results, run.removesuffix(WARM), num_layers, run.endswith(WARM))["loss"] for run in runs},
    }  # fmt: skip


def learned(measured: Measured, name: str) -> bool:
    """Return whether a run learned anything."""
    return has_learned(measured[name], measured["nothing learned"])


def has_learned(loss: float, unigram: float) -> bool:
    """Return whether a loss is `LEARNED` below that of single characters."""
    return bool(loss < unigram - LEARNED)


def chain(results: Document) -> Measured:
    """Return post-LN's gradient at x_0 over that at x_L, whole and along the residual alone."""
    (deepest,) = rows_of(results["depth"], wiring="post_ln", num_layers=64)
    ratios = {
        "untrained, L = 64, the residual with its norms alone": deepest["gradient_residual_alone"],
        "untrained, L = 64": deepest["gradient"],
    }
    for row in rows_of(results["training"], wiring="post_ln", num_layers=12, warm_up=0):
        ratios["untrained, L = 12"] = row["gradient_before"]
        ratios[f"trained at {row['lr']:g}, L = 12"] = row["gradient_after"]
    return ratios


def removal(results: Document) -> Measured:
    """Return the effect of removing one sublayer: how far the output moves before training, how many break the model after it."""
    keys = {
        "moves at init": "moves", "layers trained": "num_layers", "broken after training": "broken", "of": "of", "loss": "loss",
        "median rise": "median_rise", "largest rise": "largest_rise",
    }  # fmt: skip
    return {row["wiring"]: {name: row.get(key) for name, key in keys.items()} for row in results["removal"]}


def cost(results: Document) -> Measured:
    """Return the share of Add & Norm in an encoder block."""
    return {f"d {row['d']}": {key: row[key] for key in ("parameters", "eager", "addnorm")} for row in results["cost"]}


# --------------------------------------------------------------------------------------------------- the claims


NORMED = ("pre_ln", "post_ln", "reordered")
UNDONE = {  # parts of a claim, by number
    "one token with eps in gamma": "undone, sqrt(var + eps)", "one token of variance 1": "undone, sqrt(var), variance 1",
    "one token of variance 1e-5": "undone, sqrt(var), variance 1e-5", "two tokens": "undone, two tokens",
}  # fmt: skip
CLAIMS = (
    Claim(
        "Add preserves the original input through the residual path.", f"{IDEA}; {BLOCK}",
        f"untrained, the cosine of a token's x_L and its x_0 is at least {ALIKE}",
        depths("memory", *COMPLETE, "no_residual"),
        lambda m: by_depth(m, lambda cosine: cosine >= ALIKE)
    ),
    Claim(
        "With the residual, the gradient reaches the first layer.", f"{IDEA}; {HAND}; {STREAM}; {BLOCK}",
        "untrained, its norm at x_0 is within a factor of 100 of that at x_L",
        depths("gradient", *COMPLETE),
        lambda m: by_depth(m, passes)
    ),
    Claim(
        "Without the residual, the gradient vanishes or explodes in a deep stack.", f"{HAND}; {BLOCK}",
        "untrained, at the greatest depth its norm at x_0 is not within a factor of 100 of that at x_L",
        depths("gradient", "no_residual, no norm", "no_residual"),
        lambda m: {
            "without norms": not passes(m["no_residual, no norm"]["64"]), "with norms": not passes(m["no_residual"]["64"]),
        }
    ),
    Claim(
        "Without the residual, what tells the tokens apart is lost.", f"{IDEA}; {BLOCK}",
        "untrained, two tokens' mean cosine exceeds 0.99 without it at every depth, and stays below with it",
        depths("similarity", "no_residual", "pre_ln", "post_ln"),
        lambda m: {
            "lost without it": all(value > 0.99 for value in m["no_residual"].values()),
            **{f"kept by {name}": all(value < 0.99 for value in m[name].values()) for name in ("pre_ln", "post_ln")},
        }
    ),
    Claim(
        "Norm keeps the scale of the stream stable.", f"{IDEA}; {HAND}; {STREAM}",
        "untrained, the stream's size changes by less than a factor of 2 from L = 32 to 64; without norms by more than 1000",
        depths("scale", "post_ln", "pre_ln", "no_norm"),
        lambda m: {
            **{name: 0.5 < grown(m[name]) < 2 for name in ("post_ln", "pre_ln")}, "and not without": grown(m["no_norm"]) > 1000,
        }
    ),
    Claim(
        "Post-LN re-scales the stream at every sublayer; pre-LN leaves it un-normalized.", STREAM,
        "untrained, post-LN's size is 1 to a thousandth at every depth; pre-LN's rises with every doubling",
        depths("scale", "post_ln", "pre_ln"),
        lambda m: {
            "post_ln": all(abs(value - 1) < 1e-3 for value in m["post_ln"].values()),
            "pre_ln": list(m["pre_ln"].values()) == sorted(m["pre_ln"].values()) and m["pre_ln"]["2"] > 1.1,
        }
    ),
    Claim(
        "In post-LN a norm sits on the +1 path at each step, and their product can blow up or shrink.", STREAM,
        "the gradient's norm at x_0 is not within a factor of 100 of that at x_L",
        chain,
        lambda m: {name: not passes(ratio) for name, ratio in m.items()}
    ),
    Claim(
        "Pre-LN has a clean +1 path: the gradient of x_L arrives at x_0 untouched.", STREAM,
        "the gradient at x_0 that passes 24 sublayers along the residual alone has the bits of the gradient at x_L",
        exact("bits changed along pre-LN's residual"),
        lambda m: m["bits changed along pre-LN's residual"] == 0
    ),
    Claim(
        "Pre-LN unrolls: x_L = x_0 + the sum of the sublayers' outputs.", STREAM,
        "in float32 the two differ by less than a millionth of the stream's norm",
        exact("closure of pre-LN"),
        lambda m: m["closure of pre-LN"] < 1e-6
    ),
    Claim(
        "A sublayer that has learned nothing useful leaves the output as good as the input.", HAND,
        "a sublayer of zeros changes no bit of the stream",
        exact("change by zeros, pre-LN", "change by zeros, post-LN"),
        lambda m: {name: m[f"change by zeros, {name}"] == 0 for name in ("pre-LN", "post-LN")}
    ),
    Claim(
        "Removing one sublayer rarely breaks the model.", STREAM,
        "after training, at most a tenth of the sublayers cost the model half of what it learned when one is removed",
        removal,
        lambda m: {
            wiring: row["broken after training"] <= 0.1 * row["of"] for wiring, row in m.items() if row["of"]
        }
    ),
    Claim(
        "Add & Norm reduces the chance that one sublayer completely distorts the representation.", IDEA,
        "untrained, 12 layers, the output of one sublayer times 100: the stack's output moves by at most a tenth of the "
        "distance without norms, and by less than the distance between the outputs of two inputs",
        exact(*(f"distorted, {name}" for name in (*NORMED, "no_norm"))),
        lambda m: {
            **{f"less in {name} than without norms": 10 * m[f"distorted, {name}"] <= m["distorted, no_norm"] for name in NORMED},
            **{f"little in {name}": m[f"distorted, {name}"] < 1 for name in NORMED},
        }
    ),
    Claim(
        "Add & Norm lets sublayers be stacked deep without training falling apart.", f"{IDEA}; {STREAM}",
        f"12 layers learn with it in 300 steps without warm-up (a loss {LEARNED} below that of single characters), and "
        "they do not learn without the residual or without the norm",
        losses(12, *COMPLETE, "no_residual", "no_norm"),
        lambda m: {
            **{f"{name} learns": learned(m, name) for name in COMPLETE},
            **{f"{name} does not": not learned(m, name) for name in ("no_residual", "no_norm")},
        }
    ),
    Claim(
        "Post-LN is fragile in deep stacks, pre-LN is not.", STREAM,
        "without warm-up, each at its best learning rate, pre-LN learns at 6 and at 12 layers; post-LN learns less at 12 "
        "than at 6",
        lambda results: {f"{wiring}, {n}": best(results, wiring, n)["loss"] for wiring in ("pre_ln", "post_ln") for n in (6, 12)}
        | {"nothing learned": results["unigram"]},
        lambda m: {
            "pre_ln learns": learned(m, "pre_ln, 6") and learned(m, "pre_ln, 12"),
            "post_ln fades": m["post_ln, 12"] > m["post_ln, 6"] + 0.05,
        }
    ),
    Claim(
        "Pre-LN trains without the warm-up that post-LN demands.", STREAM,
        "6 layers, each at its best learning rate: warm-up lowers the loss of post-LN by more than 0.05 nats, that of pre-LN by "
        "less",
        losses(6, "pre_ln", "pre_ln, warm-up", "post_ln", "post_ln, warm-up"),
        lambda m: {
            "pre_ln needs none": m["pre_ln"] - m["pre_ln, warm-up"] < 0.05,
            "post_ln gains by it": m["post_ln"] - m["post_ln, warm-up"] > 0.05,
        }
    ),
    Claim(
        "The norm gives a token mean 0 and variance 1.", f"{HAND}; {BLOCK}",
        "mean and variance are 0 and 1 to within 0.01, for tokens of several variances, eps = 1e-5",
        exact("mean after the norm", "variance after the norm"),
        lambda m: "holds at variances from " + str(min(
            (float(var) for var, after in m["variance after the norm"].items() if abs(after - 1) < 0.01), default="none",
        )) if abs(m["mean after the norm"]) < 0.01 else "refuted"
    ),
    Claim(
        "gamma = sqrt(variance) and beta = mean undo the norm.", f"{HAND}; {BLOCK}",
        "the error relative to the token's spread is below 1e-5: with gamma = sqrt(variance + eps); with gamma = sqrt(variance), "
        "as the claim states; for two tokens with one gamma and beta",
        exact(*UNDONE.values()),
        lambda m: {part: m[key] < 1e-5 for part, key in UNDONE.items()}
    ),
    Claim(
        "A token's LayerNorm does not depend on the other examples of its batch, unlike BatchNorm.", f"{IDEA}; {BLOCK}",
        "no bit of a token's output differs between a batch of 256 and the token alone; under BatchNorm some do",
        exact("tokens changed by their batch, LayerNorm", "tokens changed by their batch, BatchNorm", "tokens"),
        lambda m: {
            "LayerNorm": m["tokens changed by their batch, LayerNorm"] == 0,
            "BatchNorm does": m["tokens changed by their batch, BatchNorm"] > 0,
        }
    ),
    Claim(
        "Epsilon prevents a division by zero.", f"{IDEA}; {HAND}; {BLOCK}",
        "the output for a token of equal features is finite with epsilon, and not without",
        exact("numbers not finite with eps", "numbers not finite without eps"),
        lambda m: m["numbers not finite with eps"] == 0 < m["numbers not finite without eps"]
    ),
    Claim(
        "x and Sublayer(x) must have the same shape.", IDEA,
        "each of six other shapes is refused: one feature, token or sequence less, one axis more, and two that would broadcast",
        exact("wrong shapes", "wrong shapes refused"),
        lambda m: m["wrong shapes"] == m["wrong shapes refused"] > 0
    ),
    Claim(
        "Add & Norm adds extra computation and learned parameters.", IDEA,
        "both are above zero; the numbers are shares of an encoder block",
        cost,
        lambda m: {
            "parameters": all(row["parameters"] > 0 for row in m.values()),
            "time": all(min(row["eager"], row["addnorm"]) > 0 for row in m.values()),
        }
    ),
)  # fmt: skip


def grown(by_layer: dict[str, float]) -> float:
    """Return the growth from L = 32 to 64."""
    return by_layer["64"] / by_layer["32"]
