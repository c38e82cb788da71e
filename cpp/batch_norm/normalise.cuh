/// \file
/// The affine step of batch norm on a fragment.
#pragma once

#include <cuda_runtime.h>

#include "batch_norm/normalise.h"

namespace cutfuse {

/// Applies `step` to a fragment; Coordinates as in program/executor.cuh.
template <class Coordinates>
__device__ __forceinline__ void execute(const Normalise& step, float (&v)[Coordinates::kSize],
                                        const Coordinates& at) {
  const int64_t first = at.column(0, 0);
  int last = static_cast<int>(at.column(Coordinates::kColumnPairs - 1, 1) - first);
  // Opaque, so that no column's index is hoisted out of a caller's loop into a register of its own.
  asm volatile("" : "+r"(last));
#pragma unroll
  for (int j = 0; j < Coordinates::kColumnPairs; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int64_t column = first + min(j * Coordinates::kColumnPairStride + c, last);
      const float mean = __ldg(step.mean + column);
      float scale = step.invstd != nullptr
                        ? __ldg(step.invstd + column)
                        : 1.f / sqrtf(__ldg(step.var + column) + step.eps);
      if (step.weight != nullptr) {
        scale *= __ldg(step.weight + column);
      }
      const float shift = step.bias != nullptr ? __ldg(step.bias + column) : 0.f;
#pragma unroll
      for (int r = 0; r < Coordinates::kRows; ++r) {
        const int i = (j * Coordinates::kRows + r) * 2 + c;
        v[i] = fmaf(v[i] - mean, scale, shift);
      }
    }
  }
}

}  // namespace cutfuse
