/// \file
/// Running mean and sum of squared deviations, merged without cancellation.
/// Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
/// sample variances", 1979.
#pragma once

#include <cuda_runtime.h>

#include "device/moments.h"

namespace cutfuse {

/// Moments of the union of a (n_a values) and b (n_b values). Moments of no values are zeros.
__device__ __forceinline__ Moments merge(const Moments& a, float n_a, const Moments& b, float n_b) {
  const float n = n_a + n_b;
  const float weight = n > 0.f ? n_b / n : 0.f;
  const float delta = b.mean - a.mean;
  return {fmaf(delta, weight, a.mean), a.m2 + b.m2 + delta * delta * (n_a * weight)};
}

/// The column, within the tile, of value i that a lane holds after reduce_rows.
template <int kPairs>
__device__ __forceinline__ int reduced_column(int lane, int i) {
  const int pair = (lane >> 4 & 1) * (kPairs / 2) + (lane >> 3 & 1) * (kPairs / 4) +
                   (lane >> 2 & 1) * (kPairs / 8) + i / 2;
  return 8 * pair + (lane % 4) * 2 + i % 2;
}

/// One exchange of reduce_rows: of kPairs column pairs a lane keeps the half that its bit `kBit`
/// names and merges its partner's values of that half.
template <int kPairs, int kBit>
__device__ __forceinline__ void exchange(Moments (&columns)[2 * kPairs], float& count, int lane,
                                         Moments (&kept)[kPairs]) {
  const bool upper = (lane & kBit) != 0;
  const float other = __shfl_xor_sync(0xffffffffu, count, kBit);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const Moments mine = upper ? columns[kPairs + i] : columns[i];
    const Moments sent = upper ? columns[i] : columns[kPairs + i];
    const Moments received = {__shfl_xor_sync(0xffffffffu, sent.mean, kBit),
                              __shfl_xor_sync(0xffffffffu, sent.m2, kBit)};
    kept[i] = merge(mine, count, received, other);
  }
  count += other;
}

/// Moments of each column over the 16 rows of a warp's wgmma accumulator tile. v holds
/// (pair * 2 + r) * 2 + c; `count` (0, 1 or 2) of this lane's two rows exist. Each exchange halves
/// the columns a lane holds: 2 * kPairs shuffles of each moment in all instead of 6 * kPairs.
template <int kPairs>
__device__ __forceinline__ void reduce_rows(const float (&v)[4 * kPairs], int count, int lane,
                                            Moments (&columns)[kPairs / 4]) {
  Moments all[2 * kPairs];
#pragma unroll
  for (int i = 0; i < 2 * kPairs; ++i) {
    const float a = v[i / 2 * 4 + i % 2];
    const float b = v[i / 2 * 4 + 2 + i % 2];
    const float half = 0.5f * (b - a);
    all[i] = count == 2   ? Moments{a + half, 2.f * half * half}
             : count == 1 ? Moments{a, 0.f}
                          : Moments{0.f, 0.f};
  }
  float n = static_cast<float>(count);
  Moments half[kPairs];
  exchange<kPairs, 16>(all, n, lane, half);
  Moments quarter[kPairs / 2];
  exchange<kPairs / 2, 8>(half, n, lane, quarter);
  exchange<kPairs / 4, 4>(quarter, n, lane, columns);
}

}  // namespace cutfuse
