"""Decoder layers of transformers' DeepSeek V4 and GLM-5.3: what all but attention and experts costs, before and after.

python benchmarks/bench_stream_layers.py [--threads 2] [--rounds 61] [--quick]

A layer of random weights runs as transformers wrote it, and with its boundaries through `add_norm_streams`: whole, and with
attention and experts that return at once what they returned before, so that only the boundaries take time. The outputs are
compared, and the ratio of the times is taken round by round. Inference in float32 and bfloat16. README.md in this folder has the
protocol.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import harness
import torch
from harness import Benchmark, Case, Results, Row, digits, markdown, right
from torch import nn

import addnorm
from addnorm._util.numbers import format_count, format_number, format_percent
from addnorm.bench import timing
from addnorm.bench.harness import by_case
from addnorm.bench.targets import Target
from addnorm.nn.connection import FIRST
from addnorm.wirings.coefficients import ManifoldConnection

FIELDS = ("model", "threads", "tokens", "dtype")
HIDDEN, TOKENS, N = 1024, (1, 128, 512), 4
EDGES = ", boundaries"  # of a variant's name
SECONDS = 8.0  # of all rounds of a layer, and of its boundaries
# Relative norms. In bfloat16 transformers rounds the coefficients too, and may choose other experts.
MOST_DIFFERENT = {"float32": 1e-5, "bfloat16": 0.2}
COMMON = {
    "vocab_size": 64, "hidden_size": HIDDEN, "num_attention_heads": 16, "num_hidden_layers": 2, "hc_mult": N,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "q_lora_rank": 256, "kv_lora_rank": 128,
    "v_head_dim": 64, "index_topk": 64, "index_head_dim": 64, "index_n_heads": 4, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DeepSeek V4": ("deepseek_v4", "DeepseekV4", {"num_key_value_heads": 1, "head_dim": 64, "sliding_window": 128,
        "qk_rope_head_dim": 32, "o_groups": 4, "o_lora_rank": 128}),
    "GLM-5.3": ("glm5_next", "Glm5NextText", {"intermediate_size": 2048, "num_key_value_heads": 16, "qk_nope_head_dim": 64,
        "linear_head_dim": 64, "linear_num_heads": 16, "mlp_layer_types": ["sparse"] * 2,
        "layer_types": ["linear_attention", "indexed_attention"]}),
}  # fmt: skip


class Layer:
    """The first layer of a model, and what it was called with; with `alone` its attention and experts return at once."""

    def __init__(self, case: Case, *, alone: bool = False) -> None:
        module, prefix, options = MODELS[case.model]
        library: Any = importlib.import_module(f"transformers.models.{module}")
        config = getattr(library, f"{prefix}Config")(**COMMON, **options)
        config._experts_implementation = "eager"
        torch.manual_seed(0)
        model: Any = getattr(library, f"{prefix}Model")(config).eval().to(getattr(torch, case.dtype))
        layer: Any = model.layers[0]
        for parameter in (*layer.attn_hc.parameters(), *layer.ffn_hc.parameters()):
            parameter.data = torch.randn_like(parameter, dtype=torch.float32) * (0.02 if parameter.dim() > 1 else 0.5)
        self.layer = layer
        self.calls: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        parts = {"layer": layer, "self_attn": layer.self_attn, "mlp": layer.mlp}
        hooks = [part.register_forward_hook(self._keep(name), with_kwargs=True) for name, part in parts.items()]
        with torch.no_grad():
            model(torch.randint(0, 64, (1, case.tokens)), use_cache=False)
        for hook in hooks:
            hook.remove()
        if alone:
            for name in ("self_attn", "mlp"):
                parts[name].forward = lambda *args, output=self.outputs[name], **kwargs: output
        self.gates = [self._gates(source) for source in (layer.attn_hc, layer.ffn_hc)]

    def _keep(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.calls[name], self.outputs[name] = (args, kwargs), output

        return hook

    @staticmethod
    def _gates(source: Any) -> addnorm.StreamGates:
        coefficients = ManifoldConnection(
            HIDDEN, N, 1, FIRST, iterations=source.hc_sinkhorn_iters, eps=source.hc_eps, norm_eps=source.input_norm.eps
        )
        coefficients.load_transformers(source)
        return coefficients.gates()

    def _sublayer(self, name: str, read: Any) -> Any:
        args, kwargs = self.calls[name]
        args, kwargs = ((read, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": read})
        output = getattr(self.layer, name)(*args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def plain(self) -> Any:
        """Return the layer's output as transformers computes it."""
        args, kwargs = self.calls["layer"]
        output = self.layer(*args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def fused(self) -> Any:
        """Return the layer's output with its boundaries through `add_norm_streams`."""
        args, kwargs = self.calls["layer"]
        x = args[0] if args else kwargs["hidden_states"]
        write: dict[str, Any] = {}
        norms = self.layer.input_layernorm, self.layer.post_attention_layernorm
        for name, gates, norm in zip(("self_attn", "mlp"), self.gates, norms, strict=True):
            step = addnorm.add_norm_streams(
                x, **write, gates=gates, weight=norm.weight, eps=norm.variance_epsilon, norm="rms"
            )
            x = step.streams
            write = {"branch": self._sublayer(name, step.read), "mix": step.mix, "inject": step.inject}
        return addnorm.add_norm_streams(x, **write).streams


def cases(threads: int) -> list[Case]:
    """Return all cases, the smallest last."""
    return [
        Case(model=model, threads=threads, tokens=tokens, dtype=dtype)
        for tokens in reversed(TOKENS) for model in MODELS for dtype in ("float32", "bfloat16")
    ]  # fmt: skip


def title(case: Case) -> str:
    """Return a case in words."""
    return f"{case.model}, {format_count(case.tokens, 'token')}, {case.dtype}"


def measure(case: Case, *, rounds: int) -> Results:
    """Return the times of whole layers and of their boundaries alone, and how far the outputs are apart."""
    layer, alone = Layer(case), Layer(case, alone=True)
    expected, found = layer.plain().double(), layer.fused().double()
    difference = float((found - expected).norm() / expected.norm())
    if difference > MOST_DIFFERENT[case.dtype]:
        raise ValueError(
            f"the outputs of a fused layer differ by {difference:.2g}, expected at most {MOST_DIFFERENT[case.dtype]:g}."
        )
    rows: dict[str, Row] = {}
    for part, one in (("", layer), (EDGES, alone)):
        calls = {"addnorm": one.fused, "transformers": one.plain}
        times = timing.interleaved(calls, rounds=rounds, seconds=SECONDS, peer="transformers")
        rows |= {f"{name}{part}": row for name, row in times.items()}
    return {
        "rows": [case.row(variant=name, **row) for name, row in rows.items()],
        "differences": [case.row(relative=difference)],
    }


def summarize(results: Results) -> list[Row]:
    """Return how many times as fast layers and boundaries are."""
    summary: list[Row] = []
    for case, rows in by_case(results["rows"], FIELDS).items():
        for part, what in (("", "the whole layer"), (EDGES, "its boundaries")):
            name = f"{title(case)}: times as fast, {what}"
            summary.append(Target(name, ">=", 1.0).row(rows[f"addnorm{part}"]["paired_ratio"]))
    return summary


def _times_as_fast(rows: Mapping[str, Row], part: str) -> str:
    """Return the ratio with its interval, and both times."""
    ours, theirs = (rows[f"{name}{part}"] for name in ("addnorm", "transformers"))
    ratio, low, high = (format_number(ours[key], 3) for key in ("paired_ratio", "paired_low", "paired_high"))
    return f"**{ratio}** ({low} to {high}) ({digits(ours['median_us'])} / {digits(theirs['median_us'])})"


def section(document: harness.Document) -> str:
    """Return the page's table, and where it was measured."""
    return f"{table(document)}\n\n{harness.headline(document)}."


def table(document: harness.Document) -> str:
    """Return how many times as fast layers and their boundaries are, and what share of a layer these take."""
    lines = []
    for case, rows in sorted(
        by_case(document["rows"], FIELDS).items(), key=lambda item: (item[0].model, item[0].tokens)
    ):
        shares = (rows[f"{name}{EDGES}"]["median_us"] / rows[name]["median_us"] for name in ("transformers", "addnorm"))
        lines.append([
            case.model, str(case.tokens), case.dtype, *(_times_as_fast(rows, part) for part in ("", EDGES)),
            *(format_percent(share, 2) for share in shares),
        ])  # fmt: skip
    head: list[Any] = [
        "layer",
        *right("tokens"),
        "dtype",
        *right("whole layer (µs)", "its boundaries (µs)", "share before", "after"),
    ]
    return markdown(head, lines)


BENCHMARK = Benchmark(
    name="stream_layers",
    about="decoder layers with several streams, of transformers",
    fields=FIELDS,
    cases=cases,
    measure=measure,
    summarize=summarize,
    title=title,
    parts=("differences", "rows"),
    protocol={"cell_seconds": SECONDS},
    rounds=61,
)

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
