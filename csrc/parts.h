// Sums over tokens that are accumulated by parts, never by thread.
#pragma once

#include "glue.h"

namespace addnorm {
namespace {

inline Output make(const std::vector<int64_t>& sizes, Type type) { return Output(static_cast<int64_t>(sizes.size()), sizes.data(), type); }

// Sums by parts, `size` floats each, pairwise into the first.
class Parts {
 public:
  float* reserve(bool wanted, int64_t parts, int64_t size, bool zeros = true) {
    if (!wanted) return nullptr;
    parts_ = parts;
    size_ = padded(size);
    const auto count = static_cast<size_t>(parts_ * size_);
    memory_.reset(static_cast<float*>(zeros ? std::calloc(count, sizeof(float)) : std::malloc(count * sizeof(float))));
    if (!memory_) throw std::bad_alloc();
    return memory_.get();
  }
  void reduce() {
    if (memory_ == nullptr || parts_ < 2) return;
    parallel(size_ / kPad, parts_ * kPad, [this](int64_t begin, int64_t end) {
      kernels().float32.reduce(memory_.get(), parts_, size_, begin * kPad, end * kPad);
    });
  }
  int64_t size() const { return size_; }
  float* data() const { return memory_.get(); }
  Output collect(const std::vector<int64_t>& sizes, int64_t count, Type type) {
    if (memory_ == nullptr) return Output();
    Output out = make(sizes, type);
    kernels().float32.narrow(memory_.get(), out.data, type, count);
    return out;
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  int64_t parts_ = 0, size_ = 0;
  std::unique_ptr<float[], Free> memory_;
};

}  // namespace
}  // namespace addnorm
