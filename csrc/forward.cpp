// The forward operators: add_norm, add_norm_stream (no options), add_norm_forward and add_norm_out (all of them).
#include "routing.h"

namespace addnorm {
namespace {

struct ForwardCall {
  Forward args{};
  AtenTensorHandle residual, branch, weight, bias;
  Type weight_type = Type::f32, bias_type = Type::f32;
  double weight_offset = 0.0;
  bool known_norm;

  // `tensors` are residual, branch, weight and bias.
  ForwardCall(const AtenTensorHandle* tensors, double eps, int64_t norm_code)
      : residual(tensors[AddNormArgs::kResidual]),
        branch(tensors[AddNormArgs::kBranch]),
        weight(tensors[AddNormArgs::kWeight]),
        bias(tensors[AddNormArgs::kBias]),
        known_norm(is_norm(norm_code)) {
    args.eps = eps;
    args.norm = known_norm ? static_cast<Norm>(norm_code) : Norm::none;
  }

  // The first arguments are the same in every forward operator.
  ForwardCall(const Stack& stack, int64_t norm_code) : ForwardCall(Tensors(stack).of, stack.real(AddNormArgs::kEps), norm_code) {}

  struct Tensors {
    AtenTensorHandle of[4];
    explicit Tensors(const Stack& stack)
        : of{stack.tensor(AddNormArgs::kResidual), stack.tensor(AddNormArgs::kBranch), stack.tensor(AddNormArgs::kWeight),
             stack.tensor(AddNormArgs::kBias)} {}
  };

  bool supported(const Shape& shape) {
    args.d = shape.d;
    const auto r = type_of(residual), b = branch != nullptr ? type_of(branch) : r;
    const bool fits = known_norm && shape.d > 0 && on_cpu(residual) && args.eps >= 0 && r && b &&
                      is_parameter(weight, shape.d, &weight_type) && is_parameter(bias, shape.d, &bias_type) &&
                      (branch == nullptr || (on_cpu(branch) && Shape(branch) == shape)) && (weight != nullptr || weight_offset == 0.0);
    if (!fits) return false;
    args.residual_type = args.z_type = *r;
    args.branch_type = args.y_type = *b;
    return true;
  }

  // Requires the dtypes of y and z.
  void cast(int64_t casting) {
    args.x_hat_type = casting == kT5Casting && weight != nullptr ? weight_type : args.z_type;
    const bool rounds = casting == kLlamaCasting || (casting == kT5Casting && weight != nullptr);
    args.round_x_hat = rounds && size_of(args.x_hat_type) < (use_float64() ? 8 : 4);
  }

  // Results in memory that was not read have lines that nothing has loaded.
  bool streams(const Shape& shape) const {
    const auto fits = [&](const void* p, Type type) {
      return p == nullptr || (p != args.residual && p != args.branch && can_stream(p, shape.rows, shape.d * size_of(type)));
    };
    return exceeds_last_cache(shape, args.z_type) && fits(args.y, args.y_type) && fits(args.z, args.z_type);
  }

  bool use_float64() const {
    return args.residual_type == Type::f64 || args.branch_type == Type::f64 || args.z_type == Type::f64 || args.y_type == Type::f64;
  }

  void run(const Shape& shape) {
    if (shape.rows == 0) return;  // a row may have more features than memory has bytes
    args.use_float64 = use_float64();
    args.short_sums = has_short_sums(args.z_type, args.y_type);
    const Input r(residual), b(branch);
    Reals w, beta;
    args.residual = r.data;
    args.branch = b.data;
    args.prefetch = exceeds_cache(shape, args.z_type);
    args.stream = streams(shape);
    if (args.norm != Norm::none) {
      args.weight = weight != nullptr ? w.read(weight, weight_type, shape.d, args.use_float64, weight_offset) : w.ones(shape.d, args.use_float64);
      args.bias = beta.read(bias, bias_type, shape.d, args.use_float64);
    }
    parallel(shape.rows, shape.d, [this](int64_t begin, int64_t end) {
      Scratch scratch(scratch_bytes(args));
      kernels().loops(args.use_float64).forward(args, begin, end, scratch.data());
    });
  }
};

// Compute y, z and the statistics, the first `places` of `results`; those after the first `outputs` are empty placeholders.
void compute(ForwardCall& call, const Shape& shape, int64_t places, int64_t outputs, std::optional<Output>* results) {
  const bool norm = call.args.norm != Norm::none;
  // Without a branch z is the input, and without a norm z is the only output.
  const bool with_z = call.branch != nullptr && (outputs > 1 || !norm), with_stats = norm && outputs > 2;
  auto &y = results[0], &z = results[1], &stats = results[2];
  if (norm) y.emplace(shape.dim, shape.sizes, call.args.y_type);
  else y.emplace();
  if (with_z) z.emplace(shape.dim, shape.sizes, call.args.z_type);
  else if (places > 1) z.emplace();
  if (with_stats) {
    std::vector<int64_t> sizes(shape.sizes, shape.sizes + shape.dim);
    sizes.back() = 2;
    stats.emplace(shape.dim, sizes.data(), call.args.z_type == Type::f64 ? Type::f64 : Type::f32);
  } else if (places > 2) {
    stats.emplace();
  }
  call.args.y = y->data;
  call.args.z = with_z ? z->data : nullptr;
  call.args.stats = with_stats ? stats->data : nullptr;
  call.run(shape);
}

// Return the results of `compute` in the first places of the stack.
void return_outputs(Stack& stack, ForwardCall& call, const Shape& shape, int64_t places, int64_t outputs) {
  std::optional<Output> results[3];
  compute(call, shape, places, outputs, results);
  stack.release();
  for (int64_t i = 0; i < places; ++i) stack.at[i] = results[i]->release_handle();
}

// Run an operator without options; `places` is the number of its outputs.
void run_without_options(StableIValue* at, const char* signature, const char* reference, int64_t places) {
  Stack stack{at, signature};
  ForwardCall call(stack, stack.integer(AddNormArgs::kNorm));
  const Shape shape(call.residual);
  call.args.add.is_default = true;
  if (!call.supported(shape)) return call_reference(stack, reference);
  return_outputs(stack, call, shape, places, places);
}

// add_norm(residual, branch?, weight?, bias?, eps, norm) -> y
void add_norm(StableIValue* at, uint64_t, uint64_t) {
  run_without_options(at, AddNormArgs::kSignature, ADDNORM_NAMESPACE "::add_norm_reference", 1);
}

// add_norm_stream(residual, branch, weight?, bias?, eps, norm) -> (y, z)
void add_norm_stream(StableIValue* at, uint64_t, uint64_t) {
  run_without_options(at, AddNormStreamArgs::kSignature, ADDNORM_NAMESPACE "::add_norm_stream_reference", 2);
}

// add_norm_forward(residual, branch?, ..., every option, outputs) -> (y, z, stats)
void add_norm_forward(StableIValue* at, uint64_t, uint64_t) {
  using Args = AddNormForwardArgs;
  Stack stack{at, Args::kSignature};
  ForwardCall call(stack, stack.integer(Args::kNorm));
  AddInputs add(stack, Args::kAddOptions);
  const Shape shape(call.residual);
  call.weight_offset = stack.real(Args::kWeightOffset);
  const int64_t casting = stack.integer(Args::kCasting), outputs = stack.integer(Args::kOutputs);
  bool supported = call.supported(shape) && add.supported(shape) && is_code(casting, kCastings) && is_code(outputs - 1, 3);
  if (supported) {
    const auto z = type_of(stack.dtype(Args::kResidualDtype, dtype_of(call.residual)));
    const auto y = type_of(stack.dtype(Args::kOutDtype, dtype_of(call.branch != nullptr ? call.branch : call.residual)));
    if (z && y) {
      if (call.branch != nullptr) call.args.z_type = *z;
      call.args.y_type = *y;
    } else {
      supported = false;
    }
  }
  if (!supported) return call_reference(stack, ADDNORM_NAMESPACE "::add_norm_forward_reference");
  call.cast(casting);
  if (shape.rows > 0) call.args.add = add.options(shape, call.use_float64());
  return_outputs(stack, call, shape, 3, outputs);
}

// ------------------------------------------------------------------------------------------------- existing tensors

// Addresses from the first byte of a tensor to the byte after its last, for any strides.
struct Range {
  const char *begin = nullptr, *end = nullptr;
  bool contiguous = true;

  explicit Range(AtenTensorHandle t) {
    if (t == nullptr) return;
    const Shape shape(t);
    int64_t* strides = nullptr;
    const void* data = nullptr;
    check(aoti_torch_get_strides(t, &strides));
    check(torch_get_const_data_ptr(t, &data));
    check(aoti_torch_is_contiguous(t, &contiguous));
    int64_t last = 0;
    for (int64_t i = 0; i < shape.dim; ++i) {
      if (shape.sizes[i] == 0) return;
      last += (shape.sizes[i] - 1) * strides[i];
    }
    const auto type = type_of(t);
    begin = static_cast<const char*>(data);
    end = begin + (last + 1) * (type ? size_of(*type) : 8);
  }
  bool disjoint(const Range& other) const { return end <= other.begin || other.end <= begin; }
  bool equals(const Range& other) const { return begin == other.begin && end == other.end && contiguous && other.contiguous; }
};

// Whether the kernels may write `target`: contiguous, of the right shape, and without common memory with any input, except that it may
// be exactly one of `rows` (residual and branch), whose elements are read before they are written.
bool writable(AtenTensorHandle target, const Shape& shape, const Range& range, std::initializer_list<AtenTensorHandle> rows,
              std::initializer_list<AtenTensorHandle> others) {
  if (target == nullptr) return true;
  if (!on_cpu(target) || !(Shape(target) == shape) || !range.contiguous) return false;
  for (const AtenTensorHandle t : rows) {
    const Range other(t);
    if (!range.disjoint(other) && !range.equals(other)) return false;
  }
  for (const AtenTensorHandle t : others)
    if (!range.disjoint(Range(t))) return false;
  return true;
}

// Set the dtypes of the targets y and z, if the kernels may write both. `others` are the inputs besides residual and branch.
bool set_targets(ForwardCall& call, const Shape& shape, AtenTensorHandle y, AtenTensorHandle z, std::initializer_list<AtenTensorHandle> others) {
  const auto none = std::optional<Type>(call.args.z_type);
  const auto y_type = y != nullptr ? type_of(y) : none, z_type = z != nullptr ? type_of(z) : none;
  const bool outputs_fit =
      (y != nullptr) == (call.args.norm != Norm::none) && !(z != nullptr && call.branch == nullptr) && (y != nullptr || z != nullptr);
  const Range y_range(y), z_range(z);
  const auto rows = {call.residual, call.branch};
  if (!(outputs_fit && y_type && z_type && y_range.disjoint(z_range) && writable(y, shape, y_range, rows, others) &&
        writable(z, shape, z_range, rows, others)))
    return false;
  call.args.y_type = *y_type;
  call.args.z_type = *z_type;
  return true;
}

// Compute into the targets.
void write(ForwardCall& call, const Shape& shape, AtenTensorHandle y, AtenTensorHandle z) {
  if (y != nullptr) check(torch_get_mutable_data_ptr(y, &call.args.y));
  if (z != nullptr) check(torch_get_mutable_data_ptr(z, &call.args.z));
  call.args.prefetch_rows = z == nullptr && exceeds_cache(shape, call.args.z_type);  // no gain where z is written too
  call.run(shape);
}

// add_norm_out(residual, branch?, ..., y!?, z!?, every option but the dtypes) -> ()
// The reference handles targets that the kernels may not write: strided ones, and overlapping ones, which raise.
void add_norm_out(StableIValue* at, uint64_t, uint64_t) {
  using Args = AddNormOutArgs;
  Stack stack{at, Args::kSignature};
  ForwardCall call(stack, stack.integer(Args::kNorm));
  const AtenTensorHandle y = stack.tensor(Args::kY), z = stack.tensor(Args::kZ);
  AddInputs add(stack, Args::kAddOptions);
  const Shape shape(call.residual);
  call.weight_offset = stack.real(Args::kWeightOffset);
  const int64_t casting = stack.integer(Args::kCasting);
  const bool supported =
      call.supported(shape) && add.supported(shape) && is_code(casting, kCastings) &&
      set_targets(call, shape, y, z, {call.weight, call.bias, add.residual_scale, add.row_scale, add.layer_scale, add.branch_bias, add.seed});
  if (!supported) return call_reference(stack, ADDNORM_NAMESPACE "::add_norm_out_reference");
  call.cast(casting);
  if (shape.rows > 0) call.args.add = add.options(shape, call.use_float64());
  write(call, shape, y, z);
  stack.release();
}

const Library library({
    {"add_norm", add_norm},
    {"add_norm_stream", add_norm_stream},
    {"add_norm_forward", add_norm_forward},
    // The overloads without autograd, which eager calls use (schema.py).
    {"add_norm.kernel", add_norm},
    {"add_norm_stream.kernel", add_norm_stream},
    {"add_norm_forward.kernel", add_norm_forward},
    {"add_norm_out", add_norm_out},
});

}  // namespace
}  // namespace addnorm

// A call without options and without the dispatcher, from autograd/node.cpp: y, z and the statistics, the first `outputs` of `results`.
// Returns whether the kernels support the call; without an answer the dispatcher's way computes it, or raises the error.
extern "C" __attribute__((visibility("default"))) bool addnorm_forward(const AtenTensorHandle* tensors, double eps, int64_t norm, int64_t outputs,
                                                                       AtenTensorHandle* results) {
  using namespace addnorm;
  try {
    ForwardCall call(tensors, eps, norm);
    const Shape shape(call.residual);
    call.args.add.is_default = true;
    if (!call.supported(shape)) return false;
    std::optional<Output> computed[3];
    compute(call, shape, outputs, outputs, computed);
    for (int64_t i = 0; i < outputs; ++i) results[i] = reinterpret_cast<AtenTensorHandle>(computed[i]->release_handle());
    return true;
  } catch (...) {
    return false;
  }
}

// The same into existing tensors: `tensors` are residual, branch, weight, bias, y and z.
extern "C" __attribute__((visibility("default"))) bool addnorm_forward_out(const AtenTensorHandle* tensors, double eps, int64_t norm) {
  using namespace addnorm;
  try {
    ForwardCall call(tensors, eps, norm);
    const AtenTensorHandle y = tensors[AddNormArgs::kBias + 1], z = tensors[AddNormArgs::kBias + 2];
    const Shape shape(call.residual);
    call.args.add.is_default = true;
    if (!call.supported(shape) || !set_targets(call, shape, y, z, {call.weight, call.bias})) return false;
    write(call, shape, y, z);
    return true;
  } catch (...) {
    return false;
  }
}
