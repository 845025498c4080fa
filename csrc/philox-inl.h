// Dropout's random bits: Philox 4x32-10 (Salmon et al. 2011), the same as addnorm/ops/philox.py. Included once by each isa_*.cpp,
// inside namespace addnorm::<isa>::(anonymous).
//
// A counter is a lane of 64 bits, of which each of the four words uses the low half: the instruction that multiplies 32 bits by
// 32 bits reads only that, and its product has both halves that a round needs. The high halves are ignored.

constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr int kRounds = 10;

#if defined(ADDNORM_AVX512)

constexpr int kCounters = 8;  // per vector
using words = __m512i;
INLINE words broadcast(uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
// Counters in the order that `keep_word` inverts.
INLINE words count_from(uint64_t first) {
  return _mm512_add_epi64(broadcast(first), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
}
INLINE words multiply(words a, words b) { return _mm512_mul_epu32(a, b); }
INLINE words high_half(words a) { return _mm512_srli_epi64(a, 32); }
INLINE words mix(words a, words b, words c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
// Bit j: word j & 3 of counter j >> 2 is at least the threshold.
INLINE uint32_t keep_word(const words* c, uint32_t threshold) {
  const words t = _mm512_set1_epi32(static_cast<int>(threshold));
  const words a = _mm512_mask_mov_epi32(c[0], 0xaaaa, _mm512_slli_epi64(c[1], 32));
  const words b = _mm512_mask_mov_epi32(c[2], 0xaaaa, _mm512_slli_epi64(c[3], 32));
  const uint32_t low = _mm512_cmpge_epu32_mask(_mm512_unpacklo_epi64(a, b), t);
  const uint32_t high = _mm512_cmpge_epu32_mask(_mm512_unpackhi_epi64(a, b), t);
  return low | high << 16;
}

#elif defined(ADDNORM_AVX2)

constexpr int kCounters = 4;
using words = __m256i;
INLINE words broadcast(uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
INLINE words count_from(uint64_t first) { return _mm256_add_epi64(broadcast(first), _mm256_setr_epi64x(0, 2, 1, 3)); }
INLINE words multiply(words a, words b) { return _mm256_mul_epu32(a, b); }
INLINE words high_half(words a) { return _mm256_srli_epi64(a, 32); }
INLINE words mix(words a, words b, words c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
INLINE uint32_t keep_word8(words a, uint32_t threshold) {
  const words t = _mm256_set1_epi32(static_cast<int>(threshold));
  const words at_least = _mm256_cmpeq_epi32(_mm256_max_epu32(a, t), a);
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(at_least)));
}
INLINE uint32_t keep_word(const words* c, uint32_t threshold) {
  const words a = _mm256_blend_epi32(c[0], _mm256_slli_epi64(c[1], 32), 0xaa);
  const words b = _mm256_blend_epi32(c[2], _mm256_slli_epi64(c[3], 32), 0xaa);
  return keep_word8(_mm256_unpacklo_epi64(a, b), threshold) | keep_word8(_mm256_unpackhi_epi64(a, b), threshold) << 8;
}

#else

constexpr int kCounters = 2;
struct words {
  uint64_t lane[2];
};
INLINE words broadcast(uint64_t x) { return {{x, x}}; }
INLINE words count_from(uint64_t first) { return {{first, first + 1}}; }
INLINE uint64_t low(uint64_t x) { return x & 0xffffffffu; }
INLINE words multiply(words a, words b) { return {{low(a.lane[0]) * low(b.lane[0]), low(a.lane[1]) * low(b.lane[1])}}; }
INLINE words high_half(words a) { return {{a.lane[0] >> 32, a.lane[1] >> 32}}; }
INLINE words mix(words a, words b, words c) {
  return {{a.lane[0] ^ b.lane[0] ^ c.lane[0], a.lane[1] ^ b.lane[1] ^ c.lane[1]}};
}
INLINE uint32_t keep_word(const words* c, uint32_t threshold) {
  uint32_t bits = 0;
  for (int j = 0; j < 8; ++j) bits |= static_cast<uint32_t>(low(c[j & 3].lane[j >> 2]) >= threshold) << j;
  return bits;
}

#endif

// Vectors of counters computed at the same time: each of the ten rounds waits for its products.
constexpr int kBatches = 2;

// The bits of elements first to first + n - 1 of the branch; bit j of `bits` is element j from the start of the counter that
// contains `first`.
void keep_bits(const AddOptions& add, uint64_t first, int64_t n, unsigned char* bits) {
  const int64_t counters = (static_cast<int64_t>(first & 3) + n + 3) / 4;
  constexpr int kBytes = kCounters / 2, kStep = kBatches * kCounters;
  if (add.threshold > 0xffffffffu) {  // p = 1: no word reaches the threshold
    __builtin_memset(bits, 0, static_cast<unsigned long>((counters + kStep - 1) / kStep * kBatches * kBytes));
    return;
  }
  const words m0 = broadcast(kMultiplier0), m1 = broadcast(kMultiplier1);
  words key[2 * kRounds];
  for (int round = 0; round < kRounds; ++round) {
    key[2 * round] = broadcast(static_cast<uint32_t>(add.seed) + static_cast<uint32_t>(round) * kWeyl0);
    key[2 * round + 1] = broadcast(static_cast<uint32_t>(add.seed >> 32) + static_cast<uint32_t>(round) * kWeyl1);
  }
  for (int64_t i = 0; i < counters; i += kStep) {
    words c[kBatches][4];
    for (int b = 0; b < kBatches; ++b) {
      c[b][0] = count_from((first >> 2) + add.offset + static_cast<uint64_t>(i + b * kCounters));
      c[b][1] = high_half(c[b][0]);
      c[b][2] = c[b][3] = broadcast(0);
    }
#pragma GCC unroll 10
    for (int round = 0; round < kRounds; ++round)
#pragma GCC unroll 2
      for (int b = 0; b < kBatches; ++b) {
        const words p0 = multiply(c[b][0], m0), p1 = multiply(c[b][2], m1);
        c[b][0] = mix(high_half(p1), c[b][1], key[2 * round]);
        c[b][1] = p1;
        c[b][2] = mix(high_half(p0), c[b][3], key[2 * round + 1]);
        c[b][3] = p0;
      }
#pragma GCC unroll 2
    for (int b = 0; b < kBatches; ++b) {
      const uint32_t word = keep_word(c[b], static_cast<uint32_t>(add.threshold));
      __builtin_memcpy(bits + (i / kCounters + b) * kBytes, &word, kBytes);
    }
  }
}
