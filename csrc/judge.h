// Whether the kernels can compute a call, and the options of the add as they come in and as the kernels read them.
#pragma once

#include "glue.h"

namespace addnorm {
namespace {

// Three ways out of every operator: the kernels; the reference in eager torch (`<op>_reference`, the same schema), for what is empty
// or strange but perhaps valid; an error that says nothing but "invalid", which addnorm/ops/checks.py puts into a sentence. So
// the good path pays a handful of comparisons.
enum class Way { kernels, reference, invalid };
inline Way worse(Way a, Way b) { return a > b ? a : b; }

inline void finish(Stack& stack, const char* reference, Way way) {
  if (way == Way::reference) {
    stack.owner = false;  // the dispatcher takes the arguments over
    check(torch_call_dispatcher(reference, "", stack.at, TORCH_ABI_VERSION));
    return;
  }
  throw std::runtime_error("addnorm: invalid arguments");
}

// A (d,) tensor on the CPU, or where it may be one also a 0-d tensor.
inline Way judge_parameter(AtenTensorHandle t, int64_t d, Type* type, bool scalar = false) {
  if (t == nullptr) return Way::kernels;
  const Shape shape(t);
  const bool fits = shape.dim == 1 ? shape.d == d : scalar && shape.dim == 0;
  if (!fits || !on_cpu(t)) return Way::invalid;
  const auto known = type_of(t);
  if (!known) return Way::reference;
  *type = *known;
  return Way::kernels;
}

// The options of the add, in the order of the schemas: residual_factor, residual_scale?, branch_factor, row_scale?, layer_scale?,
// branch_bias?, dropout_p, seed?, offset.
struct AddInputs {
  AtenTensorHandle residual_scale, row_scale, layer_scale, branch_bias, seed;
  double residual_factor, branch_factor, dropout_p;
  int64_t offset;
  Type residual_scale_type = Type::f32, row_scale_type = Type::f32, layer_scale_type = Type::f32, branch_bias_type = Type::f32;

  AddInputs(const Stack& stack, int first)
      : residual_scale(stack.tensor(first + 1)),
        row_scale(stack.tensor(first + 3)),
        layer_scale(stack.tensor(first + 4)),
        branch_bias(stack.tensor(first + 5)),
        seed(stack.tensor(first + 7)),
        residual_factor(stack.real(first)),
        branch_factor(stack.real(first + 2)),
        dropout_p(stack.real(first + 6)),
        offset(stack.integer(first + 8)) {}

  Way judge(const Shape& shape) {
    Way way = judge_parameter(residual_scale, shape.d, &residual_scale_type, true);
    way = worse(way, judge_parameter(layer_scale, shape.d, &layer_scale_type, true));
    way = worse(way, judge_parameter(branch_bias, shape.d, &branch_bias_type));
    if (row_scale != nullptr) {
      const Shape rows(row_scale);
      bool fits = rows.dim == shape.dim - 1 && on_cpu(row_scale);
      for (int64_t i = 0; fits && i < rows.dim; ++i) fits = rows.sizes[i] == shape.sizes[i];
      if (!fits) return Way::invalid;
      const auto known = type_of(row_scale);
      if (!known) return Way::reference;
      row_scale_type = *known;
    }
    if (!(dropout_p >= 0.0 && dropout_p <= 1.0) || offset < 0 || offset >= int64_t{1} << 62)
      return Way::invalid;
    if (dropout_p > 0.0) {
      static const int32_t int64 = aoti_torch_dtype_int64();
      if (seed == nullptr || Shape(seed).dim != 0 || dtype_of(seed) != int64 || !on_cpu(seed)) return Way::invalid;
    }
    return way;
  }

  // The tensors as the kernels read them; they live as long as this does.
  AddOptions options(const Shape& shape, bool wide) {
    AddOptions add;
    add.residual_factor = residual_factor;
    add.branch_factor = branch_factor;
    add.residual_scale = scale(residual_scale, residual_scale_type, shape.d, wide, reals_[0], &add.residual_factor);
    add.layer_scale = scale(layer_scale, layer_scale_type, shape.d, wide, reals_[1], &add.branch_factor);
    add.row_scale = reals_[2].read(row_scale, row_scale_type, shape.rows, wide);
    add.branch_bias = reals_[3].read(branch_bias, branch_bias_type, shape.d, wide);
    add.dropout = dropout_p > 0.0;
    if (add.dropout) {
      const Input in(seed);
      __builtin_memcpy(&add.seed, in.data, sizeof add.seed);
      add.offset = static_cast<uint64_t>(offset);
      add.threshold = static_cast<uint64_t>(dropout_p * 4294967296.0);
      add.keep_scale = dropout_p < 1.0 ? 1.0 / (1.0 - dropout_p) : 0.0;
    }
    add.plain = at_rest();
    return add;
  }

  bool at_rest() const {
    return residual_factor == 1.0 && branch_factor == 1.0 && dropout_p == 0.0 && residual_scale == nullptr &&
           row_scale == nullptr && layer_scale == nullptr && branch_bias == nullptr;
  }

 private:
  Reals reals_[4];

  // A (d,) tensor's values, or a 0-d tensor's as the factor.
  static const void* scale(AtenTensorHandle t, Type type, int64_t d, bool wide, Reals& reals, double* factor) {
    if (t == nullptr || Shape(t).dim == 1) return reals.read(t, type, d, wide);
    Reals one;
    *factor = *static_cast<const double*>(one.read(t, type, 1, true));
    return nullptr;
  }
};

}  // namespace
}  // namespace addnorm
