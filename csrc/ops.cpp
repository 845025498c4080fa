// The glue between torch's dispatcher and the kernels: reads the boxed arguments, allocates, splits rows over torch's own
// threads. It uses only libtorch's stable C shim, so that one build runs on every torch from 2.10 on.
//
// Three ways out of every op here: the kernels, for what they were instantiated for; the reference in eager torch, for
// everything else that is valid (`<op>_reference`, the same schema); an error that says nothing but "invalid", for what is
// not, which addnorm/ops/checks.py puts into a sentence. So the good path pays a handful of comparisons.
//
// The boxed calling convention is used as it is, without TORCH_BOX, whose wrapper types are a good part of the few
// microseconds that a call on one row takes.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "kernels.h"

// What went wrong inside libtorch; there from 2.13 on, null before.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace addnorm {
namespace {

using torch::stable::Tensor;

void check(AOTITorchError code) {
  if (code == AOTI_TORCH_SUCCESS) return;
  const char* what = nullptr;
  if (torch_exception_get_what_without_backtrace != nullptr) what = torch_exception_get_what_without_backtrace();
  throw std::runtime_error(what != nullptr ? what : "addnorm: a call into libtorch failed");
}

// ---------------------------------------------------------------------------------------------------------- arguments

// A boxed stack with a signature: one letter an argument. T tensor, t optional tensor, n plain number, o optional number.
// Owns what the caller handed over; hands out borrowed tensors.
struct Stack {
  StableIValue* at;
  const char* signature;
  mutable bool owner = true;

  Stack(StableIValue* stack, const char* letters) : at(stack), signature(letters) {}
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  ~Stack() { release(); }

  AtenTensorHandle tensor(int i) const {
    if (signature[i] == 'T') return reinterpret_cast<AtenTensorHandle>(at[i]);
    const auto* boxed = reinterpret_cast<const StableIValue*>(at[i]);
    return boxed == nullptr ? nullptr : reinterpret_cast<AtenTensorHandle>(*boxed);
  }
  double real(int i) const { return torch::stable::detail::to<double>(at[i]); }
  int64_t integer(int i) const { return torch::stable::detail::to<int64_t>(at[i]); }
  bool flag(int i) const { return torch::stable::detail::to<bool>(at[i]); }
  // An optional dtype, in libtorch's own numbering, which is what aoti_torch_get_dtype answers too.
  int32_t dtype(int i, int32_t otherwise) const {
    const auto* boxed = reinterpret_cast<const StableIValue*>(at[i]);
    return boxed == nullptr ? otherwise : static_cast<int32_t>(*boxed);
  }
  int32_t dtype_at(int i) const { return static_cast<int32_t>(at[i]); }
  bool absent(int i) const { return at[i] == 0; }

  // Frees the arguments, once: before the results are put in their place, or when an exception passes.
  void release() const {
    if (!owner) return;
    owner = false;
    for (int i = 0; signature[i] != '\0'; ++i) {
      if (signature[i] == 'n' || at[i] == 0) continue;
      if (signature[i] == 'T') {
        aoti_torch_delete_tensor_object(reinterpret_cast<AtenTensorHandle>(at[i]));
        continue;
      }
      auto* boxed = reinterpret_cast<StableIValue*>(at[i]);
      if (signature[i] == 't') aoti_torch_delete_tensor_object(reinterpret_cast<AtenTensorHandle>(*boxed));
      delete boxed;
    }
  }
};

struct Shape {
  int64_t dim = 0;
  const int64_t* sizes = nullptr;
  int64_t rows = 1, d = 1;

  explicit Shape(AtenTensorHandle t) {
    int64_t* s = nullptr;
    check(aoti_torch_get_dim(t, &dim));
    check(aoti_torch_get_sizes(t, &s));
    sizes = s;
    for (int64_t i = 0; i + 1 < dim; ++i) rows *= sizes[i];
    d = dim > 0 ? sizes[dim - 1] : 0;
  }
  bool operator==(const Shape& other) const {
    if (dim != other.dim) return false;
    for (int64_t i = 0; i < dim; ++i)
      if (sizes[i] != other.sizes[i]) return false;
    return true;
  }
};

std::optional<Type> type_of(int32_t dtype) {
  static const int32_t f32 = aoti_torch_dtype_float32(), bf = aoti_torch_dtype_bfloat16();
  if (dtype == f32) return Type::f32;
  if (dtype == bf) return Type::bf16;
  return std::nullopt;
}
std::optional<Type> type_of(AtenTensorHandle t) {
  int32_t dtype = 0;
  check(aoti_torch_get_dtype(t, &dtype));
  return type_of(dtype);
}
bool on_cpu(AtenTensorHandle t) {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  int32_t device = 0;
  check(aoti_torch_get_device_type(t, &device));
  return device == cpu;
}

// Contiguous memory of an input; a copy of it where it was strided.
struct Input {
  const void* data = nullptr;
  std::optional<Tensor> copy;

  explicit Input(AtenTensorHandle t) {
    if (t == nullptr) return;
    bool contiguous = false;
    check(aoti_torch_is_contiguous(t, &contiguous));
    if (!contiguous) {
      AtenTensorHandle alias = nullptr;
      check(aoti_torch_new_tensor_handle(t, &alias));
      copy = torch::stable::contiguous(Tensor(alias));
      t = copy->get();
    }
    check(torch_get_const_data_ptr(t, &data));
  }
};

// ------------------------------------------------------------------------------------------------------------ outputs

// ADDNORM_POISON=1 fills fresh memory with NaN, so that an element nobody wrote is seen by the tests.
bool poison() {
  static const bool on = [] {
    const char* value = std::getenv("ADDNORM_POISON");
    return value != nullptr && value[0] == '1';
  }();
  return on;
}

// Above 32 MiB glibc takes every block fresh from the kernel and gives it back when it is freed, so that each output is
// faulted in page by page: at 64 MB four times what the kernels take. Huge pages are 512 times fewer. A hint only.
void ask_for_huge_pages(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr int64_t kAlwaysFresh = int64_t{32} << 20;
  if (bytes < kAlwaysFresh) return;
  constexpr uintptr_t kPage = 4096;
  const uintptr_t at = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (at + kPage - 1) / kPage * kPage, end = (at + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

struct Output {
  AtenTensorHandle handle = nullptr;
  void* data = nullptr;

  Output(int64_t dim, const int64_t* sizes, Type type) { allocate(dim, sizes, type); }
  // An output nobody wants: no elements.
  Output() {
    const int64_t none = 0;
    allocate(1, &none, Type::f32);
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  ~Output() {
    if (handle != nullptr) aoti_torch_delete_tensor_object(handle);
  }
  StableIValue give() {
    const auto value = reinterpret_cast<StableIValue>(handle);
    handle = nullptr;
    return value;
  }

 private:
  void allocate(int64_t dim, const int64_t* sizes, Type type) {
    static const int32_t f32 = aoti_torch_dtype_float32(), bf = aoti_torch_dtype_bfloat16();
    static const int32_t cpu = aoti_torch_device_type_cpu();
    int64_t small[8];
    std::vector<int64_t> large;
    int64_t* strides = small;
    if (dim > 8) {
      large.resize(static_cast<size_t>(dim));
      strides = large.data();
    }
    int64_t count = 1;
    for (int64_t i = dim - 1; i >= 0; --i) {
      strides[i] = count;
      count *= sizes[i] > 1 ? sizes[i] : 1;
    }
    // The C shim: the C++ wrappers of stable/ops.h look the operator up by name at every call.
    check(aoti_torch_empty_strided(dim, sizes, strides, type == Type::bf16 ? bf : f32, cpu, 0, &handle));
    check(torch_get_mutable_data_ptr(handle, &data));
    ask_for_huge_pages(data, count * (type == Type::bf16 ? 2 : 4));
    if (poison()) {
      int64_t n = 1;
      for (int64_t i = 0; i < dim; ++i) n *= sizes[i];
      if (n > 0) __builtin_memset(data, 0xff, static_cast<size_t>(n) * (type == Type::bf16 ? 2 : 4));
    }
  }
};

// Float scratch on the stack while it is small, else from malloc.
class Scratch {
 public:
  explicit Scratch(int64_t n) {
    if (n > kSmall) heap_.reset(new float[static_cast<size_t>(n)]);
  }
  float* data() { return heap_ ? heap_.get() : small_; }

 private:
  static constexpr int64_t kSmall = 2048;
  float small_[kSmall];
  std::unique_ptr<float[]> heap_;
};

int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

// Bytes of one tensor from which a pass over four of them comes from beyond the second-level cache.
bool is_far(const Shape& shape, Type type) {
  constexpr int64_t kFar = int64_t{2} << 20;
  return shape.rows * shape.d * (type == Type::bf16 ? 2 : 4) > kFar;
}

// Elements of work that one thread should have at least: a parallel region costs about 2 us.
constexpr int64_t kGrain = 16384;

template <class F>
void parallel(int64_t count, int64_t elements_each, const F& body) {
  const int64_t grain = elements_each >= kGrain ? 1 : kGrain / (elements_each > 0 ? elements_each : 1);
  if (count <= grain) body(int64_t{0}, count);
  else torch::stable::parallel_for(0, count, grain, body);
}

// A (d,) parameter as floats: itself, or widened into `scratch`.
const float* as_float(const Input& input, Type type, int64_t d, Scratch& scratch) {
  if (input.data == nullptr || type == Type::f32) return static_cast<const float*>(input.data);
  kernels().widen(input.data, type, scratch.data(), d);
  return scratch.data();
}

// ------------------------------------------------------------------------------------------------------------ forward

enum class Way { kernels, reference, invalid };

// A (d,) parameter on the CPU in a dtype the kernels read.
Way judge_parameter(AtenTensorHandle t, int64_t d, Type* type) {
  if (t == nullptr) return Way::kernels;
  const Shape shape(t);
  if (shape.dim != 1 || shape.d != d || !on_cpu(t)) return Way::invalid;
  const auto known = type_of(t);
  if (!known) return Way::reference;
  *type = *known;
  return Way::kernels;
}

Way worse(Way a, Way b) { return a > b ? a : b; }

void finish(const Stack& stack, const char* reference, Way way) {
  if (way == Way::reference) {
    stack.owner = false;  // the dispatcher takes the arguments over
    check(torch_call_dispatcher(reference, "", stack.at, TORCH_ABI_VERSION));
    return;
  }
  throw std::runtime_error("addnorm: invalid arguments");
}

struct ForwardCall {
  Forward args{};
  Type weight_type = Type::f32, bias_type = Type::f32;
  AtenTensorHandle residual, branch, weight, bias;

  // Arguments 0 to 4 of every forward op: residual, branch, weight, bias, eps. Dtypes in libtorch's numbering.
  ForwardCall(const Stack& stack, bool rms) {
    residual = stack.tensor(0);
    branch = stack.tensor(1);
    weight = stack.tensor(2);
    bias = stack.tensor(3);
    args.eps = stack.real(4);
    args.rms = rms;
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

  void run(const Shape& shape) {
    const Input r(residual), b(branch), w(weight), beta(bias);
    Scratch widened_weight(weight_type == Type::bf16 ? shape.d : 0), widened_bias(bias_type == Type::bf16 ? shape.d : 0);
    args.residual = r.data;
    args.far = is_far(shape, args.z_type);
    args.branch = b.data;
    args.weight = as_float(w, weight_type, shape.d, widened_weight);
    args.bias = as_float(beta, bias_type, shape.d, widened_bias);
    parallel(shape.rows, shape.d, [this](int64_t begin, int64_t end) {
      Scratch rows(args.z == nullptr && args.branch != nullptr ? kScratchRows * args.d : 0);
      kernels().forward(args, begin, end, rows.data());
    });
  }
};

// add_norm(residual, branch?, weight?, bias?, eps, rms) -> y
void add_norm(StableIValue* at, uint64_t, uint64_t) {
  const Stack stack{at, "Ttttnn"};
  ForwardCall call(stack, stack.flag(5));
  const Shape shape(call.residual);
  const Way way = call.judge(shape);
  if (way != Way::kernels || !forward_supports(call.args)) return finish(stack, "addnorm::add_norm_reference", worse(way, Way::reference));
  Output y(shape.dim, shape.sizes, call.args.y_type);
  call.args.y = y.data;
  call.run(shape);
  stack.release();
  at[0] = y.give();
}

// add_norm_stream(residual, branch, weight?, bias?, eps, rms) -> (y, z)
void add_norm_stream(StableIValue* at, uint64_t, uint64_t) {
  const Stack stack{at, "TTttnn"};
  ForwardCall call(stack, stack.flag(5));
  const Shape shape(call.residual);
  const Way way = call.judge(shape);
  if (way != Way::kernels || !forward_supports(call.args))
    return finish(stack, "addnorm::add_norm_stream_reference", worse(way, Way::reference));
  Output y(shape.dim, shape.sizes, call.args.y_type), z(shape.dim, shape.sizes, call.args.z_type);
  call.args.y = y.data;
  call.args.z = z.data;
  call.run(shape);
  stack.release();
  at[0] = y.give();
  at[1] = z.give();
}

// Whether options lo to hi of a full op are all at rest: factors 1, everything else 0 or absent.
bool at_rest(const Stack& stack, std::initializer_list<int> ones, std::initializer_list<int> zeros) {
  for (const int i : ones)
    if (stack.real(i) != 1.0) return false;
  for (const int i : zeros)
    if (!stack.absent(i)) return false;
  return true;
}

// y, z and the statistics, into the first three places of the stack.
void train(const Stack& stack, ForwardCall& call, const Shape& shape) {
  std::vector<int64_t> stats_sizes(shape.sizes, shape.sizes + shape.dim);
  stats_sizes.back() = 2;
  Output y(shape.dim, shape.sizes, call.args.y_type), stats(shape.dim, stats_sizes.data(), Type::f32);
  std::optional<Output> z;
  if (call.branch != nullptr) z.emplace(shape.dim, shape.sizes, call.args.z_type);
  else z.emplace();  // the norm alone: the stream is the input
  call.args.y = y.data;
  call.args.z = call.branch != nullptr ? z->data : nullptr;
  call.args.stats = static_cast<float*>(stats.data);
  call.run(shape);
  stack.release();
  stack.at[0] = y.give();
  stack.at[1] = z->give();
  stack.at[2] = stats.give();
}

// add_norm_train(residual, branch?, weight?, bias?, eps, rms) -> (y, z, stats)
void add_norm_train(StableIValue* at, uint64_t, uint64_t) {
  const Stack stack{at, "Ttttnn"};
  ForwardCall call(stack, stack.flag(5));
  const Shape shape(call.residual);
  const Way way = call.judge(shape);
  if (way != Way::kernels || !forward_supports(call.args))
    return finish(stack, "addnorm::add_norm_train_reference", worse(way, Way::reference));
  train(stack, call, shape);
}

// add_norm_forward(residual, branch?, weight?, bias?, eps, norm, residual_factor, residual_scale?, branch_factor, row_scale?,
// layer_scale?, branch_bias?, dropout_p, seed?, offset, weight_offset, casting, stream_dtype?, out_dtype?) -> (y, z, stats)
void add_norm_forward(StableIValue* at, uint64_t, uint64_t) {
  const Stack stack{at, "Ttttnnntntttntnnnoo"};
  const int64_t norm = stack.integer(5);
  ForwardCall call(stack, norm == 1);
  const Shape shape(call.residual);
  Way way = call.judge(shape);
  if (norm > 1 || !at_rest(stack, {6, 8}, {7, 9, 10, 11, 12, 13, 15, 16})) way = worse(way, Way::reference);
  if (way == Way::kernels) {
    int32_t residual_dtype = 0, branch_dtype = 0;
    check(aoti_torch_get_dtype(call.residual, &residual_dtype));
    check(aoti_torch_get_dtype(call.branch != nullptr ? call.branch : call.residual, &branch_dtype));
    const auto z = type_of(stack.dtype(17, residual_dtype)), y = type_of(stack.dtype(18, branch_dtype));
    if (z) call.args.z_type = *z;
    if (y) call.args.y_type = *y;
    if (!z || !y || !forward_supports(call.args)) way = Way::reference;
  }
  if (way != Way::kernels) return finish(stack, "addnorm::add_norm_forward_reference", way);

  train(stack, call, shape);
}

// ----------------------------------------------------------------------------------------------------------- backward

enum Want : int64_t { kResidual = 1, kBranch = 2, kWeight = 4, kBias = 8, kAll = 15 };

// The gradients that go out: one in the stream's dtype, and one beside it in bfloat16 where the stream is wider.
struct BackwardCall {
  Backward args{};
  AtenTensorHandle dy, dz, z, stats, weight;
  Type weight_type = Type::f32, bias_type = Type::f32, residual_type = Type::f32, branch_type = Type::f32;
  int64_t wants = 0;

  // Arguments 0 to 4 of both backward ops: dy, dz, z, stats, weight. `dtypes` is where those of residual, branch, bias begin.
  BackwardCall(const Stack& stack, bool rms, int dtypes) {
    dy = stack.tensor(0);
    dz = stack.tensor(1);
    z = stack.tensor(2);
    stats = stack.tensor(3);
    weight = stack.tensor(4);
    args.rms = rms;
    wants = stack.integer(dtypes + 3);
    residual_type = known(stack.dtype_at(dtypes));
    branch_type = known(stack.dtype_at(dtypes + 1));
    bias_type = known(stack.dtype_at(dtypes + 2));
  }

  Way judge(const Shape& shape) {
    args.d = shape.d;
    args.rows = shape.rows;
    args.padded_d = padded(shape.d);
    if (dy == nullptr || (wants & ~kAll) != 0 || shape.d == 0 || shape.rows == 0) return Way::reference;
    args.z_type = known(type_of(z));
    args.dy_type = known(type_of(dy));
    if (dz != nullptr && (known(type_of(dz)) != args.z_type || !(Shape(dz) == shape))) return Way::reference;
    const Shape moments(stats);
    if (moments.rows != shape.rows || moments.d != 2 || known(type_of(stats)) != Type::f32 || !on_cpu(stats)) return Way::reference;
    if (!on_cpu(dy) || (dz != nullptr && !on_cpu(dz))) return Way::reference;
    if (!(Shape(dy) == shape) || judge_parameter(weight, shape.d, &weight_type) != Way::kernels) return Way::reference;
    // Two gradients of one dtype are the same numbers; whoever wants both asks for one (ops/autograd.py).
    if (wants_any(kResidual) && wants_any(kBranch) && residual_type == branch_type) return Way::reference;
    // Out of a bfloat16 stream come bfloat16 gradients; out of a float one, either.
    const bool wide = (wants_any(kResidual) && residual_type == Type::f32) || (wants_any(kBranch) && branch_type == Type::f32);
    if (wide && args.z_type == Type::bf16) return Way::reference;
    return all_known && backward_supports(args) ? Way::kernels : Way::reference;
  }

  void run(const Stack& stack, const Shape& shape) {
    Backward& a = args;
    // The first output has the stream's dtype; the second, if any, is the other one's bfloat16.
    const bool residual_first = wants_any(kResidual) && residual_type == a.z_type;
    const bool branch_first = wants_any(kBranch) && branch_type == a.z_type;
    const bool residual_second = wants_any(kResidual) && !residual_first;
    const bool branch_second = wants_any(kBranch) && !branch_first;
    Output first(shape.dim, shape.sizes, a.z_type);
    std::optional<Output> second;
    if (residual_second || branch_second || !backward_supports_one(a)) second.emplace(shape.dim, shape.sizes, Type::bf16);
    a.dresidual = first.data;
    a.dbranch = second ? second->data : nullptr;

    const Input in_dy(dy), in_dz(dz), in_z(z), in_stats(stats), in_weight(weight);
    a.dy = in_dy.data;
    a.dz = in_dz.data;
    a.z = in_z.data;
    a.stats = static_cast<const float*>(in_stats.data);
    Scratch widened(shape.d);
    a.weight = as_float(in_weight, weight_type, shape.d, widened);
    if (a.weight == nullptr) {
      for (int64_t i = 0; i < shape.d; ++i) widened.data()[i] = 1.0f;
      a.weight = widened.data();
    }

    a.block_rows = block_rows(shape.rows);
    a.want_dbias = wants_any(kBias);
    a.far = is_far(shape, a.z_type);
    const int64_t blocks = (shape.rows + a.block_rows - 1) / a.block_rows;
    std::unique_ptr<float[]> partials;
    if (wants_any(kWeight | kBias)) {
      partials.reset(new float[static_cast<size_t>(blocks * 2 * a.padded_d)]);
      a.partials = partials.get();
    }
    const int64_t rows_each = shape.rows < a.block_rows ? shape.rows : a.block_rows;
    parallel(blocks, rows_each * shape.d, [&a](int64_t begin, int64_t end) {
      Scratch sums(a.partials != nullptr && a.block_rows > kChunkRows ? 2 * a.padded_d : 0);
      kernels().backward(a, begin, end, sums.data());
    });

    const int64_t none = 0;
    Output dweight(1, wants_any(kWeight) ? &shape.d : &none, wants_any(kWeight) ? weight_type : Type::f32);
    Output dbias(1, wants_any(kBias) ? &shape.d : &none, wants_any(kBias) ? bias_type : Type::f32);
    if (a.partials != nullptr) {
      if (blocks > 1)
        parallel(2 * a.padded_d / kPad, blocks * kPad, [&a, blocks](int64_t begin, int64_t end) {
          kernels().reduce(a.partials, blocks, 2 * a.padded_d, begin * kPad, end * kPad);
        });
      if (wants_any(kWeight)) kernels().narrow(a.partials, dweight.data, weight_type, shape.d);
      if (wants_any(kBias)) kernels().narrow(a.partials + a.padded_d, dbias.data, bias_type, shape.d);
    }
    stack.release();
    stack.at[0] = residual_first ? first.give() : residual_second ? second->give() : Output().give();
    stack.at[1] = branch_first ? first.give() : branch_second ? second->give() : Output().give();
    stack.at[2] = dweight.give();
    stack.at[3] = dbias.give();
  }

 private:
  bool all_known = true;

  Type known(std::optional<Type> type) {
    if (!type) all_known = false;
    return type.value_or(Type::f32);
  }
  Type known(int32_t dtype) { return known(type_of(dtype)); }
  bool wants_any(int64_t what) const { return (wants & what) != 0; }
};

// add_norm_train_backward(dy, dz?, z, stats, weight?, rms, residual_dtype, branch_dtype, bias_dtype, wants) -> gradients of
// (residual, branch, weight, bias)
void add_norm_train_backward(StableIValue* at, uint64_t, uint64_t) {
  const Stack stack{at, "TtTTtnnnnn"};
  BackwardCall call(stack, stack.flag(5), 6);
  const Shape shape(call.z);
  const Way way = call.judge(shape);
  if (way != Way::kernels) return finish(stack, "addnorm::add_norm_train_backward_reference", way);
  call.run(stack, shape);
}

// add_norm_backward(dy?, dz?, z, stats, weight?, norm, weight_offset, residual?, branch?, residual_factor, residual_scale?,
// branch_factor, row_scale?, layer_scale?, branch_bias?, dropout_p, seed?, offset, residual_dtype, branch_dtype, bias_dtype,
// wants) -> gradients of (residual, branch, weight, bias, residual_scale, row_scale, layer_scale, branch_bias)
void add_norm_backward(StableIValue* at, uint64_t, uint64_t) {
  const Stack stack{at, "ttTTtnnttntnttttnnnnnn"};
  BackwardCall call(stack, stack.integer(5) == 1, 18);
  const Shape shape(call.z);
  const bool rest = stack.integer(5) < 2 && at_rest(stack, {9, 11}, {6, 7, 8, 10, 12, 13, 14, 15, 16});
  const Way way = rest ? call.judge(shape) : Way::reference;
  if (way != Way::kernels) return finish(stack, "addnorm::add_norm_backward_reference", way);
  call.run(stack, shape);
  for (int i = 4; i < 8; ++i) at[i] = Output().give();
}

}  // namespace

// The combinations that kernels-inl.h instantiates; everything else goes to the reference.
bool forward_supports(const Forward& a) {
  if (a.branch_type == Type::f32) return a.residual_type == Type::f32 && a.z_type == Type::f32;
  return a.z_type == Type::f32 || a.residual_type == Type::bf16;
}
bool backward_supports(const Backward& a) { return a.z_type == Type::f32 || a.dy_type == Type::bf16; }
// Beside a float stream, a bfloat16 dy means a bfloat16 branch: only the kernel with two outputs was instantiated.
bool backward_supports_one(const Backward& a) { return a.z_type == a.dy_type; }

STABLE_TORCH_LIBRARY_IMPL(addnorm, CPU, m) {
  m.impl("add_norm", add_norm);
  m.impl("add_norm_stream", add_norm_stream);
  m.impl("add_norm_train", add_norm_train);
  m.impl("add_norm_train_backward", add_norm_train_backward);
  m.impl("add_norm_forward", add_norm_forward);
  m.impl("add_norm_backward", add_norm_backward);
}

}  // namespace addnorm
