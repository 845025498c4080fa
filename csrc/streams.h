// The boundary of n streams: the interface between the glue (streams.cpp) and the kernels. Raw pointers, no torch types.
//
//     X' = A X + b w      (c', b', A') = coefficients(φ R(vec X'))      r = N(c X')
#pragma once

#include <cstdint>

#include "rows.h"

namespace addnorm {

// How the next coefficients are computed; the numbers of `kind` in src/addnorm/ops/streams/schema.py.
enum class Kind : int { given, manifold, independent, gates, hyper };

constexpr int kKinds = 5;
constexpr int kMaxStreams = 16, kMaxScales = 3;

// Every pointer is to contiguous memory. Coefficients and parameters are float.
struct Streams {
  const void* streams;       // X, (rows, n, d)
  const void* branch;        // w, (rows, d); null: nothing is written and X' is X
  const float* mix;          // A, (rows, n, n) or (n, n); null: the identity
  const float* inject;       // b, (rows, n) or (n,)
  const float* collapse;     // c, (rows, n), (n,) or (rows, n, d); null: the computed one, or no read
  int64_t mix_stride, inject_stride, collapse_stride;  // from row to row; 0: one for all rows
  bool per_feature;          // c is (rows, n, d)
  bool collapse_is_computed; // backward: `collapse` is what the forward computed
  const float* project;      // φ, (logits, n d); hyper: (n + 2, d), the weights times those of the norm; may be packed
  bool packed;               // φ and its gradient are in chunks: (chunks, n, logits, features), or (chunks, n + 2, features)
  const float* project_sums; // hyper: the sum of each row of φ
  const float* scale;        // α, as many as the kind has groups
  const float* base;         // β, (logits,); hyper: constants of c, b and A, then n + 2 that are added to the products
  const float* weight;       // of the norm of the read; never null if there is a norm
  const float* bias;
  int64_t rows, n, d, logits;
  int iterations;
  double eps, project_eps;
  float gate_eps, magnitude;
  Kind kind;
  Norm norm;
  bool reads;
  Type streams_type, branch_type, new_type, read_type;  // new_type: of X'

  // Rows of φ that a stream is multiplied with.
  int64_t project_rows() const { return kind == Kind::hyper ? n + 2 : logits; }
  // Where φ has the features from `from` on of stream j, and the distance of its rows, for a chunk of `count` features.
  int64_t project_at(int64_t from, int64_t j, int64_t count) const {
    const bool hyper = kind == Kind::hyper;
    if (packed) return from * project_rows() * (hyper ? 1 : n) + (hyper ? 0 : j * project_rows() * count);
    return (hyper ? 0 : j * d) + from;
  }
  int64_t project_stride(int64_t count) const { return packed ? count : kind == Kind::hyper ? d : n * d; }
  int64_t stats() const { return 2 + (kind == Kind::given ? 0 : kind == Kind::hyper ? 2 * n : 1); }
};

struct StreamsForward : Streams {
  void* new_streams;  // X'; not written without a branch
  void* read;         // r
  float *new_collapse, *new_mix, *new_inject;  // (rows, n), (rows, n, n), (rows, n); null where the kind has none
  float* saved_logits;  // (rows, logits)
  float* saved_stats;   // (rows, stats()): mean and rstd of the read; 1 / rms of vec X', or mean and rstd of each stream
};

struct StreamsBackward : Streams {
  const void *dnew, *dread;                     // null: no gradient
  const float *dcollapse, *dmix, *dinject;      // of the computed coefficients
  const float *saved_logits, *saved_stats;
  void *dstreams, *dbranch;                     // null: not requested
  float *dmix_rows, *dinject_rows, *dcollapse_rows;  // a gradient for each row; null: not requested
  float *dproject, *dweight, *dbias;            // a buffer for each part; null: not requested. That of φ is overwritten, not added to.
  double *dscale, *dbase;                       // of α and β: kMaxScales and base_size() numbers for each part; null: not requested
  int64_t part_rows;                            // rows of a part
  int64_t project_size, padded_d;               // floats of a buffer of dproject, of dweight and dbias

  int64_t base_size() const { return logits + (kind == Kind::hyper ? n + 2 : 0); }
};

// Rows are computed in blocks, so that φ is read once a block. Sums over rows are accumulated by parts, whose number depends only on the
// number of rows: never by thread.
constexpr int64_t kStreamsBlock = 64;
inline int64_t streams_part_rows(int64_t rows) {
  const int64_t parts = rows < 256 ? (rows + 15) / 16 < 2 ? 1 : 2 : rows / 128 < 16 ? rows / 128 : 16;
  const int64_t each = (rows + parts - 1) / parts;
  return (each + 15) / 16 * 16;
}

// Features of a chunk: what a group of tokens needs of all streams fits the L1 cache.
constexpr int64_t kStreamsGroup = 4;
inline int64_t streams_chunk(int64_t n) { return n >= 16 ? 64 : 1024 / n / 16 * 16; }

// Memory of one thread, taken piece by piece; without memory it only counts.
struct Arena {
  char* at = nullptr;
  int64_t bytes = 0;

  template <class T>
  T* take(int64_t count) {
    const int64_t begin = bytes;
    bytes += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return at != nullptr ? reinterpret_cast<T*>(at + begin) : nullptr;
  }
};

struct ForwardScratch {
  float *x, *logits, *shift, *rows;
  double* moments;

  ForwardScratch(const StreamsForward& a, Arena& arena)
      : x(arena.take<float>(kStreamsGroup * a.n * streams_chunk(a.n))),
        logits(arena.take<float>(kStreamsBlock * a.logits)),
        shift(arena.take<float>(kStreamsBlock * a.n)),
        rows(arena.take<float>(2 * (a.d + 16))),
        moments(arena.take<double>(kStreamsBlock * a.n * 2)) {}
};

struct BackwardScratch {
  float *x, *gradient, *du, *row, *normed, *dcollapse, *factors, *offsets, *lanes;
  float *dmix, *dinject;  // vectors of 16 lanes

  BackwardScratch(const StreamsBackward& a, Arena& arena)
      : x(arena.take<float>(kStreamsGroup * a.n * streams_chunk(a.n))),
        gradient(arena.take<float>(kStreamsGroup * a.n * streams_chunk(a.n))),
        du(arena.take<float>(a.dread != nullptr ? kStreamsBlock * (a.d + 16) : 0)),
        row(arena.take<float>(a.n * (a.d + 16))),
        normed(arena.take<float>(a.d + 16)),
        dcollapse(arena.take<float>(kStreamsBlock * a.n)),
        factors(arena.take<float>(kStreamsBlock * (a.logits + 1))),
        offsets(arena.take<float>(kStreamsBlock * a.n * 3)),
        // logits, gates and their gradients; with Sinkhorn's iterates and divisors
        lanes(arena.take<float>(16 * (4 * a.logits + 2 * a.n * (a.n + 2) +
                                      (a.kind == Kind::manifold ? 2 * a.iterations * a.n * (a.n + 1) : 0)))),
        dmix(arena.take<float>(kStreamsBlock * a.n * a.n * 16)),
        dinject(arena.take<float>(kStreamsBlock * a.n * 16)) {}
};

template <class Call>
int64_t streams_scratch(const Call& a);
template <>
inline int64_t streams_scratch(const StreamsForward& a) {
  Arena arena;
  (void)ForwardScratch(a, arena);
  return arena.bytes;
}
template <>
inline int64_t streams_scratch(const StreamsBackward& a) {
  Arena arena;
  (void)BackwardScratch(a, arena);
  return arena.bytes;
}

}  // namespace addnorm
