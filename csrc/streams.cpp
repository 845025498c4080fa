// The operators of the boundary of n streams: add_norm_streams and add_norm_streams_backward.
#include <thread>

#include "parts.h"
#include "routing.h"

namespace addnorm {
namespace {

using Args = AddNormStreamsArgs;
using BackArgs = AddNormStreamsBackwardArgs;
static_assert(static_cast<int>(Args::kOutDtype) == static_cast<int>(BackArgs::kOutDtype));

// The backward keeps two matrices for each of Sinkhorn's iterations and token; MAX_ITERATIONS in src/addnorm/ops/streams/validation.py.
constexpr int64_t kMaxIterations = 10000;

// From this number of tokens on φ is packed.
constexpr int64_t kPackedRows = 16;

// Tokens of a block: few where there are few, so that every thread has some. No result depends on it.
int64_t block_tokens(int64_t rows) {
  static const auto threads = static_cast<int64_t>(std::thread::hardware_concurrency());
  const int64_t each = threads > 0 ? (rows + threads - 1) / threads : rows;
  return each >= kStreamsBlock ? kStreamsBlock : (each + kStreamsGroup - 1) / kStreamsGroup * kStreamsGroup;
}

// Scratch memory at a multiple of 64 bytes.
class Aligned {
 public:
  explicit Aligned(int64_t bytes) : memory_(new char[static_cast<size_t>(bytes + 64)]) {}
  void* data() { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) / 64 * 64); }

 private:
  std::unique_ptr<char[]> memory_;
};

// The arguments that both operators have, in the same places.
struct StreamsCall {
  AtenTensorHandle streams, branch, mix, inject, collapse, project, scale, base, weight, bias;
  Shape shape;         // of the streams, (*, n, d)
  int64_t rows = 1, n = 0;
  Type weight_type = Type::f32, bias_type = Type::f32;
  bool all_known = true;

  explicit StreamsCall(const Stack& stack)
      : streams(stack.tensor(Args::kStreams)),
        branch(stack.tensor(Args::kBranch)),
        mix(stack.tensor(Args::kMix)),
        inject(stack.tensor(Args::kInject)),
        collapse(stack.tensor(Args::kCollapse)),
        project(stack.tensor(Args::kProject)),
        scale(stack.tensor(Args::kScale)),
        base(stack.tensor(Args::kBase)),
        weight(stack.tensor(Args::kWeight)),
        bias(stack.tensor(Args::kBias)),
        shape(streams) {
    n = shape.dim > 1 ? shape.sizes[shape.dim - 2] : 0;
    rows = shape.product(0, shape.dim - 2);
  }

  // Whether a tensor has the rows of the streams and then `tail`, or only `tail` if one for all rows is allowed.
  bool fits(AtenTensorHandle t, std::initializer_list<int64_t> tail, bool shared) const {
    const Shape own(t);
    const auto size = static_cast<int64_t>(tail.size()), leading = shape.dim - 2;
    if (!on_cpu(t) || (own.dim != leading + size && !(shared && own.dim == size))) return false;
    const int64_t first = own.dim - size;
    for (int64_t i = 0; i < first; ++i)
      if (own.sizes[i] != shape.sizes[i]) return false;
    for (int64_t i = 0; i < size; ++i)
      if (own.sizes[first + i] != tail.begin()[i]) return false;
    return true;
  }
  bool per_feature() const { return collapse != nullptr && Shape(collapse).dim == shape.dim; }

  bool supported(Streams& a, const Stack& stack) {
    a.rows = rows;
    a.n = n;
    a.d = shape.d;
    a.eps = stack.real(Args::kEps);
    a.project_eps = stack.real(Args::kProjectEps);
    a.gate_eps = static_cast<float>(stack.real(Args::kGateEps));
    a.magnitude = static_cast<float>(stack.real(Args::kMagnitude));
    const int64_t kind = stack.integer(Args::kKind), norm = stack.integer(Args::kNorm), iterations = stack.integer(Args::kIterations);
    if (shape.dim < 2 || !is_code(kind, kKinds) || !is_norm(norm)) return false;
    a.kind = static_cast<Kind>(kind);
    a.norm = static_cast<Norm>(norm);
    if (a.kind == Kind::manifold) {
      if (!is_code(iterations - 1, kMaxIterations)) return false;
      a.iterations = static_cast<int>(iterations);
    }
    if (rows == 0 || n > kMaxStreams) return false;
    const bool projects = a.kind != Kind::given;
    a.reads = collapse != nullptr || projects;
    a.per_feature = per_feature();
    const int64_t counts[] = {0, n * (n + 2), 2 * n, n, n * (n + 2)}, scales[] = {0, 3, 2, 1, 2};
    a.logits = counts[kind];
    const bool hyper = a.kind == Kind::hyper;
    bool fit = on_cpu(streams) && a.eps >= 0 && a.project_eps >= 0 && a.gate_eps >= 0;
    fit = fit && (branch == nullptr) == (inject == nullptr) && (mix == nullptr || branch != nullptr);
    fit = fit && (branch == nullptr || fits(branch, {shape.d}, false)) && (mix == nullptr || fits(mix, {n, n}, true));
    fit = fit && (inject == nullptr || fits(inject, {n}, true));
    fit = fit && (collapse == nullptr || (a.per_feature ? fits(collapse, {n, shape.d}, false) : fits(collapse, {n}, true)));
    fit = fit && projects == (project != nullptr) && projects == (scale != nullptr) && projects == (base != nullptr);
    if (fit && projects) {
      const Shape p(project);
      fit = on_cpu(project) && on_cpu(scale) && on_cpu(base) && p.dim == 2 && p.sizes[0] == (hyper ? n + 2 : a.logits) &&
            (hyper ? p.d == shape.d : p.d / n == shape.d && p.d % n == 0) && Shape(scale).dim == 1 && Shape(scale).d == scales[kind] && Shape(base).dim == 1 &&
            Shape(base).d == a.logits + (hyper ? n + 2 : 0);
    }
    if (!fit || !is_parameter(weight, shape.d, &weight_type) || !is_parameter(bias, shape.d, &bias_type)) return false;
    for (const AtenTensorHandle t : {mix, inject, collapse, project, scale, base})
      if (t != nullptr && type_of(t) != Type::f32) return false;
    a.streams_type = known(type_of(streams));
    a.branch_type = branch != nullptr ? known(type_of(branch)) : a.streams_type;
    a.new_type = known(type_of(stack.dtype(Args::kStreamsDtype, dtype_of(streams))));
    if (branch == nullptr) a.new_type = a.streams_type;
    a.read_type = known(type_of(stack.dtype(Args::kOutDtype, dtype_of(streams))));
    for (const Type type : {a.streams_type, a.branch_type, a.new_type, a.read_type})
      if (type == Type::f64) return false;
    return all_known;
  }

  // Set the pointers of the arguments.
  void load(Streams& a) {
    a.streams = own(streams);
    a.branch = own(branch);
    a.mix = static_cast<const float*>(own(mix));
    a.inject = static_cast<const float*>(own(inject));
    a.collapse = static_cast<const float*>(own(collapse));
    a.project = static_cast<const float*>(own(project));
    a.scale = static_cast<const float*>(own(scale));
    a.base = static_cast<const float*>(own(base));
    a.mix_stride = stride(mix, 2, n * n);
    a.inject_stride = stride(inject, 1, n);
    a.collapse_stride = a.per_feature ? n * a.d : stride(collapse, 1, n);
    if (a.reads && a.norm != Norm::none) {
      a.weight = static_cast<const float*>(weight != nullptr ? reals_[0].read(weight, weight_type, a.d, false) : reals_[0].ones(a.d, false));
      a.bias = static_cast<const float*>(reals_[1].read(bias, bias_type, a.d, false));
    }
    const float* const unpacked = a.project;
    if (a.kind != Kind::given && rows >= kPackedRows) {
      packed_.reset(new float[static_cast<size_t>(a.project_rows() * (a.kind == Kind::hyper ? 1 : n) * a.d)]);
      a.packed = true;
      copy_packed(a, packed_.get(), const_cast<float*>(unpacked), true);
      a.project = packed_.get();
    }
    if (a.kind == Kind::hyper) {
      sums_.resize(static_cast<size_t>(n + 2));
      for (int64_t r = 0; r < n + 2; ++r) {
        double total = 0;
        for (int64_t i = 0; i < a.d; ++i) total += static_cast<double>(unpacked[r * a.d + i]);
        sums_[static_cast<size_t>(r)] = static_cast<float>(total);
      }
      a.project_sums = sums_.data();
    }
  }

  // Copy φ, or its gradient, into the packed order or back. The rows of φ may be a power of two apart, and would fall on the same few
  // sets of the caches.
  static void copy_packed(const Streams& a, float* packed, float* rows, bool packs) {
    const int64_t chunk = streams_chunk(a.n), streams = a.kind == Kind::hyper ? 1 : a.n, count_rows = a.project_rows();
    parallel((a.d + chunk - 1) / chunk, chunk * streams * count_rows, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        const int64_t from = c * chunk, count = from + chunk < a.d ? chunk : a.d - from;
        for (int64_t j = 0; j < streams; ++j)
          for (int64_t r = 0; r < count_rows; ++r) {
            float* const inside = packed + from * count_rows * streams + (j * count_rows + r) * count;
            float* const outside = rows + (r * streams + j) * a.d + from;
            std::memcpy(packs ? inside : outside, packs ? outside : inside, static_cast<size_t>(count) * sizeof(float));
          }
      }
    });
  }

  const void* own(AtenTensorHandle t) {
    inputs_[used_].read(t);
    return inputs_[used_++].data;
  }
  Type known(std::optional<Type> type) {
    if (!type) all_known = false;
    return type.value_or(Type::f32);
  }

  // Sizes of a tensor with the rows of the streams, then `tail`.
  std::vector<int64_t> sizes(std::initializer_list<int64_t> tail) const {
    std::vector<int64_t> all(shape.sizes, shape.sizes + shape.dim - 2);
    all.insert(all.end(), tail);
    return all;
  }

 private:
  Input inputs_[20];
  int used_ = 0;
  Reals reals_[2];
  std::vector<float> sums_;
  std::unique_ptr<float[]> packed_;

  static int64_t stride(AtenTensorHandle t, int64_t own_dims, int64_t size) { return t == nullptr || Shape(t).dim == own_dims ? 0 : size; }
};

// add_norm_streams(streams, branch?, mix?, inject?, collapse?, project?, scale?, base?, weight?, bias?, numbers, dtypes)
// -> (new_streams, read, new_collapse, new_mix, new_inject, logits, stats)
void add_norm_streams(StableIValue* at, uint64_t, uint64_t) {
  Stack stack{at, Args::kSignature};
  StreamsCall call(stack);
  StreamsForward a{};
  if (!call.supported(a, stack)) return call_reference(stack, ADDNORM_NAMESPACE "::add_norm_streams_reference");
  call.load(a);
  const int64_t n = a.n;
  const bool computes = a.kind != Kind::given, writes_inject = computes && a.kind != Kind::gates;
  const bool writes_mix = a.kind == Kind::manifold || a.kind == Kind::hyper;
  std::vector<Output> results;
  results.reserve(7);
  const auto output = [&results](bool wanted, const std::vector<int64_t>& sizes, Type type) -> void* {
    if (wanted) results.push_back(make(sizes, type));
    else results.emplace_back();
    return wanted ? results.back().data : nullptr;
  };
  a.new_streams = output(a.branch != nullptr, call.sizes({n, a.d}), a.new_type);
  a.read = output(a.reads, call.sizes({a.d}), a.read_type);
  a.new_collapse = static_cast<float*>(output(computes, call.sizes({n}), Type::f32));
  a.new_mix = static_cast<float*>(output(writes_mix, call.sizes({n, n}), Type::f32));
  a.new_inject = static_cast<float*>(output(writes_inject, call.sizes({n}), Type::f32));
  a.saved_logits = static_cast<float*>(output(computes, call.sizes({a.logits}), Type::f32));
  a.saved_stats = static_cast<float*>(output(a.reads, call.sizes({a.stats()}), Type::f32));
  const int64_t tokens = block_tokens(a.rows);
  parallel((a.rows + tokens - 1) / tokens, (tokens < a.rows ? tokens : a.rows) * n * a.d, [&](int64_t begin, int64_t end) {
    Aligned scratch(streams_scratch(a));
    for (int64_t block = begin; block < end; ++block)
      kernels().float32.streams_forward(a, block * tokens, (block + 1) * tokens < a.rows ? (block + 1) * tokens : a.rows, scratch.data());
  });
  stack.release();
  for (size_t i = 0; i < results.size(); ++i) stack.at[i] = results[i].release_handle();
}

// add_norm_streams_backward(the forward's arguments, logits, stats, computed_collapse, dnew?, dread?, dcollapse?, dmix?, dinject?, grad_mask)
// -> (streams, branch, mix, inject, collapse, project, weight, bias, scale, base)
void add_norm_streams_backward(StableIValue* at, uint64_t, uint64_t) {
  Stack stack{at, BackArgs::kSignature};
  StreamsCall call(stack);
  StreamsBackward a{};
  bool supported = call.supported(a, stack);
  const AtenTensorHandle logits = stack.tensor(BackArgs::kLogits), stats = stack.tensor(BackArgs::kStats);
  const AtenTensorHandle computed = stack.tensor(BackArgs::kComputedCollapse);
  const AtenTensorHandle dnew = stack.tensor(BackArgs::kDnew), dread = stack.tensor(BackArgs::kDread);
  const AtenTensorHandle dcollapse = stack.tensor(BackArgs::kDcollapse), dmix = stack.tensor(BackArgs::kDmix);
  const AtenTensorHandle dinject = stack.tensor(BackArgs::kDinject);
  const int64_t grad_mask = stack.integer(BackArgs::kGradMask), n = call.n;
  const auto wants = [grad_mask](int64_t bit) { return (grad_mask >> bit & 1) != 0; };
  if (supported) {
    const bool computes = a.kind != Kind::given;
    const auto is_float = [](AtenTensorHandle t) { return t == nullptr || type_of(t) == Type::f32; };
    bool fit = (!computes || (call.fits(logits, {a.logits}, false) && call.fits(computed, {n}, false))) &&
               (!a.reads || call.fits(stats, {a.stats()}, false)) && (dnew == nullptr || call.fits(dnew, {n, a.d}, false)) &&
               (dread == nullptr || (a.reads && call.fits(dread, {a.d}, false))) && (dcollapse == nullptr || (computes && call.fits(dcollapse, {n}, false))) &&
               (dmix == nullptr || (computes && call.fits(dmix, {n, n}, false))) && (dinject == nullptr || (computes && call.fits(dinject, {n}, false)));
    fit = fit && is_float(logits) && is_float(stats) && is_float(computed) && is_float(dcollapse) && is_float(dmix) && is_float(dinject);
    fit = fit && (dnew == nullptr || type_of(dnew) == a.new_type) && (dread == nullptr || type_of(dread) == a.read_type);
    fit = fit && !(wants(1) && call.branch == nullptr) && !(wants(2) && call.mix == nullptr) && !(wants(3) && call.inject == nullptr) &&
          !(wants(4) && call.collapse == nullptr) && !(wants(5) && !computes) && !(wants(6) && call.weight == nullptr) &&
          !(wants(7) && call.bias == nullptr) && !(grad_mask >> 8 && !computes) && is_code(grad_mask, 1024);
    supported = fit;
  }
  if (!supported) return call_reference(stack, ADDNORM_NAMESPACE "::add_norm_streams_backward_reference");
  call.load(a);
  const auto floats = [&call](AtenTensorHandle t) { return static_cast<const float*>(call.own(t)); };
  a.saved_logits = floats(logits);
  a.saved_stats = floats(stats);
  if (a.collapse == nullptr && a.kind != Kind::given) {
    a.collapse = floats(computed);
    a.collapse_stride = n;
    a.collapse_is_computed = true;
  }
  a.dnew = call.own(dnew);
  a.dread = call.own(dread);
  a.dcollapse = floats(dcollapse);
  a.dmix = floats(dmix);
  a.dinject = floats(dinject);
  std::vector<Output> results;
  results.reserve(10);
  const auto output = [&](int64_t bit, const std::vector<int64_t>& sizes, Type type) -> void* {
    if (wants(bit)) results.push_back(make(sizes, type));
    else results.emplace_back();
    return wants(bit) ? results.back().data : nullptr;
  };
  a.dstreams = output(0, call.sizes({n, a.d}), a.streams_type);
  a.dbranch = output(1, call.sizes({a.d}), a.branch_type);
  a.dmix_rows = static_cast<float*>(output(2, call.sizes({n, n}), Type::f32));
  a.dinject_rows = static_cast<float*>(output(3, call.sizes({n}), Type::f32));
  a.dcollapse_rows = static_cast<float*>(output(4, a.per_feature ? call.sizes({n, a.d}) : call.sizes({n}), Type::f32));
  if (a.dcollapse_rows != nullptr && a.dread == nullptr)
    std::memset(a.dcollapse_rows, 0, static_cast<size_t>(a.rows * n * (a.per_feature ? a.d : 1)) * sizeof(float));
  a.part_rows = streams_part_rows(a.rows);
  const int64_t parts = (a.rows + a.part_rows - 1) / a.part_rows, padded_d = padded(a.d);
  const Shape project(call.project != nullptr ? call.project : call.streams);
  const int64_t project_count = call.project != nullptr ? project.rows * project.d : 0;
  Parts dproject, dweight, dbias;
  const bool normed = a.dread != nullptr && a.norm != Norm::none;
  std::optional<Output> direct;  // the gradient of φ, if one part computes it in its place
  if (wants(5)) direct.emplace(make({project.sizes, project.sizes + project.dim}, Type::f32));
  const bool in_place = wants(5) && parts == 1 && !a.packed;
  a.dproject = in_place ? static_cast<float*>(direct->data) : dproject.reserve(wants(5), parts, project_count, false);
  a.project_size = dproject.size();
  std::vector<double> small;  // the gradients of α and β, by parts
  const int64_t base_size = a.base_size();
  if (wants(8) || wants(9)) {
    small.resize(static_cast<size_t>(parts * (kMaxScales + base_size)));
    a.dscale = small.data();
    a.dbase = a.dscale + parts * kMaxScales;
  }
  a.padded_d = padded_d;
  a.dweight = dweight.reserve(wants(6), parts, padded_d);
  a.dbias = dbias.reserve(wants(7), parts, padded_d);
  if (!normed) a.dweight = a.dbias = nullptr;
  parallel(parts, a.part_rows * n * a.d, [&](int64_t begin, int64_t end) {
    Aligned scratch(streams_scratch(a));
    for (int64_t part = begin; part < end; ++part) kernels().float32.streams_backward(a, part, scratch.data());
  });
  dproject.reduce();
  dweight.reduce();
  dbias.reduce();
  if (wants(5) && a.packed) StreamsCall::copy_packed(a, dproject.data(), static_cast<float*>(direct->data), false);
  else if (wants(5) && !in_place) std::memcpy(direct->data, dproject.data(), static_cast<size_t>(project_count) * sizeof(float));
  results.push_back(wants(5) ? std::move(*direct) : Output());
  results.push_back(dweight.collect({a.d}, a.d, call.weight_type));
  results.push_back(dbias.collect({a.d}, a.d, call.bias_type));
  const auto collect = [&](bool wanted, const double* from, AtenTensorHandle like, int64_t stride) -> void {
    if (!wanted) {
      results.emplace_back();
      return;
    }
    const int64_t count = Shape(like).d;
    Output out = make({count}, Type::f32);
    for (int64_t i = 0; i < count; ++i) {
      double total = 0;
      for (int64_t part = 0; part < parts; ++part) total += from[part * stride + i];
      static_cast<float*>(out.data)[i] = static_cast<float>(total);
    }
    results.push_back(std::move(out));
  };
  collect(wants(8), a.dscale, call.scale, kMaxScales);
  collect(wants(9), a.dbase, call.base, base_size);
  stack.release();
  for (size_t i = 0; i < results.size(); ++i) stack.at[i] = results[i].release_handle();
}

const Library library({
    {"add_norm_streams", add_norm_streams},
    {"add_norm_streams_backward", add_norm_streams_backward},
});

}  // namespace
}  // namespace addnorm
