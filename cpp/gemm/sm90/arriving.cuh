/// \file
/// Waiting for rows that another kernel is still splitting.
#pragma once

#include <cutlass/cutlass.h>
#include <cute/arch/copy_sm90_desc.hpp>

#include <cuda/atomic>

#include "core/launch.h"
#include "gemm/launcher.h"

namespace cutfuse::gemm::sm90 {

/// By a warp: before the copy engine reads the rows of tile (tile_m, tile_n), and before it reads
/// their words itself. Without rows that arrive, waits for the kernels before this one.
template <int kTileM, int kTileN>
CUTLASS_DEVICE void wait_for_rows(const ArrivingRows& rows, int tile_m, int tile_n, int lane) {
  if (rows.arrived == nullptr) {
    wait_for_previous_kernels();
    return;
  }
  const int tile_rows = rows.of_a ? kTileM : kTileN;
  // Tiles that fill up a cluster read the last row.
  const int tile = min(rows.of_a ? tile_m : tile_n, (rows.rows - 1) / tile_rows);
  if (tile < rows.first_tile) return;
  if (lane == 0) {
    const auto expected = static_cast<uint32_t>(min(tile_rows, rows.rows - tile * tile_rows));
    cuda::atomic_ref<uint32_t, cuda::thread_scope_device> arrived(rows.arrived[tile]);
    while (arrived.load(cuda::memory_order_acquire) < expected) {
    }
  }
  __syncwarp();
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace cutfuse::gemm::sm90
