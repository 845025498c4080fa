// The kernels as the glue sees them: raw pointers, no torch types. One table of functions per instruction set;
// dispatch.cpp picks the table once.
#pragma once

#include <cstdint>

namespace addnorm {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct any;  // a dtype that is known only when the loop runs

enum class Type : int { f32, bf16, f16, f64 };
inline int64_t size_of(Type type) { return type == Type::f64 ? 8 : type == Type::f32 ? 4 : 2; }

enum class Norm : int { layer, rms, none };

// Every pointer below is to contiguous memory, rows of d elements, with no alignment promised. A null pointer means "not there".
// The arithmetic is in float, or in double where `wide` says so; parameters and scales (`real`) have been widened to it.
using real_pointer = const void*;

// What is done on the way into the sum.
struct AddOptions {
  bool plain = true;  // nothing is: all of the rest is at rest
  double residual_factor = 1.0, branch_factor = 1.0;
  real_pointer residual_scale = nullptr;  // (d,), instead of residual_factor
  real_pointer layer_scale = nullptr;     // (d,), instead of branch_factor
  real_pointer row_scale = nullptr;       // (rows,)
  real_pointer branch_bias = nullptr;     // (d,)
  bool dropout = false;
  double keep_scale = 1.0;    // 1 / (1 - p)
  uint64_t threshold = 0;     // floor(p * 2^32): an element is kept iff its word is at least this
  uint64_t seed = 0, offset = 0;
};

struct Forward {
  const void* residual;
  const void* branch;   // null: the norm alone, z is the residual itself
  real_pointer weight;  // never null where there is a norm
  real_pointer bias;
  void* y;
  void* z;              // null: the stream is not stored
  void* stats;          // null, or (rows, 2): mean and rstd of each row; double beside a double stream, else float
  AddOptions add;
  int64_t d;
  double eps;
  Norm norm;
  bool wide;
  bool far;             // the tensors do not fit the caches: fetch ahead
  bool ahead;           // and the next rows too, while these are written
  bool rounds;          // the normalized value is rounded to x_hat_type before the weight
  Type x_hat_type;
  Type residual_type, branch_type, z_type, y_type;
};

// Gradients that are sums over the rows.
enum Sum : int { kWeightSum, kBiasSum, kResidualScaleSum, kLayerScaleSum, kBranchBiasSum, kSums };

struct Backward {
  const void* dy;       // null only without a norm
  const void* dz;       // null: nobody used the stream
  const void* z;
  const void* stats;    // as in Forward
  real_pointer weight;  // never null where there is a norm
  const void* residual; // for the gradient of residual_scale; else null
  const void* branch;   // for those of row_scale and layer_scale; else null
  void* dresidual;      // null: not wanted
  void* dbranch;        // null: not wanted, or the same as dresidual
  void* drow_scale;     // (rows,) real
  void* partials;       // (blocks, sums, padded d) real
  AddOptions add;
  int64_t d, padded_d, rows;
  int64_t block_rows;   // a multiple of kChunkRows
  int64_t sums;         // how many of the sums are wanted
  int place[kSums];     // and where each is among them; -1: it is not
  Norm norm;
  bool wide;
  bool far;             // the tensors do not fit the caches: fetch ahead (within them that costs a third)
  Type z_type, dy_type, residual_type, branch_type, dresidual_type, dbranch_type;
};

// Sums over rows are made over chunks of rows, the chunks of a block one after the other, and the blocks pairwise. How many
// rows make a block depends on their number alone, so that the sums never depend on the threads: at least sixteen blocks to
// share among threads, of at most four chunks.
constexpr int64_t kChunkRows = 32;
inline int64_t block_rows(int64_t rows) {
  const int64_t chunks = rows / (16 * kChunkRows);
  return kChunkRows * (chunks < 1 ? 1 : chunks > 4 ? 4 : chunks);
}
// Partial sums are padded to the widest vector of any instruction set.
constexpr int64_t kPad = 16;

// A row's dropout mask as bits, made before the row is read; with room to read past its end.
inline int64_t mask_bytes(const AddOptions& add, int64_t d) { return add.dropout ? (d + 66) / 64 * 8 + 8 : 0; }
// Scratch that one thread wants: two rows of the stream where it is not stored, and a mask.
inline int64_t scratch_bytes(const Forward& a) {
  const bool stored = a.z != nullptr || a.branch == nullptr;
  return (stored ? 0 : 2 * a.d * size_of(a.z_type)) + mask_bytes(a.add, a.d);
}
// The sums of a chunk where a block has more than one, and the masks of two rows.
inline int64_t scratch_bytes(const Backward& a) {
  const int64_t sums = a.block_rows > kChunkRows ? a.sums * a.padded_d * (a.wide ? 8 : 4) : 0;
  return sums + 2 * mask_bytes(a.add, a.d);
}

struct Loops {
  void (*forward)(const Forward&, int64_t row, int64_t end, void* scratch);
  void (*backward)(const Backward&, int64_t block, int64_t end, void* scratch);
  // Sums `count` buffers, `stride` reals apart, pairwise into the first; columns [begin, end), multiples of kPad.
  void (*reduce)(void* buffers, int64_t count, int64_t stride, int64_t begin, int64_t end);
  // to[i] = from[i] + offset
  void (*widen)(const void* from, Type, void* to, int64_t n, double offset);
  void (*narrow)(const void* from, void* to, Type, int64_t n);
};

struct Kernels {
  const char* name;
  Loops single, twice;  // by the arithmetic: float, double
  const Loops& loops(bool wide) const { return wide ? twice : single; }
};

extern const Kernels kernels_default;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

// The best table that this CPU runs; ATEN_CPU_CAPABILITY=default|avx2|avx512 lowers it, as it does for torch.
const Kernels& kernels();

}  // namespace addnorm
