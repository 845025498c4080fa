// The loads and stores of an Add & Norm without its arithmetic: the fastest that rows can be read, kept and written on a machine.
//
// A row is read twice, like the operation's: x and branch are loaded and their bits combined, and the result is stored where y (or z)
// will be; then that row, the weight and the bias are loaded and y is stored. Built by bench_limit.py. The threads are torch's: the
// library is linked without an OpenMP runtime and uses the one that torch has loaded.

#include <cstdint>

using Vec = int64_t __attribute__((vector_size(64), aligned(1), may_alias));

extern "C" void loads_and_stores(
    const char* x, const char* branch, const char* weight, const char* bias, char* y, char* z, int64_t rows, int64_t bytes, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * bytes;
    char* const kept = (z != nullptr ? z : y) + at;
    for (int64_t i = 0; i < bytes; i += 64) *(Vec*)(kept + i) = *(const Vec*)(x + at + i) | *(const Vec*)(branch + at + i);
    asm volatile("" ::: "memory");  // the row is read again
    if (bias != nullptr) {
      for (int64_t i = 0; i < bytes; i += 64)
        *(Vec*)(y + at + i) = *(const Vec*)(kept + i) | *(const Vec*)(weight + i) | *(const Vec*)(bias + i);
    } else {
      for (int64_t i = 0; i < bytes; i += 64) *(Vec*)(y + at + i) = *(const Vec*)(kept + i) | *(const Vec*)(weight + i);
    }
  }
}
