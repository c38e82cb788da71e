/// \file
/// Products of a matrix and one of few rows: bound by the memory that holds the large one, so they
/// are summed in fp32 without tensor cores, without planes and at every tier alike.
#pragma once

#include <cstdint>

#include "core/status.h"
#include "cutfuse/types.h"

namespace cutfuse::skinny {

/// M or N of at most this counts as few rows; of more, tensor cores win.
inline constexpr int64_t kMostRows = 16;

/// Parts of K, and about how many steps of a block follow each other then.
struct Shares {
  int32_t parts;
  double steps;
};

/// Those that fill `sm_count` SMs.
Shares select_parts(int64_t m, int64_t n, int64_t k, int32_t sm_count) noexcept;

/// out[s][m][n] = sum over part s of K of x[m][k] * weight[n][k], for s < parts; x and weight have
/// one dtype: fp32 of any strides, or fp16 or bf16 whose rows lie at multiples of 16 bytes. `out`
/// is fp32, its slices `slice_stride` elements apart. Deterministic. Launches on `stream` of the
/// current device; M, N < 2^30.
Status multiply(const ConstMatrix& x, const ConstMatrix& weight, int64_t m, int64_t n, int64_t k,
                int32_t parts, const Matrix& out, int64_t slice_stride, void* stream) noexcept;

}  // namespace cutfuse::skinny
