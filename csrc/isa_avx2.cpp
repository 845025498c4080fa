// The loops for AVX2 with FMA.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define ADDNORM_AVX2

namespace addnorm::isa_avx2 {
namespace {
#include "loops-inl.h"
}  // namespace
}  // namespace addnorm::isa_avx2

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace addnorm {
extern const Kernels kernels_avx2 = {"AVX2", isa_avx2::float32::loops, isa_avx2::float64::loops};
}  // namespace addnorm
#endif
