/// \file
/// Results of rows and columns whose inputs are not finite.
#pragma once

#include <cuda_runtime.h>

#include "cutfuse/split.h"
#include "device/values.cuh"
#include "gemm/launcher.h"

namespace cutfuse::gemm {

/// The sum of just those terms of a[row] * b[column] that have a non-finite factor, by one warp.
/// Coordinates of other than matrices have their own.
template <class Coordinates>
__device__ __forceinline__ float nonfinite_terms(const Coordinates&,
                                                 const EpilogueArguments& arguments, int64_t row,
                                                 int64_t column, int lane) {
  const ConstMatrix& a = arguments.a;
  const ConstMatrix& b = arguments.b;
  float sum = 0.f;
  for (int64_t k = lane; k < arguments.k; k += 32) {
    const float x = load_value(a.data, row * a.row_stride + k * a.col_stride, a.dtype);
    const float w = load_value(b.data, column * b.row_stride + k * b.col_stride, b.dtype);
    if (!isfinite(x) || !isfinite(w)) {
      sum += x * w;
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  return sum;
}

/// Values whose row of A or row of B holds a non-finite element become the sum of just the terms
/// with such a factor: that is what decides between NaN, +inf and -inf. Rare, so it may be slow.
template <class Coordinates>
__device__ __forceinline__ void repair(float (&v)[Coordinates::kSize], const Coordinates& at,
                                       const EpilogueArguments& arguments, int lane) {
  constexpr int kRows = Coordinates::kRows;
  const int first_row = at.row0 - lane / 4;
  const int first_column = at.column0 - (lane % 4) * 2;
  for (int r = 0; r < 8 * kRows && first_row + r < at.rows; ++r) {
    const int row = first_row + r;
    const bool row_bad =
        arguments.a_words != nullptr && row_has_nonfinite(__ldg(arguments.a_words + row));
    for (int n = 0; n < 8 * Coordinates::kColumnPairs && first_column + n < at.columns; ++n) {
      const int column = first_column + n;
      if (!row_bad && !row_has_nonfinite(__ldg(arguments.b_words + column))) {
        continue;
      }
      const float value = nonfinite_terms(at, arguments, row, column, lane);
      const bool owner = lane == (r % 8) * 4 + (n % 8) / 2;
      const int index = (n / 8 * kRows + r / 8) * 2 + n % 2;
#pragma unroll
      for (int i = 0; i < Coordinates::kSize; ++i) {
        v[i] = owner && i == index ? value : v[i];
      }
    }
  }
}

}  // namespace cutfuse::gemm
