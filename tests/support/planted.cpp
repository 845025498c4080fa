// A library that is loaded as the kernels are and does what they must not; tests/house/test_sanitize.py. `eps` says what.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <limits>

static void add_norm(StableIValue* at, uint64_t, uint64_t) {
  void* data = nullptr;
  int64_t count = 0;
  aoti_torch_get_data_ptr(reinterpret_cast<AtenTensorHandle>(at[0]), &data);
  aoti_torch_get_numel(reinterpret_cast<AtenTensorHandle>(at[0]), &count);
  float* x = static_cast<float*>(data);
  const double fault = torch::stable::detail::to<double>(at[4]);
  volatile int big = std::numeric_limits<int>::max();
  volatile double huge = 1e30;
  if (fault == 1) x[0] = x[count];
  if (fault == 2) x[-1] = 0.0f;
  if (fault == 3) x[0] = static_cast<float>(big + 1);
  if (fault == 4) x[0] = static_cast<float>(static_cast<int>(huge));
  // The first place of the stack, residual, is the result as it is.
}

STABLE_TORCH_LIBRARY_IMPL(addnorm, CPU, m) {
  m.impl("add_norm", add_norm);
  m.impl("add_norm.kernel", add_norm);  // what eager mode calls
}

extern "C" __attribute__((visibility("default"))) const char* addnorm_isa() { return "faults"; }
extern "C" __attribute__((visibility("default"))) void addnorm_allow_reference() {}
