/// \file
/// Partials of the tails' reductions: batch norm over rows, logsumexp over columns.
#pragma once

#include <cutlass/cutlass.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "device/logsumexp.h"
#include "device/moments.cuh"
#include "gemm/sm90/coordinates.cuh"
#include "gemm/sm90/store.cuh"
#include "gemm/unscale.cuh"

namespace cutfuse::gemm::sm90 {

/// Rows of the matrix among `count` rows from `first` on.
CUTLASS_DEVICE float rows_inside(int first, int rows, int count) {
  return static_cast<float>(min(max(rows - first, 0), count));
}

/// (mean, M2) of each column over the warpgroup's 64 rows -> partials, by `column_stride` and, of
/// 64 rows, `block_stride`.
template <int kTileN>
CUTLASS_DEVICE void store_moments(const float (&v)[AccumulatorCoordinates<kTileN>::kSize],
                                  const AccumulatorCoordinates<kTileN>& at, int thread,
                                  WarpStorage<kTileN>* warps, Moments* partials,
                                  int64_t column_stride, int64_t block_stride) {
  cute::tma_store_wait<0>();  // the boxes lie where the moments go
  __syncwarp();
  const int warp = thread / 32 % 4;
  const int lane = thread % 32;
  const RowMerges merges = row_merges(at.row_inside(0) + at.row_inside(1));
  // A lane's 16 columns at a time: their moments take 32 registers beside the values.
  constexpr int kAtOnce = 8;
  constexpr int kPairs = AccumulatorCoordinates<kTileN>::kColumnPairs;
  CUTLASS_PRAGMA_UNROLL
  for (int first = 0; first < kPairs; first += kAtOnce) {
    const auto& values = *reinterpret_cast<const float (*)[4 * kAtOnce]>(&v[4 * first]);
    Moments columns[kAtOnce / 4];
    reduce_rows<kAtOnce>(values, merges, lane, columns);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAtOnce / 4; ++i) {
      warps[warp].moments[8 * first + reduced_column<kAtOnce>(lane, i)] = columns[i];
    }
  }
  const int first_row = at.row0 - lane / 4 - warp * 16;
  const int first_column = at.column0 - lane % 4 * 2;
  // Divisions that all wait for, unless all rows are inside.
  MergeWeights by01(16.f, 16.f), by23(16.f, 16.f), by(32.f, 32.f);
  if (first_row + 64 > at.rows) {
    const auto inside = [&](int from, int count) {
      return rows_inside(first_row + from, at.rows, count);
    };
    by01 = MergeWeights(inside(0, 16), inside(16, 16));
    by23 = MergeWeights(inside(32, 16), inside(48, 16));
    by = MergeWeights(inside(0, 32), inside(32, 32));
  }
  sync_group(thread);
  for (int n = thread % 128; n < kTileN; n += 128) {
    const Moments merged = merge(merge(warps[0].moments[n], warps[1].moments[n], by01),
                                 merge(warps[2].moments[n], warps[3].moments[n], by23), by);
    if (first_column + n < at.columns && first_row < at.rows) {
      partials[(first_column + n) * column_stride + first_row / 64 * block_stride] = merged;
    }
  }
  sync_group(thread);  // boxes lie where the moments are
}

/// (max, sum of exponentials) of each row over the tile's columns -> partials[row][tile].
template <int kTileN>
CUTLASS_DEVICE void store_row_partials(float (&v)[AccumulatorCoordinates<kTileN>::kSize],
                                       const AccumulatorCoordinates<kTileN>& at, int tile,
                                       int tiles, LogSumExpPartial* partials) {
  using Coordinates = AccumulatorCoordinates<kTileN>;
  if ((tile + 1) * kTileN > at.columns) {
    for_each_pair<Coordinates>([&](int j) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (!at.column_inside(j, i % 2)) v[4 * j + i] = -INFINITY;
      }
    });
  }
  // Both rows at a time and two sums of each, so that one waits for the other.
  float largest[2] = {-INFINITY, -INFINITY};
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Coordinates::kSize; ++i) {
    largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], v[i]);
  }
  float shift[2];
  CUTLASS_PRAGMA_UNROLL
  for (int r = 0; r < 2; ++r) {
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 1));
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 2));
    // An infinite maximum is not subtracted: inf - inf would be NaN.
    shift[r] = isfinite(largest[r]) ? largest[r] : 0.f;
  }
  float sums[2][2] = {};
  for_each_pair<Coordinates>([&](int j) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) sums[i / 2][i % 2] += __expf(v[4 * j + i] - shift[i / 2]);
  });
  CUTLASS_PRAGMA_UNROLL
  for (int r = 0; r < 2; ++r) {
    float sum = sums[r][0] + sums[r][1];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (threadIdx.x % 4 == 0 && at.row_inside(r)) {
      partials[int64_t(at.row0 + 8 * r) * tiles + tile] = {largest[r], sum};
    }
  }
}

}  // namespace cutfuse::gemm::sm90
