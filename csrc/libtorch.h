// The functions of libtorch that the library calls: those of its stable C interface, which every torch from 2.10 on exports.
//
// They are declared here and not included from torch's headers, so that a compiler is all that a build needs: `pip install .` would
// otherwise download a whole torch into its own environment. tests/house/test_abi.py compares them with the headers of the
// installed torch.
#pragma once

#include <cstddef>
#include <cstdint>

class AtenTensorOpaque;
class TorchLibraryOpaque;
struct StableListOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
using TorchLibraryHandle = TorchLibraryOpaque*;
using StableListHandle = StableListOpaque*;
using StableIValue = uint64_t;  // an argument or result of an operator
using AOTITorchError = int32_t;

extern "C" {
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_memory_format_contiguous_format();
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* ret_device_type);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* ret_dim);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* ret_dtype);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** ret_sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** ret_strides);
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* ret_is_contiguous);
AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes_ptr, const int64_t* strides_ptr, int32_t dtype, int32_t device_type,
                                        int32_t device_index, AtenTensorHandle* ret_new_tensor);
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle orig_handle, AtenTensorHandle* new_handle);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_library_init_fragment(const char* ns, const char* file, uint32_t line, TorchLibraryHandle* ret_new_torch_lib);
AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* k, const char* file, uint32_t line, TorchLibraryHandle* ret_new_torch_lib);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle self, const char* schema);
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle tlh);
AOTITorchError torch_call_dispatcher(const char* opName, const char* overloadName, StableIValue* stack, uint64_t extension_build_version);
AOTITorchError torch_library_impl(TorchLibraryHandle self, const char* name, void (*fn)(StableIValue*, uint64_t, uint64_t),
                                  uint64_t extension_build_version);
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** ret_data_ptr);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** ret_data_ptr);
AOTITorchError torch_new_list_reserve_size(size_t size, StableListHandle* ret);
AOTITorchError torch_list_size(StableListHandle list_handle, size_t* size);
AOTITorchError torch_list_get_item(StableListHandle list_handle, size_t index, StableIValue* element);
AOTITorchError torch_list_push_back(StableListHandle list_handle, StableIValue element);
AOTITorchError torch_delete_list(StableListHandle list_handle);
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size, void (*func)(int64_t begin, int64_t end, void* ctx), void* ctx);

// Functions that newer versions export too. Weak: the address is null with a libtorch that has none.
__attribute__((weak)) const char* torch_exception_get_what_without_backtrace();  // from 2.13 on
__attribute__((weak)) int32_t torch_tag_pt2_compliant_tag();                     // from 2.12 on
__attribute__((weak)) AOTITorchError torch_library_def_with_tags(TorchLibraryHandle self, const char* schema, const int32_t* tags,
                                                                 int32_t num_tags);  // from 2.12 on
}

namespace addnorm {

// The torch whose conventions the library follows, one byte for each component: 2.10, the oldest that pyproject.toml admits.
constexpr uint64_t kTorchVersion = 0x020a000000000000;

// The operators' namespace in torch's table. A kernel of the hub has another (hub/build.py).
#ifndef ADDNORM_NAMESPACE
#define ADDNORM_NAMESPACE "addnorm"
#endif

}  // namespace addnorm
