"""Tests of measured statements in the prose of README and docs: each holds for the committed results.

Tables and figures are generated; these sentences are written by hand. New results that contradict one fail here.
"""

import math
import statistics
from collections import Counter

import pytest

from addnorm._util import jsonio
from addnorm.lab.results import t_quantile
from support.loading import ROOT

RESULTS = ROOT / "benchmarks/results"


def read(name, *keys):
    """Return a part of the results of a benchmark."""
    part = jsonio.loads((RESULTS / f"{name}.json").read_text())
    for key in keys:
        part = part[key]
    return part


def rows_of(source, /, *keys, **fields):
    """Return the rows of a part of the results that have these values; there is at least one."""
    rows = [row for row in read(source, *keys) if fields.items() <= row.items()]
    assert rows, f"{source} has no rows with {fields}"
    return rows


def depth(wiring, key, num_layers=64):
    """Return a number of an untrained stack."""
    (row,) = rows_of("claims", "results", "depth", wiring=wiring, num_layers=num_layers)
    return row[key]


def trained(wiring, num_layers, rate=None, warm_up=0, key="loss"):
    """Return a number of a trained model, at its best rate by default."""
    kept = rows_of("claims", "results", "training", wiring=wiring, num_layers=num_layers, warm_up=warm_up)
    return min((row for row in kept if rate in (None, row["lr"])), key=lambda row: row["loss"])[key]


def balance(num_layers, rate):
    """Return the gradient at x_0 over that at the end, after the training of post-LN."""
    return trained("post_ln", num_layers, rate, key="gradient_after")


def removal(key):
    """Return a number of the removal of sublayers, by wiring."""
    return {row["wiring"]: row[key] for row in read("claims", "results", "removal") if row["of"]}


def norms(start):
    """Return the numbers of a claim of norms.json."""
    (claim,) = (claim for claim in read("norms", "claims") if claim["claim"].startswith(start))
    return {f"{wiring}, {n.split()[0]}": value for n, row in claim["measured"].items() for wiring, value in row.items()}


def steps_to_learn(name):
    """Return the steps that a wiring needs, such as "pre_ln, 6" of six layers."""
    return norms("Normalization speeds")[name]


def speeds(job, norm="layer", **fields):
    """Return speeds relative to eager PyTorch, on two threads."""
    rows = rows_of("functional", "rows", job=job, norm=norm, threads=2, variant="addnorm", **fields)
    return [row["ratio_to_eager"] for row in rows]


def guards():
    """Return the share of torch's time that the compiled formula takes more, on one row."""
    times = {}
    for row in rows_of("compile", "rows", job="y", rows=1):
        times.setdefault((row["norm"], row["dtype"]), {})[row["variant"]] = row["median_us"]
    return [by_variant["formula"] / by_variant["torch"] - 1 for by_variant in times.values()]


KEEPING = ("glibc, memory kept", "glibc, memory kept, huge pages", "tcmalloc")
SETTINGS = (*KEEPING, "glibc, huge pages", "PyTorch's huge pages", "jemalloc")


def allocators(job, setting, key="paired_ratio"):
    """Return how many times as fast whole models are with another allocator."""
    return [row[key] for row in rows_of("memory", "rows", job=job, variant=setting)]


def limit_ratio():
    """Return the speed of LayerNorm with gradients on 4096 rows relative to eager PyTorch, taken round by round."""
    fields = {"job": "forward_backward", "norm": "layer", "rows": 4096, "dtype": "float32", "variant": "addnorm"}
    (row,) = rows_of("limit", "rows", **fields)
    return row["paired_ratio"]


def stacks(job):
    """Return {(batch * tokens, d): speeds of encoders relative to plain PyTorch}."""
    ratios = {}
    for row in rows_of("stack", "rows", job=job, norm="layer", variant="plain"):
        if row["wiring"] in ("pre_ln", "post_ln"):
            ratios.setdefault((row["batch"] * row["tokens"], row["d"]), []).append(1 / row["paired_ratio"])
    return ratios


def narrow(job):
    """Return the speeds of encoders of at most 256 features on at most 128 tokens."""
    sizes = stacks(job).items()
    return [speed for (tokens, d), speeds in sizes for speed in speeds if tokens <= 128 and d <= 256]


def decoders(dtype):
    """Return the least and the largest gain of decoders with RMSNorm over plain PyTorch, in per cent."""
    speeds = [1 / row["paired_ratio"] for row in rows_of("stack", "rows", norm="rms", dtype=dtype, variant="plain")]
    return [round(100 * (speed - 1)) for speed in (min(speeds), max(speeds))]


def shares(dtype):
    """Return the least and the largest share of Add & Norm in decoders with RMSNorm, in per cent."""
    own = [row["share"] for row in rows_of("stack", "rows", norm="rms", dtype=dtype, variant="plain")]
    return [round(100 * end(own)) for end in (min, max)]


def exact(name):
    """Return a number that is not measured by training."""
    return read("claims", "results", "exact", name)


def bias_of_ones():
    """Return the bias gradient of 16384 rows of ones, of PyTorch and of addnorm."""
    (fact,) = (fact for fact in read("functional", "facts") if fact["name"].startswith("dbias of 16384 bfloat16"))
    return fact["torch"], fact["value"]


def share_miscast(key):
    """Return the shares of elements unlike three models' RMSNorm: cast at another place ("torch"), or as in the model ("value")."""
    return [fact[key] for fact in read("functional", "facts") if fact["name"].startswith("share of elements unlike")]


def saved_per_token(dtype):
    """Return the bytes that PyTorch's and this library's LayerNorm save for a token, besides z."""
    (fact,) = rows_of("functional", "facts", name=f"saved bytes, 512 x 768 {dtype}", norm="layer")
    size = 4 if dtype == "float32" else 2
    return tuple(fact[key] / 512 - 768 * size for key in ("torch", "value"))


def count_zoo():
    """Return the numbers of models, packages, models that `inspect` is right on, and models that it is wrong on."""
    models = read("zoo")
    count = Counter(model["verdict"] for model in models)
    return len(models), len({model["package"] for model in models}), count["right"], count["wrong"] + count["crash"]


def learns_nothing(loss):
    return loss > read("claims", "results", "unigram") - 0.1


# Sentences by page, each with a function that tells whether the results say the same.
SENTENCES = {
    "README.md": {
        "on [290 models of 27 packages](docs/zoo.md) `inspect` is right on 287 and wrong on none":
            lambda: count_zoo() == (290, 27, 287, 0),
        "for 16384 rows of ones it returns 256 on one thread and 512 on two. addnorm returns 16384":
            lambda: bias_of_ones() == (512, 16384),
    },
    "CONTRIBUTING.md": {
        "`make zoo` installs 26 packages":
            lambda: count_zoo()[1] - 1 == 26,  # transformers is there
    },
    "docs/add_norm.md": {
        "three of the five arguments for it hold only in part.":
            lambda: (ROOT / "docs/claims.md").read_text().count("[in part](") == 3,
    },
    "docs/numerics.md": {
        "the wrong place changes a quarter of the elements by one unit in the last place.":
            lambda: len(share_miscast("torch")) == 3 and all(0.24 < share < 0.27 for share in share_miscast("torch")),
        "With the model's own casting fewer than one element in 10,000 differs":
            lambda: max(share_miscast("value")) < 1e-4,
    },
    "docs/comparing.md": {
        "a difference must exceed 10.9 standard errors with three seeds, and 4.9 with five.":
            lambda: [round(t_quantile(0.05 / math.comb(4, 2), seeds - 1), 1) for seeds in (3, 5)] == [10.9, 4.9],
    },
    "docs/claims.md": {
        "After 128 norms almost nothing is left.":
            lambda: depth("post_ln", "gradient_residual_alone") < 1e-10,
        "the sublayers add gradient on the way back, and about half of it arrives":
            lambda: all(0.35 < depth("post_ln", "gradient", n) < 0.65 for n in (8, 16, 32, 64)),
        "without warm-up at too high a rate (1e-3 at twelve layers, 3e-3 at six) destroy this balance":
            lambda: max(balance(12, 1e-3), balance(6, 3e-3)) < 1e-3,
        "At a lower rate the balance stays.":
            lambda: min(balance(12, 3e-4), balance(6, 1e-3)) > 0.5,
        "With six layers, and each wiring at its best rate, post-LN gains nothing from warm-up here.":
            lambda: trained("post_ln", 6) <= trained("post_ln", 6, warm_up=100),
        "at 3e-3 the loss is that of single characters without warm-up, and well below it with warm-up.":
            lambda: learns_nothing(trained("post_ln", 6, 3e-3)) and not learns_nothing(trained("post_ln", 6, 3e-3, 100) + 0.4),
        "Twelve layers fail at 1e-3 already.":
            lambda: learns_nothing(trained("post_ln", 12, 1e-3)),
        "where it fails after a few layers. DeepNorm is post-LN with this share restored.":
            lambda: depth("post_ln", "memory", 8) < 0.1 < 0.9 < depth("deepnorm", "memory"),
        "the gradient's norm survives 64 layers without any residual before training.":
            lambda: depth("no_residual", "gradient") > 0.1 and depth("no_residual", "similarity") > 0.99,
        "dominates the stream of pre-LN and post-LN, though far less than without any norm.":
            lambda: 1 < exact("distorted, pre_ln") < exact("distorted, post_ln") < exact("distorted, no_norm") / 10,
        "Only a norm of the branch (`reordered`, `sandwich`, `peri_ln`) removes the excess.":
            lambda: exact("distorted, reordered") < 1e-3,
        "**Removing a sublayer breaks none of the models here that learned anything**, post-LN's included: "
        "most removals cost at most a few hundredths of a nat.":
            lambda: not any(removal("broken").values()) and max(removal("median_rise").values()) < 0.05,
        "a removal changes post-LN's output as much as another input does, and pre-LN's about a third as much.":
            lambda: 0.8 < removal("moves")["post_ln"] < 1.25
            and 0.25 < removal("moves")["pre_ln"] / removal("moves")["post_ln"] < 0.42,
        "A norm fixes the size of what a sublayer reads, to a few per cent.":
            lambda: max(
                value for name, value in norms("With the norm, the inputs").items() if name[:4] in ("pre_", "post")
            ) < 1.06,
        "still move by more than a standard deviation, in pre-LN as far as without norms.":
            lambda: all(
                shift["pre_ln, " + n] > 1 and 0.9 < shift["pre_ln, " + n] / shift["no_norm, " + n] < 1.15
                for shift in [norms("The distribution")] for n in ("6", "12")
            ),
        "They move least in ReZero, whose writes start at zero.":
            lambda: all(min(shift, key=shift.get).startswith("rezero") for shift in [norms("The distribution")]),
        "six layers need more steps than pre-LN, and twelve layers learn at no rate.":
            lambda: steps_to_learn("no_norm, 6") > steps_to_learn("pre_ln, 6")
            and norms("Normalization stabilizes")["no_norm, 12"] == 0,
        "ReZero has no norms either, and learns as fast as pre-LN here":
            lambda: all(steps_to_learn(f"rezero, {n}") <= steps_to_learn(f"pre_ln, {n}") for n in (6, 12)),
        "still learns less than both at twelve layers, without warm-up.":
            lambda: steps_to_learn("post_ln, 12") > max(steps_to_learn(f"{w}, 12") for w in ("pre_ln", "rezero")),
        "is about a hundredth of a block of width 256, and less of a wider block.":
            lambda: all(
                0.005 < cost[256][key] < 0.015 and cost[768][key] < cost[256][key]
                for cost in [{row["d"]: row for row in read("claims", "results", "cost")}] for key in ("eager", "addnorm")
            ),
    },
    "docs/performance.md": {
        "they run at least 1.7 times as fast as eager PyTorch at every size.":
            lambda: min(min(speeds(job, norm)) for job in ("in_place", "reuse") for norm in ("layer", "rms")) >= 1.7,
        "with LayerNorm addnorm is about 1.5 times as fast as PyTorch at 768 features, with dropout about 1.2 times. "
        "RMSNorm gains more.":
            lambda: all(1.4 < ratio < 1.6 for ratio in speeds("forward_backward", rows=1, d=768))
            and all(1.1 < ratio < 1.3 for ratio in speeds("dropout", rows=1, d=768))
            and all(
                min(speeds(job, "rms", rows=1, d=768)) > max(speeds(job, rows=1, d=768))
                for job in ("forward_backward", "dropout")
            ),
        "a ratio of 1.88. LayerNorm on 4096 x 4096 float32 is between the two.":
            lambda: 11 / 8 < limit_ratio() < 15 / 8,
        "tcmalloc, removes all faults.":
            lambda: all(sum(allocators(job, setting, "faults")) == 0 for job in ("inference", "training") for setting in KEEPING),
        "no setting differs from glibc beyond the intervals in both models":
            lambda: not any(
                max(allocators(job, setting, "paired_high")) < 1 or min(allocators(job, setting, "paired_low")) > 1
                for job in ("inference", "training") for setting in SETTINGS
            ),
        "jemalloc gives pages back after each step and has the most faults.":
            lambda: all(
                allocators("training", "jemalloc", "faults")[model] > allocators("training", setting, "faults")[model]
                for model in (0, 1) for setting in {*SETTINGS} - {"jemalloc"}
            ),
        "On one row they take at most a sixth of the time.":
            lambda: all(share < 1 / 6 for share in guards()),
        "on a batch a whole model gains less than a tenth":
            lambda: all(
                statistics.geometric_mean(stacks(job)[2048, d]) < 1.1
                for job in ("inference", "training") for d in (64, 256, 768)
            ),
        "the decoders gain 0 to 3% in float32, and 3 to 8% in bfloat16":
            lambda: decoders("float32") == [0, 3] and decoders("bfloat16") == [3, 8],
        "is 1 to 6% of plain PyTorch's forward pass in float32 and 2 to 10% in bfloat16.":
            lambda: shares("float32") == [1, 6] and shares("bfloat16") == [2, 10],
        "Narrow models on few tokens run 0.98 to 1.05 times as fast in inference and 0.98 to 1.03 times in training":
            lambda: [round(end(narrow(job)), 2) for job in ("inference", "training") for end in (min, max)]
            == [0.98, 1.05, 0.98, 1.03],
        "8 bytes in float32, 4 in bfloat16 and float16.":
            lambda: saved_per_token("float32") == (8, 8) and saved_per_token("bfloat16") == (4, 8),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "text"), [(path, text) for path, texts in SENTENCES.items() for text in texts], ids=lambda name: name[:50]
)
def test_sentence_is_on_its_page_and_holds(path, text):
    assert text in " ".join((ROOT / path).read_text().split())
    assert SENTENCES[path][text]()
