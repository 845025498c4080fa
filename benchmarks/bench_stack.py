"""Whole encoders: fused, in plain PyTorch, and as torch.nn.TransformerEncoder. Writes results/stack.json.

All three have equal weights. `plain` is what most people write, x = x + f(norm(x)) or x = norm(x + f(x)), with torch.nn.LayerNorm
over the very modules of addnorm's attention and feed-forward: it differs in the Add & Norm and in nothing else. `torch` is
PyTorch's module, in inference with its fast path. Ratios are taken round by round. README.md in this folder has the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import geometric_mean

import torch
from stacks import JOBS, Plain
from torch import Tensor, nn

from addnorm import nn as addnorm_nn
from addnorm.bench import timing
from addnorm.bench.case import Case, Document, Results, Row, grid
from addnorm.bench.harness import Benchmark
from addnorm.bench.pages import digits, interval, markdown, merge, targets_section
from addnorm.bench.script import main
from addnorm.bench.targets import Target, has, value
from addnorm.fusion.benchmark import saved_bytes

LAYERS = 4
HEAD_DIM = 64
LEAST = 0.95
SECONDS = 8.0  # of all rounds of a case
PEERS = {"plain": "plain PyTorch", "torch": "torch.nn.TransformerEncoder"}
CASES = grid(
    wiring=("pre_ln", "post_ln"), job=JOBS, d=(64, 256, 768), batch__tokens=((1, 1), (1, 128), (16, 128))
)  # fmt: skip


def variants(case: Case) -> tuple[dict[str, nn.Module], Tensor, Tensor]:
    """Return the three modules, an input, and a gradient of the output."""
    torch.manual_seed(0)
    pre = case.wiring == "pre_ln"
    layer = nn.TransformerEncoderLayer(
        case.d, case.d // HEAD_DIM, 4 * case.d, dropout=0.0, batch_first=True, norm_first=pre
    )
    theirs = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(case.d) if pre else None, enable_nested_tensor=False)
    encoder = addnorm_nn.from_torch(theirs)
    assert isinstance(encoder, addnorm_nn.Encoder)
    # Copies of weights lie elsewhere in memory, which alone can make several per cent. A timed loop follows an untimed call of
    # the same variant, so weights that two variants share are in the cache for both.
    modules = {"addnorm": encoder, "plain": Plain(encoder.stack), "torch": theirs}
    for module in modules.values():
        module.train(case.job == "training")
    shape = (case.batch, case.tokens, case.d)
    return modules, torch.randn(shape, requires_grad=case.job == "training"), torch.randn(shape)


def measure(case: Case, *, rounds: int) -> Results:
    """Return a row for each variant. Their outputs are compared first.

    Raises:
        AssertionError: the outputs differ by more than round-off.
    """
    modules, x, dy = variants(case)
    with torch.no_grad():
        outputs = {name: module(x) for name, module in modules.items()}
    for name in PEERS:
        torch.testing.assert_close(outputs["addnorm"], outputs[name], rtol=1e-4, atol=1e-4)
    grad, training = torch.autograd.grad, case.job == "training"

    def step(module: nn.Module) -> object:
        with torch.set_grad_enabled(training):
            y = module(x)
        return grad(y, [x, *module.parameters()], dy) if training else y

    calls = {name: partial(step, module) for name, module in modules.items()}
    results = timing.measure(case, calls, rounds, seconds=SECONDS, peer="addnorm")
    for row in results["rows"] if training else []:
        module = modules[row["variant"]]
        row["saved_bytes"] = saved_bytes(partial(module, x), module, x)
    return results


def speed(peer: str, rows: Mapping[str, Row]) -> float | None:
    """Return how many times as fast addnorm is as a peer, from the peer's row."""
    return 1 / rows[peer]["paired_ratio"] if peer in rows else None


def share_of_bytes(peer: str, rows: Mapping[str, Row]) -> float | None:
    """Return the share of a peer's saved bytes that addnorm saves."""
    ours, theirs = (value(name, "saved_bytes")(rows) for name in ("addnorm", peer))
    return None if ours is None or theirs is None else ours / theirs


TARGETS = [
    target for job, title in JOBS.items() for peer, name in PEERS.items() for target in (
        Target(f"{title}: lowest, against {name}", ">=", LEAST, partial(speed, peer), min, has(job=job)),
        Target(f"{title}: mean, against {name}", ">=", None, partial(speed, peer), geometric_mean, has(job=job)),
    )
] + [
    Target(f"saved bytes: highest share of {name}'s", "<=", None, partial(share_of_bytes, peer), max)
    for peer, name in PEERS.items()
]  # fmt: skip


def section(document: Document) -> str:
    """Return the table of speeds: a line a size and peer, a column a wiring and job."""

    def cell(peer: str, case: Case, rows: Mapping[str, Row]) -> dict[str, str]:
        times = " / ".join(digits(rows[name]["median_us"]) for name in ("addnorm", peer))
        return {f"{case.wiring}, {JOBS[case.job]}": f"{interval(rows[peer], inverse=True)} ({times})"}

    lines = [
        {"compared with": name, **line} for peer, name in PEERS.items() for line in merge(
            BENCHMARK.by_case(document), lambda case: {"batch x tokens x d": f"{case.batch} x {case.tokens} x {case.d}"},
            partial(cell, peer),
        )
    ]  # fmt: skip
    return f"Times as fast (95% interval; median microseconds: addnorm / the other):\n\n{markdown(lines)}"


BENCHMARK = Benchmark(
    "stack", ("wiring", "job", "batch", "tokens", "d", "threads"), CASES, measure,
    lambda case: f"{case.wiring} {JOBS[case.job]}, {case.batch} x {case.tokens} x {case.d}", TARGETS,
    protocol={"layers": LAYERS, "head_dim": HEAD_DIM, "dim_feedforward": "4 d", "dropout": 0.0, "dtype": "float32",
              "cell_seconds": SECONDS},
    sections={"docs/performance.md#stack": section, "docs/performance.md#stack-targets": targets_section}, rounds=61,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
