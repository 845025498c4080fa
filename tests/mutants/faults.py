"""Planted faults as data. Each fault is one small, realistic error on supported input, which the tests of its area must detect.

A fault replaces `old`, which occurs exactly once in `file`, by `new`. `AREAS` lists the tests of each area as runs of pytest, the
fastest first; each run is a few patterns of files or folders. A change of the code that a fault edits must also change the fault.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """One planted fault."""

    id: str
    area: str
    file: str
    old: str
    new: str


AREAS = {
    "forward": ("tests/functional/test_edges.py tests/functional/test_functional.py",
                "tests/ops/test_cpu*.py tests/functional/test_properties.py"),
    "backward": ("tests/ops/test_autograd.py", "tests/ops/test_cpu*.py tests/functional/test_[lp]*.py"),
    "dropout": ("tests/ops/test_philox.py tests/ops/test_cpu_options.py tests/ops/test_autograd.py", "tests/functional/test_fuzz.py"),
    "options": ("tests/ops/test_cpu_options.py tests/functional/test_functional.py",
                "tests/ops/test_autograd.py tests/functional/test_fuzz.py"),
    "casting": ("tests/functional/test_functional.py tests/functional/test_reference.py",
                "tests/ops/test_cpu_options.py tests/functional/test_fuzz.py"),
    "dtypes": ("tests/functional/test_functional.py tests/ops/test_dispatch.py tests/ops/test_schema.py",
               "tests/ops/test_cpu_options.py"),
    "in_place": ("tests/functional/test_inplace*.py tests/ops/test_aliasing.py",),
    "autocast": ("tests/ops/test_autocast.py tests/functional/test_functional.py",),
    "validation": ("tests/ops/test_validation.py tests/functional/test_functional.py tests/functional/test_inplace*.py",),
    "triton": ("tests/ops/triton/test_kernels.py",),
    "attention": ("tests/nn/test_attention.py tests/nn/test_cache.py tests/nn/test_transformer*.py",),
    "from_torch": ("tests/nn/test_from_torch*.py",),
    "stack": ("tests/nn/test_stack*.py", "tests/nn/test_executor.py tests/wirings/test_equivalences.py"),
    "streams": ("tests/wirings/test_transcriptions.py tests/wirings/test_coefficients.py", "tests/wirings/test_real_models.py",
                "tests/nn/test_streams.py"),
    "wirings": ("tests/wirings/test_catalog.py tests/wirings/test_init.py tests/wirings/test_spec.py", "tests/nn/test_claims.py"),
    "equation": ("tests/wirings", "tests/cli/test_wirings.py"),
    "trace": ("tests/trace",),
    "finder": ("tests/stream/find",),
    "record": ("tests/stream/record/test_record*.py tests/stream/record/test_gradients.py", "tests/stream/record/test_s*.py"),
    "decompose": ("tests/stream/test_decompose.py",),
    "ablate": ("tests/stream/test_ablate*.py",),
    "proof": ("tests/fusion/test_proof*.py tests/fusion/test_rng_replay.py",),
    "fuse": ("tests/fusion/test_pattern*.py", "tests/fusion/test_fuse*.py tests/fusion/test_families.py"),
    "lab_data": ("tests/lab/test_data.py tests/lab/test_run.py tests/lab/test_train.py",),
    "lab_verdict": ("tests/lab/test_comparison.py tests/lab/test_theory.py", "tests/lab/test_compare.py"),
    "lab_store": ("tests/lab/test_result_store.py", "tests/lab/test_compare.py"),
    "report": ("tests/report",),
    "server": ("tests/explorer/test_scheduler.py tests/explorer/test_server*.py",),
    "pages": ("tests/explorer/test_trace*.py", "tests/explorer/test_race*.py", "tests/explorer/test_stack*.py tests/explorer/test_recording_page.py"),
    "cli": ("tests/cli/test_cli.py tests/cli/test_record.py", "tests/cli/test_stream.py tests/cli/test_fuse.py"),
}  # fmt: skip

FAULTS = (
    Fault(
        "sums-of-long-rows-kept", "forward", "csrc/forward-inl.h",
        "add(add(s2[0], s2[1]), add(s2[2], s2[3])));\n      for (int u = 0; u < 4; ++u) s1[u] = s2[u] = fill(0);",
        "add(add(s2[0], s2[1]), add(s2[2], s2[3])));",
    ),
    Fault(
        "tail-lanes-counted", "forward", "csrc/forward-inl.h",
        "t = keep_first(sub(t, k), n);",
        "t = sub(t, k);",
    ),
    Fault(
        "chunk-sums-overwritten", "backward", "csrc/backward-inl.h",
        "store(block_sums + j, add(load(block_sums + j), load(chunk_sums + j)))",
        "store(block_sums + j, load(chunk_sums + j))",
    ),
    Fault(
        "last-block-not-summed", "backward", "csrc/backward-inl.h",
        "for (int64_t b = 0; b + step < count; b += 2 * step)",
        "for (int64_t b = 0; b + step + 1 < count; b += 2 * step)",
    ),
    Fault(
        "mask-of-odd-rows", "dropout", "csrc/memory-inl.h",
        "shift = static_cast<int>(first & 3);",
        "shift = 0;",
    ),
    Fault(
        "philox-counter-32-bits", "dropout", "csrc/philox-inl.h",
        "c[b][1] = high_half(c[b][0]);",
        "c[b][1] = broadcast(0);",
    ),
    Fault(
        "layer-scale-gradient-without-row-scale", "options", "csrc/backward-inl.h",
        "dlayer = add(dlayer, mul(u, row_gain[r]));",
        "dlayer = add(dlayer, u);",
    ),
    Fault(
        "row-scale-gradient-without-layer-scale", "options", "csrc/backward-inl.h",
        "PART ? keep_first(mul(u, layer), n) : mul(u, layer)",
        "PART ? keep_first(u, n) : u",
    ),
    Fault(
        "residual-gradient-without-scale", "options", "csrc/backward-inl.h",
        "dresidual[r].template set<PART>(i, mul(t[r], scale), n)",
        "dresidual[r].template set<PART>(i, t[r], n)",
    ),
    Fault(
        "branch-bias-after-dropout", "options", "csrc/forward-inl.h",
        "    if (branch_bias != nullptr) u = add(u, load_some<PART>(branch_bias + i, n));\n    if (mask) u = mask.apply(u, i);\n",
        "    if (mask) u = mask.apply(u, i);\n    if (branch_bias != nullptr) u = add(u, load_some<PART>(branch_bias + i, n));\n",
    ),
    Fault(
        "weight-offset-not-in-backward", "options", "csrc/backward.cpp",
        "shape.d, a.use_float64, weight_offset) : scale.ones",
        "shape.d, a.use_float64, 0.0) : scale.ones",
    ),
    Fault(
        "second-derivative-without-eps", "backward", "src/addnorm/ops/autograd.py",
        'reference.statistics(z.to(reference.compute_dtype(z)), "rms" if rms else "layer", eps)',
        'reference.statistics(z.to(reference.compute_dtype(z)), "rms" if rms else "layer", 0.0)',
    ),
    Fault(
        "one-gradient-despite-dropout", "dropout", "src/addnorm/ops/autograd.py",
        'for place, argument in enumerate(ADD_ARGUMENTS) if argument.type == "float"',
        'for place, argument in enumerate(ADD_ARGUMENTS[:5]) if argument.type == "float"',
    ),
    Fault(
        "casting-without-add", "casting", "src/addnorm/functional.py",
        'and out_dtype is None and casting == "float32":',
        "and out_dtype is None:",
    ),
    Fault(
        "eps-of-the-residual", "dtypes", "src/addnorm/ops/dispatch.py",
        "dtype=residual_dtype or residual.dtype)).eps",
        "dtype=residual.dtype)).eps",
    ),
    Fault(
        "fake-output-dtype", "dtypes", "src/addnorm/ops/schema.py",
        "y_dtype = out_dtype or (residual if branch is None else branch).dtype",
        "y_dtype = out_dtype or residual.dtype",
    ),
    Fault(
        "normalized-shape-last-only", "validation", "src/addnorm/ops/validation.py",
        "if tuple(residual.shape[-len(normalized_shape) :]) != normalized_shape:",
        "if residual.shape[-1] != normalized_shape[-1]:",
    ),
    Fault(
        "version-of-y-not-counted", "in_place", "src/addnorm/ops/out.py",
        "[y] if z is None else [z] if y is None else [y, z]",
        "[y] if z is None else [z]",
    ),
    Fault(
        "neighbours-share-memory", "in_place", "src/addnorm/ops/aliasing.py",
        "(a_starts[before.clamp(min=0)] + a_bytes > b_starts)",
        "(a_starts[before.clamp(min=0)] + a_bytes >= b_starts)",
    ),
    Fault(
        "autocast-residual-dtype", "autocast", "src/addnorm/ops/autocast.py",
        'z_dtype = arguments.get("residual_dtype") or residual.dtype',
        "z_dtype = residual.dtype",
    ),
    Fault(
        "triton-dropout-words", "triton", "src/addnorm/ops/triton/tiles.py",
        "tl.join(tl.join(w0, w2), tl.join(w1, w3))",
        "tl.join(tl.join(w0, w1), tl.join(w2, w3))",
    ),
    Fault(
        "causal-mask-with-cache", "attention", "src/addnorm/nn/masks.py",
        ".tril(n_keys - n_queries)",
        ".tril()",
    ),
    Fault(
        "memory-not-reordered", "attention", "src/addnorm/nn/cache.py",
        "= source, pairs.index_select(0, index)",
        "= source, pairs",
    ),
    Fault(
        "memory-of-another-call", "attention", "src/addnorm/nn/cache.py",
        "if entry is None or (memory is not None and not _is_same(memory, entry[0])):",
        "if residual is None:",
    ),
    Fault(
        "from-torch-eps", "from_torch", "src/addnorm/nn/from_torch.py",
        "LayerNorm(d_model, theirs.eps, theirs.elementwise_affine",
        "LayerNorm(d_model, 1e-5, theirs.elementwise_affine",
    ),
    Fault(
        "two-masks-for-two-streams", "stack", "src/addnorm/nn/residual.py",
        "write = PendingWrite(write.branch, with_seed(write.options, x))",
        "write = PendingWrite(write.branch, write.options)",
    ),
    Fault(
        "mixing-matrix-transposed", "streams", "src/addnorm/nn/streams.py",
        "torch.matmul(write.mix.to(x.dtype), x)",
        "torch.matmul(write.mix.mT.to(x.dtype), x)",
    ),
    Fault(
        "mixing-matrix-left-out", "streams", "src/addnorm/nn/streams.py",
        "mixed = x if write.mix is None else",
        "mixed = x if True else",
    ),
    Fault(
        "mixing-loaded-untransposed", "streams", "src/addnorm/wirings/coefficients/hyper.py",
        "*(2 * n + j * n + k for k in range(n) for j in range(n))",
        "*(2 * n + k * n + j for k in range(n) for j in range(n))",
    ),
    Fault(
        "rms-of-one-stream", "streams", "src/addnorm/wirings/coefficients/hyper.py",
        "* rms_scale(flat, self.norm_eps)",
        "* rms_scale(flat[..., : self.d_model], self.norm_eps)",
    ),
    Fault(
        "write-gate-without-two", "streams", "src/addnorm/wirings/coefficients/hyper.py",
        "inject = 2.0 * torch.sigmoid(z[..., n : 2 * n]",
        "inject = torch.sigmoid(z[..., n : 2 * n]",
    ),
    Fault(
        "eps-on-the-write-gate", "streams", "src/addnorm/wirings/coefficients/hyper.py",
        "bias[:n]) + self.eps\n        inject = 2.0 *",
        "bias[:n])\n        inject = self.eps + 2.0 *",
    ),
    Fault(
        "eps-missing-on-the-write-gate", "streams", "src/addnorm/wirings/coefficients/hyper.py",
        "inject = self.magnitude * torch.sigmoid(z[..., n:] * scale[1] + bias[n:]) + self.eps",
        "inject = self.magnitude * torch.sigmoid(z[..., n:] * scale[1] + bias[n:])",
    ),
    Fault(
        "columns-normalized-last", "streams", "src/addnorm/wirings/coefficients/hyper.py",
        "matrix.sum(-2, keepdim=True) + eps)\n        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)",
        "matrix.sum(-1, keepdim=True) + eps)\n        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)",
    ),
    Fault(
        "single-pass-reads-with-its-own-gate", "streams", "src/addnorm/nn/streams.py",
        "used, next_used = first, used",
        "used, next_used = first if used is None else used, used",
    ),
    Fault(
        "block-pushed-before-the-read", "streams", "src/addnorm/nn/streams.py",
        "    used, mix, inject, bias = (None,) * 4 if computed is None else computed(streams)\n",
        "    pushes = computed is not None and spec.coefficients.computes == ('collapse',) and getattr(spec, 'n_out', 0) > spec.n\n"
        "    sources = (*streams, torch.zeros_like(streams[0])) if pushes else streams\n"
        "    used, mix, inject, bias = (None,) * 4 if computed is None else computed(sources)\n"
        "    used = tuple(row[: spec.n] for row in used) if pushes else used\n",
    ),
    Fault(
        "a-mask-for-each-stream", "streams", "src/addnorm/nn/streams.py",
        "if len(stage.norm_out) > 1 or sites is not None:",
        "if sites is not None:",
    ),
    Fault(
        "equal-entries-are-one-parameter", "streams", "src/addnorm/nn/streams.py",
        "table[entry] if entry.__class__ is str",
        "table[(lambda learned: [name for name, e in learned.items() if e == learned[entry]][-1])"
        "((module.stage if hasattr(module, 'stage') else module.head).learned)] if entry.__class__ is str",
    ),
    Fault(
        "deepnorm-encoder-alpha", "wirings", "src/addnorm/wirings/catalog.py",
        "0.81 * (n**4 * m) ** (1 / 16)",
        "0.81 * (n * m**4) ** (1 / 16)",
    ),
    Fault(
        "mix-ln-one-layer-more", "wirings", "src/addnorm/wirings/catalog.py",
        "POST if place.layer < _mix_ln_k(",
        "POST if place.layer <= _mix_ln_k(",
    ),
    Fault(
        "gpt2-depth-in-layers", "wirings", "src/addnorm/wirings/init.py",
        "0.02 / math.sqrt(place.n_sublayers)",
        "0.02 / math.sqrt(place.num_layers)",
    ),
    Fault(
        "equation-first-layer", "equation", "src/addnorm/wirings/equation.py",
        'f"{begin + 1} to {end}"',
        'f"{begin} to {end}"',
    ),
    Fault(
        "trace-projection-by-d", "trace", "src/addnorm/trace/calculation.py",
        "p = _divide(_sum(products), rule.count)",
        "p = _divide(_sum(products), d)",
    ),
    Fault(
        "lerp-operands-swapped", "finder", "src/addnorm/stream/find/operators.py",
        "(Term(args[0], 1.0 - weight), Term(args[1], weight))",
        "(Term(args[0], weight), Term(args[1], 1.0 - weight))",
    ),
    Fault(
        "doubling-is-an-add", "finder", "src/addnorm/stream/find/adds.py",
        "if residual is None or residual.source in multiples:",
        "if residual is None:",
    ),
    Fault(
        "unbiased-norm-as-biased", "finder", "src/addnorm/stream/find/norm.py",
        "x.var(-1, correction=int(self.unbiased), keepdim=True)",
        "x.var(-1, correction=0, keepdim=True)",
    ),
    Fault(
        "closure-tolerance", "finder", "src/addnorm/stream/find/closure.py",
        "torch.float32: 1e-5,",
        "torch.float32: 1e-2,",
    ),
    Fault(
        "partial-writes-passed-over", "finder", "src/addnorm/stream/find/adds.py",
        "unclear.append(PARTIAL)",
        "pass",
    ),
    Fault(
        "mix-ln-named-by-layer", "finder", "src/addnorm/stream/find/naming.py",
        "wirings.mix_ln(max(post) + 1)",
        "wirings.mix_ln(max(post))",
    ),
    Fault(
        "similarity-pairs", "record", "src/addnorm/stream/record/statistics.py",
        "pairs = (counts * (counts - 1))[several]",
        "pairs = (counts * counts)[several]",
    ),
    Fault(
        "padding-counts-as-unchanged", "record", "src/addnorm/stream/record/statistics.py",
        "dots, unchanged = dots[mask], unchanged[mask]",
        "dots = dots[mask]",
    ),
    Fault(
        "every-counts-forwards", "record", "src/addnorm/stream/record/recorder.py",
        "if step % self.every:",
        "if number % self.every:",
    ),
    Fault(
        "factor-of-sum-left-out", "record", "src/addnorm/stream/record/plan.py",
        "probe.factor *= factor.number",
        "probe.factor *= 1.0",
    ),
    Fault(
        "factor-after-norm", "decompose", "src/addnorm/stream/decompose.py",
        "parts = _propagate_through(norm, scale_sum(next(paths), parts))",
        "parts = scale_sum(next(paths), _propagate_through(norm, parts))",
    ),
    Fault(
        "lens-norms-swapped", "decompose", "src/addnorm/stream/decompose.py",
        'if norm == "frozen" else x)',
        'if norm == "recompute" else x)',
    ),
    Fault(
        "mean-write-of-one-sample", "ablate", "src/addnorm/stream/ablate.py",
        "write.mean(layout.others, keepdim=True)",
        "write.mean(layout.others[1:], keepdim=True)",
    ),
    Fault(
        "proof-tolerance", "proof", "src/addnorm/fusion/tolerance.py",
        "\nTIMES = 2  #",
        "\nTIMES = 200  #",
    ),
    Fault(
        "random-numbers-in-another-order", "proof", "src/addnorm/fusion/rng_replay.py",
        "torch.empty_strided(tensor.shape, tensor.stride(), dtype=self.dtype",
        "torch.empty(tensor.shape, dtype=self.dtype",
    ),
    Fault(
        "add-with-a-factor-fused", "fuse", "src/addnorm/fusion/pattern.py",
        'if op.name != "add" or any(term.factor != 1.0 or term.scale is not None for term in terms):',
        'if op.name != "add" or any(term.scale is not None for term in terms):',
    ),
    Fault(
        "rounding-order-not-told-apart", "fuse", "src/addnorm/fusion/fused_call.py",
        "\nFLIPPED = 1e-2  #",
        "\nFLIPPED = 0.9  #",
    ),
    Fault(
        "batch-seeds-collide", "lab_data", "src/addnorm/lab/data.py",
        'f"{seed}, {step}"',
        'f"{seed + step}"',
    ),
    Fault(
        "resumed-without-optimizer", "lab_data", "src/addnorm/lab/train.py",
        '        self.optimizer.load_state_dict(state["optimizer"])\n',
        "",
    ),
    Fault(
        "standard-deviation-for-error", "lab_verdict", "src/addnorm/lab/results.py",
        "statistics.stdev(differences) / math.sqrt(len(differences))",
        "statistics.stdev(differences)",
    ),
    Fault(
        "setting-chosen-by-test", "lab_verdict", "src/addnorm/lab/results.py",
        'key=lambda group: group.loss("validation"))',
        'key=lambda group: group.loss("test"))',
    ),
    Fault(
        "infinity-lies-in-the-band", "lab_verdict", "src/addnorm/lab/published.py",
        "all(math.isfinite(value) and low <= value <= high for",
        "all(not value < low and not value > high for",
    ),
    Fault(
        "torn-line-cut-too-early", "lab_store", "src/addnorm/lab/result_store.py",
        'whole = data.rfind(b"\\n") + 1',
        'whole = max(data.rfind(b"\\n"), 0)',
    ),
    Fault(
        "growth-upside-down", "report", "src/addnorm/report/model_findings.py",
        "times = end / start\n",
        "times = start / end\n",
    ),
    Fault(
        "ids-of-two-drawings-collide", "report", "src/addnorm/report/figure.py",
        'names[old] = f"{name}-{len(names) + 1}"',
        'names[old] = f"id-{len(names) + 1}"',
    ),
    Fault(
        "origin-of-any-site", "server", "src/addnorm/explorer/security.py",
        'if origin is not None and origin != f"http://{host}":',
        'if origin is not None and not origin.startswith("http://"):',
    ),
    Fault(
        "turn-lost-on-cancel", "server", "src/addnorm/explorer/scheduler.py",
        "                self.release(client)  # the slot was assigned, and its waiter is cancelled",
        "                pass",
    ),
    Fault(
        "ties-rounded-to-odd", "pages", "src/addnorm/explorer/static/numbers.js",
        "if (last % 2) return up;",
        "if (last % 2 === 0) return up;",
    ),
    Fault(
        "logarithmic-span", "pages", "src/addnorm/explorer/static/chart/scale.js",
        "[Math.log10(low), Math.log10(high / low)]",
        "[Math.log10(low), Math.log10(high)]",
    ),
    Fault(
        "newest-step-of-one-racer", "pages", "src/addnorm/explorer/static/race/history.js",
        "(running.length ? Math.min(...lengths) :",
        "(running.length ? Math.max(...lengths) :",
    ),
    Fault(
        "layers-counted-from-two", "cli", "src/addnorm/cli/record.py",
        "layers += range(first - 1, last)",
        "layers += range(first, last + 1)",
    ),
    Fault(
        "unproved-exit-code", "cli", "src/addnorm/cli/_output.py",
        "    exit_code = 3\n",
        "    exit_code = 1\n",
    ),
)  # fmt: skip
