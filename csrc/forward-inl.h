// The loops of the forward. Included twice by each isa_*.cpp, after a vec-inl.h: once for each dtype of the arithmetic.
//
// A row is computed in two stages. `read_row` reads the sum from its source, rounds it to z's dtype, stores it and accumulates its
// moments; `write_rows` normalizes two such rows from the L1 cache. The row is stored in z, or in scratch if z is not requested.
// Reading and writing are instantiated separately: the number of instances is a sum of combinations, not a product. The dtypes that
// models use without options have loops of their own; all others use one loop with `any`.
//
// The arithmetic of a row does not depend on other rows, nor on whether one or two rows are computed at a time.

constexpr bool kWide = sizeof(real) == 8;

// Maximum number of additions in one chain of a lane.
constexpr int64_t kSegment = 64 * W;

// Elements that a pass past the caches prefetches ahead in long rows, whose scratch, weight and bias fill the first-level cache.
constexpr int64_t kAhead = 1024;

struct Moments {
  real mean, rstd;
};

// ----------------------------------------------------------------------------------------------------------- sources

// The source of a row: `get` returns the sum before it is rounded, or the input itself without a branch.
template <class T>
struct NormOnly {
  static constexpr bool kHasBranch = false;
  In<T> x;

  NormOnly(const Forward& a, int64_t row, unsigned char*) : x(a.residual, a.residual_type, row * a.d) {}
  template <bool PART>
  INLINE vec get(int64_t i, int64_t n) const {
    return x.template get<PART>(i, n);
  }
};

template <class R, class B>
struct PlainSum {
  static constexpr bool kHasBranch = true;
  In<R> residual;
  In<B> branch;

  PlainSum(const Forward& a, int64_t row, unsigned char*)
      : residual(a.residual, a.residual_type, row * a.d), branch(a.branch, a.branch_type, row * a.d) {}
  template <bool PART>
  INLINE vec get(int64_t i, int64_t n) const {
    return add(residual.template get<PART>(i, n), branch.template get<PART>(i, n));
  }
  // Prefetch n elements from i on, which may be those of the next rows.
  INLINE void prefetch(int64_t i, int64_t n) const {
    for (int64_t k = 0; k < n; k += 64 / int64_t{sizeof(R)}) {
      residual.prefetch(i + k);
      branch.prefetch(i + k);
    }
  }
};

// residual_scale * residual + row_scale * layer_scale * dropout(branch + branch_bias). Every vector tests which options
// are present: these branches are always predicted.
template <class T>
struct ScaledSum {
  static constexpr bool kHasBranch = true;
  PlainSum<T, T> in;
  const real *residual_scale, *layer_scale, *branch_bias;
  vec residual_factor, row_gain, gain;
  Mask mask;

  ScaledSum(const Forward& a, int64_t row, unsigned char* mask_scratch)
      : in(a, row, mask_scratch),
        residual_scale(static_cast<const real*>(a.add.residual_scale)),
        layer_scale(static_cast<const real*>(a.add.layer_scale)),
        branch_bias(static_cast<const real*>(a.add.branch_bias)),
        residual_factor(fill(static_cast<real>(a.add.residual_factor))) {
    const real row_scale = a.add.row_scale != nullptr ? static_cast<const real*>(a.add.row_scale)[row] : real{1};
    row_gain = fill(row_scale);
    gain = fill(row_scale * static_cast<real>(a.add.branch_factor));
    mask.make(a.add, row, a.d, mask_scratch);
  }
  template <bool PART>
  INLINE vec get(int64_t i, int64_t n) const {
    vec u = in.branch.template get<PART>(i, n);
    if (branch_bias != nullptr) u = add(u, load_some<PART>(branch_bias + i, n));
    if (mask) u = mask.apply(u, i);
    u = mul(u, layer_scale != nullptr ? mul(row_gain, load_some<PART>(layer_scale + i, n)) : gain);
    const vec x = in.residual.template get<PART>(i, n);
    return add(mul(x, residual_scale != nullptr ? load_some<PART>(residual_scale + i, n) : residual_factor), u);
  }
};

// ----------------------------------------------------------------------------------------------------------- reading

// Prefetch cache lines that will be written, while the row is read.
INLINE void prefetch_for_write(const char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 1);
}

// Centred moments, in two passes with one correction of the mean, for a row whose one-pass moments are not accurate. The chains of
// additions are short, since such a row often has one value that is larger than the sum of all others.
template <class Z>
Moments two_pass(const In<Z> row, int64_t d, real guess, double eps) {
  real mean = guess;
  double var = 0;
  for (int pass = 0; pass < 2; ++pass) {
    double d1 = 0, d2 = 0;
    const vec m = fill(mean);
    for (int64_t from = 0; from < d; from += 8 * W) {
      const int64_t to = from + 8 * W < d ? from + 8 * W : d;
      vec s1 = fill(0), s2 = fill(0);
      for (int64_t i = from; i < to; i += W) {
        const vec t = i + W <= d ? sub(row.template get<false>(i, W), m)
                                 : keep_first(sub(row.template get<true>(i, d - i), m), d - i);
        s1 = add(s1, t);
        s2 = fma(t, t, s2);
      }
      d1 += static_cast<double>(sum(s1));
      d2 += static_cast<double>(sum(s2));
    }
    const double left = d1 / static_cast<double>(d);
    var = d2 / static_cast<double>(d) - left * left;
    if (pass == 0) mean = static_cast<real>(static_cast<double>(mean) + left);
  }
  if (var < 0) var = 0;
  return {mean, static_cast<real>(1.0 / __builtin_sqrt(var + eps))};
}

// Store the source, rounded to Z, in `stored`, and return mean and rstd. Without a branch the source is only read.
//
// LayerNorm's moments are accumulated in the same pass, shifted by k, an estimate of the mean from the row's first block: with
// t = z - k, mean = k + sum(t)/d and var = sum(t^2)/d - (sum(t)/d)^2. The subtraction loses no accuracy while the second term is
// small against the first, which the estimate ensures. Otherwise, or if a value is not finite, `two_pass` is used. A constant row has
// t = 0 throughout, so its variance is exactly 0.
//
// `along` writes the row before at the same time (`PreviousRow`): its loads and stores fill the ports that the sums leave free, and nothing
// waits for a row's statistics. It also copies this row to z, if `stored` is not there.
template <class Source, class Z, Norm NORM, class Along>
INLINE Moments read_row_along(const Forward& a, int64_t index, void* stored, unsigned char* mask_scratch, const Along& along) {
  const int64_t d = a.d;
  const Source source(a, index, mask_scratch);
  const Out<Z> row(stored, a.z_type, 0);
  const bool prefetch = NORM != Norm::none && a.prefetch && !Along::kCopies, ahead = d >= 2 * kAhead;
  const int64_t y_bytes = size_of(a.y_type);
  const char* y = static_cast<const char*>(a.y) + index * d * y_bytes;

  // Chains of additions stay short in long rows: the sums of sixteen blocks are added to a second level.
  vec s1[4], s2[4], segment1 = fill(0), segment2 = fill(0);
  for (int u = 0; u < 4; ++u) s1[u] = s2[u] = fill(0);
  real shift = 0;
  vec k = fill(0);
  const int64_t block = 4 * W, full = d - d % block;

  for (int64_t i = 0; i < full; i += block) {
    if (i % (16 * block) == 0 && i > 0) {
      segment1 = add(segment1, add(add(s1[0], s1[1]), add(s1[2], s1[3])));
      segment2 = add(segment2, add(add(s2[0], s2[1]), add(s2[2], s2[3])));
      for (int u = 0; u < 4; ++u) s1[u] = s2[u] = fill(0);
    }
    vec t[4], before[4];
    if (prefetch) prefetch_for_write(y + i * y_bytes, block * y_bytes);
    if constexpr (Along::kCopies) {
      if (ahead) source.prefetch(i + kAhead, block);
    }
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) t[u] = source.template get<false>(i + u * W, W);
    if (Along::kWrites) {  // all loads before the first store, as in the backward
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) before[u] = along.template value<false>(i + u * W, W);
    }
    if (Source::kHasBranch) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) t[u] = row.template write<false>(i + u * W, t[u], W);
    }
    if (Along::kWrites) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) along.template store<false>(i + u * W, before[u], W);
    }
    if (Along::kCopies) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) along.template copy<false>(i + u * W, W);
    }
    if (NORM == Norm::layer && i == 0) {
      const real first = lane0(t[0]);
      vec above = fill(0);
      for (int u = 0; u < 4; ++u) above = add(above, sub(t[u], fill(first)));
      shift = first + sum(above) * (real{1} / (4 * W));
      k = fill(shift);
    }
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      if (NORM == Norm::layer) {
        t[u] = sub(t[u], k);
        s1[u] = add(s1[u], t[u]);
      }
      if (NORM != Norm::none) s2[u] = fma(t[u], t[u], s2[u]);
    }
  }
  for (int64_t i = full; i < d; i += W) {
    const int64_t n = d - i < W ? d - i : W;
    vec t = source.template get<true>(i, n);
    if (Along::kWrites) along.template store<true>(i, along.template value<true>(i, n), n);
    if (Source::kHasBranch) t = row.template write<true>(i, t, n);
    if (Along::kCopies) along.template copy<true>(i, n);
    if (NORM == Norm::layer) {
      if (i == 0) {
        const real first = lane0(t);
        shift = first + sum(keep_first(sub(t, fill(first)), n)) / static_cast<real>(n);
        k = fill(shift);
      }
      t = keep_first(sub(t, k), n);
      s1[0] = add(s1[0], t);
    }
    if (NORM != Norm::none) s2[0] = fma(t, t, s2[0]);
  }
  if (NORM == Norm::none) return {0, 0};

  const double count = static_cast<double>(d);
  // The sums of a float z overflow like float, also if the arithmetic is double.
  const bool limited = kWide && a.z_type != Type::f64;
  const auto total = [limited](vec segments, const vec* s) {
    const real all = sum(add(segments, add(add(s[0], s[1]), add(s[2], s[3]))));
    return limited ? static_cast<double>(static_cast<float>(all)) : static_cast<double>(all);
  };
  const double m2 = total(segment2, s2) / count;
  if (NORM == Norm::rms) return {0, static_cast<real>(1.0 / __builtin_sqrt(m2 + a.eps))};
  const double m1 = total(segment1, s1) / count;
  const double var = m2 - m1 * m1;
  const real mean = static_cast<real>(static_cast<double>(shift) + m1);
  if (!(m1 * m1 <= 0.25 * var)) return two_pass(In<Z>(stored, a.z_type, 0), d, mean, a.eps);
  return {mean, static_cast<real>(1.0 / __builtin_sqrt(var + a.eps))};
}

struct NoRow {
  static constexpr bool kWrites = false, kCopies = false;
  template <bool PART>
  INLINE vec value(int64_t, int64_t) const { return fill(0); }
  template <bool PART>
  INLINE void store(int64_t, vec, int64_t) const {}
  template <bool PART>
  INLINE void copy(int64_t, int64_t) const {}
};

// A row in scratch, copied to z past the caches; without z nothing is copied.
template <class Z>
struct CopiedRow : NoRow {
  static constexpr bool kCopies = true;
  const Z* from;
  Z* to;

  CopiedRow(const Forward& a, int64_t index, const void* stored)
      : from(static_cast<const Z*>(stored)), to(a.z != nullptr ? static_cast<Z*>(a.z) + index * a.d : nullptr) {}
  template <bool PART>
  INLINE void copy(int64_t i, int64_t n) const {
    if (to == nullptr) return;
    if (PART) store_some<true>(to + i, load_some<true>(from + i, n), n);
    else stream_copy(to + i, from + i);
  }
};

template <class Source, class Z, Norm NORM>
Moments read_row(const Forward& a, int64_t index, void* stored, unsigned char* mask_scratch) {
  return read_row_along<Source, Z, NORM>(a, index, stored, mask_scratch, NoRow());
}

// ----------------------------------------------------------------------------------------------------------- writing

// y = (row - mean) * rstd * weight + bias for N rows, the first of which is row `index` of y.
template <class Z, class Y, bool BIAS, int N>
struct Writer {
  static constexpr bool kAny = is_same<Y, any>;
  const real* weight;
  const real* bias;
  Out<Y> y[N];
  In<Z> row[N];
  vec mean[N], rstd[N];
  bool round_x_hat, prefetch_rows;
  Type x_hat_type;
  const char* next_residual;
  const char* next_branch;
  int64_t residual_bytes, branch_bytes, d;

  template <bool PART>
  INLINE void step(int64_t i, int64_t n) const {
    if (prefetch_rows)  // prefetch the next rows while these are written
      for (int r = 0; r < N; ++r) {
        __builtin_prefetch(next_residual + (r * d + i) * residual_bytes, 0, 2);
        __builtin_prefetch(next_branch + (r * d + i) * branch_bytes, 0, 2);
      }
    const vec w = load_some<PART>(weight + i, n);
    const vec b = BIAS && !(kAny && bias == nullptr) ? load_some<PART>(bias + i, n) : fill(0);
    vec t[N];
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) t[r] = row[r].template get<PART>(i, n);
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) {
      t[r] = mul(sub(t[r], mean[r]), rstd[r]);
      if (kAny && round_x_hat) t[r] = round_to(t[r], x_hat_type);
      t[r] = BIAS ? fma(t[r], w, b) : mul(t[r], w);
      y[r].template set<PART>(i, t[r], n);
    }
  }
};

template <class Z, class Y, bool BIAS, int N>
void write_rows(const Forward& a, int64_t index, void* const* rows, const Moments* m) {
  Writer<Z, Y, BIAS, N> writer;
  writer.weight = static_cast<const real*>(a.weight);
  writer.bias = static_cast<const real*>(a.bias);
  writer.round_x_hat = a.round_x_hat;
  writer.x_hat_type = a.x_hat_type;
  writer.prefetch_rows = a.prefetch_rows;
  writer.d = a.d;
  writer.residual_bytes = size_of(a.residual_type);
  writer.branch_bytes = a.branch != nullptr ? size_of(a.branch_type) : writer.residual_bytes;
  writer.next_residual = static_cast<const char*>(a.residual) + (index + N) * a.d * writer.residual_bytes;
  writer.next_branch = static_cast<const char*>(a.branch != nullptr ? a.branch : a.residual) + (index + N) * a.d * writer.branch_bytes;
  for (int r = 0; r < N; ++r) {
    writer.y[r] = Out<Y>(a.y, a.y_type, (index + r) * a.d);
    writer.row[r] = In<Z>(rows[r], a.z_type, 0);
    writer.mean[r] = fill(m[r].mean);
    writer.rstd[r] = fill(m[r].rstd);
  }
  const int64_t d = a.d, full = d - d % W;
#pragma GCC unroll 2
  for (int64_t i = 0; i < full; i += W) writer.template step<false>(i, W);
  if (full < d) writer.template step<true>(full, d - full);
}

// One row, written while the next one is read; with STREAM past the caches, where the next one is copied to z too.
template <class Z, class Y, Norm NORM, bool BIAS, bool STREAM>
struct PreviousRow {
  static constexpr bool kWrites = true, kCopies = STREAM;
  CopiedRow<Z> next;
  const real *weight, *bias;
  In<Z> row;
  Out<Y> y;
  vec mean, rstd;

  PreviousRow(const Forward& a, int64_t index, const void* stored, const void* next_stored, Moments m)
      : next(a, index + 1, next_stored),
        weight(static_cast<const real*>(a.weight)),
        bias(static_cast<const real*>(a.bias)),
        row(stored, a.z_type, 0),
        y(a.y, a.y_type, index * a.d),
        mean(fill(m.mean)),
        rstd(fill(m.rstd)) {}
  template <bool PART>
  INLINE vec value(int64_t i, int64_t n) const {
    const vec t = mul(sub(row.template get<PART>(i, n), mean), rstd), w = load_some<PART>(weight + i, n);
    return BIAS ? fma(t, w, load_some<PART>(bias + i, n)) : mul(t, w);
  }
  template <bool PART>
  INLINE void store(int64_t i, vec v, int64_t n) const {
    if (STREAM && !PART) stream(y.p + i, v);
    else y.template set<PART>(i, v, n);
  }
  template <bool PART>
  INLINE void copy(int64_t i, int64_t n) const {
    next.template copy<PART>(i, n);
  }
};

void store_moments(const Forward& a, int64_t row, Moments m) {
  if (a.z_type == Type::f64) {
    double* to = static_cast<double*>(a.stats) + 2 * row;
    to[0] = static_cast<double>(m.mean);
    to[1] = static_cast<double>(m.rstd);
  } else {
    float* to = static_cast<float*>(a.stats) + 2 * row;
    to[0] = static_cast<float>(m.mean);
    to[1] = static_cast<float>(m.rstd);
  }
}

// Each row is written while the next one is read. With STREAM the results go past the caches, which do not hold them: no line is read
// before it is written. The sums are then in one row of scratch: an element is read before that of the next row replaces it.
template <class T, Norm NORM, bool BIAS, bool STREAM>
void overlapped(const Forward& a, int64_t begin, int64_t end, char* scratch) {
  const int64_t bytes = a.d * size_of(a.z_type);
  // Without z the sum is stored where y will be: an element is read before it is written.
  char* const rows = STREAM ? scratch : static_cast<char*>(a.z != nullptr ? a.z : a.y);
  const auto stored = [rows, bytes](int64_t row) -> void* { return rows + (STREAM ? 0 : row) * bytes; };
  Moments m = STREAM ? read_row_along<PlainSum<T, T>, T, NORM>(a, begin, stored(begin), nullptr, CopiedRow<T>(a, begin, stored(begin)))
                     : read_row<PlainSum<T, T>, T, NORM>(a, begin, stored(begin), nullptr);
  for (int64_t row = begin; row < end; ++row) {
    if (a.stats != nullptr) store_moments(a, row, m);
    if (row + 1 == end) {
      void* const last = stored(row);
      write_rows<T, T, BIAS, 1>(a, row, &last, &m);
      if (STREAM) finish_streams();
      return;
    }
    m = read_row_along<PlainSum<T, T>, T, NORM>(
        a, row + 1, stored(row + 1), nullptr, PreviousRow<T, T, NORM, BIAS, STREAM>(a, row, stored(row), stored(row + 1), m));
  }
}

template <class T, bool STREAM>
auto pick_overlapped(const Forward& a) -> void (*)(const Forward&, int64_t, int64_t, char*) {
  if (a.norm == Norm::layer) return a.bias != nullptr ? overlapped<T, Norm::layer, true, STREAM> : overlapped<T, Norm::layer, false, STREAM>;
  return a.bias != nullptr ? overlapped<T, Norm::rms, true, STREAM> : overlapped<T, Norm::rms, false, STREAM>;
}

template <class T>
void run_overlapped(const Forward& a, int64_t begin, int64_t end, void* scratch) {
  (a.stream && kStreams ? pick_overlapped<T, kStreams>(a) : pick_overlapped<T, false>(a))(a, begin, end, static_cast<char*>(scratch));
}

// ----------------------------------------------------------------------------------------------------------- choosing

using ReadRow = Moments (*)(const Forward&, int64_t, void*, unsigned char*);
using WriteRows = void (*)(const Forward&, int64_t, void* const*, const Moments*);

template <class Source, class Z>
ReadRow pick_norm(Norm norm) {
  if (norm == Norm::layer) return read_row<Source, Z, Norm::layer>;
  return norm == Norm::rms ? read_row<Source, Z, Norm::rms> : read_row<Source, Z, Norm::none>;
}

// The dtypes of residual, branch and z as one number.
constexpr int code(Type a, Type b, Type c = Type::f32) {
  return static_cast<int>(a) + 4 * static_cast<int>(b) + 16 * static_cast<int>(c);
}

ReadRow pick_read(const Forward& a) {
  const Type r = a.residual_type, b = a.branch_type;
  if constexpr (!kWide) {
    if (a.branch == nullptr) {
      if (r == Type::bf16) return pick_norm<NormOnly<bf16>, bf16>(a.norm);
      return r == Type::f16 ? pick_norm<NormOnly<f16>, f16>(a.norm) : pick_norm<NormOnly<float>, float>(a.norm);
    }
    const int dtypes = code(r, b, a.z_type);
    if (a.add.is_default) {
      if (dtypes == code(Type::f32, Type::f32, Type::f32)) return pick_norm<PlainSum<float, float>, float>(a.norm);
      if (dtypes == code(Type::bf16, Type::bf16, Type::bf16)) return pick_norm<PlainSum<bf16, bf16>, bf16>(a.norm);
      if (dtypes == code(Type::f16, Type::f16, Type::f16)) return pick_norm<PlainSum<f16, f16>, f16>(a.norm);
      if (dtypes == code(Type::f32, Type::bf16, Type::f32)) return pick_norm<PlainSum<float, bf16>, float>(a.norm);
    } else {
      if (dtypes == code(Type::f32, Type::f32, Type::f32)) return pick_norm<ScaledSum<float>, float>(a.norm);
      if (dtypes == code(Type::bf16, Type::bf16, Type::bf16)) return pick_norm<ScaledSum<bf16>, bf16>(a.norm);
    }
  }
  return a.branch == nullptr ? pick_norm<NormOnly<any>, any>(a.norm) : pick_norm<ScaledSum<any>, any>(a.norm);
}

template <class Z, class Y, int N>
WriteRows pick_bias(const Forward& a) {
  return a.bias != nullptr ? write_rows<Z, Y, true, N> : write_rows<Z, Y, false, N>;
}

template <int N>
WriteRows pick_write(const Forward& a) {
  if constexpr (!kWide) {
    if (!a.round_x_hat) {
      const int dtypes = code(a.z_type, a.y_type);
      if (dtypes == code(Type::f32, Type::f32)) return pick_bias<float, float, N>(a);
      if (dtypes == code(Type::bf16, Type::bf16)) return pick_bias<bf16, bf16, N>(a);
      if (dtypes == code(Type::f16, Type::f16)) return pick_bias<f16, f16, N>(a);
      if (dtypes == code(Type::f32, Type::bf16)) return pick_bias<float, bf16, N>(a);
    }
  }
  return pick_bias<any, any, N>(a);
}

void forward(const Forward& a, int64_t begin, int64_t end, void* scratch) {
  if constexpr (!kWide) {
    const bool overlaps = a.branch != nullptr && a.add.is_default && a.norm != Norm::none && !a.round_x_hat;
    if (overlaps && (a.stream || !a.prefetch_rows) && end - begin > 1) {
      const int dtypes = code(a.residual_type, a.branch_type, a.z_type);
      if (dtypes == code(Type::f32, Type::f32, Type::f32) && a.y_type == Type::f32) return run_overlapped<float>(a, begin, end, scratch);
      if (dtypes == code(Type::bf16, Type::bf16, Type::bf16) && a.y_type == Type::bf16) return run_overlapped<bf16>(a, begin, end, scratch);
    }
  }
  const ReadRow read = pick_read(a);
  const WriteRows write1 = pick_write<1>(a), write2 = pick_write<2>(a);
  const int64_t bytes = a.d * size_of(a.z_type);
  char* const z = static_cast<char*>(a.branch != nullptr ? a.z : const_cast<void*>(a.residual));
  char* const spare = static_cast<char*>(scratch);
  unsigned char* const mask_scratch = reinterpret_cast<unsigned char*>(spare + (z != nullptr ? 0 : 2 * bytes));
  for (int64_t i = begin; i < end;) {
    const int n = end - i >= 2 ? 2 : 1;
    void* rows[2];
    Moments m[2];
    for (int r = 0; r < n; ++r) {
      rows[r] = z != nullptr ? z + (i + r) * bytes : spare + r * bytes;
      m[r] = read(a, i + r, rows[r], mask_scratch);
      if (a.stats != nullptr) store_moments(a, i + r, m[r]);
    }
    if (a.norm != Norm::none) (n == 2 ? write2 : write1)(a, i, rows, m);
    i += n;
  }
}
