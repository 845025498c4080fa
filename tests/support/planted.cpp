// A library that is loaded as the kernels are and does what they must not; tests/house/test_sanitize.py. `eps` says what.
#include <limits>

#include "../../csrc/glue.h"

static void add_norm(StableIValue* at, uint64_t, uint64_t) {
  void* data = nullptr;
  const auto residual = reinterpret_cast<AtenTensorHandle>(at[0]);
  torch_get_mutable_data_ptr(residual, &data);
  const int64_t count = addnorm::Shape(residual).rows * addnorm::Shape(residual).d;
  float* x = static_cast<float*>(data);
  double fault = 0.0;
  std::memcpy(&fault, &at[4], sizeof fault);
  volatile int big = std::numeric_limits<int>::max();
  volatile double huge = 1e30;
  if (fault == 1) x[0] = x[count];
  if (fault == 2) x[-1] = 0.0f;
  if (fault == 3) x[0] = static_cast<float>(big + 1);
  if (fault == 4) x[0] = static_cast<float>(static_cast<int>(huge));
  // The first place of the stack, residual, is the result as it is.
}

static const addnorm::Library library({{"add_norm", add_norm}, {"add_norm.kernel", add_norm}});  // .kernel: what eager mode calls

extern "C" __attribute__((visibility("default"))) const char* addnorm_isa() { return "faults"; }
extern "C" __attribute__((visibility("default"))) void addnorm_allow_reference() {}
