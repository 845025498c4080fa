// Everything that is compiled once for each instruction set. Included by isa_*.cpp, inside namespace addnorm::<isa>::(anonymous) and
// after its target pragma; `single` computes in float, `twice` in double, from one text.
#include "scalar-inl.h"

#include "philox-inl.h"
namespace single {
#include "vec-inl.h"

#include "memory-inl.h"

#include "forward-inl.h"

#include "backward-inl.h"
#undef EACH_TYPE
}  // namespace single
namespace twice {
#include "vec64-inl.h"

#include "memory-inl.h"

#include "forward-inl.h"

#include "backward-inl.h"
#undef EACH_TYPE
}  // namespace twice
