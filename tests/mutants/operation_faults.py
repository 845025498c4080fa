"""Faults of the operation: its kernels, dispatch, autograd and arguments."""

from mutants.fault import Fault

OPERATION_FAULTS = (
    Fault(
        "streamed-row-replaced-before-it-is-read", "past_caches", "csrc/row-inl.h",
        "    vec t = source.template get<true>(i, n);\n    if (Along::kWrites) along.template store<true>(i, along.template value<true>(i, n), n);\n    if (Source::kHasBranch) t = row.template write<true>(i, t, n);",
        "    vec t = source.template get<true>(i, n);\n    if (Source::kHasBranch) t = row.template write<true>(i, t, n);\n    if (Along::kWrites) along.template store<true>(i, along.template value<true>(i, n), n);",
    ),
    Fault(
        "streamed-z-of-the-row-before", "past_caches", "csrc/overlap-inl.h",
        ": next(a, index + 1, next_stored),",
        ": next(a, index, next_stored),",
    ),
    Fault(
        "streamed-rows-off-lines", "past_caches", "csrc/glue.h",
        "static_cast<uintptr_t>(bytes)) % 64 == 0 &&",
        "static_cast<uintptr_t>(bytes)) % 4 == 0 &&",
    ),
    Fault(
        "rebuilt-z-without-the-bias", "save_outputs", "src/addnorm/ops/save_outputs.py",
        "y.to(acc) if bias is None else y.to(acc) - bias.to(acc)",
        "y.to(acc)",
    ),
    Fault(
        "rebuilt-z-of-rows-that-overflow", "save_outputs", "src/addnorm/ops/save_outputs.py",
        "torch.where(rstd == 0, rstd, 1 / rstd)",
        "1 / rstd",
    ),
    Fault(
        "sums-of-long-rows-kept", "forward", "csrc/row-inl.h",
        "add(add(s2[0], s2[1]), add(s2[2], s2[3])));\n      for (int u = 0; u < 4; ++u) s1[u] = s2[u] = fill(0);",
        "add(add(s2[0], s2[1]), add(s2[2], s2[3])));",
    ),
    Fault(
        "tail-lanes-counted", "forward", "csrc/row-inl.h",
        "MEAN ? keep_first(sub(t, k), n) : t",
        "MEAN ? sub(t, k) : t",
    ),
    Fault(
        "squares-summed-in-float", "forward", "csrc/forward-inl.h",
        "return run_overlapped<float, WideSums>(",
        "return run_overlapped<float, ShortSums>(",
    ),
    Fault(
        "large-mean-not-centred-again", "forward", "csrc/vec-inl.h",
        "kMaxRatio = 0x1p20;",
        "kMaxRatio = 0x1p60;",
    ),
    Fault(
        "lost-part-of-float64-sums", "forward", "csrc/vec64-inl.h",
        "return all - all == 0 ? all + rest : all;",
        "return all;",
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
        "branch-bias-after-dropout", "options", "csrc/sources-inl.h",
        "    if (branch_bias != nullptr) u = add(u, load_some<PART>(branch_bias + i, n));\n    if (mask) u = mask.apply(u, i);\n",
        "    if (mask) u = mask.apply(u, i);\n    if (branch_bias != nullptr) u = add(u, load_some<PART>(branch_bias + i, n));\n",
    ),
    Fault(
        "row-scale-expanded-in-its-dtype", "options", "src/addnorm/ops/dispatch.py",
        "rows = rows.to(upcast).expand(residual.shape[:-1])",
        "rows = rows.expand(residual.shape[:-1])",
    ),
    Fault(
        "row-scale-loses-dimensions-of-one", "options", "src/addnorm/reference.py",
        "drow_scale = sum_features(du * _cast(layer_scale, acc)).squeeze(-1)",
        "drow_scale = sum_features(du * _cast(layer_scale, acc)).squeeze()",
    ),
    Fault(
        "row-scale-terms-rounded", "options", "src/addnorm/reference.py",
        "sum_features(du * _cast(layer_scale, acc))",
        "sum_features((du * _cast(layer_scale, acc)).to(row_scale.dtype).to(acc))",
    ),
    Fault(
        "layer-scale-terms-rounded", "options", "src/addnorm/reference.py",
        "sum_to(du * rows, layer_scale)",
        "sum_to((du * rows).to(layer_scale.dtype).to(acc), layer_scale)",
    ),
    Fault(
        "residual-scale-terms-rounded", "options", "src/addnorm/reference.py",
        "sum_to(dz * residual.to(acc), residual_scale)",
        "sum_to((dz * residual.to(acc)).to(residual_scale.dtype).to(acc), residual_scale)",
    ),
    Fault(
        "shared-coefficient-rounded-per-token", "options", "src/addnorm/ops/streams/autograd.py",
        "(grad.sum(rows) if rows else grad).to(like.dtype)",
        "(grad.to(like.dtype).sum(rows) if rows else grad).to(like.dtype)",
    ),
    Fault(
        "gradient-of-streams-is-its-argument", "options", "src/addnorm/ops/streams/eager.py",
        "else grad.clone(memory_format=torch.contiguous_format)",
        "else grad.contiguous()",
    ),
    Fault(
        "gradient-is-its-argument", "options", "src/addnorm/ops/eager.py",
        "return out.clone() if any(out is t for t in inputs) else out",
        "return out",
    ),
    Fault(
        "one-gradient-despite-dtypes", "options", "src/addnorm/ops/autograd.py",
        "shared = needs_residual and needs_branch and dresidual_dtype == branch_dtype",
        "shared = needs_residual and needs_branch",
    ),
    Fault(
        "one-gradient-despite-options", "options", "src/addnorm/ops/autograd.py",
        "shared = branch is not None and residual.dtype == branch.dtype and _is_plain_add(add)",
        "shared = branch is not None and residual.dtype == branch.dtype",
    ),
    Fault(
        "row-scale-sum-rounded", "options", "csrc/backward-inl.h",
        "= sum(add(segment_sum[r], row_sum[r]));",
        "= lane0(round_to(fill(sum(add(segment_sum[r], row_sum[r]))), Type::bf16));",
    ),
    Fault(
        "layer-scale-sum-rounded", "options", "csrc/backward-inl.h",
        "sums.accumulate(kLayerScaleSum, i, dlayer);",
        "sums.accumulate(kLayerScaleSum, i, round_to(dlayer, Type::bf16));",
    ),
    Fault(
        "features-rounded-before-their-sum", "options", "csrc/backward.cpp",
        "    if (args.use_float64) fold(reinterpret_cast<double*>(sum_of(sum)), shape.d);\n",
        "    std::vector<char> rounded(static_cast<size_t>(shape.d * 8));\n    kernels().loops(args.use_float64).narrow(sum_of(sum), rounded.data(), type, shape.d);\n    kernels().loops(args.use_float64).widen(rounded.data(), type, sum_of(sum), shape.d, 0.0);\n    if (args.use_float64) fold(reinterpret_cast<double*>(sum_of(sum)), shape.d);\n",
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
        "triton-sinkhorn-one-axis", "triton_streams", "src/addnorm/ops/triton/streams/coefficients.py",
        "        matrix, _ = normalize_matrix(matrix, eps, 1, N, BLOCK_N)\n        matrix, _ = normalize_matrix(matrix, eps, 2, N, BLOCK_N)",
        "        matrix, _ = normalize_matrix(matrix, eps, 2, N, BLOCK_N)\n        matrix, _ = normalize_matrix(matrix, eps, 2, N, BLOCK_N)",
    ),
    Fault(
        "triton-mix-untransposed", "triton_streams", "src/addnorm/ops/triton/streams/backward.py",
        "weights = load_gates(mix, token, rows, j, MIX_WIDTH, N, N, BLOCK_N)",
        "weights = load_gates(mix, token, rows, j * N, MIX_WIDTH, 1, N, BLOCK_N)",
    ),
    Fault(
        "triton-mean-not-removed", "triton_streams", "src/addnorm/ops/triton/streams/backward.py",
        "grad -= offset[:, :, None] + slope[:, :, None] * (x - mean[:, :, None])",
        "grad -= slope[:, :, None] * (x - mean[:, :, None])",
    ),
    Fault(
        "triton-streams-not-rounded", "triton_streams", "src/addnorm/ops/triton/streams/forward.py",
        "            x = rounded.to(tl.float32)\n",
        "",
    ),
    Fault(
        "shared-coefficient-sharded", "sharded_streams", "src/addnorm/ops/streams/sharding.py",
        "return rows > 0 and (t.dim() == rows + _TAILS[name]",
        "return rows > 0 and (t.dim() >= _TAILS[name]",
    ),
)  # fmt: skip
