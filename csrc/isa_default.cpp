// The loops for any CPU.
#include "kernels.h"

namespace addnorm::isa_default {
namespace {
#include "vec-inl.h"

#include "kernels-inl.h"
}  // namespace
}  // namespace addnorm::isa_default

namespace addnorm {
extern const Kernels kernels_default = {"default", isa_default::forward, isa_default::backward, isa_default::reduce, isa_default::widen, isa_default::narrow};
}  // namespace addnorm
