/// \file
/// The scale of a packed weight's row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cutfuse::conv {

/// The exponent that puts the row's largest finite magnitude in [2^14, 2^15); 0 for zeros. By a
/// block of kThreads, each with the largest of its own.
template <int kThreads>
__device__ int32_t row_exponent_of(float largest) {
  __shared__ float of_warp[kThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  for (int i = 0; i < kThreads / 32; ++i) largest = fmaxf(largest, of_warp[i]);
  return largest == 0.f ? 0 : 14 - ilogbf(largest);
}

}  // namespace cutfuse::conv
