/// \file
/// Splitting an operand's last rows while a contraction multiplies the first ones, on SMs for which
/// its waves have no tile: four of 132 at 16384x4096x4096, where they have the time for all of x
/// but the first 1024 rows, and at 1024x8192x8192, where it is a fifth of the weight's. By idle
/// warps of the contraction's own blocks it was between 1.5 % faster and 2 % slower (H200).
#pragma once

#include <cstdint>

#include "cutfuse/status.h"
#include "split/split.h"

namespace cutfuse {

/// The rows from `first_row` on, and where it is counted how many of each tile have been split.
struct TrailingRows {
  int32_t first_row = 0;        ///< a multiple of tile_rows, or all rows
  int32_t tile_rows = 0;        ///< a multiple of kTrailingBundle
  uint32_t* arrived = nullptr;  ///< [tiles], zeros
};

/// Rows that are counted together.
inline constexpr int32_t kTrailingBundle = 8;

/// Whether the kernel takes rows of x: next to each other in memory, aligned, 8192 elements at
/// most.
bool can_trail(const ConstMatrix& x, int64_t k) noexcept;

/// Splits the rows, fewer than 2^30, as split() does, by `blocks` blocks that have an SM each, in
/// order. The next kernel in the stream may run as soon as those before this one have ended: it
/// reads a tile once its count says that all of its rows are there.
Status split_trailing(const SplitJob& job, int64_t k, int32_t count, const TrailingRows& rows,
                      int32_t blocks, void* stream) noexcept;

}  // namespace cutfuse
