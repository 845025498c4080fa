"""Faults of modules and wirings: attention, stacks of one and of several streams, catalog and equations."""

from mutants.fault import Area, Fault

STACKS = {
    "attention": Area(
        ("tests/nn/test_attention.py tests/nn/test_cache.py tests/nn/test_transformer*.py",),
        (
            Fault("causal-mask-with-cache", "nn", "$m.tril($keys - $queries)", "$m.tril()"),
            Fault(
                "memory-not-reordered", "nn/cache.py",
                "_Memory($source, $pairs.index_select(...), $order)", "_Memory($source, $pairs, $order)",
            ),
            Fault(
                "memory-of-another-call", "nn/cache.py",
                "$entry is None or (memory is not None and not $same(memory, ...))", "$entry is None",
            ),
        ),
    ),
    "from_torch": Area(
        ("tests/nn/test_from_torch*.py",),
        (Fault("from-torch-eps", "nn/from_torch.py", "LayerNorm($d, $theirs.eps, ...)", "LayerNorm($d, 1e-5, ...)"),),
    ),
    "unmodified": Area(
        ("tests/nn/test_unmodified.py",),
        (
            Fault("replaced-call-of-a-class", "nn", "and $kind.__call__ is Module.__call__", ""),
            Fault("method-of-an-instance", "nn:_is_changed", "if $name in $own", "if False"),
        ),
    ),
    "plain_steps": Area(
        ("tests/nn/test_plain_steps.py", "tests/nn/test_stack*.py tests/nn/test_step.py"),
        (
            Fault("hook-of-a-sublayer-acts-late", "nn:run_plain", "count_hooks() != $before or ", ""),
            Fault("state-not-kept-in-the-loop", "nn:_list_steps", 'or $own["keeps_state"]', ""),
        ),
    ),
    "stack": Area(
        ("tests/nn/test_stack*.py", "tests/nn/test_step.py tests/nn/test_unrolling.py"),
        (
            Fault("two-masks-for-two-streams", "nn", "$w._replace(options=with_seed($w.options, $x))", "$w"),
            Fault(
                "dropped-write-in-its-own-dtype", "nn",
                "torch.zeros_like($t, dtype=torch.promote_types($t.dtype, torch.float32))", "torch.zeros_like($t, dtype=$t.dtype)",
            ),
            Fault(
                "frozen-norm-with-eps-of-its-input", "nn:_freeze",
                "torch.finfo(x.dtype).eps if $e is None", "torch.finfo(total.dtype).eps if $e is None",
            ),
        ),
    ),
    "streams": Area(
        (
            "tests/wirings/test_transcriptions.py tests/wirings/test_coefficients.py",
            "tests/wirings/test_real_models.py",
            "tests/nn/test_streams.py tests/nn/test_every_wiring.py tests/ops/streams",
        ),
        (
            Fault("mixing-matrix-transposed", "ops/streams/formula.py", "torch.matmul(mix.to($w), $x)", "torch.matmul(mix.mT.to($w), $x)"),
            Fault("mixing-matrix-left-out", "ops/streams/formula.py", "$x if mix is None else $y", "$x"),
            Fault(
                "mixing-loaded-untransposed", "wirings/coefficients/hyper.py",
                "(2 * $n + $j * $n + $k for $k in $a for $j in $a)", "(2 * $n + $k * $n + $j for $k in $a for $j in $a)",
            ),
            Fault("rms-of-one-stream", "ops/streams/formula.py", "torch.rsqrt($x.square().mean(...) + $e)", "torch.rsqrt($x[..., : streams.shape[-1]].square().mean(...) + $e)"),
            Fault("write-gate-without-two", "wirings/coefficients/hyper.py:_Projected", "magnitude: float = 2.0", "magnitude: float = 1.0"),
            Fault(
                "eps-on-the-write-gate", "ops/streams/formula.py",
                "return $c, sinkhorn(...), inject", "return $c, sinkhorn(...), inject + gate_eps",
            ),
            Fault("eps-missing-on-the-write-gate", "ops/streams/formula.py", "return $c, None, inject + gate_eps", "return $c, None, inject"),
            Fault(
                "columns-normalized-last", "ops/streams/formula.py",
                "$m = $m / ($m.sum(-2, keepdim=True) + $eps); $m = $m / ($m.sum(-1, keepdim=True) + $eps)",
                "$m = $m / ($m.sum(-1, keepdim=True) + $eps); $m = $m / ($m.sum(-2, keepdim=True) + $eps)",
            ),
            Fault(
                "single-pass-reads-with-its-own-gate", "nn",
                "if $spec.delayed: $c, $u = $u,", "if $spec.delayed and gates is None: $c, $u = $u,",
            ),
            Fault(
                "block-pushed-before-the-read", "nn",
                "used, mix, inject, bias = ... if computed is None else computed(streams)",
                "pushes = computed is not None and spec.coefficients.computes == ('collapse',) and getattr(spec, 'n_out', 0) > spec.n; "
                "sources = (*streams, torch.zeros_like(streams[0])) if pushes else streams; "
                "used, mix, inject, bias = ... if computed is None else computed(sources); "
                "used = tuple(row[: spec.n] for row in used) if pushes else used",
            ),
            Fault("a-mask-for-each-stream", "nn", "self.stage.n_out > 1", "False"),
            Fault(
                "equal-entries-are-one-parameter", "nn",
                "getattr(module, $e) if $e.__class__ is str else $e",
                "getattr(module, [name for name, e in module.stage.learned.items()"
                " if e == module.stage.learned[$e]][-1]) if $e.__class__ is str else $e",
            ),
            Fault("blocks-of-two-sublayers-a-layer", "wirings", "layers_per_block * $p.sublayers_per_layer", "layers_per_block * 2"),
            Fault("middle-sublayer-reads-the-layers-input", "wirings", "Stage(2, unit(2, 0), $a, (1, 0), ...)", "Stage(2, unit(2, 1), $a, (1, 0), ...)"),
            Fault("mhc-head-with-default-eps", "wirings:mhc", "Computed(SigmoidRead, $o)", "Computed(SigmoidRead)"),
            Fault("gated-head-with-default-eps", "wirings", "options | {'injects': False}", "{'rank': rank, 'injects': False}"),
            Fault("hyper-norm-with-default-eps", "wirings/coefficients/hyper.py", "StreamGates('hyper', ..., project_eps=$e)", "StreamGates('hyper', ...)"),
            Fault("clamp-of-gated-mix", "wirings/coefficients/scales.py", "torch.clamp(..., min=self.eps)", "torch.clamp(..., min=1e-6)"),
            Fault("gate-of-the-write-without-decay", "wirings/coefficients", "('down', 'up', 'project_inject')", "('down', 'up')"),
            Fault("rms-eps-of-the-streams-dtype", "nn", "torch.finfo($widen($x.dtype)).eps", "torch.finfo($x.dtype).eps"),
            Fault("norms-of-streams-rounded", "nn", "normalize(x, norm, module.norm, ONE, $widen(x.dtype))", "normalize(x, norm, module.norm, ONE, dtype)"),
            Fault(
                "norm-of-the-embedding-without-residual-dtype", "nn/stack.py:ResidualStack",
                "normalize($x, $n, self.norm, 1.0, self.residual_dtype)", "normalize($x, $n, self.norm)",
            ),
            Fault(
                "stacked-write-under-autocast", "nn",
                "with $off(streams):\n return $add(streams, write)", "return $add(streams, write)",
            ),
            Fault("gates-under-autocast", "nn", "with $off(x):\n $g, $k = $c.gates(), $c.is_constant", "$g, $k = $c.gates(), $c.is_constant"),
            Fault(
                "read-rounded-before-its-norm", "nn",
                "normalize(collapse(row, states), norm, ...)", "normalize(collapse(row, states).to(dtype), norm, ...)",
            ),
            Fault(
                "hyper-read-of-two-sublayers-a-layer", "wirings/coefficients/hyper.py",
                "self.collapse[$i % self.n] = 1.0", "self.collapse[(self.place.layer * 2 + self.place.sublayer) % self.n] = 1.0",
            ),
            Fault("independent-head-with-default-eps", "wirings:independent_hc", "Computed(SigmoidRead, $o)", "Computed(SigmoidRead)"),
            Fault("independent-gates-with-default-eps", "wirings", "Computed(IndependentConnection, ... | small)", "Computed(IndependentConnection, ...)"),
            Fault("sources-with-default-eps", "wirings/coefficients/sources.py", "*$p, self.eps, self.normed_values", "*$p, 1e-6, self.normed_values"),
            Fault("constants-of-the-read-rounded", "nn", "x.new_tensor(used, dtype=$d)", "x.new_tensor(used)"),
            Fault("constants-of-the-write-rounded", "nn", "wide = $widen(streams.dtype); entries =", "wide = streams.dtype; entries ="),
            Fault(
                "terms-of-a-read-rounded", "nn",
                "$f(x) if $is($e, 1.0) else $e * $f(x)", "x if $is($e, 1.0) else $e * x",
            ),
        ),
    ),
    "wirings": Area(
        ("tests/wirings/test_catalog.py tests/wirings/test_equation.py tests/wirings/test_init.py tests/wirings/test_spec.py", "tests/nn/test_stack_equations.py"),
        (
            Fault("deepnorm-encoder-alpha", "wirings", "0.81 * ($n**4 * $m) ** (1 / 16)", "0.81 * ($n * $m**4) ** (1 / 16)"),
            Fault("mix-ln-one-layer-more", "wirings", "POST if $p.layer < $k else PRE", "POST if $p.layer <= $k else PRE"),
            Fault("gpt2-depth-in-layers", "wirings", "0.02 / math.sqrt($p.num_sublayers)", "0.02 / math.sqrt($p.num_layers)"),
            Fault("depth-scaled-counts-two-a-layer", "wirings:_depth_scaled_row", "$p.layer * $p.sublayers_per_layer", "$p.layer * 2"),
            Fault("keel-counts-two-a-layer", "wirings", "1.0 if $p.layer == 0 else float($p.num_sublayers)", "1.0 if $p.layer == 0 else 2.0 * $p.num_layers"),
            Fault("hyper-connections-start-without-root-n", "wirings:_hyper_init", "$d._replace(...) if $role in $writes else $d", "$d"),
            Fault("x0-line-of-one-layer-more", "wirings:_x0_stage", "max(1, $p.num_layers - 1)", "$p.num_layers"),
            Fault("reads-of-the-first-layer-everywhere", "wirings", "$cycle[$p.layer % len($cycle)]", "$cycle[0]"),
        ),
    ),
    "equation": Area(
        ("tests/wirings", "tests/cli/test_wirings.py"),
        (Fault("equation-first-layer", "wirings", "f'{begin + 1} to {end}'", "f'{begin} to {end}'"),),
    ),
}  # fmt: skip
