// The dtypes of rows in memory, and the code of a norm.
#pragma once

#include <cstdint>

namespace addnorm {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct any;  // a dtype that is known only at run time

enum class Type : int { f32, bf16, f16, f64 };
constexpr int kTypes = 4;
inline int64_t size_of(Type type) { return type == Type::f64 ? 8 : type == Type::f32 ? 4 : 2; }

// The codes of the norms are those of src/addnorm/_util/norms.py; norms-inl.h has the norms that the loops compute.
enum class Norm : int { none = 2 };

}  // namespace addnorm
