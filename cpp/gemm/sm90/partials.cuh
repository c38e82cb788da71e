/// \file
/// Partials of the tails' reductions: batch norm over rows, logsumexp over columns.
#pragma once

#include <cutlass/cutlass.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "device/logsumexp.h"
#include "device/moments.cuh"
#include "gemm/sm80/instructions.cuh"
#include "gemm/sm90/coordinates.cuh"
#include "gemm/sm90/matrices.cuh"
#include "gemm/sm90/store.cuh"
#include "gemm/unscale.cuh"

namespace cutfuse::gemm::sm90 {

/// Rows of the matrix among `count` rows from `first` on.
CUTLASS_DEVICE float rows_inside(int first, int rows, int count) {
  return static_cast<float>(min(max(rows - first, 0), count));
}

/// Merges the moments of the warpgroup's four warps -> partials, by `column_stride` and, of 64
/// rows, `block_stride`.
template <int kTileN>
CUTLASS_DEVICE void merge_moments(const AccumulatorCoordinates<kTileN>& at, int thread,
                                  WarpStorage<kTileN>* warps, Moments* partials,
                                  int64_t column_stride, int64_t block_stride) {
  const int lane = thread % 32;
  const int first_row = at.row0 - lane / 4 - thread / 32 % 4 * 16;
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
}

/// (mean, M2) of each column over a warp's 16 rows, of which some may be outside.
template <int kTileN>
CUTLASS_DEVICE void take_moments(const float (&v)[AccumulatorCoordinates<kTileN>::kSize],
                                 const AccumulatorCoordinates<kTileN>& at, int lane,
                                 WarpStorage<kTileN>& warp) {
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
      warp.moments[8 * first + reduced_column<kAtOnce>(lane, i)] = columns[i];
    }
  }
}

/// The same of bfloat16 results as they lie in boxes, rounded as those of PyTorch, all rows inside.
/// By tensor cores, which sum values, their distances from the first row's value and the squares of
/// these: 3,700 clocks a tile of 256 columns in place of 6,000 (H200). A distance is exact where it
/// is no larger than the value, where alone squares of values themselves would not do.
template <int kTileN>
class BoxMoments {
 public:
  CUTLASS_DEVICE explicit BoxMoments(int lane) : lane_(lane) {}

  /// Of box `number` of the tile, 32 columns, as store_packed_boxes() fills it.
  CUTLASS_DEVICE void take(int number, const uint32_t* box) {
    const int row = lane_ % 8 + lane_ / 16 * 8;
    const uint32_t start = cute::cast_smem_ptr_to_uint(box);
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int quarter = number % 2 * 2 + half;  // of the 64 columns that the warp's lanes divide
      uint32_t v[4];  // columns lane / 4 and 8 more, rows lane % 4 * 2 and 8 more
      load_transposed(start + swizzled(row, 8 * half + lane_ / 8 % 2 * 4) * 4, v);
      __nv_bfloat162 first[2];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        first[i] = __low2bfloat162(pair(__shfl_sync(0xffffffffu, v[i], lane_ / 4 * 4)));
      }
      uint32_t d[4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) d[i] = word(__hsub2(pair(v[i]), first[i % 2]));
      constexpr uint32_t kOnes[2] = {0x3f803f80, 0x3f803f80};
      float sum[4], distances[4];
      sm80::multiply_add<DType::kBFloat16, false>(sum, v, kOnes);
      sm80::multiply_add<DType::kBFloat16, false>(distances, d, kOnes);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        // Of the products of all columns the squares are on the diagonal.
        const uint32_t own[2] = {d[i], d[i + 2]};
        float products[4];
        sm80::multiply_add<DType::kBFloat16, false>(products, d, own);
        const float square = lane_ / 4 % 2 != 0 ? products[2 * i + 1] : products[2 * i];
        const float spread = __shfl_sync(0xffffffffu, square, lane_ / 4 * 4 + lane_ / 8);
        if (lane_ % 4 == quarter) {
          sum_[i] = sum[2 * i];
          distances_[i] = distances[2 * i];
          spread_[i] = spread;
        }
      }
    }
    if (number % 2 == 0) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float m2 = fmaf(distances_[i] * (-1.f / 16), distances_[i], spread_[i]);
      columns_[number / 2][i] = {sum_[i] * (1.f / 16), m2 < 0.f ? 0.f : m2};  // NaN stays
    }
  }

  CUTLASS_DEVICE void put(WarpStorage<kTileN>& warp) const {
    CUTLASS_PRAGMA_UNROLL
    for (int chunk = 0; chunk < kTileN / 64; ++chunk) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        warp.moments[64 * chunk + lane_ % 4 * 16 + lane_ / 4 + 8 * i] = columns_[chunk][i];
      }
    }
  }

 private:
  int lane_;
  float sum_[2], distances_[2], spread_[2];
  Moments columns_[kTileN / 64][2];

  CUTLASS_DEVICE static __nv_bfloat162 pair(uint32_t word) {
    return *reinterpret_cast<const __nv_bfloat162*>(&word);
  }
  CUTLASS_DEVICE static uint32_t word(__nv_bfloat162 pair) {
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

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
