// The loops for AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define ADDNORM_AVX512

namespace addnorm::isa_avx512 {
namespace {
#include "loops-inl.h"
}  // namespace
}  // namespace addnorm::isa_avx512

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace addnorm {
extern const Kernels kernels_avx512 = {"AVX512", isa_avx512::float32::loops, isa_avx512::float64::loops};
}  // namespace addnorm
#endif
