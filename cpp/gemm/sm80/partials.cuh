/// \file
/// Partials of the tails' reductions, merged over a block's warps in a fixed order.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "device/logsumexp.h"
#include "device/moments.cuh"
#include "device/online_logsumexp.h"
#include "gemm/sm80/shape.h"

namespace cutfuse::gemm::sm80 {

/// How many of the kCount rows from `first` on the matrix has.
template <int kCount>
__device__ __forceinline__ float rows_inside(int first, int rows) {
  return static_cast<float>(min(max(rows - first, 0), kCount));
}

/// Moments of the first `count` of a column's values in a thread: v holds (j * kRows + r) * 2 + c.
template <int kRows>
__device__ __forceinline__ Moments moments_of(const float* column, int count) {
  float sum = 0.f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) sum += r < count ? column[2 * r] : 0.f;
  const float mean = count > 0 ? sum / static_cast<float>(count) : 0.f;
  float m2 = 0.f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float deviation = r < count ? column[2 * r] - mean : 0.f;
    m2 = fmaf(deviation, deviation, m2);
  }
  return {mean, m2};
}

/// (mean, M2) of each column over groups of kPartialRows rows -> partials[column][row / 64].
/// `shared` holds kWarpsM * kTileN moments.
template <class Shape, class Coordinates>
__device__ __forceinline__ void store_moments(const float (&v)[Shape::kSize], const Coordinates& at,
                                              Tile tile, Moments* shared, Moments* partials,
                                              int64_t partial_count) {
  static_assert(kPartialRows % Shape::kWarpM == 0 && Shape::kTileM % kPartialRows == 0);
  constexpr int kRows = Coordinates::kRows;
  constexpr int kAtOnce = 4;  // column pairs
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  int count = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) count += at.row_inside(r) ? 1 : 0;
  const RowMerges merges = row_merges(count);
#pragma unroll
  for (int first = 0; first < Coordinates::kColumnPairs; first += kAtOnce) {
    Moments eight[2 * kAtOnce];
#pragma unroll
    for (int i = 0; i < 2 * kAtOnce; ++i) {
      eight[i] = moments_of<kRows>(&v[(first + i / 2) * kRows * 2 + i % 2], count);
    }
    // Lanes that differ in lane / 4 hold the same columns: each exchange halves what a lane keeps.
    Moments four[kAtOnce];
    exchange<kAtOnce, 16>(eight, merges.by_16, lane, four);
    Moments two[kAtOnce / 2];
    exchange<kAtOnce / 2, 8>(four, merges.by_8, lane, two);
    Moments one[1];
    exchange<kAtOnce / 4, 4>(two, merges.by_4, lane, one);
    const int pair = first + (lane >> 4 & 1) * 2 + (lane >> 3 & 1);
    const int column = warp % Shape::kWarpsN * Shape::kWarpN + 8 * pair + lane % 4 * 2;
    shared[warp / Shape::kWarpsN * Shape::kTileN + column + (lane >> 2 & 1)] = one[0];
  }
  __syncthreads();
  constexpr int kWarpsPerGroup = kPartialRows / Shape::kWarpM;
  constexpr int kGroups = Shape::kTileM / kPartialRows;
  for (int i = thread; i < kGroups * Shape::kTileN; i += Shape::kThreads) {
    const int group = i / Shape::kTileN;
    const int column = i % Shape::kTileN;
    const int first_row = tile.m * Shape::kTileM + group * kPartialRows;
    const Moments* of_warp = shared + group * kWarpsPerGroup * Shape::kTileN + column;
    Moments merged = of_warp[0];
    float merged_rows = rows_inside<Shape::kWarpM>(first_row, at.rows);
#pragma unroll
    for (int w = 1; w < kWarpsPerGroup; ++w) {
      const float other = rows_inside<Shape::kWarpM>(first_row + w * Shape::kWarpM, at.rows);
      merged = merge(merged, of_warp[w * Shape::kTileN], {merged_rows, other});
      merged_rows += other;
    }
    const int64_t result_column = int64_t(tile.n) * Shape::kTileN + column;
    if (result_column < at.columns && first_row < at.rows) {
      partials[result_column * partial_count + first_row / kPartialRows] = merged;
    }
  }
}

/// (max, sum of exponentials) of each row over the tile's columns -> partials[row][tile.n].
/// `shared` holds kWarpsN * kTileM of them.
template <class Shape, class Coordinates>
__device__ __forceinline__ void store_row_partials(const float (&v)[Shape::kSize],
                                                   const Coordinates& at, Tile tile, int tiles_n,
                                                   LogSumExpPartial* shared,
                                                   LogSumExpPartial* partials) {
  constexpr int kRows = Coordinates::kRows;
  constexpr int kColumns = 2 * Coordinates::kColumnPairs;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (at.column_inside(i / 2, i % 2)) {
        largest = fmaxf(largest, v[(i / 2 * kRows + r) * 2 + i % 2]);
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const float shift = shift_of(largest);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (at.column_inside(i / 2, i % 2)) {
        sum += __expf(v[(i / 2 * kRows + r) * 2 + i % 2] - shift);
      }
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (lane % 4 == 0) {
      const int row = warp / Shape::kWarpsN * Shape::kWarpM + 8 * r + lane / 4;
      shared[warp % Shape::kWarpsN * Shape::kTileM + row] = {largest, sum};
    }
  }
  __syncthreads();
  for (int row = thread; row < Shape::kTileM; row += Shape::kThreads) {
    LogSumExpPartial merged = shared[row];
#pragma unroll
    for (int w = 1; w < Shape::kWarpsN; ++w) {
      merged = MergeLogSumExp{}(merged, shared[w * Shape::kTileM + row]);
    }
    const int64_t result_row = int64_t(tile.m) * Shape::kTileM + row;
    if (result_row < at.rows) partials[result_row * tiles_n + tile.n] = merged;
  }
}

}  // namespace cutfuse::gemm::sm80
