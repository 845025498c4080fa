"""Faults of what inspects, measures and shows models: stream, fusion, lab, report, explorer, command line."""

from mutants.fault import Area, Fault

TOOLS = {
    "trace": Area(
        ("tests/trace",),
        (Fault("trace-projection-by-d", "trace/calculation.py", "$w.average('projection', 'p', $v, $w.count, ...)", "$w.average('projection', 'p', $v, $w.d, ...)"),),
    ),
    "finder": Area(
        ("tests/stream/find",),
        (
            Fault("lerp-operands-swapped", "stream", "($term($a, $op, 1.0 - $w), $term($b, $op, $w))", "($term($a, $op, $w), $term($b, $op, 1.0 - $w))"),
            Fault("doubling-is-an-add", "stream/find", "$r is None or $r.source in $multiples", "$r is None"),
            Fault("unbiased-norm-as-biased", "stream", "$t / (d - self.unbiased)", "$t / d"),
            Fault("closure-tolerance", "stream/find", "torch.float32: 1e-5", "torch.float32: 1e-2"),
            Fault("partial-writes-passed-over", "stream/find", "$unclear.append(PARTIAL)", "pass"),
            Fault("mix-ln-named-by-layer", "stream/find", "$w.mix_ln(max($post) + 1)", "$w.mix_ln(max($post))"),
        ),
    ),
    "state": Area(
        ("tests/stream/test_state.py",),
        (
            Fault("functions-are-not-restored", "stream/dataflow", "[$a, *list_functions($n), ...]", "[$a, ...]"),
            Fault(
                "removed-parametrization-not-restored", "stream/dataflow",
                "'.' in $c.__qualname__ or getattr($o, $c.__qualname__, None) is $c", "$o is not None",
            ),
            Fault("global-values-compared-by-identity", "stream/dataflow/snapshot.py", "$new or not all(", "$new or False and all("),
            Fault("writes-of-numpy-not-restored", "stream/dataflow", "$c or (id($t) not in $learned and $small($t))", "$c"),
        ),
    ),
    "record": Area(
        (
            "tests/stream/record/test_record*.py",
            "tests/stream/record/test_s*.py",
        ),
        (
            Fault("similarity-pairs", "stream/tokens.py", "$n * ($n - 1)", "$n * $n"),
            Fault("median-of-an-even-number", "stream/tokens.py", "$s.median() / 2 - (-$s).median() / 2", "$s.median()"),
            Fault("massive-from-the-bound-on", "stream/tokens.py", "upcast($t).abs() > $b", "upcast($t).abs() >= $b"),
            Fault(
                "tokens-of-zeros-counted", "stream/tokens.py",
                "counted.sum(-1).to($d)", "torch.full_like(counted.sum(-1), counted.shape[-1]).to($d)",
            ),
            Fault("median-of-every-second-feature", "stream/tokens.py", "max(1, $n // MEDIAN_SAMPLE) | 1", "max(1, $n // MEDIAN_SAMPLE)"),
            Fault("sequences-of-one-direction-counted", "stream/tokens.py", "several = $n > 1", "several = $n > 0"),
            Fault("padding-counts-as-unchanged", "stream/tokens.py", "($b + $w).to($d) == $b", "(x.flat + write.flat).to($d) == x.flat"),
            Fault("every-counts-forwards", "stream/record", "step % self.every", "(self._steps.forwards - 1) % self.every"),
            Fault("factor-of-sum-left-out", "stream", "$p.factor *= $f.number", "$p.factor *= 1.0"),
        ),
    ),
    "decompose": Area(
        ("tests/stream/test_decompose.py",),
        (
            Fault("factors-between-adds-dropped", "stream", "$parts = _replay_path($p, $parts)", "$parts = $parts"),
            Fault("lens-norms-swapped", "stream", "$s if $norm == 'frozen' else $x", "$s if $norm == 'recompute' else $x"),
        ),
    ),
    "ablate": Area(
        ("tests/stream/test_ablate*.py",),
        (Fault("mean-write-of-one-sample", "stream/edits.py", "write.mean($o, keepdim=True)", "write.mean($o[1:], keepdim=True)"),),
    ),
    "proof": Area(
        ("tests/fusion/test_proof*.py tests/fusion/test_call_proof.py tests/fusion/test_wiring.py tests/fusion/test_rng_replay.py",),
        (
            Fault("proof-tolerance", "fusion/tolerance.py", "TIMES = 2", "TIMES = 200"),
            Fault(
                "one-tolerance-for-all-tensors", "fusion",
                "$m = {$name: $f($t) for $name, $t in before.items()}", "$m = dict.fromkeys(before, max(map($f, before.values()), default=0.0))",
            ),
            Fault(
                "new-nans-in-float64-ignored", "fusion",
                "if not ($a.isnan() & ~$b.isnan()).any()", "",
            ),
            Fault("gradients-are-noise-sooner", "fusion", "$m <= 64 * $r", "$m <= 6400 * $r"),
            Fault("share-without-float64", "fusion", "MAX_SHARE = 0.1", "MAX_SHARE = 0.3"),
            Fault("eps-of-the-model-for-all-dtypes", "fusion", "max(eps, torch.finfo($t.dtype).eps)", "eps"),
            Fault("input-gradients-not-taken", "fusion", "$m.append(Mode({}, True))", "pass"),
            Fault("calls-compared-without-gradients", "fusion", "outputs and inputs", "False"),
            Fault("calls-compared-without-mean-errors", "fusion", "(GROWTH + $s) * $own + ($eps / 2 + $t) * $size", "math.inf"),
            Fault(
                "arguments-of-other-nodes-unchecked", "fusion",
                "(node.op, node.target, node.args, node.kwargs) != (...)", "False",
            ),
            Fault(
                "random-numbers-in-another-order", "fusion",
                "torch.empty_strided($t.shape, $t.stride(), ...)", "torch.empty($t.shape, ...)",
            ),
        ),
    ),
    "fuse": Area(
        ("tests/fusion/test_pattern*.py", "tests/fusion/test_fuse*.py tests/fusion/test_families.py"),
        (
            Fault(
                "add-with-a-factor-fused", "fusion",
                "any($t.factor != 1.0 or $t.scale is not None for $t in $ts)", "any($t.scale is not None for $t in $ts)",
            ),
            Fault("rounding-order-not-told-apart", "fusion", "FLIPPED = 1e-2", "FLIPPED = 0.9"),
        ),
    ),
    "lab_data": Area(
        ("tests/lab/test_data.py tests/lab/test_run.py tests/lab/test_train.py",),
        (
            Fault("batch-seeds-collide", "lab/data.py", "f'{seed}, {step}'", "f'{seed + step}'"),
            Fault("resumed-without-optimizer", "lab", "self.optimizer.load_state_dict($s)", "pass"),
        ),
    ),
    "lab_verdict": Area(
        ("tests/lab/test_comparison.py tests/lab/test_theory.py", "tests/lab/test_compare.py"),
        (
            Fault("standard-deviation-for-error", "lab", "statistics.stdev($d) / math.sqrt(len($d))", "statistics.stdev($d)"),
            Fault(
                "setting-chosen-by-test", "lab",
                "min($all, key=lambda $g: $g.loss('validation'))", "min($all, key=lambda $g: $g.loss('test'))",
            ),
            Fault(
                "infinity-lies-in-the-band", "lab",
                "math.isfinite($v) and $low <= $v <= $high", "not $v < $low and not $v > $high",
            ),
        ),
    ),
    "lab_store": Area(
        ("tests/lab/test_result_store.py", "tests/lab/test_compare.py"),
        (Fault("torn-line-cut-too-early", "lab", "$d.rfind(b'\\n') + 1", "max($d.rfind(b'\\n'), 0)"),),
    ),
    "report": Area(
        ("tests/report tests/util/test_svg.py",),
        (
            Fault("growth-upside-down", "report", "end / start", "start / end"),
            Fault("chart-upside-down", "_util/svg.py", "$b.height * (1 - scale.place(y))", "$b.height * scale.place(y)"),
        ),
    ),
    "server": Area(
        ("tests/explorer/test_scheduler.py tests/explorer/test_server*.py",),
        (
            Fault(
                "origin-of-any-site", "explorer",
                "$o is not None and $o != f'http://{host}'", "$o is not None and not $o.startswith('http://')",
            ),
            Fault("place-kept-after-its-turn", "explorer/scheduler.py:_Slots", "if $a is $b: del $place", "if $a is $b: pass"),
        ),
    ),
    "pages": Area(
        (
            "tests/explorer/test_trace*.py",
            "tests/explorer/test_race*.py",
            "tests/explorer/test_stack*.py tests/explorer/test_recording_page.py",
        ),
        (
            Fault("ties-rounded-to-odd", "explorer/static/numbers.js", "if ($x % 2) return $up", "if ($x % 2 === 0) return $up"),
            Fault("logarithmic-span", "explorer/static/chart", "[Math.log10($l), Math.log10($h / $l)]", "[Math.log10($l), Math.log10($h)]"),
            Fault("newest-step-of-one-racer", "explorer/static/race", ".length ? Math.min(", ".length ? Math.max("),
        ),
    ),
    "cli": Area(
        (
            "tests/cli/test_cli.py tests/cli/test_record.py",
            "tests/cli/test_stream.py tests/cli/test_fuse.py",
        ),
        (
            Fault("layers-counted-from-two", "cli", "$layers += range($first - 1, $last)", "$layers += range($first, $last + 1)"),
            Fault("unproved-exit-code", "cli", "exit_code = 3", "exit_code = 1"),
        ),
    ),
}  # fmt: skip
