// A row is written while the next one is read, in the caches or past them: the plain sum in one dtype. Included after row-inl.h.

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

// One row, written while the next one is read; with STREAM past the caches, where the next one is copied to z too.
template <class Z, class Y, bool BIAS, bool STREAM>
struct PreviousRow {
  static constexpr bool kWrites = true, kCopies = STREAM, kPair = kHasPairs && is_same<Z, bf16>;
  CopiedRow<Z> next;
  const real *weight, *bias;  // in the order of pairs, if there are any
  In<Z> row;
  Out<Y> y;
  vec mean, rstd;

  PreviousRow(const Forward& a, int64_t index, const void* stored, const void* next_stored, const real* const* parameters, Moments m)
      : next(a, index + 1, next_stored),
        weight(parameters[0]),
        bias(parameters[1]),
        row(stored, a.z_type, 0),
        y(a.y, a.y_type, index * a.d),
        mean(fill(m.mean)),
        rstd(fill(m.rstd)) {}
  template <bool PART>
  INLINE vec value(int64_t i, int64_t n) const {
    return normalized<PART>(row.template get<PART>(i, n), i, n);
  }
  template <bool PART>
  INLINE vec normalized(vec z, int64_t i, int64_t n) const {
    const vec t = mul(sub(z, mean), rstd), w = load_some<PART>(weight + i, n);
    return BIAS ? fma(t, w, load_some<PART>(bias + i, n)) : mul(t, w);
  }
  INLINE void value_two(int64_t i, vec* t) const {
    row.template get_two<kPair>(i, t);
    for (int u = 0; u < 2; ++u) t[u] = normalized<false>(t[u], i + u * W, W);
  }
  template <bool PART>
  INLINE void store(int64_t i, vec v, int64_t n) const {
    y.template set<PART>(i, v, n);
  }
  INLINE void store_two(int64_t i, const vec* t) const {
    if constexpr (kPair && STREAM) stream_pair(y.p + i, t);
    else if constexpr (STREAM)
      for (int u = 0; u < 2; ++u) stream(y.p + i + u * W, t[u]);
    else store_both<kPair>(y.p + i, t);
  }
  template <bool PART>
  INLINE void copy(int64_t i, int64_t n) const {
    next.template copy<PART>(i, n);
  }
};

// Copy a parameter in the order in which `read_row_along` reads a row of bfloat16.
INLINE const real* split_parameter(const real* from, real* to, int64_t d) {
  if (from == nullptr) return nullptr;
  const int64_t full = d - d % (4 * W);
  for (int64_t i = 0; i < full; i += 2 * W) {
    vec t[2];
    load_both<false>(from + i, t);
    split(t);
    for (int u = 0; u < 2; ++u) store(to + i + u * W, shorten_nan(t[u]));
  }
  for (int64_t i = full; i < d; ++i) to[i] = from[i];
  return to;
}

// Each row is written while the next one is read. With STREAM the results go past the caches, which do not hold them: no line is read
// before it is written. The sums are then in one row of scratch: an element is read before that of the next row replaces it.
template <class T, class Source, template <class> class RowSums, class NORM, bool BIAS, bool STREAM>
void overlapped(const Forward& a, int64_t begin, int64_t end, char* scratch) {
  const int64_t bytes = a.d * size_of(a.z_type);
  // Without z the sum is stored where y will be: an element is read before it is written.
  char* const sums = static_cast<char*>(a.z != nullptr ? a.z : a.y);
  char* const rows = !Source::kHasBranch ? static_cast<char*>(const_cast<void*>(a.residual)) : STREAM ? scratch : sums;
  const real* parameters[2] = {static_cast<const real*>(a.weight), static_cast<const real*>(a.bias)};
  if constexpr (kHasPairs && is_same<T, bf16>) {
    real* const room = reinterpret_cast<real*>(scratch + row_bytes(a));
    for (int k = 0; k < 2; ++k) parameters[k] = split_parameter(parameters[k], room + k * a.d, a.d);
  }
  const auto stored = [rows, bytes](int64_t row) -> void* { return rows + (STREAM ? 0 : row) * bytes; };
  Moments m = STREAM ? read_row_along<Source, T, NORM, RowSums>(a, begin, stored(begin), nullptr, CopiedRow<T>(a, begin, stored(begin)))
                     : read_row<Source, T, NORM, RowSums>(a, begin, stored(begin), nullptr);
  for (int64_t row = begin; row < end; ++row) {
    if (a.stats != nullptr) store_moments(a, row, m);
    if (row + 1 == end) {
      void* const last = stored(row);
      write_rows<T, T, BIAS, 1>(a, row, &last, &m);
      if (STREAM) finish_streams();
      return;
    }
    m = read_row_along<Source, T, NORM, RowSums>(
        a, row + 1, stored(row + 1), nullptr, PreviousRow<T, T, BIAS, STREAM>(a, row, stored(row), stored(row + 1), parameters, m));
  }
}

using Overlapped = void (*)(const Forward&, int64_t, int64_t, char*);

template <class T, class Source, template <class> class RowSums, bool STREAM>
Overlapped pick_overlapped(const Forward& a) {
  return with_norm(a.norm, [&a](auto norm) -> Overlapped {
    using NORM = decltype(norm);
    if constexpr (!NORM::kIsNorm) return nullptr;
    else return a.bias != nullptr ? overlapped<T, Source, RowSums, NORM, true, STREAM> : overlapped<T, Source, RowSums, NORM, false, STREAM>;
  });
}

template <class T, template <class> class RowSums>
void run_overlapped(const Forward& a, int64_t begin, int64_t end, void* scratch) {
  const auto run = a.branch == nullptr        ? pick_overlapped<T, NormOnly<T>, RowSums, false>(a)
                   : a.stream && kStreams ? pick_overlapped<T, PlainSum<T, T>, RowSums, kStreams>(a)
                                          : pick_overlapped<T, PlainSum<T, T>, RowSums, false>(a);
  run(a, begin, end, static_cast<char*>(scratch));
}
