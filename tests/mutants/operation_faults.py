"""Faults of the operation: its kernels, dispatch, autograd and arguments."""

from mutants.fault import Area, Fault

OPERATION = {
    "past_caches": Area(
        ("tests/functional/test_past_caches.py",),
        (
            Fault(
                "streamed-row-replaced-before-it-is-read", "csrc/row-inl.h",
                "if ($a::kWrites) ...; if ($s::kHasBranch) $t = $row.template write<true>($i, $t, $n);",
                "if ($s::kHasBranch) $t = $row.template write<true>($i, $t, $n); if ($a::kWrites) ...;",
            ),
            Fault("streamed-z-of-the-row-before", "csrc/overlap-inl.h", ": $f($a, $i + 1, $n)", ": $f($a, $i, $n)"),
            Fault("streamed-rows-off-lines", "csrc", "% 64 == 0 && is_resident", "% 4 == 0 && is_resident"),
        ),
    ),
    "save_outputs": Area(
        ("tests/ops/test_save_outputs.py",),
        (
            Fault("rebuilt-z-without-the-bias", "ops/save_outputs.py", "$y if bias is None else $y - $b", "$y"),
            Fault("rebuilt-z-of-rows-that-overflow", "ops/save_outputs.py", "torch.where($r == 0, $r, 1 / $r)", "1 / $r"),
        ),
    ),
    "forward": Area(
        (
            "tests/functional/test_edges.py tests/functional/test_adversarial_rows.py tests/functional/test_functional.py",
            "tests/ops/test_cpu*.py tests/ops/test_operators.py tests/functional/test_p*.py",
        ),
        (
            Fault(
                "sums-of-long-rows-kept", "csrc/row-inl.h",
                "$x = add($x, ...); for ($int $u = 0; $u < 4; ++$u) $a[$u] = $b[$u] = fill(0);", "$x = add($x, ...);",
            ),
            Fault("tail-lanes-counted", "csrc/row-inl.h", "NORM::kCentred ? keep_first($f($t, $k), $n) : $t", "NORM::kCentred ? $f($t, $k) : $t"),
            Fault("squares-summed-in-float", "csrc/forward-inl.h", "$run<float, WideSums>(", "$run<float, ShortSums>("),
            Fault("large-mean-not-centred-again", "csrc", "kMaxRatio = 0x1p20", "kMaxRatio = 0x1p60"),
            Fault("lost-part-of-float64-sums", "csrc/vec64-inl.h", "$a - $a == 0 ? $a + $r : $a", "$a"),
            Fault(
                "overlapped-stats-of-the-next-row", "csrc/overlap-inl.h",
                "store_moments($a, $row, $m); if ($row + 1 == $end)",
                "store_moments($a, $row + 1 == $end ? $row : $row + 1, $m); if ($row + 1 == $end)",
            ),
        ),
    ),
    "backward": Area(
        ("tests/ops/test_autograd.py tests/ops/test_nodes.py", "tests/ops/test_cpu*.py tests/ops/test_operators.py tests/functional/test_[flp]*.py"),
        (
            Fault(
                "chunk-sums-overwritten", "csrc/backward-inl.h",
                "add(load($a + $j), load(chunk_sums + $j))", "load(chunk_sums + $j)",
            ),
            Fault(
                "last-block-not-summed", "csrc/backward-inl.h",
                "$b + $step < $count; $b += 2 * $step", "$b + $step + 1 < $count; $b += 2 * $step",
            ),
            Fault(
                "second-derivative-without-eps", "ops/autograd.py",
                "$f.statistics($z, $norm, eps)", "$f.statistics($z, $norm, 0.0)",
            ),
        ),
    ),
    "dropout": Area(
        (
            "tests/ops/test_philox.py tests/ops/test_cpu_options.py tests/ops/test_nodes.py",
            "tests/functional/test_fuzz.py",
        ),
        (
            Fault("mask-of-odd-rows", "csrc/memory-inl.h", "shift = static_cast<int>($i & 3);", "shift = 0;"),
            Fault("philox-counter-32-bits", "csrc/philox-inl.h", "$c[$b][1] = high_half($c[$b][0]);", "$c[$b][1] = broadcast(0);"),
            Fault(
                "one-gradient-despite-dropout", "ops/autograd.py",
                "{$a.name: $v for $a in $all if str($a.type) == 'float'}", "{$a.name: $v for $a in $all[:5] if str($a.type) == 'float'}",
            ),
        ),
    ),
    "options": Area(
        (
            "tests/ops/test_scale_gradients.py tests/ops/test_cpu_options.py tests/functional/test_functional.py",
            "tests/ops/test_nodes.py tests/ops/test_operators.py tests/functional/test_fuzz.py",
        ),
        (
            Fault("layer-scale-gradient-without-row-scale", "csrc/backward-inl.h", "$d = add($d, mul($u, row_gain[$r]));", "$d = add($d, $u);"),
            Fault(
                "row-scale-gradient-without-layer-scale", "csrc/backward-inl.h",
                "PART ? keep_first(mul($u, layer), $n) : mul($u, layer)", "PART ? keep_first($u, $n) : $u",
            ),
            Fault(
                "residual-gradient-without-scale", "csrc/backward-inl.h",
                "dresidual[$r].template set<PART>($i, mul($t[$r], scale), $n)", "dresidual[$r].template set<PART>($i, $t[$r], $n)",
            ),
            Fault(
                "branch-bias-after-dropout", "csrc/sources-inl.h",
                "if ($bias != nullptr) $u = add($u, load_some<PART>($bias + $i, $n)); if ($m) $u = $m.apply($u, $i);",
                "if ($m) $u = $m.apply($u, $i); if ($bias != nullptr) $u = add($u, load_some<PART>($bias + $i, $n));",
            ),
            Fault("row-scale-expanded-in-its-dtype", "ops/dispatch.py", "$x.to($t).expand(...)", "$x.expand(...)"),
            Fault("row-scale-loses-dimensions-of-one", "reference.py:add_backward", "$x.squeeze(-1)", "$x.squeeze()"),
            Fault(
                "row-scale-terms-rounded", "reference.py:add_backward",
                "drow_scale = $sum(...).squeeze(-1)", "drow_scale = $sum((...).to(row_scale.dtype).to(acc)).squeeze(-1)",
            ),
            Fault(
                "layer-scale-terms-rounded", "reference.py:add_backward",
                "dlayer_scale = $sum(..., layer_scale)", "dlayer_scale = $sum((...).to(layer_scale.dtype).to(acc), layer_scale)",
            ),
            Fault(
                "residual-scale-terms-rounded", "reference.py:add_backward",
                "dresidual_scale = $sum(..., residual_scale)",
                "dresidual_scale = $sum((...).to(residual_scale.dtype).to(acc), residual_scale)",
            ),
            Fault(
                "shared-coefficient-rounded-per-token", "ops/streams",
                "($g.sum($rows) if $rows else $g).to($d)", "($g.to($d).sum($rows) if $rows else $g).to($d)",
            ),
            Fault(
                "gradient-of-streams-is-its-argument", "ops/streams/eager.py",
                "$g.to($d, memory_format=torch.contiguous_format, copy=True)", "$g.to($d).contiguous()",
            ),
            Fault("gradient-is-its-argument", "ops/eager.py", "$t.clone() if $any else $t", "$t"),
            Fault(
                "one-gradient-despite-dtypes", "ops/autograd.py",
                "branch_dtype == a.residual.dtype", "branch_dtype is not None",
            ),
            Fault(
                "one-gradient-despite-options", "ops/autograd.py",
                "$branch == a.residual.dtype and (not $options or $plain)", "$branch == a.residual.dtype",
            ),
            Fault(
                "row-scale-sum-rounded", "csrc/backward-inl.h",
                "= sum(add($a[$r], $b[$r]));", "= lane0(round_to(fill(sum(add($a[$r], $b[$r]))), Type::bf16));",
            ),
            Fault(
                "layer-scale-sum-rounded", "csrc/backward-inl.h",
                "$s.accumulate(kLayerScaleSum, $i, $d)", "$s.accumulate(kLayerScaleSum, $i, round_to($d, Type::bf16))",
            ),
            Fault(
                "features-rounded-before-their-sum", "csrc/backward.cpp",
                "if ($args.use_float64) fold(reinterpret_cast<double*>(sum_of($s)), shape.d);",
                "std::vector<char> rounded(static_cast<size_t>(shape.d * 8));"
                "kernels().loops($args.use_float64).narrow(sum_of($s), rounded.data(), type, shape.d);"
                "kernels().loops($args.use_float64).widen(rounded.data(), type, sum_of($s), shape.d, 0.0);"
                "if ($args.use_float64) fold(reinterpret_cast<double*>(sum_of($s)), shape.d);",
            ),
            Fault(
                "weight-offset-not-in-backward", "csrc/backward.cpp",
                "$a.use_float64, weight_offset) : $scale.ones", "$a.use_float64, 0.0) : $scale.ones",
            ),
        ),
    ),
    "casting": Area(
        (
            "tests/functional/test_functional.py",
            "tests/ops/test_cpu_options.py tests/functional/test_fuzz.py",
        ),
        (Fault("casting-without-add", "functional.py", "out_dtype is None and casting == 'float32'", "out_dtype is None"),),
    ),
    "dtypes": Area(
        (
            "tests/functional/test_functional.py tests/ops/test_transforms.py tests/ops/test_operators.py",
            "tests/ops/test_cpu_options.py",
        ),
        (
            Fault("eps-of-the-residual", "ops/dispatch.py", "$f(dtype=residual_dtype or residual.dtype)", "$f(dtype=residual.dtype)"),
            Fault(
                "fake-output-dtype", "ops/schema.py",
                "$a.out_dtype or ($a.residual if $a.branch is None else $a.branch).dtype", "$a.out_dtype or $a.residual.dtype",
            ),
        ),
    ),
    "in_place": Area(
        ("tests/functional/test_inplace*.py tests/ops/test_aliasing.py",),
        (
            Fault(
                "version-of-y-not-counted", "ops/out.py",
                "[$t for $t in written if $t is not None]", "[$t for $t in written[-1:] if $t is not None]",
            ),
            Fault("neighbours-share-memory", "ops/aliasing.py", "$a[$before] + $bytes > $b", "$a[$before] + $bytes >= $b"),
        ),
    ),
    "autocast": Area(
        ("tests/ops/test_autocast.py tests/functional/test_functional.py",),
        (Fault("autocast-residual-dtype", "ops/autocast.py", "$a.residual_dtype or $t.dtype", "$t.dtype"),),
    ),
    "validation": Area(
        ("tests/ops/test_validation.py tests/functional/test_functional.py tests/functional/test_inplace*.py",),
        (Fault("normalized-shape-last-only", "ops/validation.py", "tuple($t.shape[-len($s) :]) != $s", "$t.shape[-1] != $s[-1]"),),
    ),
    "triton": Area(
        ("tests/ops/triton/test_kernels.py",),
        (Fault("triton-dropout-words", "ops/triton", "tl.join(tl.join($a, $c), tl.join($b, $d))", "tl.join(tl.join($a, $b), tl.join($c, $d))"),),
    ),
    "triton_streams": Area(
        ("tests/ops/triton/test_streams.py",),
        (
            Fault("triton-sinkhorn-one-axis", "ops/triton/streams/coefficients.py:sinkhorn", "$f($m, $eps, 1, ...)", "$f($m, $eps, 2, ...)"),
            Fault(
                "triton-mix-untransposed", "ops/triton/streams/backward.py:write_backward_kernel",
                "$f(mix, $t, $r, j, $w, N, N, $b)", "$f(mix, $t, $r, j * N, $w, 1, N, $b)",
            ),
            Fault(
                "triton-mean-not-removed", "ops/triton/streams/backward.py:write_backward_kernel",
                "$g -= $offset[:, :, None] + $slope", "$g -= $slope",
            ),
            Fault("triton-streams-not-rounded", "ops/triton/streams/forward.py:write_kernel", "$x = rounded.to(tl.float32)", "pass"),
        ),
    ),
    "sharded_streams": Area(
        ("tests/distributed/test_dtensor_streams.py",),
        (Fault("shared-coefficient-sharded", "ops/streams/sharding.py", "$t.dim() == $r + $tails[$n]", "$t.dim() >= $tails[$n]"),),
    ),
}  # fmt: skip
