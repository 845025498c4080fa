// The kernels as the glue sees them: raw pointers, no torch types. One table of functions per instruction set;
// dispatch.cpp picks the table once.
#pragma once

#include <cstdint>

namespace addnorm {

struct bf16 {
  uint16_t bits;
};

enum class Type : int { f32, bf16 };

// Every pointer below is to contiguous memory, rows of d elements, with no alignment promised. Parameters have been
// widened to float by the caller; a null pointer means "not there".

struct Forward {
  const void* residual;
  const void* branch;   // null: the norm alone, z is the residual itself
  const float* weight;
  const float* bias;
  void* y;
  void* z;              // null: the stream is not stored
  float* stats;         // null, or (rows, 2): mean and rstd of each row
  int64_t d;
  double eps;
  bool rms;
  bool far;             // the tensors do not fit the caches: fetch ahead
  Type residual_type, branch_type, z_type, y_type;
};

struct Backward {
  const void* dy;
  const void* dz;       // null: nobody used the stream
  const void* z;
  const float* stats;   // (rows, 2)
  const float* weight;
  void* dresidual;      // in z's dtype, always
  void* dbranch;        // in bfloat16 beside a float dresidual; null: dresidual serves both
  float* partials;      // (blocks, 2, padded d): dweight and dbias of each block of rows; null: neither is wanted
  int64_t d, padded_d, rows;
  int64_t block_rows;   // a multiple of kChunkRows
  bool rms, want_dbias;
  bool far;             // the tensors do not fit the caches: fetch ahead (within them that costs a third)
  Type z_type, dy_type;
};

// Parameter gradients are summed over chunks of rows, the chunks of a block one after the other, and the blocks pairwise. How
// many rows make a block depends on their number alone, so that the sums never depend on the threads: at least sixteen blocks
// to share among threads, of at most four chunks.
constexpr int64_t kChunkRows = 32;
inline int64_t block_rows(int64_t rows) {
  const int64_t chunks = rows / (16 * kChunkRows);
  return kChunkRows * (chunks < 1 ? 1 : chunks > 4 ? 4 : chunks);
}
// Rows of scratch that the forward wants.
constexpr int64_t kScratchRows = 2;
// Partial buffers are padded to the widest vector of any instruction set.
constexpr int64_t kPad = 16;

struct Kernels {
  const char* name;
  // Rows [begin, end); `scratch`, kScratchRows rows of floats, is used where the stream is not stored.
  void (*forward)(const Forward&, int64_t begin, int64_t end, float* scratch);
  // Blocks [begin, end); `scratch` has 2 * padded_d floats, wanted where a block has more than one chunk.
  void (*backward)(const Backward&, int64_t begin, int64_t end, float* scratch);
  // Sums `count` buffers, `stride` floats apart, pairwise into the first; columns [begin, end), multiples of kPad.
  void (*reduce)(float* buffers, int64_t count, int64_t stride, int64_t begin, int64_t end);
  void (*widen)(const void* from, Type, float* to, int64_t n);
  void (*narrow)(const float* from, void* to, Type, int64_t n);
};

// Which combinations of dtypes the kernels were instantiated for; the glue sends the others to the reference.
bool forward_supports(const Forward&);
bool backward_supports(const Backward&);
bool backward_supports_one(const Backward&);

extern const Kernels kernels_default;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

// The best table that this CPU runs; ATEN_CPU_CAPABILITY=default|avx2|avx512 lowers it, as it does for torch.
const Kernels& kernels();

}  // namespace addnorm
