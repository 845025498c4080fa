// The two stages of a row of the forward. Included after sources-inl.h.
//
// `read_row` reads the sum from its source, rounds it to z's dtype, stores it and accumulates its moments; `write_rows` normalizes
// two such rows from the L1 cache. Reading and writing are instantiated separately: the number of instances is a sum of combinations,
// not a product.

constexpr bool kWide = sizeof(real) == 8;

// Maximum number of additions in one chain of a lane.
constexpr int64_t kSegment = 64 * W;

// Elements that a pass past the caches prefetches ahead in long rows, whose scratch, weight and bias fill the first-level cache.
constexpr int64_t kAhead = 1024;

struct Moments {
  real mean, rstd;
};

// ----------------------------------------------------------------------------------------------------------- reading

// Prefetch cache lines that will be written, while the row is read.
INLINE void prefetch_for_write(const char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 1);
}

// The sums of a row's values and of their terms in `real`, shifted by the mean of the row's first elements as in vec64-inl.h. Their
// error may reach several roundings of float where few elements make up most of the sum: for rows and results of 16 bits, whose own
// rounding is 2^13 times that of a float.
template <class NORM>
struct ShortSums {
  static constexpr double kMaxRatio = 0.25;
  static constexpr bool kSplits = kHasPairs;  // of bfloat16, in every loop the elements of a pair are added in its order
  vec s1[4], s2[4], segment1, segment2, k;
  real shift = 0;

  INLINE ShortSums() : segment1(fill(0)), segment2(fill(0)), k(fill(0)) {
    for (int u = 0; u < 4; ++u) s1[u] = s2[u] = fill(0);
  }
  INLINE void begin(const vec* t, int count, int64_t n) {
    if (!NORM::kCentred) return;
    const real first = lane0(t[0]);
    vec above = fill(0);
    for (int u = 0; u < count; ++u) above = add(above, keep_first(sub(t[u], fill(first)), u + 1 < count ? W : n));
    shift = first + sum(above) / static_cast<real>((count - 1) * W + n);
    k = fill(shift);
  }
  INLINE void add_block(int64_t i, const vec* t) {
    // Chains of additions stay short in long rows: the sums of sixteen blocks are added to a second level.
    if (i % kSegment == 0 && i > 0) {
      segment1 = add(segment1, add(add(s1[0], s1[1]), add(s1[2], s1[3])));
      segment2 = add(segment2, add(add(s2[0], s2[1]), add(s2[2], s2[3])));
      for (int u = 0; u < 4; ++u) s1[u] = s2[u] = fill(0);
    }
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) add_to(u, NORM::kCentred ? sub(t[u], k) : t[u]);
  }
  INLINE void add_part(vec t, int64_t n) { add_to(0, NORM::kCentred ? keep_first(sub(t, k), n) : t); }
  INLINE void add_to(int u, vec t) {
    if (NORM::kCentred) s1[u] = add(s1[u], t);
    s2[u] = NORM::add_term(t, s2[u]);
  }
  INLINE double origin() const { return static_cast<double>(shift); }
  INLINE double values() const { return static_cast<double>(sum(add(segment1, add(add(s1[0], s1[1]), add(s1[2], s1[3]))))); }
  INLINE double terms() const { return static_cast<double>(sum(add(segment2, add(add(s2[0], s2[1]), add(s2[2], s2[3]))))); }
};

// mean and rstd of centred sums. The terms of a float z overflow like floats, although they are summed in double.
template <class NORM>
INLINE Moments moments_of(double mean, double term, double count, const Forward& a) {
  const double terms = term * count;
  if (a.z_type != Type::f64 && terms > 0x1.fffffep127) term = static_cast<double>(__builtin_inff());
  return {static_cast<real>(mean), static_cast<real>(NORM::rstd(term, a.eps))};
}

// Centred moments, in two passes with one correction of the mean, for a row whose moments of one pass are not accurate.
template <class Z, class NORM>
Moments two_pass(const Forward& a, const In<Z> row, double guess) {
  const int64_t d = a.d, full = d - d % W;
  const double count = static_cast<double>(d);
  double mean = guess, var = 0;
  for (int pass = 0; pass < 2; ++pass) {
    WideSums<NORM> sums(mean);
    for (int64_t i = 0; i < full; i += W) sums.add_shifted(row.template get<false>(i, W));
    double s1 = 0, s2 = 0;
    for (int64_t i = full; i < d; ++i) {
      const double t = static_cast<double>(lane0(row.template get<true>(i, 1))) - mean;
      s1 += t;
      s2 += t * t;
    }
    const double left = (sums.values() + s1) / count;
    const double term = (sums.terms() + s2) / count;
    var = term - term == 0 ? term - left * left : term;  // of a float64 row `left`, a round-off, may overflow too
    if (pass == 0) mean += left;
  }
  return moments_of<NORM>(mean, var < 0 ? 0 : var, count, a);
}

// Store the source, rounded to Z, in `stored`, and return mean and rstd. Without a branch the source is only read.
//
// The sums for the moments are accumulated in the same pass, with t = z - shift: mean = shift + E[t] and var = E[t^2] - E[t]^2. If the
// second term is too large against the variance, or a value is not finite, `two_pass` is used. A constant row's variance is exactly 0.
//
// `along` writes the row before at the same time (`PreviousRow`): its loads and stores fill the ports that the sums leave free, and nothing
// waits for a row's statistics. It also copies this row to z, if `stored` is not there.
template <class Source, class Z, class NORM, template <class> class RowSums, class Along>
INLINE Moments read_row_along(const Forward& a, int64_t index, void* stored, unsigned char* mask_scratch, const Along& along) {
  const int64_t d = a.d;
  const Source source(a, index, mask_scratch);
  const Out<Z> row(stored, a.z_type, 0);
  constexpr bool kPair = Source::kPairs && is_same<Z, bf16>;
  const bool splits = !kPair && RowSums<NORM>::kSplits && a.z_type == Type::bf16;
  const bool prefetch = NORM::kIsNorm && a.prefetch && !Along::kCopies, ahead = d >= 2 * kAhead;
  const int64_t y_bytes = size_of(a.y_type);
  const char* y = static_cast<const char*>(a.y) + index * d * y_bytes;

  RowSums<NORM> sums;
  const int64_t block = 4 * W, full = d - d % block;

  for (int64_t i = 0; i < full; i += block) {
    vec t[4], before[4];
    if (prefetch) prefetch_for_write(y + i * y_bytes, block * y_bytes);
    if constexpr (Along::kCopies) {
      if (ahead) source.prefetch(i + kAhead, block);
    }
    for (int u = 0; u < 4; u += 2) source.template get_two<kPair>(i + u * W, t + u);
    if constexpr (Along::kWrites) {  // all loads before the first store, as in the backward
      for (int u = 0; u < 4; u += 2) along.value_two(i + u * W, before + u);
    }
    if (Source::kHasBranch) {
      for (int u = 0; u < 4; u += 2) row.template write_two<kPair>(i + u * W, t + u);
    }
    if constexpr (Along::kWrites) {
      for (int u = 0; u < 4; u += 2) along.store_two(i + u * W, before + u);
    }
    if (Along::kCopies) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) along.template copy<false>(i + u * W, W);
    }
    if (splits)
      for (int u = 0; u < 4; u += 2) split(t + u);
    if constexpr (NORM::kIsNorm) {
      if (i == 0) sums.begin(t, 4, W);
      sums.add_block(i, t);
    }
  }
  for (int64_t i = full; i < d; i += W) {
    const int64_t n = d - i < W ? d - i : W;
    vec t = source.template get<true>(i, n);
    if (Along::kWrites) along.template store<true>(i, along.template value<true>(i, n), n);
    if (Source::kHasBranch) t = row.template write<true>(i, t, n);
    if (Along::kCopies) along.template copy<true>(i, n);
    if constexpr (NORM::kIsNorm) {
      if (i == 0) sums.begin(&t, 1, n);
      sums.add_part(keep_first(t, n), n);
    }
  }
  if constexpr (!NORM::kIsNorm) return {0, 0};
  else {
    const double count = static_cast<double>(d), m2 = sums.terms() / count;
    if constexpr (!NORM::kCentred) return moments_of<NORM>(0, m2, count, a);
    else {
      // The sum of a float z overflows like a float too.
      const bool limited = a.z_type != Type::f64;
      const double all = sums.values(), m1 = all / count, var = m2 - m1 * m1;
      if (!(m1 * m1 <= RowSums<NORM>::kMaxRatio * var)) return two_pass<Z, NORM>(a, In<Z>(stored, a.z_type, 0), sums.origin() + m1);
      return moments_of<NORM>(sums.origin() + (limited ? static_cast<double>(static_cast<float>(all)) / count : m1), var, count, a);
    }
  }
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

template <class Source, class Z, class NORM, template <class> class RowSums>
Moments read_row(const Forward& a, int64_t index, void* stored, unsigned char* mask_scratch) {
  return read_row_along<Source, Z, NORM, RowSums>(a, index, stored, mask_scratch, NoRow());
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
