// Definitions of the operators, so that an exported program runs in a process without the Python package.
//
// The package loads this library first and defines only what is missing. A definition fails where the operator exists, because the
// package was imported without its kernels before; this is no error, so the C shim is called, whose codes can be ignored.
#include "arguments.h"
#include "glue.h"

// Exist from torch 2.12 on, null before.
extern "C" __attribute__((weak)) AOTITorchError torch_library_def_with_tags(TorchLibraryHandle, const char*, const int32_t*, int32_t);
extern "C" __attribute__((weak)) int32_t torch_tag_pt2_compliant_tag();

namespace addnorm {
namespace {

class Definitions {
 public:
  Definitions() {
    if (aoti_torch_library_init_fragment("addnorm", __FILE__, __LINE__, &library_) != AOTI_TORCH_SUCCESS) return;
    for (const char* schema : kSchemas) {
      if (torch_library_def_with_tags != nullptr && torch_tag_pt2_compliant_tag != nullptr) {
        const int32_t tag = torch_tag_pt2_compliant_tag();
        (void)torch_library_def_with_tags(library_, schema, &tag, 1);
      } else {
        (void)aoti_torch_library_def(library_, schema);
      }
    }
  }
  Definitions(const Definitions&) = delete;
  Definitions& operator=(const Definitions&) = delete;
  ~Definitions() {
    if (library_ != nullptr) aoti_torch_delete_library_object(library_);
  }

 private:
  TorchLibraryHandle library_ = nullptr;
};

const Definitions definitions;

}  // namespace
}  // namespace addnorm
