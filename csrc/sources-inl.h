// Where a row comes from: the input itself, the plain sum, or the sum with every option. Included twice by each isa_*.cpp, after a
// vec-inl.h: once for each dtype of the arithmetic.
//
// `get` returns the sum before it is rounded, or the input itself without a branch. `get_two` returns two vectors of it: a pair of
// bfloat16 (vec-inl.h) if `PAIR`.

template <class T>
struct NormOnly {
  static constexpr bool kHasBranch = false, kPairs = kHasPairs && is_same<T, bf16>;
  In<T> x;

  NormOnly(const Forward& a, int64_t row, unsigned char*) : x(a.residual, a.residual_type, row * a.d) {}
  template <bool PART>
  INLINE vec get(int64_t i, int64_t n) const {
    return x.template get<PART>(i, n);
  }
  template <bool PAIR>
  INLINE void get_two(int64_t i, vec* t) const {
    x.template get_two<PAIR>(i, t);
  }
  INLINE void prefetch(int64_t i, int64_t n) const {
    for (int64_t k = 0; k < n; k += 64 / int64_t{sizeof(T)}) x.prefetch(i + k);
  }
};

template <class R, class B>
struct PlainSum {
  static constexpr bool kHasBranch = true, kPairs = kHasPairs && is_same<R, bf16> && is_same<B, bf16>;
  In<R> residual;
  In<B> branch;

  PlainSum(const Forward& a, int64_t row, unsigned char*)
      : residual(a.residual, a.residual_type, row * a.d), branch(a.branch, a.branch_type, row * a.d) {}
  template <bool PART>
  INLINE vec get(int64_t i, int64_t n) const {
    return add(residual.template get<PART>(i, n), branch.template get<PART>(i, n));
  }
  template <bool PAIR>
  INLINE void get_two(int64_t i, vec* t) const {
    vec u[2];
    residual.template get_two<PAIR>(i, t);
    branch.template get_two<PAIR>(i, u);
    for (int k = 0; k < 2; ++k) t[k] = add(t[k], u[k]);
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
  static constexpr bool kHasBranch = true, kPairs = false;
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
  template <bool PAIR>
  INLINE void get_two(int64_t i, vec* t) const {
    for (int u = 0; u < 2; ++u) t[u] = get<false>(i + u * W, W);
  }
};
