/// \file
/// Batch norm within the contraction: the blocks of a column of tiles exchange their moments.
#pragma once

#include <cutlass/cutlass.h>

#include <cuda/atomic>

#include "batch_norm/statistics.cuh"
#include "gemm/launcher.h"
#include "gemm/sm90/coordinates.cuh"
#include "gemm/sm90/store.cuh"
#include "gemm/unscale.cuh"

namespace cutfuse::gemm::sm90 {

inline constexpr int kConsumers = 2 * cutlass::NumThreadsPerWarpGroup;

/// By the barrier of the mainloop's turns, which nobody waits for between two tiles.
CUTLASS_DEVICE void sync_consumers() { cutlass::arch::NamedBarrier::sync(kConsumers, 0u); }

/// Says that this block's partials are in memory, and waits for those of its column of tiles.
CUTLASS_DEVICE void meet(const MomentExchange& exchange, int tile_column, int thread) {
  sync_consumers();
  if (thread == 0) {
    cuda::atomic_ref<uint32_t, cuda::thread_scope_device> arrivals(exchange.arrivals[tile_column]);
    arrivals.fetch_add(1, cuda::memory_order_release);
    while (arrivals.load(cuda::memory_order_acquire) < exchange.expected) {
    }
  }
  sync_consumers();
}

struct MergedMoments {
  double mean;
  double m2;
};

/// Threads that merge a column's partials together, neighbours.
template <int kTileN>
inline constexpr int kMergers = kConsumers / kTileN;

/// Moments of all rows of `column`, to each of its mergers: sums of the partials' distances from
/// the first one, in fp64. Partials of 1024 rows are in flight at once: with a round trip to L2 for
/// the first one, for eight and for the others a merge took 4.2 us instead of 1.5 (H100).
template <int kTileN>
CUTLASS_DEVICE MergedMoments merge_partials(const EpilogueArguments& arguments, int64_t column,
                                            int merger, const batch_norm::Rows& rows, int row_count,
                                            int64_t columns) {
  constexpr int kThreads = kMergers<kTileN>;
  constexpr int kAtOnce = 16 / kThreads;
  const int partials = static_cast<int>(arguments.partial_count);
  const auto* of_column = reinterpret_cast<const float2*>(arguments.partials) + column;
  double origin = 0.0;
  double sum = 0.0;
  double squares = 0.0;
#pragma unroll 1
  for (int first = merger; first < partials + merger; first += kThreads * kAtOnce) {
    float2 raw[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int p = first + kThreads * i;
      raw[i] = p < partials ? __ldcg(of_column + p * columns) : float2{};
    }
    if (first == merger) origin = __shfl_sync(0xffffffffu, raw[0].x, 0, kThreads);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const double count = batch_norm::rows_of_partial(first + kThreads * i, row_count);
      const double delta = raw[i].x - origin;
      sum = fma(count, delta, sum);
      squares += fma(count * delta, delta, static_cast<double>(raw[i].y));
    }
  }
#pragma unroll
  for (int other = 1; other < kThreads; other *= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, other);
    squares += __shfl_xor_sync(0xffffffffu, squares, other);
  }
  const double m2 = squares - sum * sum * rows.inverse;
  return {origin + sum * rows.inverse, m2 < 0.0 ? 0.0 : m2};  // NaN stays
}

/// v = batch_norm(v), within bounds, with the statistics of all rows, whose partials the blocks
/// have stored. The first block of a column of tiles writes them and updates the running ones.
template <int kTileN>
CUTLASS_DEVICE void normalise_together(float (&v)[AccumulatorCoordinates<kTileN>::kSize],
                                       const AccumulatorCoordinates<kTileN>& at, int thread,
                                       int tile_column, WarpStorage<kTileN>* warps,
                                       const EpilogueArguments& arguments) {
  using Coordinates = AccumulatorCoordinates<kTileN>;
  constexpr int kRows = Coordinates::kRows;
  struct Terms {
    float mean[kTileN], scale[kTileN], shift[kTileN];
  };
  static_assert(sizeof(Terms) <= kConsumers / 32 * sizeof(WarpStorage<kTileN>));
  constexpr int kThreads = kMergers<kTileN>;
  static_assert((kThreads & (kThreads - 1)) == 0 && kTileN % 32 == 0);  // whole warps merge
  auto& terms = *reinterpret_cast<Terms*>(warps);
  const MomentExchange& exchange = arguments.exchange;
  const BatchNormBuffers& bn = exchange.batch_norm;
  const int lane = thread % 32;
  const int first_column = at.column0 - lane % 4 * 2;
  const bool writes = at.row0 - lane / 4 - thread / 32 * 16 == 0;
  const int own = thread / kThreads;
  const int column = min(first_column + own, at.columns - 1);
  // What needs no other block is read and divided before those are waited for.
  int row_count = at.rows;
  keep_here(row_count);
  const batch_norm::Rows rows(row_count);
  const batch_norm::Running old =
      writes ? batch_norm::load_running(column, bn) : batch_norm::Running{};
  const auto affine = [&](const void* values, float otherwise) {
    return values != nullptr ? load_value(values, column, bn.affine_dtype) : otherwise;
  };
  const float weight = affine(bn.weight, 1.f);
  const float bias = affine(bn.bias, 0.f);
  meet(exchange, tile_column, thread);
  if (writes && thread == 0 && tile_column == 0 && bn.num_batches_tracked != nullptr) {
    ++*bn.num_batches_tracked;
  }
  if (own < kTileN) {
    const int merger = thread % kThreads;
    const auto [mean, m2] =
        merge_partials<kTileN>(arguments, column, merger, rows, row_count, at.columns);
    if (merger == 0) {
      terms.mean[own] = static_cast<float>(mean);
      terms.scale[own] = weight * batch_norm::inverse_deviation(m2, rows, bn.eps);
      terms.shift[own] = bias;
      if (writes && first_column + own < at.columns) {
        batch_norm::write_statistics(column, mean, m2, rows, old, bn);
      }
    }
  }
  sync_consumers();
  const auto bounded = [&](float value) {
    return minimum(maximum(value, exchange.lowest), exchange.highest);
  };
  for_each_pair<Coordinates>([&](int j) {
    const int n = 8 * j + lane % 4 * 2;
    const float2 mean = *reinterpret_cast<const float2*>(&terms.mean[n]);
    const float2 scale = *reinterpret_cast<const float2*>(&terms.scale[n]);
    const float2 shift = *reinterpret_cast<const float2*>(&terms.shift[n]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float* pair = &v[(j * kRows + r) * 2];
      pair[0] = bounded(fmaf(pair[0] - mean.x, scale.x, shift.x));
      pair[1] = bounded(fmaf(pair[1] - mean.y, scale.y, shift.y));
    }
  });
  sync_consumers();  // boxes lie where the terms are
}

}  // namespace cutfuse::gemm::sm90
