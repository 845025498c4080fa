// The loops for any CPU.
#include "kernels.h"

namespace addnorm::isa_default {
namespace {
#include "loops-inl.h"
}  // namespace
}  // namespace addnorm::isa_default

namespace addnorm {
extern const Kernels kernels_default = {"default", isa_default::single::loops, isa_default::twice::loops};
}  // namespace addnorm
