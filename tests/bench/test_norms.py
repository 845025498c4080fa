"""Tests of benchmarks/bench_norms.py and bench_race.py: reads, shifts and verdicts follow from the models and the numbers."""

import copy
import math

import pytest
import torch

from addnorm._util import jsonio
from addnorm.explorer import race
from addnorm.lab import Run, Text
from addnorm.lab.train import Training
from support.loading import ROOT, load

TEXT = Text("counting", "one two three four five six seven eight nine ten eleven twelve " * 40)


@pytest.fixture(scope="module")
def norms():
    return load("benchmarks/bench_norms.py")


@pytest.fixture(scope="module")
def bench_race():
    return load("benchmarks/bench_race.py")


def row(wiring, num_layers, lr, loss, losses, sizes=((1.0, 2.0), (1.5, 2.0)), shifts=((0.0, 0.0), (0.2, 0.4))):
    return {
        "wiring": wiring, "num_layers": num_layers, "lr": lr, "loss": loss, "losses": losses,
        "sizes": [list(one) for one in sizes], "shifts": [list(one) for one in shifts],
    }  # fmt: skip


def results(norms):
    """Return numbers with which every part of every claim but the first holds."""
    rows = []
    for n in norms.LAYERS:
        for wiring in norms.NORMED:
            rows += [row(wiring, n, 1e-3, 2.5, [4.0, 2.6]), row(wiring, n, 1e-2, 2.8, [4.0, 2.8])]
        for wiring in norms.BARE:
            rows += [
                row(wiring, n, 1e-3, 2.6, [4.0, 3.1, 2.7], sizes=((1.0, 2.0), (1.5, 6.0))),
                row(wiring, n, 1e-2, 3.2, [4.0, 3.2]),
            ]
    return {"unigram": 3.2, "rows": rows}


def change(numbers, wiring, lr, **values):
    for one in numbers["rows"]:
        if (one["wiring"], one["lr"]) == (wiring, lr):
            one.update(values)


# The beginning of a claim, its verdict, a change of the numbers, and a part of the verdict after the change.
CASES = {
    "The distribution": ("refuted", ("no_norm", 1e-3, {"shifts": [[0.0, 0.0], [0.3, 1.5]]}), "holds: no_norm, 6 / no_norm, 12;"),
    "With the norm": ("holds", ("pre_ln", 1e-3, {"sizes": [[1.0, 2.0], [0.4, 2.0]]}), "refuted: pre_ln, 6 / pre_ln, 12"),
    "Normalization speeds": ("holds", ("post_ln", 1e-3, {"losses": [4.0, 3.0, 3.0, 2.5]}),
                             "refuted: post_ln against no_norm, 6 layers / post_ln against rezero, 6 layers /"),
    "Normalization stabilizes": ("holds", ("rezero", 1e-2, {"loss": 2.7}), "refuted: pre_ln against rezero, 6 layers /"),
}  # fmt: skip


@pytest.mark.parametrize("start", CASES)
def test_norm_verdict_follows_from_the_numbers(norms, start):
    verdict, (wiring, lr, values), part = CASES[start]
    (claim,) = (one for one in norms.CLAIMS if one.claim.startswith(start))
    numbers = results(norms)
    assert claim.judge(numbers)["verdict"] == verdict
    change(numbers, wiring, lr, **values)
    assert part in claim.judge(numbers)["verdict"]


def test_every_norm_claim_has_a_case(norms):
    assert len(CASES) == len(norms.CLAIMS)


def test_reads_are_the_inputs_of_the_sublayers(norms, threads):
    threads(1)
    model = Training(Run("no_norm", 2, 16, 2, 8, 4, 3, every=0), TEXT).model
    probe = TEXT.held_out("test", 4, 8)[0]
    reads = norms.measure_reads(model, probe)
    with torch.no_grad():
        states = [model.embed(probe)]
        for connection in model.decoder.stack.connections:
            states.append(states[-1] + connection.sublayer(states[-1]))
    for k, x in enumerate(states[:-1]):
        tokens = x.double().flatten(0, 1)
        torch.testing.assert_close(reads.mean[k], tokens.mean(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(reads.std[k], tokens.std(0), rtol=1e-5, atol=1e-6)
        assert float(reads.size[k]) == pytest.approx(float(tokens.square().mean().sqrt()), rel=1e-5)


def test_shift_counts_the_first_standard_deviations(norms):
    first = norms.Reads(torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 4.0]]), torch.tensor([1.0]))
    now = norms.Reads(torch.tensor([[2.0, 2.0]]), torch.tensor([[9.0, 9.0]]), torch.tensor([1.0]))
    assert norms.shift(first, now).tolist() == pytest.approx([math.sqrt((2.0**2 + 1.0**2) / 2)])


def test_training_measures_at_every_step_of_the_protocol(norms, threads, monkeypatch):
    threads(1)
    monkeypatch.setattr(norms, "EVERY", 2)
    measured = norms.train(Run("pre_ln", 1, 16, 2, 8, 4, 5, 1e-2, 0, 0, every=0), TEXT)
    assert [len(measured[name]) for name in ("losses", "sizes", "shifts")] == [3, 3, 3]
    assert measured["shifts"][0] == [0.0, 0.0]
    assert min(measured["shifts"][1]) > 0
    assert measured["sizes"][0] == pytest.approx([1, 1], abs=1e-3)
    training = Training(Run("pre_ln", 1, 16, 2, 8, 4, 5, 1e-2, 0, 0, every=0), TEXT)
    training.finish()
    assert measured["loss"] == training.evaluate()["test"]


def test_rates_table_marks_the_best_rate_and_the_edge(norms):
    document = {
        "results": results(norms), "protocol": {"rates": [1e-3, 1e-2], "steps": 300, "seeds": [0]}, "commit": "0" * 40,
        "dirty": False, "date": "2026-01-01T00", "versions": {"torch": "2"},
    }  # fmt: skip
    table = norms.rates_section(document)
    assert r"| `pre_ln` | 6 | **2.5\*** | 2.8 |" in table
    assert "at the edge of the grid" in table
    wider = copy.deepcopy(document)
    wider["protocol"]["rates"].append(1e-4)
    wider["results"]["rows"] += [row("pre_ln", 6, 1e-4, 2.9, [4.0])]
    assert "| `pre_ln` | 6 | **2.5** | 2.8 | 2.9 |" in norms.rates_section(wider)


def stored(name):
    return jsonio.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def test_stored_norm_verdicts_follow_from_the_stored_numbers(norms):
    document = stored("norms")
    assert (document["complete"], document["dirty"]) == (True, False)
    assert norms.judge(document["results"]) == document["claims"]
    assert [*document["protocol"]["rates"]] == [*norms.RATES]


def test_race_opens_where_both_learn_and_teaches_where_post_ln_fails(bench_race):
    document = stored("race")
    assert document["dirty"] is False
    settings = race.parse({})[0].settings()
    assert {
        name: settings[name] for name in ("num_layers", "d_model", "nhead", "tokens", "batch", "steps")
    }.items() <= document["protocol"].items()
    assert bench_race.opening_rate(document) == race.OPENING_RATE == settings["lr"]
    assert bench_race.failing_rate(document) == race.FAILING_RATE
    with_warm_up = bench_race.losses(document, race.LESSON_WARM_UP)[race.FAILING_RATE]
    assert max(with_warm_up.values()) < document["entropy"] - 0.3, "with warm-up both learn"


def race_row(wiring, lr, loss, warm_up=0):
    return {"wiring": wiring, "lr": lr, "warm_up": warm_up, "loss": loss}


def test_opening_and_failing_rate_follow_from_the_losses(bench_race):
    rows = [
        race_row("post_ln", 1e-3, 2.7), race_row("pre_ln", 1e-3, 2.8), race_row("post_ln", 2e-3, 2.9), race_row("pre_ln", 2e-3, 2.6),
        race_row("post_ln", 3e-3, 3.2), race_row("pre_ln", 3e-3, 2.6), race_row("post_ln", 9e-3, 3.2), race_row("pre_ln", 9e-3, 3.2),
        race_row("post_ln", 3e-3, 2.5, 60), race_row("pre_ln", 3e-3, 2.5, 60),
    ]  # fmt: skip
    document = {"entropy": 3.25, "rows": rows}
    assert (bench_race.opening_rate(document), bench_race.failing_rate(document)) == (1e-3, 3e-3)
    rows[1]["loss"] = 3.0
    assert bench_race.opening_rate(document) == 2e-3


def test_race_losses_are_those_of_the_view(bench_race, monkeypatch, threads):
    threads(1)
    monkeypatch.setattr(bench_race, "default_text", lambda: TEXT)
    run = race.parse({"layers": 1, "steps": 3, "d_model": 16, "tokens": 8, "batch": 2, "seed": 5})[0]
    *_, end = race.run_race([run, run], TEXT)
    assert bench_race.train(run, 5) == end["racers"][0]["validation"]
