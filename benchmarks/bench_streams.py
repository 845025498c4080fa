"""The boundary between two sublayers of a model with four streams, against transformers' own modules.

python benchmarks/bench_streams.py [--threads 2] [--rounds 21] [--quick]

A call is what transformers 5.23 does for DeepSeek V4 between a sublayer's output and the next sublayer's input: the write, the
projection, the gates with 20 Sinkhorn iterations, the read and its RMSNorm. With backward all gradients are computed. README.md
in this folder has the protocol. Bytes that must move: docs/several_streams.md.
"""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import harness
import torch
from harness import Benchmark, Case, Results, Row, digits, markdown, right, times_as_fast
from torch import nn

import addnorm
from addnorm.bench import timing
from addnorm.bench.harness import by_case
from addnorm.bench.targets import Target

N = 4
WIDTHS, ROWS = (512, 2048, 4096), (1, 32, 512, 4096)
JOBS = {"forward": "forward", "forward_backward": "forward + backward"}
FIELDS = ("job", "threads", "rows", "d", "dtype")
COPY_BYTES = 256 * 2**20
MOST_DIFFERENT = {"float32": 1e-5, "bfloat16": 0.03}  # relative norms; transformers rounds coefficients to bfloat16
# Values that must be read or written, times d: X, w, X', r forward; dX', X, w, dr, dX, dw backward, after the forward.
FORWARD_MOVES, BACKWARD_MOVES = 2 * N + 2, 3 * N + 3


def cases(threads: int) -> list[Case]:
    """Return all cases, the smallest last."""
    return [
        Case(job=job, threads=threads, rows=rows, d=d, dtype=dtype)
        for rows in reversed(ROWS) for d in reversed(WIDTHS) for dtype in ("float32", "bfloat16") for job in JOBS
    ]  # fmt: skip


class Boundary(nn.Module):
    """What stands between two sublayers, in transformers' own operators: `DeepseekV4DecoderLayer.forward`, cut there."""

    def __init__(self, d: int) -> None:
        super().__init__()
        from transformers import DeepseekV4Config
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

        config = DeepseekV4Config(hidden_size=d, hc_mult=N)
        self.hc = modeling.DeepseekV4HyperConnection(config)
        self.norm = modeling.DeepseekV4RMSNorm(d, eps=config.rms_norm_eps)
        for name, parameter in self.hc.named_parameters():
            nn.init.normal_(parameter, std=0.02 if name == "fn" else 0.5)

    def forward(self, streams: Any, output: Any, post: Any, comb: Any) -> tuple[Any, ...]:
        """Return the next read, the new streams and the next coefficients."""
        dtype = streams.dtype
        streams = post.to(dtype).unsqueeze(-1) * output.unsqueeze(-2) + torch.matmul(
            comb.to(dtype).transpose(-1, -2), streams
        )
        post, comb, collapsed = self.hc(streams)
        return self.norm(collapsed), streams, post, comb


class Fused(nn.Module):
    """The same with `add_norm_streams`, with the parameters of a `Boundary`."""

    def __init__(self, source: Boundary, d: int) -> None:
        super().__init__()
        from addnorm.nn.connection import FIRST
        from addnorm.wirings.coefficients import ManifoldConnection

        hc = source.hc
        self.coefficients = ManifoldConnection(
            d, N, 1, FIRST, iterations=hc.hc_sinkhorn_iters, eps=hc.hc_eps, norm_eps=hc.input_norm.eps
        )
        self.coefficients.load_transformers(hc)
        self.weight, self.eps = nn.Parameter(source.norm.weight.detach().clone()), source.norm.variance_epsilon

    def forward(self, streams: Any, output: Any, inject: Any, mix: Any) -> tuple[Any, ...]:
        """Return the next read, the new streams and the next coefficients."""
        step = addnorm.add_norm_streams(
            streams, output, mix=mix, inject=inject, gates=self.coefficients.gates(), weight=self.weight, eps=self.eps,
            norm="rms",
        )  # fmt: skip
        return step.read, step.streams, step.inject, step.mix


def measure(case: Case, *, rounds: int, compiled: bool = True) -> Results:
    """Return the times of a case, and the errors against float64 of both."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    shape = (1, case.rows, N, case.d)
    streams = (torch.randn(shape) * torch.linspace(0.5, 2, N)[:, None]).to(dtype)
    output = torch.randn(1, case.rows, case.d).to(dtype)
    post, comb = torch.rand(1, case.rows, N) * 2, torch.softmax(torch.randn(1, case.rows, N, N), -1)
    plain = Boundary(case.d)
    fused = Fused(plain, case.d)
    plain.norm.to(dtype)
    training = case.job == "forward_backward"
    cotangents = [
        torch.randn(output.shape).to(dtype),
        torch.randn(shape).to(dtype),
        torch.randn_like(post),
        torch.randn_like(comb),
    ]

    def call(module: Any, *coefficients: Any) -> Any:
        inputs = [t.detach().requires_grad_(training) for t in (streams, output, *coefficients)]
        parameters = [*module.parameters()]
        transposed = module is fused

        def once() -> Any:
            if not training:
                with torch.no_grad():
                    return module(*inputs)
            outputs = module(*inputs)
            grads = [*cotangents[:3], cotangents[3].mT if transposed else cotangents[3]]
            return torch.autograd.grad(outputs, [*inputs, *parameters], grads)

        return once

    calls = {"addnorm": call(fused, post, comb.mT.contiguous()), "transformers": call(plain, post, comb)}
    expected, found = (
        calls["transformers"]()[0].double(),
        calls["addnorm"]()[0].double(),
    )  # the read, or the gradient of X
    if (found - expected).norm() > MOST_DIFFERENT[case.dtype] * expected.norm():
        raise ValueError(
            f"results differ by {float((found - expected).norm() / expected.norm()):.2g} from those of transformers."
        )
    if compiled:
        torch._dynamo.reset()
        calls["compile"] = call(torch.compile(plain, dynamic=False), post, comb)
    errors: dict[str, Exception] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = timing.interleaved(calls, rounds=rounds, may_fail=("compile",), errors=errors)
    return {
        "rows": [case.row(variant=name, **row) for name, row in rows.items()],
        "failures": [harness.failure(case, name, error) for name, error in errors.items()],
        "copies": [case.row(**_copy())],
    }


def _copy() -> Row:
    """Return the bandwidth of a copy far larger than the caches, bytes read and written."""
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    rows = timing.interleaved({"copy": lambda: target.copy_(source)}, rounds=7, seconds=0.5)
    return {"gigabytes_per_second": 2 * COPY_BYTES / rows["copy"]["median_us"] / 1e3}


def least_us(row: Row, gigabytes_per_second: float) -> float:
    """Return the time that the bytes that must move take at the bandwidth of a copy."""
    values = FORWARD_MOVES + (BACKWARD_MOVES if row["job"] == "forward_backward" else 0)
    return float(row["rows"] * row["d"] * values * (4 if row["dtype"] == "float32" else 2) / gigabytes_per_second / 1e3)


def summarize(results: Results) -> list[Row]:
    """Return the issue's targets: means over 32 rows and more, the lowest at one row, and the lowest against torch.compile."""
    cells = by_case(results["rows"], FIELDS)
    numbers = []
    for job, title in JOBS.items():
        times = {case: rows for case, rows in cells.items() if case.job == job and "transformers" in rows}
        many = [_ratio(rows, "transformers") for case, rows in times.items() if case.rows >= 32]
        one = [_ratio(rows, "transformers") for case, rows in times.items() if case.rows == 1]
        compiled = [_ratio(rows, "compile") for rows in times.values() if "compile" in rows]
        target = 4.0 if job == "forward" else 3.0
        numbers += [
            _number(f"{title}: mean, 32 rows and more", statistics.geometric_mean(many) if many else None, target),
            _number(f"{title}: lowest at one row", min(one, default=None), 3.0),
            _number(f"{title}: lowest against torch.compile", min(compiled, default=None), 1.0),
        ]
    return numbers


def _number(name: str, value: float | None, target: float) -> Row:
    return Target(name, ">=", target).row(value)


def _ratio(rows: dict[str, Row], peer: str) -> float:
    return float(rows[peer]["median_us"] / rows["addnorm"]["median_us"])


def section(document: harness.Document) -> str:
    """Return the page's section: the targets, and a table with the bound that the bytes to move set."""
    copies = {Case.of(row, FIELDS): row["gigabytes_per_second"] for row in document["copies"]}
    lines = []
    for case, rows in sorted(
        by_case(document["rows"], FIELDS).items(), key=lambda item: (item[0].job, item[0].rows, item[0].d)
    ):
        bound = least_us(rows["addnorm"], copies[case])
        share = bound / rows["addnorm"]["median_us"]
        lines.append([
            f"{case.rows} x {N} x {case.d} {case.dtype}", JOBS[case.job], times_as_fast(rows, "transformers"),
            times_as_fast(rows, "compile", microseconds=False), f"{digits(bound)} ({100 * share:.0f} %)",
        ])  # fmt: skip
    head: list[Any] = [
        *right("streams"),
        "job",
        *right("x transformers (µs)", "x torch.compile", "bytes / bandwidth, µs"),
    ]
    numbers = [
        [
            one["name"],
            "" if one["value"] is None else digits(one["value"]),
            f"{one['compare']} {one['target']:g}",
            "yes" if one["met"] else "**no**",
        ]
        for one in document["summary"]
    ]
    targets: list[Any] = ["times as fast as transformers", *right("value", "target"), "met"]
    return f"{markdown(targets, numbers)}\n\n{markdown(head, lines)}\n\n{harness.headline(document)}."


BENCHMARK = Benchmark(
    name="streams",
    about="the boundary of four streams, against transformers' DeepSeek V4",
    fields=FIELDS,
    cases=cases,
    measure=measure,
    summarize=summarize,
    title=lambda case: f"{JOBS[case.job]}, {case.rows} x {N} x {case.d} {case.dtype}",
    parts=("failures", "copies", "rows"),
)

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
