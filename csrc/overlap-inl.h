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
