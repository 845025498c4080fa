// The backward operators: add_norm_train_backward (no options) and add_norm_backward (all of them).
#include "judge.h"

namespace addnorm {
namespace {

// Bits of `wants`: WANTS in ops/schema.py.
enum Want : int64_t {
  kResidual = 1, kBranch = 2, kWeight = 4, kBias = 8, kResidualScale = 16, kRowScale = 32, kLayerScale = 64, kBranchBias = 128
};

struct BackwardCall {
  Backward args{};
  AtenTensorHandle dy, dz, z, stats, weight, residual = nullptr, branch = nullptr;
  AddInputs* add = nullptr;
  int64_t wants;
  double weight_offset = 0.0;
  Type weight_type = Type::f32, bias_type = Type::f32, dresidual_type = Type::f32, dbranch_type = Type::f32;

  // Arguments 0 to 4 of both operators: dy, dz, z, stats, weight. `dtypes` is where those of residual, branch, bias begin.
  BackwardCall(const Stack& stack, int64_t norm, int dtypes)
      : dy(stack.tensor(0)),
        dz(stack.tensor(1)),
        z(stack.tensor(2)),
        stats(stack.tensor(3)),
        weight(stack.tensor(4)),
        wants(stack.integer(dtypes + 3)) {
    // Where nobody used y the stream's gradient goes through as it is.
    args.norm = dy != nullptr ? static_cast<Norm>(norm) : Norm::none;
    if (args.norm == Norm::none) dy = nullptr;
    dresidual_type = known(stack.dtype_at(dtypes));
    dbranch_type = known(stack.dtype_at(dtypes + 1));
    bias_type = known(stack.dtype_at(dtypes + 2));
  }

  bool wanted(int64_t what) const { return (wants & what) != 0; }

  Way judge(const Shape& shape) {
    args.d = shape.d;
    args.rows = shape.rows;
    args.padded_d = padded(shape.d);
    const bool norm = args.norm != Norm::none;
    if (shape.dim == 0 || shape.d == 0 || shape.rows == 0 || (dy == nullptr && dz == nullptr)) return Way::reference;
    args.z_type = known(z);
    if (!on_cpu(z) || !rows_like(dz, shape) || !rows_like(dy, shape) || !rows_like(residual, shape) || !rows_like(branch, shape))
      return Way::reference;
    if (dz != nullptr && known(dz) != args.z_type) return Way::reference;
    if (dy != nullptr) args.dy_type = known(dy);
    if (residual != nullptr) args.residual_type = known(residual);
    if (branch != nullptr) args.branch_type = known(branch);
    if (norm) {
      const Shape moments(stats);
      const Type twice = args.z_type == Type::f64 ? Type::f64 : Type::f32;
      if (moments.rows != shape.rows || moments.d != 2 || known(stats) != twice || !on_cpu(stats)) return Way::reference;
      if (judge_parameter(weight, shape.d, &weight_type) != Way::kernels) return Way::reference;
    } else if (wanted(kWeight | kBias)) {
      return Way::reference;
    }
    if (wanted(kWeight) && weight == nullptr) return Way::reference;
    if (add == nullptr) {
      if ((wants & ~15) != 0) return Way::reference;
    } else {
      if (add->judge(shape) != Way::kernels) return Way::reference;
      // A scale's gradient is like the scale, and is made of what the scale multiplies.
      const bool there = (!wanted(kResidualScale) || (add->residual_scale != nullptr && residual != nullptr)) &&
                         (!wanted(kRowScale) || (add->row_scale != nullptr && branch != nullptr)) &&
                         (!wanted(kLayerScale) || (add->layer_scale != nullptr && branch != nullptr)) &&
                         (!wanted(kBranchBias) || add->branch_bias != nullptr);
      if (!there || (wants & ~255) != 0) return Way::reference;
    }
    return all_known ? Way::kernels : Way::reference;
  }

  // The gradients of residual, branch, weight, bias (and of the scales), into the first `outputs` places of the stack.
  void run(Stack& stack, const Shape& shape, int outputs) {
    read(shape);
    compute(shape);
    std::vector<Output> results = collect(shape);  // all of them before the first is given away: to make one may fail
    stack.release();
    for (int i = 0; i < outputs; ++i) stack.at[i] = results[static_cast<size_t>(i)].give();
  }

 private:
  Input dy_in, dz_in, z_in, stats_in, residual_in, branch_in;
  Reals scale;
  std::optional<Output> dresidual, dbranch;
  Scratch row_sums;
  std::unique_ptr<char[]> partials;

  bool wants_branch() const { return wanted(kRowScale | kLayerScale); }
  int64_t real_bytes() const { return args.wide ? 8 : 4; }

  // What the kernels read, and the two gradients they write row by row.
  void read(const Shape& shape) {
    Backward& a = args;
    if (wanted(kResidual)) dresidual.emplace(shape.dim, shape.sizes, dresidual_type);
    if (wanted(kBranch)) dbranch.emplace(shape.dim, shape.sizes, dbranch_type);
    const auto twice = [](bool there, Type type) { return there && type == Type::f64; };
    a.wide = a.z_type == Type::f64 || twice(dy != nullptr, a.dy_type) || twice(wanted(kResidual), dresidual_type) ||
             twice(wanted(kBranch), dbranch_type) || twice(wanted(kResidualScale), a.residual_type) ||
             twice(wants_branch(), a.branch_type);
    const bool norm = a.norm != Norm::none;
    dy_in.read(dy);
    dz_in.read(dz);
    z_in.read(z);
    stats_in.read(norm ? stats : nullptr);
    residual_in.read(wanted(kResidualScale) ? residual : nullptr);
    branch_in.read(wants_branch() ? branch : nullptr);
    a.dy = dy_in.data;
    a.dz = dz_in.data;
    a.z = z_in.data;
    a.stats = stats_in.data;
    a.residual = residual_in.data;
    a.branch = branch_in.data;
    if (norm) a.weight = weight != nullptr ? scale.read(weight, weight_type, shape.d, a.wide, weight_offset) : scale.ones(shape.d, a.wide);
    if (add != nullptr) a.add = add->options(shape, a.wide);
    a.dresidual_type = dresidual_type;
    a.dbranch_type = dbranch_type;
    a.dresidual = dresidual ? dresidual->data : nullptr;
    a.dbranch = dbranch ? dbranch->data : nullptr;
    if (a.add.plain && a.dresidual == nullptr) {  // one gradient, whosever it is
      a.dresidual = a.dbranch;
      a.dresidual_type = dbranch_type;
      a.dbranch = nullptr;
    }
  }

  // The rows, in blocks, and what is summed over them.
  void compute(const Shape& shape) {
    Backward& a = args;
    const int64_t wants_sum[kSums] = {kWeight, kBias, kResidualScale, kLayerScale, kBranchBias};
    a.sums = 0;
    for (int s = 0; s < kSums; ++s) a.place[s] = wanted(wants_sum[s]) ? static_cast<int>(a.sums++) : -1;
    a.drow_scale = wanted(kRowScale) ? row_sums.ask(shape.rows * real_bytes()) : nullptr;
    a.block_rows = block_rows(shape.rows);
    a.far = is_far(shape, a.z_type);
    const int64_t blocks = (shape.rows + a.block_rows - 1) / a.block_rows, width = a.sums * a.padded_d;
    if (width > 0) partials.reset(new char[static_cast<size_t>(blocks * width * real_bytes())]);
    a.partials = partials.get();
    const Loops& loops = kernels().loops(a.wide);
    const int64_t rows_each = shape.rows < a.block_rows ? shape.rows : a.block_rows;
    parallel(blocks, rows_each * shape.d, [&](int64_t begin, int64_t end) {
      Scratch scratch(scratch_bytes(a));
      loops.backward(a, begin, end, scratch.data());
    });
    if (width > 0 && blocks > 1)
      parallel(width / kPad, blocks * kPad,
               [&](int64_t begin, int64_t end) { loops.reduce(a.partials, blocks, width, begin * kPad, end * kPad); });
  }

  // In the order of WANTS; what is not wanted has no elements.
  std::vector<Output> collect(const Shape& shape) {
    std::vector<Output> results;
    results.reserve(8);
    results.push_back(dresidual ? std::move(*dresidual) : Output());
    results.push_back(dbranch ? std::move(*dbranch) : Output());
    results.push_back(parameter(kWeight, kWeightSum, weight_type, shape));
    results.push_back(parameter(kBias, kBiasSum, bias_type, shape));
    if (add == nullptr) return results;
    results.push_back(factor(kResidualScale, kResidualScaleSum, add->residual_scale, add->residual_scale_type, shape));
    if (wanted(kRowScale)) {
      Output out(shape.dim - 1, shape.sizes, add->row_scale_type);
      kernels().loops(args.wide).narrow(args.drow_scale, out.data, add->row_scale_type, shape.rows);
      results.push_back(std::move(out));
    } else {
      results.emplace_back();
    }
    results.push_back(factor(kLayerScale, kLayerScaleSum, add->layer_scale, add->layer_scale_type, shape));
    results.push_back(parameter(kBranchBias, kBranchBiasSum, add->branch_bias_type, shape));
    return results;
  }

  char* sum_of(Sum what) const { return partials.get() + args.place[what] * args.padded_d * real_bytes(); }

  // A sum over the rows, in the dtype of its parameter.
  Output parameter(int64_t what, Sum sum, Type type, const Shape& shape) const {
    if (!wanted(what)) return Output();
    Output out(1, &shape.d, type);
    kernels().loops(args.wide).narrow(sum_of(sum), out.data, type, shape.d);
    return out;
  }

  // The same where the parameter may be a 0-d tensor: then over the features as well.
  Output factor(int64_t what, Sum sum, AtenTensorHandle t, Type type, const Shape& shape) const {
    if (!wanted(what) || Shape(t).dim > 0) return parameter(what, sum, type, shape);
    Output out(0, nullptr, type);
    if (args.wide) fold(reinterpret_cast<double*>(sum_of(sum)), shape.d);
    else fold(reinterpret_cast<float*>(sum_of(sum)), shape.d);
    kernels().loops(args.wide).narrow(sum_of(sum), out.data, type, 1);
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

  // The sum of n values, by halves, into the first.
  template <class T>
  static void fold(T* values, int64_t n) {
    for (; n > 1; n = (n + 1) / 2)
      for (int64_t i = (n + 1) / 2; i < n; ++i) values[i - (n + 1) / 2] += values[i];
  }
};

// add_norm_train_backward(dy, dz?, z, stats, weight?, rms, dresidual_dtype, branch_dtype, bias_dtype, wants) -> gradients of
// (residual, branch, weight, bias)
void add_norm_train_backward(StableIValue* at, uint64_t, uint64_t) {
  Stack stack{at, "TtTTtnnnnn"};
  BackwardCall call(stack, stack.flag(5) ? 1 : 0, 6);
  const Shape shape(call.z);
  const Way way = call.judge(shape);
  if (way != Way::kernels) return finish(stack, "addnorm::add_norm_train_backward_reference", way);
  call.run(stack, shape, 4);
}

// add_norm_backward(dy?, dz?, z, stats, weight?, norm, dresidual_dtype, branch_dtype, bias_dtype, wants, weight_offset, residual?,
// branch?, <the add's options>) -> gradients of (residual, branch, weight, bias, residual_scale, row_scale, layer_scale,
// branch_bias)
void add_norm_backward(StableIValue* at, uint64_t, uint64_t) {
  Stack stack{at, "ttTTtnnnnnnttntntttntn"};
  BackwardCall call(stack, stack.integer(5), 6);
  AddInputs add(stack, 13);
  call.weight_offset = stack.real(10);
  call.residual = stack.tensor(11);
  call.branch = stack.tensor(12);
  call.add = &add;
  const Shape shape(call.z);
  const Way way = call.judge(shape);
  if (way != Way::kernels) return finish(stack, "addnorm::add_norm_backward_reference", way);
  call.run(stack, shape, 8);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(addnorm, CPU, m) {
  m.impl("add_norm_train_backward", add_norm_train_backward);
  m.impl("add_norm_backward", add_norm_backward);
}

}  // namespace addnorm
