"""Tests of the benchmarks of claims and norms: verdicts follow from the numbers, and other numbers change them."""

import copy
import dataclasses
import functools

import pytest
import torch

from addnorm._util import jsonio
from addnorm.bench import harness
from addnorm.bench.case import grid
from addnorm.lab import Protocol, Run, measure
from addnorm.lab.train import Training
from support.lab_runs import TEXT
from support.loading import ROOT, load

claims, norms = load("benchmarks/claims.py"), load("benchmarks/bench_norms.py")
STORED = {
    name: jsonio.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["results"]
    for name in ("claims", "norms")
}
CLAIMS = [(claim, STORED["claims"]) for claim in claims.CLAIMS] + [(claim, STORED["norms"]) for claim in norms.CLAIMS]


def change(part, values, **where):
    """Return a function that changes values of these rows of a part."""
    return lambda numbers: [row.update(values) for row in claims.rows_of(numbers[part], **where)]


def at_depth(wiring, key, value):
    return change("depth", {key: value}, wiring=wiring, num_layers=64)


def loss(wiring, num_layers, value, warm_up=0):
    return change("training", {"loss": value}, wiring=wiring, num_layers=num_layers, warm_up=warm_up)


def at_rate(wiring, lr, **values):
    return change("rows", values, wiring=wiring, num_layers=6, lr=lr)


def single(key, value):
    return lambda numbers: numbers["exact"].update({key: value})


# The beginning of each claim, a change of the stored numbers, and the verdict after it.
CASES = {
    "Add preserves": (at_depth("pre_ln", "memory", 0.01),
                      "holds: pre_ln to L = 32 / post_ln to L = 4 / deepnorm to L = 64, all measured"),
    "With the residual": (at_depth("post_ln", "gradient", 1e-3),
                          "holds: pre_ln to L = 64, all measured / post_ln to L = 32 / deepnorm to L = 64, all measured"),
    "Without the residual, the gradient": (at_depth("no_residual", "gradient", 1e-9), "holds"),
    "Without the residual, what": (at_depth("pre_ln", "similarity", 1.0),
                                   "holds: lost without it; refuted: kept by pre_ln / kept by post_ln"),
    "Norm keeps": (at_depth("pre_ln", "scale", 1e6), "holds: post_ln / and not without; refuted: pre_ln"),
    "Post-LN re-scales": (at_depth("post_ln", "scale", 1.1), "holds: pre_ln; refuted: post_ln"),
    "In post-LN a norm": (
        at_depth("post_ln", "gradient_residual_alone", 1.0),
        "holds: trained at 0.001, L = 12; refuted: untrained, L = 64, the residual with its norms alone / untrained, L = 64 / "
        "untrained, L = 12 / trained at 0.0003, L = 12",
    ),
    "Pre-LN has a clean": (single("bits changed along pre-LN's residual", 1), "refuted"),
    "Pre-LN unrolls": (single("closure of pre-LN", 1e-5), "refuted"),
    "A sublayer that has learned nothing": (single("change by zeros, post-LN", 0.0), "holds"),
    "Removing one": (lambda numbers: numbers["removal"][0].update(broken=5), "holds: post_ln / deepnorm; refuted: pre_ln"),
    "Add & Norm reduces": (
        single("distorted, no_norm", 1.0),
        "holds: less in reordered than without norms / little in reordered; refuted: less in pre_ln than without norms / less in "
        "post_ln than without norms / little in pre_ln / little in post_ln",
    ),
    "Add & Norm lets": (
        loss("pre_ln", 12, 3.2),
        "holds: post_ln learns / deepnorm learns / no_residual does not / no_norm does not; refuted: pre_ln learns",
    ),
    "Post-LN is fragile": (loss("pre_ln", 12, 3.2), "holds: post_ln fades; refuted: pre_ln learns"),
    "Pre-LN trains": (loss("post_ln", 6, 2.2, 100), "holds"),
    "The norm gives": (single("mean after the norm", 0.1), "refuted"),
    "gamma = sqrt": (
        single("undone, two tokens", 0.0),
        "holds: one token with eps in gamma / one token of variance 1 / two tokens; refuted: one token of variance 1e-5",
    ),
    "A token's LayerNorm": (single("tokens changed by their batch, LayerNorm", 1), "holds: BatchNorm does; refuted: LayerNorm"),
    "Epsilon": (single("numbers not finite with eps", 1), "refuted"),
    "x and Sublayer": (single("wrong shapes refused", 5), "refuted"),
    "Add & Norm adds": (lambda numbers: numbers["cost"][0].update(parameters=0.0), "holds: time; refuted: parameters"),
    "The distribution": (
        at_rate("rezero", 3e-3, moved=[0.0, 1.5]),
        "holds: pre_ln, 6 layers / post_ln, 6 layers / no_norm, 6 layers / rezero, 6 layers / pre_ln, 12 layers / post_ln, 12 layers / "
        "no_norm, 12 layers; refuted: rezero, 12 layers",
    ),
    "With the norm": (
        at_rate("pre_ln", 3e-3, resized=[1.0, 2.5]),
        "holds: post_ln, 6 layers / not in no_norm, 6 layers / pre_ln, 12 layers / post_ln, 12 layers; refuted: pre_ln, 6 layers / not "
        "in rezero, 6 layers / not in no_norm, 12 layers / not in rezero, 12 layers",
    ),
    "Normalization speeds": (
        at_rate("pre_ln", 3e-3, losses=[4.0, 2.6]),
        "holds: pre_ln against no_norm, 6 layers / pre_ln against rezero, 6 layers / pre_ln against no_norm, 12 layers; refuted: "
        "post_ln against no_norm, 6 layers / post_ln against rezero, 6 layers / post_ln against no_norm, 12 layers / pre_ln against "
        "rezero, 12 layers / post_ln against rezero, 12 layers",
    ),
    "Normalization stabilizes": (
        at_rate("no_norm", 1e-2, loss=3.2),
        "holds: pre_ln against no_norm, 6 layers / pre_ln against no_norm, 12 layers; refuted: post_ln against no_norm, 6 layers / "
        "pre_ln against rezero, 6 layers / post_ln against rezero, 6 layers / post_ln against no_norm, 12 layers / pre_ln against "
        "rezero, 12 layers / post_ln against rezero, 12 layers",
    ),
}  # fmt: skip


def test_every_claim_has_a_case():
    cases = [[start for start in CASES if claim.claim.startswith(start)] for claim, _ in CLAIMS]
    assert sorted(cases) == sorted([start] for start in CASES)


@pytest.mark.parametrize("start", CASES)
def test_verdict_follows_from_the_numbers(start):
    change_numbers, verdict = CASES[start]
    ((claim, stored),) = (pair for pair in CLAIMS if pair[0].claim.startswith(start))
    numbers = copy.deepcopy(stored)
    change_numbers(numbers)
    assert claim.judge(numbers)["verdict"] == verdict != claim.judge(stored)["verdict"]


def test_every_part_is_measured_and_judged(monkeypatch, one_thread):
    """Run the whole benchmark in small: one training step, one seed, a short text."""
    bench_claims = load("benchmarks/bench_claims.py")
    small = {"seeds": 0, "steps": 1, "d_model": 16, "nhead": 2, "tokens": 8, "batch": 4, "every": 1}
    for name, value in {
        "SEEDS": (0,), "DEPTHS": (2, 32, 64), "COST_D": (256,), "COST_TOKENS": 8, "python_docs": lambda: TEXT,
        "compare": functools.partial(bench_claims.compare, text=TEXT, jobs=1),
        "TRAININGS": [
            (names, Protocol(protocol.num_layers, 1e-3, [min(n, 1) for n in protocol.warm_ups], **small))
            for names, protocol in bench_claims.TRAININGS
        ],
    }.items():  # fmt: skip
        monkeypatch.setattr(bench_claims, name, value)
    monkeypatch.setattr(measure, "EVALUATED", 8)
    document = harness.run(bench_claims.BENCHMARK, rounds=1)
    assert [entry["claim"] for entry in document["claims"]] == [claim.claim for claim in claims.CLAIMS]
    for section in bench_claims.BENCHMARK.sections.values():
        assert section(document).startswith("| ")
    exact = {name for name in STORED["claims"]["exact"] if not name.startswith("distorted")}  # those depend on no seed
    decided = [claim for claim in claims.CLAIMS if {*claim.measure(STORED["claims"])} <= exact]
    assert len(decided) == 8
    for claim in decided:
        assert claim.judge(document["results"])["verdict"] == claim.judge(STORED["claims"])["verdict"]
    (share,) = document["results"]["cost"]
    assert share["parameters"] == pytest.approx(4 * 256 / (4 * 256 + 12 * 256**2 + 9 * 256))
    assert 0 < share["eager"] < 1
    assert 0 < share["addnorm"] < 1


# With and without norms.


def test_training_measures_losses_and_reads_at_every_step_of_the_protocol(one_thread, monkeypatch):
    monkeypatch.setattr(norms, "EVERY", 2)
    run, reads = Run("no_norm", 1, 16, 2, 8, 4, 5, 1e-2, 0, 0, every=0), []
    loss, losses, sizes, shifts = norms.train(run, TEXT)
    training = Training(run, TEXT)
    probe = TEXT.held_out("test", norms.PROBED, 8)[0]
    for _ in (None, *training.each_step()):
        if training.step % 2 == 0:
            x_0 = training.model.embed(probe)
            attention = training.model.decoder.stack.connections[0].sublayer
            reads.append(torch.stack([x_0, x_0 + attention(x_0)]).detach().double().flatten(1, 2))
    means = [one.mean(1) for one in reads]
    assert loss == training.evaluate()["test"]
    for k, (read, mean) in enumerate(zip(reads, means, strict=True)):
        shift = ((mean - means[0]) / reads[0].std(1)).square().mean(-1).sqrt()
        torch.testing.assert_close(sizes[k], read.square().mean((1, 2)).sqrt(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(shifts[k], shift, rtol=1e-5, atol=1e-6)
    assert len(losses) == 3


def test_norms_run_measures_every_rate(monkeypatch, one_thread):
    small = {
        "LAYERS": (1,), "SEEDS": (0,), "EVERY": 1, "SETTINGS": {**norms.SETTINGS, "steps": 2, "d_model": 16}, "text_of_the_lab": lambda: TEXT,
    }  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(norms, name, value)
    cases = grid(num_layers=(1,), wiring=norms.WIRINGS, lr=(1e-3, 1e-2))
    document = harness.run(dataclasses.replace(norms.BENCHMARK, cases=cases, verdicts=lambda document: {}))
    rows = document["results"]["rows"]
    assert len(rows) == 2 * len(norms.WIRINGS)
    assert all(len(one["losses"]) == len(one["resized"]) == len(one["moved"]) == 3 for one in rows)
    assert all(one["resized"][0] == 1 and one["moved"][0] == 0 for one in rows)
