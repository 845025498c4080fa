// Made by csrc/generate_arguments.py from the schemas in src/addnorm/ops/schema.py: do not edit.
#pragma once

#include <cstdint>

namespace addnorm {

// Of each operator the indices of its arguments, and a signature with one letter for each: T tensor, t optional tensor, n number,
// o optional number. kAddOptions is the index of the first option before the norm.
struct AddNormArgs {
  enum Index : int {
    kResidual, kBranch, kWeight, kBias, kEps, kRms,
  };
  static constexpr const char* kSignature = "Ttttnn";
};
struct AddNormStreamArgs {
  enum Index : int {
    kResidual, kBranch, kWeight, kBias, kEps, kRms,
  };
  static constexpr const char* kSignature = "TTttnn";
};
struct AddNormTrainArgs {
  enum Index : int {
    kResidual, kBranch, kWeight, kBias, kEps, kRms,
  };
  static constexpr const char* kSignature = "Ttttnn";
};
struct AddNormTrainBackwardArgs {
  enum Index : int {
    kDy, kDz, kZ, kStats, kWeight, kRms, kDresidualDtype, kBranchDtype, kBiasDtype, kGradMask,
  };
  static constexpr const char* kSignature = "TtTTtnnnnn";
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

}  // namespace addnorm
