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
        "getattr(module, entry) if entry.__class__ is str",
        "getattr(module, (lambda learned: [name for name, e in learned.items() if e == learned[entry]][-1])"
        "((module.stage if hasattr(module, 'stage') else module.head).learned)) if entry.__class__ is str",
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
        "hyper-connections-start-without-root-n", "wirings", "src/addnorm/wirings/catalog_streams.py",
        "draw._replace(gain=draw.gain * math.sqrt(n)) if role in WRITES else draw",
        "draw",
    ),
    Fault(
        "blocks-of-two-sublayers-a-layer", "streams", "src/addnorm/wirings/catalog_streams_memory.py",
        "layers_per_block * place.sublayers_per_layer",
        "layers_per_block * 2",
    ),
    Fault(
        "depth-scaled-counts-two-a-layer", "wirings", "src/addnorm/wirings/catalog_streams.py",
        "k = place.layer * place.sublayers_per_layer + place.sublayer + 2",
        "k = place.layer * 2 + place.sublayer + 2",
    ),
    Fault(
        "keel-counts-two-a-layer", "wirings", "src/addnorm/wirings/catalog_streams.py",
        "float(place.n_sublayers)",
        "2.0 * place.num_layers",
    ),
    Fault(
        "middle-sublayer-reads-the-layers-input", "streams", "src/addnorm/wirings/catalog_streams.py",
        "return Stage(2, unit(2, 0), identity(2), (1, 0)",
        "return Stage(2, unit(2, 1), identity(2), (1, 0)",
    ),
    Fault(
        "x0-line-of-one-layer-more", "wirings", "src/addnorm/wirings/catalog_streams_memory.py",
        "max(1, place.num_layers - 1)",
        "place.num_layers",
    ),
    Fault(
        "mhc-head-with-default-eps", "streams", "src/addnorm/wirings/catalog_streams.py",
        "Head(n, coefficients=Computed(SigmoidRead, small)) if head",
        "Head(n, coefficients=Computed(SigmoidRead)) if head",
    ),
    Fault(
        "gated-head-with-default-eps", "streams", "src/addnorm/wirings/catalog_streams.py",
        'options | {"injects": False}',
        '{"rank": rank, "injects": False}',
    ),
    Fault(
        "hyper-norm-with-default-eps", "streams", "src/addnorm/wirings/coefficients/hyper.py",
        "torch.cat(constants), project_eps=self.eps)",
        "torch.cat(constants))",
    ),
    Fault(
        "clamp-of-gated-mix", "streams", "src/addnorm/wirings/coefficients/scales.py",
        "min=self.eps)",
        "min=1e-6)",
    ),
    Fault(
        "gate-of-the-write-without-decay", "streams", "src/addnorm/wirings/coefficients/hyper.py",
        '    decays = ("down", "up", "project_inject")\n',
        '    decays = ("down", "up")\n',
    ),
    Fault(
        "rms-eps-of-the-streams-dtype", "streams", "src/addnorm/nn/stream_step.py",
        "torch.finfo(widen_dtype(x.dtype)).eps",
        "torch.finfo(x.dtype).eps",
    ),
    Fault(
        "norms-of-streams-rounded", "streams", "src/addnorm/nn/stream_step.py",
        "normalize(x, norm, module.norm, 1.0, widen_dtype(x.dtype))",
        "normalize(x, norm, module.norm, 1.0, dtype)",
    ),
    Fault(
        "norm-of-the-embedding-without-residual-dtype", "streams", "src/addnorm/nn/stack.py",
        "normalize(stream, norm, self.norm, 1.0, self.residual_dtype)",
        "normalize(stream, norm, self.norm)",
    ),
    Fault(
        "stacked-write-under-autocast", "streams", "src/addnorm/nn/stream_step.py",
        "        with _without_autocast(streams):\n            return _add_stacked(streams, write)",
        "        return _add_stacked(streams, write)",
    ),
    Fault(
        "gates-under-autocast", "streams", "src/addnorm/nn/stream_step.py",
        "    with _without_autocast(x):  # as in the module's own call\n        return pending, computed.gates()",
        "    return pending, computed.gates()",
    ),
    Fault(
        "dropped-write-in-its-own-dtype", "stack", "src/addnorm/nn/stream_step.py",
        "dtype=torch.promote_types(write.branch.dtype, torch.float32))\n    return functional",
        "dtype=write.branch.dtype)\n    return functional",
    ),
    Fault(
        "read-rounded-before-its-norm", "streams", "src/addnorm/nn/stream_step.py",
        "return total.to(dtype) if norm is None else normalize(total, norm",
        "return total.to(dtype) if norm is None else normalize(total.to(dtype), norm",
    ),
    Fault(
        "frozen-norm-with-eps-of-its-input", "stack", "src/addnorm/nn/expansion.py",
        "torch.finfo(x.dtype).eps if",
        "torch.finfo(total.dtype).eps if",
    ),
    Fault(
        "hyper-read-of-two-sublayers-a-layer", "streams", "src/addnorm/wirings/coefficients/hyper.py",
        "self.collapse[index % self.n] = 1.0",
        "self.collapse[(self.place.layer * 2 + self.place.sublayer) % self.n] = 1.0",
    ),
    Fault(
        "independent-head-with-default-eps", "streams", "src/addnorm/wirings/catalog_streams.py",
        'head=Head(n, coefficients=Computed(SigmoidRead, small)), options={"n": n, "magnitude"',
        'head=Head(n, coefficients=Computed(SigmoidRead)), options={"n": n, "magnitude"',
    ),
    Fault(
        "independent-gates-with-default-eps", "streams", "src/addnorm/wirings/catalog_streams.py",
        'Computed(IndependentConnection, {"magnitude": magnitude} | small)',
        'Computed(IndependentConnection, {"magnitude": magnitude})',
    ),
    Fault(
        "sources-with-default-eps", "streams", "src/addnorm/wirings/coefficients/sources.py",
        "factors = [rms_scale(x, self.eps) for x in wide]",
        "factors = [rms_scale(x, 1e-6) for x in wide]",
    ),
    Fault(
        "reads-of-the-first-layer-everywhere", "wirings", "src/addnorm/wirings/catalog_streams_memory.py",
        "cycle[place.layer % len(cycle)] if",
        "cycle[0] if",
    ),
    Fault(
        "constants-of-the-read-rounded", "streams", "src/addnorm/nn/stream_step.py",
        "x.new_tensor(used, dtype=widen_dtype(x.dtype))",
        "x.new_tensor(used)",
    ),
    Fault(
        "constants-of-the-write-rounded", "streams", "src/addnorm/nn/stream_step.py",
        "wide = widen_dtype(x.dtype)\n            entries",
        "wide = x.dtype\n            entries",
    ),
    Fault(
        "terms-of-a-read-rounded", "streams", "src/addnorm/nn/stream_step.py",
        "term = widen(x) if _is(entry, 1.0) else entry * widen(x)",
        "term = x if _is(entry, 1.0) else entry * x",
    ),
    Fault(
        "replaced-call-of-a-class", "untouched", "src/addnorm/nn/untouched.py",
        "        or kind.__call__ is not Module.__call__  # tracers replace that of all modules\n",
        "",
    ),
    Fault(
        "equation-first-layer", "equation", "src/addnorm/wirings/equation.py",
        'f"{begin + 1} to {end}"',
        'f"{begin} to {end}"',
    ),
)  # fmt: skip
