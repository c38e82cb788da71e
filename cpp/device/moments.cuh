/// \file
/// Running mean and sum of squared deviations, merged without cancellation.
/// Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
/// sample variances", 1979.
#pragma once

#include <cuda_runtime.h>

#include "device/moments.h"

namespace cutfuse {

/// What a merge of moments of n_a and of n_b values multiplies by: apart from the values, so that
/// it is divided once for all columns, and before they are there.
struct MergeWeights {
  float weight;
  float spread;

  __device__ __forceinline__ MergeWeights(float n_a, float n_b)
      : weight(n_a + n_b > 0.f ? n_b / (n_a + n_b) : 0.f), spread(n_a * weight) {}
};

/// Moments of the union of a and b. Moments of no values are zeros.
__device__ __forceinline__ Moments merge(const Moments& a, const Moments& b,
                                         const MergeWeights& by) {
  const float delta = b.mean - a.mean;
  return {fmaf(delta, by.weight, a.mean), a.m2 + b.m2 + delta * delta * by.spread};
}

/// The column, within the tile, of value i that a lane holds after reduce_rows.
template <int kPairs>
__device__ __forceinline__ int reduced_column(int lane, int i) {
  const int pair = (lane >> 4 & 1) * (kPairs / 2) + (lane >> 3 & 1) * (kPairs / 4) +
                   (lane >> 2 & 1) * (kPairs / 8) + i / 2;
  return 8 * pair + (lane % 4) * 2 + i % 2;
}

/// The merges by which lanes that differ in lane / 4 come to all their rows.
struct RowMerges {
  int rows;  ///< how many a lane has
  MergeWeights by_16, by_8, by_4;
};

__device__ __forceinline__ RowMerges row_merges(int rows) {
  const auto partner = [](float count, int bit) {
    return __shfl_xor_sync(0xffffffffu, count, bit);
  };
  const auto one = static_cast<float>(rows);
  const float two = one + partner(one, 16);
  const float four = two + partner(two, 8);
  return {rows, {one, two - one}, {two, four - two}, {four, partner(four, 4)}};
}

/// One exchange of reduce_rows: of kPairs column pairs a lane keeps the half that its bit `kBit`
/// names and merges its partner's values of that half.
template <int kPairs, int kBit>
__device__ __forceinline__ void exchange(Moments (&columns)[2 * kPairs], const MergeWeights& by,
                                         int lane, Moments (&kept)[kPairs]) {
  const bool upper = (lane & kBit) != 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const Moments mine = upper ? columns[kPairs + i] : columns[i];
    const Moments sent = upper ? columns[i] : columns[kPairs + i];
    const Moments received = {__shfl_xor_sync(0xffffffffu, sent.mean, kBit),
                              __shfl_xor_sync(0xffffffffu, sent.m2, kBit)};
    kept[i] = merge(mine, received, by);
  }
}

/// Moments of each column over the 16 rows of a warp's wgmma accumulator tile. v holds
/// (pair * 2 + r) * 2 + c. Each exchange halves the columns a lane holds: 2 * kPairs shuffles of
/// each moment in all instead of 6 * kPairs.
template <int kPairs>
__device__ __forceinline__ void reduce_rows(const float (&v)[4 * kPairs], const RowMerges& merges,
                                            int lane, Moments (&columns)[kPairs / 4]) {
  Moments all[2 * kPairs];
#pragma unroll
  for (int i = 0; i < 2 * kPairs; ++i) {
    const float a = v[i / 2 * 4 + i % 2];
    const float b = v[i / 2 * 4 + 2 + i % 2];
    const float half = 0.5f * (b - a);
    all[i] = merges.rows == 2   ? Moments{a + half, 2.f * half * half}
             : merges.rows == 1 ? Moments{a, 0.f}
                                : Moments{0.f, 0.f};
  }
  Moments half[kPairs];
  exchange<kPairs, 16>(all, merges.by_16, lane, half);
  Moments quarter[kPairs / 2];
  exchange<kPairs / 2, 8>(half, merges.by_8, lane, quarter);
  exchange<kPairs / 4, 4>(quarter, merges.by_4, lane, columns);
}

}  // namespace cutfuse
