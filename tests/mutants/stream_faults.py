"""Faults of the operators of n streams: their kernels, gradients and arguments, and the overlapped loop of the operation."""

from mutants.fault import Fault

STREAM_FAULTS = (
    Fault(
        "kernel-mix-untransposed", "stream_kernels", "csrc/streams-inl.h",
        "s = fma(fill(mix[k * count + j]), in[j], s);",
        "s = fma(fill(mix[j * count + k]), in[j], s);",
    ),
    Fault(
        "kernel-mix-gradient-untransposed", "stream_kernels", "csrc/streams_backward-inl.h",
        "total = fma(fill(mix[k * count + j]), g[k], total);",
        "total = fma(fill(mix[j * count + k]), g[k], total);",
    ),
    Fault(
        "kernel-sinkhorn-without-eps", "stream_kernels", "csrc/coefficients-inl.h",
        "to[k * n + j] = to[k * n + j] * inverse + eps;",
        "to[k * n + j] = to[k * n + j] * inverse;",
    ),
    Fault(
        "kernel-chunk-tail-dropped", "stream_kernels", "csrc/streams-inl.h",
        "    if (i < end) step<true>(i, end - i, to + (i - from), stride, squares);\n",
        "",
    ),
    Fault(
        "kernel-collapse-gradient-left-out", "stream_kernels", "csrc/streams_backward-inl.h",
        "if (reads_computed()) gradient[i] += gather(s.dcollapse",
        "if (false) gradient[i] += gather(s.dcollapse",
    ),
    Fault(
        "kernel-streams-not-rounded", "stream_kernels", "csrc/streams-inl.h",
        "    if (!is_same<T, float>) s = out.template write<false>(0, s, W);\n",
        "",
    ),
    Fault(
        "projection-tail-packed-by-whole-chunks", "stream_kernels", "csrc/streams.cpp",
        "packed + from * count_rows * streams + (j * count_rows + r) * count;",
        "packed + from * count_rows * streams + (j * count_rows + r) * (packs ? count : chunk);",
    ),
    Fault(
        "overlapped-stats-of-the-next-row", "forward", "csrc/overlap-inl.h",
        "if (a.stats != nullptr) store_moments(a, row, m);\n    if (row + 1 == end)",
        "if (a.stats != nullptr) store_moments(a, row + 1 == end ? row : row + 1, m);\n    if (row + 1 == end)",
    ),
    Fault(
        "shared-coefficient-not-summed", "stream_kernels", "src/addnorm/ops/streams/autograd.py",
        "return (grad.sum(rows) if rows else grad).to(like.dtype)",
        "return (grad.flatten(0, len(rows) - 1)[0] if rows else grad).to(like.dtype)",
    ),
    Fault(
        "exported-streams-not-transformed", "stream_kernels", "src/addnorm/ops/streams/autograd.py",
        "    if capture.transforms_active():",
        "    if capture.forward_ad._current_level >= 0:",
    ),
    Fault(
        "rows-needed-by-the-projection", "stream_kernels", "src/addnorm/ops/streams/gradients.py",
        'torch.einsum("...r,...i->ri", dlogits * saved, flat)',
        "(dlogits * saved).flatten(0, -2).mT @ flat.flatten(0, -2)",
    ),
    Fault(
        "sinkhorn-gradient-of-the-share-with-eps", "stream_kernels", "src/addnorm/ops/streams/gradients.py",
        "share = first - eps",
        "share = first + eps * first.shape[-1] * 1000",
    ),
)  # fmt: skip
