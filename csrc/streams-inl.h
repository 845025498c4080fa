// The forward of the boundary of n streams. Included by each isa_*.cpp in namespace float32, after forward-inl.h.
//
// A block of tokens is computed in three passes. The first goes through its features in chunks: it writes the new streams of a few
// tokens and multiplies them with that chunk of φ while they are in the L1 cache, so φ is read once a block. The second computes the
// coefficients of sixteen tokens at a time. The third reads the new streams, which the L2 cache still has, and normalizes.
//
// The result of a token does not depend on the block or group that it is in.

// Rows of φ that are multiplied at once: as many as the registers hold for four tokens.
constexpr int kDotRows = W == 16 ? 6 : 2;

// What a chunk of some tokens is multiplied with: `streams` pieces of `count` floats, x_piece and row_piece floats apart.
struct Pieces {
  int64_t streams, count, x_piece, row_piece;
};

// z[t][r] += sum over i of x[t][i] * rows[r][i] for T tokens and R rows. Each piece of x has zeros after its `count` floats.
template <int T, int R>
INLINE void add_dots(const Pieces& p, const float* x, int64_t x_stride, const float* rows, int64_t row_stride, float* z, int64_t z_stride) {
  vec acc[T][R];
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) acc[t][r] = fill(0);
  const int64_t full = p.count - p.count % W;
  for (int64_t j = 0; j < p.streams; ++j, x += p.x_piece, rows += p.row_piece) {
    for (int64_t i = 0; i < full; i += W) {
      vec v[T];
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) v[t] = load(x + t * x_stride + i);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const vec row = load(rows + r * row_stride + i);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) acc[t][r] = fma(v[t], row, acc[t][r]);
      }
    }
    if (full < p.count)
      for (int r = 0; r < R; ++r) {
        const vec row = load(rows + r * row_stride + full, p.count - full);
        for (int t = 0; t < T; ++t) acc[t][r] = fma(load(x + t * x_stride + full), row, acc[t][r]);
      }
  }
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) z[t * z_stride + r] += sum(acc[t][r]);
}

// The same for any numbers of tokens and rows. A token has the same bits alone and in a group.
INLINE void add_all_dots(const Pieces& p, const float* x, int64_t x_stride, int64_t tokens, const float* rows, int64_t row_stride,
                         int64_t row_count, float* z, int64_t z_stride) {
  int64_t r = 0;
  for (; r + kDotRows <= row_count; r += kDotRows) {
    const float* at = rows + r * row_stride;
    if (tokens == 4) add_dots<4, kDotRows>(p, x, x_stride, at, row_stride, z + r, z_stride);
    else
      for (int64_t t = 0; t < tokens; ++t) add_dots<1, kDotRows>(p, x + t * x_stride, x_stride, at, row_stride, z + t * z_stride + r, z_stride);
  }
  for (; r < row_count; ++r) {
    const float* at = rows + r * row_stride;
    if (tokens == 4) add_dots<4, 1>(p, x, x_stride, at, row_stride, z + r, z_stride);
    else
      for (int64_t t = 0; t < tokens; ++t) add_dots<1, 1>(p, x + t * x_stride, x_stride, at, row_stride, z + t * z_stride + r, z_stride);
  }
}

// The new streams of one token. N: number of streams, 0 if only known at run time. STORE: write them.
template <class T, int N, bool STORE>
struct Mixer {
  int n;
  int64_t d;
  In<T> x, w;
  Out<T> out;
  const float *mix, *inject;
  alignas(64) float dummy[16];

  Mixer(const Streams& a, void* new_streams, int64_t token)
      : n(N > 0 ? N : static_cast<int>(a.n)),
        d(a.d),
        x(a.streams, a.streams_type, token * a.n * a.d),
        w(a.branch, a.branch_type, token * a.d),
        out(STORE && a.branch != nullptr ? new_streams : static_cast<void*>(dummy), a.new_type,
            STORE && a.branch != nullptr ? token * a.n * a.d : 0),
        mix(a.mix != nullptr ? a.mix + token * a.mix_stride : nullptr),
        inject(a.inject != nullptr ? a.inject + token * a.inject_stride : nullptr) {}

  template <bool PART>
  INLINE vec rounded(int64_t at, vec s, int64_t m) const {
    if (STORE) {
      s = out.template write<PART>(at, s, m);
      return PART ? keep_first(s, m) : s;
    }
    if (!is_same<T, float>) s = out.template write<false>(0, s, W);
    return PART ? keep_first(s, m) : s;
  }
  // X' at W features from i on, stream k in to + k * stride; its squares are added to `squares`.
  template <bool PART>
  INLINE void step(int64_t i, int64_t m, float* to, int64_t stride, vec* squares) const {
    const int count = N > 0 ? N : n;
    if (!w) {
#pragma GCC unroll 4
      for (int k = 0; k < count; ++k) {
        const vec s = x.template get<PART>(k * d + i, m);
        store(to + k * stride, s);
        squares[k % 4] = fma(s, s, squares[k % 4]);
      }
      return;
    }
    const vec write = w.template get<PART>(i, m);
    // All loads before the first store: see streams_backward-inl.h.
    vec in[N > 0 ? N : kMaxStreams];
#pragma GCC unroll 4
    for (int j = 0; j < count; ++j) in[j] = x.template get<PART>(j * d + i, m);
    if (mix == nullptr) {
#pragma GCC unroll 4
      for (int k = 0; k < count; ++k) {
        const vec s = rounded<PART>(k * d + i, add(in[k], mul(fill(inject[k]), write)), m);
        store(to + k * stride, s);
        squares[k % 4] = fma(s, s, squares[k % 4]);
      }
      return;
    }
#pragma GCC unroll 4
    for (int k = 0; k < count; ++k) {
      vec s = mul(fill(inject[k]), write);
#pragma GCC unroll 4
      for (int j = 0; j < count; ++j) s = fma(fill(mix[k * count + j]), in[j], s);
      s = rounded<PART>(k * d + i, s, m);
      store(to + k * stride, s);
      squares[k % 4] = fma(s, s, squares[k % 4]);
    }
  }
  // X' at the features [from, end); return the sum of their squares.
  INLINE double run(int64_t from, int64_t end, float* to, int64_t stride) const {
    vec squares[4] = {fill(0), fill(0), fill(0), fill(0)};
    int64_t i = from;
    for (; i + W <= end; i += W) step<false>(i, W, to + (i - from), stride, squares);
    if (i < end) step<true>(i, end - i, to + (i - from), stride, squares);
    return static_cast<double>(sum(add(add(squares[0], squares[1]), add(squares[2], squares[3]))));
  }
};

// Logits of one token and stream of hyper, with x centred at `shift`; returns what `shift` lacks to the mean, and the variance.
struct Centred {
  double left, variance;
};
template <class T>
Centred hyper_logits(const Streams& a, const In<T> x, float shift, float* buffer, float* z) {
  const int64_t d = a.d, chunk = streams_chunk(a.n);
  double s1 = 0, s2 = 0;
  for (int64_t r = 0; r < a.n + 2; ++r) z[r] = 0;
  for (int64_t from = 0; from < d; from += chunk) {
    const int64_t count = d - from < chunk ? d - from : chunk;
    vec v1 = fill(0), v2 = fill(0);
    for (int64_t i = 0; i < count; i += W) {
      const int64_t m = count - i < W ? count - i : W;
      const vec v = m == W ? sub(x.template get<false>(from + i, W), fill(shift))
                           : keep_first(sub(x.template get<true>(from + i, m), fill(shift)), m);
      store(buffer + i, v);
      v1 = add(v1, v);
      v2 = fma(v, v, v2);
    }
    s1 += static_cast<double>(sum(v1));
    s2 += static_cast<double>(sum(v2));
    add_all_dots({1, count, 0, 0}, buffer, 0, 1, a.project + a.project_at(from, 0, count), a.project_stride(count), a.n + 2, z, 0);
  }
  const double left = s1 / static_cast<double>(d), var = s2 / static_cast<double>(d) - left * left;
  return {left, var < 0 ? 0 : var};
}

template <class T, int N>
struct ForwardBlock {
  const StreamsForward& a;
  ForwardScratch s;
  int64_t n, d, chunk, width, first, tokens;

  ForwardBlock(const StreamsForward& call, void* scratch, int64_t begin, int64_t end)
      : a(call), s(make(call, scratch)), n(N > 0 ? N : call.n), d(call.d), chunk(streams_chunk(call.n)), width(n * chunk), first(begin), tokens(end - begin) {}
  static ForwardScratch make(const StreamsForward& a, void* scratch) {
    Arena arena{static_cast<char*>(scratch), 0};
    return ForwardScratch(a, arena);
  }

  void run() {
    const bool projects = a.kind != Kind::given;
    if (projects || a.branch != nullptr) write_and_project(projects);
    if (projects) {
      finish_logits();
      coefficients();
    }
    if (a.reads) read();
  }

  // X', and its products with φ.
  void write_and_project(bool projects) {
    const bool hyper = a.kind == Kind::hyper;
    __builtin_memset(s.logits, 0, static_cast<__SIZE_TYPE__>(tokens * a.logits) * sizeof(float));
    for (int64_t i = 0; i < tokens * n * 2; ++i) s.moments[i] = 0;
    for (int64_t from = 0; from < d; from += chunk) {
      const int64_t end = from + chunk < d ? from + chunk : d, count = end - from;
      for (int64_t t = 0; t < tokens; t += kStreamsGroup) {
        const int64_t group = tokens - t < kStreamsGroup ? tokens - t : kStreamsGroup;
        for (int64_t g = 0; g < group; ++g) {
          const Mixer<T, N, true> mixer(a, a.new_streams, first + t + g);
          const double squares = mixer.run(from, end, s.x + g * width, chunk);
          if (hyper) centre(t + g, s.x + g * width, count, from == 0);
          else s.moments[(t + g) * n * 2] += squares;
        }
        if (!projects) continue;
        float* const z = s.logits + t * a.logits;
        const float* const rows = a.project + a.project_at(from, 0, count);
        const int64_t stride = a.project_stride(count);
        if (!hyper) {
          add_all_dots({n, count, chunk, a.project_at(from, 1, count) - a.project_at(from, 0, count)}, s.x, width, group, rows, stride, a.logits,
                       z, a.logits);
          continue;
        }
        for (int64_t j = 0; j < n; ++j)
          add_all_dots({1, count, 0, 0}, s.x + j * chunk, width, group, rows, stride, n + 2, z + j * (n + 2), a.logits);
      }
    }
  }

  // Centre the streams of one token at the mean of their first chunk, and add to the sums of x and x^2: hyper.
  void centre(int64_t t, float* x, int64_t count, bool is_first) {
    for (int64_t j = 0; j < n; ++j, x += chunk) {
      double* const to = s.moments + (t * n + j) * 2;
      float* const shift = s.shift + t * n + j;
      if (is_first) {
        const vec origin = fill(x[0]);
        vec total = fill(0);
        for (int64_t i = 0; i < count; i += W) total = add(total, keep(sub(load(x + i), origin), count - i));
        *shift = x[0] + sum(total) / static_cast<float>(count);
      }
      vec s1 = fill(0), s2 = fill(0);
      for (int64_t i = 0; i < count; i += W) {
        const vec v = keep(sub(load(x + i), fill(*shift)), count - i);
        store(x + i, v);
        s1 = add(s1, v);
        s2 = fma(v, v, s2);
      }
      to[0] += static_cast<double>(sum(s1));
      to[1] += static_cast<double>(sum(s2));
    }
  }
  static INLINE vec keep(vec v, int64_t left) { return left < W ? keep_first(v, left) : v; }

  // Divide the products by the root mean square, or normalize those of each stream.
  void finish_logits() {
    const int64_t stats = a.stats();
    for (int64_t t = 0; t < tokens; ++t) {
      float* const z = s.logits + t * a.logits;
      float* const saved = a.saved_stats + (first + t) * stats + 2;
      const double* sums = s.moments + t * n * 2;
      if (a.kind != Kind::hyper) {
        const float scale = static_cast<float>(1.0 / __builtin_sqrt(sums[0] / static_cast<double>(n * d) + a.project_eps));
        saved[0] = scale;
        for (int64_t r = 0; r < a.logits; ++r) z[r] *= scale;
      } else {
        for (int64_t j = 0; j < n; ++j) {
          const double left = sums[2 * j] / static_cast<double>(d);
          finish_stream(t, j, {left, sums[2 * j + 1] / static_cast<double>(d) - left * left}, z + j * (n + 2), saved + 2 * j);
        }
      }
      __builtin_memcpy(a.saved_logits + (first + t) * a.logits, z, static_cast<__SIZE_TYPE__>(a.logits) * sizeof(float));
    }
  }
  void finish_stream(int64_t t, int64_t j, Centred moments, float* z, float* saved) {
    float shift = s.shift[t * n + j];
    if (!(moments.left * moments.left <= 0.25 * moments.variance)) {  // the first chunk's mean was far from the row's
      const In<T> x = new_stream(t, j);
      shift = static_cast<float>(static_cast<double>(shift) + moments.left);
      for (int pass = 0; pass < 2; ++pass) {
        moments = hyper_logits<T>(a, x, shift, s.x, z);
        if (pass == 0) shift = static_cast<float>(static_cast<double>(shift) + moments.left);
      }
    }
    const float left = static_cast<float>(moments.left), scale = static_cast<float>(1.0 / __builtin_sqrt(moments.variance + a.project_eps));
    saved[0] = shift + left;
    saved[1] = scale;
    const float* added = a.base + n * (n + 2);
    for (int64_t r = 0; r < n + 2; ++r) z[r] = scale * (z[r] - left * a.project_sums[r]) + added[r];
  }
  In<T> new_stream(int64_t t, int64_t j) const {
    const int64_t at = ((first + t) * n + j) * d;
    return a.branch != nullptr ? In<T>(a.new_streams, a.new_type, at) : In<T>(a.streams, a.streams_type, at);
  }

  void coefficients() {
    Lanes values[kMaxStreams * (kMaxStreams + 2)];
    for (int64_t t = 0; t < tokens; t += 16) {
      const int64_t count = tokens - t < 16 ? tokens - t : 16, row = first + t;
      compute_coefficients(a, s.logits + t * a.logits, count, values);
      for (int64_t i = 0; i < n; ++i) scatter(values[i], a.new_collapse + row * n + i, n, count);
      if (a.new_inject != nullptr)
        for (int64_t i = 0; i < n; ++i) scatter(values[n + i], a.new_inject + row * n + i, n, count);
      if (a.new_mix != nullptr)
        for (int64_t i = 0; i < n * n; ++i) scatter(values[2 * n + i], a.new_mix + row * n * n + i, n * n, count);
    }
  }

  // r = N(c X'), two tokens at a time, which share the loads of weight and bias.
  void read() {
    const float* const c = a.collapse != nullptr ? a.collapse : a.new_collapse;
    const int64_t stride = a.collapse != nullptr ? a.collapse_stride : n, stats = a.stats();
    Forward norm{};
    norm.residual = s.rows;
    norm.weight = a.weight;
    norm.bias = a.bias;
    norm.d = d;
    norm.eps = a.eps;
    norm.norm = a.norm;
    norm.residual_type = norm.branch_type = norm.z_type = norm.x_hat_type = Type::f32;
    norm.y_type = a.read_type;
    norm.short_sums = has_short_sums(a.new_type, a.read_type);  // as in the call with one stream
    float moments[4];
    for (int64_t t = 0; t < tokens; t += 2) {
      const int64_t pair = tokens - t < 2 ? 1 : 2, row = first + t;
      for (int64_t p = 0; p < pair; ++p) collapse(t + p, c + (row + p) * stride, s.rows + p * d);
      if (a.norm == Norm::none) {
        const Out<any> out(a.read, a.read_type, row * d);
        for (int64_t i = 0; i < pair * d; i += W) {
          const int64_t m = pair * d - i;
          if (m >= W) out.template set<false>(i, load(s.rows + i), W);
          else out.template set<true>(i, load(s.rows + i, m), m);
        }
        for (int64_t p = 0; p < pair; ++p) a.saved_stats[(row + p) * stats] = a.saved_stats[(row + p) * stats + 1] = 0.0f;
        continue;
      }
      norm.y = static_cast<char*>(a.read) + row * d * size_of(a.read_type);
      norm.stats = moments;
      forward(norm, 0, pair, nullptr);
      for (int64_t p = 0; p < pair; ++p) {
        a.saved_stats[(row + p) * stats] = moments[2 * p];
        a.saved_stats[(row + p) * stats + 1] = moments[2 * p + 1];
      }
    }
  }
  void collapse(int64_t t, const float* c, float* to) const {
    In<T> x[N > 0 ? N : kMaxStreams];
    for (int64_t j = 0; j < n; ++j) x[j] = new_stream(t, j);
    const int64_t full = d - d % W;
    for (int64_t i = 0; i < full; i += W) store(to + i, sum_streams<false>(x, c, i, W));
    if (full < d) store(to + full, sum_streams<true>(x, c, full, d - full), d - full);
  }
  template <bool PART>
  INLINE vec sum_streams(const In<T>* x, const float* c, int64_t i, int64_t m) const {
    const int count = N > 0 ? N : static_cast<int>(n);
    vec total = fill(0);
#pragma GCC unroll 4
    for (int j = 0; j < count; ++j) {
      const vec v = x[j].template get<PART>(i, m);
      const vec gate = a.per_feature ? load_some<PART>(c + j * d + i, m) : fill(c[j]);
      total = j == 0 ? mul(gate, v) : fma(gate, v, total);
    }
    return total;
  }
};

template <class T>
void streams_forward_of(const StreamsForward& a, int64_t begin, int64_t end, void* scratch) {
  if (a.n == 4) ForwardBlock<T, 4>(a, scratch, begin, end).run();
  else ForwardBlock<T, 0>(a, scratch, begin, end).run();
}

// Whether all dtypes are T, so that loops for it can run.
INLINE bool is_all(const Streams& a, Type type) {
  return a.streams_type == type && a.new_type == type && (a.branch == nullptr || a.branch_type == type);
}

// The tokens of [begin, end), at most kStreamsBlock.
void streams_forward(const StreamsForward& a, int64_t begin, int64_t end, void* scratch) {
  if (is_all(a, Type::f32)) streams_forward_of<float>(a, begin, end, scratch);
  else if (is_all(a, Type::bf16)) streams_forward_of<bf16>(a, begin, end, scratch);
  else streams_forward_of<any>(a, begin, end, scratch);
}
