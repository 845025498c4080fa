"""Tests of the race: its events equal the lab's training, it may be iterated from any thread, and closing it cleans up."""

import json
import math
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import addnorm
from addnorm import lab
from addnorm._util.jsonio import to_jsonable
from addnorm.explorer import race as module
from addnorm.explorer.race import parse, run_race
from addnorm.lab.measure import BY_DEPTH
from addnorm.lab.train import Training, train
from support.browser import HOME
from support.lab_runs import TEXT

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"layers": 2, "d_model": 16, "tokens": 8, "batch": 4, "steps": 6}


def raced(on=TEXT, **settings):
    return [*run_race(parse({**SMALL, **settings}), on)]


def steps_of(events, racer):
    return [event for event in events if event["event"] == "step" and event["racer"] == racer]


@pytest.mark.parametrize("settings", [{}, {"left": "deepnorm", "right": "admin", "warm_up": 3, "seed": 5, "lr": 0.01}])
def test_race_equals_lab_runs_bitwise(settings):
    events = raced(**settings)
    assert [event["event"] for event in events] == ["start", *["step"] * 12, "end"]
    assert [event["racer"] for event in events[1:-1]] == [0, 1] * 6
    for k, run in enumerate(parse({**SMALL, **settings})):
        result = to_jsonable(train(run, TEXT))
        taken = steps_of(events, k)
        assert [step["step"] for step in taken] == [*range(6)]
        assert [step["loss"] for step in taken] == result["losses"]
        for name in ("logit_change", *BY_DEPTH):
            assert [step[name] for step in taken] == result["recorded"][name], name
        assert events[0]["racers"][k]["places"] == result["sites"]
        end = events[-1]["racers"][k]
        assert {name: end[name] for name in ("validation", "test", "diverged")} == {
            name: result[name] for name in ("validation", "test", "diverged")
        }


def test_race_start_event():
    start = raced(left="parallel", right="resi_dual", layers=3, steps=1)[0]
    assert start["settings"]["num_layers"] == 3
    assert start["text"] == TEXT.describe()
    left, right = start["racers"]
    model = Training(parse({**SMALL, "left": "parallel", "layers": 3})[0], TEXT).model
    assert left["parameters"] == sum(p.numel() for p in model.parameters())
    assert left["equation"] == addnorm.wirings.parallel().equation(3)
    assert (left["name"], right["wiring"]) == ("parallel", "resi_dual")
    assert (left["recording_error"], right["recording_error"]) == ("", "")


def test_race_of_one_wiring_has_two_names():
    events = raced(left="rezero", right="rezero")
    assert [racer["name"] for racer in events[0]["racers"]] == ["rezero (left)", "rezero (right)"]
    assert [{**step, "racer": 1} for step in steps_of(events, 0)] == steps_of(events, 1)
    assert any("rezero (left)" in text and "rezero (right)" in text for text in events[-1]["verdict"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"steps": 10, "warm_up": 11}, "warm_up is 11, expected at most steps = 10: the rate would never be reached."),
        ({"right": "residual_multiplier"}, "right is 'residual_multiplier', expected one of "),
        ({"lr": 0}, "lr is 0, expected a number from 1e-05 to 1."),
        ({"step": 1}, "the request has 'step', which is unknown, expected left, right, "),
    ],
)
def test_race_parse_rejects_wrong_params(settings, sentence):
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        parse(settings)


def test_race_rejects_short_text():
    with pytest.raises(ValueError, match=r"^text 'short' has 20 characters, "):
        run_race(parse(SMALL), lab.Text("short", "ab" * 10))


def test_race_continues_when_one_diverges():
    events = raced(left="no_norm", layers=8, lr=1.0, steps=4)
    left, right = (steps_of(events, racer) for racer in (0, 1))
    assert (len(left), len(right)) == (2, 4)
    loss, end = left[-1]["loss"], events[-1]["racers"][0]
    assert loss in ("NaN", "Infinity")
    assert (end["loss"], end["validation"], end["test"], end["diverged"], end["steps"]) == (loss, "NaN", "NaN", True, 2)
    assert any(text.startswith("1 of 1 run of no_norm") and "diverged" in text for text in events[-1]["verdict"])
    json.dumps(events, allow_nan=False)


def test_race_verdict_is_that_of_a_comparison():
    runs = parse({**SMALL, "lr": 0.01, "warm_up": 2})
    size = {"num_layers": 2, "d_model": 16, "nhead": module.HEADS, "tokens": 8, "batch": 4, "steps": 6, "every": 1}
    measured = [
        {name: value for name, value in train(run, TEXT).items() if name not in ("after", "ablation", "cost")}
        for run in runs
    ]
    protocol = lab.Protocol(rates=0.01, warm_ups=2, **size)
    comparison = lab.Comparison(("post_ln", "pre_ln"), protocol, measured, [], TEXT.describe())
    *_, end = run_race(runs, TEXT)
    assert end["verdict"] == [finding.claim for finding in comparison.verdict]
    assert len(end["verdict"]) >= 3


def hooks(model):
    return [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())] + [
        hook for p in model.parameters() for hook in (p._backward_hooks or {}).values()
    ]


@pytest.mark.parametrize("count", [1, 3, 5, 6])
def test_closing_a_race_removes_hooks(count, monkeypatch):
    models = []

    class Kept(Training):
        def __init__(self, *args):
            super().__init__(*args)
            models.append(self.model)

    monkeypatch.setattr(module, "Training", Kept)
    state = torch.get_rng_state()
    events = run_race(parse({**SMALL, "steps": 2}), TEXT)
    for _ in range(count):
        next(events)
    assert any(hooks(model) for model in models) == (count < 6), "while it runs a recorder listens"
    events.close()
    assert [hooks(model) for model in models] == [[], []]
    assert torch.equal(torch.get_rng_state(), state)
    assert next(events, None) is None


def test_races_in_threads_are_independent():
    settings = [{"seed": 0}, {"seed": 1, "left": "deepnorm", "right": "admin"}, {"seed": 2, "left": "rezero"}]

    def race(setting):
        events = raced(steps=3, **setting)
        for racer in events[-1]["racers"]:
            del racer["seconds"]
        return events

    alone = [*map(race, settings)]
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert [*pool.map(race, settings)] == alone
    finally:
        sys.setswitchinterval(0.005)


# The page's part of the race, in Chromium: its modules.


def test_page_reads_events_cut_anywhere(explorer):
    sent = (
        ': a comment\r\n\r\ndata: {"text": "é€😀", "loss": "NaN"}\r\n\r\nevent: x\ndata: {"lines":\ndata: 2}\n\n'
        'data:{"close": [1, null]}\r\rdata: {"never": "ended'
    )
    result = explorer.stack(HOME["stack"]).evaluate(
        """async (sent) => {
          const { events } = await import("/static/race/events.js");
          const bytes = new TextEncoder().encode(sent);
          const all = [];
          for (let size = 1; size <= bytes.length; size += 1) {
            const pieces = [];
            for (let k = 0; k < bytes.length; k += size) pieces.push(bytes.slice(k, k + size));
            const body = new ReadableStream({ pull: (to) => (pieces.length ? to.enqueue(pieces.shift()) : to.close()) });
            const read = [];
            for await (const event of events(new Response(body))) read.push(event);
            all.push(read);
          }
          return all;
        }""",
        sent,
    )
    assert len(result) == len(sent.encode())
    for read in result:
        assert math.isnan(read[0].pop("loss"))
        assert read == [{"text": "é€😀"}, {"lines": 2}, {"close": [1, None]}]


def test_page_reports_broken_connection(explorer):
    results = explorer.stack(HOME["stack"]).evaluate(
        """async () => {
          const { events } = await import("/static/race/events.js");
          const results = [];
          for (const error of [new TypeError("network error"), new DOMException("stopped", "AbortError")]) {
            const pieces = [new TextEncoder().encode("data: 1\\n\\n")];
            const body = new ReadableStream({ pull: (to) => (pieces.length ? to.enqueue(pieces.shift()) : to.error(error)) });
            try {
              for await (const event of events(new Response(body))) results.push(event);
            } catch (caught) {
              results.push(`${caught.name}: ${caught.message}`);
            }
          }
          return results;
        }"""
    )
    broke = "Error: The connection to the server broke. Is `addnorm explore` still running in its terminal?"
    assert results == [1, broke, 1, "AbortError: stopped"]
