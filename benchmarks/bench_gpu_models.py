"""Stacks, fused models and n streams on a GPU, beside plain PyTorch, transformers and Liger. Writes results/gpu_models.json.

    python benchmarks/bench_gpu_models.py --resume
    python benchmarks/bench_gpu_models.py --device cpu --part boundary --tokens 64    # a trial of everything but the clock

Weights are random and equal in all variants; outputs are compared first. README.md in this folder has the protocol.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from bench_streams import Boundary, Fused
from stacks import JOBS, Plain
from torch import Tensor, nn

import addnorm
from addnorm._util.numbers import format_percent
from addnorm._util.timing import interleave
from addnorm.bench import proofs, timing
from addnorm.bench.case import Case, Document, Results, Row, grid
from addnorm.bench.gpu import clock
from addnorm.bench.gpu.benchmark import describe
from addnorm.bench.gpu.summary import headline
from addnorm.bench.harness import Benchmark
from addnorm.bench.pages import digits, markdown, quotient, unfinished
from addnorm.bench.script import main

PARTS = {
    "boundary": "n streams between two sublayers", "stack": "encoder of this library", "fuse": "model of transformers",
}  # fmt: skip
LAYERS, N = 12, 4
MOST_DIFFERENT = 0.05  # relative norms in bfloat16
CASES = [
    case.but(device="cuda")
    for case in (
        *grid(job=JOBS, part__name__tokens__d=(("boundary", "mhc", 4096, 4096), ("boundary", "mhc", 16384, 2048))),
        *grid(job=JOBS, part__name__tokens__d=(("stack", "pre_ln", 8192, 1024), ("stack", "post_ln", 8192, 1024))),
        *grid(job=JOBS, part__name__tokens__d=(("fuse", "llama", 8192, 2048), ("fuse", "bert", 8192, 768))),
    )
]
SEQUENCE = 512  # tokens of a sequence
FIELDS = ("part", "name", "job", "tokens", "d", "device")
Variants = dict[str, nn.Module]


def boundary(case: Case) -> tuple[Variants, list[Tensor]]:
    """Return what stands between two sublayers of four streams: addnorm's call, transformers' operators, Liger's kernels."""
    plain, dtype = Boundary(case.d), torch.bfloat16
    modules: Variants = {"addnorm": Fused(plain, case.d), "plain": plain, "liger": Liger(plain)}
    plain.norm.to(dtype)
    streams = (torch.randn(1, case.tokens, N, case.d) * torch.linspace(0.5, 2, N)[:, None]).to(dtype)
    inject, mix = torch.rand(1, case.tokens, N) * 2, torch.softmax(torch.randn(1, case.tokens, N, N), -1)
    return modules, [streams, torch.randn(1, case.tokens, case.d).to(dtype), inject, mix]


class Liger(nn.Module):
    """Liger's functions for the same step, with the parameters of a `Boundary`."""

    def __init__(self, source: Boundary) -> None:
        super().__init__()
        hc = source.hc
        self.phi, self.base = nn.Parameter(hc.fn.detach().mT.contiguous()), nn.Parameter(hc.base.detach().clone())
        self.scale = nn.ParameterList(hc.scale.detach().clone().unbind())
        self.weight, self.eps = (
            nn.Parameter(source.norm.weight.detach().to(torch.bfloat16)),
            source.norm.variance_epsilon,
        )
        self.options = {
            "tmax": hc.hc_sinkhorn_iters, "rms_eps": hc.input_norm.eps, "pre_eps": hc.hc_eps, "sinkhorn_eps": hc.hc_eps,
        }  # fmt: skip

    def forward(self, streams: Tensor, output: Tensor, inject: Tensor, mix: Tensor) -> tuple[Tensor, ...]:
        """Return the next read, the new streams and the next coefficients."""
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.transformers.functional import liger_mhc_coeffs, liger_mhc_post_res, liger_mhc_pre

        streams = liger_mhc_post_res(streams, output, inject, mix)
        collapse, inject, mix = liger_mhc_coeffs(streams, self.phi, self.base, *self.scale, **self.options)
        read = LigerRMSNormFunction.apply(liger_mhc_pre(streams, collapse), self.weight, self.eps)
        return read, streams, inject, mix


class Transposed(nn.Module):
    """A `Boundary` that takes and returns A as this library has it: transformers' A is transposed."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, streams: Tensor, output: Tensor, inject: Tensor, mix: Tensor) -> tuple[Tensor, ...]:
        """Return the next read, the new streams and the next coefficients."""
        *others, mix = self.plain(streams, output, inject, mix.mT)
        return *others, mix.mT


def stack(case: Case) -> tuple[Variants, list[Tensor]]:
    """Return an encoder of this library, and its own sublayers in a plain loop with torch's norms."""
    encoder = addnorm.nn.Encoder(LAYERS, case.d, case.d // 64, wiring=case.name, dtype=torch.bfloat16)
    x = torch.randn(case.tokens // SEQUENCE, SEQUENCE, case.d, dtype=torch.bfloat16)
    return {"addnorm": encoder, "plain": Plain(encoder.stack)}, [x]


def model(case: Case) -> tuple[Variants, list[Tensor]]:
    """Return a model of transformers, and a copy that `fuse` changes on the device."""
    import transformers

    sizes: dict[str, Any] = {"hidden_size": case.d, "num_hidden_layers": LAYERS, "num_attention_heads": case.d // 64}
    plain: nn.Module = (
        transformers.LlamaModel(transformers.LlamaConfig(intermediate_size=4 * case.d, use_cache=False, **sizes))
        if case.name == "llama"
        else transformers.BertModel(transformers.BertConfig(**sizes))
    )
    plain.to(torch.bfloat16)
    ids = torch.randint(5, 30000, (case.tokens // SEQUENCE, SEQUENCE))
    return {"plain": plain, "addnorm": copy.deepcopy(plain)}, [ids]


MAKE: Mapping[str, Callable[[Case], tuple[Variants, list[Tensor]]]] = {
    "boundary": boundary, "stack": stack, "fuse": model,
}  # fmt: skip


def measure(case: Case, *, rounds: int, deadline: float | None = None, without: tuple[str, ...] = ()) -> Results:
    """Return the times, memory and share of a case; the outputs of all variants are compared with plain PyTorch's first.

    A variant that fails or differs is reported, and the others are measured.
    """
    torch.manual_seed(0)
    results: Results = {"failures": [], "rows": []}
    made, inputs = MAKE[case.part](case)
    if case.part == "boundary":
        made["plain"] = Transposed(made["plain"])
    training = case.job == "training"
    arguments = [t.to(case.device).requires_grad_(training and t.is_floating_point()) for t in inputs]
    calls: dict[str, Callable[[int], Any]] = {}
    more: dict[str, Row] = {}
    for module in made.values():
        module.to(case.device).train(training)
    with torch.no_grad():
        expected = first(made["plain"].eval()(*arguments)).double()
    for name, module in made.items():
        try:
            more[name] = {}
            with torch.no_grad():
                off = proofs.distance(first(module.eval()(*arguments)), expected)
            if not off <= MOST_DIFFERENT:
                raise ValueError(f"its result differs by {off:.2g}, expected at most {MOST_DIFFERENT}.")
            module.train(training and case.part != "fuse")  # no dropout: its masks differ
            if case.part == "fuse" and name == "addnorm":
                more[name]["share"] = addnorm.fuse(module, *arguments).share
            call = partial(step, module, arguments, training)
            more[name]["peak_bytes"] = peak(call, case.device)
            calls[name] = partial(ignore_number, call)
        except Exception as error:  # of a variant
            results["failures"].append(timing.failure(case, name, error))
    timers = {name: clock.Timer(case.device, call, 1) for name, call in calls.items()}
    samples = interleave({name: partial(timer.sample, timer.repeats()) for name, timer in timers.items()}, rounds)
    results["rows"] = [case.row(variant=name, **clock.times(some), **more[name]) for name, some in samples.items()]
    return results


def ignore_number(call: Callable[[], Any], i: int) -> Any:
    """Run a call that uses the same inputs each time."""
    return call()


def first(output: Any) -> Tensor:
    """Return the first tensor of a module's output."""
    t: Tensor = output if isinstance(output, Tensor) else output[0]
    return t.detach()


def step(module: nn.Module, arguments: list[Tensor], training: bool) -> Any:
    """Run the module; in training compute all gradients too."""
    with torch.set_grad_enabled(training):
        output = module(*arguments)
    if not training:
        return output
    several = output if type(output) is tuple else [output if isinstance(output, Tensor) else output[0]]
    outputs = [t for t in several if t.requires_grad]
    wanted = [*(t for t in arguments if t.requires_grad), *(p for p in module.parameters() if p.requires_grad)]
    return torch.autograd.grad(outputs, wanted, [t.detach() for t in outputs], allow_unused=True)


def peak(call: Callable[[], Any], device: str) -> int | None:
    """Return the bytes that a call allocates at most, beyond those that were allocated before it."""
    call()
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def line(case: Case, rows: Mapping[str, Row]) -> dict[str, str]:
    """Return the line of a case."""
    us = {
        name: {"median_us": row["device_us"], "q1_us": row["device_q1_us"], "q3_us": row["device_q3_us"]}
        for name, row in rows.items()
    }
    both = [rows[name] for name in ("plain", "addnorm") if name in rows]
    peaks = " → ".join(digits(row["peak_bytes"] / 1e6) for row in both if row["peak_bytes"])
    share = rows.get("addnorm", {}).get("share")
    return {
        "": f"{PARTS[case.part]}, {case.name}, {case.tokens} tokens x {case.d}", "job": JOBS[case.job],
        "device, ms: before → after": " → ".join(digits(row["device_us"] / 1e3) for row in both),
        "times as fast": quotient(us, "plain", "addnorm"),
        **{f"x {title}": quotient(us, name, "addnorm") if name in us else "" for name, title in PEERS.items()},
        "call, ms": " → ".join(digits(row["call_us"] / 1e3) for row in both), "memory, MB": peaks,
        "share of Add & Norm": "" if share is None else format_percent(share, 2),
    }  # fmt: skip


PEERS = {"liger": "Liger"}


def section(document: Document | None) -> str:
    """Return the page's section, or the sentence that nothing was measured."""
    if document is None:
        return "Nothing has been measured on a GPU yet. `python benchmarks/bench_gpu_models.py` does it."
    failures = markdown(
        {
            "variant": row["variant"],
            "case": BENCHMARK.title(Case.of(row, FIELDS)),
            "error": " ".join(row["error"].split()),
        }
        for row in document["failures"]
    )
    table = markdown(line(*item) for item in BENCHMARK.by_case(document).items())
    return "\n\n".join(filter(None, [headline(document), table, failures, unfinished(document)]))


def finish(results: Results, head: Document) -> Document:
    """Return the parts of the document with the bandwidth of a copy."""
    return {"copy": max(clock.copy_rates(head["device"]["type"]).values()), "summary": [], **results}


BENCHMARK = Benchmark(
    "gpu_models", FIELDS, CASES, measure, lambda case: f"{case.part} {case.name}, {JOBS[case.job]}, {case.tokens} x {case.d}",
    parts=("failures", "rows"), protocol={"layers": LAYERS, "sequence": SEQUENCE, "streams": N, "dtype": "bfloat16"},
    describe=describe, finish=finish, sections={"docs/performance.md#gpu-models": section}, threads=0, rounds=clock.ROUNDS,
    budget=240.0, idle=False, device="cuda", report=section,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
