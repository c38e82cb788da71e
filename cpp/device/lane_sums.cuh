/// \file
/// Sums over lanes of a warp, of many values at a time.
#pragma once

#include <cuda_runtime.h>

namespace cutfuse {

/// Sums of kCount values over the lanes that differ in bits kApart to kLast of their number, of
/// which each halves what a lane holds: of all five bits lane i gets the sums from i * kCount / 32
/// on, in v[0] and after.
template <int kCount, int kLast = 1, int kApart = 16, int kAll>
__device__ __forceinline__ void sum_lanes(float (&v)[kAll]) {
  constexpr int kHalf = kCount / 2;
  const bool upper = (threadIdx.x & kApart) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float sent = upper ? v[i] : v[i + kHalf];
    const float kept = upper ? v[i + kHalf] : v[i];
    v[i] = kept + __shfl_xor_sync(0xffffffffu, sent, kApart);
  }
  if constexpr (kHalf == 0) v[0] += __shfl_xor_sync(0xffffffffu, v[0], kApart);
  if constexpr (kApart > kLast) sum_lanes<(kHalf > 0 ? kHalf : 1), kLast, kApart / 2>(v);
}

}  // namespace cutfuse
