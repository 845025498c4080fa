// Attention over sources: the interface between the glue (attend.cpp) and the kernels. Raw pointers, no torch types.
//
//     s_rj = q_r · x_j f_j      f_j = 1 / rms(x_j)      p_r = softmax_j(s_rj)      read_r = Σ_j p_rj x_j, or Σ_j p_rj f_j x_j
#pragma once

#include <cstdint>

#include "rows.h"

namespace addnorm {

// Every pointer is to contiguous memory.
struct Attend {
  const void* const* sources;  // x_j, (rows, d) each
  const Type* types;
  const float* query;          // q, (reads, d)
  float* scores;               // s, (rows, reads, n); the backward reads them
  float* factors;              // f, (rows, n); as above
  float* const* reads;         // (rows, d) each; in the backward their gradients
  void* const* dsources;       // backward: in the dtypes of the sources
  float* dquery;               // backward: a buffer of reads * padded_d for each part
  int64_t rows, d, padded_d, n, read_count, part_rows;
  double eps;
  bool normed_values;          // the values are x_j f_j
  Type type;                   // of all sources, if `same_type`
  bool same_type;

  // Floats of scratch memory of one thread.
  int64_t scratch() const { return (2 * read_count + 1) * n + d + 16; }
};

}  // namespace addnorm
