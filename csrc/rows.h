// The dtypes of rows in memory, and the norms.
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

enum class Norm : int { layer, rms, none };
constexpr int kNorms = 3;

}  // namespace addnorm
