// Code that the operators share: boxed arguments, tensors through libtorch's stable C shim (so one build runs on every torch from
// 2.10 on), scratch memory, and rows split over torch's threads.
//
// The boxed calling convention is used directly, without TORCH_BOX: its wrapper types take a good part of the few microseconds
// of a call on one row.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "libtorch.h"

namespace addnorm {
namespace {  // two files include this; nothing is exported

inline void check(AOTITorchError code) {
  if (code == 0) return;
  const char* what = torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : nullptr;
  if (what == nullptr) throw std::runtime_error("addnorm: a call into libtorch failed");
  // The message of a Python exception (from the reference) without its traceback.
  const char* python = std::strstr(what, "\n\nAt:\n");
  throw std::runtime_error(python != nullptr ? std::string(what, python) : std::string(what));
}

// ---------------------------------------------------------------------------------------------------------- arguments

// The tensors of a list, borrowed.
inline std::vector<AtenTensorHandle> tensors_of(StableListHandle list) {
  size_t size = 0;
  check(torch_list_size(list, &size));
  std::vector<AtenTensorHandle> tensors(size);
  for (size_t i = 0; i < size; ++i) {
    StableIValue value = 0;
    check(torch_list_get_item(list, i, &value));
    tensors[i] = reinterpret_cast<AtenTensorHandle>(value);
  }
  return tensors;
}

// A boxed stack with its signature (arguments.h). It owns the arguments and returns borrowed tensors.
struct Stack {
  StableIValue* at;
  const char* signature;
  bool owner = true;

  Stack(StableIValue* stack, const char* letters) : at(stack), signature(letters) {}
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  ~Stack() { release(); }

  AtenTensorHandle tensor(int i) const {
    if (signature[i] == 'T') return reinterpret_cast<AtenTensorHandle>(at[i]);
    const auto* boxed = reinterpret_cast<const StableIValue*>(at[i]);
    return boxed == nullptr ? nullptr : reinterpret_cast<AtenTensorHandle>(*boxed);
  }
  // Numbers lie in the first bytes of a value.
  double real(int i) const { return first_bytes<double>(i); }
  int64_t integer(int i) const { return first_bytes<int64_t>(i); }
  // An optional dtype as libtorch's number, which aoti_torch_get_dtype returns too.
  int32_t dtype(int i, int32_t otherwise) const {
    const auto* boxed = reinterpret_cast<const StableIValue*>(at[i]);
    return boxed == nullptr ? otherwise : static_cast<int32_t>(*boxed);
  }
  int32_t dtype_at(int i) const { return static_cast<int32_t>(at[i]); }

  StableListHandle list(int i) const { return reinterpret_cast<StableListHandle>(at[i]); }

  template <typename T>
  T first_bytes(int i) const {
    T value;
    std::memcpy(&value, &at[i], sizeof value);
    return value;
  }

  // Free the arguments, once: before the results replace them, or when an exception is thrown.
  void release() {
    if (!owner) return;
    owner = false;
    for (int i = 0; signature[i] != '\0'; ++i) {
      if (signature[i] == 'n' || at[i] == 0) continue;
      if (signature[i] == 'T') {
        aoti_torch_delete_tensor_object(reinterpret_cast<AtenTensorHandle>(at[i]));
        continue;
      }
      if (signature[i] == 'l') {
        for (const AtenTensorHandle t : tensors_of(list(i))) aoti_torch_delete_tensor_object(t);
        torch_delete_list(list(i));
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
    d = dim > 0 ? sizes[dim - 1] : 0;
    rows = product(0, dim - 1);
  }
  // Number of elements of some dimensions. Beside a dimension of 0 the others may be of any size: 0 then, since their product may overflow.
  int64_t product(int64_t begin, int64_t end) const {
    int64_t count = 1;
    for (int64_t i = 0; i < dim; ++i)
      if (sizes[i] == 0) return 0;
    for (int64_t i = begin; i < end; ++i) count *= sizes[i];
    return count;
  }
  bool operator==(const Shape& other) const {
    if (dim != other.dim) return false;
    for (int64_t i = 0; i < dim; ++i)
      if (sizes[i] != other.sizes[i]) return false;
    return true;
  }
};

// libtorch's numbers of the dtypes, in the order of Type.
struct Dtypes {
  int32_t of[kTypes] = {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float16(), aoti_torch_dtype_float64()};
};
inline const Dtypes& dtypes() {
  static const Dtypes all;
  return all;
}
inline std::optional<Type> type_of(int32_t dtype) {
  for (int i = 0; i < kTypes; ++i)
    if (dtypes().of[i] == dtype) return static_cast<Type>(i);
  return std::nullopt;
}
inline int32_t dtype_of(AtenTensorHandle t) {
  int32_t dtype = 0;
  check(aoti_torch_get_dtype(t, &dtype));
  return dtype;
}
inline std::optional<Type> type_of(AtenTensorHandle t) { return type_of(dtype_of(t)); }
inline bool on_cpu(AtenTensorHandle t) {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  int32_t device = 0;
  check(aoti_torch_get_device_type(t, &device));
  return device == cpu;
}

// Contiguous memory of an input; a copy if it is strided.
struct Input {
  const void* data = nullptr;
  AtenTensorHandle copy = nullptr;

  Input() = default;
  explicit Input(AtenTensorHandle t) { read(t); }
  Input(const Input&) = delete;
  Input& operator=(const Input&) = delete;
  ~Input() {
    if (copy != nullptr) aoti_torch_delete_tensor_object(copy);
  }
  void read(AtenTensorHandle t) {
    if (t == nullptr) return;
    bool contiguous = false;
    check(aoti_torch_is_contiguous(t, &contiguous));
    if (!contiguous) {
      AtenTensorHandle alias = nullptr;
      check(aoti_torch_new_tensor_handle(t, &alias));
      StableIValue stack[] = {reinterpret_cast<StableIValue>(alias), static_cast<StableIValue>(aoti_torch_memory_format_contiguous_format())};
      check(torch_call_dispatcher("aten::contiguous", "", stack, kTorchVersion));
      t = copy = reinterpret_cast<AtenTensorHandle>(stack[0]);
    }
    check(torch_get_const_data_ptr(t, &data));
  }
};

// ------------------------------------------------------------------------------------------------------------ outputs

// ADDNORM_POISON=1 fills fresh memory with NaN, so that tests detect an element that is not written.
inline bool poison() {
  static const bool on = [] {
    const char* value = std::getenv("ADDNORM_POISON");
    return value != nullptr && value[0] == '1';
  }();
  return on;
}

// Above 32 MiB glibc maps every block anew and unmaps it when it is freed, so each output is faulted in page by page: at 64 MB this
// takes four times as long as the kernels. Huge pages need 512 times fewer faults. This is only a hint.
inline void advise_huge_pages(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr int64_t kAlwaysMapped = int64_t{32} << 20;
  if (bytes < kAlwaysMapped) return;
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
  // An empty placeholder for an output that was not requested.
  Output() {
    const int64_t none = 0;
    allocate(1, &none, Type::f32);
  }
  explicit Output(std::nullptr_t) {}  // no tensor
  Output(Output&& other) noexcept : handle(other.handle), data(other.data) { other.handle = nullptr; }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  ~Output() {
    if (handle != nullptr) aoti_torch_delete_tensor_object(handle);
  }
  StableIValue release_handle() {
    const auto value = reinterpret_cast<StableIValue>(handle);
    handle = nullptr;
    return value;
  }

 private:
  void allocate(int64_t dim, const int64_t* sizes, Type type) {
    static const int32_t cpu = aoti_torch_device_type_cpu();
    int64_t small[8];
    std::vector<int64_t> large;
    int64_t* strides = small;
    if (dim > 8) {
      large.resize(static_cast<size_t>(dim));
      strides = large.data();
    }
    uint64_t count = 1;  // the strides of an empty tensor may overflow; libtorch refuses them
    bool empty = false;
    for (int64_t i = dim - 1; i >= 0; --i) {
      strides[i] = static_cast<int64_t>(count);
      count *= static_cast<uint64_t>(sizes[i] > 1 ? sizes[i] : 1);
      empty = empty || sizes[i] == 0;
    }
    check(aoti_torch_empty_strided(dim, sizes, strides, dtypes().of[static_cast<int>(type)], cpu, 0, &handle));
    check(torch_get_mutable_data_ptr(handle, &data));
    if (empty) return;
    const int64_t bytes = static_cast<int64_t>(count) * size_of(type);
    advise_huge_pages(data, bytes);
    if (poison()) __builtin_memset(data, 0xff, static_cast<size_t>(bytes));
  }
};

// Scratch memory, on the stack if it is small, else on the heap.
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(int64_t bytes) { reserve(bytes); }
  void* reserve(int64_t bytes) {
    if (bytes > kSmall) heap_.reset(new char[static_cast<size_t>(bytes)]);
    return data();
  }
  void* data() { return heap_ ? heap_.get() : small_; }

 private:
  static constexpr int64_t kSmall = 8192;
  alignas(64) char small_[kSmall];
  std::unique_ptr<char[]> heap_;
};

inline int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

// Size of the last-level cache that one core uses; sysconf gives the sum of all of a processor.
inline int64_t last_cache_bytes() {
  int64_t kilobytes = 0;
  if (std::FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
    if (std::fscanf(file, "%" SCNd64 "K", &kilobytes) != 1) kilobytes = 0;
    std::fclose(file);
  }
  return kilobytes > 0 ? kilobytes << 10 : int64_t{32} << 20;
}

// Whether a pass over four such tensors exceeds the second-level cache.
inline bool exceeds_cache(const Shape& shape, Type type) {
  constexpr int64_t kCacheBytes = int64_t{2} << 20;
  return shape.rows * shape.d * size_of(type) > kCacheBytes;
}

// Whether three such tensors exceed the last-level cache, so that results are written past it.
inline bool exceeds_last_cache(const Shape& shape, Type type) {
  static const int64_t cache = last_cache_bytes();
  return 3 * shape.rows * shape.d * size_of(type) > cache;
}
// Whether memory has pages already, at its begin, middle and end. The system clears a new page when it is touched, and that puts it into the
// caches: writing past them is then slower, and otherwise faster.
inline bool is_resident(const void* p, int64_t bytes) {
#if defined(__linux__)
  static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (const int64_t place : {int64_t{0}, bytes / 2, bytes - 1}) {
    unsigned char state = 0;
    const uintptr_t at = (reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(place)) / page * page;
    if (mincore(reinterpret_cast<void*>(at), page, &state) != 0 || (state & 1) == 0) return false;
  }
  return true;
#else
  return false;
#endif
}
// Whether `rows` rows of `bytes` bytes at `p` can be written past the caches: whole cache lines, in memory that has its pages.
inline bool can_stream(const void* p, int64_t rows, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(bytes)) % 64 == 0 && is_resident(p, rows * bytes);
}

// Minimum number of elements for one thread: a parallel region costs about 2 us.
constexpr int64_t kGrain = 16384;

template <class F>
void parallel(int64_t count, int64_t elements_each, const F& body) {
  const int64_t grain = elements_each >= kGrain ? 1 : kGrain / (elements_each > 0 ? elements_each : 1);
  if (count <= grain) {
    body(int64_t{0}, count);
  } else {
    const auto call = [](int64_t begin, int64_t end, void* context) { (*static_cast<const F*>(context))(begin, end); };
    check(torch_parallel_for(0, count, grain, call, const_cast<void*>(static_cast<const void*>(&body))));
  }
}

// n values in the dtype of the arithmetic: the tensor's own memory if it has this dtype, else upcast (plus `offset`) in scratch.
class Reals {
 public:
  const void* read(AtenTensorHandle t, Type type, int64_t n, bool use_float64, double offset = 0.0) {
    if (t == nullptr) return nullptr;
    input_.read(t);
    if (offset == 0.0 && type == (use_float64 ? Type::f64 : Type::f32)) return input_.data;
    void* to = scratch_.reserve(n * (use_float64 ? 8 : 4));
    kernels().loops(use_float64).widen(input_.data, type, to, n, offset);
    return to;
  }
  const void* ones(int64_t n, bool use_float64) {
    void* to = scratch_.reserve(n * (use_float64 ? 8 : 4));
    for (int64_t i = 0; i < n; ++i) {
      if (use_float64) static_cast<double*>(to)[i] = 1.0;
      else static_cast<float*>(to)[i] = 1.0f;
    }
    return to;
  }

 private:
  Input input_;
  Scratch scratch_;
};

// ---------------------------------------------------------------------------------------------------------- operators

// A part of torch's table of operators that this library fills, for as long as it is loaded.
class Library {
 public:
  using Kernel = void (*)(StableIValue* stack, uint64_t, uint64_t);
  struct Entry {
    const char* name;
    Kernel kernel;
  };

  // Register the CPU kernels of operators.
  explicit Library(std::initializer_list<Entry> entries) {
    check(aoti_torch_library_init_impl(ADDNORM_NAMESPACE, "CPU", __FILE__, __LINE__, &handle_));
    for (const Entry& entry : entries) check(torch_library_impl(handle_, entry.name, entry.kernel, kTorchVersion));
  }
  // Define operators, with the tag that torch.compile asks for where torch takes tags. A definition fails where the operator exists,
  // because the package was imported without its kernels before; this is no error.
  template <size_t N>
  explicit Library(const char* const (&schemas)[N]) {
    if (aoti_torch_library_init_fragment(ADDNORM_NAMESPACE, __FILE__, __LINE__, &handle_) != 0) return;
    for (const char* schema : schemas) {
      if (torch_library_def_with_tags && torch_tag_pt2_compliant_tag) {
        const int32_t tag = torch_tag_pt2_compliant_tag();
        (void)torch_library_def_with_tags(handle_, schema, &tag, 1);
      } else {
        (void)aoti_torch_library_def(handle_, schema);
      }
    }
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  ~Library() {
    if (handle_ != nullptr) aoti_torch_delete_library_object(handle_);
  }

 private:
  TorchLibraryHandle handle_ = nullptr;
};

}  // namespace
}  // namespace addnorm
