// Attention over sources. Included by each isa_*.cpp in namespace float32, after coefficients-inl.h.
//
// The sources of one token fit the caches: they are read from memory once, whatever is computed from them. The result of a token does
// not depend on the tokens beside it.

template <class T>
struct Attention {
  const Attend& a;
  int64_t row;

  In<T> source(int64_t j) const { return In<T>(a.sources[j], a.types[j], row * a.d); }
  In<float> query(int64_t r) const { return In<float>(a.query, Type::f32, r * a.d); }
  In<float> grad(int64_t r) const { return In<float>(a.reads[r], Type::f32, row * a.d); }
  float* scores() const { return a.scores + row * a.read_count * a.n; }
  float* factors() const { return a.factors + row * a.n; }

  template <class U, class V>
  INLINE float dot(const In<U> x, const In<V> y) const {
    vec acc[4] = {fill(0), fill(0), fill(0), fill(0)};
    int64_t i = 0;
    for (; i + 4 * W <= a.d; i += 4 * W)
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) acc[u] = fma(x.template get<false>(i + u * W, W), y.template get<false>(i + u * W, W), acc[u]);
    for (; i + W <= a.d; i += W) acc[0] = fma(x.template get<false>(i, W), y.template get<false>(i, W), acc[0]);
    if (i < a.d) acc[1] = fma(x.template get<true>(i, a.d - i), y.template get<true>(i, a.d - i), acc[1]);
    return sum(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
  }

  // p_r.
  INLINE void softmax(int64_t r, float* p) const {
    const float* const s = scores() + r * a.n;
    float top = s[0], total = 0;
    for (int64_t j = 1; j < a.n; ++j) top = s[j] > top ? s[j] : top;
    for (int64_t j = 0; j < a.n; j += 16) {
      const int64_t count = a.n - j < 16 ? a.n - j : 16;
      scatter(exp_lanes(gather(s + j, 1, count) - top), p + j, 1, count);
    }
    for (int64_t j = 0; j < a.n; ++j) total += p[j];
    for (int64_t j = 0; j < a.n; ++j) p[j] /= total;
  }

  template <bool PART, int U>
  INLINE void read_step(const float* p, int64_t i, int64_t m, float* to) const {
    vec total[U];
    for (int u = 0; u < U; ++u) total[u] = fill(0);
    for (int64_t j = 0; j < a.n; ++j) {
      const In<T> x = source(j);
      const vec weight = fill(p[j]);
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u) total[u] = fma(weight, x.template get<PART>(i + u * W, m), total[u]);
    }
    for (int u = 0; u < U; ++u) store_some<PART>(to + i + u * W, total[u], m);
  }

  void forward(float* p) const {
    for (int64_t j = 0; j < a.n; ++j) {
      const In<T> x = source(j);
      const float f = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(dot(x, x)) / static_cast<double>(a.d) + a.eps));
      factors()[j] = f;
      for (int64_t r = 0; r < a.read_count; ++r) scores()[r * a.n + j] = dot(x, query(r)) * f;
    }
    for (int64_t r = 0; r < a.read_count; ++r) {
      softmax(r, p);
      for (int64_t j = 0; a.normed_values && j < a.n; ++j) p[j] *= factors()[j];
      float* const to = a.reads[r] + row * a.d;
      int64_t i = 0;
      for (; i + 4 * W <= a.d; i += 4 * W) read_step<false, 4>(p, i, W, to);
      for (; i + W <= a.d; i += W) read_step<false, 1>(p, i, W, to);
      if (i < a.d) read_step<true, 1>(p, i, a.d - i, to);
    }
  }

  // The gradient of x_j is Σ_r (value_rj g_r + product_rj q_r) + share_j x_j, and that of q_r is Σ_j product_rj x_j.
  void backward(float* value, float* dquery) const {
    float* const product = value + a.read_count * a.n;
    float* const share = product + a.read_count * a.n;
    for (int64_t j = 0; j < a.n; ++j) share[j] = 0;
    for (int64_t r = 0; r < a.read_count; ++r) {
      float* const p = value + r * a.n;
      float* const ds = product + r * a.n;
      const float* const s = scores() + r * a.n;
      softmax(r, p);
      float mean = 0;
      for (int64_t j = 0; j < a.n; ++j) {
        ds[j] = dot(source(j), grad(r)) * (a.normed_values ? factors()[j] : 1.0f);  // the gradient of p
        mean += p[j] * ds[j];
        if (a.normed_values) share[j] += p[j] * ds[j];
      }
      for (int64_t j = 0; j < a.n; ++j) {
        ds[j] = p[j] * (ds[j] - mean);
        share[j] += ds[j] * s[j];
        ds[j] *= factors()[j];
        if (a.normed_values) p[j] *= factors()[j];
      }
    }
    for (int64_t j = 0; j < a.n; ++j) {
      share[j] *= -(factors()[j] * factors()[j]) / static_cast<float>(a.d);  // the derivative of f is -f^3 x / d
      for (int64_t r = 0; r < a.read_count; ++r) {
        const Term term{source(j),
                        query(r),
                        grad(r),
                        Out<T>(a.dsources[j], a.types[j], row * a.d),
                        share + a.n,
                        dquery + r * a.padded_d,
                        fill(value[r * a.n + j]),
                        fill(product[r * a.n + j]),
                        fill(share[j]),
                        r == 0,
                        r == a.read_count - 1};
        term.add(a.d);
      }
    }
  }
  // What one read contributes to the gradients of one source and of its query.
  struct Term {
    const In<T> x;
    const In<float> q, g;
    const Out<T> out;
    float* const dx;  // the sum over the reads, in float
    float* const dq;
    const vec value, product, share;
    const bool first, last;

    template <bool PART>
    INLINE void step(int64_t i, int64_t m) const {
      const vec v = x.template get<PART>(i, m);
      const vec others = first ? mul(share, v) : load(dx + i);
      const vec total = fma(product, q.template get<PART>(i, m), fma(value, g.template get<PART>(i, m), others));
      store(dq + i, fma(product, v, load(dq + i)));
      if (last) out.template set<PART>(i, total, m);
      else store(dx + i, total);
    }
    INLINE void add(int64_t d) const {
      int64_t i = 0;
      for (; i + W <= d; i += W) step<false>(i, W);
      if (i < d) step<true>(i, d - i);
    }
  };
};

template <class T>
void attend_forward_of(const Attend& a, int64_t begin, int64_t end, float* scratch) {
  for (int64_t row = begin; row < end; ++row) Attention<T>{a, row}.forward(scratch);
}
template <class T>
void attend_backward_of(const Attend& a, int64_t part, float* scratch) {
  const int64_t begin = part * a.part_rows, end = begin + a.part_rows < a.rows ? begin + a.part_rows : a.rows;
  for (int64_t row = begin; row < end; ++row) Attention<T>{a, row}.backward(scratch, a.dquery + part * a.read_count * a.padded_d);
}

// The tokens of [begin, end).
void attend_forward(const Attend& a, int64_t begin, int64_t end, float* scratch) {
  if (a.same_type && a.type == Type::f32) attend_forward_of<float>(a, begin, end, scratch);
  else if (a.same_type && a.type == Type::bf16) attend_forward_of<bf16>(a, begin, end, scratch);
  else attend_forward_of<any>(a, begin, end, scratch);
}
// The tokens of one part.
void attend_backward(const Attend& a, int64_t part, float* scratch) {
  if (a.same_type && a.type == Type::f32) attend_backward_of<float>(a, part, scratch);
  else if (a.same_type && a.type == Type::bf16) attend_backward_of<bf16>(a, part, scratch);
  else attend_backward_of<any>(a, part, scratch);
}
