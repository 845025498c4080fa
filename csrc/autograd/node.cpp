// The autograd node of `add_norm_forward` in C++: the same as `AddNormFunction` in src/addnorm/ops/autograd.py, which serves where
// this library is not built, at a fraction of the time of a call. And calls without options from Python to the kernels, with this
// node where a gradient is required, without the dispatcher: half of the time of a call on one token.
//
// Unlike the kernels it uses torch's own C++ interface, which has no stable ABI: setup.py builds it beside them with the versions of
// torch and Python in its name, and ops/autograd.py loads it into no others. It implements `add_norm_node`, whose arguments are those
// of `add_norm_forward` but `outputs`. Without Python's headers the direct calls are left out.
#if __has_include(<Python.h>)
#include <torch/csrc/autograd/python_variable.h>  // first, as Python.h must be
#define ADDNORM_DIRECT
#endif

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
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

// Functions of the library of the kernels, which `connect` sets.
bool (*forward_kernel)(const AtenTensorHandle* tensors, double eps, int64_t norm, int64_t outputs, AtenTensorHandle* results) = nullptr;
bool (*out_kernel)(const AtenTensorHandle* tensors, double eps, int64_t norm) = nullptr;
bool (*backward_kernel)(const AtenTensorHandle* tensors, int64_t norm, const int32_t* dtypes, int64_t grad_mask, double weight_offset,
                        AtenTensorHandle* results) = nullptr;

// Whether the dispatcher would run the CPU kernels at once, or the autograd node around them: no mode, transform, autocast, trace or
// subclass takes part, and no tensor has a tangent.
bool is_direct(const Tensor* const* tensors, size_t count) {
  using c10::DispatchKey;
  if (at::impl::torch_function_mode_enabled() || torch::autograd::ForwardADLevel::try_get_by_idx(0)) return false;
  c10::DispatchKeySet keys;
  for (size_t i = 0; i < count; ++i) {
    if (tensors[i] == nullptr || !tensors[i]->defined()) continue;
    if (!tensors[i]->is_cpu()) return false;
    keys = keys | tensors[i]->key_set();
  }
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet usual({DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::ADInplaceOrView, DispatchKey::BackendSelect});
  const auto others = ((keys | local.included_) - local.excluded_) - usual;
  return others.raw_repr() >> c10::num_backends == 0;
}

AtenTensorHandle handle_of(const Tensor& t) {
  return t.defined() ? torch::aot_inductor::tensor_pointer_to_tensor_handle(const_cast<Tensor*>(&t)) : nullptr;
}

Tensor take(AtenTensorHandle handle) {
  if (handle == nullptr) return Tensor();
  Tensor* at = torch::aot_inductor::tensor_handle_to_tensor_pointer(handle);
  Tensor t = std::move(*at);
  delete at;
  return t;
}

IValue optional(const Tensor& t) { return t.defined() ? IValue(t) : IValue(); }

// A call of the forward, as its backward needs it.
struct Call {
  std::vector<IValue> arguments;  // of residual, branch and bias the dtypes; None for all other tensors
  int64_t mask = 0;               // the requested gradients
  int64_t present = 0;            // the tensors of kInputs, which have the node's edges; as of a Python node, others have none
  bool shared = false;            // whether the gradients of residual and branch are equal
  bool plain = false;             // whether the add has no options
};

// Whether the options leave the gradients of residual and branch equal to that of z.
bool is_plain_add(const std::vector<IValue>& a) {
  return a[Forward::kResidualFactor].toDouble() == 1.0 && a[Forward::kBranchFactor].toDouble() == 1.0 && a[Forward::kDropoutP].toDouble() == 0.0 &&
         a[Forward::kResidualScale].isNone() && a[Forward::kRowScale].isNone() && a[Forward::kLayerScale].isNone();
}

// Compute the gradients of a call without options by the kernels, without the dispatcher. Return whether these support the call.
bool backward_directly(const Call& call, int64_t mask, const Tensor& dy, const Tensor& dz, const variable_list& saved, variable_list& results) {
  const Tensor* const tensors[] = {&dy, &dz, &saved[kStream], &saved[kStats], &saved[kWeight]};
  if (backward_kernel == nullptr || !is_direct(tensors, std::size(tensors))) return false;
  AtenTensorHandle handles[std::size(tensors)], computed[4];
  for (size_t i = 0; i < std::size(tensors); ++i) handles[i] = handle_of(*tensors[i]);
  const auto& a = call.arguments;
  const auto dtype = [&a](int place) { return static_cast<int32_t>(a[place].toInt()); };
  const int32_t dtypes[] = {dtype(Forward::kResidual), dtype(a[Forward::kBranch].isNone() ? Forward::kResidual : Forward::kBranch),
                            dtype(Forward::kBias)};
  RECORD_FUNCTION("addnorm::add_norm_backward", c10::ArrayRef<const IValue>());
  if (!backward_kernel(handles, a[Forward::kNorm].toInt(), dtypes, mask, a[Forward::kWeightOffset].toDouble(), computed)) return false;
  for (size_t i = 0; i < std::size(computed); ++i) results[i] = take(computed[i]);
  return true;
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
    const bool differentiable = at::GradMode::is_enabled();  // create_graph
    if (call.plain && !differentiable && backward_directly(call, mask, dy, dz, saved, results)) {
      if (both) results[1] = results[0];
      return results;
    }
    torch::jit::Stack stack;
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
    args.collect(call.plain);
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

// Record a call in the graph, from its results: y and z become outputs of a new node. y is a placeholder without a norm, z without a
// branch. `a` has the arguments of the node.
void record(std::vector<IValue>&& a, const Tensor& y, const Tensor& z, const Tensor& stats) {
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
  torch::autograd::set_history(y, grad_fn);
  const bool differentiable_z = mask & ~kParameterGrads, has_branch = a[Forward::kBranch].isTensor();  // else no summand requires a gradient
  if (differentiable_z) torch::autograd::set_history(z, grad_fn);

  if (!(mask & (kFromBranch | kBranchBiasGrad))) a[Forward::kBranchBias] = IValue();  // no gradient depends on it
  const bool has_branch_bias = a[Forward::kBranchBias].isTensor();
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
  grad_fn->call = {std::move(a), mask, present, shared, plain && !has_branch_bias};
}

// add_norm_node(residual, branch?, ..., every option) -> (y, z)
void node(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = find("addnorm::add_norm_forward", "kernel");
  std::vector<IValue> a = torch::jit::pop(*stack, size_t{kArguments});
  torch::jit::Stack call(a);
  call.emplace_back(int64_t{3});
  {
    const at::AutoDispatchBelowAutograd guard;
    op.callBoxed(call);
  }
  Tensor y = call[0].toTensor(), z = call[1].toTensor();
  record(std::move(a), y, z, call[2].toTensor());
  stack->emplace_back(std::move(y));
  stack->emplace_back(std::move(z));
}

#ifdef ADDNORM_DIRECT

PyObject* keeps_outputs = nullptr;  // the context variable of `save_outputs`, which `connect` sets

bool is_true(PyObject* context_variable) {
  PyObject* value = nullptr;
  if (PyContextVar_Get(context_variable, nullptr, &value) < 0) throw python_error();
  const bool result = value == Py_True;
  Py_XDECREF(value);
  return result;
}

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

// The arguments of the node of a call without options.
std::vector<IValue> node_arguments(const Tensor* const* tensors, double eps, int64_t norm) {
  static const std::vector<IValue> defaults = [] {
    const auto& schema = find("addnorm::add_norm_forward", "kernel").schema().arguments();
    std::vector<IValue> values(kArguments);
    for (int i = Forward::kResidualFactor; i < kArguments; ++i) values[i] = schema[i].default_value().value();
    return values;
  }();
  std::vector<IValue> a = defaults;
  for (int i = Forward::kResidual; i <= Forward::kBias; ++i)
    if (tensors[i] != nullptr) a[i] = *tensors[i];
  a[Forward::kEps] = eps;
  a[Forward::kNorm] = norm;
  return a;
}

// Read the tensors of a direct call: exact torch.Tensor, or None after the first. False where the dispatcher must take the call.
bool read(PyObject* const* args, size_t count, const Tensor** tensors, AtenTensorHandle* handles, bool* requires_grad) {
  for (size_t i = 0; i < count; ++i) {
    if (args[i] == Py_None && i != Forward::kResidual) continue;
    if (!THPVariable_CheckExact(args[i])) return false;
    tensors[i] = &THPVariable_Unpack(args[i]);
    handles[i] = handle_of(*tensors[i]);
    *requires_grad = *requires_grad || tensors[i]->requires_grad();
  }
  return is_direct(tensors, count);
}

// add_norm(residual, branch, weight, bias, eps, norm, return_residual) -> y, (y, z), or None where the dispatcher must take the call.
PyObject* add_norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  constexpr int kTensors = Forward::kBias + 1;
  if (count != kTensors + 3 || forward_kernel == nullptr || !PyFloat_CheckExact(args[Forward::kEps])) Py_RETURN_NONE;
  const Tensor* tensors[kTensors] = {};
  AtenTensorHandle handles[kTensors] = {};
  bool differentiable = false;
  if (!read(args, kTensors, tensors, handles, &differentiable)) Py_RETURN_NONE;
  differentiable = differentiable && at::GradMode::is_enabled();
  if (differentiable && is_true(keeps_outputs)) Py_RETURN_NONE;
  const double eps = PyFloat_AS_DOUBLE(args[Forward::kEps]);
  const int64_t norm = PyLong_AsLongLong(args[kTensors + 1]);
  const int return_residual = PyObject_IsTrue(args[kTensors + 2]);
  if (return_residual < 0) throw python_error();
  Tensor y, z;
  {
    const WithoutGil released;
    const int64_t outputs = differentiable ? 3 : return_residual ? 2 : 1;
    RECORD_FUNCTION(differentiable ? "addnorm::add_norm_forward" : return_residual ? "addnorm::add_norm_stream" : "addnorm::add_norm",
                    c10::ArrayRef<const IValue>());
    AtenTensorHandle results[3];
    bool supported = false;
    {
      const at::AutoDispatchBelowAutograd guard;
      supported = forward_kernel(handles, eps, norm, outputs, results);
    }
    if (supported) {
      y = take(results[0]);
      if (outputs > 1) z = take(results[1]);
      if (differentiable) record(node_arguments(tensors, eps, norm), y, z, take(results[2]));
    }
  }
  if (!y.defined()) Py_RETURN_NONE;
  if (!return_residual) return THPVariable_Wrap(std::move(y));
  PyObject* pair = PyTuple_New(2);
  if (pair == nullptr) throw python_error();
  PyTuple_SET_ITEM(pair, 0, THPVariable_Wrap(std::move(y)));
  PyTuple_SET_ITEM(pair, 1, THPVariable_Wrap(std::move(z)));
  return pair;
  END_HANDLE_TH_ERRORS
}

// add_norm_out(residual, branch, weight, bias, y, z, eps, norm) -> True, or None where the dispatcher must take the call.
PyObject* add_norm_out(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  constexpr int kY = Forward::kBias + 1, kTensors = kY + 2;
  if (count != kTensors + 2 || out_kernel == nullptr || !PyFloat_CheckExact(args[kTensors])) Py_RETURN_NONE;
  const Tensor* tensors[kTensors] = {};
  AtenTensorHandle handles[kTensors] = {};
  bool differentiable = false;
  if (!read(args, kTensors, tensors, handles, &differentiable) || (differentiable && at::GradMode::is_enabled())) Py_RETURN_NONE;
  const double eps = PyFloat_AS_DOUBLE(args[kTensors]);
  const int64_t norm = PyLong_AsLongLong(args[kTensors + 1]);
  bool supported = false;
  {
    const WithoutGil released;
    RECORD_FUNCTION("addnorm::add_norm_out", c10::ArrayRef<const IValue>());
    const at::AutoDispatchBelowAutograd below;
    supported = out_kernel(handles, eps, norm);
  }
  if (!supported) Py_RETURN_NONE;
  for (int i = kY; i < kTensors; ++i)
    if (tensors[i] != nullptr && !tensors[i]->is_inference()) tensors[i]->unsafeGetTensorImpl()->bump_version();
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// connect(addresses of addnorm_forward, addnorm_forward_out and addnorm_backward, context variable of save_outputs)
PyObject* connect(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 4, "connect needs three addresses and a context variable");
  forward_kernel = reinterpret_cast<decltype(forward_kernel)>(PyLong_AsVoidPtr(args[0]));
  out_kernel = reinterpret_cast<decltype(out_kernel)>(PyLong_AsVoidPtr(args[1]));
  backward_kernel = reinterpret_cast<decltype(backward_kernel)>(PyLong_AsVoidPtr(args[2]));
  keeps_outputs = Py_NewRef(args[3]);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

#endif

}  // namespace
}  // namespace addnorm

TORCH_LIBRARY_IMPL(addnorm, CompositeImplicitAutograd, m) {
  m.impl("add_norm_node", torch::CppFunction::makeFromBoxedFunction<&addnorm::node>());
}

#ifdef ADDNORM_DIRECT
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__autograd() {
  using Call = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
  static const auto method = [](const char* name, Call call) {
    return PyMethodDef{name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, nullptr};
  };
  static PyMethodDef methods[] = {method("add_norm", addnorm::add_norm), method("add_norm_out", addnorm::add_norm_out), method("connect", addnorm::connect), {}};
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_autograd", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  PyObject* module = PyModule_Create(&definition);
#ifdef Py_GIL_DISABLED
  if (module != nullptr) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
  return module;
}
#endif
