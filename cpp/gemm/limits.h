/// \file
/// Sizes at which a promise was measured.
#pragma once

#include <cstdint>

#include "cutfuse/gemm.h"

namespace cutfuse {

/// K of fp32 operands that are split into planes. Two fp16 planes hold 22 to 23 bits of a factor,
/// one holds 11: on a sum of few terms, one of which dominates, that error shows (ieee 3.2e-7 at K
/// = 16 on lognormal data, cuBLAS 1.4e-7; H200).
inline constexpr int64_t kMinK = 64;

/// Whether a problem's operands would be split for shorter sums than that.
inline bool is_shallow(const GemmProblem& problem) {
  return problem.k < kMinK && plane_count(problem) > 0;
}

}  // namespace cutfuse
