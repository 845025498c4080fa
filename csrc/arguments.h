// Made by csrc/generate_arguments.py from the schemas in src/addnorm/ops/schema.py: do not edit.
#pragma once

#include <cstdint>

namespace addnorm {

// Of each operator the indices of its arguments, and a signature with one letter for each: T tensor, t optional tensor, n number,
// o optional number, l list of tensors. kAddOptions is the index of the first option before the norm.
struct AddNormArgs {
  enum Index : int {
    kResidual, kBranch, kWeight, kBias, kEps, kNorm,
  };
  static constexpr const char* kSignature = "Ttttnn";
};
struct AddNormStreamArgs {
  enum Index : int {
    kResidual, kBranch, kWeight, kBias, kEps, kNorm,
  };
  static constexpr const char* kSignature = "TTttnn";
};
struct AddNormForwardArgs {
  enum Index : int {
    kResidual, kBranch, kWeight, kBias, kEps, kNorm, kResidualFactor, kResidualScale, kRowScale, kBranchFactor,
    kLayerScale, kBranchBias, kDropoutP, kSeed, kOffset, kWeightOffset, kCasting, kResidualDtype, kOutDtype, kOutputs,
  };
  static constexpr int kAddOptions = kResidualFactor;
  static constexpr const char* kSignature = "Ttttnnnttnttntnnnoon";
};
struct AddNormBackwardArgs {
  enum Index : int {
    kDy, kDz, kZ, kStats, kWeight, kNorm, kDresidualDtype, kBranchDtype, kBiasDtype, kGradMask, kWeightOffset,
    kResidual, kBranch, kResidualFactor, kResidualScale, kRowScale, kBranchFactor, kLayerScale, kBranchBias,
    kDropoutP, kSeed, kOffset,
  };
  static constexpr int kAddOptions = kResidualFactor;
  static constexpr const char* kSignature = "ttTTtnnnnnnttnttnttntn";
};
struct AddNormOutArgs {
  enum Index : int {
    kResidual, kBranch, kWeight, kBias, kEps, kNorm, kY, kZ, kResidualFactor, kResidualScale, kRowScale,
    kBranchFactor, kLayerScale, kBranchBias, kDropoutP, kSeed, kOffset, kWeightOffset, kCasting,
  };
  static constexpr int kAddOptions = kResidualFactor;
  static constexpr const char* kSignature = "Ttttnnttnttnttntnnn";
};
struct AddNormStreamsArgs {
  enum Index : int {
    kStreams, kBranch, kMix, kInject, kCollapse, kProject, kScale, kBase, kWeight, kBias, kEps, kNorm, kKind,
    kIterations, kGateEps, kProjectEps, kMagnitude, kStreamsDtype, kOutDtype,
  };
  static constexpr const char* kSignature = "Ttttttttttnnnnnnnoo";
};
struct AddNormStreamsBackwardArgs {
  enum Index : int {
    kStreams, kBranch, kMix, kInject, kCollapse, kProject, kScale, kBase, kWeight, kBias, kEps, kNorm, kKind,
    kIterations, kGateEps, kProjectEps, kMagnitude, kStreamsDtype, kOutDtype, kLogits, kStats, kComputedCollapse,
    kDnew, kDread, kDcollapse, kDmix, kDinject, kGradMask,
  };
  static constexpr const char* kSignature = "TtttttttttnnnnnnnooTTTtttttn";
};
struct AttendSourcesArgs {
  enum Index : int {
    kSources, kQuery, kWeight, kEps, kNormedValues,
  };
  static constexpr const char* kSignature = "lTtnn";
};
struct AttendSourcesBackwardArgs {
  enum Index : int {
    kSources, kQuery, kWeight, kScores, kFactors, kGrads, kNormedValues,
  };
  static constexpr const char* kSignature = "lTtTTln";
};

// Indices of the options before the norm, from the first of them.
struct AddOptionArgs {
  enum Index : int {
    kResidualFactor, kResidualScale, kRowScale, kBranchFactor, kLayerScale, kBranchBias, kDropoutP, kSeed, kOffset,
  };
};

// Bits of grad_mask, in the order of the backward operators' outputs.
enum GradBit : int64_t {
  kResidualGrad = 1,
  kBranchGrad = 2,
  kWeightGrad = 4,
  kBiasGrad = 8,
  kResidualScaleGrad = 16,
  kRowScaleGrad = 32,
  kLayerScaleGrad = 64,
  kBranchBiasGrad = 128,
};
constexpr int kGrads = 8;
constexpr int64_t kAllGrads = (int64_t{1} << kGrads) - 1;

// Values of `casting`.
enum Casting : int64_t {
  kFloat32Casting = 0,
  kLlamaCasting = 1,
  kT5Casting = 2,
};
constexpr int64_t kCastings = 3;

// The operators' schemas, for a process without the Python package.
constexpr const char* kSchemas[] = {
  "add_norm(Tensor residual, Tensor? branch, Tensor? weight, Tensor? bias, float eps, int norm) -> Tensor",
  "add_norm.kernel(Tensor residual, Tensor? branch, Tensor? weight, Tensor? bias, float eps, int norm) -> Tensor",
  "add_norm_stream(Tensor residual, Tensor branch, Tensor? weight, Tensor? bias, float eps, int norm) -> (Tensor y, Tensor z)",
  "add_norm_stream.kernel(Tensor residual, Tensor branch, Tensor? weight, Tensor? bias, float eps, int norm) -> (Tensor y, Tensor z)",
  "add_norm_forward(Tensor residual, Tensor? branch, Tensor? weight, Tensor? bias, float eps, int norm, float residual_factor=1.0, Tensor? residual_scale=None, Tensor? row_scale=None, float branch_factor=1.0, Tensor? layer_scale=None, Tensor? branch_bias=None, float dropout_p=0.0, Tensor? seed=None, SymInt offset=0, float weight_offset=0.0, int casting=0, ScalarType? residual_dtype=None, ScalarType? out_dtype=None, int outputs=3) -> (Tensor y, Tensor z, Tensor stats)",
  "add_norm_forward.kernel(Tensor residual, Tensor? branch, Tensor? weight, Tensor? bias, float eps, int norm, float residual_factor=1.0, Tensor? residual_scale=None, Tensor? row_scale=None, float branch_factor=1.0, Tensor? layer_scale=None, Tensor? branch_bias=None, float dropout_p=0.0, Tensor? seed=None, SymInt offset=0, float weight_offset=0.0, int casting=0, ScalarType? residual_dtype=None, ScalarType? out_dtype=None, int outputs=3) -> (Tensor y, Tensor z, Tensor stats)",
  "add_norm_backward(Tensor? dy, Tensor? dz, Tensor z, Tensor stats, Tensor? weight, int norm, ScalarType dresidual_dtype, ScalarType branch_dtype, ScalarType bias_dtype, int grad_mask, float weight_offset=0.0, Tensor? residual=None, Tensor? branch=None, float residual_factor=1.0, Tensor? residual_scale=None, Tensor? row_scale=None, float branch_factor=1.0, Tensor? layer_scale=None, Tensor? branch_bias=None, float dropout_p=0.0, Tensor? seed=None, SymInt offset=0) -> (Tensor residual, Tensor branch, Tensor weight, Tensor bias, Tensor residual_scale, Tensor row_scale, Tensor layer_scale, Tensor branch_bias)",
  "add_norm_out(Tensor residual, Tensor? branch, Tensor? weight, Tensor? bias, float eps, int norm, Tensor(a!)? y, Tensor(b!)? z, float residual_factor=1.0, Tensor? residual_scale=None, Tensor? row_scale=None, float branch_factor=1.0, Tensor? layer_scale=None, Tensor? branch_bias=None, float dropout_p=0.0, Tensor? seed=None, SymInt offset=0, float weight_offset=0.0, int casting=0) -> ()",
  "add_norm_streams(Tensor streams, Tensor? branch, Tensor? mix, Tensor? inject, Tensor? collapse, Tensor? project, Tensor? scale, Tensor? base, Tensor? weight, Tensor? bias, float eps, int norm, int kind, int iterations, float gate_eps, float project_eps, float magnitude, ScalarType? streams_dtype, ScalarType? out_dtype) -> (Tensor new_streams, Tensor read, Tensor new_collapse, Tensor new_mix, Tensor new_inject, Tensor logits, Tensor stats)",
  "add_norm_streams_backward(Tensor streams, Tensor? branch, Tensor? mix, Tensor? inject, Tensor? collapse, Tensor? project, Tensor? scale, Tensor? base, Tensor? weight, Tensor? bias, float eps, int norm, int kind, int iterations, float gate_eps, float project_eps, float magnitude, ScalarType? streams_dtype, ScalarType? out_dtype, Tensor logits, Tensor stats, Tensor computed_collapse, Tensor? dnew, Tensor? dread, Tensor? dcollapse, Tensor? dmix, Tensor? dinject, int grad_mask) -> (Tensor grad_streams, Tensor grad_branch, Tensor grad_mix, Tensor grad_inject, Tensor grad_collapse, Tensor grad_project, Tensor grad_weight, Tensor grad_bias, Tensor grad_scale, Tensor grad_base)",
  "attend_sources(Tensor[] sources, Tensor query, Tensor? weight, float eps, bool normed_values) -> Tensor[]",
  "attend_sources_backward(Tensor[] sources, Tensor query, Tensor? weight, Tensor scores, Tensor factors, Tensor[] grads, bool normed_values) -> Tensor[]",
};

}  // namespace addnorm
