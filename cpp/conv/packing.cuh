/// \file
/// What kernels share that pack a row of a weight: a block each, and few elements for a thread.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cutfuse/types.h"

namespace cutfuse::conv {

/// What a thread has seen of a row.
struct Magnitudes {
  bool finite = true;   // all of them
  float largest = 0.f;  // finite one

  __device__ __forceinline__ void add(float value) {
    const float magnitude = fabsf(value);
    if (isfinite(magnitude)) {
      largest = fmaxf(largest, magnitude);
    } else {
      finite = false;
    }
  }
};

/// The exponent that puts the row's largest finite magnitude in [2^14, 2^15); 0 for zeros. By all
/// of a block, whole warps, each thread with the largest of its own.
__device__ inline int32_t row_exponent_of(float largest) {
  __shared__ float of_warp[32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  for (int i = 0; i < static_cast<int>(blockDim.x / 32); ++i) largest = fmaxf(largest, of_warp[i]);
  return largest == 0.f ? 0 : 14 - ilogbf(largest);
}

/// Asks for data[index] to be brought into the L2 cache, perhaps while it is still being written.
__device__ __forceinline__ void prefetch_value(const void* data, int64_t index, DType dtype) {
  const auto* at = static_cast<const char*>(data) + index * (dtype == DType::kFloat32 ? 4 : 2);
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

inline constexpr int kMostThreads = 1024;

/// Threads of a block for a row of `elements`: one each, unless there are few or more. Batch norm's
/// conv2d of 4 images in eval at ieee took 20.8 us, with 128 for a few 21.4, with 1024 21.0 (H200).
inline unsigned row_threads(int64_t elements) {
  constexpr int64_t kLeast = 512;
  const int64_t whole = (elements + 31) / 32 * 32;
  return static_cast<unsigned>(std::clamp<int64_t>(whole, kLeast, kMostThreads));
}

}  // namespace cutfuse::conv
