"""How quickly the explorer answers, in headless Chromium on this machine, into results/explorer.json.

    python benchmarks/bench_explorer.py

flip    a digit is pressed in the stack view: the norm moves, the server computes a placement that it has not seen, and the
        verdict and every chart in sight are drawn and laid out. Measured in the page, from the key's event to that layout.
trace   a number of the token is typed in the trace view: every step is computed, and those in sight are drawn. The same, from
        the input's event. (Charts and rows out of sight are drawn when the hand rests for 40 ms.)
stale   twenty digits are pressed faster than they can be answered: how many answers were drawn, and whether the last is the last.

A frame waits for the screen besides, up to 1/60 s, which is the screen's. The flip's parts: `compute` is the server's own time,
`hand` the same forward and backward in plain PyTorch without any measuring, in this process, between the flips.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.progress import track
from rich.table import Table

from addnorm.bench import machine
from addnorm.lab import Flip
from addnorm.lab.init_probe import PLACEMENTS

RESULTS = Path(__file__).parent / "results" / "explorer.json"
SCHEMA = 1
TARGETS = {"flip": 150.0, "trace": 16.0}  # milliseconds, of 95 in 100
STACK = {"S": 48, "d": 64, "T": 16}
ROUNDS = 40  # seeds, each with a flip to every other placement
TYPED = 300
WARM_UP = 20
PAUSE = 100  # milliseconds between two moves, as of a quick hand: what is painted of one is not the next one's time
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip

# In the page: from an event until what it changed is laid out.
FLIP = """digit => new Promise(done => {
    const panel = document.querySelector('#panel-stack');
    const began = performance.now();
    new MutationObserver((_, watching) => {
        watching.disconnect();
        void document.body.offsetHeight;
        done(performance.now() - began);
    }).observe(panel, {attributes: true, attributeFilter: ['data-drawn']});
    document.body.dispatchEvent(new KeyboardEvent('keydown', {key: digit, bubbles: true}));
})"""
TYPE = """text => {
    const input = document.querySelector('#panel-trace input[type=text], #panel-trace input:not([type])');
    input.value = text;
    const began = performance.now();
    input.dispatchEvent(new Event('input', {bubbles: true}));
    void document.body.offsetHeight;
    return performance.now() - began;
}"""
SHOWN = "() => [...document.querySelectorAll('#panel-trace [data-step]')].length"


@contextmanager
def served() -> Iterator[str]:
    """The explorer in a process of its own."""
    command = [sys.executable, "-m", "addnorm.cli", "explore", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            found = re.search(r"http://[\w.:]+", process.stdout.readline() if process.stdout else "")
            assert found, "the explorer did not start"
            yield found[0]
        finally:
            process.terminate()


def flips(page: Page, address: str, rounds: int) -> dict[str, list[float]]:
    """Every placement of as many seeds, each for the first time; the first seed is not counted."""
    names = [*PLACEMENTS]
    found: dict[str, list[float]] = {"total": [], "compute": [], "hand": []}
    for seed in track(range(rounds + 1), "flip", console=Console(stderr=True)):
        page.goto("about:blank")
        page.goto(f"{address}/#v=1&S={STACK['S']}&d={STACK['d']}&T={STACK['T']}&seed={seed}")
        page.wait_for_selector("#panel-stack[data-ready]")
        page.wait_for_timeout(100)
        for name in names[1:]:
            page.wait_for_timeout(PAUSE)
            total = page.evaluate(FLIP, str(names.index(name) + 1))
            timing = page.evaluate(
                "() => performance.getEntriesByName(location.origin + '/api/stack').at(-1).serverTiming[0].duration"
            )
            by_hand = hand(Flip(name, STACK["S"], STACK["d"], STACK["T"], seed=seed))
            if seed:
                found["total"].append(total)
                found["compute"].append(timing)
                found["hand"].append(by_hand)
    return found


def hand(flip: Flip) -> float:
    """Milliseconds of forward and backward alone, with the weights there already."""
    stack, x, v = flip.build()
    x.requires_grad_()
    start = time.perf_counter()
    torch.autograd.grad((stack(x) * v).sum(), [x, *stack.parameters()])
    return (time.perf_counter() - start) * 1e3


def typed(page: Page, address: str, count: int) -> dict[str, list[float]]:
    """Tokens of three numbers and of sixteen, one digit after the other."""
    found = {}
    for d in (3, 16):
        ones = ",".join(["1"] * d)
        page.goto("about:blank")
        page.goto(f"{address}/#v=1&view=trace&x={ones}&F={ones}")
        page.wait_for_selector("#panel-trace [data-step]")
        times = []
        for k in range(count + WARM_UP):
            page.wait_for_timeout(PAUSE)
            times.append(page.evaluate(TYPE, f"{k / 7:.3f},{','.join(str((j * k) % 11 - 5) for j in range(1, d))}"))
        assert page.evaluate(SHOWN) > 15, "the trace is not shown"
        found[f"d = {d}"] = times[WARM_UP:]
    return found


def stale(page: Page, address: str) -> dict[str, Any]:
    """Twenty flips, faster than they are answered."""
    page.goto("about:blank")
    page.goto(f"{address}/#v=1&S={STACK['S']}&seed=9001")
    page.wait_for_selector("#panel-stack[data-ready]")
    page.evaluate("""() => {
        window.drawn = [];
        const watching = new MutationObserver(() => drawn.push(1));
        watching.observe(document.querySelector('#panel-stack'), {attributeFilter: ['data-drawn']});
    }""")
    keys = ("23456" * 4)[:20]
    for key in keys:
        page.evaluate("key => document.body.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}))", key)
        page.wait_for_timeout(10)
    page.wait_for_timeout(1500)
    last = page.evaluate("() => document.querySelector('#chart-stream .plot .mark[data-index=\"48\"]').dataset.value")
    right = float(last) == Flip([*PLACEMENTS][int(keys[-1]) - 1], STACK["S"], seed=9001).measure()["stream"][-1]
    return {"asked": len(keys), "drawn": len(page.evaluate("() => drawn")), "last is right": right}


def spread(times: list[float]) -> dict[str, float]:
    """What is told of many times, in milliseconds."""
    cut = statistics.quantiles(times, n=20)
    return {"median": statistics.median(times), "p95": cut[-1], "most": max(times), "count": len(times)}


def main() -> int:
    """Measures, prints, writes."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--typed", type=int, default=TYPED)
    options.add_argument("--out", type=Path, default=RESULTS)
    given = options.parse_args()
    torch.set_num_threads(1)
    load = machine.load()
    with served() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        flip = flips(page, address, given.rounds)
        trace = typed(page, address, given.typed)
        overtaken = stale(page, address)
        version = browser.version
        browser.close()
    measured = {
        "flip": {name: spread(times) for name, times in flip.items()},
        "trace": {name: spread(times) for name, times in trace.items()},
    }
    worst = {"flip": measured["flip"]["total"]["p95"], "trace": max(one["p95"] for one in measured["trace"].values())}
    document = {
        "schema": SCHEMA, "date": datetime.now(UTC).isoformat(timespec="seconds"), **machine.environment(), "load": load,
        "chromium": version, "stack": STACK, **measured, "stale": overtaken,
        "targets": {name: {"p95": worst[name], "target": most, "met": worst[name] < most} for name, most in TARGETS.items()},
    }  # fmt: skip
    temporary = given.out.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    temporary.replace(given.out)
    table = Table("milliseconds", "median", "p95", "most", box=None, padding=(0, 3, 0, 0))
    for kind in ("flip", "trace"):
        for name, one in measured[kind].items():
            table.add_row(f"{kind}, {name}", *(f"{one[key]:.1f}" for key in ("median", "p95", "most")))
    Console().print(table)
    print(
        f"stale: {overtaken['asked']} asked, {overtaken['drawn']} drawn, the last is right: {overtaken['last is right']}"
    )
    print(f"Written: {given.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
