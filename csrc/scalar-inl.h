// Conversion of one element between a dtype in memory and the arithmetic without special instructions: for the default instruction
// set, and for dtypes that are rare with double. Included once by each isa_*.cpp, inside namespace addnorm::<isa>::(anonymous).

#define INLINE inline __attribute__((always_inline))
#define OUTLINE __attribute__((noinline))

INLINE float from_bits(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}
INLINE uint32_t to_bits(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}

INLINE double widen1(double x) { return x; }
INLINE float widen1(float x) { return x; }
INLINE float widen1(bf16 h) { return from_bits(static_cast<uint32_t>(h.bits) << 16); }
// float16 moved into place is 2^112 times too small; an infinity or NaN is recognized by its exponent. A subnormal is computed as its
// difference from the smallest normal number, without a subnormal float, which the processor may flush to 0.
INLINE float widen1(f16 h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16, rest = static_cast<uint32_t>(h.bits & 0x7fffu) << 13;
  if (rest >= 0x0f800000u) return from_bits(sign | 0x7f800000u | (rest & 0x007fffffu));
  const float size = rest < 0x00800000u ? from_bits(0x38800000u + rest) - 0x1p-14f : from_bits(rest) * 0x1p112f;
  return from_bits(sign | to_bits(size));
}

INLINE void narrow1(double x, double* to) { *to = x; }
INLINE void narrow1(double x, float* to) { *to = static_cast<float>(x); }
INLINE void narrow1(float x, float* to) { *to = x; }
INLINE void narrow1(float x, bf16* to) {
  const uint32_t u = to_bits(x);
  to->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
INLINE void narrow1(float x, f16* to) {
  const uint32_t u = to_bits(x), sign = u >> 16 & 0x8000u, size = u & 0x7fffffffu;
  uint32_t h;
  if (size > 0x7f800000u) h = 0x7e00;               // NaN
  else if (size >= 0x477ff000u) h = 0x7c00;         // 65520 and more round to infinity
  else if (size >= 0x38800000u) h = (size + 0xc8000fffu + (size >> 13 & 1u)) >> 13;  // rebias, round to even
  else h = to_bits(from_bits(size) + 0.5f) - 0x3f000000u;  // subnormal: the last place of 0.5 is float16's smallest number
  to->bits = static_cast<uint16_t>(sign | h);
}
INLINE void narrow1(double x, bf16* to) { narrow1(static_cast<float>(x), to); }
INLINE void narrow1(double x, f16* to) { narrow1(static_cast<float>(x), to); }
