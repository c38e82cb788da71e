/// \file
/// Partials of the tails' reductions: batch norm over rows, logsumexp over columns.
#pragma once

#include <cutlass/cutlass.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "device/logsumexp.h"
#include "device/moments.cuh"
#include "gemm/sm90/coordinates.cuh"
#include "gemm/sm90/store.cuh"
#include "program/executor.cuh"

namespace cutfuse::gemm::sm90 {

/// Rows of the matrix among `count` rows from `first` on.
CUTLASS_DEVICE float rows_inside(int first, int rows, int count) {
  return static_cast<float>(min(max(rows - first, 0), count));
}

/// (mean, M2) of each column over the warpgroup's 64 rows -> partials, by `column_stride` and, of
/// 64 rows, `block_stride`.
/// kApart as of for_each_chunk.
template <bool kApart, int kTileN>
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
  executor::for_each_chunk<kApart, kPairs / kAtOnce>([&](int chunk) {
    const int first = chunk * kAtOnce;
    const auto& values = *reinterpret_cast<const float (*)[4 * kAtOnce]>(&v[4 * first]);
    Moments columns[kAtOnce / 4];
    reduce_rows<kAtOnce>(values, merges, lane, columns);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAtOnce / 4; ++i) {
      warps[warp].moments[8 * first + reduced_column<kAtOnce>(lane, i)] = columns[i];
    }
  });
  const int first_row = at.row0 - lane / 4 - warp * 16;
  const int first_column = at.column0 - (lane % 4) * 2;
  const float rows01 = rows_inside(first_row, at.rows, 32);
  const float rows23 = rows_inside(first_row + 32, at.rows, 32);
  const MergeWeights by01(rows_inside(first_row, at.rows, 16),
                          rows_inside(first_row + 16, at.rows, 16));
  const MergeWeights by23(rows_inside(first_row + 32, at.rows, 16),
                          rows_inside(first_row + 48, at.rows, 16));
  const MergeWeights by(rows01, rows23);
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
CUTLASS_DEVICE void store_row_partials(const float (&v)[AccumulatorCoordinates<kTileN>::kSize],
                                       const AccumulatorCoordinates<kTileN>& at, int tile,
                                       int tiles, LogSumExpPartial* partials) {
  constexpr int kAtOnce = 8;
  constexpr int kChunks = AccumulatorCoordinates<kTileN>::kColumnPairs / kAtOnce;
  CUTLASS_PRAGMA_UNROLL
  for (int r = 0; r < 2; ++r) {
    const auto for_each_value = [&](const auto& body) {
      executor::for_each_chunk<(kTileN > 192), kChunks>([&](int chunk) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2 * kAtOnce; ++i) {
          const int j = chunk * kAtOnce + i / 2;
          if (at.column_inside(j, i % 2)) body(v[(j * 2 + r) * 2 + i % 2]);
        }
      });
    };
    float largest = -INFINITY;
    for_each_value([&](float value) { largest = fmaxf(largest, value); });
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    // An infinite maximum is not subtracted: inf - inf would be NaN.
    const float shift = isfinite(largest) ? largest : 0.f;
    float sum = 0.f;
    for_each_value([&](float value) { sum += __expf(value - shift); });
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (threadIdx.x % 4 == 0 && at.row_inside(r)) {
      partials[int64_t(at.row0 + 8 * r) * tiles + tile] = {largest, sum};
    }
  }
}

}  // namespace cutfuse::gemm::sm90
