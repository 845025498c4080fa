// The autograd node of `add_norm_forward` in C++: the same as `AddNormFunction` in src/addnorm/ops/autograd.py, which serves where
// this library is not built, at a fraction of the time of a call.
//
// Unlike the kernels it uses torch's own C++ interface, which has no stable ABI: setup.py builds it beside them with the version of
// torch in its name, and ops/autograd.py loads it into no other. It implements `add_norm_node`, whose arguments are those of
// `add_norm_forward` but `outputs`.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "../arguments.h"

namespace addnorm {
namespace {

namespace compiled = torch::dynamo::autograd;
using at::Tensor;
using c10::IValue;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Forward = AddNormForwardArgs;

constexpr int kArguments = Forward::kOutputs;  // of the node: those of the forward but the last one
constexpr int64_t kNoNorm = 2;                 // NORMS["none"] in ops/options.py
constexpr int64_t kParameterGrads = kWeightGrad | kBiasGrad;
constexpr int64_t kFromBranch = kRowScaleGrad | kLayerScaleGrad;  // gradients that are computed from the branch
// The arguments that can have a gradient, in the order of the bits of grad_mask; the options that are tensors.
constexpr int kInputs[kGrads] = {Forward::kResidual,      Forward::kBranch,   Forward::kWeight,     Forward::kBias,
                                 Forward::kResidualScale, Forward::kRowScale, Forward::kLayerScale, Forward::kBranchBias};
constexpr int kTensorOptions[] = {Forward::kResidualScale, Forward::kRowScale, Forward::kLayerScale, Forward::kBranchBias, Forward::kSeed};
// The saved tensors; those of the options follow.
enum Saved : int { kStream, kStats, kWeight, kResidual, kBranch, kOptions };

c10::OperatorHandle find(const char* name, const char* overload) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload); }

IValue optional(const Tensor& t) { return t.defined() ? IValue(t) : IValue(); }

// A call of the forward, as its backward needs it.
struct Call {
  std::vector<IValue> arguments;  // of residual, branch and bias the dtypes; None for all other tensors
  int64_t mask = 0;               // the requested gradients
  int64_t present = 0;            // the tensors of kInputs, which have the node's edges; as of a Python node, others have none
  bool shared = false;            // whether the gradients of residual and branch are equal
};

// Whether the options leave the gradients of residual and branch equal to that of z.
bool is_plain_add(const std::vector<IValue>& a) {
  return a[Forward::kResidualFactor].toDouble() == 1.0 && a[Forward::kBranchFactor].toDouble() == 1.0 && a[Forward::kDropoutP].toDouble() == 0.0 &&
         a[Forward::kResidualScale].isNone() && a[Forward::kRowScale].isNone() && a[Forward::kLayerScale].isNone();
}

// Return the gradients of kInputs from those of y and z; undefined if not requested. `unpack` returns the saved tensors.
template <typename Unpack>
variable_list gradients(const Call& call, const variable_list& grads, const Unpack& unpack) {
  const auto& a = call.arguments;
  const bool has_branch = !a[Forward::kBranch].isNone();
  int64_t mask = call.mask;
  // A placeholder has no gradient, but a compiled graph passes zeros for it.
  const Tensor dy = a[Forward::kNorm].toInt() == kNoNorm ? Tensor() : grads[0];
  const Tensor dz = has_branch && grads.size() > 1 ? grads[1] : Tensor();
  variable_list results(kGrads);
  if (!dy.defined()) {
    if (!dz.defined()) return results;
    mask &= ~kParameterGrads;  // only z was used, not the norm's parameters
  }
  const bool both = call.shared && (mask & kResidualGrad) && (mask & kBranchGrad);  // one tensor is the gradient of both
  if (both) mask &= ~kBranchGrad;
  if (!dy.defined() && call.shared && !(mask & kBranchBiasGrad)) {  // the gradient of z, unchanged
    results[mask & kResidualGrad ? 0 : 1] = dz.to(static_cast<at::ScalarType>(a[Forward::kResidual].toInt()));
  } else {
    const variable_list saved = unpack();
    torch::jit::Stack stack;
    const bool differentiable = at::GradMode::is_enabled();  // create_graph
    if (differentiable) stack.push_back(a[Forward::kEps]);
    stack.insert(stack.end(), {optional(dy), optional(dz), saved[kStream], saved[kStats], optional(saved[kWeight]), a[Forward::kNorm],
                               a[Forward::kResidual], a[has_branch ? Forward::kBranch : Forward::kResidual], a[Forward::kBias], mask,
                               a[Forward::kWeightOffset], optional(saved[kResidual]), optional(saved[kBranch])});
    const auto begin = stack.size();
    stack.insert(stack.end(), a.begin() + Forward::kAddOptions, a.begin() + Forward::kWeightOffset);
    int next = kOptions;
    for (const int place : kTensorOptions) stack[begin + place - Forward::kAddOptions] = optional(saved[next++]);
    if (differentiable) {
      static const auto formula = find("addnorm::add_norm_backward", "formula");
      formula.callBoxed(stack);
    } else {
      static const auto op = find("addnorm::add_norm_backward", "");
      op.callBoxed(stack);
    }
    for (int bit = 0; bit < kGrads; ++bit)
      if (mask >> bit & 1) results[bit] = stack[bit].toTensor();
  }
  if (both) results[1] = results[0];
  return results;
}

// Return the gradients of the node's edges.
template <typename Unpack>
variable_list edge_gradients(const Call& call, const variable_list& grads, const Unpack& unpack) {
  variable_list results = gradients(call, grads, unpack), edges;
  for (int bit = 0; bit < kGrads; ++bit)
    if (call.present >> bit & 1) edges.push_back(std::move(results[bit]));
  return edges;
}

struct AddNormBackward : torch::autograd::Node {
  Call call;
  std::vector<SavedVariable> saved;

  std::string name() const override { return "AddNormBackward"; }

  variable_list unpack() {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list tensors;
    tensors.reserve(saved.size());
    for (const SavedVariable& t : saved) tensors.push_back(t.unpack(getptr()));
    return tensors;
  }

  variable_list apply(variable_list&& grads) override {
    return edge_gradients(call, grads, [this] { return unpack(); });
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& t : saved) t.reset_data();
  }

  // Compiled autograd: the values that a compiled backward depends on, and the backward as a function of the saved tensors.
  void compiled_args(compiled::CompiledNodeArgs& args) const override {
    args.collect(saved, true);
    for (const IValue& value : call.arguments) args.collect(value, true);
    args.collect(call.mask);
    args.collect(call.present);
    args.collect(call.shared);
  }

  variable_list apply_with_saved(const variable_list& grads, compiled::SwapSavedVariables& swapped) override {
    using Metadata = std::vector<std::optional<torch::autograd::InputMetadata>>;
    swapped.before(saved);
    const std::vector<IValue> tensors = {compiled::IValuePacker<variable_list>::pack(unpack())};
    const auto backward = [call = call](const variable_list& outer, const std::vector<IValue>& packed) {
      return edge_gradients(call, outer, [&packed] { return compiled::IValuePacker<variable_list>::unpack(packed[0]); });
    };
    const auto& python = compiled::getPyCompilerInterface();
    const auto bound = python->bind_function(swapped.get_py_compiler(), name(), backward, {tensors[0].type()}, true, true);
    const auto metadata = compiled::IValuePacker<Metadata>::pack(compiled::get_input_metadata(next_edges()));
    auto results = python->call_function(swapped.get_py_compiler(), "apply_functional", bound, grads, tensors, metadata);
    swapped.after(saved);
    return results;
  }
};

// A new node, owned as this torch owns nodes: with the count in the node from 2.13 on, beside it before.
template <typename Node>
auto make_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) return c10::make_intrusive<Node>();
  else return std::make_shared<Node>();
}

// add_norm_node(residual, branch?, ..., every option) -> (y, z). y is a placeholder without a norm, z without a branch.
void node(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = find("addnorm::add_norm_forward", "kernel");
  std::vector<IValue> a = torch::jit::pop(*stack, size_t{kArguments});
  const auto grad_fn = make_node<AddNormBackward>();
  int64_t mask = 0, present = 0;
  for (int bit = 0; bit < kGrads; ++bit) {
    const IValue& input = a[kInputs[bit]];
    if (!input.isTensor()) continue;
    const bool requires_grad = input.toTensor().requires_grad();
    grad_fn->add_next_edge(requires_grad ? torch::autograd::impl::gradient_edge(input.toTensor()) : torch::autograd::Edge());
    mask |= int64_t{requires_grad} << bit;
    present |= int64_t{1} << bit;
  }
  Tensor y, z, stats;
  {
    const at::AutoDispatchBelowAutograd guard;
    torch::jit::Stack call(a);
    call.emplace_back(int64_t{3});
    op.callBoxed(call);
    y = call[0].toTensor(), z = call[1].toTensor(), stats = call[2].toTensor();
  }
  torch::autograd::set_history(y, grad_fn);
  const bool differentiable_z = mask & ~kParameterGrads, has_branch = a[Forward::kBranch].isTensor();  // else no summand requires a gradient
  if (differentiable_z) torch::autograd::set_history(z, grad_fn);

  if (!(mask & (kFromBranch | kBranchBiasGrad))) a[Forward::kBranchBias] = IValue();  // no gradient depends on it
  const auto save = [&](int place, bool needed) {
    grad_fn->saved.emplace_back(needed && a[place].isTensor() ? a[place].toTensor() : Tensor(), false);
  };
  grad_fn->saved.reserve(kOptions + std::size(kTensorOptions));
  if (has_branch) grad_fn->saved.emplace_back(z, differentiable_z);
  else save(Forward::kResidual, true);
  grad_fn->saved.emplace_back(stats, false);
  save(Forward::kWeight, true);
  save(Forward::kResidual, mask & kResidualScaleGrad);
  save(Forward::kBranch, mask & kFromBranch);
  for (const int place : kTensorOptions) save(place, true);

  const auto dtype = [&a](int place) { return IValue(static_cast<int64_t>(a[place].toTensor().scalar_type())); };
  const bool plain = is_plain_add(a);
  a[Forward::kResidual] = dtype(Forward::kResidual);
  if (has_branch) a[Forward::kBranch] = dtype(Forward::kBranch);
  a[Forward::kBias] = a[Forward::kBias].isTensor() ? dtype(Forward::kBias) : IValue(static_cast<int64_t>(at::kFloat));
  for (IValue& value : a)
    if (value.isTensor()) value = IValue();
  const bool shared = plain && has_branch && a[Forward::kResidual].toInt() == a[Forward::kBranch].toInt();
  grad_fn->call = {std::move(a), mask, present, shared};
  stack->emplace_back(std::move(y));
  stack->emplace_back(std::move(z));
}

}  // namespace
}  // namespace addnorm

TORCH_LIBRARY_IMPL(addnorm, CompositeImplicitAutograd, m) {
  m.impl("add_norm_node", torch::CppFunction::makeFromBoxedFunction<&addnorm::node>());
}
