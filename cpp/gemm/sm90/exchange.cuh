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

CUTLASS_DEVICE uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

/// By one thread: whether all blocks of the launch run at the same time, as all of them will say. A
/// block that is not running yet may be waiting for one that is, of another launch.
CUTLASS_DEVICE bool agree(const MomentExchange& exchange) {
  constexpr uint64_t kPatience = 100'000;  // ns, after a tile's products
  using Atomic = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;
  const Atomic running(exchange.gathering[0]), agreed(exchange.gathering[1]);
  const auto vote = [&](Gathering vote) {
    auto open = static_cast<uint32_t>(Gathering::kOpen);
    agreed.compare_exchange_strong(open, static_cast<uint32_t>(vote), cuda::memory_order_acq_rel);
  };
  uint64_t start = 0;
  while (true) {
    const auto now = static_cast<Gathering>(agreed.load(cuda::memory_order_acquire));
    if (now != Gathering::kOpen) return now == Gathering::kTogether;
    const uint64_t time = now_ns();
    if (start == 0) start = time;
    if (running.load(cuda::memory_order_acquire) == exchange.blocks) {
      vote(Gathering::kTogether);
    } else if (time - start > kPatience) {
      vote(Gathering::kApart);
    }
  }
}

/// Says that this block's partials are in memory, and waits for those of its column of tiles;
/// `together` is in shared memory. Returns false if blocks do not wait for each other.
CUTLASS_DEVICE bool meet(const MomentExchange& exchange, int tile_column, int thread,
                         int* together) {
  sync_consumers();
  if (thread == 0) {
    cuda::atomic_ref<uint32_t, cuda::thread_scope_device> arrivals(exchange.arrivals[tile_column]);
    arrivals.fetch_add(1, cuda::memory_order_release);
    const bool waits = exchange.gathering == nullptr || agree(exchange);
    while (waits && arrivals.load(cuda::memory_order_acquire) < exchange.expected) {
    }
    *together = waits;
  }
  sync_consumers();
  return *together != 0;
}

/// Threads that merge a column's partials together, neighbours.
template <int kTileN>
inline constexpr int kMergers = kConsumers / kTileN;

/// v = batch_norm(v), within bounds, with the statistics of all rows, whose partials the blocks
/// have stored. The first block of a column of tiles writes them and updates the running ones.
/// Where blocks do not wait for each other v stays as it is.
template <int kTileN>
CUTLASS_DEVICE void normalise_together(float (&v)[AccumulatorCoordinates<kTileN>::kSize],
                                       const AccumulatorCoordinates<kTileN>& at, int thread,
                                       int tile_column, WarpStorage<kTileN>* warps,
                                       const EpilogueArguments& arguments) {
  using Coordinates = AccumulatorCoordinates<kTileN>;
  constexpr int kRows = Coordinates::kRows;
  struct Terms {
    float mean[kTileN], scale[kTileN], shift[kTileN];
    int together;
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
  if (!meet(exchange, tile_column, thread, &terms.together)) {
    sync_consumers();  // boxes lie where that was read
    return;
  }
  if (writes && thread == 0 && tile_column == 0 && bn.num_batches_tracked != nullptr) {
    ++*bn.num_batches_tracked;
  }
  if (own < kTileN) {
    const int merger = thread % kThreads;
    const auto [mean, m2] = batch_norm::merge_partials<kThreads>(
        arguments.partials + column, at.columns, static_cast<int>(arguments.partial_count),
        kPartialRows, merger, rows, row_count);
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
