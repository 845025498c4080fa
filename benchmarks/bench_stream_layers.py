"""Decoder layers of transformers' DeepSeek V4 and GLM-5.3: what all but attention and experts costs, before and after.

A layer of random weights runs as transformers wrote it, and with its boundaries through `add_norm_streams`: whole, and with
attention and experts that return at once what they returned before, so that only the boundaries take time. The outputs are
compared, and the ratio of the times is taken round by round. Inference in float32 and bfloat16. README.md in this folder has the
protocol.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from deepseek import N, check_difference, coefficients_of, draw_parameters
from torch import nn

import addnorm
from addnorm._util.numbers import format_count, format_percent
from addnorm.bench import timing
from addnorm.bench.case import Case, Document, Results, grid
from addnorm.bench.harness import Benchmark
from addnorm.bench.pages import digits, headline, interval, markdown
from addnorm.bench.script import main
from addnorm.bench.targets import Target, value

HIDDEN = 1024
EDGES = ", boundaries"  # of a variant's name
PARTS = {"": "the whole layer", EDGES: "its boundaries"}
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
CASES = grid(tokens=(1, 128, 512), model=MODELS, dtype=("float32", "bfloat16"))


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
        self.layer, self.calls, self.outputs = layer, dict[str, Any](), dict[str, Any]()
        for source in (layer.attn_hc, layer.ffn_hc):
            draw_parameters(source)
        parts = {"layer": layer, "self_attn": layer.self_attn, "mlp": layer.mlp}
        hooks = [
            part.register_forward_hook(partial(self._keep, name), with_kwargs=True) for name, part in parts.items()
        ]
        with torch.no_grad():
            model(torch.randint(0, 64, (1, case.tokens)), use_cache=False)
        for hook in hooks:
            hook.remove()
        for name in ("self_attn", "mlp") if alone else ():
            parts[name].forward = lambda *args, output=self.outputs[name], **kwargs: output
        self.gates = [
            coefficients_of(source, COMMON["hidden_size"]).gates() for source in (layer.attn_hc, layer.ffn_hc)
        ]

    def _keep(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.calls[name], self.outputs[name] = (args, kwargs), output

    def _run(self, name: str, read: Any = None) -> Any:
        """Call the layer or a sublayer as it was called, with another input if there is one."""
        args, kwargs = self.calls[name]
        if read is not None:
            args, kwargs = ((read, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": read})
        output = (self.layer if name == "layer" else getattr(self.layer, name))(*args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def plain(self) -> Any:
        """Return the layer's output as transformers computes it."""
        return self._run("layer")

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
            write = {"branch": self._run(name, step.read), "mix": step.mix, "inject": step.inject}
        return addnorm.add_norm_streams(x, **write).streams


def measure(case: Case, *, rounds: int) -> Results:
    """Return the times of whole layers and of their boundaries alone, and how far the outputs are apart."""
    layers = {"": Layer(case), EDGES: Layer(case, alone=True)}
    difference = check_difference(layers[""].fused(), layers[""].plain(), MOST_DIFFERENT[case.dtype])
    results: Results = {"differences": [case.row(relative=difference)], "rows": []}
    for part, one in layers.items():
        calls = {f"addnorm{part}": one.fused, f"transformers{part}": one.plain}
        measured = timing.measure(case, calls, rounds, seconds=SECONDS, peer=f"transformers{part}")
        results["rows"] += measured["rows"]
    return results


TARGETS = [
    Target(f"{{}}: times as fast, {what}", ">=", 1.0, value(f"addnorm{part}", "paired_ratio"), None)
    for part, what in PARTS.items()
]  # fmt: skip


def section(document: Document) -> str:
    """Return how many times as fast layers and their boundaries are, and what share of a layer these take."""
    lines = []
    for case, rows in sorted(BENCHMARK.by_case(document).items(), key=lambda one: (one[0].model, one[0].tokens)):
        times = {name: row["median_us"] for name, row in rows.items()}
        shares = [format_percent(times[f"{name}{EDGES}"] / times[name], 2) for name in ("transformers", "addnorm")]
        ratios = {
            f"{what.removeprefix('the ')} (µs)": f"{interval(rows[f'addnorm{part}'])} "
            f"({digits(times[f'addnorm{part}'])} / {digits(times[f'transformers{part}'])})"
            for part, what in PARTS.items()
        }
        lines.append({
            "layer": case.model, "tokens": f"{case.tokens}", "dtype": case.dtype, **ratios,
            "share before": shares[0], "after": shares[1],
        })  # fmt: skip
    return f"{markdown(lines)}\n\n{headline(document)}."


BENCHMARK = Benchmark(
    "stream_layers", ("model", "threads", "tokens", "dtype"), CASES, measure,
    lambda case: f"{case.model}, {format_count(case.tokens, 'token')}, {case.dtype}", TARGETS, ("differences", "rows"),
    {"cell_seconds": SECONDS}, sections={"docs/several_streams.md#stream-layers": section}, rounds=61,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
