/// \file
/// Partials of the tails' reductions of layers that are turned over: batch norm over columns of a
/// tile, which are rows of out, logsumexp over its rows.
#pragma once

#include <cutlass/cutlass.h>

#include <type_traits>

#include "device/lane_sums.cuh"
#include "device/moments.cuh"
#include "device/online_logsumexp.h"
#include "gemm/launcher.h"
#include "gemm/sm90/exchange.cuh"
#include "gemm/unscale.cuh"

namespace cutfuse::gemm::sm90 {

/// (mean, M2) of each feature over kPartialRows rows of out at a time -> partials. kSquares: by
/// sums of squares, where batch_norm/finalise.cu measures anew what these are not good enough for.
/// Else about the mean, which is that of distances from the first: of equal values it is their
/// value.
template <bool kSquares, class Coordinates>
CUTLASS_DEVICE void store_turned_moments(const float (&v)[Coordinates::kSize],
                                         const Coordinates& at, int lane,
                                         const EpilogueArguments& arguments) {
  constexpr int kRows = Coordinates::kRows;
  constexpr int kPairs = kPartialRows / 8;
  const auto of_quad = [](float sum) {
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
  };
  CUTLASS_PRAGMA_UNROLL
  for (int part = 0; part < Coordinates::kColumnPairs / kPairs; ++part) {
    const int first = at.column0 - lane % 4 * 2 + part * kPartialRows;
    if (first >= at.columns) break;  // as the whole warp's
    const auto store = [&](auto whole) {
      const int rows = whole() ? kPartialRows : at.columns - first;
      const float inverse = whole() ? 1.f / kPartialRows : 1.f / static_cast<float>(rows);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const auto sum = [&](const auto& add) {
          float all[2] = {};  // one waits for the other
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 2 * kPairs; ++i) {
            const int j = part * kPairs + i / 2;
            if (whole() || at.column_inside(j, i % 2)) {
              all[i % 2] = add(v[(j * kRows + r) * 2 + i % 2], all[i % 2]);
            }
          }
          return of_quad(all[0] + all[1]);
        };
        float mean, m2;
        if constexpr (kSquares) {
          const float values = sum([](float value, float to) { return to + value; });
          const float squares = sum([](float value, float to) { return fmaf(value, value, to); });
          mean = values * inverse;
          m2 = fmaf(-values, mean, squares);
          m2 = m2 < 0.f ? 0.f : m2;  // NaN stays
        } else {
          const float origin =
              __shfl_sync(0xffffffffu, v[(part * kPairs * kRows + r) * 2], lane & ~3);
          mean =
              origin + inverse * sum([&](float value, float to) { return to + (value - origin); });
          m2 = sum([&](float value, float to) {
            const float distance = value - mean;
            return fmaf(distance, distance, to);
          });
        }
        if (lane % 4 == 0 && at.row_inside(r)) {
          arguments.partials[at.row(r) * arguments.partial_count + first / kPartialRows] = {mean,
                                                                                            m2};
        }
      }
    };
    if (first + kPartialRows <= at.columns) {
      store(std::true_type{});
    } else {
      store(std::false_type{});
    }
  }
}

/// (max, sum of exponentials) of each row of out over the tile's features -> partials[row][tile],
/// by all consumers. Where all values of a warp are small nothing is subtracted from them, and 0
/// stands for the largest.
template <int kTileM, int kTileN, class Coordinates>
CUTLASS_DEVICE void store_turned_row_partials(float (&v)[Coordinates::kSize], const Coordinates& at,
                                              int thread, int tile, void* storage,
                                              LogSumExpPartial* partials) {
  constexpr float kSmall = 60.f;  // sums of 2^31 such exponentials are finite
  constexpr int kRows = Coordinates::kRows, kWarps = kConsumers / 32;
  constexpr int kColumns = 2 * Coordinates::kColumnPairs;  // of a thread
  static_assert(kRows == 2 && kTileN == kConsumers);
  struct OfWarps {
    float largest[kWarps][kTileN], sums[kWarps][kTileN];
  };
  auto& all = *static_cast<OfWarps*>(storage);
  const int lane = thread % 32, warp = thread / 32;
  if (!__all_sync(0xffffffffu, at.row_inside(kRows - 1))) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Coordinates::kSize; ++i) {
      if (!at.row_inside(i / 2 % kRows)) v[i] = -INFINITY;
    }
  }
  float most = 0.f;
  CUTLASS_PRAGMA_UNROLL
  for (const float& value : v) most = fmaxf(most, fabsf(value));
  sync_consumers();  // what they stored of the tile before is read
  if (__all_sync(0xffffffffu, most <= kSmall)) {
    for (int n = lane; n < kTileN; n += 32) all.largest[warp][n] = 0.f;
  } else {
    for_each_pair<Coordinates>([&](int j) {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < 2; ++c) {
        float &first = v[4 * j + c], &second = v[4 * j + 2 + c];
        float largest = fmaxf(first, second);
        CUTLASS_PRAGMA_UNROLL
        for (int apart = 4; apart < 32; apart *= 2) {
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
        }
        first -= shift_of(largest);
        second -= shift_of(largest);
        if (lane < 4) all.largest[warp][8 * j + 2 * lane + c] = largest;
      }
    });
  }
  float sums[kColumns];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kColumns; ++i) {
    const int first = i / 2 * 4 + i % 2;
    sums[i] = __expf(v[first]) + __expf(v[first + 2]);
  }
  sum_lanes<kColumns, 4>(sums);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kColumns / 8; i += 2) {
    auto* to = &all.sums[warp][reduced_column<Coordinates::kColumnPairs>(lane, i)];
    *reinterpret_cast<float2*>(to) = {sums[i], sums[i + 1]};
  }
  sync_consumers();
  LogSumExpPartial merged = {all.largest[0][thread], all.sums[0][thread]};
  CUTLASS_PRAGMA_UNROLL
  for (int w = 1; w < kWarps; ++w) {
    merged = MergeLogSumExp{}(merged, {all.largest[w][thread], all.sums[w][thread]});
  }
  // The scheduler pads tiles.
  const int row = at.column0 - lane % 4 * 2 + thread;
  if (row < at.columns && tile * kTileM < at.rows) {
    partials[int64_t(row) * ((at.rows + kTileM - 1) / kTileM) + tile] = merged;
  }
}

}  // namespace cutfuse::gemm::sm90
