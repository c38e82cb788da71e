/// \file
/// Accumulators to memory from registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cutfuse/types.h"
#include "device/values.cuh"

namespace cutfuse::gemm {

/// `pairs`: out allows stores of two values at even columns.
template <class Coordinates>
__device__ __forceinline__ void store_directly(const float (&v)[Coordinates::kSize],
                                               const Coordinates& at, const Matrix& out,
                                               bool pairs) {
  constexpr int kRows = Coordinates::kRows;
  constexpr int kPairs = Coordinates::kColumnPairs;
  const bool whole = pairs && at.column_inside(kPairs - 1, 1);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (!at.row_inside(r)) {
      continue;
    }
    const int64_t row = int64_t(at.row0 + 8 * r) * out.row_stride + at.column0;
    if (whole && out.dtype == DType::kFloat32) {
      float* to = static_cast<float*>(out.data) + row;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int i = (j * kRows + r) * 2;
        *reinterpret_cast<float2*>(to + 8 * j) = {v[i], v[i + 1]};
      }
    } else if (whole) {
      uint16_t* to = static_cast<uint16_t*>(out.data) + row;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int i = (j * kRows + r) * 2;
        *reinterpret_cast<uint32_t*>(to + 8 * j) = pack_pair(v[i], v[i + 1], out.dtype);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 2 * kPairs; ++k) {
        if (at.column_inside(k / 2, k % 2)) {
          store_value(out.data, row + 8 * (k / 2) + k % 2, v[(k / 2 * kRows + r) * 2 + k % 2],
                      out.dtype);
        }
      }
    }
  }
}

}  // namespace cutfuse::gemm
