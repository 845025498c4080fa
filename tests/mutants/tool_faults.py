"""Faults of what inspects, measures and shows models: stream, fusion, lab, report, explorer, command line."""

from mutants.fault import Fault

TOOL_FAULTS = (
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
        "median-of-an-even-number", "record", "src/addnorm/stream/record/statistics.py",
        "sample.median() / 2 - (-sample).median() / 2",
        "sample.median()",
    ),
    Fault(
        "massive-from-the-bound-on", "record", "src/addnorm/stream/record/statistics.py",
        "upcast(t).abs() > bound",
        "upcast(t).abs() >= bound",
    ),
    Fault(
        "tokens-of-zeros-counted", "record", "src/addnorm/stream/record/statistics.py",
        "counts = counted.sum(-1).to(sequences.dtype)",
        "counts = torch.full_like(counted.sum(-1), counted.shape[-1]).to(sequences.dtype)",
    ),
    Fault(
        "median-of-every-second-feature", "record", "src/addnorm/stream/record/statistics.py",
        "// MEDIAN_SAMPLE) | 1",
        "// MEDIAN_SAMPLE)",
    ),
    Fault(
        "sequences-of-one-direction-counted", "record", "src/addnorm/stream/record/statistics.py",
        "several = counts > 1",
        "several = counts > 0",
    ),
    Fault(
        "functions-are-not-restored", "state", "src/addnorm/stream/dataflow/snapshot.py",
        "[arguments, *list_functions(namespaces), *model",
        "[arguments, *model",
    ),
    Fault(
        "removed-parametrization-not-restored", "state", "src/addnorm/stream/dataflow/holders.py",
        '"." in cls.__qualname__ or getattr(owner, cls.__qualname__, None) is cls',
        "owner is not None",
    ),
    Fault(
        "global-values-compared-by-identity", "state", "src/addnorm/stream/dataflow/variables.py",
        "if is_new or not all(is_same(save(item)[0], content) for save, item, content in saved):",
        "if is_new:",
    ),
    Fault(
        "writes-of-numpy-not-restored", "state", "src/addnorm/stream/dataflow/snapshot.py",
        "(contents or (id(t) not in learned and _is_small(t)))",
        "contents",
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
        "one-tolerance-for-all-tensors", "proof", "src/addnorm/fusion/tolerance.py",
        "magnitudes = {name: magnitude_of(t) for name, t in before.items()}",
        "magnitudes = dict.fromkeys(before, max(map(magnitude_of, before.values()), default=0.0))",
    ),
    Fault(
        "new-nans-in-float64-ignored", "proof", "src/addnorm/fusion/tolerance.py",
        "if not (_wide(truth).isnan() & ~_wide(t).isnan()).any()}",
        "if True}",
    ),
    Fault(
        "gradients-are-noise-sooner", "proof", "src/addnorm/fusion/tolerance.py",
        "magnitude <= 64 * round_off",
        "magnitude <= 6400 * round_off",
    ),
    Fault(
        "share-without-float64", "proof", "src/addnorm/fusion/tolerance.py",
        "\nMAX_SHARE = 0.1  #",
        "\nMAX_SHARE = 0.3  #",
    ),
    Fault(
        "eps-of-the-model-for-all-dtypes", "proof", "src/addnorm/fusion/tolerance.py",
        "max(eps, torch.finfo(t.dtype).eps)",
        "eps",
    ),
    Fault(
        "input-gradients-not-taken", "proof", "src/addnorm/fusion/proof.py",
        "modes.append(Mode({}, True))",
        "pass",
    ),
    Fault(
        "calls-compared-without-gradients", "proof", "src/addnorm/fusion/call_proof.py",
        "if outputs and inputs:",
        "if False:",
    ),
    Fault(
        "calls-compared-without-mean-errors", "proof", "src/addnorm/fusion/call_tolerance.py",
        "(GROWTH + sampling) * own + (eps / 2 + sums) * size",
        "math.inf",
    ),
    Fault(
        "arguments-of-other-nodes-unchecked", "proof", "src/addnorm/fusion/wiring.py",
        "if (node.op, node.target, node.args, node.kwargs) != (twin.op, twin.target, *expected):",
        "if False:",
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
