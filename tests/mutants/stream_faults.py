"""Faults of the operators of n streams: their kernels, gradients and arguments."""

from mutants.fault import Area, Fault

STREAMS = {
    "stream_kernels": Area(
        ("tests/ops/streams/test_boundary.py tests/ops/streams/test_refusals.py", "tests/ops/streams/test_e*.py tests/ops/test_transforms.py tests/ops/test_cpu.py"),
        (
            Fault(
                "kernel-mix-untransposed", "csrc/streams-inl.h",
                "$s = fma(fill(mix[$k * $n + $j]), $in[$j], $s)", "$s = fma(fill(mix[$j * $n + $k]), $in[$j], $s)",
            ),
            Fault(
                "kernel-mix-gradient-untransposed", "csrc/streams_backward-inl.h",
                "$t = fma(fill(mix[$k * $n + $j]), $g[$k], $t)", "$t = fma(fill(mix[$j * $n + $k]), $g[$k], $t)",
            ),
            Fault("kernel-sinkhorn-without-eps", "csrc/coefficients-inl.h", "$to[$k * $n + $j] * $inverse + eps", "$to[$k * $n + $j] * $inverse"),
            Fault("kernel-chunk-tail-dropped", "csrc/streams-inl.h", "if ($i < $end) step<true>($i, $end - $i, ...);", ""),
            Fault(
                "kernel-collapse-gradient-left-out", "csrc/streams_backward-inl.h",
                "if ($f()) $g[$i] += gather($s.dcollapse", "if (false) $g[$i] += gather($s.dcollapse",
            ),
            Fault("kernel-streams-not-rounded", "csrc/streams-inl.h", "if (!is_same<T, float>) $s = $out.template write<false>(0, $s, W);", ""),
            Fault(
                "projection-tail-packed-by-whole-chunks", "csrc/streams.cpp",
                "packed + $from * $rows * $streams + ($j * $rows + $r) * $n;",
                "packed + $from * $rows * $streams + ($j * $rows + $r) * (packs ? $n : chunk);",
            ),
            Fault(
                "shared-coefficient-not-summed", "ops/streams",
                "($g.sum($rows) if $rows else $g).to($d)", "($g.flatten(0, len($rows) - 1)[0] if $rows else $g).to($d)",
            ),
            Fault("exported-streams-not-transformed", "ops/streams/autograd.py", "$formula(a) if in_transform() else $node", "$node"),
            Fault(
                "rows-needed-by-the-projection", "ops/streams/gradients.py",
                "$left.reshape(-1, $left.shape[-1]).mT @ $right.reshape(-1, $right.shape[-1])",
                "$left.flatten(0, -2).mT @ $right.flatten(0, -2)",
            ),
            Fault(
                "sinkhorn-gradient-of-the-share-with-eps", "ops/streams/gradients.py:_sinkhorn_backward",
                "$share = $first - eps", "$share = $first + eps * $first.shape[-1] * 1000",
            ),
        ),
    ),
}  # fmt: skip
