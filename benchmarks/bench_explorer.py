"""Response times of the explorer in headless Chromium on this machine. Writes results/explorer.json.

    python benchmarks/bench_explorer.py

flip    A digit is pressed in the stack view: the norm moves, the server computes a placement for the first time, and the
        verdict and every visible chart are drawn and laid out. Measured in the page, from the key's event to that layout.
trace   A number of the token is typed in the trace view: every step is computed, and the visible ones are drawn. Measured
        from the input's event. (Invisible charts and rows are drawn 40 ms after the last event.)
stale   Twenty digits are pressed faster than they can be answered: how many answers were drawn, and whether the last one is
right.

The screen adds up to 1/60 s to each frame. Parts of the flip: `compute` is the server's own time, `hand` the same forward
and backward in plain PyTorch without measurements, in this process, between the flips.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.progress import track
from rich.table import Table

from addnorm.bench import environment
from addnorm.bench.harness import Run, header, publish
from addnorm.bench.targets import Target
from addnorm.lab import InitProbe
from addnorm.lab.init_probe import PLACEMENTS

SCHEMA = 1
TARGETS = {"flip": 150.0, "trace": 16.0}  # milliseconds, of 95 in 100
STACK = {"S": 48, "d": 64, "T": 16}
ROUNDS = 40  # seeds, each with a flip to every other placement
TYPED = 300
WARM_UP = 20
PAUSE = 100  # milliseconds between two moves: painting one must not count for the next
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
    """Run the explorer in its own process, and yield its address."""
    command = [sys.executable, "-m", "addnorm", "explore", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            results = re.search(r"http://[\w.:]+", process.stdout.readline() if process.stdout else "")
            assert results, "the explorer did not start"
            yield results[0]
        finally:
            process.terminate()


def flips(page: Page, address: str, rounds: int) -> dict[str, list[float]]:
    """Return the times of every placement of `rounds` seeds, each for the first time; the first seed does not count."""
    names = [*PLACEMENTS]
    results: dict[str, list[float]] = {"total": [], "compute": [], "hand": []}
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
            by_hand = hand(InitProbe(name, STACK["S"], STACK["d"], STACK["T"], seed=seed))
            if seed:
                results["total"].append(total)
                results["compute"].append(timing)
                results["hand"].append(by_hand)
    return results


def hand(flip: InitProbe) -> float:
    """Return the milliseconds of forward and backward alone, with existing weights."""
    stack, x, v = flip.build()
    x.requires_grad_()
    start = time.perf_counter()
    torch.autograd.grad((stack(x) * v).sum(), [x, *stack.parameters()])
    return (time.perf_counter() - start) * 1e3


def typed(page: Page, address: str, count: int) -> dict[str, list[float]]:
    """Return the times of typing into tokens of three and of sixteen numbers."""
    results = {}
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
        results[f"d = {d}"] = times[WARM_UP:]
    return results


def stale(page: Page, address: str) -> dict[str, Any]:
    """Press twenty digits faster than they are answered; return what was drawn."""
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
    right = float(last) == InitProbe([*PLACEMENTS][int(keys[-1]) - 1], STACK["S"], seed=9001).measure()["stream"][-1]
    return {"asked": len(keys), "drawn": len(page.evaluate("() => drawn")), "last is right": right}


def spread(times: list[float]) -> dict[str, float]:
    """Return median, quartiles, 95th percentile, maximum and count of times in milliseconds."""
    cut = statistics.quantiles(times, n=20)
    return {
        "median": statistics.median(times), "q1": cut[4], "q3": cut[14], "p95": cut[-1], "most": max(times),
        "count": len(times),
    }  # fmt: skip


def judge(name: str, p95: float) -> dict[str, Any]:
    """Return the slowest 95th percentile beside its target."""
    target = Target(name, "<", TARGETS[name])
    return {"p95": p95, "target": target.bound, "met": target.met(p95)}


def main() -> int:
    """Measure, print, write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--typed", type=int, default=TYPED)
    options.add_argument("--out", type=Path, default=RESULTS / "explorer.json")
    options.add_argument("--force", action="store_true", help="publish the results of a busy machine, marked as such")
    given = options.parse_args()
    torch.set_num_threads(1)
    meter = environment.LoadMeter()
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
        **header(SCHEMA, Run({}, ended="done")), **environment.describe(), **meter.columns(),
        "chromium": version, "stack": STACK, **measured, "stale": overtaken,
        "targets": {name: judge(name, p95) for name, p95 in worst.items()},
    }  # fmt: skip
    table = Table("milliseconds", "median", "p95", "most", box=None, padding=(0, 3, 0, 0))
    for kind in ("flip", "trace"):
        for name, one in measured[kind].items():
            table.add_row(f"{kind}, {name}", *(f"{one[key]:.1f}" for key in ("median", "p95", "most")))
    Console().print(table)
    print(
        f"stale: {overtaken['asked']} asked, {overtaken['drawn']} drawn, the last is right: {overtaken['last is right']}"
    )
    return 0 if publish(document, given.out, force=given.force) else 1


if __name__ == "__main__":
    raise SystemExit(main())
