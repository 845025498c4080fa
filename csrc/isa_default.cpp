// The loops for any CPU.
#include "kernels.h"

namespace addnorm::isa_default {
namespace {
#include "loops-inl.h"
}  // namespace
}  // namespace addnorm::isa_default

namespace addnorm {
extern const Kernels kernels_default = {"default", isa_default::float32::loops, isa_default::float64::loops};
}  // namespace addnorm
