"""Faults of modules and wirings: attention, stacks of one and of several streams, catalog and equations."""

from mutants.fault import Fault

STACK_FAULTS = (
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
        "mixing-matrix-transposed", "streams", "src/addnorm/ops/streams/formula.py",
        "torch.matmul(mix.to(wide), x)",
        "torch.matmul(mix.mT.to(wide), x)",
    ),
    Fault(
        "mixing-matrix-left-out", "streams", "src/addnorm/ops/streams/formula.py",
        "mixed = x if mix is None else",
        "mixed = x if True else",
    ),
    Fault(
        "mixing-loaded-untransposed", "streams", "src/addnorm/wirings/coefficients/hyper.py",
        "*(2 * n + j * n + k for k in range(n) for j in range(n))",
        "*(2 * n + k * n + j for k in range(n) for j in range(n))",
    ),
    Fault(
        "rms-of-one-stream", "streams", "src/addnorm/ops/streams/formula.py",
        "torch.rsqrt(flat.square()",
        "torch.rsqrt(flat[..., : streams.shape[-1]].square()",
    ),
    Fault(
        "write-gate-without-two", "streams", "src/addnorm/wirings/coefficients/hyper.py",
        "self.norm_eps, magnitude=2.0",
        "self.norm_eps, magnitude=1.0",
    ),
    Fault(
        "eps-on-the-write-gate", "streams", "src/addnorm/ops/streams/formula.py",
        "sinkhorn(mix, iterations, gate_eps), inject",
        "sinkhorn(mix, iterations, gate_eps), inject + gate_eps",
    ),
    Fault(
        "eps-missing-on-the-write-gate", "streams", "src/addnorm/ops/streams/formula.py",
        "return collapse, None, inject + gate_eps",
        "return collapse, None, inject",
    ),
    Fault(
        "columns-normalized-last", "streams", "src/addnorm/ops/streams/formula.py",
        "matrix.sum(-2, keepdim=True) + eps)\n        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)",
        "matrix.sum(-1, keepdim=True) + eps)\n        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)",
    ),
    Fault(
        "single-pass-reads-with-its-own-gate", "streams", "src/addnorm/nn/stream_step.py",
        "    if spec.delayed:\n        carried, used = used, unit(spec.n, 0)",
        "    if spec.delayed and gates is None:\n        carried, used = used, unit(spec.n, 0)",
    ),
    Fault(
        "block-pushed-before-the-read", "streams", "src/addnorm/nn/stream_step.py",
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
        "equal-entries-are-one-parameter", "streams", "src/addnorm/nn/stream_step.py",
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
)  # fmt: skip
