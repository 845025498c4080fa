"""Whole encoders and decoders: fused, in plain PyTorch, as torch.nn.TransformerEncoder, compiled. Writes results/stack.json.

All three have equal weights. `plain` is what most people write, x = x + f(norm(x)) or x = norm(x + f(x)), with torch.nn.LayerNorm
over the very modules of addnorm's attention and feed-forward: it differs in the Add & Norm and in nothing else. `torch` is
PyTorch's module, in inference with its fast path. Decoders have RMSNorm, which `plain` writes out. Encoders of several streams
have the equations in torch's operators as `plain`. Ratios are taken round by round. README.md in this folder has the protocol.
"""

from __future__ import annotations

from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from stacks import DECODED, HEAD_DIM, JOBS, LAYERS, PAST, TITLES, Plain, decode, decoder, encoder, measure_share
from torch import nn

from addnorm import nn as addnorm_nn
from addnorm._util.numbers import format_percent
from addnorm.bench import timing
from addnorm.bench.case import Case, Condition, Document, Results, Rows, Target, grid, has, ratio
from addnorm.bench.harness import Benchmark, main
from addnorm.bench.pages import digits, interval, markdown, merge, quotient, targets_section
from addnorm.fusion.benchmark import saved_bytes
from addnorm.stream.dataflow.snapshot import StateSnapshot

SECONDS = 8.0  # of all rounds of a case
# The largest difference of two outputs, over 1 + |y| for an element y. A rounding to bfloat16 changes a number by at most 2^-8 of
# it, in root mean square by 0.425 x 2^-8. A decoder's output has the root mean square 1. On the way to it each of the 2 LAYERS
# sums and the last norm are rounded. Where two variants share none of these 9 roundings, their outputs differ by
# sqrt(2 x 9) x 0.425 x 2^-8 = 0.007 in root mean square, and the largest of 512 x 512 normal differences is 5 times that.
# Measured with nine seeds: at most 0.0067 in root mean square, and at most 0.027 as the largest difference.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.035}
PEERS = {"plain": "plain PyTorch", "torch": "torch.nn.TransformerEncoder"}
COMPILED = ", compiled"
ENCODERS = {"wiring": ("pre_ln", "post_ln"), "norm": "layer"}
DECODERS = {"pre_ln": "pre_ln, like Llama and Qwen", "sandwich": "sandwich, like Gemma"}
STREAMS = ("hyper_connections", "mhc", "attention_residuals")
has_inductor = has(wiring=STREAMS, batch=8, tokens=128, d=256)  # one size, since each takes minutes
CASES = grid(
    **ENCODERS, dtype="float32", job=JOBS, d=(64, 256, 768), batch__tokens=((1, 1), (1, 128), (16, 128))
) + grid(
    wiring=DECODERS, norm="rms", dtype=("float32", "bfloat16"), d=512, job__batch__tokens=DECODED,
) + grid(
    wiring=STREAMS, norm="layer", dtype="float32", job="training", d=(256, 768), batch__tokens=((1, 128), (8, 128))
)  # fmt: skip
is_encoder, is_decoder = has(**ENCODERS), has(norm="rms")


def variants(case: Case) -> dict[str, nn.Module]:
    """Return the modules, with equal weights."""
    theirs: dict[str, Any] = {}
    if case.wiring in STREAMS:
        ours: Any = encoder(case.d, case.wiring)
        for name, parameter in ours.named_parameters():
            if "coefficients" in name:  # at first the streams are equal and the gates constant
                parameter.data += 0.02 * torch.randn_like(parameter)
    elif is_decoder(case):
        ours = decoder(case.d, case.wiring, getattr(torch, case.dtype))
    else:
        pre = case.wiring == "pre_ln"
        layer = nn.TransformerEncoderLayer(
            case.d, case.d // HEAD_DIM, 4 * case.d, dropout=0.0, batch_first=True, norm_first=pre
        )
        norm = nn.LayerNorm(case.d) if pre else None
        theirs["torch"] = nn.TransformerEncoder(layer, LAYERS, norm, enable_nested_tensor=False)
        ours = addnorm_nn.from_torch(theirs["torch"])
        left = [*ours.parameters()]
        for parameter in theirs["torch"].parameters():
            place = next(i for i, own in enumerate(left) if torch.equal(own, parameter))
            parameter.data = left.pop(place).data
    # All variants share their weights. Copies lie elsewhere in memory, which alone makes several per cent, and a variant would
    # find its own copy out of the cache after another's.
    return {"addnorm": ours, "plain": Plain(ours.stack), **theirs}


def measure(case: Case, *, rounds: int) -> Results:
    """Return a row for each variant. Their outputs are compared first.

    Raises:
        AssertionError: the outputs differ by more than round-off.
    """
    torch.manual_seed(0)
    training = case.job == "training"
    dtype = getattr(torch, case.dtype)
    x, dy, past = (torch.randn(case.batch, n, case.d, dtype=dtype) for n in (case.tokens, case.tokens, PAST))
    modules: dict[str, Any] = {name: module.train(training) for name, module in variants(case).items()}
    if has_inductor(case):
        torch._dynamo.reset()
        modules |= {f"{name}{COMPILED}": torch.compile(m, dynamic=False) for name, m in modules.items()}
    functions = {name: decode(module, past) if case.job == "decode" else module for name, module in modules.items()}
    tolerance = TOLERANCES[case.dtype]
    with torch.no_grad():
        expected = functions["addnorm"](x)
        for function in functions.values():
            torch.testing.assert_close(function(x), expected, rtol=tolerance, atol=tolerance)
    calls = {
        name: timing.step(function, [x], dy, [x.requires_grad_(), *modules[name].parameters()] if training else [])
        for name, function in functions.items()
    }
    rows = timing.measure(case, calls, rounds, seconds=SECONDS, peer="addnorm")
    for row in rows:
        module = modules[row["variant"]]
        if training and COMPILED not in row["variant"]:
            row["saved_bytes"] = saved_bytes(partial(module, x), StateSnapshot(module, x))
        if is_decoder(case) and row["variant"] == "plain":
            row["share"] = measure_share(module, x, past if case.job == "decode" else None)
    return {"rows": rows}


NOISE = "a stack costs no more than its sublayers; 0.02 is noise"


def fast(name: str, bound: float | None, why: str, statistic: Any, where: Condition, peer: str = "plain") -> Target:
    """Return the target of how many times as fast addnorm is as a peer."""

    def speed(rows: Rows) -> float | None:
        return 1 / rows[peer]["paired_ratio"] if peer in rows else None

    return Target(name, ">=", bound, speed, statistic, where, why=why)


TARGETS = [
    target for job, title in JOBS.items() for peer, name in PEERS.items()
    for where in [has(**ENCODERS, job=job)]
    for target in (
        fast(f"{title}: lowest, against {name}", 0.98, NOISE, min, where, peer),
        fast(f"{title}: mean, against {name}", 1.03 if job == "training" else None,
             "Add & Norm is a few per cent of a step: this is most of it", geometric_mean, where, peer),
    )
] + [
    Target(f"saved bytes: highest share of {name}'s", "<=", None, ratio(peer, "addnorm", "saved_bytes"), max,
           has(**ENCODERS, job="training"))
    for peer, name in PEERS.items()
] + [
    fast("decoders with RMSNorm: lowest", 0.98, NOISE, min, is_decoder),
    fast("decoders with RMSNorm: mean", 1.03,
         "plain PyTorch writes the norm out: square, mean and products each read the stream", geometric_mean, is_decoder),
] + [
    target for wiring in STREAMS for where in [has(wiring=wiring)] for target in (
        fast(f"{wiring}: lowest, against plain PyTorch", 1.0, "never slower", min, where),
        fast(f"{wiring}: mean", 1.5, "plain PyTorch moves the streams once for each of its operators", geometric_mean, where),
        Target(f"{wiring}: highest share of saved bytes", "<=", None, ratio("plain", "addnorm", "saved_bytes"), max, where),
    )
] + [
    Target(f"{wiring}, both compiled", ">=", 1.0, ratio(f"addnorm{COMPILED}", f"plain{COMPILED}"), min, has(wiring=wiring),
           why="never slower")
    for wiring in STREAMS
]  # fmt: skip


def pair(rows: Rows, peer: str, key: str, unit: float = 1.0) -> str:
    """Return a number of addnorm and of a peer."""
    return " / ".join(digits(rows[name][key] / unit) for name in ("addnorm", peer))


def section(document: Document) -> str:
    """Return the table of speeds: a line a size and peer, a column a wiring and job."""
    lines = merge(
        (
            {"compared with": name, "batch x tokens x d": f"{case.batch} x {case.tokens} x {case.d}"},
            {f"{case.wiring}, {JOBS[case.job]}": f"{interval(rows[peer], inverse=True)} ({pair(rows, peer, 'median_us')})"},
        )
        for peer, name in PEERS.items() for case, rows in BENCHMARK.by_case(document) if is_encoder(case)
    )  # fmt: skip
    return f"Times as fast (interval; median microseconds: addnorm / the other):\n\n{markdown(lines)}"


def decoders_section(document: Document) -> str:
    """Return the table of decoders with RMSNorm: a line a wiring and dtype, a column a job."""
    titles = TITLES | {"inference": "prefill of 512 tokens"}
    lines = merge(
        (
            {"decoder": DECODERS[case.wiring], "dtype": case.dtype},
            {titles[case.job]: f"{interval(rows['plain'], inverse=True)} ({pair(rows, 'plain', 'median_us')}), "
                               f"{format_percent(rows['plain']['share'], 2)}"},
        )
        for case, rows in BENCHMARK.by_case(document) if is_decoder(case)
    )  # fmt: skip
    return (
        "Times as fast as plain PyTorch (interval; median microseconds: addnorm / plain), and the share of Add & Norm in the "
        f"forward pass of plain PyTorch:\n\n{markdown(lines)}"
    )


def targets(document: Document, streams: bool = False) -> str:
    """Return the table of the targets of one stream, or of several."""
    rows = [row for row in document["summary"] if row["name"].startswith(STREAMS) is streams]
    return targets_section(document | {"summary": rows})


def streams_section(document: Document) -> str:
    """Return the table of the training steps of several streams, a line a size, and the targets."""
    table = markdown(
        {
            "wiring": case.wiring, "batch x tokens x d": f"{case.batch} x {case.tokens} x {case.d}",
            "times as fast (ms: addnorm / plain)":
                f"{interval(rows['plain'], inverse=True)} ({pair(rows, 'plain', 'median_us', 1e3)})",
            "both compiled": quotient(rows, f"plain{COMPILED}", f"addnorm{COMPILED}"),
            "saved MB: addnorm / plain": pair(rows, "plain", "saved_bytes", 1e6),
        }
        for case, rows in BENCHMARK.by_case(document) if case.wiring in STREAMS
    )  # fmt: skip
    return f"{table}\n\n{targets(document, streams=True)}"


BENCHMARK = Benchmark(
    "stack", CASES, measure, targets=TARGETS,
    protocol={"layers": LAYERS, "head_dim": HEAD_DIM, "dim_feedforward": "4 d, with SwiGLU 8/3 d", "dropout": 0.0, "past": PAST,
              "cell_seconds": SECONDS},
    sections={"docs/performance.md#stack": section, "docs/performance.md#stack-decoders": decoders_section,
              "docs/performance.md#stack-targets": targets, "docs/several_streams.md#stack-streams": streams_section}, rounds=61,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
