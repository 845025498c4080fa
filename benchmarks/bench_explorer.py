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

import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from playwright.sync_api import Page, sync_playwright

from addnorm.bench.case import Case, Document, Results, Row, grid
from addnorm.bench.harness import Benchmark
from addnorm.bench.pages import markdown
from addnorm.bench.script import main
from addnorm.bench.targets import Target, value
from addnorm.lab import InitProbe
from addnorm.lab.init_probe import PLACEMENTS

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
def served() -> Iterator[tuple[Any, str]]:
    """Run the explorer in its own process, and yield a browser and the explorer's address."""
    command = [sys.executable, "-m", "addnorm", "explore", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, sync_playwright() as playwright:
        try:
            results = re.search(r"http://[\w.:]+", process.stdout.readline() if process.stdout else "")
            assert results, "the explorer did not start"
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
            yield browser, results[0]
            browser.close()
        finally:
            process.terminate()


def flips(page: Page, address: str, rounds: int) -> dict[str, list[float]]:
    """Return the times of every placement of `rounds` seeds, each for the first time; the first seed does not count."""
    names = [*PLACEMENTS]
    results: dict[str, list[float]] = {"total": [], "compute": [], "hand": []}
    for seed in range(rounds + 1):
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


def type_numbers(page: Page, address: str, count: int) -> dict[str, list[float]]:
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


def stale(page: Page, address: str) -> Row:
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


def spread(times: list[float]) -> Row:
    """Return median, quartiles, 95th percentile, maximum and count of times in milliseconds."""
    cut = statistics.quantiles(times, n=20)
    return {
        "median": statistics.median(times), "q1": cut[4], "q3": cut[14], "p95": cut[-1], "most": max(times),
        "count": len(times),
    }  # fmt: skip


def measure(case: Case, *, rounds: int, typed: int) -> Results:
    """Return the times of a part."""
    with served() as (browser, address):
        page, about = browser.new_page(viewport={"width": 1440, "height": 900}), [{"chromium": browser.version}]
        if case.part == "stale":
            return {"stale": [stale(page, address)], "about": about}
        times = flips(page, address, rounds) if case.part == "flip" else type_numbers(page, address, typed)
    return {"rows": [case.row(variant=name, **spread(some)) for name, some in times.items()], "about": about}


def finish(results: Results, head: Document) -> Document:
    """Return the rows, what became of the burst, and the browser."""
    return {"chromium": results["about"][0]["chromium"], "stack": STACK, **results} if results["about"] else {**results}


def report(document: Document) -> str:
    """Return the times in milliseconds, and what became of the burst."""
    lines = [
        {"milliseconds": f"{row['part']}, {row['variant']}", **{key: f"{row[key]:.1f}" for key in ("median", "p95", "most")}}
        for row in document["rows"]
    ]  # fmt: skip
    return f"{markdown(lines)}\n\nstale: {document['stale']}"


ANSWER = "95 of 100 answers, ms"
TARGETS = [
    Target(f"the norm moves: {ANSWER}", "<", 150.0, value("total", "p95"), max),
    *(Target(f"a digit of a token: {ANSWER}, d = {d}", "<", 16.0, value(f"d = {d}", "p95"), max) for d in (3, 16)),
]
BENCHMARK = Benchmark(
    "explorer", ("part",), grid(part=("flip", "trace", "stale")), measure, lambda case: case.part, TARGETS,
    ("about", "stale", "rows"), options={"typed": TYPED}, finish=finish, report=report, threads=1, rounds=ROUNDS,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
