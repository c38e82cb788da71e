/// \file
/// Partials of the tails' reductions of layers that are turned over: batch norm over columns of a
/// tile, which are rows of out, logsumexp over its rows.
#pragma once

#include <cutlass/cutlass.h>

#include "device/lane_sums.cuh"
#include "device/moments.cuh"
#include "device/online_logsumexp.h"
#include "gemm/launcher.h"
#include "gemm/sm90/exchange.cuh"
#include "gemm/sm90/turned.cuh"
#include "gemm/unscale.cuh"

namespace cutfuse::gemm::sm90 {

/// (mean, M2) of a thread's two features over the tile's rows of out. kDistances: of distances from
/// the first, which of equal values are zeros; q - s^2 / n of n rows then loses no more than n
/// units in the last place, as the first is one of them. Else of the values themselves, where
/// batch_norm/finalise.cu measures anew what these are not good enough for.
template <bool kDistances, class Coordinates>
class TurnedMoments {
 public:
  static constexpr int kTileRows = 8 * Coordinates::kColumnPairs;

  CUTLASS_DEVICE TurnedMoments(const float (&v)[Coordinates::kSize], int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows && kDistances; ++r) {
      origins_[r] = __shfl_sync(0xffffffffu, v[2 * r], lane & ~3);
    }
  }

  /// Column pairs first to last, of them those inside.
  template <class Inside>
  CUTLASS_DEVICE void add(const float (&v)[Coordinates::kSize], int first, int last,
                          const Inside& inside) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 4 * first; i < 4 * last; ++i) {
      const int j = i / 4, r = i / 2 % 2, c = i % 2, to = j % 2 * 2 + c;
      if (!inside(j, c)) continue;
      const float distance = kDistances ? v[i] - origins_[r] : v[i];
      sums_[r][to] += distance;
      squares_[r][to] = fmaf(distance, distance, squares_[r][to]);
    }
  }

  /// -> partials, once all of the tile's have been added.
  CUTLASS_DEVICE void store(const Coordinates& at, int lane,
                            const EpilogueArguments& arguments) const {
    const int first = at.column0 - lane % 4 * 2;
    const float rows = static_cast<float>(min(at.columns - first, kTileRows));
    Moments moments[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float sum = of_all(sums_[r]);
      const float mean = sum / rows;
      const float m2 = fmaf(-sum, mean, of_all(squares_[r]));
      moments[r] = {origins_[r] + mean, m2 < 0.f ? 0.f : m2};  // NaN stays
    }
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (lane % 4 == r && at.row_inside(r)) {
        arguments.partials[at.row(r) * arguments.partial_count + first / kTileRows] = moments[r];
      }
    }
  }

 private:
  static constexpr int kRows = Coordinates::kRows;
  static_assert(kRows == 2);
  static constexpr int kSums = 4;  // one waits for the other

  float origins_[kRows] = {};
  float sums_[kRows][kSums] = {};
  float squares_[kRows][kSums] = {};

  CUTLASS_DEVICE static float of_all(const float (&of)[kSums]) {
    float sum = of[0] + of[1] + (of[2] + of[3]);
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
  }
};

/// Those of whatever tile; none of one that the scheduler pads.
template <bool kDistances, class Coordinates>
CUTLASS_DEVICE void store_turned_moments(const float (&v)[Coordinates::kSize],
                                         const Coordinates& at, int lane,
                                         const EpilogueArguments& arguments) {
  TurnedMoments<kDistances, Coordinates> moments(v, lane);
  const int first = at.column0 - lane % 4 * 2;
  if (first >= at.columns) return;
  if (first + moments.kTileRows <= at.columns) {
    moments.add(v, 0, Coordinates::kColumnPairs, [](int, int) { return true; });
  } else {
    moments.add(v, 0, Coordinates::kColumnPairs,
                [&](int j, int c) { return at.column_inside(j, c); });
  }
  moments.store(at, lane, arguments);
}

/// As store_turned_boxes(), with moments of the values themselves: a whole tile's are summed while
/// its values leave.
template <DType kDType, int kTileN, class Coordinates>
CUTLASS_DEVICE void store_turned_boxes_with_moments(const float (&v)[Coordinates::kSize],
                                                    const Coordinates& at, int thread,
                                                    const CUtensorMap* map,
                                                    TurnedStorage<kTileN>* warps,
                                                    const EpilogueArguments& arguments) {
  const int lane = thread % 32;
  if (at.column0 - lane % 4 * 2 + kTileN > at.columns) {
    store_turned_moments<false>(v, at, lane, arguments);
    store_turned_boxes<kDType>(v, at, thread, map, warps, [](int, int) {});
    return;
  }
  TurnedMoments<false, Coordinates> moments(v, lane);
  store_turned_boxes<kDType>(v, at, thread, map, warps, [&](int first, int last) {
    moments.add(v, first, last, [](int, int) { return true; });
  });
  moments.store(at, lane, arguments);
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
