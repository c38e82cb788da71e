/// \file
/// Partials of the tails' reductions: batch norm over rows, logsumexp over columns.
#pragma once

#include <cutlass/cutlass.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "device/logsumexp.h"
#include "device/moments.cuh"
#include "gemm/sm80/instructions.cuh"
#include "gemm/sm90/coordinates.cuh"
#include "gemm/sm90/store.cuh"
#include "gemm/unscale.cuh"

namespace cutfuse::gemm::sm90 {

/// Rows of the matrix among `count` rows from `first` on.
CUTLASS_DEVICE float rows_inside(int first, int rows, int count) {
  return static_cast<float>(min(max(rows - first, 0), count));
}

/// (mean, M2) of each column over the warpgroup's 64 rows -> partials, by `column_stride` and, of
/// 64 rows, `block_stride`: from those over each warp's 16, which are in `warps`.
template <int kTileN>
CUTLASS_DEVICE void merge_moments(const AccumulatorCoordinates<kTileN>& at, int thread,
                                  WarpStorage<kTileN>* warps, Moments* partials,
                                  int64_t column_stride, int64_t block_stride) {
  const int first_row = at.row0 - thread % 32 / 4 - thread / 32 % 4 * 16;
  const int first_column = at.column0 - thread % 4 * 2;
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

/// As merge_moments(), of the accumulators.
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
  merge_moments(at, thread, warps, partials, column_stride, block_stride);
}

/// Stores 16-bit values in boxes, and their moments, as merge_moments() has them. Those are taken
/// from the boxes by the tensor cores: eight columns and ones, times the columns. From accumulators
/// 16384x4096x4096 in bf16 took 1.5 % more, 8192x2048x2048 5 % (H200). Squares are of the values
/// themselves: where a deviation is small beside the mean, batch_norm/finalise.cu measures anew.
template <int kTileN, DType kDType>
CUTLASS_DEVICE void store_boxes_with_moments(float (&v)[AccumulatorCoordinates<kTileN>::kSize],
                                             const AccumulatorCoordinates<kTileN>& at, int thread,
                                             const CUtensorMap* map, WarpStorage<kTileN>* warps,
                                             Moments* partials, int64_t partial_count) {
  int lane = thread % 32;
  auto& storage = warps[thread / 32 % 4];
  const int left = at.rows - (at.row0 - lane / 4);  // rows of the warp that are inside
  const int count = min(max(left, 0), 16);
  const float inverse = count > 0 ? 1.f / static_cast<float>(count) : 0.f;
  // A lane's pairs of rows, of both halves.
  uint32_t inside[2];
  CUTLASS_PRAGMA_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int rows = left - 8 * half - lane % 4 * 2;
    inside[half] = rows >= 2 ? 0xffffffffu : rows == 1 ? 0xffffu : 0u;
  }
  constexpr uint32_t kOnes = kDType == DType::kFloat16 ? 0x3c003c00u : 0x3f803f80u;
  Moments moments[kTileN / 8];  // of column lane / 4 of each eight
  keep_here(lane);
  CUTLASS_PRAGMA_UNROLL
  for (int number = 0; number < kTileN / 32; ++number) {
    const auto fill = [&](uint32_t* box) {
      fill_packed_box(v, number, lane, box,
                      [](float a, float b) { return pack_pair(a, b, kDType); });
    };
    send_box<kTileN>(number, lane, map, at.column0 + number * 32, at.row0, 0, storage, fill);
    // Those of the box before are found by now, in registers that values leave: not with all
    // others' at the end.
    CUTLASS_PRAGMA_UNROLL
    for (int i = 4 * number - 4; i < 4 * number; ++i) {
      if (i >= 0) asm volatile("" : "+f"(moments[i].mean), "+f"(moments[i].m2));
    }
    const auto* box = storage.boxes[number % WarpStorage<kTileN>::kBoxes];
    const uint32_t start = cute::cast_smem_ptr_to_uint(box);
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
      load_transposed(start + swizzled(lane % 16, 8 * half + lane / 16 * 4) * 4, words);
      CUTLASS_PRAGMA_UNROLL
      for (int eight = 0; eight < 2; ++eight) {
        const uint32_t b[2] = {words[2 * eight] & inside[0], words[2 * eight + 1] & inside[1]};
        const uint32_t a[4] = {b[0], kOnes, b[1], kOnes};
        float d[4];
        sm80::multiply_add<kDType, false>(d, a, b);
        const bool even = lane / 4 % 2 == 0;
        const float sum = even ? d[2] : d[3], squares = even ? d[0] : d[1];
        const float mean = sum * inverse;
        const float m2 = fmaf(-sum, mean, squares);
        moments[4 * number + 2 * half + eight] = {mean, m2 < 0.f ? 0.f : m2};  // NaN stays
      }
    }
  }
  cute::tma_store_wait<0>();  // the boxes lie where the moments go
  __syncwarp();
  if (lane % 4 == lane / 8) {  // what it has found is of that column
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTileN / 8; ++i) storage.moments[8 * i + lane / 4] = moments[i];
  }
  merge_moments(at, thread, warps, partials, partial_count, 1);
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
