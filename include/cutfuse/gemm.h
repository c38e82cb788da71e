/// \file
/// The contraction C[M, N] = A[M, K] * B[N, K]^T and the policy that runs it.
#pragma once

#include <cstdint>
#include <string>

#include "cutfuse/device.h"
#include "cutfuse/export.h"
#include "cutfuse/status.h"
#include "cutfuse/types.h"

namespace cutfuse {

/// BLAS names: A is x (rows are samples), B is the weight (rows are output features).
struct GemmProblem {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  Precision precision = Precision::kIeee;  ///< read for fp32 tensors only
  DType dtype = DType::kFloat32;           ///< of A and B; fp16 and bf16 are multiplied as they are
};

/// fp16 planes of each operand: 2 (ieee), 1 (tf32), or 0: the tensors themselves are multiplied.
inline constexpr int32_t plane_count(const GemmProblem& problem) {
  if (problem.dtype != DType::kFloat32) return 0;
  return problem.precision == Precision::kIeee ? 2 : 1;
}

enum class Raster : int32_t { kAlongM = 0, kAlongN = 1 };

/// What A is: a matrix in memory; what a convolution's filter meets in images; of a 1x1 filter, the
/// pixels of fp32 NCHW images as they are, which at ieee are split on their way; or, of a layer
/// that is turned over, the weight, of which an fp32 one is rounded on its way, so that tile_m is
/// of features.
enum class Source : int32_t { kMatrix = 0, kImages = 1, kNchw = 2, kTurned = 3 };

/// Everything that selects and configures one compiled kernel. Two policies that compare equal
/// launch the same code in the same order.
struct GemmPolicy {
  int32_t tile_m = 0;
  int32_t tile_n = 0;
  int32_t cluster_m = 1;
  int32_t promote_k = 64;  ///< K between promotions to the fp32 sum; 0: none, for one plane or none
  Raster raster = Raster::kAlongM;
  int32_t swizzle = 1;  ///< tiles grouped along the minor side before the raster goes on
  int32_t split_k = 1;  ///< parts of K whose sums a second pass adds
  /// Instructions: 90 wgmma and TMA, 80 mma.sync and cp.async. None of tensor cores: 0 of few rows
  /// or columns, by split_k alone, and 1 of small products: tile_m, tile_n, cluster_m and split_k.
  int32_t arch = 90;
  DType element = DType::kFloat16;  ///< in shared memory: fp16, bf16; kNchw: fp32; kTurned: A's
  Source source = Source::kMatrix;  ///< kImages and kNchw: within a ConvPolicy only
  /// Blocks, an SM each and two a cluster, that split the last rows of an fp32 operand while the
  /// first tiles are multiplied; 0: all rows are split before.
  int32_t trailing_blocks = 0;
};

CUTFUSE_API bool operator==(const GemmProblem& a, const GemmProblem& b) noexcept;
CUTFUSE_API bool operator==(const GemmPolicy& a, const GemmPolicy& b) noexcept;
CUTFUSE_API std::string to_string(const GemmProblem& problem);
/// Can be pasted back as code:
/// GemmPolicy{128, 192, 2, 64, Raster::kAlongN, 1, 1, 90, DType::kFloat16}.
CUTFUSE_API std::string to_string(const GemmPolicy& policy);

/// kInvalidValue for a negative size, kInvalidShape for sizes whose products overflow 63 bits.
CUTFUSE_API Status validate(const GemmProblem& problem) noexcept;

/// kNotSupported, in words for `explain`, if no kernel of this build takes the problem on the
/// device (fp32 with K below 64, a size above 2^30 - 64, an architecture without kernels, and at
/// ieee off compute capability 9.0 a K above what was measured).
/// fp16 and bf16 tensors must lie with K contiguous, rows 16 bytes apart or multiples of that.
CUTFUSE_API Status why_not(const GemmProblem& problem, const DeviceProps& device) noexcept;

/// The kernel for a problem that why_not accepts: a pure function, no GPU needed.
CUTFUSE_API GemmPolicy select_policy(const GemmProblem& problem,
                                     const DeviceProps& device) noexcept;

/// Parts of K that fill the device where the result has few tiles; 1 if it has enough, or none as
/// tensor cores are not used.
CUTFUSE_API int32_t select_split_k(const GemmProblem& problem, const GemmPolicy& policy,
                                   const DeviceProps& device) noexcept;

/// kNotSupported unless `policy` is compiled and multiplies what the problem has.
CUTFUSE_API Status check_policy(const GemmProblem& problem, const GemmPolicy& policy) noexcept;

/// The compiled policies of matrices, for tests that force each in turn: returns how many there are
/// and writes the first `capacity` of them.
CUTFUSE_API int32_t compiled_policies(GemmPolicy* policies, int32_t capacity) noexcept;

}  // namespace cutfuse
