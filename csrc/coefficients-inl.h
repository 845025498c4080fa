// The coefficients of a token's streams from its logits, and their gradients, for sixteen tokens at a time: lane i is token i. Included by
// each isa_*.cpp in namespace float32. The compiler splits a vector of sixteen lanes into the registers that there are.

using Lanes = float __attribute__((vector_size(64), aligned(64)));
using IntLanes = int32_t __attribute__((vector_size(64), aligned(64)));

INLINE Lanes all_lanes(float x) { return Lanes{} + x; }

// exp(x) to two units in the last place: 2^k times a polynomial on [-ln 2 / 2, ln 2 / 2]. NaN stays NaN.
INLINE Lanes exp_lanes(Lanes x) {
  const Lanes high = all_lanes(88.0f), low = all_lanes(-87.0f);
  x = x > high ? high : x;
  x = x < low ? low : x;
  const Lanes magic = all_lanes(12582912.0f);  // 1.5 * 2^23: the sum is rounded to an integer
  const Lanes k = (x * 1.44269504088896341f + magic) - magic;
  Lanes r = x - k * 0.693359375f;
  r = r - k * -2.12194440e-4f;
  Lanes p = all_lanes(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const IntLanes bits = (__builtin_convertvector(k, IntLanes) + 127) << 23;
  Lanes scale;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

INLINE Lanes sigmoid_lanes(Lanes x) { return 1.0f / (1.0f + exp_lanes(-x)); }

// tanh(x), to an absolute error of one unit in the last place of 1.
INLINE Lanes tanh_lanes(Lanes x) {
  const Lanes size = x < 0.0f ? -x : x, e = exp_lanes(-2.0f * size);
  const Lanes value = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -value : value;
}

// One value of up to sixteen tokens, `stride` floats apart; the lanes after them are 0.
INLINE Lanes gather(const float* from, int64_t stride, int64_t tokens) {
  Lanes x{};
  for (int64_t t = 0; t < tokens; ++t) x[t] = from[t * stride];
  return x;
}
INLINE void scatter(Lanes x, float* to, int64_t stride, int64_t tokens) {
  for (int64_t t = 0; t < tokens; ++t) to[t * stride] = x[t];
}

// A matrix of n x n lanes after each division by the sums of its columns (first) and rows, and the reciprocals of the sums.
struct Sinkhorn {
  int n, steps;    // 2 * iterations; step 0 is the softmax
  Lanes* matrices; // (steps, n, n)
  Lanes* inverses; // (steps, n); unused in step 0
};

INLINE void sinkhorn_start(const Lanes* logits, int n, float eps, Lanes* to) {
  for (int j = 0; j < n; ++j) {
    Lanes top = logits[j];
    for (int k = 1; k < n; ++k) top = logits[k * n + j] > top ? logits[k * n + j] : top;
    Lanes total{};
    for (int k = 0; k < n; ++k) {
      to[k * n + j] = exp_lanes(logits[k * n + j] - top);
      total += to[k * n + j];
    }
    const Lanes inverse = 1.0f / total;
    for (int k = 0; k < n; ++k) to[k * n + j] = to[k * n + j] * inverse + eps;
  }
}

// Divide by the sums over rows or columns; `to` may be `from`.
template <int N>
INLINE void sinkhorn_step(const Lanes* from, int count, bool rows, float eps, Lanes* to, Lanes* inverses) {
  const int n = N > 0 ? N : count, along = rows ? 1 : n, across = rows ? n : 1;
  for (int i = 0; i < n; ++i) {
    Lanes total = from[i * across];
    for (int j = 1; j < n; ++j) total += from[i * across + j * along];
    const Lanes inverse = 1.0f / (total + eps);
    if (inverses != nullptr) inverses[i] = inverse;
    for (int j = 0; j < n; ++j) to[i * across + j * along] = from[i * across + j * along] * inverse;
  }
}

template <int N>
void sinkhorn_all(const Lanes* logits, int n, int iterations, float eps, Lanes* matrix) {
  Lanes m[N > 0 ? N * N : kMaxStreams * kMaxStreams];
  sinkhorn_start(logits, n, eps, m);
  sinkhorn_step<N>(m, n, true, eps, m, nullptr);
  for (int i = 1; i < iterations; ++i) {
    sinkhorn_step<N>(m, n, false, eps, m, nullptr);
    sinkhorn_step<N>(m, n, true, eps, m, nullptr);
  }
  for (int e = 0; e < n * n; ++e) matrix[e] = m[e];
}

// The gradient of the logits from that of the last matrix, which is overwritten.
void sinkhorn_backward(const Lanes* logits, int n, int iterations, float eps, Lanes* gradient, Lanes* scratch) {
  const int steps = 2 * iterations, size = n * n;
  Lanes *matrices = scratch, *inverses = scratch + steps * size;
  sinkhorn_start(logits, n, eps, matrices);
  for (int s = 1; s < steps; ++s)
    sinkhorn_step<0>(matrices + (s - 1) * size, n, s % 2 == 1, eps, matrices + s * size, inverses + s * n);
  for (int s = steps - 1; s >= 0; --s) {
    const bool rows = s % 2 == 1;
    const Lanes* y = matrices + s * size;
    const int along = rows ? 1 : n, across = rows ? n : 1;
    for (int i = 0; i < n; ++i) {
      const int at = i * across;
      Lanes dot{};
      if (s == 0) {  // the softmax, before eps was added
        for (int j = 0; j < n; ++j) dot += gradient[at + j * along] * (y[at + j * along] - eps);
        for (int j = 0; j < n; ++j) gradient[at + j * along] = (gradient[at + j * along] - dot) * (y[at + j * along] - eps);
      } else {
        for (int j = 0; j < n; ++j) dot += gradient[at + j * along] * y[at + j * along];
        for (int j = 0; j < n; ++j) gradient[at + j * along] = (gradient[at + j * along] - dot) * inverses[s * n + i];
      }
    }
  }
}

// The groups of the logits: c, b and A, and where their scale is.
struct Group {
  int begin, end, scale;
};
INLINE int groups_of(const Streams& a, Group* groups) {
  const int n = static_cast<int>(a.n);
  groups[0] = {0, n, 0};
  if (a.kind == Kind::gates) return 1;
  groups[1] = {n, 2 * n, 1};
  if (a.kind == Kind::independent) return 2;
  groups[2] = {2 * n, 2 * n + n * n, a.kind == Kind::hyper ? 0 : 2};
  return 3;
}

// Index of the saved logit of a coefficient. In hyper stream j has the logits of c_j, b_j and column j of A.
INLINE int logit_of(const Streams& a, int i) {
  const int n = static_cast<int>(a.n);
  if (a.kind != Kind::hyper) return i;
  if (i < 2 * n) return i % n * (n + 2) + i / n;
  const int k = (i - 2 * n) / n, j = (i - 2 * n) % n;
  return j * (n + 2) + 2 + k;
}

// c, b and A, one after the other, of up to sixteen tokens from their logits.
void compute_coefficients(const Streams& a, const float* logits, int64_t tokens, Lanes* to) {
  Group groups[3];
  const int count = groups_of(a, groups), n = static_cast<int>(a.n);
  for (int g = 0; g < count; ++g) {
    const Lanes alpha = all_lanes(a.scale[groups[g].scale]);
    for (int i = groups[g].begin; i < groups[g].end; ++i) {
      const Lanes l = gather(logits + logit_of(a, i), a.logits, tokens);
      if (a.kind == Kind::hyper) {
        to[i] = alpha * tanh_lanes(l) + a.base[i];
        continue;
      }
      to[i] = alpha * l + a.base[i];
      if (g == 0) to[i] = sigmoid_lanes(to[i]) + a.gate_eps;
      if (g == 1) to[i] = a.magnitude * sigmoid_lanes(to[i]) + (a.kind == Kind::independent ? a.gate_eps : 0.0f);
    }
  }
  if (a.kind != Kind::manifold) return;
  Lanes* const mix = to + 2 * n;
  if (n == 4) sinkhorn_all<4>(mix, n, a.iterations, a.gate_eps, mix);
  else sinkhorn_all<0>(mix, n, a.iterations, a.gate_eps, mix);
}

// Gradients for up to sixteen tokens: `gradient` has those of c, b and A, and becomes that of the sums before the gates (`dpre`), or in
// hyper stays that of the coefficients; `dlogits` becomes the gradient of the logits, in the order of the logits.
void coefficients_backward(const Streams& a, const float* logits, int64_t tokens, Lanes* gradient, Lanes* dlogits, Lanes* scratch) {
  Group groups[3];
  const int count = groups_of(a, groups), n = static_cast<int>(a.n);
  if (a.kind == Kind::manifold) {
    Lanes *mix = scratch, *rest = scratch + n * n;
    const Lanes alpha = all_lanes(a.scale[2]);
    for (int i = 0; i < n * n; ++i) mix[i] = alpha * gather(logits + 2 * n + i, a.logits, tokens) + a.base[2 * n + i];
    sinkhorn_backward(mix, n, a.iterations, a.gate_eps, gradient + 2 * n, rest);
  }
  for (int g = 0; g < count; ++g) {
    const Lanes alpha = all_lanes(a.scale[groups[g].scale]);
    for (int i = groups[g].begin; i < groups[g].end; ++i) {
      const Lanes l = gather(logits + logit_of(a, i), a.logits, tokens);
      if (a.kind == Kind::hyper) {
        const Lanes value = tanh_lanes(l);
        dlogits[logit_of(a, i)] = gradient[i] * alpha * (1.0f - value * value);
        continue;
      }
      if (g < 2) {
        const Lanes gate = sigmoid_lanes(alpha * l + a.base[i]);
        gradient[i] = gradient[i] * (g == 1 ? a.magnitude : 1.0f) * gate * (1.0f - gate);
      }
      dlogits[i] = alpha * gradient[i];
    }
  }
}
