// The loops. Included once by each isa_*.cpp, inside namespace addnorm::<isa>::(anonymous) and after its target pragma.
//
// Forward, a row at a time in two stages: `read_row` adds, rounds to the stream's dtype, stores the row and gathers its
// moments; `write_rows` normalizes two such rows, from the L1 cache. The stored row is the stream where the caller wants it,
// and scratch where not. Dtypes on the way in and dtypes on the way out are instantiated apart: a sum of combinations, not
// a product.
//
// Backward, two rows at a time, so that the running dweight and dbias are loaded and stored once for two rows (more rows
// would not fit the L1 cache: rows of a power of two elements fall on the same few of its sets).
//
// A row's arithmetic is the same alone as beside another, and does not depend on the other rows.

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

// W elements at p; with PART only the first n of them, and zeros.
template <bool PART, class T>
INLINE vec load_some(const T* p, int64_t n) {
  return PART ? load(p, n) : load(p);
}
template <bool PART, class T>
INLINE void store_some(T* p, vec a, int64_t n) {
  if (PART) store(p, a, n);
  else store(p, a);
}

// ---------------------------------------------------------------------------------------------------------- forward

// Elements that one chain of additions in each lane takes, at most.
constexpr int64_t kSegment = 64 * W;

struct Moments {
  float mean, rstd;
};

// Lines that will be written: asked for while the row is read, they have come when it is written.
INLINE void fetch_for_write(const char* p, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 1);
}

// Centred moments of a row whose one-pass moments were not trusted: two passes, the mean corrected once.
template <class Z>
Moments two_pass(const Z* row, int64_t d, float guess, double eps) {
  float mean = guess;
  double var = 0;
  for (int pass = 0; pass < 2; ++pass) {
    double d1 = 0, d2 = 0;
    const vec m = fill(mean);
    for (int64_t from = 0; from < d; from += kSegment) {
      const int64_t to = from + kSegment < d ? from + kSegment : d;
      vec s1 = fill(0.0f), s2 = fill(0.0f);
      for (int64_t i = from; i < to; i += W) {
        const vec t = i + W <= d ? sub(load(row + i), m) : keep_first(sub(load(row + i, d - i), m), d - i);
        s1 = add(s1, t);
        s2 = fma(t, t, s2);
      }
      d1 += static_cast<double>(sum(s1));
      d2 += static_cast<double>(sum(s2));
    }
    const double left = d1 / static_cast<double>(d);
    var = d2 / static_cast<double>(d) - left * left;
    if (pass == 0) mean = static_cast<float>(static_cast<double>(mean) + left);
  }
  if (var < 0) var = 0;
  return {mean, static_cast<float>(1.0 / __builtin_sqrt(var + eps))};
}

// row = residual + branch, rounded to Z; without ADD the row is the residual itself and is only read. Returns mean and rstd.
//
// LayerNorm's moments are gathered in the same pass, shifted by k, an estimate of the mean from the row's first block:
// with t = z - k, mean = k + sum(t)/d and var = sum(t^2)/d - (sum(t)/d)^2. The subtraction is harmless while the second
// term is small against the first, which the estimate makes it; where it is not (or anything is not finite) two passes
// are made. A constant row has t = 0 throughout, so its variance is exactly 0.
template <class R, class B, class Z, bool ADD, bool RMS>
Moments read_row(const Forward& a, int64_t index, void* stored) {
  const int64_t d = a.d;
  const R* residual = static_cast<const R*>(a.residual) + index * d;
  const B* branch = ADD ? static_cast<const B*>(a.branch) + index * d : nullptr;
  Z* row = static_cast<Z*>(stored);
  const bool far = a.far;
  const int y_bytes = a.y_type == Type::bf16 ? 2 : 4;
  const char* y = static_cast<const char*>(a.y) + index * d * y_bytes;

  // Chains of additions stay short in long rows: what sixteen blocks summed goes to a second level.
  vec s1[4], s2[4], far1 = fill(0.0f), far2 = fill(0.0f);
  for (int u = 0; u < 4; ++u) s1[u] = s2[u] = fill(0.0f);
  float shift = 0.0f;
  vec k = fill(0.0f);
  const int64_t block = 4 * W, full = d - d % block;

  for (int64_t i = 0; i < full; i += block) {
    if (i % (16 * block) == 0 && i > 0) {
      far1 = add(far1, add(add(s1[0], s1[1]), add(s1[2], s1[3])));
      far2 = add(far2, add(add(s2[0], s2[1]), add(s2[2], s2[3])));
      for (int u = 0; u < 4; ++u) s1[u] = s2[u] = fill(0.0f);
    }
    vec t[4];
    if (far) fetch_for_write(y + i * y_bytes, static_cast<int>(block) * y_bytes);
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      t[u] = load(residual + i + u * W);
      if (ADD) {
        t[u] = put(row + i + u * W, add(t[u], load(branch + i + u * W)));
      }
    }
    if (!RMS && i == 0) {
      const float first = lane0(t[0]);
      vec above = fill(0.0f);
      for (int u = 0; u < 4; ++u) above = add(above, sub(t[u], fill(first)));
      shift = first + sum(above) * (1.0f / (4 * W));
      k = fill(shift);
    }
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      if (!RMS) {
        t[u] = sub(t[u], k);
        s1[u] = add(s1[u], t[u]);
      }
      s2[u] = fma(t[u], t[u], s2[u]);
    }
  }
  for (int64_t i = full; i < d; i += W) {
    const int64_t n = d - i < W ? d - i : W;
    vec t = load(residual + i, n);
    if (ADD) {
      t = put(row + i, add(t, load(branch + i, n)), n);
    }
    if (!RMS) {
      if (i == 0) {
        const float first = lane0(t);
        shift = first + sum(keep_first(sub(t, fill(first)), n)) / static_cast<float>(n);
        k = fill(shift);
      }
      t = keep_first(sub(t, k), n);
      s1[0] = add(s1[0], t);
    }
    s2[0] = fma(t, t, s2[0]);
  }

  const double count = static_cast<double>(d);
  const double m2 = static_cast<double>(sum(add(far2, add(add(s2[0], s2[1]), add(s2[2], s2[3]))))) / count;
  if (RMS) return {0.0f, static_cast<float>(1.0 / __builtin_sqrt(m2 + a.eps))};
  const double m1 = static_cast<double>(sum(add(far1, add(add(s1[0], s1[1]), add(s1[2], s1[3]))))) / count;
  const double var = m2 - m1 * m1;
  const float mean = static_cast<float>(static_cast<double>(shift) + m1);
  if (!(m1 * m1 <= 0.25 * var)) return two_pass<Z>(row, d, mean, a.eps);
  return {mean, static_cast<float>(1.0 / __builtin_sqrt(var + a.eps))};
}

// y = (row - mean) * rstd * weight + bias for N rows, the first of which is row `index` of y.
template <class Z, class Y, bool WEIGHT, bool BIAS, int N>
struct Writer {
  const float* weight;
  const float* bias;
  Y* y[N];
  const Z* row[N];
  vec mean[N], rstd[N];

  template <bool PART>
  INLINE void step(int64_t i, int64_t n) const {
    const vec w = WEIGHT ? load_some<PART>(weight + i, n) : fill(1.0f);
    const vec b = BIAS ? load_some<PART>(bias + i, n) : fill(0.0f);
    vec t[N];
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) t[r] = load_some<PART>(row[r] + i, n);
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) {
      t[r] = mul(sub(t[r], mean[r]), rstd[r]);
      if (WEIGHT && BIAS) t[r] = fma(t[r], w, b);
      else if (WEIGHT) t[r] = mul(t[r], w);
      else if (BIAS) t[r] = add(t[r], b);
      store_some<PART>(y[r] + i, t[r], n);
    }
  }
};

template <class Z, class Y, bool WEIGHT, bool BIAS, int N>
void write_rows(const Forward& a, int64_t index, void* const* rows, const Moments* m) {
  Writer<Z, Y, WEIGHT, BIAS, N> writer;
  writer.weight = a.weight;
  writer.bias = a.bias;
  for (int r = 0; r < N; ++r) {
    writer.y[r] = static_cast<Y*>(a.y) + (index + r) * a.d;
    writer.row[r] = static_cast<const Z*>(rows[r]);
    writer.mean[r] = fill(m[r].mean);
    writer.rstd[r] = fill(m[r].rstd);
  }
  const int64_t d = a.d, full = d - d % W;
#pragma GCC unroll 2
  for (int64_t i = 0; i < full; i += W) writer.template step<false>(i, W);
  if (full < d) writer.template step<true>(full, d - full);
}

using ReadRow = Moments (*)(const Forward&, int64_t, void*);
using WriteRows = void (*)(const Forward&, int64_t, void* const*, const Moments*);

template <class R, class B, class Z, bool ADD>
ReadRow pick_read(const Forward& a) {
  return a.rms ? read_row<R, B, Z, ADD, true> : read_row<R, B, Z, ADD, false>;
}

// Dtypes of residual, branch and stream; forward_supports (ops.cpp) names the same combinations.
ReadRow pick_read(const Forward& a) {
  const bool residual16 = a.residual_type == Type::bf16;
  if (a.branch == nullptr)
    return residual16 ? pick_read<bf16, bf16, bf16, false>(a) : pick_read<float, float, float, false>(a);
  if (a.branch_type == Type::f32) return pick_read<float, float, float, true>(a);
  if (a.z_type == Type::bf16) return pick_read<bf16, bf16, bf16, true>(a);
  return residual16 ? pick_read<bf16, bf16, float, true>(a) : pick_read<float, bf16, float, true>(a);
}

template <class Z, class Y, int N>
WriteRows pick_write(const Forward& a) {
  if (a.weight != nullptr) return a.bias != nullptr ? write_rows<Z, Y, true, true, N> : write_rows<Z, Y, true, false, N>;
  return a.bias != nullptr ? write_rows<Z, Y, false, true, N> : write_rows<Z, Y, false, false, N>;
}

template <int N>
WriteRows pick_write(const Forward& a) {
  if (a.z_type == Type::bf16) return a.y_type == Type::bf16 ? pick_write<bf16, bf16, N>(a) : pick_write<bf16, float, N>(a);
  return a.y_type == Type::bf16 ? pick_write<float, bf16, N>(a) : pick_write<float, float, N>(a);
}

void forward(const Forward& a, int64_t begin, int64_t end, float* scratch) {
  const ReadRow read = pick_read(a);
  const WriteRows write1 = pick_write<1>(a), write2 = pick_write<2>(a);
  const int64_t bytes = a.d * (a.z_type == Type::bf16 ? 2 : 4);
  char* const stream = static_cast<char*>(a.branch != nullptr ? a.z : const_cast<void*>(a.residual));
  for (int64_t i = begin; i < end;) {
    const int n = end - i >= 2 ? 2 : 1;
    void* rows[2];
    Moments m[2];
    for (int r = 0; r < n; ++r) {
      rows[r] = stream != nullptr ? stream + (i + r) * bytes : reinterpret_cast<char*>(scratch) + r * bytes;
      m[r] = read(a, i + r, rows[r]);
      if (a.stats != nullptr) {
        a.stats[2 * (i + r)] = m[r].mean;
        a.stats[2 * (i + r) + 1] = m[r].rstd;
      }
    }
    (n == 2 ? write2 : write1)(a, i, rows, m);
    i += n;
  }
}

// --------------------------------------------------------------------------------------------------------- backward

// R rows of a backward call. Z: the stream and its gradient; DY: y's gradient; O1 and O2: the gradients that go out (O2 may
// be void: only one does). PARAMS: 0 no parameter gradients, 1 dweight, 2 dweight and dbias.
template <class Z, class DY, class O1, class O2, bool RMS, bool DZ, int PARAMS, int R>
struct Rows {
  int64_t d;
  bool far;
  const float* weight;
  const Z* z;
  const Z* dz;
  const DY* dy;
  O1* out1;
  O2* out2;
  float* dweight;
  float* dbias;
  vec mean[R], rstd[R], c1[R], c2[R];

  INLINE vec normalized(int r, vec value) const { return mul(RMS ? value : sub(value, mean[r]), rstd[r]); }

  // c1 += dy * weight * x_hat, c2 += dy * weight
  template <bool PART>
  INLINE void gather(int64_t i, int64_t n) {
    const vec w = load_some<PART>(weight + i, n);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vec wdy = mul(load_some<PART>(dy + r * d + i, n), w);
      if (DZ && far) __builtin_prefetch(dz + r * d + i);
      c1[r] = fma(wdy, normalized(r, load_some<PART>(z + r * d + i, n)), c1[r]);
      if (!RMS) c2[r] = add(c2[r], wdy);
    }
  }

  // dz + rstd * (dy * weight - c2 - x_hat * c1), and the running parameter gradients
  template <bool PART>
  INLINE void scatter(int64_t i, int64_t n) {
    const vec w = load_some<PART>(weight + i, n);
    // All loads before the first store: rows of a power of two lie 4 kB apart, where a load after a store of the same low
    // address bits waits for it (3 times slower at d = 1024).
    vec g[R], x[R], stream[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      g[r] = load_some<PART>(dy + r * d + i, n);
      x[r] = load_some<PART>(z + r * d + i, n);
      if constexpr (DZ) stream[r] = load_some<PART>(dz + r * d + i, n);
      if (far) {  // the next rows: two short streams a tensor are more than the hardware foresees
        __builtin_prefetch(dy + (R + r) * d + i);
        __builtin_prefetch(z + (R + r) * d + i);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      x[r] = normalized(r, x[r]);
      vec t = RMS ? mul(g[r], w) : sub(mul(g[r], w), c2[r]);
      t = fnma(x[r], c1[r], t);
      if constexpr (DZ) t = fma(t, rstd[r], stream[r]);
      else t = mul(t, rstd[r]);
      store_some<PART>(out1 + r * d + i, t, n);
      if constexpr (!same<O2, void>) store_some<PART>(out2 + r * d + i, t, n);
    }
    // The rows among themselves first: chains of additions half as long, and as much more exact.
    vec dw_rows = mul(g[0], x[0]), db_rows = g[0];
#pragma GCC unroll 4
    for (int r = 1; r < R; ++r) {
      dw_rows = fma(g[r], x[r], dw_rows);
      db_rows = add(db_rows, g[r]);
    }
    if (PARAMS > 0) store(dweight + i, add(load(dweight + i), dw_rows));
    if (PARAMS > 1) store(dbias + i, add(load(dbias + i), db_rows));
  }

  INLINE void run(const float* stats) {
    for (int r = 0; r < R; ++r) {
      mean[r] = fill(stats[2 * r]);
      rstd[r] = fill(stats[2 * r + 1]);
      c1[r] = c2[r] = fill(0.0f);
    }
    const int64_t full = d - d % W;
    vec far1[R], far2[R];
    for (int r = 0; r < R; ++r) far1[r] = far2[r] = fill(0.0f);
    for (int64_t i = 0; i < full; i += W) {
      if (i % kSegment == 0 && i > 0)
        for (int r = 0; r < R; ++r) {
          far1[r] = add(far1[r], c1[r]);
          far2[r] = add(far2[r], c2[r]);
          c1[r] = c2[r] = fill(0.0f);
        }
      gather<false>(i, W);
    }
    if (full < d) gather<true>(full, d - full);
    for (int r = 0; r < R; ++r) {
      c1[r] = fill(sum(add(far1[r], c1[r])) / static_cast<float>(d));
      if (!RMS) c2[r] = fill(sum(add(far2[r], c2[r])) / static_cast<float>(d));
    }
    for (int64_t i = 0; i < full; i += W) scatter<false>(i, W);
    if (full < d) scatter<true>(full, d - full);
  }
};

template <class Z, class DY, class O1, class O2, bool RMS, bool DZ, int PARAMS, int R>
void backward_rows(const Backward& a, int64_t index, float* dweight, float* dbias) {
  const int64_t at = index * a.d;
  Rows<Z, DY, O1, O2, RMS, DZ, PARAMS, R> rows;
  rows.d = a.d;
  rows.far = a.far;
  rows.weight = a.weight;
  rows.z = static_cast<const Z*>(a.z) + at;
  rows.dz = DZ ? static_cast<const Z*>(a.dz) + at : nullptr;
  rows.dy = static_cast<const DY*>(a.dy) + at;
  rows.out1 = static_cast<O1*>(a.dresidual) + at;
  if constexpr (!same<O2, void>) rows.out2 = static_cast<O2*>(a.dbranch) + at;
  rows.dweight = dweight;
  rows.dbias = dbias;
  rows.run(a.stats + 2 * index);
}

// One block of rows, chunk by chunk: the parameter gradients of a chunk are summed in `chunk_sums`, those of the block in its
// place among the partials.
template <class Z, class DY, class O1, class O2, bool RMS, bool DZ, int PARAMS>
void backward_block(const Backward& a, int64_t block, float* chunk_sums) {
  const int64_t begin = block * a.block_rows, end = begin + a.block_rows < a.rows ? begin + a.block_rows : a.rows;
  const int64_t sums = 2 * a.padded_d;
  float* block_sums = PARAMS > 0 ? a.partials + block * sums : nullptr;
  for (int64_t first = begin; first < end; first += kChunkRows) {
    const int64_t last = first + kChunkRows < end ? first + kChunkRows : end;
    float* dweight = first == begin ? block_sums : chunk_sums;
    float* dbias = PARAMS > 1 ? dweight + a.padded_d : nullptr;
    if (PARAMS > 0) __builtin_memset(dweight, 0, sizeof(float) * static_cast<unsigned long>(sums));
    int64_t i = first;
    for (; i + 2 <= last; i += 2) backward_rows<Z, DY, O1, O2, RMS, DZ, PARAMS, 2>(a, i, dweight, dbias);
    for (; i < last; ++i) backward_rows<Z, DY, O1, O2, RMS, DZ, PARAMS, 1>(a, i, dweight, dbias);
    if (PARAMS > 0 && first != begin)
      for (int64_t j = 0; j < sums; j += W) store(block_sums + j, add(load(block_sums + j), load(chunk_sums + j)));
  }
}

using BackwardBlock = void (*)(const Backward&, int64_t, float*);

template <class Z, class DY, class O1, class O2, bool DZ>
BackwardBlock pick_backward(const Backward& a) {
  if (a.partials == nullptr)
    return a.rms ? backward_block<Z, DY, O1, O2, true, DZ, 0> : backward_block<Z, DY, O1, O2, false, DZ, 0>;
  if (!a.rms) return backward_block<Z, DY, O1, O2, false, DZ, 2>;
  return a.want_dbias ? backward_block<Z, DY, O1, O2, true, DZ, 2> : backward_block<Z, DY, O1, O2, true, DZ, 1>;
}

template <class Z, class DY, class O1, class O2>
BackwardBlock pick_backward(const Backward& a) {
  return a.dz != nullptr ? pick_backward<Z, DY, O1, O2, true>(a) : pick_backward<Z, DY, O1, O2, false>(a);
}

// Dtypes of stream, dy, and what goes out; backward_supports names the same combinations.
BackwardBlock pick_backward(const Backward& a) {
  if (a.z_type == Type::bf16) return pick_backward<bf16, bf16, bf16, void>(a);
  if (a.dy_type == Type::bf16) return pick_backward<float, bf16, float, bf16>(a);
  return a.dbranch != nullptr ? pick_backward<float, float, float, bf16>(a) : pick_backward<float, float, float, void>(a);
}

void backward(const Backward& a, int64_t begin, int64_t end, float* scratch) {
  const BackwardBlock block = pick_backward(a);
  for (int64_t i = begin; i < end; ++i) block(a, i, scratch);
}

void reduce(float* buffers, int64_t count, int64_t stride, int64_t begin, int64_t end) {
  for (int64_t step = 1; step < count; step *= 2)
    for (int64_t b = 0; b + step < count; b += 2 * step) {
      float* to = buffers + b * stride;
      const float* from = to + step * stride;
      for (int64_t i = begin; i < end; i += W) store(to + i, add(load(to + i), load(from + i)));
    }
}

// ------------------------------------------------------------------------------------------------------- parameters

void widen(const void* from, Type type, float* to, int64_t n) {
  const bf16* narrow = static_cast<const bf16*>(from);
  const float* wide = static_cast<const float*>(from);
  for (int64_t i = 0; i < n; i += W) {
    const int64_t m = n - i < W ? n - i : W;
    store(to + i, type == Type::bf16 ? load(narrow + i, m) : load(wide + i, m), m);
  }
}

void narrow(const float* from, void* to, Type type, int64_t n) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t m = n - i < W ? n - i : W;
    if (type == Type::bf16) store(static_cast<bf16*>(to) + i, load(from + i, m), m);
    else store(static_cast<float*>(to) + i, load(from + i, m), m);
  }
}
