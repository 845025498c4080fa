// Whether the kernels support a call, and the options of the add as the operators receive them and as the kernels read them.
#pragma once

#include "arguments.h"
#include "glue.h"

namespace addnorm {
namespace {

// A call that the kernels do not support goes to the reference in eager torch (`<op>_reference`, the same schema). It computes what is
// valid (empty tensors, targets that overlap) and raises the sentence about what is not, so a valid call pays for a few comparisons only.
inline void call_reference(Stack& stack, const char* reference) {
  if (!has_reference) {
    throw std::runtime_error(
        "addnorm: invalid arguments, or tensors (no features, a dtype, memory that out= may not write) that only the Python package "
        "computes, and it is not imported: import addnorm, or decompose the program with addnorm.decompositions()");
  }
  stack.owner = false;  // the dispatcher takes ownership of the arguments
  check(torch_call_dispatcher(reference, "", stack.at, kTorchVersion));
}

// Whether a number is one of `count` values of an enum.
inline bool is_code(int64_t value, int64_t count) { return value >= 0 && value < count; }

// Whether there is no tensor, or a (d,) tensor on the CPU, or with `scalar` a 0-d tensor.
inline bool is_parameter(AtenTensorHandle t, int64_t d, Type* type, bool scalar = false) {
  if (t == nullptr) return true;
  const Shape shape(t);
  const bool fits = shape.dim == 1 ? shape.d == d : scalar && shape.dim == 0;
  const auto known = type_of(t);
  if (!fits || !known || !on_cpu(t)) return false;
  *type = *known;
  return true;
}

// The options of the add as an operator receives them; `first` is the index of the first one.
struct AddInputs {
  AtenTensorHandle residual_scale, row_scale, layer_scale, branch_bias, seed;
  double residual_factor, branch_factor, dropout_p;
  int64_t offset;
  Type residual_scale_type = Type::f32, row_scale_type = Type::f32, layer_scale_type = Type::f32, branch_bias_type = Type::f32;

  AddInputs(const Stack& stack, int first)
      : residual_scale(stack.tensor(first + AddOptionArgs::kResidualScale)),
        row_scale(stack.tensor(first + AddOptionArgs::kRowScale)),
        layer_scale(stack.tensor(first + AddOptionArgs::kLayerScale)),
        branch_bias(stack.tensor(first + AddOptionArgs::kBranchBias)),
        seed(stack.tensor(first + AddOptionArgs::kSeed)),
        residual_factor(stack.real(first + AddOptionArgs::kResidualFactor)),
        branch_factor(stack.real(first + AddOptionArgs::kBranchFactor)),
        dropout_p(stack.real(first + AddOptionArgs::kDropoutP)),
        offset(stack.integer(first + AddOptionArgs::kOffset)) {}

  bool supported(const Shape& shape) {
    bool fits = is_parameter(residual_scale, shape.d, &residual_scale_type, true) &&
                is_parameter(layer_scale, shape.d, &layer_scale_type, true) && is_parameter(branch_bias, shape.d, &branch_bias_type);
    if (row_scale != nullptr) {
      const Shape rows(row_scale);
      fits = fits && rows.dim == shape.dim - 1 && on_cpu(row_scale);
      for (int64_t i = 0; fits && i < rows.dim; ++i) fits = rows.sizes[i] == shape.sizes[i];
      const auto known = type_of(row_scale);
      fits = fits && known.has_value();
      row_scale_type = known.value_or(Type::f32);
    }
    fits = fits && dropout_p >= 0.0 && dropout_p <= 1.0 && is_code(offset, int64_t{1} << 62);
    static const int32_t int64 = aoti_torch_dtype_int64();
    return fits && (dropout_p == 0.0 || (seed != nullptr && Shape(seed).dim == 0 && dtype_of(seed) == int64 && on_cpu(seed)));
  }

  // The options as the kernels read them; valid as long as this object.
  AddOptions options(const Shape& shape, bool use_float64) {
    AddOptions add;
    add.residual_factor = residual_factor;
    add.branch_factor = branch_factor;
    add.residual_scale = scale(residual_scale, residual_scale_type, shape.d, use_float64, reals_[0], &add.residual_factor);
    add.layer_scale = scale(layer_scale, layer_scale_type, shape.d, use_float64, reals_[1], &add.branch_factor);
    add.row_scale = reals_[2].read(row_scale, row_scale_type, shape.rows, use_float64);
    add.branch_bias = reals_[3].read(branch_bias, branch_bias_type, shape.d, use_float64);
    add.dropout = dropout_p > 0.0;
    if (add.dropout) {
      const Input in(seed);
      __builtin_memcpy(&add.seed, in.data, sizeof add.seed);
      add.offset = static_cast<uint64_t>(offset);
      add.threshold = static_cast<uint64_t>(dropout_p * 4294967296.0);
      add.keep_scale = dropout_p < 1.0 ? 1.0 / (1.0 - dropout_p) : 0.0;
    }
    add.is_default = is_default();
    return add;
  }

  bool is_default() const {
    return residual_factor == 1.0 && branch_factor == 1.0 && dropout_p == 0.0 && residual_scale == nullptr &&
           row_scale == nullptr && layer_scale == nullptr && branch_bias == nullptr;
  }

 private:
  Reals reals_[4];

  // The values of a (d,) tensor; the value of a 0-d tensor is stored in `factor`.
  static const void* scale(AtenTensorHandle t, Type type, int64_t d, bool use_float64, Reals& reals, double* factor) {
    if (t == nullptr || Shape(t).dim == 1) return reals.read(t, type, d, use_float64);
    Reals one;
    *factor = *static_cast<const double*>(one.read(t, type, 1, true));
    return nullptr;
  }
};

}  // namespace
}  // namespace addnorm
