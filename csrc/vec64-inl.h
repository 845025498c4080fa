// A vector of doubles, in the compiler's own vectors: one text for every instruction set, since float64 is for accuracy and its time is
// that of the memory. Included inside namespace addnorm::<isa>::(anonymous)::float64.

using real = double;
#define EACH_TYPE(X) X(f32, float) X(bf16, bf16) X(f16, f16) X(f64, double)

#if defined(ADDNORM_AVX512)
constexpr int W = 8;
#elif defined(ADDNORM_AVX2)
constexpr int W = 4;
#else
constexpr int W = 2;
#endif
typedef double vec __attribute__((vector_size(8 * W)));

INLINE vec fill(double x) { return x - vec{}; }
INLINE vec add(vec a, vec b) { return a + b; }
INLINE vec sub(vec a, vec b) { return a - b; }
INLINE vec mul(vec a, vec b) { return a * b; }
INLINE vec fma(vec a, vec b, vec c) { return a * b + c; }
INLINE vec fnma(vec a, vec b, vec c) { return c - a * b; }
INLINE double lane0(vec a) { return a[0]; }
INLINE double sum(vec a) {
  double s[W];
  __builtin_memcpy(s, &a, sizeof a);
  for (int n = W / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) s[i] += s[i + n];
  return s[0];
}
INLINE vec keep_first(vec a, int64_t n) {
  for (int i = 0; i < W; ++i) a[i] = i < n ? a[i] : 0.0;
  return a;
}
INLINE vec select(uint32_t bits, vec a) {
  for (int i = 0; i < W; ++i) a[i] = bits >> i & 1 ? a[i] : 0.0;
  return a;
}

INLINE vec load(const double* p) {
  vec a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
INLINE void store(double* p, vec a) { __builtin_memcpy(p, &a, sizeof a); }

// Parts of a vector and all other dtypes, one element at a time, not inlined: they are rare, and inlining makes the library large.
template <class T>
OUTLINE void widen_lanes(const T* p, double* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<double>(widen1(p[i]));
}
template <class T>
OUTLINE void narrow_lanes(const double* p, T* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) narrow1(p[i], to + i);
}
template <class T>
INLINE vec load(const T* p, int64_t n) {
  double lanes[W] = {};
  widen_lanes(p, lanes, n);
  return load(lanes);
}
template <class T>
INLINE vec load(const T* p) {
  return load(p, W);
}
template <class T>
INLINE void store(T* p, vec a, int64_t n) {
  double lanes[W];
  store(lanes, a);
  narrow_lanes(lanes, p, n);
}
template <class T>
INLINE void store(T* p, vec a) {
  store(p, a, W);
}
template <class T>
INLINE vec store_rounded(T* p, vec a) {
  store(p, a);
  return load(p);
}
template <class T>
INLINE vec store_rounded(T* p, vec a, int64_t n) {
  store(p, a, n);
  return load(p, n);
}

// The sums of a row's values, if the norm is centred, and of their terms, shifted by the mean of the row's first elements. Each
// addition to a running sum is corrected by its rounding error (Neumaier), so an error does not grow with the length of a row, or
// with one element that is larger than the sum of all others. The shift loses no accuracy while the squared mean of what is left is
// small against the variance.
template <class NORM>
struct WideSums {
  static constexpr bool kSplits = false;
  static constexpr double kMaxRatio = 0.25;
  vec s1 = {}, s2 = {}, lost1 = {}, lost2 = {}, shift = {};

  INLINE WideSums() {}
  explicit INLINE WideSums(double origin) { shift += origin; }
  // Take the shift from the first vectors of a row, the last of which has n elements.
  INLINE void begin(const vec* t, int count, int64_t n) {
    if (!NORM::kCentred) return;
    const double first = lane0(t[0]);
    vec above = {};
    for (int u = 0; u < count; ++u) above = add(above, keep_first(sub(t[u], fill(first)), u + 1 < count ? W : n));
    shift = fill(first + sum(above) / static_cast<double>((count - 1) * W + n));
  }
  INLINE void add_block(int64_t, const vec* t) {
    vec u[4];
    for (int i = 0; i < 4; ++i) u[i] = sub(t[i], shift);
    add_to((u[0] + u[1]) + (u[2] + u[3]), (NORM::term(u[0]) + NORM::term(u[1])) + (NORM::term(u[2]) + NORM::term(u[3])));
  }
  INLINE void add_part(vec t, int64_t n) {
    const vec u = keep_first(sub(t, shift), n);
    add_to(u, NORM::term(u));
  }
  INLINE void add_shifted(vec t) { add_part(t, W); }
  INLINE void add_to(vec values, vec terms) {
    if (NORM::kCentred) s1 = add_exactly(s1, values, &lost1);
    s2 = add_exactly(s2, terms, &lost2);
  }
  static INLINE vec add_exactly(vec a, vec b, vec* lost) {
    const vec s = a + b, added = s - a;
    *lost += (a - (s - added)) + (b - added);
    return s;
  }
  INLINE double origin() const { return shift[0]; }
  INLINE double values() const { return total(s1, lost1); }
  INLINE double terms() const { return total(s2, lost2); }
  static double total(vec s, vec lost) {
    double all = 0, rest = sum(lost);
    for (int i = 0; i < W; ++i) {
      const double next = all + s[i], added = next - all;
      rest += (all - (next - added)) + (s[i] - added);
      all = next;
    }
    return all - all == 0 ? all + rest : all;  // what an infinite sum has lost is not a number
  }
};

// No loop with float64 has pairs, or writes past the caches.
constexpr bool kHasPairs = false;
INLINE void split(vec*) {}
INLINE vec shorten_nan(vec a) { return a; }
constexpr bool kStreams = false;
template <class T>
INLINE void stream(T* p, vec a) { store(p, a); }
template <class T>
INLINE void stream_copy(T* p, const T* from) { store(p, load(from)); }
INLINE void finish_streams() {}
