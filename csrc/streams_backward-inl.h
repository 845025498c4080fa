// The backward of the boundary of n streams. Included by each isa_*.cpp in namespace float32, after streams-inl.h.
//
// X' is computed again from X, w, A and b. A block of tokens is computed in three passes: the gradient du of the read and with it that of
// c'; the gradients of the logits, sixteen tokens at a time; then, in chunks of features, the gradient g of X' and from it all others:
//
//     g_j = dX'_j + c'_j du + ρ φ_jᵀ dl - s X'_j        dφ += ρ dl X'ᵀ
//     dX = Aᵀ g        dw = bᵀ g        dA = g Xᵀ        db = g w

template <class T, int N>
struct BackwardBlock {
  const StreamsBackward& a;
  BackwardScratch s;
  int64_t n, d, chunk, width, first, tokens, row_stride;
  bool projects, hyper;
  float *dproject, *dweight, *dbias;
  double *dscale, *dbase;
  bool starts;  // the first block of its part

  BackwardBlock(const StreamsBackward& call, void* scratch, int64_t part, int64_t begin, int64_t end)
      : a(call),
        s(make(call, scratch)),
        n(N > 0 ? N : call.n),
        d(call.d),
        chunk(streams_chunk(call.n)),
        width(n * chunk),
        first(begin),
        tokens(end - begin),
        row_stride((call.d + 15) / 16 * 16),
        projects(call.kind != Kind::given),
        hyper(call.kind == Kind::hyper),
        dproject(call.dproject != nullptr ? call.dproject + part * call.project_size : nullptr),
        dweight(call.dweight != nullptr ? call.dweight + part * call.padded_d : nullptr),
        dbias(call.dbias != nullptr ? call.dbias + part * call.padded_d : nullptr),
        dscale(call.dscale != nullptr ? call.dscale + part * kMaxScales : nullptr),
        dbase(call.dbase != nullptr ? call.dbase + part * call.base_size() : nullptr),
        starts(begin == part * call.part_rows) {}
  static BackwardScratch make(const StreamsBackward& a, void* scratch) {
    Arena arena{static_cast<char*>(scratch), 0};
    return BackwardScratch(a, arena);
  }

  void run() {
    if (a.dread != nullptr)
      for (int64_t t = 0; t < tokens; ++t) read_backward(t);
    if (projects)
      for (int64_t t = 0; t < tokens; t += 16) logits_backward(t, tokens - t < 16 ? tokens - t : 16);
    streams_backward();
  }

  const float* collapse(int64_t row) const { return a.collapse + row * a.collapse_stride; }

  // The gradient of the sum c' X' of one token, in du, and of c'.
  void read_backward(int64_t t) {
    const int64_t row = first + t;
    const Mixer<T, N, false> mixer(a, nullptr, row);
    mixer.run(0, d, s.row, row_stride);
    const float* const c = collapse(row);
    const In<any> dr(a.dread, a.read_type, row * d);
    float* const du = s.du + t * row_stride;
    if (a.norm == Norm::none) {
      for (int64_t i = 0; i < d; i += W) {
        const int64_t m = d - i;
        store(du + i, m < W ? keep_first(dr.template get<true>(i, m), m) : dr.template get<false>(i, W));
      }
    } else {
      with_norm(a.norm, [&](auto norm) { normed_backward<decltype(norm)>(row, c, dr, du); });
    }
    if (a.per_feature) {
      if (a.dcollapse_rows == nullptr) return;
      float* const to = a.dcollapse_rows + row * n * d;
      for (int64_t j = 0; j < n; ++j)
        for (int64_t i = 0; i < d; i += W) {
          const vec g = mul(load(du + i), load(s.row + j * row_stride + i));
          if (d - i < W) store(to + j * d + i, g, d - i);
          else store(to + j * d + i, g);
        }
      return;
    }
    float dots[kMaxStreams] = {};
    add_all_dots({1, row_stride_used(), 0, 0}, du, 0, 1, s.row, row_stride, n, dots, 0);
    for (int64_t j = 0; j < n; ++j) s.dcollapse[t * n + j] = dots[j];
    if (a.dcollapse_rows != nullptr)
      for (int64_t j = 0; j < n; ++j) a.dcollapse_rows[row * n + j] = dots[j];
  }
  // The gradient of the sum c X' through its norm, in du.
  template <class NORM>
  void normed_backward(int64_t row, const float* c, const In<any>& dr, float* du) {
    if constexpr (NORM::kIsNorm) {
      const float* const moments = a.saved_stats + row * a.stats();
      const vec mean = fill(moments[0]), rstd = fill(moments[1]);
      vec c1 = fill(0), c2 = fill(0);
      for (int64_t i = 0; i < d; i += W) {
        const int64_t m = d - i;
        if (m < W) normed_step<NORM, true>(c, dr, mean, rstd, i, m, du, c1, c2);
        else normed_step<NORM, false>(c, dr, mean, rstd, i, W, du, c1, c2);
      }
      const vec k1 = fill(sum(c1) / static_cast<float>(d)), k2 = fill(NORM::kCentred ? sum(c2) / static_cast<float>(d) : 0.0f);
      for (int64_t i = 0; i < d; i += W) {
        vec g = mul(fnma(NORM::slope(load(s.normed + i)), k1, sub(load(du + i), k2)), rstd);
        if (d - i < W) g = keep_first(g, d - i);
        store(du + i, g);
      }
    }
  }
  // Floats of a row with the zeros after it.
  int64_t row_stride_used() const { return (d + W - 1) / W * W; }

  template <class NORM, bool PART>
  INLINE void normed_step(const float* c, const In<any>& dr, vec mean, vec rstd, int64_t i, int64_t m, float* du, vec& c1, vec& c2) {
    vec u = fill(0);
    for (int j = 0; j < n; ++j) {
      const vec v = load(s.row + j * row_stride + i);
      const vec gate = a.per_feature ? load_some<PART>(c + j * d + i, m) : fill(c[j]);
      u = j == 0 ? mul(gate, v) : fma(gate, v, u);
    }
    vec x = mul(NORM::kCentred ? sub(u, mean) : u, rstd);
    if (PART) x = keep_first(x, m);
    const vec g = dr.template get<PART>(i, m), w = load_some<PART>(a.weight + i, m), wdy = mul(g, w);
    store(s.normed + i, x);
    store(du + i, PART ? keep_first(wdy, m) : wdy);
    c1 = fma(wdy, x, c1);
    c2 = add(c2, wdy);
    if (dweight != nullptr) store(dweight + i, fma(g, x, load(dweight + i)));
    if (dbias != nullptr) store(dbias + i, add(g, load(dbias + i)));
  }

  // factors: ρ dl of each token; offsets: s, and in hyper what is subtracted and the mean, of each stream.
  void logits_backward(int64_t t, int64_t count) {
    const int64_t row = first + t, stats = a.stats(), coefficients = hyper ? n * (n + 2) : a.logits;
    Lanes* const gradient = reinterpret_cast<Lanes*>(s.lanes);
    Lanes* const dlogits = gradient + coefficients;
    Lanes* const rest = dlogits + a.logits;
    for (int64_t i = 0; i < coefficients; ++i) gradient[i] = Lanes{};
    for (int64_t i = 0; i < n; ++i) {
      if (a.dcollapse != nullptr) gradient[i] = gather(a.dcollapse + row * n + i, n, count);
      if (reads_computed()) gradient[i] += gather(s.dcollapse + t * n + i, n, count);
      if (a.dinject != nullptr && coefficients > n) gradient[n + i] = gather(a.dinject + row * n + i, n, count);
    }
    if (a.dmix != nullptr && coefficients > 2 * n)
      for (int64_t i = 0; i < n * n; ++i) gradient[2 * n + i] = gather(a.dmix + row * n * n + i, n * n, count);
    const float* const logits = a.saved_logits + row * a.logits;
    coefficients_backward(a, logits, count, gradient, dlogits, rest);
    if (dbase != nullptr) parameters_backward(logits, count, coefficients, gradient, dlogits);
    for (int64_t i = 0; i < a.logits; ++i) scatter(dlogits[i], s.factors + t * a.logits + i, a.logits, count);
    for (int64_t p = 0; p < count; ++p) {
      float* const dl = s.factors + (t + p) * a.logits;
      const float* const l = logits + p * a.logits;
      const float* const saved = a.saved_stats + (row + p) * stats + 2;
      float* const offsets = s.offsets + (t + p) * n * 3;
      if (!hyper) {
        float dot = 0;
        for (int64_t r = 0; r < a.logits; ++r) dot += dl[r] * l[r];
        offsets[0] = saved[0] * saved[0] * dot / static_cast<float>(n * d);
        for (int64_t r = 0; r < a.logits; ++r) dl[r] *= saved[0];
        continue;
      }
      const float* const added = a.base + n * (n + 2);
      for (int64_t j = 0; j < n; ++j) {
        const float mean = saved[2 * j], rstd = saved[2 * j + 1];
        float dot = 0, total = 0;
        for (int64_t r = 0; r < n + 2; ++r) {
          float& value = dl[j * (n + 2) + r];
          dot += value * (l[j * (n + 2) + r] - added[r]);
          total += value * a.project_sums[r];
          value *= rstd;
        }
        offsets[3 * j] = rstd * rstd * dot / static_cast<float>(d);
        offsets[3 * j + 1] = rstd * total / static_cast<float>(d);
        offsets[3 * j + 2] = mean;
      }
    }
  }
  // Add to the gradients of α and β.
  void parameters_backward(const float* logits, int64_t count, int64_t coefficients, const Lanes* gradient, const Lanes* dlogits) {
    Group groups[3];
    const int group_count = groups_of(a, groups);
    for (int g = 0; g < group_count; ++g)
      for (int i = groups[g].begin; i < groups[g].end; ++i) {
        Lanes l = gather(logits + logit_of(a, i), a.logits, count);
        if (hyper) l = tanh_lanes(l);
        dbase[i] += total(gradient[i], count);
        dscale[groups[g].scale] += total(gradient[i] * l, count);
      }
    if (!hyper) return;
    for (int64_t j = 0; j < n; ++j)
      for (int64_t r = 0; r < n + 2; ++r) dbase[coefficients + r] += total(dlogits[j * (n + 2) + r], count);
  }
  static INLINE double total(Lanes x, int64_t count) {
    double sum = 0;
    for (int64_t t = 0; t < count; ++t) sum += static_cast<double>(x[t]);
    return sum;
  }
  // Whether the c of the read is the computed one; a given one is used instead of it.
  bool reads_computed() const { return a.dread != nullptr && a.collapse_is_computed; }

  void streams_backward() {
    if (a.dmix_rows != nullptr) __builtin_memset(s.dmix, 0, static_cast<__SIZE_TYPE__>(tokens * n * n * 16) * sizeof(float));
    if (a.dinject_rows != nullptr) __builtin_memset(s.dinject, 0, static_cast<__SIZE_TYPE__>(tokens * n * 16) * sizeof(float));
    const bool any_output = a.dstreams != nullptr || a.dbranch != nullptr || a.dmix_rows != nullptr || a.dinject_rows != nullptr;
    if (!any_output && dproject == nullptr) return;
    for (int64_t from = 0; from < d; from += chunk) {
      const int64_t end = from + chunk < d ? from + chunk : d, count = end - from;
      for (int64_t t = 0; t < tokens; t += kStreamsGroup) {
        const int64_t group = tokens - t < kStreamsGroup ? tokens - t : kStreamsGroup;
        if (projects)
          for (int64_t g = 0; g < group; ++g) {
            const Mixer<T, N, false> mixer(a, nullptr, first + t + g);
            mixer.run(from, end, s.x + g * width, chunk);
          }
        for (int64_t g = 0; g < group; ++g) start_gradient(t + g, from, count, s.x + g * width, s.gradient + g * width);
        if (projects)
          for (int64_t j = 0; j < n; ++j) {
            const float* factors = s.factors + t * a.logits + (hyper ? j * (n + 2) : 0);
            const int64_t at = a.project_at(from, j, count);
            const bool overwrites = starts && t == 0 && !(hyper && j > 0);
            if (group == 4) project_backward<4>(factors, at, count, s.x + j * chunk, s.gradient + j * chunk, overwrites);
            else
              for (int64_t g = 0; g < group; ++g)
                project_backward<1>(factors + g * a.logits, at, count, s.x + g * width + j * chunk, s.gradient + g * width + j * chunk,
                                    overwrites && g == 0);
          }
        if (!any_output) continue;
        for (int64_t g = 0; g < group; ++g) {
          const float* const gradient = s.gradient + g * width;
          int64_t i = 0;
          for (; i + W <= count; i += W) write_backward<false>(t + g, from + i, W, gradient + i);
          if (i < count) write_backward<true>(t + g, from + i, count - i, gradient + i);
        }
      }
    }
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; a.dmix_rows != nullptr && i < n * n; ++i)
        a.dmix_rows[(first + t) * n * n + i] = sum(load(s.dmix + (t * n * n + i) * 16));
      for (int64_t i = 0; a.dinject_rows != nullptr && i < n; ++i)
        a.dinject_rows[(first + t) * n + i] = sum(load(s.dinject + (t * n + i) * 16));
    }
  }

  // dX' + c' du - s X'; in hyper x becomes X' less its mean.
  void start_gradient(int64_t t, int64_t from, int64_t count, float* x, float* gradient) {
    const int64_t row = first + t;
    const float* const c = a.dread != nullptr ? collapse(row) : nullptr;
    const float* const du = s.du + t * row_stride + from;
    const float* const offsets = s.offsets + t * n * 3;
    for (int64_t j = 0; j < n; ++j) {
      const In<T> dnew(a.dnew, a.new_type, (row * n + j) * d + from);
      const vec factor = fill(!projects ? 0.0f : hyper ? offsets[3 * j] : offsets[0]);
      const vec offset = fill(hyper ? offsets[3 * j + 1] : 0.0f), mean = fill(hyper ? offsets[3 * j + 2] : 0.0f);
      for (int64_t i = 0; i < count; i += W) {
        const int64_t m = count - i < W ? count - i : W;
        vec g = !dnew ? fill(0) : m < W ? dnew.template get<true>(i, m) : dnew.template get<false>(i, W);
        if (c != nullptr) {
          const vec gate = !a.per_feature ? fill(c[j]) : m < W ? load(c + j * d + from + i, m) : load(c + j * d + from + i);
          g = fma(gate, load(du + i), g);
        }
        if (projects) {
          vec v = load(x + j * chunk + i);
          if (hyper) {
            v = sub(v, mean);
            if (m < W) v = keep_first(v, m);
            store(x + j * chunk + i, v);
            g = sub(g, offset);
          }
          g = fnma(factor, v, g);
        }
        store(gradient + j * chunk + i, g);
      }
    }
  }

  // gradient += φᵀ factors, dφ += factors xᵀ for R tokens of one stream.
  template <int R>
  INLINE void project_backward(const float* factors, int64_t at, int64_t count, const float* x, float* gradient, bool overwrites) {
    const float* const project = a.project + at;
    const int64_t rows = a.project_rows(), stride = a.project_stride(count);
    float* const sums = dproject != nullptr ? dproject + at : nullptr;
    for (int64_t i = 0; i < count; i += W) {
      const int64_t m = count - i < W ? count - i : W;
      if (m < W) project_step<R, true>(factors, rows, stride, project + i, sums != nullptr ? sums + i : nullptr, m, x + i, gradient + i, overwrites);
      else project_step<R, false>(factors, rows, stride, project + i, sums != nullptr ? sums + i : nullptr, W, x + i, gradient + i, overwrites);
    }
  }
  template <int R, bool PART>
  INLINE void project_step(const float* factors, int64_t rows, int64_t stride, const float* project, float* sums, int64_t m, const float* x, float* gradient,
                           bool overwrites) {
    vec g[R], v[R];
    for (int t = 0; t < R; ++t) {
      g[t] = load(gradient + t * width);
      v[t] = load(x + t * width);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const vec p = load_some<PART>(project + r * stride, m);
      vec f[R];
#pragma GCC unroll 4
      for (int t = 0; t < R; ++t) {
        f[t] = fill(factors[t * a.logits + r]);
        g[t] = fma(f[t], p, g[t]);
      }
      if (sums == nullptr) continue;
      vec total = mul(f[0], v[0]);
#pragma GCC unroll 4
      for (int t = 1; t < R; ++t) total = fma(f[t], v[t], total);
      float* const to = sums + r * stride;
      store_some<PART>(to, overwrites ? total : add(load_some<PART>(to, m), total), m);
    }
    for (int t = 0; t < R; ++t) store(gradient + t * width, PART ? keep_first(g[t], m) : g[t]);
  }

  // From the gradient of X' at W features: those of X, w, A and b.
  template <bool PART>
  INLINE void write_backward(int64_t t, int64_t i, int64_t m, const float* gradient) {
    const int count = N > 0 ? N : static_cast<int>(n);
    const int64_t row = first + t, at = row * n * d + i;
    const Out<T> dstreams(a.dstreams, a.streams_type, at);
    vec g[N > 0 ? N : kMaxStreams];
#pragma GCC unroll 4
    for (int k = 0; k < count; ++k) g[k] = load(gradient + k * chunk);
    if (a.branch == nullptr) {
      for (int k = 0; dstreams && k < count; ++k) dstreams.template set<PART>(k * d, g[k], m);
      return;
    }
    const float* const inject = a.inject + row * a.inject_stride;
    if (a.dbranch != nullptr) {
      vec dw = mul(fill(inject[0]), g[0]);
      for (int k = 1; k < count; ++k) dw = fma(fill(inject[k]), g[k], dw);
      Out<any>(a.dbranch, a.branch_type, row * d + i).template set<PART>(0, dw, m);
    }
    if (a.dinject_rows != nullptr) {
      const vec w = In<any>(a.branch, a.branch_type, row * d + i).template get<PART>(0, m);
      float* const to = s.dinject + t * n * 16;
#pragma GCC unroll 4
      for (int k = 0; k < count; ++k) store(to + k * 16, fma(g[k], w, load(to + k * 16)));
    }
    if (a.mix == nullptr) {
      for (int k = 0; dstreams && k < count; ++k) dstreams.template set<PART>(k * d, g[k], m);
      return;
    }
    const float* const mix = a.mix + row * a.mix_stride;
    const In<T> x(a.streams, a.streams_type, at);
    float* const dmix = s.dmix + t * n * n * 16;
    // All loads before the first store to memory: the streams may be a multiple of 4 kB apart, and a load waits for an earlier store
    // with the same low address bits.
    if (a.dmix_rows != nullptr) {
      vec v[N > 0 ? N : kMaxStreams];
#pragma GCC unroll 4
      for (int j = 0; j < count; ++j) v[j] = x.template get<PART>(j * d, m);
#pragma GCC unroll 4
      for (int k = 0; k < count; ++k)
#pragma GCC unroll 4
        for (int j = 0; j < count; ++j) {
          float* const to = dmix + (k * count + j) * 16;
          store(to, fma(g[k], v[j], load(to)));
        }
    }
    if (!dstreams) return;
#pragma GCC unroll 4
    for (int j = 0; j < count; ++j) {
      vec total = mul(fill(mix[j]), g[0]);
#pragma GCC unroll 4
      for (int k = 1; k < count; ++k) total = fma(fill(mix[k * count + j]), g[k], total);
      dstreams.template set<PART>(j * d, total, m);
    }
  }
};

template <class T, int N>
void streams_backward_of(const StreamsBackward& a, int64_t part, int64_t begin, int64_t end, void* scratch) {
  for (int64_t t = begin; t < end; t += kStreamsBlock)
    BackwardBlock<T, N>(a, scratch, part, t, t + kStreamsBlock < end ? t + kStreamsBlock : end).run();
}

// The tokens of one part.
void streams_backward(const StreamsBackward& a, int64_t part, void* scratch) {
  const int64_t begin = part * a.part_rows, end = begin + a.part_rows < a.rows ? begin + a.part_rows : a.rows;
  if (is_all(a, Type::f32)) {
    if (a.n == 4) streams_backward_of<float, 4>(a, part, begin, end, scratch);
    else streams_backward_of<float, 0>(a, part, begin, end, scratch);
  } else if (is_all(a, Type::bf16)) {
    if (a.n == 4) streams_backward_of<bf16, 4>(a, part, begin, end, scratch);
    else streams_backward_of<bf16, 0>(a, part, begin, end, scratch);
  } else {
    streams_backward_of<any, 0>(a, part, begin, end, scratch);
  }
}
