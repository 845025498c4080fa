"""The boundary between two sublayers of a model with four streams, against transformers' own modules.

A call is what transformers 5.23 does for DeepSeek V4 between a sublayer's output and the next sublayer's input: the write, the
projection, the gates with 20 Sinkhorn iterations, the read and its RMSNorm. With backward all gradients are computed. README.md
in this folder has the protocol. Bytes that must move: docs/several_streams.md.
"""

from __future__ import annotations

import warnings
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from torch import nn

import addnorm
from addnorm.bench import timing
from addnorm.bench.case import Call, Case, Document, Results, Target, by_case, grid, has, ratio
from addnorm.bench.harness import Benchmark, main
from addnorm.bench.pages import digits, markdown, quotient, targets_section
from addnorm.nn.connection import FIRST
from addnorm.stream.dataflow.replay import relative_error
from addnorm.wirings.coefficients import ManifoldConnection

N = 4
JOBS = {"forward": "forward", "forward_backward": "forward + backward"}
CASES = grid(rows=(1, 32, 512, 4096), d=(512, 2048, 4096), dtype=("float32", "bfloat16"), job=JOBS)
COPY_BYTES = 256 * 2**20
MOST_DIFFERENT = {"float32": 1e-5, "bfloat16": 0.03}  # relative norms; transformers rounds coefficients to bfloat16
# Values that must be read or written, times d: X, w, X', r forward; dX', X, w, dr, dX, dw backward, after the forward.
MOVES = {"forward": 2 * N + 2, "forward_backward": 5 * N + 5}


class Boundary(nn.Module):
    """The write, read and norm between two sublayers, in transformers' own operators, from `DeepseekV4DecoderLayer.forward`."""

    def __init__(self, d: int) -> None:
        super().__init__()
        from transformers import DeepseekV4Config
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

        config = DeepseekV4Config(hidden_size=d, hc_mult=N)
        self.hc = modeling.DeepseekV4HyperConnection(config)
        self.norm = modeling.DeepseekV4RMSNorm(d, eps=config.rms_norm_eps)
        for parameter in self.hc.parameters():
            parameter.data = torch.randn_like(parameter, dtype=torch.float32) * (0.02 if parameter.dim() > 1 else 0.5)

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


def measure(case: Case, *, rounds: int, compile: bool = True) -> Results:  # the name of the option
    """Return the times of a case. Both results are compared first.

    Raises:
        ValueError: they differ by more than round-off.
    """
    torch.manual_seed(0)
    dtype, training = getattr(torch, case.dtype), case.job == "forward_backward"
    shape = (1, case.rows, N, case.d)
    streams = (torch.randn(shape) * torch.linspace(0.5, 2, N)[:, None]).to(dtype)
    output = torch.randn(1, case.rows, case.d).to(dtype)
    post, comb = torch.rand(1, case.rows, N) * 2, torch.softmax(torch.randn(1, case.rows, N, N), -1)
    plain = Boundary(case.d)
    fused = Fused(plain, case.d)
    plain.norm.to(dtype)
    cotangents = [torch.randn_like(t) for t in (output, streams, post, comb)]

    def call(module: Any) -> Call:
        mixes = [t.mT if module is fused else t for t in (comb, cotangents[3])]  # transformers' A is transposed
        inputs = [t.detach().contiguous().requires_grad_(training) for t in (streams, output, post, mixes[0])]
        wanted = [*inputs, *module.parameters()] if training else []
        return timing.step(module, inputs, [*cotangents[:3], mixes[1]], wanted)

    makers = {"addnorm": partial(call, fused), "transformers": partial(call, plain)}
    found, expected = (make()()[0] for make in makers.values())  # the read, or the gradient of X
    difference, most = relative_error(found.detach(), expected), MOST_DIFFERENT[case.dtype]
    if not difference <= most:
        raise ValueError(
            f"the results differ by {difference:.2g} from those of transformers, expected at most {most:g}."
        )
    if compile:
        torch._dynamo.reset()
        makers["compile"] = partial(call, torch.compile(plain, dynamic=False))
    with warnings.catch_warnings(action="ignore"):
        results = timing.compare(case, makers, rounds, ("compile",))
    n = COPY_BYTES // 4  # far larger than the caches
    (copied,) = timing.measure(case, {"copy": partial(torch.empty(n).copy_, torch.ones(n))}, rounds=7, seconds=0.5)
    rate = 2 * COPY_BYTES / copied["median_us"] / 1e3  # bytes read and written
    return {**results, "copies": [case.row(gigabytes_per_second=rate)]}


def least_us(case: Case, gigabytes_per_second: float) -> float:
    """Return the time that the bytes that must move take at the bandwidth of a copy."""
    size = getattr(torch, case.dtype).itemsize
    return float(case.rows * case.d * MOVES[case.job] * size / gigabytes_per_second / 1e3)


TARGETS = [
    target for job, title in JOBS.items() for peer in [ratio("addnorm", "transformers")] for target in (
        Target(f"{title}: mean, 32 rows and more", ">=", 4.0 if job == "forward" else 3.0, peer, geometric_mean,
             has(job=job, rows=range(32, 2**31)),
             why="transformers moves the streams once for each of its operators"),
        Target(f"{title}: lowest at one row", ">=", 3.0, peer, min, has(job=job, rows=1), why="one call instead of many"),
        Target(f"{title}: lowest against torch.compile", ">=", 1.0, ratio("addnorm", "compile"), min, has(job=job),
               why="never slower"),
    )
]  # fmt: skip


def section(document: Document) -> str:
    """Return the page's section: a table with the bound that the bytes to move set, and the targets."""
    copies = dict(by_case(document["copies"], BENCHMARK.fields))
    cases = sorted(BENCHMARK.by_case(document), key=lambda one: (one[0].job, one[0].rows, one[0].d))
    table = markdown(
        {
            "streams": f"{case.rows} x {N} x {case.d} {case.dtype}", "job": JOBS[case.job],
            "x transformers (µs)": quotient(rows, "transformers", times=True), "x torch.compile": quotient(rows, "compile"),
            "bytes / bandwidth, µs": f"{digits(bound)} ({bound / rows['addnorm']['median_us']:.0%})",
        }
        for case, rows in cases for bound in [least_us(case, copies[case][""]["gigabytes_per_second"])]
    )  # fmt: skip
    return f"{table}\n\nTimes as fast as transformers:\n\n{targets_section(document)}"


BENCHMARK = Benchmark(
    "streams",
    CASES,
    measure,
    targets=TARGETS,
    parts=("failures", "copies", "rows"),
    options={"compile": True},
    sections={"docs/several_streams.md#streams": section},
)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
