// The code that is compiled once per instruction set. Included by isa_*.cpp, inside namespace addnorm::<isa>::(anonymous) and after
// its target pragma. The same text computes in float (namespace float32) and in double (namespace float64).
#include "scalar-inl.h"

#include "philox-inl.h"
namespace float32 {
#include "vec-inl.h"

#include "memory-inl.h"

#include "norms-inl.h"

#include "sources-inl.h"

#include "row-inl.h"

#include "overlap-inl.h"

#include "forward-inl.h"

#include "backward-inl.h"

#include "coefficients-inl.h"

#include "attend-inl.h"

#include "streams-inl.h"

#include "streams_backward-inl.h"
#undef EACH_TYPE
constexpr Loops loops = {forward, backward, reduce, widen, narrow, streams_forward, streams_backward, attend_forward, attend_backward, kNorms};
}  // namespace float32
namespace float64 {
#include "vec64-inl.h"

#include "memory-inl.h"

#include "norms-inl.h"

#include "sources-inl.h"

#include "row-inl.h"

#include "overlap-inl.h"

#include "forward-inl.h"

#include "backward-inl.h"
#undef EACH_TYPE
constexpr Loops loops = {forward, backward, reduce, widen, narrow, nullptr, nullptr, nullptr, nullptr, kNorms};
}  // namespace float64
