// Selection of the table of kernels by CPU features, once per process.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace addnorm {

static const Kernels& choose() {
#if defined(__x86_64__)
  const char* requested = std::getenv("ATEN_CPU_CAPABILITY");
  const auto allows = [requested](const char* level) {
    // Levels are ordered and the requested one is the highest allowed. An unknown name allows all, as in torch.
    static const char* const levels[] = {"default", "avx2", "avx512"};
    int cap = 2, index = 0;
    for (int i = 0; i < 3; ++i) {
      if (requested != nullptr && std::strcmp(requested, levels[i]) == 0) cap = i;
      if (std::strcmp(level, levels[i]) == 0) index = i;
    }
    return index <= cap;
  };
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && allows("avx512")) return kernels_avx512;
  if (avx2 && allows("avx2")) return kernels_avx2;
#endif
  return kernels_default;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

bool has_reference = false;

}  // namespace addnorm

// src/addnorm/ops/cpu.py calls these through ctypes.
extern "C" __attribute__((visibility("default"))) void addnorm_allow_reference() { addnorm::has_reference = true; }

extern "C" __attribute__((visibility("default"))) const char* addnorm_isa() { return addnorm::kernels().name; }
