// A vector of W floats for the instruction set being compiled, and the dozen operations that the loops use.
// Included inside namespace addnorm::<isa>::(anonymous)::float32, after the target pragma: nothing here may use, or be
// used by, code that is shared between instruction sets. Multiplications are fused only by `fma`, so that a row has the same bits in
// every loop.

using real = float;
#define EACH_TYPE(X) X(f32, float) X(bf16, bf16) X(f16, f16)

#if defined(ADDNORM_AVX512)

using vec = __m512;
constexpr int W = 16;

INLINE __mmask16 lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
INLINE vec fill(float x) { return _mm512_set1_ps(x); }
INLINE vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
INLINE vec fnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
INLINE float sum(vec a) { return _mm512_reduce_add_ps(a); }
INLINE float lane0(vec a) { return _mm512_cvtss_f32(a); }
INLINE vec keep_first(vec a, int64_t n) { return _mm512_maskz_mov_ps(lanes(n), a); }
INLINE vec select(uint32_t bits, vec a) { return _mm512_maskz_mov_ps(static_cast<__mmask16>(bits), a); }

using half = __m512d;  // half of a vector's elements, as doubles
INLINE half low_half(vec a) { return _mm512_cvtps_pd(_mm512_castps512_ps256(a)); }
INLINE half high_half(vec a) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)); }
INLINE half fma(half a, half b, half c) { return _mm512_fmadd_pd(a, b, c); }
INLINE double sum(half a) { return _mm512_reduce_add_pd(a); }

// bfloat16 is the upper half of a float: one permutation of 16-bit words moves sixteen halves into place, or out of it.
INLINE vec widen16(__m256i h) {
  const __m512i place = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0, 3,
                                         0, 2, 0, 1, 0, 0, 0);
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, place, _mm512_castsi256_si512(h)));
}
INLINE __m256i upper_halves(__m512i u) {
  const __m512i place = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 31, 29, 27, 25, 23, 21, 19, 17, 15,
                                         13, 11, 9, 7, 5, 3, 1);
  return _mm512_castsi512_si256(_mm512_permutexvar_epi16(place, u));
}
// Round to nearest even: add half of the removed part, and one more if the last kept bit is odd. A NaN is only truncated: every value
// here is a result of arithmetic, so the NaN is quiet, and its high half is a NaN too. (AVX512_BF16 has an instruction for this; it
// reads subnormals as zero.)
INLINE __m512i rounded_bits(vec a) {
  const __m512i u = _mm512_castps_si512(a);
  const __mmask16 number = _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q);
  const __mmask16 odd = _mm512_mask_test_epi32_mask(number, u, _mm512_set1_epi32(0x10000));
  const __m512i r = _mm512_mask_add_epi32(u, number, u, _mm512_set1_epi32(0x7fff));
  return _mm512_mask_add_epi32(r, odd, r, _mm512_set1_epi32(1));
}
INLINE __m256i narrow16(vec a) { return upper_halves(rounded_bits(a)); }

INLINE vec load(const float* p) { return _mm512_loadu_ps(p); }
INLINE vec load(const bf16* p) { return widen16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
INLINE vec load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
INLINE vec load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(lanes(n), p); }
INLINE vec load(const bf16* p, int64_t n) { return widen16(_mm256_maskz_loadu_epi16(lanes(n), p)); }
INLINE vec load(const f16* p, int64_t n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes(n), p)); }
INLINE __m256i half16(vec a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE void store(float* p, vec a) { _mm512_storeu_ps(p, a); }
INLINE void store(bf16* p, vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow16(a)); }
INLINE vec store_rounded(bf16* p, vec a) {
  const __m512i bits = rounded_bits(a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), upper_halves(bits));
  return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
INLINE void store(f16* p, vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half16(a)); }
INLINE vec store_rounded(f16* p, vec a) {
  const __m256i h = half16(a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), h);
  return _mm512_cvtph_ps(h);
}
// A pair: 2 W bfloat16 numbers, of which the even ones are one vector and the odd ones another. A shift and a mask move them into
// place and out of it, where consecutive ones need permutations, which limit the loops. The rounding adds to a NaN too: it stays one,
// since its lower half is zero (`split`, and the loads of bfloat16).
constexpr bool kHasPairs = true;
INLINE __m512i upper() { return _mm512_set1_epi32(static_cast<int>(0xffff0000u)); }
INLINE void load_pair(const bf16* p, vec* t) {
  const __m512i u = _mm512_loadu_si512(p);
  t[0] = _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
  t[1] = _mm512_castsi512_ps(_mm512_and_si512(u, upper()));
}
INLINE __m512i rounded_number(vec a) {
  const __m512i u = _mm512_castps_si512(a), r = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
  return _mm512_mask_add_epi32(r, _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000)), r, _mm512_set1_epi32(1));
}
// The pair in the order of memory.
INLINE __m512i join(const __m512i even, const __m512i odd) {
  return _mm512_ternarylogic_epi32(odd, upper(), _mm512_srli_epi32(even, 16), 0xea);  // odd & upper | even >> 16
}
INLINE void store_pair(bf16* p, const vec* t) { _mm512_storeu_si512(p, join(rounded_number(t[0]), rounded_number(t[1]))); }
INLINE void store_pair_rounded(bf16* p, vec* t) {
  const __m512i even = rounded_number(t[0]), odd = rounded_number(t[1]);
  _mm512_storeu_si512(p, join(even, odd));
  t[0] = _mm512_castsi512_ps(_mm512_and_si512(even, upper()));
  t[1] = _mm512_castsi512_ps(_mm512_and_si512(odd, upper()));
}
INLINE void stream_pair(bf16* p, const vec* t) {
  const __m512i u = join(rounded_number(t[0]), rounded_number(t[1]));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(u));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p) + 1, _mm512_extracti64x4_epi64(u, 1));
}
// Two consecutive vectors in the order of a pair.
INLINE void split(vec* t) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const vec first = t[0];
  t[0] = _mm512_permutex2var_ps(first, even, t[1]);
  t[1] = _mm512_permutex2var_ps(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), t[1]);
}
// A NaN whose lower half is zero in the place of a NaN.
INLINE vec shorten_nan(vec a) {
  const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x400000));
  return _mm512_castsi512_ps(_mm512_mask_and_epi32(_mm512_castps_si512(a), nan, quiet, upper()));
}
// Past the caches, to addresses that are multiples of W elements.
constexpr bool kStreams = true;
INLINE void stream(float* p, vec a) { _mm512_stream_ps(p, a); }
INLINE void stream(bf16* p, vec a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow16(a)); }
INLINE void stream(f16* p, vec a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), half16(a)); }
INLINE void stream_copy(float* p, const float* from) { stream(p, load(from)); }
template <class T>
INLINE void stream_copy(T* p, const T* from) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
INLINE void finish_streams() { _mm_sfence(); }
INLINE void store(float* p, vec a, int64_t n) { _mm512_mask_storeu_ps(p, lanes(n), a); }
INLINE void store(bf16* p, vec a, int64_t n) { _mm256_mask_storeu_epi16(p, lanes(n), narrow16(a)); }
INLINE void store(f16* p, vec a, int64_t n) { _mm256_mask_storeu_epi16(p, lanes(n), half16(a)); }

#elif defined(ADDNORM_AVX2)

using vec = __m256;
constexpr int W = 8;

INLINE __m256i lanes(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE vec fill(float x) { return _mm256_set1_ps(x); }
INLINE vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
INLINE vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
INLINE vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
INLINE vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec fnma(vec a, vec b, vec c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE float sum(vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  s = _mm_add_ss(s, _mm_shuffle_ps(s, s, 1));
  return _mm_cvtss_f32(s);
}
INLINE float lane0(vec a) { return _mm256_cvtss_f32(a); }
INLINE vec keep_first(vec a, int64_t n) { return _mm256_and_ps(a, _mm256_castsi256_ps(lanes(n))); }
INLINE vec select(uint32_t bits, vec a) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i mine = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), each);
  return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(mine, each)));
}

using half = __m256d;
INLINE half low_half(vec a) { return _mm256_cvtps_pd(_mm256_castps256_ps128(a)); }
INLINE half high_half(vec a) { return _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)); }
INLINE half fma(half a, half b, half c) { return _mm256_fmadd_pd(a, b, c); }
INLINE double sum(half a) { return (a[0] + a[2]) + (a[1] + a[3]); }

INLINE vec widen16(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
INLINE __m256i rounded_bits(vec a) {
  const __m256i u = _mm256_castps_si256(a);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
  const __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(r, u, _mm256_castps_si256(nan));  // a NaN is only truncated, as in AVX-512
}
INLINE __m128i upper_halves(__m256i u) {
  const __m256i r = _mm256_srli_epi32(u, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
INLINE __m128i narrow16(vec a) { return upper_halves(rounded_bits(a)); }

INLINE vec load(const float* p) { return _mm256_loadu_ps(p); }
INLINE vec load(const bf16* p) { return widen16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
INLINE vec load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
INLINE vec load(const float* p, int64_t n) { return _mm256_maskload_ps(p, lanes(n)); }
template <class T>
INLINE vec load(const T* p, int64_t n) {
  T part[W] = {};
  for (int64_t i = 0; i < n; ++i) part[i] = p[i];
  return load(part);
}
INLINE __m128i half16(vec a) { return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE void store(float* p, vec a) { _mm256_storeu_ps(p, a); }
INLINE void store(bf16* p, vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow16(a)); }
INLINE vec store_rounded(bf16* p, vec a) {
  const __m256i bits = rounded_bits(a);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), upper_halves(bits));
  return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
INLINE void store(f16* p, vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half16(a)); }
INLINE vec store_rounded(f16* p, vec a) {
  const __m128i h = half16(a);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), h);
  return _mm256_cvtph_ps(h);
}
constexpr bool kHasPairs = true;
INLINE __m256i upper() { return _mm256_set1_epi32(static_cast<int>(0xffff0000u)); }
INLINE void load_pair(const bf16* p, vec* t) {
  const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  t[0] = _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
  t[1] = _mm256_castsi256_ps(_mm256_and_si256(u, upper()));
}
INLINE __m256i rounded_number(vec a) {
  const __m256i u = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
}
INLINE __m256i join(const __m256i even, const __m256i odd) { return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa); }
INLINE void store_pair(bf16* p, const vec* t) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), join(rounded_number(t[0]), rounded_number(t[1])));
}
INLINE void store_pair_rounded(bf16* p, vec* t) {
  const __m256i even = rounded_number(t[0]), odd = rounded_number(t[1]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), join(even, odd));
  t[0] = _mm256_castsi256_ps(_mm256_and_si256(even, upper()));
  t[1] = _mm256_castsi256_ps(_mm256_and_si256(odd, upper()));
}
INLINE void stream_pair(bf16* p, const vec* t) {
  const __m256i u = join(rounded_number(t[0]), rounded_number(t[1]));
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(u));
  _mm_stream_si128(reinterpret_cast<__m128i*>(p) + 1, _mm256_extracti128_si256(u, 1));
}
INLINE void split(vec* t) {
  const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(t[0], t[1], 0x88)), odd = _mm256_castps_pd(_mm256_shuffle_ps(t[0], t[1], 0xdd));
  t[0] = _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8));
  t[1] = _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8));
}
INLINE vec shorten_nan(vec a) {
  const __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  const __m256i quiet = _mm256_or_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x400000));
  return _mm256_blendv_ps(a, _mm256_castsi256_ps(_mm256_and_si256(quiet, upper())), nan);
}
constexpr bool kStreams = true;
INLINE void stream(float* p, vec a) { _mm256_stream_ps(p, a); }
INLINE void stream(bf16* p, vec a) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), narrow16(a)); }
INLINE void stream(f16* p, vec a) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), half16(a)); }
INLINE void stream_copy(float* p, const float* from) { stream(p, load(from)); }
template <class T>
INLINE void stream_copy(T* p, const T* from) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
INLINE void finish_streams() { _mm_sfence(); }
INLINE void store(float* p, vec a, int64_t n) { _mm256_maskstore_ps(p, lanes(n), a); }
template <class T>
INLINE void store(T* p, vec a, int64_t n) {
  T part[W];
  store(part, a);
  for (int64_t i = 0; i < n; ++i) p[i] = part[i];
}

#else  // four lanes of the compiler's own vectors (SSE2, NEON, or scalars)

typedef float vec __attribute__((vector_size(16)));
constexpr int W = 4;

INLINE vec fill(float x) { return vec{x, x, x, x}; }
INLINE vec add(vec a, vec b) { return a + b; }
INLINE vec sub(vec a, vec b) { return a - b; }
INLINE vec mul(vec a, vec b) { return a * b; }
INLINE vec fma(vec a, vec b, vec c) { return a * b + c; }
INLINE vec fnma(vec a, vec b, vec c) { return c - a * b; }
INLINE float sum(vec a) { return (a[0] + a[2]) + (a[1] + a[3]); }
INLINE float lane0(vec a) { return a[0]; }
INLINE vec keep_first(vec a, int64_t n) {
  for (int i = 0; i < W; ++i) a[i] = i < n ? a[i] : 0.0f;
  return a;
}

INLINE vec select(uint32_t bits, vec a) {
  for (int i = 0; i < W; ++i) a[i] = bits >> i & 1 ? a[i] : 0.0f;
  return a;
}

typedef double half __attribute__((vector_size(16)));
INLINE half low_half(vec a) { return half{a[0], a[1]}; }
INLINE half high_half(vec a) { return half{a[2], a[3]}; }
INLINE half fma(half a, half b, half c) { return a * b + c; }
INLINE double sum(half a) { return a[0] + a[1]; }

INLINE vec load(const float* p) {
  vec a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
// bfloat16 also in the compiler's vectors; float16 and parts of a vector one element at a time, not inlined.
typedef uint32_t uvec __attribute__((vector_size(16)));
typedef uint16_t hvec __attribute__((vector_size(8)));
template <class T>
OUTLINE void widen_lanes(const T* p, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = widen1(p[i]);
}
template <class T>
OUTLINE void narrow_lanes(const float* p, T* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) narrow1(p[i], to + i);
}
template <class T>
INLINE vec load(const T* p, int64_t n) {
  float lanes[W] = {};
  widen_lanes(p, lanes, n);
  return load(lanes);
}
INLINE vec load(const f16* p) { return load(p, W); }
INLINE vec load(const bf16* p) {
  hvec h;
  __builtin_memcpy(&h, p, sizeof h);
  const uvec u = __builtin_convertvector(h, uvec) << 16;
  return (vec)u;
}
INLINE void store(float* p, vec a) { __builtin_memcpy(p, &a, sizeof a); }
template <class T>
INLINE void store(T* p, vec a, int64_t n) {
  float lanes[W];
  store(lanes, a);
  narrow_lanes(lanes, p, n);
}
INLINE void store(f16* p, vec a) { store(p, a, W); }
INLINE void store(bf16* p, vec a) {
  const uvec u = (uvec)a;
  const uvec nan = (uvec)(a != a);
  const uvec bits = (nan & 0x7fc00000u) | (~nan & (u + 0x7fffu + ((u >> 16) & 1u)));
  const hvec h = __builtin_convertvector(bits >> 16, hvec);
  __builtin_memcpy(p, &h, sizeof h);
}
template <class T>
INLINE vec store_rounded(T* p, vec a) {
  store(p, a);
  return load(p);
}
constexpr bool kHasPairs = false;
INLINE void split(vec*) {}
INLINE vec shorten_nan(vec a) { return a; }
constexpr bool kStreams = false;  // these are ordinary stores
template <class T>
INLINE void stream(T* p, vec a) { store(p, a); }
template <class T>
INLINE void stream_copy(T* p, const T* from) { store(p, load(from)); }
INLINE void finish_streams() {}

#endif

// The sums of a row's values, if the norm is centred, and of their terms. A double holds the square of a float exactly, and sums of
// them far more accurately than a float holds the result, whatever the order and the size of the terms. So the shift is 0; a mean
// that is large against the standard deviation costs the variance the bits of their squared ratio, of which kMaxRatio leaves 32.
template <class NORM>
struct WideSums {
  static constexpr bool kSplits = false;
  static constexpr double kMaxRatio = 0x1p20;
  half s1[4], s2[4], shift = {};

  INLINE WideSums() {
    for (int c = 0; c < 4; ++c) s1[c] = s2[c] = half{};
  }
  explicit INLINE WideSums(double origin) : WideSums() { shift += origin; }
  INLINE void begin(const vec*, int, int64_t) {}
  INLINE void add_block(int64_t, const vec* t) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) add_to(u % 2 * 2, low_half(t[u]), high_half(t[u]));
  }
  // Add a vector that is zero after the first n elements.
  INLINE void add_part(vec t, int64_t) { add_to(0, low_half(t), high_half(t)); }
  // The same with the shift subtracted, for n = W.
  INLINE void add_shifted(vec t) { add_to(0, low_half(t) - shift, high_half(t) - shift); }
  INLINE void add_to(int c, half low, half high) {
    if (NORM::kCentred) {
      s1[c] += low;
      s1[c + 1] += high;
    }
    s2[c] = NORM::add_term(low, s2[c]);
    s2[c + 1] = NORM::add_term(high, s2[c + 1]);
  }
  INLINE double origin() const { return shift[0]; }
  INLINE double values() const { return sum((s1[0] + s1[1]) + (s1[2] + s1[3])); }
  INLINE double terms() const { return sum((s2[0] + s2[1]) + (s2[2] + s2[3])); }
};

// `store_rounded` stores a and returns it rounded to the dtype of the memory.
INLINE vec store_rounded(float* p, vec a) {
  store(p, a);
  return a;
}
template <class T>
INLINE vec store_rounded(T* p, vec a, int64_t n) {
  store(p, a, n);
  return load(p, n);
}
