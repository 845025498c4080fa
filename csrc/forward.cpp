// The forward operators: add_norm, add_norm_stream, add_norm_train (no options), add_norm_forward and add_norm_out (all of them).
#include "judge.h"

namespace addnorm {
namespace {

constexpr int64_t kLlama = 1, kT5 = 2;  // CASTINGS in ops/schema.py

struct ForwardCall {
  Forward args{};
  AtenTensorHandle residual, branch, weight, bias;
  Type weight_type = Type::f32, bias_type = Type::f32;
  double weight_offset = 0.0;

  // Arguments 0 to 4 of every forward operator: residual, branch, weight, bias, eps.
  ForwardCall(const Stack& stack, int64_t norm)
      : residual(stack.tensor(0)), branch(stack.tensor(1)), weight(stack.tensor(2)), bias(stack.tensor(3)) {
    args.eps = stack.real(4);
    args.norm = static_cast<Norm>(norm);
  }

  Way judge(const Shape& shape) {
    args.d = shape.d;
    Way way = shape.dim > 0 && on_cpu(residual) && args.eps >= 0 ? Way::kernels : Way::invalid;
    way = worse(way, judge_parameter(weight, shape.d, &weight_type));
    way = worse(way, judge_parameter(bias, shape.d, &bias_type));
    if (branch != nullptr && !(on_cpu(branch) && Shape(branch) == shape)) way = Way::invalid;
    if (way != Way::kernels) return way;
    const auto r = type_of(residual), b = branch != nullptr ? type_of(branch) : r;
    if (!r || !b || shape.d == 0 || shape.rows == 0) return Way::reference;
    args.residual_type = args.z_type = *r;
    args.branch_type = args.y_type = *b;
    return Way::kernels;
  }

  // After the dtypes of y and z are known.
  void cast(int64_t casting) {
    args.x_hat_type = casting == kT5 && weight != nullptr ? weight_type : args.z_type;
    const bool wanted = casting == kLlama || (casting == kT5 && weight != nullptr);
    args.rounds = wanted && size_of(args.x_hat_type) < (wide() ? 8 : 4);
  }

  bool wide() const {
    return args.residual_type == Type::f64 || args.branch_type == Type::f64 || args.z_type == Type::f64 || args.y_type == Type::f64;
  }

  void run(const Shape& shape) {
    args.wide = wide();
    const Input r(residual), b(branch);
    Reals w, beta;
    args.residual = r.data;
    args.branch = b.data;
    args.far = is_far(shape, args.z_type);
    if (args.norm != Norm::none) {
      args.weight = weight != nullptr ? w.read(weight, weight_type, shape.d, args.wide, weight_offset) : w.ones(shape.d, args.wide);
      args.bias = beta.read(bias, bias_type, shape.d, args.wide);
    }
    parallel(shape.rows, shape.d, [this](int64_t begin, int64_t end) {
      Scratch scratch(scratch_bytes(args));
      kernels().loops(args.wide).forward(args, begin, end, scratch.data());
    });
  }
};

// y, z and the statistics, into the first `places` of the stack; of them the first `outputs` are wanted, the others have no elements.
void give(Stack& stack, ForwardCall& call, const Shape& shape, int64_t places, int64_t outputs) {
  const bool norm = call.args.norm != Norm::none;
  // The norm alone: the stream is the input. The add alone: there is nothing but the stream.
  const bool stream = call.branch != nullptr && (outputs > 1 || !norm), moments = norm && outputs > 2;
  std::optional<Output> y, z, stats;
  if (norm) y.emplace(shape.dim, shape.sizes, call.args.y_type);
  else y.emplace();
  if (stream) z.emplace(shape.dim, shape.sizes, call.args.z_type);
  else if (places > 1) z.emplace();
  if (moments) {
    std::vector<int64_t> sizes(shape.sizes, shape.sizes + shape.dim);
    sizes.back() = 2;
    stats.emplace(shape.dim, sizes.data(), call.args.z_type == Type::f64 ? Type::f64 : Type::f32);
  } else if (places > 2) {
    stats.emplace();
  }
  call.args.y = y->data;
  call.args.z = stream ? z->data : nullptr;
  call.args.stats = moments ? stats->data : nullptr;
  call.run(shape);
  stack.release();
  stack.at[0] = y->give();
  if (places > 1) stack.at[1] = z->give();
  if (places > 2) stack.at[2] = stats->give();
}

// An operator without options: "Ttttnn" is residual, branch?, weight?, bias?, eps, rms.
void plain(StableIValue* at, const char* signature, const char* reference, int64_t places) {
  Stack stack{at, signature};
  ForwardCall call(stack, stack.flag(5) ? 1 : 0);
  const Shape shape(call.residual);
  call.args.add.plain = true;
  const Way way = call.judge(shape);
  if (way != Way::kernels) return finish(stack, reference, way);
  give(stack, call, shape, places, places);
}

// add_norm(residual, branch?, weight?, bias?, eps, rms) -> y
void add_norm(StableIValue* at, uint64_t, uint64_t) { plain(at, "Ttttnn", "addnorm::add_norm_reference", 1); }
// add_norm_stream(residual, branch, weight?, bias?, eps, rms) -> (y, z)
void add_norm_stream(StableIValue* at, uint64_t, uint64_t) { plain(at, "TTttnn", "addnorm::add_norm_stream_reference", 2); }
// add_norm_train(residual, branch?, weight?, bias?, eps, rms) -> (y, z, stats)
void add_norm_train(StableIValue* at, uint64_t, uint64_t) { plain(at, "Ttttnn", "addnorm::add_norm_train_reference", 3); }

// add_norm_forward(residual, branch?, weight?, bias?, eps, norm, <the add's options>, weight_offset, casting, residual_dtype?, out_dtype?,
// outputs) -> (y, z, stats)
void add_norm_forward(StableIValue* at, uint64_t, uint64_t) {
  Stack stack{at, "Ttttnnntntttntnnnoon"};
  ForwardCall call(stack, stack.integer(5));
  AddInputs add(stack, 6);
  const Shape shape(call.residual);
  call.weight_offset = stack.real(15);
  Way way = worse(call.judge(shape), add.judge(shape));
  if (call.weight_offset != 0.0 && call.weight == nullptr) way = Way::invalid;
  if (way == Way::kernels) {
    const auto z = type_of(stack.dtype(17, dtype_of(call.residual)));
    const auto y = type_of(stack.dtype(18, dtype_of(call.branch != nullptr ? call.branch : call.residual)));
    if (z && y) {
      if (call.branch != nullptr) call.args.z_type = *z;
      call.args.y_type = *y;
    } else {
      way = Way::reference;
    }
  }
  if (way != Way::kernels) return finish(stack, "addnorm::add_norm_forward_reference", way);
  call.cast(stack.integer(16));
  call.args.add = add.options(shape, call.wide());
  give(stack, call, shape, 3, stack.integer(19));
}

// ------------------------------------------------------------------------------------------------- into given memory

// Addresses from the first byte of a tensor to the one after its last, whatever its strides.
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
  bool apart(const Range& other) const { return end <= other.begin || other.end <= begin; }
  bool same(const Range& other) const { return begin == other.begin && end == other.end && contiguous && other.contiguous; }
};

// What may be written: contiguous rows of the right shape that lie apart from everything that is read, or are exactly the rows of
// residual or branch, whose elements are read before they are written.
bool writable(AtenTensorHandle target, const Shape& shape, const Range& range, std::initializer_list<AtenTensorHandle> rows,
              std::initializer_list<AtenTensorHandle> others) {
  if (target == nullptr) return true;
  if (!on_cpu(target) || !(Shape(target) == shape) || !range.contiguous) return false;
  for (const AtenTensorHandle t : rows) {
    const Range other(t);
    if (!range.apart(other) && !range.same(other)) return false;
  }
  for (const AtenTensorHandle t : others)
    if (!range.apart(Range(t))) return false;
  return true;
}

// add_norm_out(residual, branch?, weight?, bias?, eps, norm, y!?, z!?, <the add's options>, weight_offset, casting) -> ()
// What is not simply writable (strided, or overlapping and to be refused) goes to the reference.
void add_norm_out(StableIValue* at, uint64_t, uint64_t) {
  Stack stack{at, "Ttttnnttntntttntnnn"};
  ForwardCall call(stack, stack.integer(5));
  const AtenTensorHandle y = stack.tensor(6), z = stack.tensor(7);
  AddInputs add(stack, 8);
  const Shape shape(call.residual);
  call.weight_offset = stack.real(17);
  Way way = worse(call.judge(shape), add.judge(shape));
  if (call.weight_offset != 0.0 && call.weight == nullptr) way = Way::invalid;
  if (way == Way::kernels) {
    const auto none = std::optional<Type>(call.args.z_type);
    const auto y_type = y != nullptr ? type_of(y) : none, z_type = z != nullptr ? type_of(z) : none;
    const bool asked = (y != nullptr) == (call.args.norm != Norm::none) && !(z != nullptr && call.branch == nullptr) &&
                       (y != nullptr || z != nullptr);
    const Range y_range(y), z_range(z);
    const auto rows = {call.residual, call.branch};
    const auto others = {call.weight, call.bias, add.residual_scale, add.row_scale, add.layer_scale, add.branch_bias, add.seed};
    const bool simple = asked && y_type && z_type && y_range.apart(z_range) && writable(y, shape, y_range, rows, others) &&
                        writable(z, shape, z_range, rows, others);
    if (simple) {
      call.args.y_type = *y_type;
      call.args.z_type = *z_type;
    } else {
      way = Way::reference;
    }
  }
  if (way != Way::kernels) return finish(stack, "addnorm::add_norm_out_reference", way);
  call.cast(stack.integer(18));
  call.args.add = add.options(shape, call.wide());
  if (y != nullptr) check(torch_get_mutable_data_ptr(y, &call.args.y));
  if (z != nullptr) check(torch_get_mutable_data_ptr(z, &call.args.z));
  call.args.ahead = z == nullptr && is_far(shape, call.args.z_type);  // where z is written too it was no gain
  call.run(shape);
  stack.release();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(addnorm, CPU, m) {
  m.impl("add_norm", add_norm);
  m.impl("add_norm_stream", add_norm_stream);
  m.impl("add_norm_train", add_norm_train);
  m.impl("add_norm_forward", add_norm_forward);
  m.impl("add_norm_out", add_norm_out);
}

}  // namespace addnorm
