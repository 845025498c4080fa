// The loops of the backward. Included twice by each isa_*.cpp, after forward-inl.h: once for each dtype of the arithmetic.
//
// Two rows are computed at a time, so that the running sums over rows (dweight, dbias, ...) are loaded and stored once for two rows.
// More rows would not fit the L1 cache: rows of a power of two elements fall on the same few of its sets. `accumulate_means` computes
// the two means in a row's gradient; `write_gradients` computes the gradient of z and passes it to a sink, which writes the
// gradients of residual, branch and the options.
//
// The gradients of a row do not depend on other rows, nor on whether one or two rows are computed at a time.

// Sums over rows: a pointer to each requested sum, null for the others.
struct Sums {
  real* at[kSums];

  // `rows` is the sum of two rows already: chains of additions half as long, and as much more accurate.
  INLINE void accumulate(Sum what, int64_t i, vec rows) const {
    real* to = at[what] + i;
    store(to, add(load(to), rows));
  }
};

// ------------------------------------------------------------------------------------------------------------- sinks

// The gradient of z is the gradient of residual and of branch.
template <class O, int R>
struct PlainGradient {
  Out<O> out;
  int64_t d;
  bool past_caches;

  PlainGradient(const Backward& a, int64_t index, unsigned char*)
      : out(a.dresidual, a.dresidual_type, index * a.d), d(a.d), past_caches(kStreams && a.stream) {}
  template <bool PART>
  INLINE void write(const Sums&, int64_t i, int64_t n, const vec* t) {
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      if (!PART && past_caches) stream(out.p + r * d + i, t[r]);
      else out.template set<PART>(r * d + i, t[r], n);
    }
  }
  void finish(const Backward&, int64_t) {}
};

// All other cases: up to two gradients, in any dtypes, through every option, and the gradients of the scales.
template <int R>
struct ScaledGradients {
  const real *residual_scale, *layer_scale, *branch_bias;
  vec residual_factor, branch_factor, row_gain[R], gain[R], row_sum[R], segment_sum[R];
  Out<any> dresidual[R], dbranch[R];
  In<any> residual[R], branch[R];
  Mask mask[R];

  ScaledGradients(const Backward& a, int64_t index, unsigned char* mask_scratch)
      : residual_scale(static_cast<const real*>(a.add.residual_scale)),
        layer_scale(static_cast<const real*>(a.add.layer_scale)),
        branch_bias(static_cast<const real*>(a.add.branch_bias)),
        residual_factor(fill(static_cast<real>(a.add.residual_factor))),
        branch_factor(fill(static_cast<real>(a.add.branch_factor))) {
    const int64_t bytes = mask_bytes(a.add, a.d);
    for (int r = 0; r < R; ++r) {
      const int64_t row = index + r, at = row * a.d;
      const real row_scale = a.add.row_scale != nullptr ? static_cast<const real*>(a.add.row_scale)[row] : real{1};
      row_gain[r] = fill(row_scale);
      gain[r] = mul(row_gain[r], branch_factor);
      row_sum[r] = segment_sum[r] = fill(0);
      dresidual[r] = Out<any>(a.dresidual, a.dresidual_type, at);
      dbranch[r] = Out<any>(a.dbranch, a.dbranch_type, at);
      residual[r] = In<any>(a.residual, a.residual_type, at);
      branch[r] = In<any>(a.branch, a.branch_type, at);
      mask[r].make(a.add, row, a.d, mask_scratch + r * bytes);
    }
  }

  template <bool PART>
  INLINE void write(const Sums& sums, int64_t i, int64_t n, const vec* t) {
    const vec scale = residual_scale != nullptr ? load_some<PART>(residual_scale + i, n) : residual_factor;
    const vec layer = layer_scale != nullptr ? load_some<PART>(layer_scale + i, n) : branch_factor;
    vec dscale = fill(0), dlayer = fill(0), dbias = fill(0);
    const vec bias = branch_bias != nullptr ? load_some<PART>(branch_bias + i, n) : fill(0);
    if (branch[0] && i % kSegment == 0)
      for (int r = 0; r < R; ++r) {
        segment_sum[r] = add(segment_sum[r], row_sum[r]);
        row_sum[r] = fill(0);
      }
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      if (dresidual[r]) dresidual[r].template set<PART>(i, mul(t[r], scale), n);
      vec g = mul(t[r], layer_scale != nullptr ? mul(row_gain[r], layer) : gain[r]);
      if (mask[r]) g = mask[r].apply(g, i);
      if (dbranch[r]) dbranch[r].template set<PART>(i, g, n);
      dbias = add(dbias, g);
      if (residual[r]) dscale = add(dscale, mul(t[r], residual[r].template get<PART>(i, n)));
      if (branch[r]) {
        vec u = add(branch[r].template get<PART>(i, n), bias);
        if (mask[r]) u = mask[r].apply(u, i);
        u = mul(t[r], u);
        dlayer = add(dlayer, mul(u, row_gain[r]));
        row_sum[r] = add(row_sum[r], PART ? keep_first(mul(u, layer), n) : mul(u, layer));
      }
    }
    if (sums.at[kBranchBiasSum] != nullptr) sums.accumulate(kBranchBiasSum, i, dbias);
    if (sums.at[kResidualScaleSum] != nullptr) sums.accumulate(kResidualScaleSum, i, dscale);
    if (sums.at[kLayerScaleSum] != nullptr) sums.accumulate(kLayerScaleSum, i, dlayer);
  }

  void finish(const Backward& a, int64_t index) {
    if (a.drow_scale == nullptr) return;
    for (int r = 0; r < R; ++r) static_cast<real*>(a.drow_scale)[index + r] = sum(add(segment_sum[r], row_sum[r]));
  }
};

// -------------------------------------------------------------------------------------------------------------- rows

enum class GradZ { unused, used, optional };

// R rows of a backward call. Z: dtype of z and its gradient; DY: dtype of y's gradient; SUMS: which of dweight and dbias are
// requested: 0 neither, 1 dweight, 2 both, 3 known at run time.
template <class Z, class DY, class Sink, class NORM, GradZ DZ, int SUMS, int R>
struct Rows {
  int64_t d;
  bool prefetch;
  const real* weight;
  In<Z> z[R], dz[R];
  In<DY> dy[R];
  Sums sums;
  vec mean[R], rstd[R], c1[R], c2[R];

  Rows(const Backward& a, int64_t index, const Sums& s) : d(a.d), prefetch(a.prefetch), weight(static_cast<const real*>(a.weight)), sums(s) {
    for (int r = 0; r < R; ++r) {
      const int64_t at = (index + r) * a.d;
      z[r] = In<Z>(a.z, a.z_type, at);
      dz[r] = In<Z>(a.dz, a.z_type, at);
      dy[r] = In<DY>(a.dy, a.dy_type, at);
      if (!NORM::kIsNorm) continue;
      const int64_t moments = 2 * (index + r);
      const bool stats64 = a.z_type == Type::f64;
      const double* m64 = static_cast<const double*>(a.stats) + moments;
      const float* m32 = static_cast<const float*>(a.stats) + moments;
      mean[r] = fill(stats64 ? static_cast<real>(m64[0]) : static_cast<real>(m32[0]));
      rstd[r] = fill(stats64 ? static_cast<real>(m64[1]) : static_cast<real>(m32[1]));
      c1[r] = c2[r] = fill(0);
    }
  }

  INLINE vec normalized(int r, vec value) const {
    return mul(NORM::kCentred ? sub(value, mean[r]) : value, rstd[r]);
  }

  // c1 += dy * weight * x_hat, c2 += dy * weight
  template <bool PART>
  INLINE void accumulate_means(int64_t i, int64_t n) {
    const vec w = load_some<PART>(weight + i, n);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vec wdy = mul(dy[r].template get<PART>(i, n), w);
      if (DZ == GradZ::used && prefetch) dz[r].prefetch(i);
      vec x = normalized(r, z[r].template get<PART>(i, n));
      if (PART) x = keep_first(x, n);  // beyond the row x is -mean * rstd, which may be infinite
      c1[r] = fma(wdy, x, c1[r]);
      if (NORM::kCentred) c2[r] = add(c2[r], wdy);
    }
  }

  // dz + rstd * (dy * weight - c2 - slope * c1), and the running parameter gradients
  template <bool PART>
  INLINE void write_gradients(Sink& sink, int64_t i, int64_t n) {
    vec t[R];
    if constexpr (!NORM::kIsNorm) {
      for (int r = 0; r < R; ++r) t[r] = dz[r].template get<PART>(i, n);
    } else {
      const vec w = load_some<PART>(weight + i, n);
      // All loads before the first store: rows of a power of two are 4 kB apart, and a load waits for an earlier store with the same
      // low address bits (3 times slower at d = 1024).
      vec g[R], x[R], dz_rows[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        g[r] = dy[r].template get<PART>(i, n);
        x[r] = z[r].template get<PART>(i, n);
        if (DZ == GradZ::used || (DZ == GradZ::optional && dz[r])) dz_rows[r] = dz[r].template get<PART>(i, n);
        else dz_rows[r] = fill(0);
        if (prefetch) {  // the next rows: the hardware does not prefetch two short sequences per tensor
          dy[r].prefetch(R * d + i);
          z[r].prefetch(R * d + i);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        x[r] = normalized(r, x[r]);
        t[r] = NORM::kCentred ? sub(mul(g[r], w), c2[r]) : mul(g[r], w);
        t[r] = fnma(NORM::slope(x[r]), c1[r], t[r]);
        t[r] = DZ == GradZ::unused ? mul(t[r], rstd[r]) : fma(t[r], rstd[r], dz_rows[r]);
      }
      vec dweight = mul(g[0], x[0]), dbias = g[0];
#pragma GCC unroll 4
      for (int r = 1; r < R; ++r) {
        dweight = fma(g[r], x[r], dweight);
        dbias = add(dbias, g[r]);
      }
      if (SUMS == 3 ? sums.at[kWeightSum] != nullptr : SUMS > 0) sums.accumulate(kWeightSum, i, dweight);
      if (SUMS == 3 ? sums.at[kBiasSum] != nullptr : SUMS > 1) sums.accumulate(kBiasSum, i, dbias);
    }
    sink.template write<PART>(sums, i, n, t);
  }

  INLINE void run(Sink& sink) {
    const int64_t full = d - d % W;
    if constexpr (NORM::kIsNorm) {
      vec segment1[R], segment2[R];
      for (int r = 0; r < R; ++r) segment1[r] = segment2[r] = fill(0);
      for (int64_t i = 0; i < full; i += W) {
        if (i % kSegment == 0 && i > 0)
          for (int r = 0; r < R; ++r) {
            segment1[r] = add(segment1[r], c1[r]);
            segment2[r] = add(segment2[r], c2[r]);
            c1[r] = c2[r] = fill(0);
          }
        accumulate_means<false>(i, W);
      }
      if (full < d) accumulate_means<true>(full, d - full);
      for (int r = 0; r < R; ++r) {
        c1[r] = fill(sum(add(segment1[r], c1[r])) / static_cast<real>(d));
        if (NORM::kCentred) c2[r] = fill(sum(add(segment2[r], c2[r])) / static_cast<real>(d));
      }
    }
    for (int64_t i = 0; i < full; i += W) write_gradients<false>(sink, i, W);
    if (full < d) write_gradients<true>(sink, full, d - full);
  }
};

template <class Z, class DY, class Sink, class NORM, GradZ DZ, int SUMS, int R>
void backward_rows(const Backward& a, int64_t index, const Sums& sums, unsigned char* mask_scratch) {
  Sink sink(a, index, mask_scratch);
  Rows<Z, DY, Sink, NORM, DZ, SUMS, R> rows(a, index, sums);
  rows.run(sink);
  sink.finish(a, index);
}

using BackwardRows = void (*)(const Backward&, int64_t, const Sums&, unsigned char*);

// ---------------------------------------------------------------------------------------------------------- choosing

template <class T, class NORM, GradZ DZ, int R>
BackwardRows pick_sums(const Backward& a) {
  if (a.sums == 0) return backward_rows<T, T, PlainGradient<T, R>, NORM, DZ, 0, R>;
  if constexpr (NORM::kHasBias) return backward_rows<T, T, PlainGradient<T, R>, NORM, DZ, 2, R>;
  else return a.sums == 1 ? backward_rows<T, T, PlainGradient<T, R>, NORM, DZ, 1, R> : backward_rows<T, T, PlainGradient<T, R>, NORM, DZ, 3, R>;
}

// One dtype throughout and one gradient out.
template <class T, class NORM, int R>
BackwardRows pick_plain(const Backward& a) {
  return a.dz != nullptr ? pick_sums<T, NORM, GradZ::used, R>(a) : pick_sums<T, NORM, GradZ::unused, R>(a);
}

// Whether all rows that are read or written have this dtype.
bool all_are(const Backward& a, Type type) {
  const auto is = [type](const void* p, Type t) { return p == nullptr || t == type; };
  return is(a.dy, a.dy_type) && is(a.z, a.z_type) && is(a.dresidual, a.dresidual_type) && is(a.dbranch, a.dbranch_type) &&
         is(a.residual, a.residual_type) && is(a.branch, a.branch_type);
}

template <int R>
BackwardRows pick_backward(const Backward& a) {
  return with_norm(a.norm, [&a](auto norm) -> BackwardRows {
    using NORM = decltype(norm);
    if constexpr (!kWide && NORM::kIsNorm) {
      // The usual sums: all parameters of the norm, or none. Other combinations use the general loop.
      const bool usual = a.sums == 0 || (a.place[kWeightSum] == 0 && (!NORM::kHasBias || a.sums == 2));
      const bool plain = a.add.is_default && a.dresidual != nullptr && a.dbranch == nullptr && usual;
      if (plain && all_are(a, Type::f32)) return pick_plain<float, NORM, R>(a);
      if (plain && all_are(a, Type::bf16)) return pick_plain<bf16, NORM, R>(a);
      if (plain && all_are(a, Type::f16)) return pick_plain<f16, NORM, R>(a);
    }
    return backward_rows<any, any, ScaledGradients<R>, NORM, GradZ::optional, 3, R>;
  });
}

// One block of rows, chunk by chunk: the sums of a chunk are accumulated in `chunk_sums`, those of the block in its partial sums.
void backward_block(const Backward& a, int64_t block, BackwardRows rows1, BackwardRows rows2, real* chunk_sums, unsigned char* mask_scratch) {
  const int64_t begin = block * a.block_rows, end = begin + a.block_rows < a.rows ? begin + a.block_rows : a.rows;
  const int64_t width = a.sums * a.padded_d;
  real* const block_sums = static_cast<real*>(a.partials) + block * width;
  for (int64_t first = begin; first < end; first += kChunkRows) {
    const int64_t last = first + kChunkRows < end ? first + kChunkRows : end;
    real* const here = first == begin ? block_sums : chunk_sums;
    if (width > 0) __builtin_memset(here, 0, sizeof(real) * static_cast<unsigned long>(width));
    Sums sums;
    for (int s = 0; s < kSums; ++s) sums.at[s] = a.place[s] < 0 ? nullptr : here + a.place[s] * a.padded_d;
    int64_t i = first;
    for (; i + 2 <= last; i += 2) rows2(a, i, sums, mask_scratch);
    for (; i < last; ++i) rows1(a, i, sums, mask_scratch);
    if (first != begin)
      for (int64_t j = 0; j < width; j += W) store(block_sums + j, add(load(block_sums + j), load(chunk_sums + j)));
  }
}

void backward(const Backward& a, int64_t begin, int64_t end, void* scratch) {
  const BackwardRows rows1 = pick_backward<1>(a), rows2 = pick_backward<2>(a);
  real* const chunk_sums = static_cast<real*>(scratch);
  const int64_t chunk = a.block_rows > kChunkRows ? a.sums * a.padded_d : 0;
  unsigned char* const mask_scratch = reinterpret_cast<unsigned char*>(chunk_sums + chunk);
  for (int64_t i = begin; i < end; ++i) backward_block(a, i, rows1, rows2, chunk_sums, mask_scratch);
  if (a.stream) finish_streams();
}

void reduce(void* buffers, int64_t count, int64_t stride, int64_t begin, int64_t end) {
  for (int64_t step = 1; step < count; step *= 2)
    for (int64_t b = 0; b + step < count; b += 2 * step) {
      real* to = static_cast<real*>(buffers) + b * stride;
      const real* from = to + step * stride;
      for (int64_t i = begin; i < end; i += W) store(to + i, add(load(to + i), load(from + i)));
    }
}

// ------------------------------------------------------------------------------------------------------- parameters

// A parameter may be float64 where the arithmetic is not: the only dtype that `any` does not support there.
void widen(const void* from, Type type, void* to, int64_t n, double offset) {
  real* const out = static_cast<real*>(to);
  if (!kWide && type == Type::f64) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<real>(static_cast<const double*>(from)[i]) + static_cast<real>(offset);
    return;
  }
  const In<any> in(from, type, 0);
  const vec more = fill(static_cast<real>(offset));
  for (int64_t i = 0; i < n; i += W) {
    const int64_t m = n - i < W ? n - i : W;
    store(out + i, add(in.get<true>(i, m), more), m);
  }
}

void narrow(const void* from, void* to, Type type, int64_t n) {
  const real* const in = static_cast<const real*>(from);
  if (!kWide && type == Type::f64) {
    for (int64_t i = 0; i < n; ++i) static_cast<double*>(to)[i] = static_cast<double>(in[i]);
    return;
  }
  const Out<any> out(to, type, 0);
  for (int64_t i = 0; i < n; i += W) {
    const int64_t m = n - i < W ? n - i : W;
    out.set<true>(i, load(in + i, m), m);
  }
}
