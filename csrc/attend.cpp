// The operators of attention over sources: attend_sources and attend_sources_backward.
#include "parts.h"
#include "routing.h"

namespace addnorm {
namespace {

using Args = AttendSourcesArgs;
using BackArgs = AttendSourcesBackwardArgs;
static_assert(static_cast<int>(Args::kWeight) == static_cast<int>(BackArgs::kWeight));

// Tensors of a list with their memory.
struct TensorList {
  std::vector<AtenTensorHandle> tensors;
  std::vector<const void*> data;
  std::unique_ptr<Type[]> types;  // a vector would export its functions

  explicit TensorList(StableListHandle list) : tensors(tensors_of(list)), types(new Type[tensors.size()]), inputs_(tensors.size()) {}
  // Whether all are on the CPU, with this shape and a dtype that the kernels read.
  bool supported(const Shape& shape) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto type = type_of(tensors[i]);
      if (!on_cpu(tensors[i]) || !(Shape(tensors[i]) == shape) || !type || *type == Type::f64) return false;
      types[i] = *type;
    }
    return true;
  }
  void load() {
    for (size_t i = 0; i < tensors.size(); ++i) {
      inputs_[i].read(tensors[i]);
      data.push_back(inputs_[i].data);
    }
  }

 private:
  std::vector<Input> inputs_;
};

// The arguments that both operators have, in the same places.
struct AttendCall {
  TensorList sources;
  AtenTensorHandle query, weight;
  std::vector<int64_t> sizes;  // of a source

  explicit AttendCall(const Stack& stack) : sources(stack.list(Args::kSources)), query(stack.tensor(Args::kQuery)), weight(stack.tensor(Args::kWeight)) {}
  bool supported(Attend& a) {
    if (sources.tensors.empty()) return false;
    const Shape shape(sources.tensors[0]), queries(query);
    sizes.assign(shape.sizes, shape.sizes + shape.dim);
    a.rows = shape.rows;
    a.d = shape.d;
    a.n = static_cast<int64_t>(sources.tensors.size());
    a.read_count = queries.rows;
    return a.rows > 0 && a.d > 0 && a.read_count > 0 && sources.supported(shape) && is_float(query, {a.read_count, a.d}) &&
           (weight == nullptr || is_float(weight, {a.d}));
  }
  void load(Attend& a) {
    sources.load();
    query_.read(query);
    weight_.read(weight);
    a.sources = sources.data.data();
    a.types = sources.types.get();
    a.type = sources.types[0];
    a.same_type = true;
    for (int64_t j = 1; j < a.n; ++j) a.same_type = a.same_type && a.types[j] == a.type;
    a.padded_d = padded(a.d);
    a.query = given_query();
    if (weight == nullptr) return;
    scaled_.assign(a.query, a.query + a.read_count * a.d);
    for (size_t i = 0; i < scaled_.size(); ++i) scaled_[i] *= given_weight()[i % static_cast<size_t>(a.d)];
    a.query = scaled_.data();
  }
  const float* given_query() const { return static_cast<const float*>(query_.data); }
  const float* given_weight() const { return static_cast<const float*>(weight_.data); }
  // The sizes of a tensor with the rows of the sources, then `tail`.
  std::vector<int64_t> with_rows(std::initializer_list<int64_t> tail) const {
    std::vector<int64_t> all(sizes.begin(), sizes.end() - 1);
    all.insert(all.end(), tail);
    return all;
  }
  static bool is_float(AtenTensorHandle t, const std::vector<int64_t>& sizes) {
    const Shape shape(t);
    return on_cpu(t) && type_of(t) == Type::f32 && std::vector<int64_t>(shape.sizes, shape.sizes + shape.dim) == sizes;
  }

 private:
  Input query_, weight_;
  std::vector<float> scaled_;  // the query times the weight
};

// Outputs as a list, which takes ownership of them.
StableIValue to_list(std::vector<Output>& outputs) {
  StableListHandle list = nullptr;
  check(torch_new_list_reserve_size(outputs.size(), &list));
  for (Output& output : outputs) check(torch_list_push_back(list, output.release_handle()));
  return reinterpret_cast<StableIValue>(list);
}

// attend_sources(sources, query, weight?, eps, normed_values) -> [*reads, scores, factors]
void attend_sources(StableIValue* at, uint64_t, uint64_t) {
  Stack stack{at, Args::kSignature};
  AttendCall call(stack);
  Attend a{};
  a.eps = stack.real(Args::kEps);
  a.normed_values = stack.integer(Args::kNormedValues) != 0;
  if (!call.supported(a) || !(a.eps >= 0)) return call_reference(stack, ADDNORM_NAMESPACE "::attend_sources_reference");
  call.load(a);
  std::vector<Output> results;
  std::vector<float*> data;
  const auto output = [&results](const std::vector<int64_t>& sizes) {
    results.push_back(make(sizes, Type::f32));
    return static_cast<float*>(results.back().data);
  };
  for (int64_t r = 0; r < a.read_count; ++r) data.push_back(output(call.sizes));
  a.reads = data.data();
  a.scores = output(call.with_rows({a.read_count, a.n}));
  a.factors = output(call.with_rows({a.n}));
  parallel(a.rows, a.n * a.d, [&](int64_t begin, int64_t end) {
    Scratch scratch(a.scratch() * static_cast<int64_t>(sizeof(float)));
    kernels().float32.attend_forward(a, begin, end, static_cast<float*>(scratch.data()));
  });
  stack.release();
  stack.at[0] = to_list(results);
}

// attend_sources_backward(sources, query, weight?, scores, factors, grads, normed_values) -> [grad_query, grad_weight if there is one, *grad_sources]
void attend_sources_backward(StableIValue* at, uint64_t, uint64_t) {
  Stack stack{at, BackArgs::kSignature};
  AttendCall call(stack);
  TensorList grads(stack.list(BackArgs::kGrads));
  const AtenTensorHandle scores = stack.tensor(BackArgs::kScores), factors = stack.tensor(BackArgs::kFactors);
  Attend a{};
  a.normed_values = stack.integer(BackArgs::kNormedValues) != 0;
  bool supported = call.supported(a) && call.is_float(scores, call.with_rows({a.read_count, a.n})) && call.is_float(factors, call.with_rows({a.n})) &&
                   static_cast<int64_t>(grads.tensors.size()) == a.read_count;
  for (const AtenTensorHandle t : grads.tensors) supported = supported && call.is_float(t, call.sizes);
  if (!supported) return call_reference(stack, ADDNORM_NAMESPACE "::attend_sources_backward_reference");
  call.load(a);
  grads.load();
  const Input score_input(scores), factor_input(factors);
  std::vector<float*> grad_data;
  for (const void* p : grads.data) grad_data.push_back(static_cast<float*>(const_cast<void*>(p)));
  a.reads = grad_data.data();
  a.scores = static_cast<float*>(const_cast<void*>(score_input.data));
  a.factors = static_cast<float*>(const_cast<void*>(factor_input.data));
  std::vector<Output> results;
  results.push_back(make({a.read_count, a.d}, Type::f32));
  if (call.weight != nullptr) results.push_back(make({a.d}, Type::f32));
  std::vector<void*> data;
  for (int64_t j = 0; j < a.n; ++j) {
    results.push_back(make(call.sizes, a.types[j]));
    data.push_back(results.back().data);
  }
  a.dsources = data.data();
  a.part_rows = streams_part_rows(a.rows);
  const int64_t parts = (a.rows + a.part_rows - 1) / a.part_rows;
  Parts dquery;
  a.dquery = dquery.reserve(true, parts, a.read_count * a.padded_d);
  parallel(parts, a.part_rows * a.n * a.d, [&](int64_t begin, int64_t end) {
    Scratch scratch(a.scratch() * static_cast<int64_t>(sizeof(float)));
    for (int64_t part = begin; part < end; ++part) kernels().float32.attend_backward(a, part, static_cast<float*>(scratch.data()));
  });
  dquery.reduce();
  float* const grad_query = static_cast<float*>(results[0].data);
  for (int64_t r = 0; r < a.read_count; ++r)
    for (int64_t i = 0; i < a.d; ++i)
      grad_query[r * a.d + i] = dquery.data()[r * a.padded_d + i] * (call.weight != nullptr ? call.given_weight()[i] : 1.0f);
  for (int64_t i = 0; call.weight != nullptr && i < a.d; ++i) {
    float total = 0;
    for (int64_t r = 0; r < a.read_count; ++r) total += dquery.data()[r * a.padded_d + i] * call.given_query()[r * a.d + i];
    static_cast<float*>(results[1].data)[i] = total;
  }
  stack.release();
  stack.at[0] = to_list(results);
}

const Library library({
    {"attend_sources", attend_sources},
    {"attend_sources_backward", attend_sources_backward},
});

}  // namespace
}  // namespace addnorm
