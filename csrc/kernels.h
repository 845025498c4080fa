// The interface between the glue and the kernels: raw pointers, no torch types. Each instruction set has one table of functions;
// dispatch.cpp selects the table once.
#pragma once

#include <cstdint>

#include "attend.h"
#include "rows.h"
#include "streams.h"

namespace addnorm {

// Every pointer below is to contiguous memory: rows of d elements, of any alignment. A null pointer means that there is no such
// tensor. The arithmetic is in float, or in double if `use_float64`; parameters and scales (`real`) have been upcast to it.
using real_pointer = const void*;

// The options of the add.
struct AddOptions {
  bool is_default = true;  // every option has its default
  double residual_factor = 1.0, branch_factor = 1.0;
  real_pointer residual_scale = nullptr;  // (d,), replaces residual_factor
  real_pointer layer_scale = nullptr;     // (d,), replaces branch_factor
  real_pointer row_scale = nullptr;       // (rows,)
  real_pointer branch_bias = nullptr;     // (d,)
  bool dropout = false;
  double keep_scale = 1.0;    // 1 / (1 - p)
  uint64_t threshold = 0;     // floor(p * 2^32): an element is kept iff its word is at least the threshold
  uint64_t seed = 0, offset = 0;
};

struct Forward {
  const void* residual;
  const void* branch;   // null: the norm alone, z is residual
  real_pointer weight;  // never null if there is a norm
  real_pointer bias;
  void* y;
  void* z;              // null: z is not stored
  void* stats;          // null, or (rows, 2): mean and rstd of each row; double if z is double, else float
  AddOptions add;
  int64_t d;
  double eps;
  Norm norm;
  bool use_float64;
  bool prefetch;        // the tensors do not fit the caches
  bool prefetch_rows;   // prefetch also the next rows while these are written
  bool stream;          // y and z go past the caches, if the loops can
  bool short_sums;      // the row's values and y have 16 bits: sums in float are accurate enough
  bool round_x_hat;     // round the normalized value to x_hat_type before the weight
  Type x_hat_type;
  Type residual_type, branch_type, z_type, y_type;
};

// Gradients that are sums over the rows.
enum Sum : int { kWeightSum, kBiasSum, kResidualScaleSum, kLayerScaleSum, kBranchBiasSum, kSums };

struct Backward {
  const void* dy;       // null only without a norm
  const void* dz;       // null: z was not used
  const void* z;
  const void* stats;    // as in Forward
  real_pointer weight;  // never null if there is a norm
  const void* residual; // for the gradient of residual_scale; else null
  const void* branch;   // for the gradients of row_scale and layer_scale; else null
  void* dresidual;      // null: not requested
  void* dbranch;        // null: not requested, or equal to dresidual
  void* drow_scale;     // (rows,) real
  void* partials;       // (blocks, sums, padded d) real
  AddOptions add;
  int64_t d, padded_d, rows;
  int64_t block_rows;   // a multiple of kChunkRows
  int64_t sums;         // number of requested sums
  int place[kSums];     // index of each among the requested ones; -1: not requested
  Norm norm;
  bool use_float64;
  bool prefetch;        // the tensors do not fit the caches (within them prefetching costs a third)
  bool stream;          // the gradient goes past the caches, if the loop can
  Type z_type, dy_type, residual_type, branch_type, dresidual_type, dbranch_type;
};

// Rows are accumulated in chunks, the chunks of a block one after the other, and the blocks pairwise. The rows of a block depend
// only on the number of rows, so the sums do not depend on the threads: at least sixteen blocks for the threads, of at most four
// chunks.
constexpr int64_t kChunkRows = 32;
inline int64_t block_rows(int64_t rows) {
  const int64_t chunks = rows / (16 * kChunkRows);
  return kChunkRows * (chunks < 1 ? 1 : chunks > 4 ? 4 : chunks);
}
// Partial sums are padded to the widest vector of any instruction set.
constexpr int64_t kPad = 16;

// Whether the row's sums may be in float: results of 16 bits do not show their error.
inline bool has_short_sums(Type row, Type y) { return size_of(row) == 2 && size_of(y) == 2; }

// Bytes of a row's dropout mask, one bit an element, with space to read past its end.
inline int64_t mask_bytes(const AddOptions& add, int64_t d) { return add.dropout ? (d + 66) / 64 * 8 + 8 : 0; }
// Bytes of two rows of z where it is not stored, or not kept in the caches.
inline int64_t row_bytes(const Forward& a) {
  const bool stored = (a.z != nullptr && !a.stream) || a.branch == nullptr;
  return stored ? 0 : 2 * a.d * size_of(a.z_type);
}
// Scratch bytes of one thread: those rows, a mask, and the parameters in the order of pairs of bfloat16.
inline int64_t scratch_bytes(const Forward& a) {
  return row_bytes(a) + mask_bytes(a.add, a.d) + (a.short_sums && a.z_type == Type::bf16 ? 2 * a.d * 4 : 0);
}
// Scratch bytes of one thread: the sums of a chunk where a block has several, and the masks of two rows.
inline int64_t scratch_bytes(const Backward& a) {
  const int64_t sums = a.block_rows > kChunkRows ? a.sums * a.padded_d * (a.use_float64 ? 8 : 4) : 0;
  return sums + 2 * mask_bytes(a.add, a.d);
}

struct Loops {
  void (*forward)(const Forward&, int64_t row, int64_t end, void* scratch);
  void (*backward)(const Backward&, int64_t block, int64_t end, void* scratch);
  // Sum `count` buffers, `stride` reals from each other, pairwise into the first; columns [begin, end), multiples of kPad.
  void (*reduce)(void* buffers, int64_t count, int64_t stride, int64_t begin, int64_t end);
  // to[i] = from[i] + offset
  void (*widen)(const void* from, Type, void* to, int64_t n, double offset);
  void (*narrow)(const void* from, void* to, Type, int64_t n);
  // The boundary of n streams; null in float64.
  void (*streams_forward)(const StreamsForward&, int64_t token, int64_t end, void* scratch);
  void (*streams_backward)(const StreamsBackward&, int64_t part, void* scratch);
  // Attention over sources; null in float64.
  void (*attend_forward)(const Attend&, int64_t token, int64_t end, float* scratch);
  void (*attend_backward)(const Attend&, int64_t part, float* scratch);
  uint32_t norms;  // the codes of the norms that `forward` and `backward` compute, as bits
};

struct Kernels {
  const char* name;
  Loops float32, float64;  // by the dtype of the arithmetic
  const Loops& loops(bool use_float64) const { return use_float64 ? float64 : float32; }
};

extern const Kernels kernels_default;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

// The best table for this CPU; ATEN_CPU_CAPABILITY=default|avx2|avx512 lowers it, as it does for torch.
const Kernels& kernels();

// Whether the kernels compute the norm with this code, or with that of Norm::none the add alone.
inline bool is_norm(int64_t code) { return code >= 0 && code < 32 && (kernels().float32.norms >> code & 1) != 0; }

// Whether the Python package has registered the reference; false in a process that loads only this library.
extern bool has_reference;

}  // namespace addnorm
