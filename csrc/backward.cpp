// The backward operator of one stream, add_norm_backward.
#include "routing.h"

namespace addnorm {
namespace {

using Args = AddNormBackwardArgs;

struct BackwardCall {
  Backward args{};
  AtenTensorHandle dy, dz, z, stats, weight, residual = nullptr, branch = nullptr;
  AddInputs* add = nullptr;
  int64_t grad_mask;
  double weight_offset = 0.0;
  Type weight_type = Type::f32, bias_type = Type::f32, dresidual_type = Type::f32, dbranch_type = Type::f32;
  bool known_norm;

  // `tensors` are dy, dz, z, stats and weight; `dtypes` those of the gradients of residual, branch and bias.
  BackwardCall(const AtenTensorHandle* tensors, int64_t norm_code, const int32_t* dtypes, int64_t mask, double offset)
      : dy(tensors[Args::kDy]),
        dz(tensors[Args::kDz]),
        z(tensors[Args::kZ]),
        stats(tensors[Args::kStats]),
        weight(tensors[Args::kWeight]),
        grad_mask(mask),
        weight_offset(offset),
        known_norm(is_norm(norm_code)) {
    // If y was not used, the gradient of z is passed on unchanged.
    args.norm = dy != nullptr && known_norm ? static_cast<Norm>(norm_code) : Norm::none;
    if (args.norm == Norm::none) dy = nullptr;
    dresidual_type = known(dtypes[0]);
    dbranch_type = known(dtypes[1]);
    bias_type = known(dtypes[2]);
  }

  bool requested(int64_t bits) const { return (grad_mask & bits) != 0; }

  bool supported(const Shape& shape) {
    args.d = shape.d;
    args.rows = shape.rows;
    const bool norm = args.norm != Norm::none;
    if (!known_norm || shape.d == 0 || (dy == nullptr && dz == nullptr)) return false;
    args.z_type = known(z);
    if (!on_cpu(z) || !rows_like(dz, shape) || !rows_like(dy, shape) || !rows_like(residual, shape) || !rows_like(branch, shape))
      return false;
    if (dz != nullptr && known(dz) != args.z_type) return false;
    if (dy != nullptr) args.dy_type = known(dy);
    if (residual != nullptr) args.residual_type = known(residual);
    if (branch != nullptr) args.branch_type = known(branch);
    if (norm) {
      const Shape moments(stats);
      const Type stats_type = args.z_type == Type::f64 ? Type::f64 : Type::f32;
      if (moments.rows != shape.rows || moments.d != 2 || known(stats) != stats_type || !on_cpu(stats)) return false;
      if (!is_parameter(weight, shape.d, &weight_type)) return false;
    } else if (requested(kWeightGrad | kBiasGrad)) {
      return false;
    }
    if (requested(kWeightGrad) && weight == nullptr) return false;
    if (add == nullptr) {
      if ((grad_mask & ~(kResidualGrad | kBranchGrad | kWeightGrad | kBiasGrad)) != 0) return false;
    } else {
      if (!add->supported(shape)) return false;
      // A scale's gradient is computed from the tensor that it multiplies.
      const bool complete = (!requested(kResidualScaleGrad) || (add->residual_scale != nullptr && residual != nullptr)) &&
                         (!requested(kRowScaleGrad) || (add->row_scale != nullptr && branch != nullptr)) &&
                         (!requested(kLayerScaleGrad) || (add->layer_scale != nullptr && branch != nullptr)) &&
                         (!requested(kBranchBiasGrad) || add->branch_bias != nullptr);
      if (!complete || (grad_mask & ~kAllGrads) != 0) return false;
    }
    return all_known;
  }

  // Return the gradients in the order of GradBit, those of the options only if there are any.
  std::vector<Output> run(const Shape& shape) {
    if (requested(kResidualGrad)) dresidual.emplace(shape.dim, shape.sizes, dresidual_type);
    if (requested(kBranchGrad)) dbranch.emplace(shape.dim, shape.sizes, dbranch_type);
    if (shape.rows > 0) {  // without rows the sums are zeros, and a row may have more features than memory has bytes
      read(shape);
      compute(shape);
    }
    return collect(shape);
  }

 private:
  Input dy_in, dz_in, z_in, stats_in, residual_in, branch_in;
  Reals scale;
  std::optional<Output> dresidual, dbranch;
  Scratch row_sums;
  std::unique_ptr<char[]> partials;

  bool needs_branch() const { return requested(kRowScaleGrad | kLayerScaleGrad); }
  int64_t real_bytes() const { return args.use_float64 ? 8 : 4; }

  // Read the inputs.
  void read(const Shape& shape) {
    Backward& a = args;
    const auto is_f64 = [](bool used, Type type) { return used && type == Type::f64; };
    a.use_float64 = a.z_type == Type::f64 || is_f64(dy != nullptr, a.dy_type) || is_f64(requested(kResidualGrad), dresidual_type) ||
             is_f64(requested(kBranchGrad), dbranch_type) || is_f64(requested(kResidualScaleGrad), a.residual_type) ||
             is_f64(needs_branch(), a.branch_type);
    const bool norm = a.norm != Norm::none;
    dy_in.read(dy);
    dz_in.read(dz);
    z_in.read(z);
    stats_in.read(norm ? stats : nullptr);
    residual_in.read(requested(kResidualScaleGrad) ? residual : nullptr);
    branch_in.read(needs_branch() ? branch : nullptr);
    a.dy = dy_in.data;
    a.dz = dz_in.data;
    a.z = z_in.data;
    a.stats = stats_in.data;
    a.residual = residual_in.data;
    a.branch = branch_in.data;
    if (norm) a.weight = weight != nullptr ? scale.read(weight, weight_type, shape.d, a.use_float64, weight_offset) : scale.ones(shape.d, a.use_float64);
    if (add != nullptr) a.add = add->options(shape, a.use_float64);
    a.dresidual_type = dresidual_type;
    a.dbranch_type = dbranch_type;
    a.dresidual = dresidual ? dresidual->data : nullptr;
    a.dbranch = dbranch ? dbranch->data : nullptr;
    if (a.add.is_default && a.dresidual == nullptr) {  // one gradient, of residual or of branch
      a.dresidual = a.dbranch;
      a.dresidual_type = dbranch_type;
      a.dbranch = nullptr;
    }
  }

  // Compute the rows in blocks, and the sums over the rows.
  void compute(const Shape& shape) {
    Backward& a = args;
    const int64_t sum_bits[kSums] = {kWeightGrad, kBiasGrad, kResidualScaleGrad, kLayerScaleGrad, kBranchBiasGrad};
    a.sums = 0;
    a.padded_d = padded(shape.d);
    for (int s = 0; s < kSums; ++s) a.place[s] = requested(sum_bits[s]) ? static_cast<int>(a.sums++) : -1;
    a.drow_scale = requested(kRowScaleGrad) ? row_sums.reserve(shape.rows * real_bytes()) : nullptr;
    a.block_rows = block_rows(shape.rows);
    a.prefetch = exceeds_cache(shape, a.z_type);
    a.stream = exceeds_last_cache(shape, a.z_type) && can_stream(a.dresidual, shape.rows, shape.d * size_of(a.dresidual_type));
    const int64_t blocks = (shape.rows + a.block_rows - 1) / a.block_rows, width = a.sums * a.padded_d;
    if (width > 0) partials.reset(new char[static_cast<size_t>(blocks * width * real_bytes())]);
    a.partials = partials.get();
    const Loops& loops = kernels().loops(a.use_float64);
    const int64_t rows_each = shape.rows < a.block_rows ? shape.rows : a.block_rows;
    parallel(blocks, rows_each * shape.d, [&](int64_t begin, int64_t end) {
      Scratch scratch(scratch_bytes(a));
      loops.backward(a, begin, end, scratch.data());
    });
    if (width > 0 && blocks > 1)
      parallel(width / kPad, blocks * kPad,
               [&](int64_t begin, int64_t end) { loops.reduce(a.partials, blocks, width, begin * kPad, end * kPad); });
  }

  // An operator returns an empty placeholder for a gradient that is not requested, a call without the dispatcher nothing.
  Output not_requested() const { return add != nullptr ? Output() : Output(nullptr); }

  std::vector<Output> collect(const Shape& shape) {
    std::vector<Output> results;
    results.reserve(kGrads);
    results.push_back(dresidual ? std::move(*dresidual) : not_requested());
    results.push_back(dbranch ? std::move(*dbranch) : not_requested());
    results.push_back(parameter(kWeightGrad, kWeightSum, weight_type, shape));
    results.push_back(parameter(kBiasGrad, kBiasSum, bias_type, shape));
    if (add == nullptr) return results;
    results.push_back(factor(kResidualScaleGrad, kResidualScaleSum, add->residual_scale, add->residual_scale_type, shape));
    if (requested(kRowScaleGrad)) {
      Output out(shape.dim - 1, shape.sizes, add->row_scale_type);
      if (shape.rows > 0) kernels().loops(args.use_float64).narrow(args.drow_scale, out.data, add->row_scale_type, shape.rows);
      results.push_back(std::move(out));
    } else {
      results.emplace_back();
    }
    results.push_back(factor(kLayerScaleGrad, kLayerScaleSum, add->layer_scale, add->layer_scale_type, shape));
    results.push_back(parameter(kBranchBiasGrad, kBranchBiasSum, add->branch_bias_type, shape));
    return results;
  }

  char* sum_of(Sum what) const { return partials.get() + args.place[what] * args.padded_d * real_bytes(); }

  // Return a sum over the rows, in the dtype of its parameter.
  Output parameter(int64_t what, Sum sum, Type type, const Shape& shape) const {
    if (!requested(what)) return not_requested();
    Output out(1, &shape.d, type);
    if (shape.rows == 0) std::memset(out.data, 0, static_cast<size_t>(shape.d * size_of(type)));
    else kernels().loops(args.use_float64).narrow(sum_of(sum), out.data, type, shape.d);
    return out;
  }

  // Return a sum over the rows, and over the features too if the parameter is a 0-d tensor.
  Output factor(int64_t what, Sum sum, AtenTensorHandle t, Type type, const Shape& shape) const {
    if (!requested(what) || Shape(t).dim > 0) return parameter(what, sum, type, shape);
    Output out(0, nullptr, type);
    if (shape.rows == 0) {
      std::memset(out.data, 0, static_cast<size_t>(size_of(type)));
      return out;
    }
    if (args.use_float64) fold(reinterpret_cast<double*>(sum_of(sum)), shape.d);
    else fold(reinterpret_cast<float*>(sum_of(sum)), shape.d);
    kernels().loops(args.use_float64).narrow(sum_of(sum), out.data, type, 1);
    return out;
  }

  bool all_known = true;

  Type known(std::optional<Type> type) {
    if (!type) all_known = false;
    return type.value_or(Type::f32);
  }
  Type known(int32_t dtype) { return known(type_of(dtype)); }
  Type known(AtenTensorHandle t) { return known(type_of(t)); }

  static bool rows_like(AtenTensorHandle t, const Shape& shape) { return t == nullptr || (on_cpu(t) && Shape(t) == shape); }

  // Sum n values by halves into the first.
  template <class T>
  static void fold(T* values, int64_t n) {
    for (; n > 1; n = (n + 1) / 2)
      for (int64_t i = (n + 1) / 2; i < n; ++i) values[i - (n + 1) / 2] += values[i];
  }
};

// add_norm_backward(dy?, dz?, z, stats, weight?, norm, dtypes, grad_mask, weight_offset, residual?, branch?, the options of the add)
// -> gradients in the order of GradBit
void add_norm_backward(StableIValue* at, uint64_t, uint64_t) {
  Stack stack{at, Args::kSignature};
  const AtenTensorHandle tensors[] = {stack.tensor(Args::kDy), stack.tensor(Args::kDz), stack.tensor(Args::kZ), stack.tensor(Args::kStats),
                                      stack.tensor(Args::kWeight)};
  const int32_t dtypes[] = {stack.dtype_at(Args::kDresidualDtype), stack.dtype_at(Args::kBranchDtype), stack.dtype_at(Args::kBiasDtype)};
  BackwardCall call(tensors, stack.integer(Args::kNorm), dtypes, stack.integer(Args::kGradMask), stack.real(Args::kWeightOffset));
  AddInputs add(stack, Args::kAddOptions);
  call.residual = stack.tensor(Args::kResidual);
  call.branch = stack.tensor(Args::kBranch);
  call.add = &add;
  const Shape shape(call.z);
  if (!call.supported(shape)) return call_reference(stack, ADDNORM_NAMESPACE "::add_norm_backward_reference");
  std::vector<Output> results = call.run(shape);  // all before the first handle is released: an allocation may fail
  stack.release();
  for (size_t i = 0; i < kGrads; ++i) stack.at[i] = results[i].release_handle();
}

const Library library({
    {"add_norm_backward", add_norm_backward},
});

}  // namespace
}  // namespace addnorm

// The backward of a call without options and without the dispatcher, from autograd/node.cpp: the gradients of residual, branch, weight
// and bias in `results`, null if not requested. Returns whether the kernels support the call, as `addnorm_forward` does.
extern "C" __attribute__((visibility("default"))) bool addnorm_backward(const AtenTensorHandle* tensors, int64_t norm, const int32_t* dtypes,
                                                                        int64_t grad_mask, double weight_offset, AtenTensorHandle* results) {
  using namespace addnorm;
  try {
    BackwardCall call(tensors, norm, dtypes, grad_mask, weight_offset);
    const Shape shape(call.z);
    if (!call.supported(shape)) return false;
    for (Output& gradient : call.run(shape)) *results++ = reinterpret_cast<AtenTensorHandle>(gradient.release_handle());
    return true;
  } catch (...) {
    return false;
  }
}
